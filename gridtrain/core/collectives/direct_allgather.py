"""What each member of a pipeline says to all others when its stage is done: in one hop, while they are few.

Decides over which edges a few bytes of each member reach all others.  Never opens a payload.

    up to 8 members    each tells each            rank 0 --> 1, 2, 3 at once         1 hop
    more               an all-gather              rank 0 --> 3 --> 1, 0 --> 2        ceil(log2 P) hops

The first stage drains last, when all others' payloads are there already: the hops of its own are what the
whole group waits for in every step before it can vote.  Among up to 4 members the all-gather needs the same
edges, among 8 it has 5 of 7; with more, edges (and what goes over them) would grow with the square.
"""

from __future__ import annotations

from gridtrain.core.collectives import allgather
from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.collective import CollectiveEffect, SendTo
from gridtrain.core.messages import CollectivePhase, PayloadSlot

MAX_DIRECT_MEMBERS = 8
"""Part of the protocol: members up to which each tells each."""


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks to which this one needs an edge."""
    if world_size > MAX_DIRECT_MEMBERS:
        return allgather.neighbours(rank, world_size)
    return frozenset(range(world_size)) - {rank}


def make_allgather(rank: int, world_size: int, skip: bool) -> AllGather:
    """The collective, as rank `rank` of `world_size` sees it; `Place.segment` is the origin's rank."""
    return (AllGather if world_size > MAX_DIRECT_MEMBERS else DirectAllGather)(rank, world_size, skip)


class DirectAllGather(AllGather):
    """As `AllGather`, but nobody passes on what another one says: all of it is hop 0."""

    __slots__ = ()

    def _arrival(self, origin: int) -> tuple[int, PayloadSlot]:
        return origin, PayloadSlot(CollectivePhase.ALL_GATHER, 0, origin)

    def _pass_on(self, origin: int, skip: bool) -> list[CollectiveEffect]:
        if origin != self._rank:
            return []
        others = (rank for rank in range(self._world_size) if rank != origin)
        return [SendTo(rank, PayloadSlot(CollectivePhase.ALL_GATHER, 0, origin), skip) for rank in others]
