"""Payloads from one rank to another: what a stage hands to its neighbour, in pieces.

Decides nothing but who sends and who may.  Never opens a payload: an activation is as a gradient.

    sender                                   receiver
      PASS hop = 3, slice 0 (the table) ------->
      PASS hop = 3, slice 1 ------------------->
      PASS hop = 3, slice 2 ------------------->  complete: all three are there
      complete at once: what is sent is the transport's affair

`Place.hop` says how many pieces there are, so that the first that comes says when it is complete.  A channel
(group, kind, index) names one hand-off: group is made of both stages' numbers, kind of payload and index (the
micro-batch) are the pipeline's (`protocol.schedule`).
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    CollectiveEffect,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreSlice,
    check_expected,
)
from gridtrain.core.messages import MAX_STAGES, Channel, CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError

STAGE_SUMMARY_KIND = 16
"""`Channel.kind` of the all-gather in which all members say what their stage did (`runtime.handoffs`)."""

MAX_PIECES = 1 << 14

STAGE_SUMMARY_CHANNEL = Channel(kind=STAGE_SUMMARY_KIND)


def stage_channel(from_stage: int, to_stage: int, channel: Channel) -> Channel:
    """Where what one stage says to another travels: two of them may use the same kind and index."""
    return Channel(from_stage * MAX_STAGES + to_stage, int(channel.kind), channel.index)


class ActivationSender:
    """The sender's side.  See `gridtrain.core.collectives.collective.Collective`."""

    __slots__ = ("_pieces", "_says", "_to_rank", "complete")

    def __init__(self, rank: int, to_rank: int, pieces: int) -> None:
        self._to_rank, self._pieces = to_rank, pieces
        self._says = f"hand-off, rank {rank}, sender"
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        self.complete = True
        places = (
            PayloadSlot(CollectivePhase.ACTIVATION, hop=self._pieces, slice=piece)
            for piece in range(self._pieces)
        )
        return [*(SendTo(self._to_rank, place, False) for place in places), CollectiveComplete(False)]

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        check_expected(self._says, event, None, "nothing: this rank sends here")
        return []

    def waiting_for(self) -> frozenset[int]:
        return frozenset()


class ActivationReceiver:
    """The receiver's side."""

    __slots__ = ("_from_rank", "_missing", "_pieces", "_says", "_world_size", "complete")

    def __init__(self, rank: int, from_rank: int, world_size: int) -> None:
        self._from_rank, self._world_size = from_rank, world_size
        self._says = f"hand-off, rank {rank}, receiver"
        self._pieces: int | None = None
        self._missing: set[int] = set()
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        return []

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        place = event.slot
        if self._pieces is None:
            self._pieces = place.hop
            self._missing = set(range(min(place.hop, MAX_PIECES)))
        fits = place.slice in self._missing
        due = PayloadSlot(CollectivePhase.ACTIVATION, hop=self._pieces, slice=place.slice)
        check_expected(self._says, event, (self._from_rank, due) if fits else None, "no such piece any more")
        if event.skip:
            raise RemoteProtocolError(
                f"{self._says}: rank {event.from_rank} handed over a piece that skips",
                remedy="drop that peer; an honest one of the same version never sends this",
            )
        self._missing.discard(place.slice)
        source = Provenance(event.from_rank, 1, self._world_size, roundings=0)
        stored = StoreSlice(self._pieces, place.slice, event.payload, source)
        if self._missing:
            return [stored]
        self.complete = True
        return [stored, CollectiveComplete(False)]

    def waiting_for(self) -> frozenset[int]:
        return frozenset() if self.complete else frozenset({self._from_rank})
