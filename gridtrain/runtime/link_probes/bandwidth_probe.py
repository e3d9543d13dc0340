"""Measures the bandwidth to peers with short bursts; limits the number of bursts and the lifetime of a rate.

A burst consists of `BURST_MESSAGES` messages of `BURST_MESSAGE_BYTES`.  A worker sends bursts to its peers
one after the other, so that the bursts do not share the worker's link.  After its own burst, it requests one
from that peer, because peers that were admitted before this worker have not measured their links to it.

    sender    Burst 0, 1, 2 .. 15 --------------->  receiver
                               <------ BurstReceived
                      BurstRequest -------------->
                               <------ Burst 0, 1, 2 .. 15

    receiver  received_Bps = bytes of 15 messages / time from the arrival of message 0 to that of message 15,
                             or of the last 8 messages, if that rate is higher, but at most 4 times as high
    sender    sent_Bps = bytes of 16 messages / (time until BurstReceived arrives - round-trip time)

The last 8 bytes of the last message are random, and BurstReceived repeats them, so no peer can answer before
the burst has arrived.  All messages have to arrive in order.  A peer that does not answer delays the
measurement of the other peers by at most its own share of the time; the rate of a burst that takes all of
this time, an upper bound, is then reported.  A requested burst that arrives later still counts.

A new connection sends little in its first round trips (TCP's slow start), so the first half of its burst is
too slow.  The sender therefore repeats a burst that took only a few round trips, on the connection that is
now faster; the burst of a slow link, for which this matters little, is not repeated.  A receiver whose loop
was busy reads many buffered messages at once and measures a rate that is much too high.  The second half
therefore does not count if it is far faster than the whole, and the coordinator uses the lower of the rates
measured at the two ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from gridtrain.core.messages import (
    BURST_MESSAGE_BYTES,
    BURST_MESSAGES,
    Burst,
    BurstReceived,
    BurstRequest,
    PeerId,
)
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport

PROOF_BYTES = 8
MAX_TARGETS = 8  # 2 MiB in each direction; 4 MiB are sent if all bursts are repeated
SLOW_START_ROUND_TRIPS = 8.0
"""A burst that took less than this number of round trips is repeated once.  With TCP's usual initial window
of 15 kB, a new connection needs 5 round trips for a burst."""
MAX_BURSTS, BURST_WINDOW_S = 64, 60.0
"""Maximum number of bursts that are accepted from one peer within `BURST_WINDOW_S`.  A correct peer sends one
or two bursts whenever it is admitted, and a script that keeps crashing and being restarted may be admitted
every two seconds."""

MAX_REQUESTS = 4
"""Maximum number of burst requests of one peer that are answered within `BURST_WINDOW_S`."""

RATE_LIFETIME_S = 60.0
"""Time for which a measured rate is valid.  If this worker is admitted again within this time, it reports
the rate again instead of measuring it."""

MAX_HALF_FACTOR = 4.0
"""The rate of a burst's second half counts only up to this multiple of the rate of the whole burst."""

MIN_BURST_S = 1e-5
MIN_BURST_FRACTION = 0.25
"""Smallest fraction of the measured time that is attributed to the burst itself; see `estimate_rate_Bps`."""


@dataclass(slots=True)
class _OutgoingBurst:
    """A burst that was sent, and its expected answer.

    Attributes:
        until_s: the time until which the answer, and then the peer's burst, are awaited.
        is_acknowledged: whether the answer has arrived, and the peer's burst is requested.
    """

    peer: PeerId
    expected_answer: BurstReceived
    sent_at_s: float
    until_s: float
    is_acknowledged: bool = False


@dataclass(slots=True)
class _IncomingBurst:
    """A burst whose first messages have arrived."""

    nonce: int
    began_s: float
    middle_s: float = math.inf  # when its first `BURST_MESSAGES` / 2 messages had arrived
    next_index: int = 1  # the index of the message that has to arrive next


