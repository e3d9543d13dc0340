"""Declares the events and effects of a worker's state machine (`core.member.member.MemberCore`).

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
    FORMING = "forming"  # between a MembershipView and its StartGeneration
    RUNNING = "running"
    FROZEN = "frozen"  # between a Freeze and the next MembershipView


# -- events ------------------------------------------------------------------------------------


class MemberEvent:
    """The base of all events of a worker's core."""

    __slots__ = ()


class GenerationEvent(MemberEvent):
    """The base of the events from the trainer and the I/O loop that concern a generation."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class MessageReceived(MemberEvent):
    """A message arrived from `peer`.  Its size on the wire, `nbytes`, counts towards the peer's limits."""

    peer: m.PeerId
    message: m.Message
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class PeerConnected(MemberEvent):
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class PeerDisconnected(MemberEvent):
    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class AddressChanged(MemberEvent):
    """This worker now listens on another address, which its next Join announces."""

    address: str


@dataclass(frozen=True, slots=True)
class TrainerJoined(MemberEvent):
    """The trainer has set up its model and data, and requests to take part in the run.

    Attributes:
        neighbours: neighbours(rank, world_size) returns the ranks with which `rank` exchanges payloads
            directly; the relation is symmetric.  For a model in stages, the third argument is `stage_bounds`.
        worker_info: information about this worker for display; None to send no information.
        may_be_absent: whether a step may commit without a member whose trainer has stalled.
        neighbours_by_exchange: a function like `neighbours` for each exchange that the coordinator may
            choose; empty if the script has chosen the exchange.  The key "" means that the coordinator may
            postpone the choice.
    """

    setup: m.Setup
    neighbours: Callable[..., frozenset[int]]
    worker_info: m.WorkerInfo | None = None
    neighbours_by_exchange: Mapping[str, Callable[[int, int], frozenset[int]]] = field(default_factory=dict)
    may_be_absent: bool = False

    @property
    def is_pipelined(self) -> bool:
        """Whether the model is partitioned into stages."""
        return self.setup.stages > 1


@dataclass(frozen=True, slots=True)
class SubmitRound(GenerationEvent):
    """The trainer submits its contribution to `round`, as collectives by channel.

    Attributes:
        is_complete: whether these are the last buckets.  Otherwise, more `SubmitRound` events follow; until
            the last one, payloads are exchanged, but no member votes.
        has_more: whether `AddCollectives` events will add more collectives to the open round.
        settings: the encoded optimizer settings with which the contribution was made.
        is_absent: whether the I/O loop, in place of the trainer, submits an empty contribution
            (`absent_round`).
    """

    round: m.RoundId
    collectives: Mapping[m.Channel, Collective]
    is_complete: bool = True
    has_more: bool = False
    settings: bytes = b""
    is_absent: bool = False


@dataclass(frozen=True, slots=True)
class AddCollectives(GenerationEvent):
    """Additional collectives of a round that was submitted with `has_more`.

    Attributes:
        has_more: whether more collectives will follow these.
        failure: the reason why the trainer cannot continue; empty if it can.
    """

    round: m.RoundId
    collectives: Mapping[m.Channel, Collective]
    has_more: bool = True
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StayPresent(GenerationEvent):
    """The I/O loop will not make an empty contribution to `round`, because the trainer has begun to submit or
    an empty contribution is impossible; the group waits for the trainer."""

    round: m.RoundId


@dataclass(frozen=True, slots=True)
class TrainerReturned(GenerationEvent):
    """The trainer has applied the steps from which it was absent, and can take part again."""


