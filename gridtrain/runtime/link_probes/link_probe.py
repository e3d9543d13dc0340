"""Measures this worker's links: first the round-trip times, and then the bandwidth with one burst at a time.

    ev.ProbePeers --> pings --> round-trip times --> BandwidthProbe --> LinkRates, ev.ProbeResults

The bursts begin when each target has answered `PINGS_PER_PEER` pings, or after half of the time, so that a
target that does not answer leaves time for bursts to the others.  Bursts are sent only to peers that have
answered, and that are connected directly, not through a relay.  The round-trip times are reported after the
last burst, when all pings are answered, or at the probe's deadline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.messages import relay_of
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.link_probes.bandwidth_probe import BandwidthProbe

PINGS_PER_PEER = 5


class LinkProbe:
    """Runs the measurements that the core requests, one at a time.  Only the I/O thread uses it.

    Args:
        transport: the connections to the peers.
        limit_s: the time limit of a newcomer's probe, including its bursts; that of a member is
            `MEMBER_PROBE_S`.
        rng: the random number generator of the `BandwidthProbe`.
    """

    def __init__(self, transport: Transport, limit_s: float, rng: Random) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._bandwidth = BandwidthProbe(rng)
        self._relayed: set[m.PeerId] = set()  # bursts would load the relay's link
        self._best_s: dict[m.PeerId, float] = {}  # shortest round-trip time of each target, or infinity
        self._pings_left: dict[m.PeerId, int] = {}
        self._sent: dict[int, tuple[m.PeerId, float]] = {}  # by nonce: the target and the time
        self._nonce = 0
        self._bursts_from_s = self._until_s = math.inf
        self._is_pinging = False  # until the bursts begin
        self._is_probing = False  # until the round-trip times are reported

    def begin(self, probe: ev.ProbePeers, now_s: float) -> None:
        """Start a probe: ping the connected targets now, and each other target as soon as it connects.

        The bursts begin after at most 40 % of the time limit, and the deadline is after 80 % of it.
        """
        self._relayed = {peer for peer, address in probe.targets if relay_of(address) is not None}
        self._best_s, self._sent = dict.fromkeys((peer for peer, _ in probe.targets), math.inf), {}
        self._pings_left = dict.fromkeys(self._best_s, PINGS_PER_PEER)
        limit_s = m.MEMBER_PROBE_S if probe.is_member else self._limit_s
        self._bursts_from_s, self._until_s = now_s + 0.4 * limit_s, now_s + 0.8 * limit_s
        self._is_pinging = self._is_probing = True
        for peer in self._pings_left:
            if self._transport.connected(peer):
                self._ping(peer, now_s)

    def peer_up(self, peer: m.PeerId, now_s: float) -> None:
        if self._is_probing and self._best_s.get(peer) == math.inf:
            self._ping(peer, now_s)

    def peer_down(self, peer: m.PeerId) -> None:
        self._bandwidth.remove_peer(peer)

    def handle_message(
        self, peer: m.PeerId, message: m.Pong | m.Burst | m.BurstRequest | m.BurstReceived, now_s: float
    ) -> Sequence[m.Message] | str:
        """Handle a message; return the replies to send, or the reason why the message is a violation."""
        match message:
            case m.Pong(nonce):
                self._handle_pong(peer, nonce, now_s)
            case m.Burst():
                answer = self._bandwidth.handle_burst(peer, message, now_s)
                return [answer] if isinstance(answer, m.BurstReceived) else answer or []
            case m.BurstRequest(nonce):
                return self._bandwidth.handle_burst_request(peer, nonce, now_s)
            case m.BurstReceived():
                request = self._bandwidth.handle_acknowledgement(peer, message, now_s)
                return [request] if request is not None else []
        return []

    def poll(self, now_s: float) -> tuple[m.LinkRates | None, ev.ProbeResults | None]:
        """Advance the measurement; return the rates and the round-trip times that are ready to be reported.

        Either is None if it is not ready.  Report the rates first, because the coordinator admits a worker as
        soon as it has the round-trip times.
        """
        is_answered = not any(self._pings_left.values())
        if self._is_pinging and (is_answered or now_s >= self._bursts_from_s):
            self._is_pinging = False
            direct = {peer: rtt_s for peer, rtt_s in self._answered if peer not in self._relayed}
            self._bandwidth.begin(direct, self._until_s, now_s)
        waiting = self._bandwidth.advance(self._transport, now_s)
        rates, measured = self._bandwidth.take_new_rates(), None
        if self._is_probing and not waiting and (is_answered or now_s >= self._until_s):
            self._is_probing = False
            measured = ev.ProbeResults(self._answered)
        return None if rates is None else m.LinkRates(rates), measured

    @property
    def _answered(self) -> tuple[tuple[m.PeerId, float], ...]:
        return tuple((peer, rtt_s) for peer, rtt_s in self._best_s.items() if rtt_s < math.inf)

    def _handle_pong(self, peer: m.PeerId, nonce: int, now_s: float) -> None:
        target, sent_s = self._sent.get(nonce, (b"", 0.0))
        if peer != target:
            return
        del self._sent[nonce]
        self._best_s[peer] = min(now_s - sent_s, self._best_s[peer])
        # At least 0: a peer that connects during `begin` is pinged twice, and answers one ping more.
        self._pings_left[peer] = max(0, self._pings_left[peer] - 1)
        if self._pings_left[peer] > 0:
            self._ping(peer, now_s)

    def _ping(self, peer: m.PeerId, now_s: float) -> None:
        self._nonce += 1
        self._sent[self._nonce] = (peer, now_s)
        try:
            self._transport.send(peer, m.Ping(self._nonce))
        except TransportError:
            self._pings_left[peer] = 0  # the connection to the peer broke, so the peer is not measured
