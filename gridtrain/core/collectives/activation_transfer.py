"""Sends activations or gradients in slices from a rank of one pipeline stage to a rank of another stage.

    sender                                   receiver
      ACTIVATION hop = 3, slice 0 (the header) -->
      ACTIVATION hop = 3, slice 1 --------------->
      ACTIVATION hop = 3, slice 2 --------------->  complete: all three have arrived
      complete once sent: the transport handles delivery

`PayloadSlot.hop` is the number of slices, so each slice that arrives carries this number.  A channel (group,
kind, index) identifies one transfer: `group` combines the numbers of the two stages, and the pipeline chooses
`kind`, the kind of payload, and `index`, the micro-batch (`core.stages.schedule`).
"""

from __future__ import annotations

from typing import Any

from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    CollectiveEffect,
    Provenance,
    SendTo,
    StoreSlice,
    check_expected,
)
from gridtrain.core.messages import MAX_STAGES, Channel, CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError

STAGE_SUMMARY_KIND = 16
"""`Channel.kind` of the all-gather in which each member sends a summary of its stage's step."""

MAX_PIECES = 1 << 14

STAGE_SUMMARY_CHANNEL = Channel(kind=STAGE_SUMMARY_KIND)


def stage_channel(from_stage: int, to_stage: int, channel: Channel) -> Channel:
    """Return the channel of a transfer between two stages; each pair of stages has a separate group."""
    return Channel(from_stage * MAX_STAGES + to_stage, int(channel.kind), channel.index)


class ActivationSender:
    """Sends the slices of one transfer.

    Args:
        pieces: the number of slices.
    """

    __slots__ = ("_label", "_pieces", "_to_rank", "complete")

    def __init__(self, rank: int, to_rank: int, pieces: int) -> None:
        self._to_rank, self._pieces = to_rank, pieces
        self._label = f"activation transfer, rank {rank}, sender"
        self.complete = False

    def start(self) -> list[CollectiveEffect]:
        self.complete = True
        slots = (
            PayloadSlot(CollectivePhase.ACTIVATION, hop=self._pieces, slice=piece)
            for piece in range(self._pieces)
        )
        return [*(SendTo(self._to_rank, slot, 0) for slot in slots), CollectiveComplete(0)]

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        check_expected(self._label, from_rank, slot, None, "no payload, because this rank only sends")
        return []

    def waiting_for(self) -> frozenset[int]:
        return frozenset()


class ActivationReceiver:
    """Receives the slices of one transfer; learns the number of slices from the first one that arrives."""

    __slots__ = ("_from_rank", "_label", "_missing", "_pieces", "_world_size", "complete")

    def __init__(self, rank: int, from_rank: int, world_size: int) -> None:
        self._from_rank, self._world_size = from_rank, world_size
        self._label = f"activation transfer, rank {rank}, receiver"
        self._pieces: int | None = None
        self._missing: set[int] = set()
        self.complete = False

    def start(self) -> list[CollectiveEffect]:
        return []

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        if self._pieces is None:
            self._pieces = slot.hop
            self._missing = set(range(min(slot.hop, MAX_PIECES)))
        due = PayloadSlot(CollectivePhase.ACTIVATION, hop=self._pieces, slice=slot.slice)
        is_missing = slot.slice in self._missing
        expected = (self._from_rank, due) if is_missing else None
        check_expected(self._label, from_rank, slot, expected, "no such slice")
        if flags:
            raise RemoteProtocolError(
                f"{self._label}: rank {from_rank} sent a slice with flags, which activations never have",
            )
        self._missing.discard(slot.slice)
        provenance = Provenance(from_rank, 1, self._world_size, roundings=0)
        stored = StoreSlice(self._pieces, slot.slice, payload, provenance)
        if self._missing:
            return [stored]
        self.complete = True
        return [stored, CollectiveComplete(0)]

    def waiting_for(self) -> frozenset[int]:
        return frozenset() if self.complete else frozenset({self._from_rank})
