"""Dense all-reduce in two hops: each member sends its part of a segment to the owner, each owner the sum to
all.

The vector is split into P segments, a segment into slices, as in a ring.  Rank s owns segment s.  Here
segment 0 at P = 4:

    REDUCE   1 --> 0 <-- 2        GATHER   1 <-- 0 --> 2
                   ^                             |
                   3                             3

All owners do so at once, so each link carries what a ring's does, 2 (P - 1) / P vectors each way, but a value
passes two hops and not 2 (P - 1): for vectors so small that hops cost more than bytes.  Each member is
connected to each other one.

An owner starts with its own part and adds the others' in the ring's order, those of rank s + 1, s + 2 .. s -
1, so both exchanges end with the same bits.  A payload that arrives before its turn is held: at most one for
each sender and slice, and none that is longer than the slice.

All slices of a member carry the same skip mark, so when a slice is complete, the verdict on skipping is
known.  A retry starts from the beginning: it repeats only two hops.
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveBase,
    CollectiveEffect,
    PayloadReceived,
    SendTo,
    StoreSlice,
)
from gridtrain.core.collectives.ring import MAX_SLICE_BYTES
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError


def count_slices(segment_bytes: int) -> int:
    """Number of slices of a segment; the same on all ranks.

    Slices have the ring's largest size: smaller ones would only be more work, as links are busy with other
    segments while a slice is added.
    """
    return max(1, -(-segment_bytes // MAX_SLICE_BYTES))


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks that this one must be connected to: all others."""
    return frozenset(range(world_size)) - {rank}


class DirectAllReduce(CollectiveBase):
    """One all-reduce with `slices` >= 1 for each segment.

    Args:
        skip: this rank's contribution is not finite.
        most_bytes: length of the longest slice of this rank's segment; None: payloads have no length.
    """

    __slots__ = ("_early", "_missing", "_most_bytes", "_others", "_slices", "_turns")

    def __init__(
        self, rank: int, world_size: int, slices: int, skip: bool, most_bytes: int | None = None
    ) -> None:
        super().__init__("direct", rank, world_size, skip)
        self._most_bytes = most_bytes
        self._slices = slices
        # The ring's order, and also that of sending, so that no rank is the first receiver of all others.
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._missing = {
            (sender, slot)
            for sender in self._others
            for i in range(slices)
            for slot in (_contribution_slot(rank, i), _sum_slot(sender, i))
        }
        self._turns = [0] * slices  # of the own segment: number of other parts in its sum
        self._early: dict[tuple[int, int], PayloadReceived] = {}  # by (slice, sender)

    def start(self, now_s: float) -> list[CollectiveEffect]:
        if not self._missing:
            return self._completed()
        return [
            SendTo(owner, _contribution_slot(owner, i), self._skip)
            for i in range(self._slices)
            for owner in self._others
        ]

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        key, slot = (event.from_rank, event.slot), event.slot
        self._check(event, key if key in self._missing else None)
        if slot.phase is CollectivePhase.REDUCE:
            self._check_length(event)
        self._missing.remove(key)
        self._skip |= event.skip
        effects: list[CollectiveEffect]
        if slot.phase is CollectivePhase.REDUCE:
            self._early[slot.slice, event.from_rank] = event
            effects = self._add(slot.slice)
        else:
            provenance = self._provenance(event, self._world_size, roundings=self._world_size)
            effects = [StoreSlice(slot.segment, slot.slice, event.payload, provenance)]
        return effects if self._missing else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing)

    def _check_length(self, event: PayloadReceived) -> None:
        """Before the payload is held: the buffer checks it only at its turn, and it may have up to 64 MiB."""
        if self._most_bytes is not None and len(event.payload) > self._most_bytes:
            raise RemoteProtocolError(
                f"{self._label}: rank {event.from_rank} sent {len(event.payload)} bytes for {event.slot}; "
                f"a slice of this segment has at most {self._most_bytes}",
                remedy="drop the peer; all members of a run train the same model",
            )

    def _add(self, index: int) -> list[CollectiveEffect]:
        """Add all parts whose turn it is; after the last one, send the sum."""
        effects: list[CollectiveEffect] = []
        while self._turns[index] < len(self._others):
            event = self._early.pop((index, self._others[self._turns[index]]), None)
            if event is None:
                return effects
            provenance = self._provenance(event, contributors=1, roundings=1)
            effects.append(AddSlice(self._rank, index, event.payload, provenance))
            self._turns[index] += 1
        return effects + [SendTo(rank, _sum_slot(self._rank, index), self._skip) for rank in self._others]


def _contribution_slot(owner: int, index: int) -> PayloadSlot:
    """Slot of a part that another rank sends to the segment's owner."""
    return PayloadSlot(CollectivePhase.REDUCE, 0, owner, index)


def _sum_slot(owner: int, index: int) -> PayloadSlot:
    """Slot of the sum that the owner sends to the other ranks."""
    return PayloadSlot(CollectivePhase.GATHER, 0, owner, index)
