"""All-gather of one payload from each rank, in ceil(log2 P) hops for any P (Bruck et al., 1997).

Each payload spreads independently along a binomial tree.  The rank at distance f below its origin sends it to
those at distance f + d, for each power of two d > f.  P = 6, downwards from the origin at distance 0 (hop 0:
d = 1, hop 1: d = 2, hop 2: d = 4):

    distance   0 --hop 0--> 1 --hop 1--> 3
               0 --hop 1--> 2        1 --hop 2--> 5
               0 --hop 2--> 4

All origins do so at once, so each rank sends and receives P - 1 payloads, one for each other origin.  A
direct all-gather has one hop: each rank sends its payload to every other.
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    CollectiveBase,
    CollectiveEffect,
    PayloadReceived,
    SendTo,
    StoreFromRank,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks that this one must be connected to: those at distance 1, 2, 4 .. on both sides."""
    distances = [1 << hop for hop in range((world_size - 1).bit_length())]
    return frozenset((rank + sign * d) % world_size for d in distances for sign in (1, -1))


class AllGather(CollectiveBase):
    """One all-gather; `PayloadSlot.segment` is the origin's rank.

    Args:
        skip: this rank's contribution is not finite.
        direct: one hop instead of ceil(log2 P).
    """

    __slots__ = ("_direct", "_missing", "_own_skip")

    def __init__(self, rank: int, world_size: int, skip: bool, *, direct: bool = False) -> None:
        super().__init__("all-gather", rank, world_size, skip)
        self._own_skip = skip  # `_skip` includes that of payloads which arrived before the start
        self._direct = direct
        # Each origin's payload that has not arrived: (sender, slot).
        self._missing = {origin: self._arrival(origin) for origin in range(world_size) if origin != rank}

    def start(self, now_s: float) -> list[CollectiveEffect]:
        sends = self._forward(self._rank, self._own_skip)
        return sends if self._missing else sends + self._completed()

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        origin = event.slot.segment
        self._check(event, self._missing.get(origin), "nothing more of this origin")
        del self._missing[origin]
        self._skip |= event.skip
        stored = StoreFromRank(origin, event.payload, self._provenance(event, contributors=1, roundings=1))
        effects = [stored, *self._forward(origin, event.skip)]
        return effects if self._missing else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing.values())

    def _arrival(self, origin: int) -> tuple[int, PayloadSlot]:
        hop = 0 if self._direct else self._distance(origin).bit_length() - 1
        sender = origin if self._direct else (self._rank + (1 << hop)) % self._world_size
        return sender, PayloadSlot(CollectivePhase.ALL_GATHER, hop, origin)

    def _forward(self, origin: int, skip: bool) -> list[CollectiveEffect]:
        """To all others, or to those at distance f + 2**hop below the origin, as far as the ranks go."""
        if self._direct:
            others = [rank for rank in range(self._world_size) if rank != origin]
            hops = [(rank, 0) for rank in others if origin == self._rank]
        else:
            distance = self._distance(origin)
            hops = [
                ((self._rank - (1 << hop)) % self._world_size, hop)
                for hop in range(distance.bit_length(), (self._world_size - 1).bit_length())
                if distance + (1 << hop) < self._world_size
            ]
        return [
            SendTo(rank, PayloadSlot(CollectivePhase.ALL_GATHER, hop, origin), skip) for rank, hop in hops
        ]

    def _distance(self, origin: int) -> int:
        return (origin - self._rank) % self._world_size
