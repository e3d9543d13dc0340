"""Values that several messages carry (identities, layers, members, checkpoints), and their limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Annotated, Any

from gridtrain.core.messages.declaration import (
    WHOLE_SHARE,
    Address,
    AtMost,
    Count,
    Digest,
    EntriesShare,
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
from gridtrain.quantities import format_count

PROTOCOL_VERSION = 6

MAX_GENERATION_MEMBERS = 2048
"""Maximum number of entries in a list with one entry for each member."""

MAX_STAGE_CHECKPOINTS = 16
"""Maximum number of stage checkpoints that one worker reports."""

MAX_LAYERS = 256
"""Maximum number of layers whose costs fit into one Setup; a model with more layers is not repartitioned."""

MAX_CHECKPOINT_SOURCES = 64
"""Maximum number of checkpoints from which one stage is assembled."""

MAX_BLOCK_BYTES = 1 << 20
"""Largest payload of a message that carries one block of a state, a checkpoint or a bundle."""

Facts = Annotated[tuple[tuple[Name, Text], ...], AtMost(64)]
"""Short strings by name, which are displayed and compared between workers; see `Setup.facts`."""

BASE_FACT = "base"
"""Name of the fact that describes the frozen parameters; models without frozen parameters lack this fact."""

BASE_ORIGIN = "base_origin"
"""Name of the text in `WorkerInfo` that says where the worker loaded its base from."""

GROUPS_FACT = "groups"
"""Name of the fact that describes which parameters an optimizer's groups contain; an optimizer with a single
group in the model's order lacks this fact."""

LATER_FACTS = (BASE_FACT, "adapter", GROUPS_FACT)
"""Names of facts that earlier versions did not record.  A run may have one of these facts even if its journal
or checkpoint lacks it.  A version that adds a fact to existing runs must list it here."""


RELAY_PREFIX = "relay:"
_KEY = re.compile(r"[0-9a-f]{64}")


def relay_of(way: str) -> PeerId | None:
    """Return the key of the relay that a member's address names, or None if the address is direct."""
    key = way.removeprefix(RELAY_PREFIX)
    return bytes.fromhex(key) if key != way and _KEY.fullmatch(key) else None


class CollectivePhase(IntEnum):
    """Phase of a collective to which a payload belongs (`PayloadSlot.phase`)."""

    REDUCE = 0  # ring, reduce-scatter half
    GATHER = 1  # ring, all-gather half
    ALL_GATHER = 2  # all-gather of sparse payloads, segment = origin's rank
    FOLD = 3  # butterfly, ranks >= Q (largest power of two <= P) send down to rank - Q
    SWAP = 4  # butterfly, hop h pairs rank with rank XOR 2**h
    UNFOLD = 5  # butterfly, the result goes back up
    RESUME = 6  # ring, to the left: the messages that a retry need not send again
    TO_ROOT = 7  # tree and star, towards rank 0
    FROM_ROOT = 8  # tree and star, the result from rank 0
    ACTIVATION = 9  # activation transfer between neighbouring stages


class Verdict(IntEnum):
    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """Identifies one attempt at the exchange of one step, in one generation and term."""

    term: UInt
    generation: UInt
    step: UInt
    attempt: UInt


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """Identifies one collective of a round, such as a bucket's exchange or the transfer of a micro-batch."""

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
    """A range start <= p < stop of data positions (`core.commit.data_ledger`) or of a model's layers."""

    start: UInt
    stop: UInt

    def find_problem(self) -> str | None:
        return None if self.start <= self.stop else f"{self}; it must not stop before it starts"

    def find_problem_of_layers(self) -> str | None:
        """Return None if this span of layers contains at least one layer; otherwise the problem."""
        return None if self.start < self.stop else f"layers {self}; there must be at least one layer"


Spans = Annotated[tuple[Span, ...], AtMost(4096)]

