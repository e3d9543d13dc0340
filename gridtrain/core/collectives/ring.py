"""Dense all-reduce on a ring (reduce-scatter, then all-gather; Baidu, 2017), and the number of slices.

The vector is split into P segments, and each segment into slices.  Slices travel independently, so all links
are busy at the same time.  Each slice goes around the ring twice.  For example, with P = 3 the sum of segment
0 is complete at rank 2:

    REDUCE   0 --hop 0--> 1 --hop 1--> 2          each member adds its own part and forwards the sum
    GATHER   2 --hop 0--> 0 --hop 1--> 1          each member stores the complete sum and forwards it

The ring fixes the order of the additions, and each segment is summed only once, so all ranks end with
the same bits.  A REDUCE message carries the combined flags of all members that it has passed.  At the last
member, the flags are complete, and GATHER carries them unchanged.

A retry of an aborted attempt (same generation, same contributions) would produce the same bits again, so it
resumes from the messages that have arrived.  Only the receiver has a record of these messages, so each rank
first sends this record to its left neighbour, which then sends the missing messages:

    RESUME   1 --received: one byte for each slice--> 0      0 --the missing REDUCE and GATHER--> 1

Rank 0 holds every message that is missing at rank 1.  It overwrites a partial sum only with the total, and
the total exists only after all ranks further around the ring, including rank 1, have received that partial
sum.
"""

from __future__ import annotations

from typing import Any

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveBase,
    CollectiveEffect,
    Provenance,
    SendTo,
    StoreSlice,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError

_MISSING_REDUCE, _MISSING_GATHER, _MISSING_NOTHING = range(3)
"""The values of a byte in RESUME: the rank lacks both messages of the slice, only GATHER, or no message."""

