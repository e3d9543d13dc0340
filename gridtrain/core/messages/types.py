"""Values that several messages carry: identities, rounds, spans of data, members, checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

PROTOCOL_VERSION = 2

MAX_STAGES = 1024
"""Largest number of stages of a model."""

MAX_STAGE_CHECKPOINTS = 16
"""Largest number of stage checkpoints that one worker reports."""

MAX_LAYERS = 256
"""Largest number of layers whose costs fit into one Setup; a model with more is not repartitioned."""

MAX_CHECKPOINT_SOURCES = 64
"""Largest number of checkpoints that one stage is assembled from."""

PeerId = bytes
"""A peer's public key, 32 bytes.  Never an address, never a routing id."""

Facts = tuple[tuple[str, str], ...]
"""Short texts by name, for people and for comparison; see `Setup`."""

RELAY_PREFIX = "relay:"
_KEY = re.compile(r"[0-9a-f]{64}")


def relay_of(address: str) -> PeerId | None:
    """The key of the relay that a member's address names; None: the address is direct."""
    key = address.removeprefix(RELAY_PREFIX)
    return bytes.fromhex(key) if key != address and _KEY.fullmatch(key) else None


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

    term: int
    generation: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """One collective within a round: a bucket of the gradient, or a micro-batch of a pipeline."""

    group: int = 0
    kind: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class PayloadSlot:
    """Position of a payload within one collective."""

    phase: CollectivePhase
    hop: int = 0
    segment: int = 0
    slice: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Data positions start <= p < stop of the run (`core.commit.data_ledger`), or layers of a model."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """What fixes the order of the samples: replicated, constant over the run.

    Exactly one of `epochs` and `steps` is not None; it ends the run.
    """

    size: int
    seed: int
    epochs: int | None = None
    steps: int | None = None


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

    step: int = 0
    cursor: int = 0
    requeued: tuple[Span, ...] = ()
    consumed: int = 0
    skipped: int = 0
    holders: tuple[tuple[PeerId, tuple[Span, ...]], ...] | None = None


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
    name: str
    address: str
    share: int
    joining: bool
    donor: int = -1
    pieces: tuple[tuple[Span, int], ...] = ()
    digest: bytes = b""
    piece_digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The state in a checkpoint: the step after which it was taken, its history, and its layers.

    A whole model counts as one layer; so does a stage where a run does not describe its layers.
    `digest`: of the contents (`content_digest` in `gridtrain.training.checkpoint`); empty: unknown.
    """

    applied: int
    history: bytes
    ledger: LedgerState
    layers: Span = Span(0, 1)
    digest: bytes = b""

    def matches(self, layers: Span, applied: int, history: bytes) -> bool:
        """Whether this is the state of these layers after this step of this history."""
        return (self.layers, self.applied, self.history) == (layers, applied, history)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Cost of one layer of a model in stages; for units see `core.stages.stage_cost.Layer`."""

    parameter_bytes: int
    trainable_bytes: int
    output_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    work_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    overhead_s: float = 0.0


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

    cuts: tuple[int, ...]
    blocks: tuple[LayerCosts, ...] = ()
    samples: int = 1
    micro_batches: int = 1
    copies: float = 3.0
    input_bytes: int = 0
    rematerialise: bool = True
    fill_drain: bool = False
    ahead: float = 0.0
    fixed: bool = False
