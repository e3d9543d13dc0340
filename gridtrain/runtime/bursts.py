"""How fast bulk goes to peers, measured with a short burst each.

Decides whom to send a burst, and what its time says.  Never sends more than `BURSTS` * `BURST_BYTES` to a
peer, to one after the other, so that two bursts of a worker do not share its line.

    sender    Burst 0, 1, 2 .. 15 --------------->  receiver    the first 0 ........ the last 15
                                     <------ Landed                    came_Bps = 15 bursts / that time
              sent_Bps = all / (time until Landed - round trip)

The last 8 bytes of the last message are drawn, and Landed repeats them: nobody can answer before it is there.
All messages have to come, in their order.  A peer that does not answer costs its part of the time only.

A new connection speeds up as it goes, so a fast long line is told slower than it is: as slow as an exchange
of so few bytes would find it.  Of both ends' words the coordinator believes the smaller one: a receiver whose
loop was busy reads at once what waited in a buffer, and takes the line for far faster than it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from gridtrain.errors import TransportError
from gridtrain.protocol.messages import BURST_BYTES, BURSTS, Burst, Landed, PeerId
from gridtrain.transport.base import Transport

PROOF_BYTES = 8
MOST_TARGETS = 8  # 2 MiB in all
MOST_TRAINS, TRAINS_S = 64, 60.0
"""So many bursts of one peer in such a time are let pass.  An honest one measures when it is admitted, as a
script that dies and is started again is every other second."""

MOST_ASKED = 4
"""Bursts that one peer may ask for in that time."""

FRESH_S = 300.0
"""What was measured is told again, and not measured again, where this process is admitted anew so soon."""

LEAST_S = 1e-5
LEAST_PART = 0.25
"""Of the time until a burst's answer, at least so much is the burst's own: see `rate_Bps`."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """What was sent, and until when its answer is awaited."""

    peer: PeerId
    answer: Landed
    left_s: float
    until_s: float


@dataclass(slots=True)
class _Coming:
    """A burst of which some messages are here."""

    nonce: int
    began_s: float
    awaited: int = 1  # the index that has to come next


class Bursts:
    """One burst under way at a time; and what bursts of others have shown.

    Args:
        rng: draws the peers where there are more than `MOST_TARGETS`, and what Landed has to prove, so peers
            must not be able to foretell it.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._left: list[PeerId] = []
        self._rtt_s: dict[PeerId, float] = {}
        self._under_way: _UnderWay | None = None
        self._until_s = math.inf
        self._known: dict[PeerId, tuple[float, float]] = {}  # rate to it, and when that was measured
        self._sent_Bps: dict[PeerId, float] = {}
        self._came_Bps: dict[PeerId, float] = {}
        self._coming: dict[PeerId, _Coming] = {}
        self._arrivals: dict[PeerId, deque[float]] = {}
        self._asked: dict[PeerId, deque[float]] = {}
        self._untold = False

    def begin(self, rtt_s: Mapping[PeerId, float], until_s: float, now_s: float) -> None:
        """Measure to some of these peers, whose round trips are known, one after the other in this order."""
        self._rtt_s = dict(rtt_s)
        fresh = {p: rate for p, (rate, at_s) in self._known.items() if p in rtt_s and now_s < at_s + FRESH_S}
        self._sent_Bps |= fresh
        self._untold = self._untold or bool(fresh)
        targets = [peer for peer in rtt_s if peer not in fresh]
        drawn = set(self._rng.sample(targets, min(MOST_TARGETS, len(targets))))
        self._left = [peer for peer in reversed(targets) if peer in drawn]
        self._until_s, self._under_way = until_s, None

    def turn(self, transport: Transport, now_s: float) -> bool:
        """Send the next burst if none is under way; returns whether there is still something to wait for."""
        if now_s >= self._until_s:
            self._left, self._under_way = [], None
        if self._under_way is not None and now_s >= self._under_way.until_s:
            self._under_way = None  # its answer would come too late for the others
        while self._left and self._under_way is None:
            until_s = now_s + (self._until_s - now_s) / len(self._left)  # the next ones have as long
            peer = self._left.pop()
            answer = Landed(self._rng.getrandbits(63), self._rng.randbytes(PROOF_BYTES))
            try:
                for index in range(BURSTS):
                    end = answer.proof if index == BURSTS - 1 else bytes(PROOF_BYTES)
                    transport.send(peer, Burst(answer.nonce, index, bytes(BURST_BYTES - PROOF_BYTES) + end))
            except TransportError:
                continue  # its connection broke: not measured
            self._under_way = _UnderWay(peer, answer, now_s, until_s)
        return self._under_way is not None

    def asked(self, peer: PeerId, nonce: int, now_s: float) -> list[Burst]:
        """A peer wants to measure the way from here: a burst, and none where it asks too often."""
        asked = self._asked.setdefault(peer, deque(maxlen=MOST_ASKED))
        if len(asked) == asked.maxlen and now_s - asked[0] < TRAINS_S:
            return []
        asked.append(now_s)
        return [Burst(nonce, index, bytes(BURST_BYTES)) for index in range(BURSTS)]

    def landed(self, peer: PeerId, answer: Landed, now_s: float) -> None:
        """A peer says that the whole burst is there."""
        sent = self._under_way
        if sent is None or (sent.peer, sent.answer) != (peer, answer):
            return
        self._sent_Bps[peer] = rate_Bps(now_s - sent.left_s, self._rtt_s[peer])
        self._known[peer] = self._sent_Bps[peer], now_s
        self._under_way, self._untold = None, True

    def came(self, peer: PeerId, burst: Burst, now_s: float) -> Landed | str | None:
        """A peer's message; returns the answer, or what is wrong with it."""
        arrivals = self._arrivals.setdefault(peer, deque(maxlen=MOST_TRAINS * BURSTS))
        if len(arrivals) == arrivals.maxlen and now_s - arrivals[0] < TRAINS_S:
            return f"sent more than {MOST_TRAINS * BURSTS} Bursts in {TRAINS_S:.0f} s"
        arrivals.append(now_s)
        if len(burst.payload) != BURST_BYTES:  # it would look faster, or slower, than it is
            return f"sent a Burst of {len(burst.payload)} bytes, must be {BURST_BYTES}"
        if burst.index == 0:
            self._coming[peer] = _Coming(burst.nonce, now_s)
            return None
        coming = self._coming.get(peer)
        if coming is None or (coming.nonce, coming.awaited) != (burst.nonce, burst.index):
            self._coming.pop(peer, None)  # one is left out: this burst tells nothing any more
            return None
        coming.awaited += 1
        if burst.index < BURSTS - 1:
            return None
        del self._coming[peer]
        self._came_Bps[peer] = (BURSTS - 1) * BURST_BYTES / max(LEAST_S, now_s - coming.began_s)
        self._untold = True
        return Landed(burst.nonce, bytes(memoryview(burst.payload)[-PROOF_BYTES:]))

    def forget(self, peer: PeerId) -> None:
        """Its connection broke."""
        if len(self._asked) > MOST_TARGETS * MOST_TRAINS:
            self._asked.clear()
        self._coming.pop(peer, None)
        if self._under_way is not None and self._under_way.peer == peer:
            self._under_way = None

    def news(self) -> tuple[tuple[PeerId, float, float], ...] | None:
        """Peer, rate to it, rate from it, as for `Rates`; None: nothing new since it was last asked."""
        if not self._untold or self._under_way is not None:
            return None
        self._untold = False
        peers = sorted({*self._sent_Bps, *self._came_Bps})[:256]
        told = tuple((p, self._sent_Bps.get(p, 0.0), self._came_Bps.get(p, 0.0)) for p in peers)
        self._sent_Bps.clear()
        self._came_Bps.clear()
        return told


def rate_Bps(whole_s: float, rtt_s: float) -> float:
    """Of a burst whose end was seen `whole_s` after it was sent, or asked for.

    Pings that met a busy loop tell a round trip that is too long, and a burst that is answered about as soon
    would seem to have taken no time at all.
    """
    return BURSTS * BURST_BYTES / max(LEAST_S, whole_s - rtt_s, LEAST_PART * whole_s)
