"""gTop-k as a butterfly, for any number of ranks P >= 1 (after Shi et al., 2019, which is a tree).

Decides who exchanges with whom, in which order, and who keeps what a merge drops.  Never opens a
payload: the workspace merges, truncates and keeps.

With Q the largest power of two <= P, ranks >= Q first hand theirs down, then all ranks < Q swap
with rank XOR 1, 2, 4 .. Q/2, and the result goes back up.  P = 6, Q = 4:

    rank    0      1      2      3      4      5
    FOLD    <-------------------------- 4
                   <-------------------------- 5
    SWAP 0  <----->       <----->
    SWAP 1  <------------->
                   <------------->
    UNFOLD  --------------------------> 4
                   --------------------------> 5

Before SWAP with distance d, the d ranks of an aligned block hold the same payload; after it, 2 d do.
All of those compute the same merge, so exactly one must keep what it drops or rounds: at index i the
one with rank mod 2 d == i mod 2 d.  In the fold only one rank merges, and it keeps all: (1, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.protocol.collective import (
    Adopt,
    Arrived,
    CollectiveEffect,
    Complete,
    MergeIn,
    SendTo,
    Source,
    check_due,
)
from gridtrain.protocol.messages import Phase, Place


@dataclass(frozen=True, slots=True)
class Hop:
    """One line of a rank's schedule: send mine to `partner`, or wait for theirs, or both.

    `owner_modulus`: ranks that compute the same merge from what comes (0: it is not merged).
    `members`, `roundings`: see `collective.Source`, of what comes.
    """

    place: Place
    partner: int
    sends: bool
    receives: bool
    owner_modulus: int = 0
    members: int = 0
    roundings: int = 0


def schedule(rank: int, world_size: int) -> list[Hop]:
    """All hops of `rank` in order: the butterfly as data."""
    base = 1 << (world_size.bit_length() - 1)  # Q
    fold, unfold = Place(Phase.FOLD), Place(Phase.UNFOLD)
    hops = base.bit_length() - 1
    if rank >= base:
        down = rank - base
        result = Hop(unfold, down, False, True, members=world_size, roundings=hops + 2)
        return [Hop(fold, down, sends=True, receives=False), result]
    swaps = [_swap(rank, world_size, hop) for hop in range(hops)]
    up = rank + base
    if up >= world_size:
        return swaps
    folded = Hop(fold, up, sends=False, receives=True, owner_modulus=1, members=1, roundings=1)
    return [folded, *swaps, Hop(unfold, up, sends=True, receives=False)]


def _swap(rank: int, world_size: int, hop: int) -> Hop:
    distance, base = 1 << hop, 1 << (world_size.bit_length() - 1)
    partner = rank ^ distance
    first = partner - partner % distance  # of the aligned block whose sum the partner holds
    folded = max(0, min(first + distance, world_size - base) - first)
    return Hop(
        Place(Phase.SWAP, hop),
        partner,
        sends=True,
        receives=True,
        owner_modulus=2 * distance,
        members=distance + folded,
        roundings=hop + 2,  # by the sender's own encoding, the fold, and each swap before
    )


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks to which this one needs an edge."""
    return frozenset(hop.partner for hop in schedule(rank, world_size))


class Butterfly:
    """One gTop-k exchange as rank `rank` of `world_size` sees it.

    A partner may be hops ahead; what comes early is held, at most one payload for each hop.
    `skip`: this rank's gradient is not finite.  See `gridtrain.protocol.collective.Collective`.
    """

    __slots__ = ("_arrived", "_awaited", "_hops", "_rank", "_skip", "_started", "_world_size", "complete")

    def __init__(self, rank: int, world_size: int, skip: bool) -> None:
        self._rank = rank
        self._world_size = world_size
        self._skip = skip
        self._hops = schedule(rank, world_size)  # the first one is the current one
        self._awaited = {hop.place: (hop.partner, hop.place) for hop in self._hops if hop.receives}
        self._arrived: dict[Place, Arrived] = {}
        self._started = False
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        self._started = True
        return self._enter() + self._advance()

    def handle(self, event: Arrived, now_s: float) -> list[CollectiveEffect]:
        says = f"butterfly, rank {self._rank} of {self._world_size}"
        check_due(says, event, self._awaited.get(event.place), "nothing (more) of this place")
        del self._awaited[event.place]
        self._arrived[event.place] = event
        return self._advance() if self._started else []

    def waiting_for(self) -> frozenset[int]:
        return frozenset() if self.complete else frozenset({self._hops[0].partner})

    def _advance(self) -> list[CollectiveEffect]:
        """Go through the hops as far as what has arrived allows."""
        effects: list[CollectiveEffect] = []
        while self._hops and (not self._hops[0].receives or self._hops[0].place in self._arrived):
            hop = self._hops.pop(0)
            if hop.receives:
                event = self._arrived.pop(hop.place)
                self._skip |= event.skip
                effects.append(self._take(hop, event))
            effects += self._enter()
        return effects

    def _enter(self) -> list[CollectiveEffect]:
        """What a hop begins with: mine goes out as it is before theirs is merged into it."""
        if not self._hops:
            self.complete = True
            return [Complete(self._skip)]
        hop = self._hops[0]
        return [SendTo(hop.partner, hop.place, self._skip)] if hop.sends else []

    def _take(self, hop: Hop, event: Arrived) -> CollectiveEffect:
        source = Source(event.from_rank, hop.members, self._world_size, hop.roundings)
        if hop.owner_modulus:
            return MergeIn(event.payload, hop.owner_modulus, self._rank % hop.owner_modulus, source)
        return Adopt(event.payload, source)
