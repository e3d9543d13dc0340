"""Measures round trips to peers with a few pings each.

A probe is over when all targets are measured `PINGS_PER_PEER` times, or at its deadline.
"""

from __future__ import annotations

import math

from gridtrain.core.messages import PeerId, Ping
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport

PINGS_PER_PEER = 5


class RoundTripProbe:
    """One probe at a time; the shortest round trip of each target counts."""

    def __init__(self) -> None:
        self._targets: tuple[PeerId, ...] = ()
        self._best_s: dict[PeerId, float] = {}
        self._pings_left: dict[PeerId, int] = {}
        self._sent: dict[int, tuple[PeerId, float]] = {}
        self.until_s = math.inf
        self._nonce = 0
        self._running = False

    def begin(
        self, targets: tuple[tuple[PeerId, str], ...], transport: Transport, now_s: float, limit_s: float
    ) -> None:
        """Ping the targets that are connected, and the others once they are; `limit_s` bounds the whole."""
        self._targets = tuple(dict.fromkeys(peer for peer, _ in targets))
        self._best_s, self._sent = {}, {}
        self._pings_left = dict.fromkeys(self._targets, PINGS_PER_PEER)
        self.until_s, self._running = now_s + 0.8 * limit_s, True
        for peer in self._targets:
            if transport.connected(peer):
                self._ping(peer, transport, now_s)

    def peer_up(self, peer: PeerId, transport: Transport, now_s: float) -> None:
        if self._running and peer in self._targets and peer not in self._best_s:
            self._ping(peer, transport, now_s)

    def handle_pong(self, nonce: int, transport: Transport, now_s: float) -> None:
        peer, sent_s = self._sent.pop(nonce, (b"", 0.0))
        if peer not in self._pings_left:
            return
        self._best_s[peer] = min(now_s - sent_s, self._best_s.get(peer, math.inf))
        self._pings_left[peer] -= 1
        if self._pings_left[peer] > 0:
            self._ping(peer, transport, now_s)

    def take_results(self, now_s: float) -> tuple[tuple[PeerId, float], ...] | None:
        """Round trips in seconds, once, in the order of targets; None: it runs, or none was asked for."""
        if not self._running or (any(self._pings_left.values()) and now_s < self.until_s):
            return None
        self._running = False
        return tuple((peer, self._best_s[peer]) for peer in self._targets if peer in self._best_s)

    def _ping(self, peer: PeerId, transport: Transport, now_s: float) -> None:
        self._nonce += 1
        self._sent[self._nonce] = (peer, now_s)
        try:
            transport.send(peer, Ping(self._nonce))
        except TransportError:
            self._pings_left[peer] = 0  # its connection broke: it is not measured
