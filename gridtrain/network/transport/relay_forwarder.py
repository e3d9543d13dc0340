"""Forwards (or refuses) encrypted packets between peers that cannot connect to each other.

origin -- RelayRequest(to, packet) --> RelayForwarder -- RelayedMessage(origin, packet) --> to
       <-- RelayFailed(to, reason) ---- not permitted, not connected, queue full; or `to` has disconnected
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
"""The maximum number of bytes that a relay queues for one peer.  Further packets are refused, and the relayed
connections to which they belong go down."""

REFUSAL_INTERVAL_S = 0.1
MAX_REFUSALS = 64
"""The maximum number of RelayFailed messages about refused packets that one origin receives in each interval
of `REFUSAL_INTERVAL_S`, at most one for each destination."""

RelayPolicy = Callable[[PeerId, PeerId], bool]


def relay_for_nobody(origin: PeerId, to: PeerId) -> bool:
    """Refuse every pair; this policy is the `may_relay` of a peer that does not relay."""
    return False


@dataclass(slots=True)
class _RefusalLog:
    since_s: float = -math.inf
    reported: set[PeerId] = field(default_factory=set)


class RelayForwarder:
    """Forwards packets between the peers for which `may_relay` permits it."""

    def __init__(self, inner: Transport, may_relay: RelayPolicy) -> None:
        self._inner = inner
        self._may_relay = may_relay
        self._pairs: dict[PeerId, set[PeerId]] = {}  # peers that exchanged packets, in both directions
        self._refusals: dict[PeerId, _RefusalLog] = {}

    def forward(self, origin: PeerId, to: PeerId, payload: bytes | memoryview, now_s: float) -> None:
        refusal = self._find_refusal(origin, to, len(payload))
        if not refusal:
            try:
                self._inner.send(to, RelayedMessage(origin, payload))
            except TransportError:
                refusal = "the queue for the destination is full"
        if refusal:
            self._refuse(origin, to, refusal, now_s)
        else:
            self._pairs.setdefault(origin, set()).add(to)
            self._pairs.setdefault(to, set()).add(origin)

    def peer_down(self, peer: PeerId) -> None:
        """Notify the peers that exchanged packets with `peer` that `peer` has disconnected."""
        self._refusals.pop(peer, None)
        for other in self._pairs.pop(peer, set()):
            self._pairs[other].discard(peer)
            self._send_relay_lost(other, peer, "the destination is no longer connected to this relay")

    def _find_refusal(self, origin: PeerId, to: PeerId, nbytes: int) -> str:
        if origin == to or not self._may_relay(origin, to):
            return "this relay does not permit packets between the two peers"
        if not self._inner.connected(to):
            return "the destination is not connected to this relay"
        if self._inner.backlog_bytes(to) + nbytes > RELAY_BACKLOG_BYTES:
            return f"more than {RELAY_BACKLOG_BYTES} bytes would wait for the destination"
        return ""

    def _refuse(self, origin: PeerId, to: PeerId, reason: str, now_s: float) -> None:
        refusals = self._refusals.setdefault(origin, _RefusalLog())
        if now_s >= refusals.since_s + REFUSAL_INTERVAL_S:
            refusals.since_s = now_s
            refusals.reported.clear()
        if to not in refusals.reported and len(refusals.reported) < MAX_REFUSALS:
            refusals.reported.add(to)
            self._send_relay_lost(origin, to, reason)

    def _send_relay_lost(self, origin: PeerId, to: PeerId, reason: str) -> None:
        if self._inner.connected(origin):
            with contextlib.suppress(TransportError):  # queue full: the origin's deadlines detect the loss
                self._inner.send(origin, RelayFailed(to, reason))
