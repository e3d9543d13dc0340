"""Values that several messages carry: identities, rounds, spans of data, members, checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Annotated, Any

from gridtrain.core.messages.declaration import (
    Address,
    AtMost,
    Count,
    Digest,
    Factor,
    Name,
    PeerId,
    Positive,
    Seconds,
    SourceRank,
    StageBounds,
    Text,
    UInt,
)

PROTOCOL_VERSION = 2

MAX_STAGE_CHECKPOINTS = 16
"""Largest number of stage checkpoints that one worker reports."""

MAX_LAYERS = 256
"""Largest number of layers whose costs fit into one Setup; a model with more is not repartitioned."""

MAX_CHECKPOINT_SOURCES = 64
"""Largest number of checkpoints that one stage is assembled from."""

MAX_BLOCK_BYTES = 1 << 20
"""Payload of a message that carries one block of something larger."""

Facts = Annotated[tuple[tuple[Name, Text], ...], AtMost(64)]
"""Short texts by name, for people and for comparison; see `Setup`."""


RELAY_PREFIX = "relay:"
_KEY = re.compile(r"[0-9a-f]{64}")


def relay_of(way: str) -> PeerId | None:
    """The key of the relay that a member's address names; None: the address is direct."""
    key = way.removeprefix(RELAY_PREFIX)
    return bytes.fromhex(key) if key != way and _KEY.fullmatch(key) else None


class CollectivePhase(IntEnum):
    """Phase of a collective that a payload belongs to (`PayloadSlot.phase`)."""

    REDUCE = 0  # ring, reduce-scatter half
    GATHER = 1  # ring, all-gather half
    ALL_GATHER = 2  # all-gather of sparse payloads, segment = origin's rank
    FOLD = 3  # butterfly, ranks >= Q send theirs down
    SWAP = 4  # butterfly, hop h pairs rank with rank XOR 2**h
    UNFOLD = 5  # butterfly, the result goes back up
    RESUME = 6  # ring, to the left: what a retry need not send again
    TO_ROOT = 7  # tree and star, towards rank 0
    FROM_ROOT = 8  # tree and star, the result from rank 0
    ACTIVATION = 9  # activation transfer between neighbouring stages


class Verdict(IntEnum):
    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """One attempt at one step's exchange, in one generation of one term."""

    term: UInt
    generation: UInt
    step: UInt
    attempt: UInt


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """One collective within a round: a bucket of the gradient, or a micro-batch of a pipeline."""

    group: Count = 0
    kind: Count = 0
    index: Count = 0


