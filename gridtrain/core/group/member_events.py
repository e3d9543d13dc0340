"""Events and effects of a worker's state machine (`core.member.member.MemberCore`).

Effects are executed strictly in the order in which they are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import BufferEffect, Collective
from gridtrain.errors import JoinRefused


class MemberPhase(StrEnum):
    APART = "apart"  # in no generation
    FORMING = "forming"  # between a VIEW and its START
    RUNNING = "running"
    FROZEN = "frozen"  # between a FREEZE and the next VIEW


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """`nbytes`: size on the wire, which bounds how many messages of a peer are held."""

    peer: m.PeerId
    message: m.Message
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerJoined:
    """The trainer knows its model and data, and asks to take part.

    Attributes:
        neighbours: neighbours(rank, world_size) are the ranks that a rank exchanges with directly; symmetric.
            For a model in stages it has `stage_bounds` as third argument.
        worker_info: for people; None: none is sent.
        neighbours_by_exchange: the same by exchange, where the coordinator chooses one of these; empty: the
            script chose.  With "" among them the coordinator may also choose none.
    """

    setup: m.Setup
    neighbours: Callable[..., frozenset[int]]
    worker_info: m.WorkerInfo | None = None
    neighbours_by_exchange: Mapping[str, Callable[[int, int], frozenset[int]]] = field(default_factory=dict)

    @property
    def is_pipelined(self) -> bool:
        """Whether the model is partitioned into stages."""
        return self.setup.stages > 1


@dataclass(frozen=True, slots=True)
class SubmitRound:
    """The trainer's contribution to `round`: collectives by channel.

    Attributes:
        is_complete: False: more buckets follow with further `SubmitRound` events.  Payloads are exchanged
            until then, and nothing is voted on.
        has_more: the round opens, and `AddCollectives` brings the rest.
    """

    round: m.RoundId
    collectives: Mapping[m.Channel, Collective]
    is_complete: bool = True
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class AddCollectives:
    """Further collectives of a round that was submitted with `has_more`.

    Attributes:
        has_more: these are not the last ones.
        failure: why the trainer cannot continue; empty: it can.
    """

    round: m.RoundId
    collectives: Mapping[m.Channel, Collective]
    has_more: bool = True
    failure: str = ""


@dataclass(frozen=True, slots=True)
class DigestComputed:
    """The digest of all updates of the open round."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """The open round cannot complete here (bad payload, full queue)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProtocolViolation:
    """`peer` sent something that an honest member of the same version never sends."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The trainer has loaded the state of this generation."""

    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class StageCheckpointsChanged:
    """All stage checkpoints that are on this worker's disk now.

    `failed_write`: the answer to `SaveCheckpoint` if it could not be written.
    """

    checkpoints: tuple[m.CheckpointInfo, ...]
    failed_write: m.CheckpointInfo | None = None


@dataclass(frozen=True, slots=True)
class CompareReplicas:
    """The trainer's digest of its state after `step`."""

    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotLoading:
    """The trainer begins to load a snapshot over its model."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Catch-up: the model is the state after step `applied`, and close to the group's."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """Catch-up cannot continue: the worker receives the whole state in a generation, while the others
    wait."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeartbeatDue:
    """Time for a heartbeat.

    Attributes:
        progress: grows with each payload, block of state, and step of the trainer's computation.
        is_waiting: the trainer waits inside of gridtrain, so it is not hung even without progress.
        metrics: numbers for people, by name.
    """

    progress: int
    is_waiting: bool
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class RequestMean:
    """The trainer's number for the `index`-th average of this step; answered by `DeliverMean`."""

    step: int
    index: int
    value: float


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """`is_temporary`: the worker means to come back."""

    reason: str
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Answer to `ProbePeers`: measured round-trip times in seconds."""

    rtt_s: tuple[tuple[m.PeerId, float], ...]


@dataclass(frozen=True, slots=True)
class AbandonRound:
    """The trainer leaves during a round: vote NO, unless this member has voted YES."""


@dataclass(frozen=True, slots=True)
class RefuseResiduals:
    """The trainer is about to leave: accept no further residual."""


@dataclass(frozen=True, slots=True)
class TransferResidual:
    """The trainer leaves and has no part in a round: transfer these blocks of its residual."""

    blocks: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ResidualReceived:
    """All blocks of this peer's residual have arrived and are valid; `AddResidual` or `DropResidual`
    follows."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class StateDigestMismatch:
    """The state that was forwarded to this member does not have the digest that its source sent."""

    generation: int


MemberEvent = (
    MessageReceived
    | PeerConnected
    | PeerDisconnected
    | TrainerJoined
    | SubmitRound
    | AddCollectives
    | DigestComputed
    | RoundFailed
    | ProtocolViolation
    | StateLoaded
    | StateDigestMismatch
    | StageCheckpointsChanged
    | CompareReplicas
    | SnapshotLoading
    | CaughtUp
    | CatchUpFailed
    | HeartbeatDue
    | RequestMean
    | LeaveGroup
    | ProbeResults
    | AbandonRound
    | RefuseResiduals
    | TransferResidual
    | ResidualReceived
)


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class SendPayload:
    """Send what the buffer of `channel` holds at `slot`, as Data."""

    peer: m.PeerId
    round: m.RoundId
    channel: m.Channel
    slot: m.PayloadSlot
    skip: bool