@dataclass(frozen=True, slots=True)
class DigestComputed(GenerationEvent):
    """The digest of all updates of the open round has been computed."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class RoundFailed(GenerationEvent):
    """The open round cannot be completed on this member, for example because a queue is full."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProtocolViolation(MemberEvent):
    """`peer` sent a message that a correct peer of the same version never sends."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class StateLoaded(GenerationEvent):
    """The trainer has loaded the state of this generation."""

    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class StageCheckpointsChanged(GenerationEvent):
    """The stage checkpoints on this worker's disk have changed.

    Attributes:
        checkpoints: all stage checkpoints that are now on the disk.
        failed_write: the checkpoint of a `SaveCheckpoint` that could not be written; None if there is none.
    """

    checkpoints: tuple[m.CheckpointInfo, ...]
    failed_write: m.CheckpointInfo | None = None


@dataclass(frozen=True, slots=True)
class CompareReplicas(GenerationEvent):
    """The trainer has computed the digest of its state after `step`, for comparison with other replicas."""

    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateSnapshotLoading(MemberEvent):
    """The trainer is about to overwrite its model with a snapshot of the state."""


@dataclass(frozen=True, slots=True)
class CaughtUp(MemberEvent):
    """Catch-up has reached the state after step `applied`, which is close to the group's latest step, so that
    the worker can become a member."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class CatchUpFailed(MemberEvent):
    """Catch-up cannot continue; the worker must receive the whole state while the other members wait."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeartbeatDue(MemberEvent):
    """A heartbeat is due.

    Attributes:
        progress: a counter that increases with each payload, block of state, and step of the trainer's
            computation.
        is_waiting: whether the trainer is waiting inside gridtrain; if so, a lack of progress does not mean
            that the trainer hangs.
        metrics: values for display, by name.
    """

    progress: int
    is_waiting: bool
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class RequestMean(GenerationEvent):
    """The trainer contributes `value` to the average with this step and index; `DeliverMean` follows."""

    step: int
    index: int
    value: float


@dataclass(frozen=True, slots=True)
class LeaveGroup(MemberEvent):
    """The worker is leaving the run.

    Attributes:
        is_temporary: whether the worker intends to rejoin.
    """

    reason: str
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResults(MemberEvent):
    """Answer to `ProbePeers`: the measured round-trip times in seconds."""

    rtt_s: tuple[tuple[m.PeerId, float], ...]


@dataclass(frozen=True, slots=True)
class AbandonRound(GenerationEvent):
    """The trainer is leaving during a round; the member votes NO unless it has already voted YES."""


@dataclass(frozen=True, slots=True)
class RefuseResiduals(MemberEvent):
    """The trainer is about to leave, so the member must not accept any more residuals."""


@dataclass(frozen=True, slots=True)
class TransferResidual(GenerationEvent):
    """The trainer is leaving between two rounds; its residual, given as `blocks`, is to be transferred."""

    blocks: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ResidualReceived(MemberEvent):
    """All blocks of this peer's residual have arrived and are valid.

    `AddResidual` or `DropResidual` follows.
    """

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class StateDigestMismatch(GenerationEvent):
    """The state that was forwarded to this member does not have the digest that the state source sent."""

    generation: int


# -- effects -----------------------------------------------------------------------------------


class MemberEffect:
    """The base of all effects of a worker's core."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Send(MemberEffect):
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class SendPayload(MemberEffect):
    """Send a Data message with the payload that the buffer of `channel` holds at `slot`."""

    peer: m.PeerId
    round: m.RoundId
    channel: m.Channel
    slot: m.PayloadSlot
    flags: int


@dataclass(frozen=True, slots=True)
class ApplyToBuffer(MemberEffect):
    """Apply `effect` to the buffer of `channel`.

    If the buffer rejects the payload of `peer`, `ProtocolViolation` follows.
    """

    channel: m.Channel
    effect: BufferEffect
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class CollectiveCompleted(MemberEffect):
    """Notify the trainer that a collective is complete, in a round that will have more collectives."""

    channel: m.Channel
    flags: int


@dataclass(frozen=True, slots=True)
class ComputeDigest(MemberEffect):
    """All collectives are complete: compute the digest of the updates.  `DigestComputed` follows."""

    flags: int