@dataclass(frozen=True, slots=True)
class PayloadSlot:
    """Position of a payload within one collective."""

    phase: CollectivePhase
    hop: Count = 0
    segment: Count = 0
    slice: Count = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Data positions start <= p < stop of the run (`core.commit.data_ledger`), or layers of a model."""

    start: UInt
    stop: UInt

    def find_problem(self) -> str | None:
        return None if self.start <= self.stop else f"{self}, must not stop before it starts"

    def find_problem_of_layers(self) -> str | None:
        """As `find_problem`; layers are at least one, while data positions may be none."""
        return None if self.start < self.stop else f"layers {self}, must be one at least"


Spans = Annotated[tuple[Span, ...], AtMost(4096)]


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """What fixes the order of the samples: replicated, constant over the run.

    Exactly one of `epochs` and `steps` is not None; it ends the run.
    """

    size: UInt
    seed: UInt
    epochs: UInt | None = None
    steps: UInt | None = None

    def find_problem(self) -> str | None:
        one_limit = (self.epochs is None) != (self.steps is None)
        return None if one_limit else f"{self}, must have epochs or steps"


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Progress of the run through its data: replicated, changed only by a commit or a VIEW.

    Attributes:
        step: the next step to commit.
        cursor: the first position that has not been assigned.
        requeued: positions that were assigned to members since lost; assigned first.
        consumed: samples of committed steps, counting skipped ones.
        skipped: samples of committed steps whose update was skipped.
        holders: assignment of step `step` where a VIEW fixed it; None: assigned by shares.
    """

    step: UInt = 0
    cursor: UInt = 0
    requeued: Spans = ()
    consumed: UInt = 0
    skipped: UInt = 0
    holders: Annotated[tuple[tuple[PeerId, Spans], ...], AtMost(1024)] | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a generation; its index in the member list is its rank.

    Attributes:
        address: how the worker that receives this list reaches the member; the coordinator decides it for
            each pair.  "tcp://host:port": dial it; "relay:" and a key in hexadecimal: end-to-end encrypted
            through that member or the coordinator; empty: the member dials.
        share: batch size in samples.
        joining: the member must first receive the state.
        donor: rank of its state source; -1: the lowest rank that holds the state.
        pieces: for a repartitioned model, checkpoints that this member assembles its stage from: their
            layers, and the rank that stores each.
        digest: `CheckpointInfo.digest` of the checkpoint that the state source sends, as the coordinator
            knows it; empty: unknown.
        piece_digests: `CheckpointInfo.digest` of each of `pieces`; empty: unknown, not on a disk yet.
    """

    peer: PeerId
    name: Name
    address: Address
    share: Count
    joining: bool
    donor: SourceRank = -1
    pieces: Annotated[tuple[tuple[Span, Count], ...], AtMost(MAX_CHECKPOINT_SOURCES)] = ()
    digest: Digest = b""
    piece_digests: Annotated[tuple[Digest, ...], AtMost(MAX_CHECKPOINT_SOURCES)] = ()

    def find_problem(self) -> str | None:
        if len(self.piece_digests) != len(self.pieces):
            return f"{len(self.piece_digests)} digests of {len(self.pieces)} pieces, must be as many"
        return next(
            (problem for layers, _ in self.pieces if (problem := layers.find_problem_of_layers())), None
        )


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The state in a checkpoint: the step after which it was taken, its history, and its layers.

    A whole model counts as one layer; so does a stage where a run does not describe its layers.
    `digest`: of the contents (`content_digest` in `gridtrain.training.checkpoint`); empty: unknown.
    """

    applied: UInt
    history: Digest
    ledger: LedgerState
    layers: Span = Span(0, 1)
    digest: Digest = b""

    def find_problem(self) -> str | None:
        return self.layers.find_problem_of_layers()

    def matches(self, blocks: Span, applied: int, history: bytes) -> bool:
        """Whether this is the state of these layers after this step of this history."""
        return (self.layers, self.applied, self.history) == (blocks, applied, history)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Cost of one layer of a model in stages; for units see `core.stages.stage_cost.Layer`."""

    parameter_bytes: UInt
    trainable_bytes: UInt
    output_bytes: UInt = 0
    gradient_bytes: UInt = 0
    kept_bytes: UInt = 0
    work_bytes: UInt = 0
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    overhead_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class StagedModel:
    """Partition of a model into stages, and what the coordinator needs to repartition it.

    Attributes:
        cuts: (stages + 1,) first layer of each stage, and the number of layers.
        blocks: cost of each layer; (): the model is not repartitioned.
        fill_drain: the pipeline schedule; False: 1F1B.
        fixed: the user chose `cuts`; they are used wherever there are workers for all stages.

    The other fields are those of `core.stages.stage_cost.ExecutionSettings`.
    """

    cuts: StageBounds
    blocks: Annotated[tuple[LayerCosts, ...], AtMost(MAX_LAYERS)] = ()
    samples: Positive = 1
    micro_batches: Positive = 1
    copies: Factor = 3.0
    input_bytes: UInt = 0
    rematerialise: bool = True
    fill_drain: bool = False
    ahead: Factor = 0.0
    fixed: bool = False

    def find_problem(self) -> str | None:
        cuts, count = self.cuts, len(self.blocks)
        if cuts[:1] != (0,) or len(cuts) < 2 or not all(a < b for a, b in pairwise(cuts)):
            return f"cuts {cuts[:8]}, must ascend from 0"
        return (
            None
            if not count or count == cuts[-1]
            else f"{count} blocks cut at {cuts[:8]}, must end with them"
        )


def find_problem_of_block(index: int, total: int, payload: Any, max_blocks: int) -> str | None:
    """Of block `index` of `total`, of which there may be `max_blocks`."""
    if not index < total <= max_blocks:
        return f"block {index} of {total}, must be below the total, and that at most {max_blocks}"
    return find_problem_of_size(payload, MAX_BLOCK_BYTES)


def find_problem_of_size(payload: Any, max_bytes: int) -> str | None:
    nbytes = memoryview(payload).nbytes
    return None if nbytes <= max_bytes else f"{nbytes} bytes, must be at most {max_bytes}"
