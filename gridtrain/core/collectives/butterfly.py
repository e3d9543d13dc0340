"""gTop-k in a butterfly: pairs the ranks that swap in each hop, for any number P of ranks (Shi et al., 2019).

Let Q be the largest power of two <= P.  First, each rank >= Q sends its payload down to rank - Q.  Then each
rank < Q swaps payloads with rank XOR 1, 2, 4 .. Q/2.  Finally, the result is sent back up.  P = 6, Q = 4:

    rank    0      1      2      3      4      5
    FOLD    <-------------------------- 4
                   <-------------------------- 5
    SWAP 0  <----->       <----->
    SWAP 1  <------------->
                   <------------->
    UNFOLD  --------------------------> 4
                   --------------------------> 5

Before the SWAP at distance d, the d ranks of an aligned block hold the same payload; afterwards 2 d ranks do.
Since these 2 d ranks compute the same merge, exactly one of them must keep the value or rounding error that
the merge drops at index i: the rank with rank mod 2 d == i mod 2 d.  In the FOLD, only one rank merges; it
keeps all dropped values (owner_modulus 1, owner_residue 0).
"""

from __future__ import annotations

from gridtrain.core.collectives.hop_exchange import Hop, HopExchange
from gridtrain.core.messages import CollectivePhase, PayloadSlot


def schedule(rank: int, world_size: int) -> list[Hop]:
    """Return all hops of `rank` in order."""
    base = 1 << (world_size.bit_length() - 1)  # Q
    fold, unfold = PayloadSlot(CollectivePhase.FOLD), PayloadSlot(CollectivePhase.UNFOLD)
    hops = base.bit_length() - 1
    if rank >= base:
        down = rank - base
        result = Hop(unfold, down, False, True, contributors=world_size, roundings=hops + 2)
        return [Hop(fold, down, is_sender=True, is_receiver=False), result]
    swaps = [_swap(rank, world_size, hop) for hop in range(hops)]
    up = rank + base
    if up >= world_size:
        return swaps
    folded = Hop(fold, up, is_sender=False, is_receiver=True, owner_modulus=1, contributors=1, roundings=1)
    return [folded, *swaps, Hop(unfold, up, is_sender=True, is_receiver=False)]


def _swap(rank: int, world_size: int, hop: int) -> Hop:
    distance, base = 1 << hop, 1 << (world_size.bit_length() - 1)
    partner = rank ^ distance
    first = partner - partner % distance  # first rank of the aligned block whose sum the partner holds
    folded = max(0, min(first + distance, world_size - base) - first)
    return Hop(
        PayloadSlot(CollectivePhase.SWAP, hop),
        partner,
        is_sender=True,
        is_receiver=True,
        owner_modulus=2 * distance,
        contributors=distance + folded,
        roundings=hop + 2,  # the sender's own encoding, the fold, and each earlier swap
    )


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected."""
    return frozenset(hop.partner for hop in schedule(rank, world_size))


class ButterflyExchange(HopExchange):
    """One gTop-k exchange according to `schedule`.

    Args:
        flags: flags of this rank's contribution (`core.group.round_flags`).
    """

    __slots__ = ()

    def __init__(self, rank: int, world_size: int, flags: int) -> None:
        super().__init__("butterfly", schedule(rank, world_size), rank, world_size, flags)