@dataclass(frozen=True, slots=True)
class ApplyToBuffer:
    """Apply to the buffer of `channel`; if it refuses the payload of `peer`, a `ProtocolViolation`
    follows."""

    channel: m.Channel
    effect: BufferEffect
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class CollectiveCompleted:
    """The collective of `channel` is complete, in a round that will have further ones."""

    channel: m.Channel
    skip: bool


@dataclass(frozen=True, slots=True)
class ComputeDigest:
    """All collectives are complete; answered by `DigestComputed`."""

    skip: bool


@dataclass(frozen=True, slots=True)
class ResolveRound:
    """The submitted round ended: the trainer applies its update, or tries again."""

    round: m.RoundId
    committed: bool
    skip: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DeliverMean:
    """The average that the trainer waits for; None: cancelled, as the generation ends."""

    value: float | None


@dataclass(frozen=True, slots=True)
class Dial:
    peer: m.PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """This peer is no longer a member, or has violated the protocol."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class ProbePeers:
    """Measure round trips to these peers; answered by `ProbeResults`."""

    targets: tuple[tuple[m.PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class SendState:
    """Send our state to a joining member.

    Attributes:
        is_whole: False: only the part that catch-up does not transfer.
        checkpoint: send this stage checkpoint from our disk instead.
        blocks_received: number of blocks that the member has.
        digest_only: send only the digest.
    """

    peer: m.PeerId
    term: int
    generation: int
    is_whole: bool = True
    checkpoint: m.CheckpointInfo | None = None
    blocks_received: int = 0
    digest_only: bool = False


@dataclass(frozen=True, slots=True)
class ForwardState:
    """Forward the state to another joining member, block by block as it arrives; it has `blocks_received`."""

    peer: m.PeerId
    term: int
    generation: int
    blocks_received: int


@dataclass(frozen=True, slots=True)
class ExpectStateDigest:
    """The state counts only if it has this digest; otherwise `StateDigestMismatch` follows."""

    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class LoadCheckpoints:
    """Assemble this worker's stage from these checkpoints; answered by `StateLoaded`, or by
    `StageCheckpointsChanged` without one that cannot be read.

    `layers`: of the stage; together the checkpoints have all of them, and perhaps others.
    """

    term: int
    generation: int
    checkpoints: tuple[m.CheckpointInfo, ...]
    layers: m.Span


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write the state in memory to the disk: the model is repartitioned, and stages are assembled from it.
    `StageCheckpointsChanged` follows."""

    checkpoint: m.CheckpointInfo


@dataclass(frozen=True, slots=True)
class SendCheckpoint:
    """Send this checkpoint to another member's disk as CheckpointBlocks; `is_awaited`: the group waits for
    it."""

    peer: m.PeerId
    term: int
    generation: int
    checkpoint: m.CheckpointInfo
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class StoreCheckpointBlock:
    """Store a block of another stage's checkpoint; `StageCheckpointsChanged` follows the last one."""

    peer: m.PeerId
    block: m.CheckpointBlock


@dataclass(frozen=True, slots=True)
class DiscardCheckpoints:
    """Delete checkpoints after this step: the group has rolled back."""

    after_step: int


@dataclass(frozen=True, slots=True)
class BeginCatchUp:
    """Begin catch-up: a new snapshot, then the sources' updates."""


@dataclass(frozen=True, slots=True)
class SourceConnected:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class SourceDisconnected:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class SetCatchUpTarget:
    """A VIEW names this worker: the state that catch-up must reach."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class DeliverCatchUpMessage:
    """A message between a source and a receiver of catch-up, to this one of them."""

    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take a snapshot after `step`, for these receivers only."""

    step: int
    receivers: tuple[m.PeerId, ...]


@dataclass(frozen=True, slots=True)
class StoreStateBlock:
    """Store a block of the state; `StateLoaded` follows when the trainer has loaded all of it."""

    peer: m.PeerId
    block: m.StateBlock


@dataclass(frozen=True, slots=True)
class StoreResidualBlock:
    """Store a block of a leaving member's residual; `ResidualReceived` follows the last one."""

    peer: m.PeerId
    block: m.ResidualBlock
    world_size: int


@dataclass(frozen=True, slots=True)
class AddResidual:
    """The trainer adds this peer's residual to its own before the next round."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class DropResidual:
    """Drop this peer's residual."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class ResidualTransferEnded:
    """End of the transfer of our own residual; `text` names the recipient, or says why there is none.

    `is_accepted` is None where a recipient may have everything, but has not replied.
    """

    is_accepted: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker cannot continue: refused or dismissed."""

    error: JoinRefused


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event for the log, for people."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


MemberEffect = (
    Send
    | SendPayload
    | ApplyToBuffer
    | CollectiveCompleted
    | ComputeDigest
    | ResolveRound
    | DeliverMean
    | Dial
    | Disconnect
    | ProbePeers
    | SendState
    | ForwardState
    | ExpectStateDigest
    | LoadCheckpoints
    | SaveCheckpoint
    | SendCheckpoint
    | StoreCheckpointBlock
    | DiscardCheckpoints
    | BeginCatchUp
    | SourceConnected
    | SourceDisconnected
    | SetCatchUpTarget
    | DeliverCatchUpMessage
    | TakeSnapshot
    | StoreStateBlock
    | StoreResidualBlock
    | AddResidual
    | DropResidual
    | ResidualTransferEnded
    | Stop
    | LogEvent
)