@dataclass(frozen=True, slots=True)
class ResolveRound(MemberEffect):
    """Notify the trainer that its round has ended, so that it applies the update or submits a new attempt.

    Attributes:
        is_unknown: whether the others may have committed the round without this worker, which then receives
            the group's state.
    """

    round: m.RoundId
    committed: bool
    flags: int
    reason: str
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class DeliverMean(MemberEffect):
    """Deliver the average that the trainer awaits.

    Attributes:
        value: the average; None if the generation ended before it was computed.
        missing: the names of the members that submitted their part of the step without contributing a value.
    """

    step: int
    index: int
    value: float | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dial(MemberEffect):
    peer: m.PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect(MemberEffect):
    """Disconnect a peer that is no longer known, or that has violated the protocol."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class ProbePeers(MemberEffect):
    """Measure the round-trip times to `targets`, which are pairs (peer, address); `ProbeResults` follows.

    Attributes:
        is_member: whether this worker is a member, so that `MEMBER_PROBE_S` is the time limit.
    """

    targets: tuple[tuple[m.PeerId, str], ...]
    is_member: bool = False


@dataclass(frozen=True, slots=True)
class SendState(MemberEffect):
    """Send this member's state to a joining member.

    Attributes:
        is_whole: whether to send the whole state; if not, send only the part that catch-up does not transfer.
        checkpoint: a stage checkpoint on this worker's disk to be sent instead; None to send the state.
        blocks_received: number of blocks that the joining member already has.
        digest_only: whether to send only the digest of the state.
    """

    peer: m.PeerId
    term: int
    generation: int
    is_whole: bool = True
    checkpoint: m.CheckpointInfo | None = None
    blocks_received: int = 0
    digest_only: bool = False


@dataclass(frozen=True, slots=True)
class ForwardState(MemberEffect):
    """Forward each block of the state, as it arrives, to another joining member.

    Attributes:
        blocks_received: the number of blocks that the other member already has.
    """

    peer: m.PeerId
    term: int
    generation: int
    blocks_received: int


@dataclass(frozen=True, slots=True)
class ExpectStateDigest(MemberEffect):
    """Accept the received state only if it has this digest; otherwise `StateDigestMismatch` follows."""

    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class LoadCheckpoints(MemberEffect):
    """Assemble this worker's stage, which consists of `layers`, from these checkpoints.

    The checkpoints contain all of these layers, and possibly others.  `StateLoaded` follows or, if a
    checkpoint cannot be read, `StageCheckpointsChanged` without that checkpoint.
    """

    term: int
    generation: int
    checkpoints: tuple[m.CheckpointInfo, ...]
    layers: m.Span


@dataclass(frozen=True, slots=True)
class SaveCheckpoint(MemberEffect):
    """Write the state in memory to disk, because stages of a new partition are assembled from it.

    `StageCheckpointsChanged` follows.
    """

    checkpoint: m.CheckpointInfo


@dataclass(frozen=True, slots=True)
class SendCheckpoint(MemberEffect):
    """Send this checkpoint as CheckpointBlocks to another member, which stores it on its disk.

    Attributes:
        is_awaited: whether the group is waiting for the checkpoint.
    """

    peer: m.PeerId
    term: int
    generation: int
    checkpoint: m.CheckpointInfo
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class StoreCheckpointBlock(MemberEffect):
    """Store a block of another member's checkpoint; `StageCheckpointsChanged` follows the last block."""

    peer: m.PeerId
    block: m.CheckpointBlock


@dataclass(frozen=True, slots=True)
class DiscardCheckpoints(MemberEffect):
    """Delete the checkpoints of steps after `after_step`, because the group has rolled back to that step."""

    after_step: int


@dataclass(frozen=True, slots=True)
class BeginCatchUp(MemberEffect):
    """Begin catch-up: request a snapshot from the sources, and then the updates of later steps."""


@dataclass(frozen=True, slots=True)
class SourceConnected(MemberEffect):
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class SourceDisconnected(MemberEffect):
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class SetCatchUpTarget(MemberEffect):
    """A MembershipView has made this worker a member: set the state that catch-up must reach."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class DeliverCatchUpMessage(MemberEffect):
    """Deliver a catch-up message from `peer`: a receiver's request, or a source's answer."""

    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class TakeStateSnapshot(MemberEffect):
    """Take a snapshot of the state after `step`, to be sent only to these receivers."""

    step: int
    receivers: tuple[m.PeerId, ...]


@dataclass(frozen=True, slots=True)
class StoreStateBlock(MemberEffect):
    """Store a block of the state; `StateLoaded` follows when the trainer has loaded the whole state."""

    peer: m.PeerId
    block: m.StateBlock


@dataclass(frozen=True, slots=True)
class StoreResidualBlock(MemberEffect):
    """Store a block of a leaving member's residual; after the last block, `ResidualReceived` follows."""

    peer: m.PeerId
    block: m.ResidualBlock
    world_size: int


@dataclass(frozen=True, slots=True)
class AddResidual(MemberEffect):
    """Add this peer's residual to the trainer's residual before the next round.

    Attributes:
        name: the name that the peer had as a member, for messages.
    """

    peer: m.PeerId
    name: str


@dataclass(frozen=True, slots=True)
class DropResidual(MemberEffect):
    """Discard the blocks of this peer's residual."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class ResidualTransferEnded(MemberEffect):
    """Notify the trainer that the transfer of its residual has ended.

    Attributes:
        is_accepted: whether a recipient has accepted the residual; None if a recipient may have received it,
            but has not replied.
        text: the name of the recipient, or the reason why no member has accepted the residual.
    """

    is_accepted: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Stop(MemberEffect):
    """Stop the worker, because it was refused or dismissed, or cannot continue."""

    error: JoinRefused


@dataclass(frozen=True, slots=True)
class LogEvent(MemberEffect):
    """Write an event to the log."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
