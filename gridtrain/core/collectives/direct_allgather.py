"""All-gather of a few bytes from each member of a pipeline, in one hop while the members are few.

    up to 8 members    each sends to each         rank 0 --> 1, 2, 3 at once         1 hop
    more               a tree per origin          rank 0 --> 3 --> 1, 0 --> 2        ceil(log2 P) hops

The first stage finishes last, when all other payloads have arrived already: in every step, the whole group
waits for the hops of its payload before it can vote.  Among up to 4 members the tree needs the same
connections, among 8 it has 5 of 7; with more members, connections and traffic would grow with the square.
"""

from __future__ import annotations

from gridtrain.core.collectives import allgather, direct
from gridtrain.core.collectives.allgather import AllGather

MAX_DIRECT_MEMBERS = 8
"""Largest number of members that send to each other directly.  Part of the protocol."""


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks that this one must be connected to."""
    if world_size > MAX_DIRECT_MEMBERS:
        return allgather.neighbours(rank, world_size)
    return direct.neighbours(rank, world_size)


def make_allgather(rank: int, world_size: int, skip: bool) -> AllGather:
    """The collective; `PayloadSlot.segment` is the origin's rank."""
    return AllGather(rank, world_size, skip, direct=world_size <= MAX_DIRECT_MEMBERS)