MAX_SHARDS = 4096
"""Maximum number of shards of a data set; if it has more files, each shard combines several files."""


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """The size of the data set, the seed of its order, and the end of the run.

    The specification is the same on all workers, and constant during a run.

    Exactly one of `epochs` and `steps` is not None; the run ends after that many epochs or steps.

    Attributes:
        delay: number of steps after which the gradients of a step's samples are exchanged: 0, or 1 if they
            are exchanged while the samples of the next step are being processed.
        shards: the number of samples in each shard, if members read the data set shard by shard
            (`core.commit.shard_leases`); otherwise empty.
    """

    size: UInt
    seed: UInt
    epochs: UInt | None = None
    steps: UInt | None = None
    delay: UInt = 0
    shards: Annotated[tuple[UInt, ...], AtMost(MAX_SHARDS)] = ()

    def find_problem(self) -> str | None:
        if self.delay > 1:
            return f"{self}; the delay must be 0 or 1"
        if self.shards and (sum(self.shards) != self.size or min(self.shards) < 1):
            return (
                f"{format_count(len(self.shards), 'shard')} with {format_count(sum(self.shards), 'sample')}, "
                f"{min(self.shards)} of them in the smallest shard; each shard must have at least 1 sample, "
                f"and all of them together must have {self.size}"
            )
        one_limit = (self.epochs is None) != (self.steps is None)
        return None if one_limit else f"{self}; it must have either epochs or steps"


