"""A single reducer, as parameter servers have: all send to rank 0, rank 0 sends the result to all.

Decides who sends what and when the root sends it on.  Never touches a number.

    RAISE   1 --> 0 <-- 2      LOWER   1 <-- 0 --> 2
                  ^                          |
                  3                          3

Each member needs one edge only: the road for a group in which all but one are behind NAT.  The root's line
carries P - 1 times what another's does, so this is also the baseline that rings were made against.

    SparseStar   the root has all payloads, sums them in rank order and truncates once: the k largest of the
                 sum of all that was selected.  What it drops or rounds, it keeps.
    DenseStar    the vector in slices; the root adds each slice as it comes, and sends it on when it is
                 whole, while later slices are still coming.

All slices of a member carry the same mark, so when a slice is whole, whether anybody skips is known.  The
root alone adds, and all take its bits: they are the same on all members, in whatever order it was, which may
differ from run to run.  To wait for an order would be to hold the vectors of all but the slowest.
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveComplete,
    CollectiveEffect,
    PayloadReceived,
    Provenance,
    ReplacePayload,
    SendTo,
    StoreFromRank,
    StoreSlice,
    check_expected,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot

ROOT = 0


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks to which this one needs an edge: the root, or, for the root, all others."""
    return frozenset({ROOT}) if rank != ROOT else frozenset(range(1, world_size))


class SparseStar:
    """One gTop-k exchange as rank `rank` of `world_size` sees it; `Place.segment` is the sender of a RAISE.

    `skip`: this rank's gradient is not finite.  See `gridtrain.core.collectives.collective.Collective`.
    """

    __slots__ = ("_missing", "_rank", "_skip", "_world_size", "complete")

    def __init__(self, rank: int, world_size: int, skip: bool) -> None:
        self._rank = rank
        self._world_size = world_size
        self._skip = skip
        others = range(1, world_size) if rank == ROOT else (ROOT,)
        place = _to_root_slot if rank == ROOT else _from_root_slot
        self._missing = {other: place(other) for other in others}
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        if self._rank != ROOT:
            return [SendTo(ROOT, _to_root_slot(self._rank), self._skip)]
        return [] if self._missing else self._completed()

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        place = self._missing.get(event.from_rank)
        due = None if place is None else (event.from_rank, place)
        check_expected(
            f"star, rank {self._rank} of {self._world_size}", event, due, "nothing (more) of this rank"
        )
        del self._missing[event.from_rank]
        self._skip |= event.skip
        if self._rank != ROOT:
            source = Provenance(ROOT, self._world_size, self._world_size, roundings=2)
            return [ReplacePayload(event.payload, source), *self._completed()]
        stored = StoreFromRank(
            event.from_rank, event.payload, Provenance(event.from_rank, 1, self._world_size, 1)
        )
        if self._missing:
            return [stored]
        lowers = [SendTo(rank, _from_root_slot(ROOT), self._skip) for rank in range(1, self._world_size)]
        return [stored, *lowers, *self._completed()]

    def waiting_for(self) -> frozenset[int]:
        return frozenset(self._missing)

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [CollectiveComplete(self._skip)]


def _to_root_slot(rank: int, index: int = 0) -> PayloadSlot:
    return PayloadSlot(CollectivePhase.TO_ROOT, 0, rank, index)


def _from_root_slot(rank: int, index: int = 0) -> PayloadSlot:
    """`rank`: the sender, who is always the root."""
    return PayloadSlot(CollectivePhase.FROM_ROOT, 0, rank, index)


class DenseStar:
    """One dense sum as rank `rank` of `world_size` sees it, in `slices` >= 1.

    `skip`: this rank's gradient is not finite.  See `gridtrain.core.collectives.collective.Collective`.
    """

    __slots__ = (
        "_lacks",
        "_left",
        "_missing",
        "_rank",
        "_skip",
        "_slices",
        "_world_size",
        "complete",
    )

    def __init__(self, rank: int, world_size: int, slices: int, skip: bool) -> None:
        self._rank = rank
        self._world_size = world_size
        self._slices = slices
        self._skip = skip
        senders = range(1, world_size) if rank == ROOT else (ROOT,)
        self._missing = {(sender, index) for sender in senders for index in range(slices)}
        self._left = slices if world_size > 1 else 0
        self._lacks = [world_size - 1] * slices if rank == ROOT else []  # root: parts of each slice
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        if not self._left:
            return self._completed()
        if self._rank == ROOT:
            return []
        return [SendTo(ROOT, _to_root_slot(self._rank, i), self._skip) for i in range(self._slices)]

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        sender, index = event.from_rank, event.slot.slice
        place = (_to_root_slot if self._rank == ROOT else _from_root_slot)(sender, index)
        due = (sender, place) if (sender, index) in self._missing else None
        check_expected(
            f"star, rank {self._rank} of {self._world_size}", event, due, "nothing (more) of this slice"
        )
        self._missing.remove((sender, index))
        self._skip |= event.skip
        return self._add(event, index) if self._rank == ROOT else self._store(event, index)

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing)

    def _store(self, event: PayloadReceived, index: int) -> list[CollectiveEffect]:
        source = Provenance(ROOT, self._world_size, self._world_size, roundings=self._world_size)
        return [StoreSlice(0, index, event.payload, source), *self._count_off()]

    def _add(self, event: PayloadReceived, index: int) -> list[CollectiveEffect]:
        """Add it; send the slice on when it is whole."""
        source = Provenance(event.from_rank, 1, self._world_size, roundings=1)
        effects: list[CollectiveEffect] = [AddSlice(0, index, event.payload, source)]
        self._lacks[index] -= 1
        if self._lacks[index]:
            return effects
        effects += [
            SendTo(rank, _from_root_slot(ROOT, index), self._skip) for rank in range(1, self._world_size)
        ]
        return effects + self._count_off()

    def _count_off(self) -> list[CollectiveEffect]:
        self._left -= 1
        return [] if self._left else self._completed()

    def _completed(self) -> list[CollectiveEffect]:
        self.complete = True
        return [CollectiveComplete(self._skip)]
