"""All-reduce on a star, as with a parameter server: all ranks send to rank 0, which sends the result to all.

    TO_ROOT   1 --> 0 <-- 2      FROM_ROOT   1 <-- 0 --> 2
                    ^                              |
                    3                              3

Each member except the root needs only one connection, so this is the topology for a group in which all
members but one are behind NAT.  The root's link carries P - 1 times as much as any other.  This is the
bottleneck that rings were designed to avoid, so the star is also the baseline for comparisons with rings.

    SparseStar   the root receives all payloads, sums them in rank order and truncates the sum once, to its k
                 largest entries.  The root keeps dropped values and rounding errors in its residual.
    DenseStar    the vector is sent in slices; the root adds each slice on arrival, and sends the sum of a
                 slice as soon as it is complete, while later slices are still arriving.

All slices of a member carry the same flags, so the first complete slice shows whether the step is skipped.
Only the root adds, and all members store its sums bit for bit, so the results are equal.  The order of the
additions may differ between runs, because with a fixed order the root would have to hold the vectors of all
members except the slowest.
"""

from __future__ import annotations

from typing import Any

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveBase,
    CollectiveEffect,
    ReplacePayload,
    SendTo,
    StoreFromRank,
    StoreSlice,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot

ROOT = 0


def neighbours(rank: int, world_size: int) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected: the root or, for the root, all other ranks."""
    return frozenset({ROOT}) if rank != ROOT else frozenset(range(1, world_size))


class _Star(CollectiveBase):
    """Base class of the two star collectives, which tracks the expected payloads and sends the result to all.

    `PayloadSlot.segment` is the sender's rank, and `PayloadSlot.slice` is the index of a slice.
    """

    __slots__ = ("_missing", "_slices")

    def __init__(self, rank: int, world_size: int, slices: int, flags: int) -> None:
        super().__init__("star", rank, world_size, flags)
        self._slices = slices
        senders = range(1, world_size) if rank == ROOT else (ROOT,)
        self._missing = {(sender, index) for sender in senders for index in range(slices)}

    def start(self) -> list[CollectiveEffect]:
        if self._rank == ROOT:
            return [] if self._missing else self._completed()
        return [SendTo(ROOT, self._slot(self._rank, i), self._flags) for i in range(self._slices)]

    def waiting_for(self) -> frozenset[int]:
        return frozenset(sender for sender, _ in self._missing)

    def _accept(self, from_rank: int, slot: PayloadSlot, flags: int) -> None:
        """Check that the payload is expected, and take its flags into account."""
        key = (from_rank, slot.slice)
        due = (from_rank, self._slot(*key)) if key in self._missing else None
        self._check(from_rank, slot, due)
        self._missing.remove(key)
        self._flags |= flags

    def _send_result(self, index: int) -> list[CollectiveEffect]:
        slot = self._slot(ROOT, index)
        return [SendTo(rank, slot, self._flags) for rank in range(1, self._world_size)]

    def _slot(self, sender: int, index: int) -> PayloadSlot:
        phase = CollectivePhase.FROM_ROOT if sender == ROOT else CollectivePhase.TO_ROOT
        return PayloadSlot(phase, 0, sender, index)


class SparseStar(_Star):
    """One gTop-k exchange.

    Args:
        flags: flags of this rank's contribution (`core.group.round_flags`).
    """

    __slots__ = ()

    def __init__(self, rank: int, world_size: int, flags: int) -> None:
        super().__init__(rank, world_size, 1, flags)

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        self._accept(from_rank, slot, flags)
        if self._rank != ROOT:
            provenance = self._provenance(from_rank, contributors=self._world_size, roundings=2)
            return [ReplacePayload(payload, provenance), *self._completed()]
        provenance = self._provenance(from_rank, contributors=1, roundings=1)
        stored = StoreFromRank(from_rank, payload, provenance)
        return [stored] if self._missing else [stored, *self._send_result(0), *self._completed()]


class DenseStar(_Star):
    """One dense sum.

    Args:
        slices: the number of slices of the vector, at least 1.
        flags: flags of this rank's contribution (`core.group.round_flags`).
    """

    __slots__ = ("_missing_parts",)

    def __init__(self, rank: int, world_size: int, slices: int, flags: int) -> None:
        super().__init__(rank, world_size, slices, flags)
        self._missing_parts = [world_size - 1] * slices  # at the root, by slice

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        self._accept(from_rank, slot, flags)
        index, effects = slot.slice, list[CollectiveEffect]()
        if self._rank != ROOT:
            provenance = self._provenance(from_rank, self._world_size, roundings=self._world_size)
            effects.append(StoreSlice(0, index, payload, provenance))
        else:
            provenance = self._provenance(from_rank, contributors=1, roundings=1)
            effects.append(AddSlice(0, index, payload, provenance))
            self._missing_parts[index] -= 1
            if not self._missing_parts[index]:
                effects += self._send_result(index)
        return effects if self._missing else effects + self._completed()
