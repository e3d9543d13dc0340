"""What goes into and what comes out of a `MemberCore`: its events and its effects.

Decides nothing.  Effects are carried out strictly in the order in which they are returned.
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
    FORMING = "forming"  # a VIEW has come, START has not
    RUNNING = "running"
    FROZEN = "frozen"  # FREEZE has come, the next VIEW has not


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """`nbytes`: its size on the wire; what is held of a peer's is bounded by it."""

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

    `edges(rank, world_size)`: ranks that a rank exchanges with directly; symmetric.  `choices`: the same by
    exchange, where the coordinator chooses one of these; empty: the script has.  With "" among them it may as
    well choose none.
    `about`: for people; None: nothing is told.
    """

    setup: m.Setup
    neighbours: Callable[..., frozenset[int]]
    worker_info: m.WorkerInfo | None = None
    neighbours_by_exchange: Mapping[str, Callable[[int, int], frozenset[int]]] = field(default_factory=dict)

    @property
    def is_pipelined(self) -> bool:
        """The model is cut into stages."""
        return self.setup.stages > 1


@dataclass(frozen=True, slots=True)
class SubmitRound:
    """The trainer's contribution to `round` is prepared; here are its collectives by channel.

    `whole`: none is still to come.  Until then payloads travel, and nothing is voted on or decided here.
    `more`: the round opens all the same, and `Extend` will bring the rest.
    """

    round: m.RoundId
    collectives: Mapping[m.Channel, Collective]
    is_complete: bool = True
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class AddCollectives:
    """Further collectives of a round that was submitted with more to come; `more`: these are not the last.

    `reason`: there will be none, since the trainer cannot go on.
    """

    round: m.RoundId
    collectives: Mapping[m.Channel, Collective]
    has_more: bool = True
    failure: str = ""


@dataclass(frozen=True, slots=True)
class DigestComputed:
    """The loop has computed the digest of all updates of the open round."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """The open round cannot complete here (bad payload, full queue)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProtocolViolation:
    """What `peer` sent breaks the protocol, so that it cannot be an honest member."""

    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The trainer has loaded the state that a donor gave in this generation."""

    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class StageCheckpointsChanged:
    """Checkpoints of stages that are on this worker's disk now, all of them.

    `unwritten`: what was to be put aside, and cannot be.
    """

    checkpoints: tuple[m.CheckpointInfo, ...]
    failed_write: m.CheckpointInfo | None = None


@dataclass(frozen=True, slots=True)
class CompareReplicas:
    """The trainer's fingerprint of its state after `step`."""

    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotLoading:
    """The trainer begins to load an image: its model is not any more what it was."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A follower's model is that after step `applied`, and hardly behind."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """A follower cannot follow any more: it takes the whole state while the others wait for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeartbeatDue:
    """Time for a sign of life.

    `progress` grows when something moved: a payload, a block of state, the trainer's computing.
    `waiting`: the trainer waits inside of gridtrain, so that it is not hung even if nothing moves.
    """

    progress: int
    is_waiting: bool
    metrics: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class RequestMean:
    """The trainer's number for the `index`-th average of this step; `MeanKnown` answers."""

    step: int
    index: int
    value: float


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    reason: str
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResults:
    rtt_s: tuple[tuple[m.PeerId, float], ...]


@dataclass(frozen=True, slots=True)
class AbandonRound:
    """The trainer leaves in the middle of a round: vote NO, unless the vote was YES already."""


@dataclass(frozen=True, slots=True)
class RefuseResiduals:
    """The trainer is about to leave: take over no residual any more."""


@dataclass(frozen=True, slots=True)
class TransferResidual:
    """The trainer leaves and has no part in a round: hand these pieces of its residual over."""

    blocks: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ResidualReceived:
    """All pieces of this peer's residual are there and hold what they may; `Inherit` or `Forget` follows."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class StateDigestMismatch:
    """What was passed on to us as this generation's state is not that."""

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
    """Send what the workspace of `channel` holds at `place`, as Data."""

    peer: m.PeerId
    round: m.RoundId
    channel: m.Channel
    slot: m.PayloadSlot
    skip: bool


