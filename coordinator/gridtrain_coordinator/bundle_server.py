"""The run's bundle, for workers that ask for it: block by block, each asker so often and no more.

Decides who gets which block.  Never opens the bundle, and executes nothing.

    worker  StatusRequest --> status: bundle {digest, bytes, script}
            BundleAsk(digest, 0), (digest, 1), ... --> BundleBlock | Refused
"""

from __future__ import annotations

from collections import deque
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.messages import MAX_BLOCK_BYTES
from gridtrain.tools.bundle import Bundle
from gridtrain_coordinator.run import events as io

MAX_BUNDLES_PER_WORKER, RATE_WINDOW_S = 4, 600.0
"""So many whole bundles a worker may fetch within that time: an ask is small, and its answer is not."""

MAX_ASKERS = 1000


class BundleServer:
    """What is served; None: nothing is."""

    def __init__(self, bundle: Bundle | None = None) -> None:
        archive = bundle.archive if bundle is not None else b""
        self._bundle = bundle
        self._blocks = [archive[i : i + MAX_BLOCK_BYTES] for i in range(0, len(archive), MAX_BLOCK_BYTES)]
        self._asked: dict[m.PeerId, deque[float]] = {}

    def answer(self, peer: m.PeerId, ask: m.BundleRequest, now_s: float) -> list[io.Effect]:
        """To be sent; at most `WHOLE` times as much as there is within `WHOLE_IN_S`."""
        if self._bundle is None:
            return [
                io.Send(
                    peer, m.Refused("no-bundle", "this run has no bundle", "ask its owner for the script")
                )
            ]
        if self._digest() != ask.digest or ask.index >= len(self._blocks):
            text = f"the run's bundle is {self._bundle.digest}, and not what was asked for"
            return [
                io.Send(peer, m.Refused("bundle", text, "start the worker again: it asks for the new one"))
            ]
        if not self._is_allowed(peer, now_s):
            text = f"{MAX_BUNDLES_PER_WORKER} whole bundles in {RATE_WINDOW_S / 60:.0f} minutes are enough"
            return [io.Send(peer, m.Refused("too-often", text, "try again later"))]
        block = m.BundleBlock(ask.digest, ask.index, len(self._blocks), self._blocks[ask.index])
        return [io.Send(peer, block)]

    def status(self) -> dict[str, Any] | None:
        """For the status."""
        if self._bundle is None:
            return None
        size = len(self._bundle.archive)
        return {"digest": self._bundle.digest, "bytes": size, "script": self._bundle.run.script}

    def _digest(self) -> bytes:
        assert self._bundle is not None
        return bytes.fromhex(self._bundle.digest.removeprefix("sha256:"))

    def _is_allowed(self, peer: m.PeerId, now_s: float) -> bool:
        """Counts this ask."""
        asked = self._asked.pop(peer, None) or deque(maxlen=MAX_BUNDLES_PER_WORKER * len(self._blocks))
        while asked and asked[0] <= now_s - RATE_WINDOW_S:
            asked.popleft()
        allowed = len(asked) < MAX_BUNDLES_PER_WORKER * len(self._blocks)
        if allowed:
            asked.append(now_s)
        self._asked[peer] = asked  # at the end: the first ones have been quiet for longest
        if len(self._asked) > MAX_ASKERS:
            del self._asked[next(iter(self._asked))]
        return allowed
