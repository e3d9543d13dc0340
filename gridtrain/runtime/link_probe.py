"""Network measurements of this worker: round trips first, then a burst to each peer, one by one.

    io.ProbePeers --> RoundTripProbe --> round trips --> BandwidthProbe --> LinkRates, io.ProbeResults

Bursts go to peers that are reached directly.  The round trips are reported when no burst is under way any
more.
"""

from __future__ import annotations

from random import Random

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.core.messages import relay_of
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.bandwidth_probe import BandwidthProbe
from gridtrain.runtime.round_trip_probe import RoundTripProbe


class LinkProbe:
    """Used by the I/O thread alone.

    Args:
        limit_s: of one probe, bursts included.
        rng: see `BandwidthProbe`.
    """

    def __init__(self, transport: Transport, limit_s: float, rng: Random) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._round_trips = RoundTripProbe()
        self._bandwidth = BandwidthProbe(rng)
        self._relayed: set[m.PeerId] = set()  # bursts would load the relay's link
        self._measured: io.ProbeResults | None = None  # round trips, while bursts are under way

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
        """The messages that answer it, or what is wrong with it."""
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
        """What is to be reported.  Rates go to the coordinator first: it admits a worker on its round
        trips."""
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
