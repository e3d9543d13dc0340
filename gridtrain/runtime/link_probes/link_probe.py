"""Measures this worker's links: first the round-trip times, and then the bandwidth with one burst at a time.

    io.ProbePeers --> RoundTripProbe --> round-trip times --> BandwidthProbe --> LinkRates, io.ProbeResults

Bursts are sent only to peers that are connected directly, not through a relay.  The round-trip times are
reported after the last burst.
"""

from __future__ import annotations

from random import Random

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.core.messages import relay_of
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.link_probes.bandwidth_probe import BandwidthProbe
from gridtrain.runtime.link_probes.round_trip_probe import RoundTripProbe


class LinkProbe:
    """Runs the measurements that the core requests.  Only the I/O thread uses it.

    Args:
        transport: the connections to the peers.
        limit_s: the time limit of one probe, including its bursts.
        rng: the random number generator of the `BandwidthProbe`.
    """

    def __init__(self, transport: Transport, limit_s: float, rng: Random) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._round_trips = RoundTripProbe()
        self._bandwidth = BandwidthProbe(rng)
        self._relayed: set[m.PeerId] = set()  # bursts would load the relay's link
        self._measured: io.ProbeResults | None = None  # round-trip times, kept until the bursts are over

    def begin(self, probe: io.ProbePeers, now_s: float) -> None:
        self._relayed = {peer for peer, address in probe.targets if relay_of(address) is not None}
        self._round_trips.begin(probe.targets, self._transport, now_s, self._limit_s)

    def peer_up(self, peer: m.PeerId, now_s: float) -> None:
        self._round_trips.peer_up(peer, self._transport, now_s)

    def peer_down(self, peer: m.PeerId) -> None:
        self._bandwidth.remove_peer(peer)

    def handle_message(
        self, peer: m.PeerId, message: m.Pong | m.Burst | m.BurstRequest | m.BurstReceived, now_s: float
    ) -> list[m.Burst] | list[m.BurstReceived] | str:
        """Handle a message; return the replies to send, or the reason why the message is a violation."""
        match message:
            case m.Pong(nonce):
                self._round_trips.handle_pong(nonce, self._transport, now_s)
            case m.Burst():
                answer = self._bandwidth.handle_burst(peer, message, now_s)
                return [answer] if isinstance(answer, m.BurstReceived) else answer or []
            case m.BurstRequest(nonce):
                return self._bandwidth.handle_burst_request(peer, nonce, now_s)
            case m.BurstReceived():
                self._bandwidth.handle_acknowledgement(peer, message, now_s)
        return []

    def poll(self, now_s: float) -> tuple[m.LinkRates | None, io.ProbeResults | None]:
        """Advance the measurement; return the rates and the round-trip times that are ready to be reported.

        Either is None if it is not ready.  Report the rates first, because the coordinator admits a worker as
        soon as it has the round-trip times.
        """
        rtt_s = self._round_trips.take_results(now_s)
        if rtt_s is not None:
            self._measured = io.ProbeResults(rtt_s)
            direct = {peer: seconds for peer, seconds in rtt_s if peer not in self._relayed}
            self._bandwidth.begin(direct, self._round_trips.until_s, now_s)
        waiting = self._bandwidth.advance(self._transport, now_s)
        rates, measured = self._bandwidth.take_new_rates(), None
        if not waiting:
            measured, self._measured = self._measured, None
        return None if rates is None else m.LinkRates(rates), measured
