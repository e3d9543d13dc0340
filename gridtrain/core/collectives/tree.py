"""gTop-k on a tree (Shi et al., 2019, alg. 3): merges payloads up the tree and sends the result down.

The tree is binomial, for any number of ranks P >= 1, with rank 0 at its root.  Rank r sends its payload to
rank r - 2^j, where 2^j is the lowest set bit of r, after merging the payloads of the ranks r + 1, r + 2,
r + 4 .. r + 2^(j-1), as far as these exist.  P = 6:

    rank         0      1      2      3      4      5
    TO_ROOT 0    <----- 1      <----- 3      <----- 5
    TO_ROOT 1    <------------ 2
    TO_ROOT 2    <-------------------------- 4
    FROM_ROOT    the same links in reverse, longest first

The published algorithm loses the values that a merge drops.  In this implementation, the rank that computes
a merge keeps all of them in its residual (owner_modulus 1, owner_residue 0).  A rank sends and receives at
most once on each of its links, which is the minimum for any exchange, and a leaf has only one link.  A tree
takes up to twice as many hops as the butterfly, and the leaves, about half of the ranks, take part in only
two of them.
"""

from __future__ import annotations

from gridtrain.core.collectives.hop_exchange import Hop, HopExchange
from gridtrain.core.messages import CollectivePhase, PayloadSlot


def schedule(rank: int, world_size: int) -> list[Hop]:
    """Return all hops of `rank` in order."""
    height = (world_size - 1).bit_length()
    own = (rank & -rank).bit_length() - 1 if rank else height  # the hop in which the rank sends to its parent
    children = [hop for hop in range(own) if rank + (1 << hop) < world_size]
    hops = [_merge(rank, world_size, hop) for hop in children]
    if rank:
        parent = rank - (1 << own)
        result = PayloadSlot(CollectivePhase.FROM_ROOT, own)
        hops.append(Hop(PayloadSlot(CollectivePhase.TO_ROOT, own), parent, is_sender=True, is_receiver=False))
        hops.append(Hop(result, parent, False, True, contributors=world_size, roundings=height + 1))
    hops += [
        Hop(PayloadSlot(CollectivePhase.FROM_ROOT, hop), rank + (1 << hop), is_sender=True, is_receiver=False)
        for hop in reversed(children)
    ]
    return hops


def _merge(rank: int, world_size: int, hop: int) -> Hop:
    child = rank + (1 << hop)
    return Hop(
        PayloadSlot(CollectivePhase.TO_ROOT, hop),
        child,
        is_sender=False,
        is_receiver=True,
        owner_modulus=1,
        contributors=min(1 << hop, world_size - child),
        roundings=hop + 1,  # the child's own encoding, and one for each of its merges
    )


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected: its parent and its children."""
    return frozenset(hop.partner for hop in schedule(rank, world_size))


class TreeExchange(HopExchange):
    """One gTop-k exchange according to `schedule`.

    Args:
        flags: flags of this rank's contribution (`core.group.round_flags`).
    """

    __slots__ = ()

    def __init__(self, rank: int, world_size: int, flags: int) -> None:
        super().__init__("tree", schedule(rank, world_size), rank, world_size, flags)
