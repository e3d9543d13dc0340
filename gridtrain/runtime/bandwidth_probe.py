"""Measures the bandwidth to peers with a short burst each.

A peer gets one burst of `BURST_MESSAGES` * `BURST_MESSAGE_BYTES`, one peer after the other, so that two
bursts of a worker do not share its link.

    sender    Burst 0, 1, 2 .. 15 --------------->  receiver    the first 0 ........ the last 15
                               <------ BurstReceived                   received_Bps = 15 messages / that time
              sent_Bps = all / (time until BurstReceived - round trip)

The last 8 bytes of the last message are random, and BurstReceived repeats them: nobody can answer before the
burst is there.  All messages have to arrive, in order.  A peer that does not answer costs its part of the
time only.

A new connection accelerates, so a fast link with a long round trip is measured slower than it is: as slow as
an exchange of so few bytes would find it.  The coordinator believes the smaller figure of both ends: a
receiver whose loop was busy reads at once what waited in a buffer, and takes the link for much faster than it
is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from gridtrain.core.messages import BURST_MESSAGE_BYTES, BURST_MESSAGES, Burst, BurstReceived, PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.interface import Transport

PROOF_BYTES = 8
MOST_TARGETS = 8  # 2 MiB in all
MOST_BURSTS, BURST_WINDOW_S = 64, 60.0
"""Bursts of one peer that are accepted in this time.  An honest peer measures when it is admitted, which a
script that crashes and is restarted may be every other second."""

MOST_REQUESTS = 4
"""Bursts that one peer may request in that time."""

RATE_LIFETIME_S = 300.0
"""Rates are reported again without a new measurement where this process is admitted again so soon."""

MIN_BURST_S = 1e-5
MIN_BURST_FRACTION = 0.25
"""The part of the time until a burst's answer that is the burst's at least: see `estimate_rate_Bps`."""


@dataclass(frozen=True, slots=True)
class _OutgoingBurst:
    """A burst that was sent, and until when its answer is awaited."""

    peer: PeerId
    expected_answer: BurstReceived
    sent_at_s: float
    until_s: float


@dataclass(slots=True)
class _IncomingBurst:
    """A burst of which some messages have arrived."""

    nonce: int
    began_s: float
    next_index: int = 1  # that has to arrive next


class BandwidthProbe:
    """Sends one burst at a time, and measures the bursts of others.

    Args:
        rng: draws the peers where there are more than `MOST_TARGETS`, and the proof in `BurstReceived`: peers
            must
            not be able to predict it.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._pending_targets: list[PeerId] = []
        self._rtt_s: dict[PeerId, float] = {}
        self._current_burst: _OutgoingBurst | None = None
        self._until_s = math.inf
        self._measured_rates: dict[PeerId, tuple[float, float]] = {}  # rate to it, and when that was measured
        self._sent_Bps: dict[PeerId, float] = {}
        self._received_Bps: dict[PeerId, float] = {}
        self._incoming: dict[PeerId, _IncomingBurst] = {}
        self._burst_times: dict[PeerId, deque[float]] = {}
        self._request_times: dict[PeerId, deque[float]] = {}
        self._has_new_rates = False

    def begin(self, rtt_s: Mapping[PeerId, float], until_s: float, now_s: float) -> None:
        """Measure some of these peers, whose round trips are known, one after the other in this order."""
        self._rtt_s = dict(rtt_s)
        fresh = {
            p: rate
            for p, (rate, at_s) in self._measured_rates.items()
            if p in rtt_s and now_s < at_s + RATE_LIFETIME_S
        }
        self._sent_Bps |= fresh
        self._has_new_rates = self._has_new_rates or bool(fresh)
        targets = [peer for peer in rtt_s if peer not in fresh]
        drawn = set(self._rng.sample(targets, min(MOST_TARGETS, len(targets))))
        self._pending_targets = [peer for peer in reversed(targets) if peer in drawn]
        self._until_s, self._current_burst = until_s, None

    def advance(self, transport: Transport, now_s: float) -> bool:
        """Send the next burst if none is under way; returns whether there is still something to wait for."""
        if now_s >= self._until_s:
            self._pending_targets, self._current_burst = [], None
        if self._current_burst is not None and now_s >= self._current_burst.until_s:
            self._current_burst = None  # an answer would be too late for the others
        while self._pending_targets and self._current_burst is None:
            # The next peers have as long.
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
                continue  # its connection broke: not measured
            self._current_burst = _OutgoingBurst(peer, answer, now_s, until_s)
        return self._current_burst is not None

    def handle_burst_request(self, peer: PeerId, nonce: int, now_s: float) -> list[Burst]:
        """A peer wants to measure the link from here: a burst, or none where it asks too often."""
        times = self._request_times.setdefault(peer, deque(maxlen=MOST_REQUESTS))
        if len(times) == times.maxlen and now_s - times[0] < BURST_WINDOW_S:
            return []
        times.append(now_s)
        return [Burst(nonce, index, bytes(BURST_MESSAGE_BYTES)) for index in range(BURST_MESSAGES)]

    def handle_acknowledgement(self, peer: PeerId, answer: BurstReceived, now_s: float) -> None:
        """A peer has received the whole burst."""
        sent = self._current_burst
        if sent is None or (sent.peer, sent.expected_answer) != (peer, answer):
            return
        self._sent_Bps[peer] = estimate_rate_Bps(now_s - sent.sent_at_s, self._rtt_s[peer])
        self._measured_rates[peer] = self._sent_Bps[peer], now_s
        self._current_burst, self._has_new_rates = None, True

    def handle_burst(self, peer: PeerId, burst: Burst, now_s: float) -> BurstReceived | str | None:
        """A message of a peer's burst; returns the answer, or what is wrong with it."""
        arrivals = self._burst_times.setdefault(peer, deque(maxlen=MOST_BURSTS * BURST_MESSAGES))
        if len(arrivals) == arrivals.maxlen and now_s - arrivals[0] < BURST_WINDOW_S:
            return f"sent more than {MOST_BURSTS * BURST_MESSAGES} Bursts in {BURST_WINDOW_S:.0f} s"
        arrivals.append(now_s)
        if len(burst.payload) != BURST_MESSAGE_BYTES:
            return f"sent a Burst of {len(burst.payload)} bytes, must be {BURST_MESSAGE_BYTES}"
        if burst.index == 0:
            self._incoming[peer] = _IncomingBurst(burst.nonce, now_s)
            return None
        incoming = self._incoming.get(peer)
        if incoming is None or (incoming.nonce, incoming.next_index) != (burst.nonce, burst.index):
            self._incoming.pop(peer, None)  # one is missing: this burst measures nothing
            return None
        incoming.next_index += 1
        if burst.index < BURST_MESSAGES - 1:
            return None
        del self._incoming[peer]
        self._received_Bps[peer] = (
            (BURST_MESSAGES - 1) * BURST_MESSAGE_BYTES / max(MIN_BURST_S, now_s - incoming.began_s)
        )
        self._has_new_rates = True
        return BurstReceived(burst.nonce, bytes(memoryview(burst.payload)[-PROOF_BYTES:]))

    def remove_peer(self, peer: PeerId) -> None:
        """Its connection broke."""
        if len(self._request_times) > MOST_TARGETS * MOST_BURSTS:
            self._request_times.clear()
        self._incoming.pop(peer, None)
        if self._current_burst is not None and self._current_burst.peer == peer:
            self._current_burst = None

    def take_new_rates(self) -> tuple[tuple[PeerId, float, float], ...] | None:
        """Peer, rate to it, rate from it, for `LinkRates`; None: nothing new since the last call."""
        if not self._has_new_rates or self._current_burst is not None:
            return None
        self._has_new_rates = False
        peers = sorted({*self._sent_Bps, *self._received_Bps})[:256]
        rates = tuple((p, self._sent_Bps.get(p, 0.0), self._received_Bps.get(p, 0.0)) for p in peers)
        self._sent_Bps.clear()
        self._received_Bps.clear()
        return rates


def estimate_rate_Bps(whole_s: float, rtt_s: float) -> float:
    """Rate of a burst whose end was seen `whole_s` after it was sent, or requested.

    Pings that were delayed by a busy loop overestimate the round trip; a burst that is answered in about that
    time would seem to have taken none.
    """
    return (
        BURST_MESSAGES * BURST_MESSAGE_BYTES / max(MIN_BURST_S, whole_s - rtt_s, MIN_BURST_FRACTION * whole_s)
    )
