"""`TopK`'s all-gather of one payload from each rank, in ceil(log2 P) hops for any P (Bruck et al., 1997).

Each payload spreads independently along a binomial tree.  The rank at distance f below the payload's origin
forwards the payload to the ranks at distance f + d, for each power of two d > f with f + d < P.  The tree for
P = 6, from the origin at distance 0 downwards (hop 0: d = 1, hop 1: d = 2, hop 2: d = 4):

    distance   0 --hop 0--> 1 --hop 1--> 3
               0 --hop 1--> 2        1 --hop 2--> 5
               0 --hop 2--> 4

The payloads of all origins spread at the same time, so each rank sends and receives P - 1 payloads.  A direct
all-gather has only one hop, in which each rank sends its payload to every other rank.
"""

from __future__ import annotations

from typing import Any

from gridtrain.core.collectives.collective import (
    CollectiveBase,
    CollectiveEffect,
    SendTo,
    StoreFromRank,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected: the ranks at distances 1, 2, 4 .. on both sides."""
    distances = [1 << hop for hop in range((world_size - 1).bit_length())]
    return frozenset((rank + sign * d) % world_size for d in distances for sign in (1, -1))


class AllGather(CollectiveBase):
    """One all-gather; `PayloadSlot.segment` is the rank from which the payload originates.

    Args:
        flags: flags of this rank's contribution (`core.group.round_flags`).
        direct: whether to use one hop instead of ceil(log2 P) hops.
    """

    __slots__ = ("_direct", "_missing", "_own_flags")

    def __init__(self, rank: int, world_size: int, flags: int, *, direct: bool = False) -> None:
        super().__init__("all-gather", rank, world_size, flags)
        self._own_flags = int(flags)  # `_flags` may include flags of payloads that arrived before the start
        self._direct = direct
        # For each origin whose payload has not arrived: the payload's sender and slot.
        self._missing = {origin: self._arrival(origin) for origin in range(world_size) if origin != rank}

    def start(self) -> list[CollectiveEffect]:
        sends = self._forward(self._rank, self._own_flags)
        return sends if self._missing else sends + self._completed()

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        origin = slot.segment
        self._check(from_rank, slot, self._missing.get(origin), "no further payload of this origin")
        del self._missing[origin]
        self._flags |= flags
        stored = StoreFromRank(origin, payload, self._provenance(from_rank, contributors=1, roundings=1))
        effects = [stored, *self._forward(origin, flags)]
        return effects if self._missing else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing.values())

    def _arrival(self, origin: int) -> tuple[int, PayloadSlot]:
        hop = 0 if self._direct else self._distance(origin).bit_length() - 1
        sender = origin if self._direct else (self._rank + (1 << hop)) % self._world_size
        return sender, PayloadSlot(CollectivePhase.ALL_GATHER, hop, origin)

    def _forward(self, origin: int, flags: int) -> list[CollectiveEffect]:
        """Forward the payload of `origin` down the tree; if direct, send only the payload of this rank."""
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
            SendTo(rank, PayloadSlot(CollectivePhase.ALL_GATHER, hop, origin), flags) for rank, hop in hops
        ]

    def _distance(self, origin: int) -> int:
        return (origin - self._rank) % self._world_size
