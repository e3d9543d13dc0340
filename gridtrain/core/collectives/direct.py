"""All-reduce in two hops, for small models and gTop-k: the owner of each segment returns the segment's sum.

The vector is split into P segments, and each segment into slices, as in a ring; a sparse segment has one
slice, and its sum is truncated.  Rank s owns segment s.  For example, segment 0 for P = 4:

    REDUCE   1 --> 0 <-- 2        GATHER   1 <-- 0 --> 2
                   ^                             |
                   3                             3

All segments are exchanged at the same time, so each member sends and receives as much as in a ring,
2 (P - 1) / P vectors, but a value takes 2 hops instead of 2 (P - 1).  This is faster for small vectors, for
which the hops cost more time than the bytes.  Every member is connected to every other member.

The owner of segment s starts with its own part and adds the parts of ranks s + 1, s + 2 .. s - 1 (modulo P),
in the same order as a ring, so the results are bit-identical to a ring's.  A payload that arrives too early
is deferred, at most one for each sender and slice; a payload that is longer than the longest slice violates
the protocol.

All slices of a member carry the same flags, so the first complete slice shows whether the step is skipped.
A retry starts from the beginning, because it repeats only two hops.
"""

from __future__ import annotations

from typing import Any

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveBase,
    CollectiveEffect,
    SendTo,
    StoreSlice,
)
from gridtrain.core.collectives.ring import MAX_SLICE_BYTES
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError


def count_slices(segment_bytes: int) -> int:
    """Return the number of slices of a segment; it is the same on all ranks.

    Slices have the largest size that a ring uses.  Smaller slices would only cause more work, because the
    links are busy with other segments while a slice is added.
    """
    return max(1, -(-segment_bytes // MAX_SLICE_BYTES))


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected: all other ranks."""
    return frozenset(range(world_size)) - {rank}


class DirectAllReduce(CollectiveBase):
    """One all-reduce.

    Args:
        slices: the number of slices of each segment, at least 1.
        flags: flags of this rank's contribution (`core.group.round_flags`).
        most_bytes: length in bytes of the longest slice of this rank's segment; None if payloads have no
            length, as in a simulation.
    """

    __slots__ = ("_early", "_missing", "_most_bytes", "_others", "_slices", "_turns")

    def __init__(
        self, rank: int, world_size: int, slices: int, flags: int, most_bytes: int | None = None
    ) -> None:
        super().__init__("direct", rank, world_size, flags)
        self._most_bytes = most_bytes
        self._slices = slices
        # The ring's order of additions.  It is also the order of sending, so that the members do not all send
        # to the same rank first.
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._missing = {
            (sender, slot)
            for sender in self._others
            for i in range(slices)
            for slot in (_contribution_slot(rank, i), _sum_slot(sender, i))
        }
        self._turns = [0] * slices  # by slice of this rank's segment: number of parts added
        self._early: dict[tuple[int, int], Any] = {}  # payloads by (slice, sender)

    def start(self) -> list[CollectiveEffect]:
        if not self._missing:
            return self._completed()
        return [
            SendTo(owner, _contribution_slot(owner, i), self._flags)
            for i in range(self._slices)
            for owner in self._others
        ]

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        key = (from_rank, slot)
        self._check(from_rank, slot, key if key in self._missing else None)
        if slot.phase is CollectivePhase.REDUCE:
            self._check_length(from_rank, slot, payload)
        self._missing.remove(key)
        self._flags |= flags
        effects: list[CollectiveEffect]
        if slot.phase is CollectivePhase.REDUCE:
            self._early[slot.slice, from_rank] = payload
            effects = self._add(slot.slice)
        else:
            provenance = self._provenance(from_rank, self._world_size, roundings=self._world_size)
            effects = [StoreSlice(slot.segment, slot.slice, payload, provenance)]
        return effects if self._missing else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing)

    def _check_length(self, from_rank: int, slot: PayloadSlot, payload: Any) -> None:
        """Raise `RemoteProtocolError` if the payload is too long to be stored until it is due.

        A message can carry up to 64 MiB; the buffer checks the exact length only when it adds the payload.
        """
        if self._most_bytes is not None and len(payload) > self._most_bytes:
            raise RemoteProtocolError(
                f"{self._label}: rank {from_rank} sent {len(payload)} bytes for {slot}, "
                f"but a slice of this segment is at most {self._most_bytes} bytes long",
                remedy="check that all members train the same model",
            )

    def _add(self, index: int) -> list[CollectiveEffect]:
        """Add the parts that have arrived, in the ring's order; after the last part, send the sum."""
        effects: list[CollectiveEffect] = []
        while self._turns[index] < len(self._others):
            sender = self._others[self._turns[index]]
            if (index, sender) not in self._early:
                return effects
            provenance = self._provenance(sender, contributors=1, roundings=1)
            effects.append(AddSlice(self._rank, index, self._early.pop((index, sender)), provenance))
            self._turns[index] += 1
        return effects + [SendTo(rank, _sum_slot(self._rank, index), self._flags) for rank in self._others]


def _contribution_slot(owner: int, index: int) -> PayloadSlot:
    """Return the slot of a part that another rank sends to the segment's owner."""
    return PayloadSlot(CollectivePhase.REDUCE, 0, owner, index)


def _sum_slot(owner: int, index: int) -> PayloadSlot:
    """Return the slot of the sum that the segment's owner sends to the other ranks."""
    return PayloadSlot(CollectivePhase.GATHER, 0, owner, index)