@dataclass(frozen=True, slots=True)
class ApplyToBuffer:
    """Apply to the workspace of `channel`; if it refuses, `Offence(peer, ...)`: it sent the payload."""

    channel: m.Channel
    effect: BufferEffect
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class CollectiveCompleted:
    """The collective of `channel` is complete, of a round that is to have more of them."""

    channel: m.Channel
    skip: bool


@dataclass(frozen=True, slots=True)
class ComputeDigest:
    """All collectives are complete: answer with `Sealed`."""

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
    """The average that the trainer waits for; None: given up, the generation ends."""

    value: float | None


@dataclass(frozen=True, slots=True)
class Dial:
    peer: m.PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """This peer is no member any more, or has broken the protocol."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class ProbePeers:
    """Measure round trips to these peers and answer with `Probed`."""

    targets: tuple[tuple[m.PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class SendState:
    """A joiner asked for our state; `kept`: for that one, which is on our disk and of its stage; `have`: so
    many blocks are there; `digest`: it asked for the digest alone."""

    peer: m.PeerId
    term: int
    generation: int
    is_whole: bool = True
    checkpoint: m.CheckpointInfo | None = None
    blocks_received: int = 0
    digest_only: bool = False


@dataclass(frozen=True, slots=True)
class ForwardState:
    """Another joiner gets from us what has come, and comes, of the state; it has so many blocks."""

    peer: m.PeerId
    term: int
    generation: int
    blocks_received: int


@dataclass(frozen=True, slots=True)
class ExpectStateDigest:
    """What comes of the state counts if it has this digest.  `Refuted` answers if it has not."""

    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class LoadCheckpoints:
    """Load these checkpoints: the group goes on from them, here as this stage.  `Restored` answers, or
    `Keeping` without one where it cannot be read.

    `blocks`: of the stage; together the checkpoints have them all, and perhaps others."""

    term: int
    generation: int
    checkpoints: tuple[m.CheckpointInfo, ...]
    layers: m.Span


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """What this worker has in memory goes to its disk: the model is cut otherwise, and it is taken from
    there, by this worker and by others.  `Keeping` follows."""

    checkpoint: m.CheckpointInfo


@dataclass(frozen=True, slots=True)
class SendCheckpoint:
    """This checkpoint is to be on this member's disk as well: send it as `Copy`; `awaited`: the group waits
    for it."""

    peer: m.PeerId
    term: int
    generation: int
    checkpoint: m.CheckpointInfo
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class StoreCheckpointBlock:
    """A block of another stage's checkpoint; `Keeping` follows when all of it is on the disk."""

    peer: m.PeerId
    block: m.CheckpointBlock


@dataclass(frozen=True, slots=True)
class DiscardCheckpoints:
    """Checkpoints after this step are of a history that was given up."""

    after_step: int


@dataclass(frozen=True, slots=True)
class BeginCatchUp:
    """Begin to follow: a new image, then its donors' updates."""


@dataclass(frozen=True, slots=True)
class SourceConnected:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class SourceDisconnected:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class SetCatchUpTarget:
    """A VIEW names this follower: that is the state that it must come to hold."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class DeliverCatchUpMessage:
    """From a donor to this follower, or from a follower to this donor."""

    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take an image after `step`; these followers, and nobody else, may have it."""

    step: int
    receivers: tuple[m.PeerId, ...]


@dataclass(frozen=True, slots=True)
class StoreStateBlock:
    """A block of the donor's state; `Restored` follows when the trainer has loaded all."""

    peer: m.PeerId
    block: m.StateBlock


@dataclass(frozen=True, slots=True)
class StoreResidualBlock:
    """A piece of a leaver's residual, in a generation of so many; `Inherited` follows the last one."""

    peer: m.PeerId
    block: m.ResidualBlock
    world_size: int


@dataclass(frozen=True, slots=True)
class AddResidual:
    """What this peer handed over is ours now: the trainer adds it to its residual before the next round."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class DropResidual:
    """What this peer handed over is void."""

    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class ResidualTransferEnded:
    """How the hand-over of our own residual ended; `text` names the heir, or says why there is none.

    `taken` is None where an heir may have everything, but has not said so.
    """

    is_accepted: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker cannot go on: refused, dismissed."""

    error: JoinRefused


@dataclass(frozen=True, slots=True)
class LogEvent:
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
