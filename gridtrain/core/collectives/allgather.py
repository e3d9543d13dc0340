"""All-gather of one payload from each rank, in ceil(log2 P) hops for any P (Bruck et al., 1997).

Decides who passes whose payload to whom and when.  Never opens a payload: it is sent on as it came.

Each payload spreads alone, along a binomial tree; no hop waits for another.  The rank at distance f
below its origin hands it to those at distance f + d, for each power of two d > f.  P = 6, downwards
from the origin at distance 0 (hop 0: d = 1, hop 1: d = 2, hop 2: d = 4):

    distance   0 --hop 0--> 1 --hop 1--> 3
               0 --hop 1--> 2        1 --hop 2--> 5
               0 --hop 2--> 4

All origins do so at once, so each rank sends and receives P - 1 payloads, one for each other origin.
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    CollectiveEffect,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreFromRank,
    check_expected,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks to which this one needs an edge: those at distance 1, 2, 4 .. on both sides."""
    distances = [1 << hop for hop in range((world_size - 1).bit_length())]
    return frozenset((rank + sign * d) % world_size for d in distances for sign in (1, -1))


class AllGather:
    """One all-gather as rank `rank` of `world_size` sees it; `Place.segment` is the origin's rank.

    `skip`: this rank's gradient is not finite.  See `gridtrain.core.collectives.collective.Collective`.
    """

    __slots__ = ("_any_skip", "_missing", "_rank", "_skip", "_world_size", "complete")

    def __init__(self, rank: int, world_size: int, skip: bool) -> None:
        self._rank = rank
        self._world_size = world_size
        self._skip = skip
        self._any_skip = skip
        self.complete = False
        # Where each origin's payload will come from, and as what: (sender, place).
        self._missing = {origin: self._arrival(origin) for origin in range(world_size) if origin != rank}

    def start(self, now_s: float) -> list[CollectiveEffect]:
        sends = self._pass_on(self._rank, self._skip)
        return sends if self._missing else sends + self._completed()

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        origin = event.slot.segment
        says = f"all-gather, rank {self._rank} of {self._world_size}"
        check_expected(says, event, self._missing.get(origin), "nothing more of this origin")
        del self._missing[origin]
        self._any_skip |= event.skip
        source = Provenance(event.from_rank, 1, self._world_size, roundings=1)
        effects = [StoreFromRank(origin, event.payload, source), *self._pass_on(origin, event.skip)]
        return effects if self._missing else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing.values())

    def _arrival(self, origin: int) -> tuple[int, PayloadSlot]:
        hop = self._distance(origin).bit_length() - 1
        return (self._rank + (1 << hop)) % self._world_size, PayloadSlot(
            CollectivePhase.ALL_GATHER, hop, origin
        )

    def _pass_on(self, origin: int, skip: bool) -> list[CollectiveEffect]:
        """To those at distance f + 2**hop below the origin, as far as the ring of ranks goes."""
        distance = self._distance(origin)
        hops = range(distance.bit_length(), (self._world_size - 1).bit_length())
        return [
            SendTo(
                (self._rank - (1 << hop)) % self._world_size,
                PayloadSlot(CollectivePhase.ALL_GATHER, hop, origin),
                skip,
            )
            for hop in hops
            if distance + (1 << hop) < self._world_size
        ]

    def _distance(self, origin: int) -> int:
        return (origin - self._rank) % self._world_size

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [CollectiveComplete(self._any_skip)]
