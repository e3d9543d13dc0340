"""Dense all-reduce on a ring: reduce-scatter, then all-gather (Baidu, 2017; Patarasuk and Yuan, 2009).

The vector is split into P segments, a segment into slices.  Slices travel independently, so all links are
busy at once.  Each goes round the ring twice, here segment 0 at P = 3 (reduced at rank 2):

    REDUCE   0 --hop 0--> 1 --hop 1--> 2          each member adds its own part, then sends it on
    GATHER   2 --hop 0--> 0 --hop 1--> 1          the sum goes round, each member stores it

The ring fixes the order of the additions, and each segment is added once, so all ranks end with the same
bits.  A REDUCE message carries the skip marks of all members that it has passed; after the last one that is
the verdict, which GATHER carries on unchanged.

A retry of an aborted attempt (same generation, same contributions) resumes from what has arrived, because the
bits would be the same again.  Only the receiver knows what it has, so each rank first tells its left
neighbour, and is sent the rest:

    RESUME   1 --received: one byte for each slice--> 0      0 --REDUCE, GATHER of what is missing--> 1

What rank 1 lacks cannot be gone at rank 0: rank 0 overwrites a partial sum only with the total, and the total
exists only when all ranks further round the ring, so rank 1 as well, have received that partial sum.
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveBase,
    CollectiveEffect,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreSlice,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError

_MISSING_REDUCE, _MISSING_GATHER, _MISSING_NOTHING = range(3)
"""What a rank has not received of a slice, as RESUME says it: both messages, only GATHER, nothing."""

MAX_SLICE_BYTES = 2**20
MIN_SLICE_BYTES = 128 * 1024
"""A message costs each end about 0.3 ms of CPU time, in which a link of 1 Gbit/s carries 40 KiB."""
PREFERRED_SLICES = 8
"""Slices of a segment, where their size is then within these bounds: one in flight, one being added, others
waiting."""


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks that this one must be connected to: its left and right neighbours."""
    return frozenset({(rank - 1) % world_size, (rank + 1) % world_size}) - {rank}