class BandwidthProbe:
    """Sends one burst at a time and measures the bursts that arrive from peers.

    Args:
        rng: the random number generator that selects the peers to measure if there are more than
            `MAX_TARGETS`, and produces the random bytes of a burst, which peers must not be able to predict.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._pending_targets: list[PeerId] = []
        self._rtt_s: dict[PeerId, float] = {}
        self._current_burst: _OutgoingBurst | None = None
        self._until_s = math.inf
        self._measured_sent: dict[PeerId, tuple[float, float]] = {}  # rate, time of measurement
        self._measured_received: dict[PeerId, tuple[float, float]] = {}
        self._repeated: set[PeerId] = set()  # peers to which a burst has been repeated
        self._sent_Bps: dict[PeerId, float] = {}
        self._received_Bps: dict[PeerId, float] = {}
        self._incoming: dict[PeerId, _IncomingBurst] = {}
        self._burst_times: dict[PeerId, deque[float]] = {}
        self._request_times: dict[PeerId, deque[float]] = {}
        self._has_new_rates = False

    def begin(self, rtt_s: Mapping[PeerId, float], until_s: float, now_s: float) -> None:
        """Start measuring the rates to the peers in `rtt_s`, one peer after the other, in this order.

        A peer whose latest rate is still valid is not measured, and this rate is reported again.  If more
        than `MAX_TARGETS` peers remain, that many of them are selected at random.

        Args:
            rtt_s: the round-trip time to each peer in seconds.
            until_s: the time at which the measurement ends.
            now_s: the current time.
        """
        self._rtt_s = dict(rtt_s)
        fresh, received = (
            {p: rate for p, (rate, at_s) in rates.items() if p in rtt_s and now_s < at_s + RATE_LIFETIME_S}
            for rates in (self._measured_sent, self._measured_received)
        )
        self._sent_Bps |= fresh
        self._received_Bps |= received
        self._has_new_rates = self._has_new_rates or bool(fresh or received)
        targets = [peer for peer in rtt_s if peer not in fresh]
        drawn = set(self._rng.sample(targets, min(MAX_TARGETS, len(targets))))
        self._pending_targets = [peer for peer in reversed(targets) if peer in drawn]
        self._until_s, self._current_burst = until_s, None
        self._repeated.clear()

    def advance(self, transport: Transport, now_s: float) -> bool:
        """Send the next burst if none is in progress; return whether a burst is still awaited."""
        current = self._current_burst
        if current is not None and now_s >= current.until_s:
            if not current.is_acknowledged:
                bound_Bps = estimate_rate_Bps(now_s - current.sent_at_s, self._rtt_s[current.peer])
                self._sent_Bps.setdefault(current.peer, bound_Bps)
                self._has_new_rates = True
            self._current_burst = None  # waiting longer would take time from the remaining peers
        if now_s >= self._until_s:
            self._pending_targets = []
        while self._pending_targets and self._current_burst is None:
            # Divide the remaining time equally among the remaining peers.
            until_s = now_s + (self._until_s - now_s) / len(self._pending_targets)
            peer = self._pending_targets.pop()
            answer = BurstReceived(self._rng.getrandbits(63), self._rng.randbytes(PROOF_BYTES))
            try:
                for index in range(BURST_MESSAGES):
                    end = answer.proof if index == BURST_MESSAGES - 1 else bytes(PROOF_BYTES)
                    transport.send(
                        peer, Burst(answer.nonce, index, bytes(BURST_MESSAGE_BYTES - PROOF_BYTES) + end)
                    )
            except TransportError:
                continue  # the connection broke, so this peer is not measured
            self._current_burst = _OutgoingBurst(peer, answer, now_s, until_s)
        return self._current_burst is not None

    def handle_burst_request(self, peer: PeerId, nonce: int, now_s: float) -> list[Burst]:
        """Return the messages of the burst that a peer has requested; an empty list if the peer has sent too
        many requests."""
        times = self._request_times.setdefault(peer, deque(maxlen=MAX_REQUESTS))
        if len(times) == times.maxlen and now_s - times[0] < BURST_WINDOW_S:
            return []
        times.append(now_s)
        return [Burst(nonce, index, bytes(BURST_MESSAGE_BYTES)) for index in range(BURST_MESSAGES)]

    def handle_acknowledgement(
        self, peer: PeerId, answer: BurstReceived, now_s: float
    ) -> BurstRequest | None:
        """Compute the rate to a peer that has acknowledged the whole burst.

        Returns the request for a burst from the peer; None if this worker's burst is repeated first, or if
        the acknowledgement is not expected.
        """
        sent = self._current_burst
        if sent is None or sent.is_acknowledged or (sent.peer, sent.expected_answer) != (peer, answer):
            return None
        whole_s, rtt_s = now_s - sent.sent_at_s, self._rtt_s[peer]
        # Keep the higher rate: the first burst's rate is too low, and the second burst may be disturbed.
        first_Bps = self._sent_Bps.get(peer, 0.0) if peer in self._repeated else 0.0
        self._sent_Bps[peer] = max(first_Bps, estimate_rate_Bps(whole_s, rtt_s))
        self._measured_sent[peer] = self._sent_Bps[peer], now_s
        self._has_new_rates = True
        if peer not in self._repeated and whole_s < SLOW_START_ROUND_TRIPS * rtt_s:
            self._repeated.add(peer)
            self._pending_targets.append(peer)  # the next to be measured
            self._current_burst = None
            return None
        sent.is_acknowledged = True
        return BurstRequest(answer.nonce)

    def handle_burst(self, peer: PeerId, burst: Burst, now_s: float) -> BurstReceived | str | None:
        """Handle a message of a peer's burst.

        Returns the acknowledgement if the burst is now complete, the reason if the message is a violation,
        and None otherwise.
        """
        arrivals = self._burst_times.setdefault(peer, deque(maxlen=MAX_BURSTS * BURST_MESSAGES))
        if len(arrivals) == arrivals.maxlen and now_s - arrivals[0] < BURST_WINDOW_S:
            return f"sent more than {MAX_BURSTS * BURST_MESSAGES} Bursts in {BURST_WINDOW_S:.0f} s"
        arrivals.append(now_s)
        if len(burst.payload) != BURST_MESSAGE_BYTES:
            return f"sent a Burst of {len(burst.payload)} bytes; it must be {BURST_MESSAGE_BYTES} bytes long"
        if burst.index == 0:
            self._incoming[peer] = _IncomingBurst(burst.nonce, now_s)
            return None
        incoming = self._incoming.get(peer)
        if incoming is None or (incoming.nonce, incoming.next_index) != (burst.nonce, burst.index):
            self._incoming.pop(peer, None)  # a message is missing, so this burst cannot be measured
            return None
        incoming.next_index += 1
        if incoming.next_index == BURST_MESSAGES // 2:
            incoming.middle_s = now_s
        if burst.index < BURST_MESSAGES - 1:
            return None
        del self._incoming[peer]
        whole_Bps, half_Bps = (
            messages * BURST_MESSAGE_BYTES / max(MIN_BURST_S, now_s - since_s)
            for messages, since_s in (
                (BURST_MESSAGES - 1, incoming.began_s),
                (BURST_MESSAGES // 2, incoming.middle_s),
            )
        )
        is_plausible = whole_Bps < half_Bps <= MAX_HALF_FACTOR * whole_Bps
        self._received_Bps[peer] = half_Bps if is_plausible else whole_Bps
        self._measured_received[peer] = self._received_Bps[peer], now_s
        self._has_new_rates = True
        current = self._current_burst
        if current is not None and (current.peer, current.expected_answer.nonce) == (peer, burst.nonce):
            self._current_burst = None
        return BurstReceived(burst.nonce, bytes(memoryview(burst.payload)[-PROOF_BYTES:]))

    def remove_peer(self, peer: PeerId) -> None:
        """Discard the bursts to and from a peer whose connection broke."""
        for known in (self._request_times, self._burst_times, self._measured_sent, self._measured_received):
            if len(known) > MAX_TARGETS * MAX_BURSTS:
                known.clear()
        self._incoming.pop(peer, None)
        if self._current_burst is not None and self._current_burst.peer == peer:
            self._current_burst = None

    def take_new_rates(self) -> tuple[tuple[PeerId, float, float], ...] | None:
        """Return a triple (peer, rate to the peer, rate from the peer) for each peer with a new rate.

        At most 256 peers are reported; the rates of others are discarded.  The rates are in bytes per second;
        a rate that is not new is 0.  Returns None if there have been no new rates since the last call, or
        while a burst is awaited.
        """
        if not self._has_new_rates or self._current_burst is not None:
            return None
        self._has_new_rates = False
        peers = sorted({*self._sent_Bps, *self._received_Bps})[:256]
        rates = tuple((p, self._sent_Bps.get(p, 0.0), self._received_Bps.get(p, 0.0)) for p in peers)
        self._sent_Bps.clear()
        self._received_Bps.clear()
        return rates


def estimate_rate_Bps(whole_s: float, rtt_s: float) -> float:
    """Return the rate of a burst in bytes per second.

    `whole_s` is the time from sending or requesting the burst until its sender receives the acknowledgement
    or its receiver receives the last message.  The round-trip time is subtracted from `whole_s`, but at least
    `MIN_BURST_FRACTION` of `whole_s` is kept, because `rtt_s` is too large if a busy loop delayed the pings,
    and the burst would then seem to have taken no time.
    """
    return (
        BURST_MESSAGES * BURST_MESSAGE_BYTES / max(MIN_BURST_S, whole_s - rtt_s, MIN_BURST_FRACTION * whole_s)
    )
