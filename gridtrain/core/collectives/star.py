"""A single reducer, as in a parameter server: all send to rank 0, rank 0 sends the result to all.

    TO_ROOT   1 --> 0 <-- 2      FROM_ROOT   1 <-- 0 --> 2
                    ^                              |
                    3                              3

Each member needs only one connection: the topology for a group in which all but one are behind NAT.  The
root's link carries P - 1 times what another's does, so this is also the baseline that rings were made
against.

    SparseStar   the root has all payloads, sums them in rank order and truncates once: the k largest of the
                 sum of all that was selected.  What it drops or rounds goes to its residual.
    DenseStar    the vector in slices; the root adds each slice as it arrives, and sends it on when it is
                 complete, while later slices are still arriving.

All slices of a member carry the same skip mark, so when a slice is complete, the verdict on skipping is
known.  Only the root adds, and all take its bits, so they are equal on all members.  The order of the
additions may differ from run to run: a fixed order would mean to hold the vectors of all but the slowest.
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveBase,
    CollectiveEffect,
    PayloadReceived,
    ReplacePayload,
    SendTo,
    StoreFromRank,
    StoreSlice,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot

ROOT = 0


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Ranks that this one must be connected to: the root, or, for the root, all others."""
    return frozenset({ROOT}) if rank != ROOT else frozenset(range(1, world_size))


class _Star(CollectiveBase):
    """What both stars have in common: the expected payloads, and the result to all.

    `PayloadSlot.segment` is the sender's rank, `slice` the index of a slice.
    """

    __slots__ = ("_missing", "_slices")

    def __init__(self, rank: int, world_size: int, slices: int, skip: bool) -> None:
        super().__init__("star", rank, world_size, skip)
        self._slices = slices
        senders = range(1, world_size) if rank == ROOT else (ROOT,)
        self._missing = {(sender, index) for sender in senders for index in range(slices)}

    def start(self, now_s: float) -> list[CollectiveEffect]:
        if self._rank == ROOT:
            return [] if self._missing else self._completed()
        return [SendTo(ROOT, self._slot(self._rank, i), self._skip) for i in range(self._slices)]

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing)

    def _accept(self, event: PayloadReceived) -> None:
        """Check that the payload is expected, and take its skip mark."""
        key = (event.from_rank, event.slot.slice)
        due = (event.from_rank, self._slot(*key)) if key in self._missing else None
        self._check(event, due)
        self._missing.remove(key)
        self._skip |= event.skip

    def _send_result(self, index: int) -> list[CollectiveEffect]:
        slot = self._slot(ROOT, index)
        return [SendTo(rank, slot, self._skip) for rank in range(1, self._world_size)]

    def _slot(self, sender: int, index: int) -> PayloadSlot:
        phase = CollectivePhase.FROM_ROOT if sender == ROOT else CollectivePhase.TO_ROOT
        return PayloadSlot(phase, 0, sender, index)


class SparseStar(_Star):
    """One gTop-k exchange; `skip`: this rank's contribution is not finite."""

    __slots__ = ()

    def __init__(self, rank: int, world_size: int, skip: bool) -> None:
        super().__init__(rank, world_size, 1, skip)

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        self._accept(event)
        if self._rank != ROOT:
            provenance = self._provenance(event, contributors=self._world_size, roundings=2)
            return [ReplacePayload(event.payload, provenance), *self._completed()]
        provenance = self._provenance(event, contributors=1, roundings=1)
        stored = StoreFromRank(event.from_rank, event.payload, provenance)
        return [stored] if self._missing else [stored, *self._send_result(0), *self._completed()]


class DenseStar(_Star):
    """One dense sum in `slices` >= 1; `skip`: this rank's contribution is not finite."""

    __slots__ = ("_missing_parts",)

    def __init__(self, rank: int, world_size: int, slices: int, skip: bool) -> None:
        super().__init__(rank, world_size, slices, skip)
        self._missing_parts = [world_size - 1] * slices  # the root's, by slice

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        self._accept(event)
        index, effects = event.slot.slice, list[CollectiveEffect]()
        if self._rank != ROOT:
            provenance = self._provenance(event, self._world_size, roundings=self._world_size)
            effects.append(StoreSlice(0, index, event.payload, provenance))
        else:
            provenance = self._provenance(event, contributors=1, roundings=1)
            effects.append(AddSlice(0, index, event.payload, provenance))
            self._missing_parts[index] -= 1
            if not self._missing_parts[index]:
                effects += self._send_result(index)
        return effects if self._missing else effects + self._completed()