@dataclass(frozen=True, slots=True)
class DeferredBatch:
    """A batch that step `step` assigned to member `peer`, which contributes it to a later step.

    Attributes:
        spans: the positions of the batch; () if no positions were assigned to the member, or if they were
            re-queued because the batch was too late.
        total_samples: number of samples that step `step` assigned to all members, which determines the
            weight of the batch.
    """

    peer: PeerId
    spans: Spans
    total_samples: UInt
    step: UInt


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The progress of the run through its data, which only a commit or a MembershipView changes.

    Attributes:
        step: the next step to commit.
        cursor: the first position that has not been assigned.
        requeued: positions that were assigned to a member that was lost or too late, and were therefore taken
            back; they are assigned before other positions.
        consumed: number of samples in committed steps, including steps whose update was skipped.
        skipped: number of samples in committed steps whose update was skipped.
        holders: the positions of each member in step `step`, if a MembershipView fixed them; None if they are
            assigned by shares.
        late: the batches of members that are absent, sorted by peer.
        pending: the batches of the previous step, if `LedgerSpec.delay` is 1, sorted by peer.
        leases: the positions of a shard that later steps assign to each member, if `LedgerSpec.shards` is
            not empty, sorted by peer.
        restart_generation: the generation in which the run began again at step 0, because all later states
            were lost; 0 if there is none.
    """

    step: UInt = 0
    cursor: UInt = 0
    requeued: Spans = ()
    consumed: UInt = 0
    skipped: UInt = 0
    holders: Annotated[tuple[tuple[PeerId, Spans], ...], AtMost(MAX_GENERATION_MEMBERS)] | None = None
    late: Annotated[tuple[DeferredBatch, ...], AtMost(MAX_GENERATION_MEMBERS)] = ()
    pending: Annotated[tuple[DeferredBatch, ...], AtMost(MAX_GENERATION_MEMBERS)] = ()
    leases: Annotated[tuple[tuple[PeerId, Span], ...], AtMost(MAX_GENERATION_MEMBERS)] = ()
    restart_generation: UInt = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a generation; its index in the member list is its rank.

    Attributes:
        address: the address at which the receiver of this list reaches the member; the coordinator chooses
            it for each pair.  "tcp://host:port" is dialled; "relay:" and a key in hexadecimal name the
            member, or the coordinator, that relays end-to-end encrypted messages; if the address is empty,
            the member dials the receiver.  If the receiver itself has an address in the list, the list is the
            same for all members that can be dialled; of two such members, the one with the larger key dials.
        share: the member's batch size in samples.
        joining: whether the member must first receive the state.
        donor: rank of the member's state source; -1 stands for the lowest rank that holds the state.
        pieces: for a repartitioned model, the checkpoints from which the member assembles its stage: the
            layers of each, and the rank that stores it.
        digest: `CheckpointInfo.digest` of the checkpoint that the state source sends, according to the
            coordinator; empty if unknown.
        piece_digests: `CheckpointInfo.digest` of each of `pieces`; empty if unknown, because the checkpoint
            is not on disk yet.
        entries_share: how many of the k entries of a sparse payload the member selects for its own
            contribution, in 256ths of k.
    """

    peer: PeerId
    name: Name
    address: Address
    share: Count
    joining: bool
    donor: SourceRank = -1  # the journal uses this name, like all field names, as a key
    pieces: Annotated[tuple[tuple[Span, Count], ...], AtMost(MAX_CHECKPOINT_SOURCES)] = ()
    digest: Digest = b""
    piece_digests: Annotated[tuple[Digest, ...], AtMost(MAX_CHECKPOINT_SOURCES)] = ()
    entries_share: EntriesShare = WHOLE_SHARE

    def find_problem(self) -> str | None:
        if len(self.piece_digests) != len(self.pieces):
            digests, pieces = len(self.piece_digests), len(self.pieces)
            return (
                f"{format_count(digests, 'digest')} for {format_count(pieces, 'piece')}; each piece must "
                "have a digest"
            )
        return next(
            (problem for layers, _ in self.pieces if (problem := layers.find_problem_of_layers())), None
        )


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The state in a checkpoint: the step after which it was taken, its history, and its layers.

    A whole model is treated as one layer.  A stage is also treated as one layer unless the run describes its
    layers.

    Attributes:
        digest: the digest of the contents (`content_digest` in `gridtrain.training.checkpoint`); empty if
            unknown.
    """

    applied: UInt
    history: Digest
    ledger: LedgerState
    layers: Span = Span(0, 1)
    digest: Digest = b""

    def find_problem(self) -> str | None:
        return self.layers.find_problem_of_layers()

    def matches(self, blocks: Span, applied: int, history: bytes) -> bool:
        """Return whether the checkpoint holds these layers after step `applied` of this history."""
        return (self.layers, self.applied, self.history) == (blocks, applied, history)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Cost of one layer of a model in stages; `core.stages.stage_cost.Layer` gives the units."""

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
    """Partition of a model into stages, and the costs that the coordinator needs to repartition the model.

    Attributes:
        cuts: stages + 1 numbers, the first layer of each stage and then the number of layers.
        blocks: the cost of each layer; () if the model must not be repartitioned.
        fill_drain: whether the pipeline schedule is fill-drain; otherwise it is 1F1B.
        fixed: whether the user chose `cuts`; if so, they are used whenever there are enough workers for all
            stages.

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
            return f"cuts {cuts[:8]}; they must ascend from 0"
        if count and count != cuts[-1]:
            return f"{count} blocks cut at {cuts[:8]}; the last cut must be the number of blocks"
        return None


def find_problem_of_block(index: int, total: int, payload: Any, max_blocks: int) -> str | None:
    """Return the problem with block `index` of `total`, or None if it is valid.

    It is valid if `index` < `total` <= `max_blocks`, and `payload` has at most `MAX_BLOCK_BYTES` bytes.
    """
    if not index < total <= max_blocks:
        return f"block {index} of {total}; blocks are numbered from 0, and there may be at most {max_blocks}"
    return find_problem_of_size(payload, MAX_BLOCK_BYTES)


def find_problem_of_size(payload: Any, max_bytes: int) -> str | None:
    nbytes = memoryview(payload).nbytes
    return None if nbytes <= max_bytes else f"{nbytes} bytes; it must be at most {max_bytes}"
