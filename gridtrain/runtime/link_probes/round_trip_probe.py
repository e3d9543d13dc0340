"""Measures the round-trip times (latency) to peers by sending a few pings to each peer.

A probe ends when each target has answered `PINGS_PER_PEER` pings, or at the probe's deadline.
"""

from __future__ import annotations

import math

from gridtrain.core.messages import PeerId, Ping
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport

PINGS_PER_PEER = 5


class RoundTripProbe:
    """Runs one probe at a time and reports the shortest round-trip time of each target."""

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
        """Start a probe: ping the connected targets now, and each other target as soon as it connects.

        The deadline, shared with the bandwidth bursts that follow, is 80 % of `limit_s` from now.
        """
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
        """Return a pair (peer, shortest round-trip time in seconds) for each target that has answered.

        The pairs are in the order of the targets, and are returned once for each probe.  Returns None if the
        probe is still running, its results have already been returned, or no probe has begun.
        """
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
            self._pings_left[peer] = 0  # the connection to the peer broke, so the peer is not measured
