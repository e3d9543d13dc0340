"""Dense all-reduce on a ring: reduce-scatter, then all-gather (Baidu, 2017; Patarasuk and Yuan, 2009).

Decides who sends which piece to its right neighbour and when.  Never touches a number, a clock or
a socket: the workspace adds and stores.

The vector is cut into P segments, a segment into slices.  A slice travels alone, so all links are
busy at once.  Its way is two turns round the ring, here segment 0 at P = 3 (reduced at rank 2):

    REDUCE   0 --hop 0--> 1 --hop 1--> 2          each member adds its own part, then passes it on
    GATHER   2 --hop 0--> 0 --hop 1--> 1          the sum goes round, each member stores it

The order of the additions is fixed by the ring and done once per segment, so all ranks end with the
same bits.  A REDUCE message says whether anybody on its way skips; once it has met everybody that is
the verdict, which GATHER carries on unchanged.
"""

from __future__ import annotations

from gridtrain.protocol.collective import (
    AddSlice,
    Arrived,
    CollectiveEffect,
    Complete,
    SendTo,
    Source,
    StoreSlice,
    check_due,
)
from gridtrain.protocol.messages import Phase, Place


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks to which this one needs an edge: its left and right on the ring."""
    return frozenset({(rank - 1) % world_size, (rank + 1) % world_size}) - {rank}


def ring_message_count(world_size: int, slices: int) -> int:
    """Messages that each rank sends, and receives, in one all-reduce."""
    return 2 * (world_size - 1) * slices


class Ring:
    """One all-reduce as rank `rank` of `world_size` sees it; `slices` >= 1 to a segment.

    `skip`: this rank's gradient is not finite.  See `gridtrain.protocol.collective.Collective`.
    """

    __slots__ = ("_any_skip", "_due", "_rank", "_skip", "_slices", "_world_size", "complete")

    def __init__(self, rank: int, world_size: int, slices: int, skip: bool) -> None:
        self._rank = rank
        self._world_size = world_size
        self._slices = slices
        self._skip = skip
        self._any_skip = skip
        self.complete = False
        # What comes next for each slice that is still to pass here.  A rank meets every segment
        # twice, but starts its own (no REDUCE comes) and completes that of its right (no GATHER).
        self._due: dict[tuple[int, int], Place] = {}
        if world_size > 1:
            for segment in range(world_size):
                first = self._gather_due if segment == rank else self._reduce_due
                for slice_ in range(slices):
                    self._due[segment, slice_] = first(segment, slice_)

    def start(self, now_s: float) -> list[CollectiveEffect]:
        if self._world_size == 1:
            return self._completed()
        own = (Place(Phase.REDUCE, 0, self._rank, slice_) for slice_ in range(self._slices))
        return [self._to_right(place, self._skip) for place in own]

    def handle(self, event: Arrived, now_s: float) -> list[CollectiveEffect]:
        place = event.place
        self._check(event)
        last_hop = self._world_size - 2
        effects: list[CollectiveEffect] = []
        match place.phase:
            case Phase.REDUCE:
                skip = self._skip or event.skip
                source = self._source(event, place.hop + 1)
                effects.append(AddSlice(place.segment, place.slice, event.payload, source))
                if place.hop < last_hop:
                    onward = Place(Phase.REDUCE, place.hop + 1, place.segment, place.slice)
                    self._due[place.segment, place.slice] = self._gather_due(place.segment, place.slice)
                else:  # everybody's part is in: the sum begins its turn here and need not come back
                    onward = Place(Phase.GATHER, 0, place.segment, place.slice)
                    del self._due[place.segment, place.slice]
                effects.append(self._to_right(onward, skip))
            case _:  # GATHER: `_check` lets nothing else through
                skip = event.skip
                source = self._source(event, self._world_size)
                effects.append(StoreSlice(place.segment, place.slice, event.payload, source))
                if place.hop < last_hop:
                    onward = Place(Phase.GATHER, place.hop + 1, place.segment, place.slice)
                    effects.append(self._to_right(onward, skip))
                del self._due[place.segment, place.slice]
        self._any_skip |= skip
        return effects if self._due else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset({(self._rank - 1) % self._world_size}) if self._due else frozenset()

    def _reduce_due(self, segment: int, slice_: int) -> Place:
        return Place(Phase.REDUCE, (self._rank - segment - 1) % self._world_size, segment, slice_)

    def _gather_due(self, segment: int, slice_: int) -> Place:
        return Place(Phase.GATHER, (self._rank - segment) % self._world_size, segment, slice_)

    def _check(self, event: Arrived) -> None:
        place = self._due.get((event.place.segment, event.place.slice))
        due = None if place is None else ((self._rank - 1) % self._world_size, place)
        says = f"ring, rank {self._rank} of {self._world_size}"
        check_due(says, event, due, "nothing more of this slice")

    def _source(self, event: Arrived, members: int) -> Source:
        return Source(event.from_rank, members, self._world_size, roundings=members)

    def _to_right(self, place: Place, skip: bool) -> SendTo:
        return SendTo((self._rank + 1) % self._world_size, place, skip)

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [Complete(self._any_skip)]
