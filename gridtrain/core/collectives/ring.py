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

A retry of an aborted attempt (same generation, same contributions) goes on from what has arrived, because
the bits would be the same again.  Who has what only the receiver knows, so each rank first tells its left
neighbour what it has, and is sent the rest:

    RESUME   1 --has: one byte for each slice--> 0      0 --REDUCE, GATHER of what is missing--> 1

Nothing that 1 lacks can be gone at 0: 0 overwrites a partial sum with the total only, and the total exists
only when everybody further round the ring, so 1 as well, has had that partial sum.
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
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError

_MISSING_REDUCE, _MISSING_GATHER, _MISSING_NOTHING = range(3)
"""What a rank is still to be sent of one slice, as RESUME says it."""


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks to which this one needs an edge: its left and right on the ring."""
    return frozenset({(rank - 1) % world_size, (rank + 1) % world_size}) - {rank}


MAX_SLICE_BYTES = 2**20
MIN_SLICE_BYTES = 128 * 1024
"""A message costs each end some 0.3 ms of computing, in which a line of 1 Gbit/s carries 40 KiB."""
PREFERRED_SLICES = 8
"""Of a segment, where that makes slices between these sizes: one is under way, one is added, others wait."""


def count_slices(segment_bytes: int) -> int:
    """In how many slices a segment of so many bytes travels; the same on all ranks."""
    slice_bytes = min(MAX_SLICE_BYTES, max(MIN_SLICE_BYTES, -(-segment_bytes // PREFERRED_SLICES)))
    return max(1, -(-segment_bytes // slice_bytes))


def ring_message_count(world_size: int, slices: int) -> int:
    """Messages that each rank sends, and receives, in one all-reduce."""
    return 2 * (world_size - 1) * slices


class RingAllReduce:
    """One all-reduce as rank `rank` of `world_size` sees it; `slices` >= 1 to a segment.

    `skip`: this rank's gradient is not finite.  See `gridtrain.core.collectives.collective.Collective`.

    Attributes:
        attempt: which attempt at the step it serves: 0, or, made by `retry`, one more than before.
        has: what RESUME tells the left neighbour, a byte for each slice of each segment.
    """

    __slots__ = (
        "_any_skip",
        "_due",
        "_rank",
        "_right_lacks",
        "_skip",
        "_skipping",
        "_slices",
        "_world_size",
        "attempt",
        "complete",
        "received",
    )

    def __init__(self, rank: int, world_size: int, slices: int, skip: bool) -> None:
        self._rank = rank
        self._world_size = world_size
        self._slices = slices
        self._skip = skip
        self._any_skip = skip
        self.complete = False
        self.attempt = 0
        self.received = b""
        self._right_lacks: bytes | None = None  # of a retry; None: it has not said yet
        self._skipping: set[tuple[int, int]] = set()  # slices that are passed on with a skip
        # What comes next for each slice that is still to pass here.  A rank meets every segment
        # twice, but starts its own (no REDUCE comes) and completes that of its right (no GATHER).
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
        return [self._to_right(place, self._skip) for place in own]

    def next_attempt(self) -> RingAllReduce:
        """The next attempt, with the same contributions: it goes on from what has arrived here."""
        again = RingAllReduce(self._rank, self._world_size, self._slices, self._skip)
        again.attempt = self.attempt + 1
        again._any_skip, again._due = self._any_skip, dict(self._due)
        again._skipping = set(self._skipping)
        again.received = bytes(again._lack(segment, slice_) for segment, slice_ in again._keys())
        return again

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        place = event.slot
        if place.phase is CollectivePhase.RESUME:
            return self._resume(event)
        self._check(event)
        last_hop = self._world_size - 2
        effects: list[CollectiveEffect] = []
        match place.phase:
            case CollectivePhase.REDUCE:
                skip = self._skip or event.skip
                source = self._source(event, place.hop + 1)
                effects.append(AddSlice(place.segment, place.slice, event.payload, source))
                if place.hop < last_hop:
                    onward = PayloadSlot(CollectivePhase.REDUCE, place.hop + 1, place.segment, place.slice)
                    self._due[place.segment, place.slice] = self._gather_due(place.segment, place.slice)
                else:  # everybody's part is in: the sum begins its turn here and need not come back
                    onward = PayloadSlot(CollectivePhase.GATHER, 0, place.segment, place.slice)
                    del self._due[place.segment, place.slice]
                effects += self._pass_on(onward, skip)
            case _:  # GATHER: `_check` lets nothing else through
                skip = event.skip
                source = self._source(event, self._world_size)
                effects.append(StoreSlice(place.segment, place.slice, event.payload, source))
                if place.hop < last_hop:
                    onward = PayloadSlot(CollectivePhase.GATHER, place.hop + 1, place.segment, place.slice)
                    effects += self._pass_on(onward, skip)
                del self._due[place.segment, place.slice]
        self._any_skip |= skip
        return effects if self._due else effects + self._completed()

    def waiting_for(self) -> frozenset[int]:
        return frozenset({(self._rank - 1) % self._world_size}) if self._due else frozenset()

    # -- what a retry need not send again ------------------------------------------------------------

    def _keys(self) -> list[tuple[int, int]]:
        """All slices, in the order of RESUME's bytes."""
        return [(segment, slice_) for segment in range(self._world_size) for slice_ in range(self._slices)]

    def _lack(self, segment: int, slice_: int) -> int:
        due = self._due.get((segment, slice_))
        if due is None:
            return _MISSING_NOTHING
        return _MISSING_REDUCE if due.phase is CollectivePhase.REDUCE else _MISSING_GATHER

    def _resume(self, event: PayloadReceived) -> list[CollectiveEffect]:
        """The right neighbour says what it has; it is sent what it lacks and is here already."""
        right = (self._rank + 1) % self._world_size
        awaited = self.attempt > 0 and self._right_lacks is None
        check_expected(
            self._says, event, (right, PayloadSlot(CollectivePhase.RESUME)) if awaited else None, "no RESUME"
        )
        keys, lacks = self._keys(), bytes(event.payload)
        if len(lacks) != len(keys) or max(lacks) > _MISSING_NOTHING:
            raise RemoteProtocolError(
                f"{self._says}: RESUME of rank {right} has {len(lacks)} bytes up to {max(lacks, default=0)}; "
                f"it must have {len(keys)} up to {_MISSING_NOTHING}",
                remedy="drop that peer; an honest one of the same version never sends this",
            )
        self._right_lacks = lacks
        effects: list[CollectiveEffect] = []
        for (segment, slice_), lack in zip(keys, lacks, strict=True):
            effects += self._missing_at_right(segment, slice_, lack, right)
        return effects

    def _missing_at_right(self, segment: int, slice_: int, lack: int, right: int) -> list[CollectiveEffect]:
        mine, hop = self._lack(segment, slice_), (right - segment) % self._world_size
        # It starts its own segment, and the one after its own is complete with the last REDUCE.
        if lack == (_MISSING_REDUCE if hop == 0 else _MISSING_GATHER if hop == self._world_size - 1 else -1):
            raise RemoteProtocolError(
                f"{self._says}: RESUME of rank {right} lacks what never is sent of segment {segment}"
            )
        if lack == _MISSING_REDUCE and mine == _MISSING_NOTHING:
            raise RemoteProtocolError(
                f"{self._says}: RESUME of rank {right} lacks a part of segment {segment} that is in its total"
            )
        if lack == _MISSING_REDUCE and mine == _MISSING_GATHER:
            place = PayloadSlot(CollectivePhase.REDUCE, hop - 1, segment, slice_)
        elif lack == _MISSING_GATHER and mine == _MISSING_NOTHING:
            place = PayloadSlot(CollectivePhase.GATHER, hop, segment, slice_)
        else:
            return []  # it has it, or we do not have it yet, and pass it on when it comes
        skip = (segment, slice_) in self._skipping or (segment == self._rank and self._skip)
        return [self._to_right(place, skip)]

    def _pass_on(self, place: PayloadSlot, skip: bool) -> list[CollectiveEffect]:
        if skip:
            self._skipping.add((place.segment, place.slice))
        if self.attempt:
            if self._right_lacks is None:
                return []  # it goes out when the right neighbour has said what it has
            lack = self._right_lacks[place.segment * self._slices + place.slice]
            if lack > (_MISSING_REDUCE if place.phase is CollectivePhase.REDUCE else _MISSING_GATHER):
                return []
        return [self._to_right(place, skip)]

    # -- what is due ---------------------------------------------------------------------------------

    @property
    def _says(self) -> str:
        return f"ring, rank {self._rank} of {self._world_size}"

    def _reduce_due(self, segment: int, slice_: int) -> PayloadSlot:
        return PayloadSlot(
            CollectivePhase.REDUCE, (self._rank - segment - 1) % self._world_size, segment, slice_
        )

    def _gather_due(self, segment: int, slice_: int) -> PayloadSlot:
        return PayloadSlot(CollectivePhase.GATHER, (self._rank - segment) % self._world_size, segment, slice_)

    def _check(self, event: PayloadReceived) -> None:
        place = self._due.get((event.slot.segment, event.slot.slice))
        due = None if place is None else ((self._rank - 1) % self._world_size, place)
        check_expected(self._says, event, due, "nothing more of this slice")

    def _source(self, event: PayloadReceived, members: int) -> Provenance:
        return Provenance(event.from_rank, members, self._world_size, roundings=members)

    def _to_right(self, place: PayloadSlot, skip: bool) -> SendTo:
        return SendTo((self._rank + 1) % self._world_size, place, skip)

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [CollectiveComplete(self._any_skip)]
