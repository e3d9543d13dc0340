"""Sends the run's bundle to workers block by block, and limits how often each worker may download it.

worker  StatusRequest --> status: bundle {digest, bytes, script, requires}
        BundleRequest(digest, 0), (digest, 1), ... --> BundleBlock | Refused
"""

from __future__ import annotations

from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.messages import MAX_BLOCK_BYTES
from gridtrain.tools.bundle import Bundle
from gridtrain_coordinator.access.request_rate import RequestRate
from gridtrain_coordinator.run import events as ev

MAX_BUNDLES_PER_WORKER, RATE_WINDOW_S = 4, 600.0
"""How often a worker may fetch the bundle within `RATE_WINDOW_S`; limited because each reply is large."""

MAX_ASKERS = 1000


class BundleServer:
    """Serves the run's bundle, if there is one."""

    def __init__(self, bundle: Bundle | None = None) -> None:
        archive = bundle.archive if bundle is not None else b""
        self._bundle = bundle
        self._blocks = [archive[i : i + MAX_BLOCK_BYTES] for i in range(0, len(archive), MAX_BLOCK_BYTES)]
        self._requests = RequestRate(RATE_WINDOW_S, MAX_ASKERS)

    def answer(self, peer: m.PeerId, request: m.BundleRequest, now_s: float) -> list[ev.Effect]:
        """Return the effect that sends the requested block or a refusal."""
        if self._bundle is None:
            remedy = "ask the run's owner for the script"
            return [ev.Send(peer, m.Refused("no-bundle", "this run has no bundle", remedy))]
        digest = bytes.fromhex(self._bundle.digest.removeprefix("sha256:"))
        if digest != request.digest or request.index >= len(self._blocks):
            text = f"the requested block does not belong to the run's bundle, {self._bundle.digest}"
            return [ev.Send(peer, m.Refused("bundle", text, "restart the worker to request this bundle"))]
        if not self._requests.allow(peer, now_s, MAX_BUNDLES_PER_WORKER * len(self._blocks)):
            minutes = f"{RATE_WINDOW_S / 60:.0f} minutes"
            text = f"a worker may fetch the bundle at most {MAX_BUNDLES_PER_WORKER} times within {minutes}"
            return [ev.Send(peer, m.Refused("too-often", text, "try again later"))]
        block = m.BundleBlock(request.digest, request.index, len(self._blocks), self._blocks[request.index])
        return [ev.Send(peer, block)]

    def status(self) -> dict[str, Any] | None:
        """Return the bundle's entry in the status; None if there is no bundle."""
        if self._bundle is None:
            return None
        size, run = len(self._bundle.archive), self._bundle.run
        about = {"script": run.script, "requires": run.requirements}
        return {"digest": self._bundle.digest, "bytes": size, **about}
