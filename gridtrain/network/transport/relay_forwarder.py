"""Being a relay: passing sealed bytes on between two peers that cannot reach each other.

Decides whom to pass on for, and how much may wait.  Never opens what it passes on.

    origin -- Relay(to, sealed) -->  Forwarder: may_relay? connected? room?  -- Relayed(origin, sealed) --> to
           <-- RelayLost(to, reason) -- no                or later: `to` is gone
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gridtrain.core.messages import PeerId, RelayedMessage, RelayFailed
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport

RELAY_BACKLOG_BYTES = 64 * 2**20
"""What a relay holds for one peer; more is refused, and the edges concerned go down."""

REFUSAL_INTERVAL_S = 0.1
MAX_REFUSALS = 64
"""A relay tells one origin of at most so many lost destinations in `REFUSAL_S`, each once."""

RelayPolicy = Callable[[PeerId, PeerId], bool]


def relay_for_nobody(origin: PeerId, to: PeerId) -> bool:
    """A `may_relay` for those who pass on nothing."""
    return False


@dataclass(slots=True)
class _RefusalLog:
    since_s: float = -math.inf
    told: set[PeerId] = field(default_factory=set)


class RelayForwarder:
    """The relay's part: passes sealed bytes on, unopened and bounded."""

    def __init__(self, inner: Transport, may_relay: RelayPolicy) -> None:
        self._inner = inner
        self._may_relay = may_relay
        self._pairs: dict[PeerId, set[PeerId]] = {}  # who exchanged something through us, both ways
        self._refusals: dict[PeerId, _RefusalLog] = {}

    def forward(self, origin: PeerId, to: PeerId, payload: bytes | memoryview, now_s: float) -> None:
        refusal = self._refusal(origin, to, len(payload))
        if not refusal:
            try:
                self._inner.send(to, RelayedMessage(origin, payload))
            except TransportError:
                refusal = "its queue is full"
        if refusal:
            self._refuse(origin, to, refusal, now_s)
        else:
            self._pairs.setdefault(origin, set()).add(to)
            self._pairs.setdefault(to, set()).add(origin)

    def peer_down(self, peer: PeerId) -> None:
        """Its correspondents hear of it at once."""
        self._refusals.pop(peer, None)
        for other in self._pairs.pop(peer, set()):
            self._pairs[other].discard(peer)
            self._send_relay_lost(other, peer, "it is not connected to me any more")

    def _refusal(self, origin: PeerId, to: PeerId, nbytes: int) -> str:
        if origin == to or not self._may_relay(origin, to):
            return "I do not relay between you two"
        if not self._inner.connected(to):
            return "it is not connected to me"
        if self._inner.backlog_bytes(to) + nbytes > RELAY_BACKLOG_BYTES:
            return f"more than {RELAY_BACKLOG_BYTES} bytes wait for it"
        return ""

    def _refuse(self, origin: PeerId, to: PeerId, reason: str, now_s: float) -> None:
        refusals = self._refusals.setdefault(origin, _RefusalLog())
        if now_s >= refusals.since_s + REFUSAL_INTERVAL_S:
            refusals.since_s = now_s
            refusals.told.clear()
        if to not in refusals.told and len(refusals.told) < MAX_REFUSALS:
            refusals.told.add(to)
            self._send_relay_lost(origin, to, reason)

    def _send_relay_lost(self, origin: PeerId, to: PeerId, reason: str) -> None:
        if self._inner.connected(origin):
            with contextlib.suppress(TransportError):  # its queue is full: it notices by itself
                self._inner.send(origin, RelayFailed(to, reason))