MAX_SLICE_BYTES = 2**20
MIN_SLICE_BYTES = 128 * 1024
"""Smallest size of a slice.

A message costs each end about 0.3 ms of CPU time, in which 40 KiB could be sent at 1 Gbit/s.
"""
PREFERRED_SLICES = 8
"""Preferred number of slices of a segment; one is sent and another is added while the other slices wait."""


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected: its left and right neighbours."""
    return frozenset({(rank - 1) % world_size, (rank + 1) % world_size}) - {rank}


def count_slices(segment_bytes: int) -> int:
    """Return the number of slices of a segment; it is the same on all ranks."""
    slice_bytes = min(MAX_SLICE_BYTES, max(MIN_SLICE_BYTES, -(-segment_bytes // PREFERRED_SLICES)))
    return max(1, -(-segment_bytes // slice_bytes))


class RingAllReduce(CollectiveBase):
    """One all-reduce.

    Args:
        slices: the number of slices of each segment, at least 1.
        flags: flags of this rank's contribution (`core.group.round_flags`).

    Attributes:
        attempt: number of the attempt, starting at 0; `next_attempt` increases it by one.
        received: contents of this rank's RESUME message, one byte for each slice of each segment; empty in
            the first attempt, which sends no RESUME.
    """

    __slots__ = ("_due", "_forwarded_flags", "_own_flags", "_right_lacks", "_slices", "attempt", "received")

    def __init__(self, rank: int, world_size: int, slices: int, flags: int) -> None:
        super().__init__("ring", rank, world_size, flags)
        self._slices = slices
        self._own_flags = int(flags)
        self.attempt = 0
        self.received = b""
        self._right_lacks: bytes | None = None  # contents of the neighbour's RESUME; None: not arrived
        self._forwarded_flags: dict[tuple[int, int], int] = {}  # flags of forwarded messages, by slice
        # The next message of each slice that awaits one: first REDUCE, then GATHER.  No REDUCE arrives for
        # this rank's own segment, and no GATHER for the segment whose sum this rank completes.
        self._due: dict[tuple[int, int], PayloadSlot] = {}
        if world_size > 1:
            for segment in range(world_size):
                first = self._gather_due if segment == rank else self._reduce_due
                for slice_ in range(slices):
                    self._due[segment, slice_] = first(segment, slice_)

    def start(self) -> list[CollectiveEffect]:
        if self._world_size == 1:
            return self._completed()
        if self.attempt:
            left = (self._rank - 1) % self._world_size
            tell = SendTo(left, PayloadSlot(CollectivePhase.RESUME), 0)
            return [tell] if self._due else [tell, *self._completed()]
        own = (PayloadSlot(CollectivePhase.REDUCE, 0, self._rank, slice_) for slice_ in range(self._slices))
        return [self._to_right(slot, self._own_flags) for slot in own]

    def next_attempt(self) -> RingAllReduce:
        """Return the next attempt, with the same contributions; it resumes from the messages received."""
        again = RingAllReduce(self._rank, self._world_size, self._slices, self._own_flags)
        again.attempt = self.attempt + 1
        again._flags, again._due = self._flags, dict(self._due)
        again._forwarded_flags = dict(self._forwarded_flags)
        again.received = bytes(again._lack(segment, slice_) for segment, slice_ in again._keys())
        return again

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        if slot.phase is CollectivePhase.RESUME:
            return self._resume(from_rank, slot, payload)
        key = (slot.segment, slot.slice)
        due = self._due.get(key)
        left = (self._rank - 1) % self._world_size
        self._check(from_rank, slot, None if due is None else (left, due), "no further payload of this slice")
        last_hop = self._world_size - 2
        effects: list[CollectiveEffect] = []
        match slot.phase:
            case CollectivePhase.REDUCE:
                flags |= self._own_flags
                effects.append(AddSlice(*key, payload, self._ring_provenance(from_rank, slot.hop + 1)))
                if slot.hop < last_hop:
                    onward = PayloadSlot(CollectivePhase.REDUCE, slot.hop + 1, *key)
                    self._due[key] = self._gather_due(*key)
                else:  # the sum is complete: GATHER starts at this rank and does not return
                    onward = PayloadSlot(CollectivePhase.GATHER, 0, *key)
                    del self._due[key]
                effects += self._forward(onward, flags)
            case _:  # GATHER: `_check` accepts nothing else
                provenance = self._ring_provenance(from_rank, self._world_size)
                effects.append(StoreSlice(*key, payload, provenance))
                if slot.hop < last_hop:
                    effects += self._forward(PayloadSlot(CollectivePhase.GATHER, slot.hop + 1, *key), flags)
                del self._due[key]
        self._flags |= flags
        return effects if self._due else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset({(self._rank - 1) % self._world_size}) if self._due else frozenset()

    # -- retry ---------------------------------------------------------------------------------------

    def _keys(self) -> list[tuple[int, int]]:
        """Return (segment, slice) of all slices, in the order of the bytes of RESUME."""
        return [(segment, slice_) for segment in range(self._world_size) for slice_ in range(self._slices)]

    def _lack(self, segment: int, slice_: int) -> int:
        due = self._due.get((segment, slice_))
        if due is None:
            return _MISSING_NOTHING
        return _MISSING_REDUCE if due.phase is CollectivePhase.REDUCE else _MISSING_GATHER

    def _resume(self, from_rank: int, slot: PayloadSlot, payload: Any) -> list[CollectiveEffect]:
        """Handle the right neighbour's RESUME: send those missing messages that this rank has."""
        right = (self._rank + 1) % self._world_size
        is_awaited = self.attempt > 0 and self._right_lacks is None
        due = (right, PayloadSlot(CollectivePhase.RESUME)) if is_awaited else None
        self._check(from_rank, slot, due, "no RESUME")
        keys, lacks = self._keys(), bytes(payload)
        if len(lacks) != len(keys) or max(lacks) > _MISSING_NOTHING:
            raise RemoteProtocolError(
                f"{self._label}: RESUME from rank {right} contains {len(lacks)} bytes with values up to "
                f"{max(lacks, default=0)}; it must contain {len(keys)} bytes with values up to "
                f"{_MISSING_NOTHING}",
            )
        self._right_lacks = lacks
        effects: list[CollectiveEffect] = []
        for (segment, slice_), lack in zip(keys, lacks, strict=True):
            effects += self._missing_at_right(segment, slice_, lack, right)
        return effects

    def _missing_at_right(self, segment: int, slice_: int, lack: int, right: int) -> list[CollectiveEffect]:
        own_lack, hop = self._lack(segment, slice_), (right - segment) % self._world_size
        # The neighbour starts its own segment and completes the next segment with the last REDUCE.
        if lack == (_MISSING_REDUCE if hop == 0 else _MISSING_GATHER if hop == self._world_size - 1 else -1):
            raise RemoteProtocolError(
                f"{self._label}: RESUME from rank {right} requests a message of segment {segment} "
                "that is never sent to that rank"
            )
        if lack == _MISSING_REDUCE and own_lack == _MISSING_NOTHING:
            raise RemoteProtocolError(
                f"{self._label}: RESUME from rank {right} reports a partial sum of segment {segment} as "
                "missing, although its total exists"
            )
        if lack == _MISSING_REDUCE and own_lack == _MISSING_GATHER:
            slot = PayloadSlot(CollectivePhase.REDUCE, hop - 1, segment, slice_)
        elif lack == _MISSING_GATHER and own_lack == _MISSING_NOTHING:
            slot = PayloadSlot(CollectivePhase.GATHER, hop, segment, slice_)
        else:
            return []  # the neighbour lacks no message, or this rank forwards the message on arrival
        flags = self._forwarded_flags.get((segment, slice_), 0)
        flags |= self._own_flags if segment == self._rank else 0
        return [self._to_right(slot, flags)]

    def _forward(self, slot: PayloadSlot, flags: int) -> list[CollectiveEffect]:
        """Forward a message to the right neighbour, and record its flags for a retry.

        A retry forwards only messages that the neighbour's RESUME reports as missing.  Until RESUME arrives,
        nothing is forwarded; `_resume` then sends the missing messages.
        """
        if flags:
            key = slot.segment, slot.slice
            self._forwarded_flags[key] = self._forwarded_flags.get(key, 0) | flags
        if self.attempt:
            if self._right_lacks is None:
                return []
            lack = self._right_lacks[slot.segment * self._slices + slot.slice]
            if lack > (_MISSING_REDUCE if slot.phase is CollectivePhase.REDUCE else _MISSING_GATHER):
                return []
        return [self._to_right(slot, flags)]

    # -- slots and senders ---------------------------------------------------------------------------

    def _reduce_due(self, segment: int, slice_: int) -> PayloadSlot:
        return PayloadSlot(
            CollectivePhase.REDUCE, (self._rank - segment - 1) % self._world_size, segment, slice_
        )

    def _gather_due(self, segment: int, slice_: int) -> PayloadSlot:
        return PayloadSlot(CollectivePhase.GATHER, (self._rank - segment) % self._world_size, segment, slice_)

    def _ring_provenance(self, from_rank: int, contributors: int) -> Provenance:
        """Return the provenance of a partial sum, in which each addition has rounded once."""
        return self._provenance(from_rank, contributors, roundings=contributors)

    def _to_right(self, slot: PayloadSlot, flags: int) -> SendTo:
        return SendTo((self._rank + 1) % self._world_size, slot, flags)
