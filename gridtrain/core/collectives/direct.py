"""Dense all-reduce in two hops: each member sends each other one its chunk, and each one its sum to all.

Decides who sends which slice to whom, and in which order parts are added.  Never touches a number, a clock or
a socket: the workspace adds and stores.

The vector is cut into P segments, a segment into slices, as in a ring.  Segment s belongs to rank s.  Here
segment 0 at P = 4:

    REDUCE   1 --> 0 <-- 2        GATHER   1 <-- 0 --> 2
                   ^                             |
                   3                             3

All owners do so at once, so each line carries what a ring's does, 2 (P - 1) / P vectors each way, but a
number passes two hops and not 2 (P - 1): for vectors so small that hops cost more than bytes.  Each member
needs an edge to each other one.

An owner begins with its own part and adds the others' as the ring does, those of rank s + 1, s + 2 .. s - 1:
what comes before its turn is held, at most one payload for each sender and slice, and none that is longer
than the slice.  So the order of the additions is the ring's, and both exchanges end with the same bits.

All slices of a member carry the same mark, so when a slice is whole, whether anybody skips is known.  A retry
begins anew: what it repeats is two hops.
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveComplete,
    CollectiveEffect,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreSlice,
    check_expected,
)
from gridtrain.core.collectives.ring import MAX_SLICE_BYTES
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError


def count_slices(segment_bytes: int) -> int:
    """In how many slices a segment of so many bytes travels; the same on all ranks.

    As large as a ring's at most, and no smaller ones: a line is busy with other chunks while one is added, so
    they would only be more work.
    """
    return max(1, -(-segment_bytes // MAX_SLICE_BYTES))


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks to which this one needs an edge: all others."""
    return frozenset(range(world_size)) - {rank}


class DirectAllReduce:
    """One all-reduce as rank `rank` of `world_size` sees it; `slices` >= 1 to a segment.

    `skip`: this rank's gradient is not finite.  `most_bytes`: the longest slice of this rank's segment; None:
    payloads have no bytes.  See `gridtrain.core.collectives.collective.Collective`.
    """

    __slots__ = (
        "_early",
        "_missing",
        "_most_bytes",
        "_others",
        "_rank",
        "_skip",
        "_slices",
        "_turns",
        "_world_size",
        "complete",
    )

    def __init__(
        self, rank: int, world_size: int, slices: int, skip: bool, most_bytes: int | None = None
    ) -> None:
        self._most_bytes = most_bytes
        self._rank = rank
        self._world_size = world_size
        self._slices = slices
        self._skip = skip
        self.complete = False
        # The ring's order, and also that of sending: no rank is everybody's first.
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._missing = {
            (sender, place)
            for sender in self._others
            for i in range(slices)
            for place in (_contribution_slot(rank, i), _sum_slot(sender, i))
        }
        self._turns = [0] * slices  # of my segment: how many of the others' parts are in its sum
        self._early: dict[tuple[int, int], PayloadReceived] = {}  # (slice, sender) -> what waits for its turn

    def start(self, now_s: float) -> list[CollectiveEffect]:
        if not self._missing:
            return self._completed()
        return [
            SendTo(owner, _contribution_slot(owner, i), self._skip)
            for i in range(self._slices)
            for owner in self._others
        ]

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        key = (event.from_rank, event.slot)
        says = f"direct, rank {self._rank} of {self._world_size}"
        check_expected(says, event, key if key in self._missing else None, "nothing (more) of this place")
        if event.slot.phase is CollectivePhase.REDUCE:
            self._check_length(event, says)
        self._missing.remove(key)
        self._skip |= event.skip
        effects: list[CollectiveEffect]
        if event.slot.phase is CollectivePhase.REDUCE:
            self._early[event.slot.slice, event.from_rank] = event
            effects = self._add(event.slot.slice)
        else:
            effects = [self._store(event)]
        return effects if self._missing else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing)

    def _check_length(self, event: PayloadReceived, says: str) -> None:
        """Before it is held: the workspace looks at it when its turn has come, and it may be 64 MiB long."""
        if self._most_bytes is not None and len(event.payload) > self._most_bytes:
            raise RemoteProtocolError(
                f"{says}: rank {event.from_rank} sent {len(event.payload)} bytes for {event.slot}; a slice "
                f"of this segment has at most {self._most_bytes}",
                remedy="drop the peer; all members of a run train the same model",
            )

    def _add(self, index: int) -> list[CollectiveEffect]:
        """All parts whose turn it is; with the last one the sum goes out."""
        effects: list[CollectiveEffect] = []
        while self._turns[index] < len(self._others):
            event = self._early.pop((index, self._others[self._turns[index]]), None)
            if event is None:
                return effects
            source = Provenance(event.from_rank, 1, self._world_size, roundings=1)
            effects.append(AddSlice(self._rank, index, event.payload, source))
            self._turns[index] += 1
        return effects + [SendTo(rank, _sum_slot(self._rank, index), self._skip) for rank in self._others]

    def _store(self, event: PayloadReceived) -> StoreSlice:
        source = Provenance(event.from_rank, self._world_size, self._world_size, roundings=self._world_size)
        return StoreSlice(event.slot.segment, event.slot.slice, event.payload, source)

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [CollectiveComplete(self._skip)]


def _contribution_slot(owner: int, index: int) -> PayloadSlot:
    """What everybody else sends to the segment's owner."""
    return PayloadSlot(CollectivePhase.REDUCE, 0, owner, index)


def _sum_slot(owner: int, index: int) -> PayloadSlot:
    """What the owner sends to everybody else."""
    return PayloadSlot(CollectivePhase.GATHER, 0, owner, index)