def count_slices(segment_bytes: int) -> int:
    """Number of slices of a segment; the same on all ranks."""
    slice_bytes = min(MAX_SLICE_BYTES, max(MIN_SLICE_BYTES, -(-segment_bytes // PREFERRED_SLICES)))
    return max(1, -(-segment_bytes // slice_bytes))


def ring_message_count(world_size: int, slices: int) -> int:
    """Messages that each rank sends, and receives, in one all-reduce."""
    return 2 * (world_size - 1) * slices


class RingAllReduce(CollectiveBase):
    """One all-reduce with `slices` >= 1 for each segment.

    Args:
        skip: this rank's contribution is not finite.

    Attributes:
        attempt: number of the attempt: 0, or one more than before if made by `next_attempt`.
        received: what RESUME tells the left neighbour, a byte for each slice of each segment.
    """

    __slots__ = ("_due", "_own_skip", "_right_lacks", "_skipping", "_slices", "attempt", "received")

    def __init__(self, rank: int, world_size: int, slices: int, skip: bool) -> None:
        super().__init__("ring", rank, world_size, skip)
        self._slices = slices
        self._own_skip = skip
        self.attempt = 0
        self.received = b""
        self._right_lacks: bytes | None = None  # of a retry; None: no RESUME has arrived
        self._skipping: set[tuple[int, int]] = set()  # slices that are sent on with the skip mark
        # The next message of each slice that has not passed completely.  A rank receives each segment twice,
        # but starts its own (no REDUCE arrives) and completes that of its right neighbour (no GATHER).
        self._due: dict[tuple[int, int], PayloadSlot] = {}
        if world_size > 1:
            for segment in range(world_size):
                first = self._gather_due if segment == rank else self._reduce_due
                for slice_ in range(slices):
                    self._due[segment, slice_] = first(segment, slice_)

    def start(self, now_s: float) -> list[CollectiveEffect]:
        if self._world_size == 1:
            return self._completed()
        if self.attempt:
            left = (self._rank - 1) % self._world_size
            tell = SendTo(left, PayloadSlot(CollectivePhase.RESUME), False)
            return [tell] if self._due else [tell, *self._completed()]
        own = (PayloadSlot(CollectivePhase.REDUCE, 0, self._rank, slice_) for slice_ in range(self._slices))
        return [self._to_right(slot, self._own_skip) for slot in own]

    def next_attempt(self) -> RingAllReduce:
        """The next attempt, with the same contributions: it resumes from what has arrived."""
        again = RingAllReduce(self._rank, self._world_size, self._slices, self._own_skip)
        again.attempt = self.attempt + 1
        again._skip, again._due = self._skip, dict(self._due)
        again._skipping = set(self._skipping)
        again.received = bytes(again._lack(segment, slice_) for segment, slice_ in again._keys())
        return again

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        slot = event.slot
        if slot.phase is CollectivePhase.RESUME:
            return self._resume(event)
        key = (slot.segment, slot.slice)
        due = self._due.get(key)
        left = (self._rank - 1) % self._world_size
        self._check(event, None if due is None else (left, due), "nothing more of this slice")
        last_hop = self._world_size - 2
        effects: list[CollectiveEffect] = []
        match slot.phase:
            case CollectivePhase.REDUCE:
                skip = self._own_skip or event.skip
                effects.append(AddSlice(*key, event.payload, self._ring_provenance(event, slot.hop + 1)))
                if slot.hop < last_hop:
                    onward = PayloadSlot(CollectivePhase.REDUCE, slot.hop + 1, *key)
                    self._due[key] = self._gather_due(*key)
                else:  # all parts are in: the sum starts its turn here and does not come back
                    onward = PayloadSlot(CollectivePhase.GATHER, 0, *key)
                    del self._due[key]
                effects += self._forward(onward, skip)
            case _:  # GATHER: `_check` accepts nothing else
                skip = event.skip
                provenance = self._ring_provenance(event, self._world_size)
                effects.append(StoreSlice(*key, event.payload, provenance))
                if slot.hop < last_hop:
                    effects += self._forward(PayloadSlot(CollectivePhase.GATHER, slot.hop + 1, *key), skip)
                del self._due[key]
        self._skip |= skip
        return effects if self._due else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset({(self._rank - 1) % self._world_size}) if self._due else frozenset()

    # -- retry ---------------------------------------------------------------------------------------

    def _keys(self) -> list[tuple[int, int]]:
        """All slices, in the order of RESUME's bytes."""
        return [(segment, slice_) for segment in range(self._world_size) for slice_ in range(self._slices)]

    def _lack(self, segment: int, slice_: int) -> int:
        due = self._due.get((segment, slice_))
        if due is None:
            return _MISSING_NOTHING
        return _MISSING_REDUCE if due.phase is CollectivePhase.REDUCE else _MISSING_GATHER

    def _resume(self, event: PayloadReceived) -> list[CollectiveEffect]:
        """The right neighbour says what it has; send what it lacks and this rank has already."""
        right = (self._rank + 1) % self._world_size
        is_awaited = self.attempt > 0 and self._right_lacks is None
        due = (right, PayloadSlot(CollectivePhase.RESUME)) if is_awaited else None
        self._check(event, due, "no RESUME")
        keys, lacks = self._keys(), bytes(event.payload)
        if len(lacks) != len(keys) or max(lacks) > _MISSING_NOTHING:
            raise RemoteProtocolError(
                f"{self._label}: RESUME of rank {right} has {len(lacks)} bytes up to "
                f"{max(lacks, default=0)}; it must have {len(keys)} up to {_MISSING_NOTHING}",
                remedy="drop that peer; an honest one of the same version never sends this",
            )
        self._right_lacks = lacks
        effects: list[CollectiveEffect] = []
        for (segment, slice_), lack in zip(keys, lacks, strict=True):
            effects += self._missing_at_right(segment, slice_, lack, right)
        return effects

    def _missing_at_right(self, segment: int, slice_: int, lack: int, right: int) -> list[CollectiveEffect]:
        own_lack, hop = self._lack(segment, slice_), (right - segment) % self._world_size
        # It starts its own segment, and completes the one after its own with the last REDUCE.
        if lack == (_MISSING_REDUCE if hop == 0 else _MISSING_GATHER if hop == self._world_size - 1 else -1):
            raise RemoteProtocolError(
                f"{self._label}: RESUME of rank {right} lacks what is never sent of segment {segment}"
            )
        if lack == _MISSING_REDUCE and own_lack == _MISSING_NOTHING:
            raise RemoteProtocolError(
                f"{self._label}: RESUME of rank {right} lacks a part of segment {segment} that its total has"
            )
        if lack == _MISSING_REDUCE and own_lack == _MISSING_GATHER:
            slot = PayloadSlot(CollectivePhase.REDUCE, hop - 1, segment, slice_)
        elif lack == _MISSING_GATHER and own_lack == _MISSING_NOTHING:
            slot = PayloadSlot(CollectivePhase.GATHER, hop, segment, slice_)
        else:
            return []  # the neighbour has it, or this rank sends it on when it arrives
        skip = (segment, slice_) in self._skipping or (segment == self._rank and self._own_skip)
        return [self._to_right(slot, skip)]

    def _forward(self, slot: PayloadSlot, skip: bool) -> list[CollectiveEffect]:
        """Send to the right what it lacks."""
        if skip:
            self._skipping.add((slot.segment, slot.slice))
        if self.attempt:
            if self._right_lacks is None:
                return []  # sent once its RESUME arrives
            lack = self._right_lacks[slot.segment * self._slices + slot.slice]
            if lack > (_MISSING_REDUCE if slot.phase is CollectivePhase.REDUCE else _MISSING_GATHER):
                return []
        return [self._to_right(slot, skip)]

    # -- slots and senders ---------------------------------------------------------------------------

    def _reduce_due(self, segment: int, slice_: int) -> PayloadSlot:
        return PayloadSlot(
            CollectivePhase.REDUCE, (self._rank - segment - 1) % self._world_size, segment, slice_
        )

    def _gather_due(self, segment: int, slice_: int) -> PayloadSlot:
        return PayloadSlot(CollectivePhase.GATHER, (self._rank - segment) % self._world_size, segment, slice_)

    def _ring_provenance(self, event: PayloadReceived, contributors: int) -> Provenance:
        """Each addition rounds once."""
        return self._provenance(event, contributors, roundings=contributors)

    def _to_right(self, slot: PayloadSlot, skip: bool) -> SendTo:
        return SendTo((self._rank + 1) % self._world_size, slot, skip)
