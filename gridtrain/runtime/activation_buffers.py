"""Buffers of a pipeline's round: the activations sent and received, and the summaries of the stages.

ActivationSendBuffer     ActivationSender    the sender's buffers; each piece is released when it is sent
ActivationReceiveBuffer  ActivationReceiver  the received pieces, joined when all have arrived
StageSummaryBuffer       AllGather           one summary per member; the vote is on a digest of all summaries

Format of a transfer and of a summary:

table:   u64 length of each buffer in bytes        (piece 0)
pieces:  the buffers in order, each in slices of 1 MiB
a short transfer, one message:  u64 number of buffers | table | buffers
summary: 32-byte digest of the stage's update | 32-byte digest of the settings | f64 loss
         | f64 squared norm | figures
figures: the f64 fields of `StepTimings`, in order
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import add

import numpy as np

from gridtrain.core.collectives.activation_transfer import MAX_PIECES, ActivationReceiver, ActivationSender
from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.collective import BufferEffect, StoreFromRank, StoreSlice
from gridtrain.core.collectives.direct_allgather import make_allgather
from gridtrain.core.commit.two_phase_commit import largest_agreeing_group
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import PayloadSlot
from gridtrain.core.stages.micro_batch_trials import StepTimings
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.runtime.buffers.collective_buffers import unexpected_effect
from gridtrain.runtime.state_transfer.blobs import split_blocks
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES, BlockLayout

PIECE_BYTES = BLOCK_BYTES
"""Length of the slices into which a longer buffer is divided.  This length is part of the protocol."""

MAX_JOINED_BYTES = 256 * 1024
"""Maximum size in bytes of a transfer that is sent as one piece.  Copying so little data takes less time than
sending a second message."""

MAX_BUFFERS = 4096
UNMEASURED = StepTimings()
_SUMMARY = struct.Struct("<32s32s7d")
_REMEDY = "check that all members train the same model with the same partition"


class ActivationSendBuffer:
    """The pieces of one activation transfer.

    Args:
        buffers: the buffers to send, as contiguous views of format "B".  The sequence, and each buffer in it,
            may be empty.

    Raises `LocalProtocolError` if the transfer has more than `MAX_PIECES` pieces or `MAX_BUFFERS` buffers.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        lengths = [buffer.nbytes for buffer in buffers]
        table = struct.pack(f"<{len(lengths)}Q", *lengths)
        self._pieces: list[memoryview | None]
        if len(table) + sum(lengths) <= MAX_JOINED_BYTES:
            joined = b"".join((struct.pack("<Q", len(lengths)), table, *buffers))
            self._pieces = [memoryview(joined)]
        else:
            self._pieces = [memoryview(block).toreadonly() for block in split_blocks(buffers)]
        if len(self._pieces) > MAX_PIECES or len(buffers) > MAX_BUFFERS:
            raise LocalProtocolError(
                f"an activation transfer has {len(buffers)} buffers in {len(self._pieces)} pieces; it must "
                f"have at most {MAX_BUFFERS} buffers in {MAX_PIECES} pieces of {PIECE_BYTES} bytes"
            )

    def make_send(self, rank: int, to_rank: int) -> ActivationSender:
        return ActivationSender(rank, to_rank, len(self._pieces))

    def apply(self, effect: BufferEffect) -> None:
        raise unexpected_effect("ActivationSender", effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        piece, self._pieces[slot.slice] = self._pieces[slot.slice], None
        if piece is None:
            raise LocalProtocolError(f"piece {slot.slice} of an activation transfer was sent twice")
        return piece


class ActivationReceiveBuffer:
    """The pieces of one activation transfer; `take_buffers` returns the buffers, once.

    Args:
        limit_bytes: the size of the largest transfer that a correct peer sends.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._nbytes = 0
        self._pieces: dict[int, memoryview] = {}
        self._buffers: list[memoryview] | None = None

    def make_receive(self, rank: int, from_rank: int, world_size: int) -> ActivationReceiver:
        return ActivationReceiver(rank, from_rank, world_size)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case StoreSlice(pieces, piece, payload, source):
                view = memoryview(payload).cast("B")
                self._nbytes += view.nbytes
                if self._nbytes > self._limit_bytes or view.nbytes > PIECE_BYTES or pieces > MAX_PIECES:
                    raise RemoteProtocolError(
                        f"rank {source.rank} has sent {self._nbytes} bytes of a transfer of {pieces} pieces, "
                        f"and its latest piece has {view.nbytes} bytes; the transfer must have at most "
                        f"{self._limit_bytes} bytes and {MAX_PIECES} pieces, and each piece at most "
                        f"{PIECE_BYTES} bytes",
                        remedy=_REMEDY,
                    )
                self._pieces[piece] = view
                if len(self._pieces) == pieces:
                    self._buffers = _join_pieces(self._pieces, source.rank)
                    self._pieces = {}
            case _:
                raise unexpected_effect("ActivationReceiver", effect)

    def take_buffers(self) -> list[memoryview]:
        buffers, self._buffers = self._buffers, None
        if buffers is None:
            raise LocalProtocolError("an activation transfer was read before it was complete, or twice")
        return buffers

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        raise LocalProtocolError("a payload was requested from the receiver of an activation transfer")


def _split_joined(piece: memoryview, from_rank: int) -> list[memoryview]:
    """Split a piece that contains a whole transfer; return its buffers.

    Raises `RemoteProtocolError` if the table and the buffers do not fill the piece exactly.
    """
    count = int.from_bytes(piece[:8], "little")
    at = 8 + 8 * count
    lengths = struct.unpack_from(f"<{count}Q", piece, 8) if count <= MAX_BUFFERS and at <= len(piece) else ()
    if len(piece) < 8 or len(lengths) != count or at + sum(lengths) != len(piece):
        raise RemoteProtocolError(
            f"rank {from_rank} sent a piece of {len(piece)} bytes, which does not match its table of {count} "
            "buffers",
            remedy=_REMEDY,
        )
    stops = list(accumulate(lengths, initial=at))
    return [piece[start:stop] for start, stop in pairwise(stops)]


def _join_pieces(pieces: dict[int, memoryview], from_rank: int) -> list[memoryview]:
    """Join the pieces of a transfer; return its buffers.

    Raises `RemoteProtocolError` if the pieces do not match the table.
    """
    if len(pieces) == 1:
        return _split_joined(pieces[0], from_rank)
    table = pieces[0]
    lengths = np.frombuffer(table, "<u8").tolist() if table.nbytes % 8 == 0 else []
    layout, count = BlockLayout(lengths), len(pieces) - 1
    if (
        table.nbytes % 8
        or len(lengths) > MAX_BUFFERS
        or layout.block_count != count
        or any(pieces[1 + i].nbytes != layout.place(i).nbytes for i in range(count))
    ):
        raise RemoteProtocolError(
            f"rank {from_rank} sent {count} pieces that do not match its table of {table.nbytes} bytes",
            remedy=_REMEDY,
        )
    buffers = []
    for start, stop in pairwise(1 + layout.first_block(part) for part in range(len(lengths) + 1)):
        parts = [pieces[i] for i in range(start, stop)]
        buffers.append(parts[0] if len(parts) == 1 else memoryview(b"".join(parts)))
    return buffers


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One member's report about its stage.

    Attributes:
        digest: the digest of the update on which the replicas of the stage have agreed; zeros if the step is
            skipped.
        settings: the digest of the optimizer's settings.
        loss: the member's part of the mean loss; 0 except on the last stage.
        norm_squared: the squared norm of the stage's update.
        figures: the times that the member has measured in this step.
    """

    digest: bytes
    settings: bytes
    loss: float
    norm_squared: float
    figures: StepTimings = UNMEASURED

    def pack(self) -> bytes:
        values = (self.loss, self.norm_squared, *astuple(self.figures))
        return _SUMMARY.pack(self.digest, self.settings, *values)

    @classmethod
    def read(cls, payload: bytes | memoryview) -> StageSummary:
        digest, settings, loss, norm_squared, *figures = _SUMMARY.unpack(payload)
        return cls(digest, settings, loss, norm_squared, StepTimings(*figures))

    @property
    def replica_key(self) -> bytes:
        """A 32-byte digest that is equal on all replicas of a stage with the same update and settings."""
        norm = struct.pack("<d", self.norm_squared)
        return hashlib.blake2b(self.digest + self.settings + norm, digest_size=32).digest()


def _sum_in_order(values: Iterable[float]) -> float:
    """Return the sum, bit-identical on all members.  That of `sum` differs between Python 3.11 and 3.12."""
    return reduce(add, values, 0.0)


class StageSummaryBuffer:
    """The summaries of all members.

    The digest that a member votes for covers the figures of all members and one replica key for each stage:
    the majority's key for other stages, and the member's own key for its own stage.  A member whose update
    differs from that of the other replicas of its stage therefore votes for a different digest, and is
    detected in the same way as in a group without stages (`gridtrain.core.commit.two_phase_commit`).
    """

    def __init__(self, layout: RankLayout, rank: int, summary: StageSummary) -> None:
        self._layout, self._rank = layout, rank
        self._payloads: list[bytes | None] = [None] * layout.world_size
        self._payloads[rank] = summary.pack()

    @property
    def is_complete(self) -> bool:
        return all(payload is not None for payload in self._payloads)

    @property
    def summaries(self) -> list[StageSummary]:
        """The summaries in rank order.  Raises `LocalProtocolError` before the collective is complete."""
        there = [StageSummary.read(payload) for payload in self._payloads if payload is not None]
        if len(there) < len(self._payloads):
            raise LocalProtocolError(
                f"only the summaries of {len(there)} of {len(self._payloads)} ranks have arrived"
            )
        return there

    @property
    def loss(self) -> float:
        """The mean loss over all samples of the step."""
        last = self._layout.stage_ranks(self._layout.stages - 1)
        summaries = self.summaries
        return _sum_in_order(summaries[rank].loss for rank in last)

    @property
    def norm_squared(self) -> float:
        """The squared norm of the whole model's update."""
        summaries = self.summaries
        return _sum_in_order(
            summaries[self._layout.stage_ranks(stage)[0]].norm_squared for stage in range(self._layout.stages)
        )

    @property
    def has_diverged_settings(self) -> bool:
        """Whether this member's optimizer settings differ from the settings of most replicas of its stage."""
        summaries, group = self.summaries, self._layout.stage_ranks(self._layout.stage_of(self._rank))
        return self._rank not in largest_agreeing_group({rank: summaries[rank].settings for rank in group})

    def make_collective(self, rank: int, world_size: int, flags: int) -> AllGather:
        return make_allgather(rank, world_size, flags)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case StoreFromRank(rank, payload, source):
                nbytes = memoryview(payload).nbytes
                if nbytes != _SUMMARY.size:
                    raise RemoteProtocolError(
                        f"the summary of rank {rank}, sent by rank {source.rank}, is {nbytes} bytes long; "
                        f"it must be {_SUMMARY.size}",
                        remedy=_REMEDY,
                    )
                summary = StageSummary.read(payload)
                if summary.norm_squared < 0 or not summary.figures.is_plausible():
                    raise RemoteProtocolError(
                        f"the summary of rank {rank}, sent by rank {source.rank}, has a negative squared "
                        f"norm ({summary.norm_squared:g}) or implausible times ({summary.figures})",
                        remedy=_REMEDY,
                    )
                self._payloads[rank] = bytes(payload)
            case _:
                raise unexpected_effect("AllGather", effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        stored = self._payloads[slot.segment]
        if stored is None:
            raise LocalProtocolError(f"the summary of rank {slot.segment} was read before it arrived")
        return stored

    def compute_digest(self) -> bytes:
        summaries, own_stage = self.summaries, self._layout.stage_of(self._rank)
        whole = hashlib.blake2b(digest_size=32)
        for stage in range(self._layout.stages):
            keys = {rank: summaries[rank].replica_key for rank in self._layout.stage_ranks(stage)}
            whole.update(keys[self._rank if stage == own_stage else largest_agreeing_group(keys)[0]])
        for each in summaries:  # decisions that are based on the figures must be the same on all members
            whole.update(struct.pack("<5d", *astuple(each.figures)))
        return whole.digest()
