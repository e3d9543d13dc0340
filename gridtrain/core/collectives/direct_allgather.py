"""All-gather of stage summaries (a few bytes from each member of a pipeline), in one hop for small groups.

    up to 8 members    all send to all            rank 0 --> 1, 2, 3 at once         1 hop
    9 members or more  a tree for each origin     rank 0 --> 3 --> 1, 0 --> 2        ceil(log2 P) hops

The first stage finishes last, when all other payloads have already arrived.  In every step, the group can
therefore vote only after the first stage's payload has passed all hops.  For up to 4 members, the direct
all-gather needs the same connections as the tree; for 8 members, each member has 7 connections instead of 5.
In larger groups, connections and traffic would grow with the square of the number of members.
"""

from __future__ import annotations

from gridtrain.core.collectives import allgather, direct
from gridtrain.core.collectives.allgather import AllGather

MAX_DIRECT_ALLGATHER_MEMBERS = 8
"""Maximum number of members that send to each other directly; part of the protocol."""


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected."""
    if world_size > MAX_DIRECT_ALLGATHER_MEMBERS:
        return allgather.neighbours(rank, world_size)
    return direct.neighbours(rank, world_size)


def make_allgather(rank: int, world_size: int, flags: int) -> AllGather:
    """Return the all-gather for this number of members."""
    return AllGather(rank, world_size, flags, direct=world_size <= MAX_DIRECT_ALLGATHER_MEMBERS)
