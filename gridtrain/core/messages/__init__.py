"""What travels: one frozen dataclass for each message, and nothing else.

`declaration` says how a message, its code and the bounds of its fields are declared;
`gridtrain.network.wire` derives the encoding from that.  What a message means is in PROTOCOL.md.

    worker -> coordinator   Join About Setup Kept Links Rates Beat Report Ready Stalled Accuse Broken NoRoute
                            Leave Pausing Finished StatusRequest BundleAsk
    coordinator -> worker   Welcome Refused Rejoin Reach Admitted Expect BeatReply Freeze Roster View Spared
                            Start RunState StatusReply BundleBlock
    worker <-> worker       Data Vote Decision Progress MeanAsk MeanTell Ping Pong StateRequest StateBlock
                            Copy HandOver TakenOver
    guest -> coordinator    Enrol, answered by Enrolled or Refused; Checkup, by CheckupReply and Reach
    operator -> coordinator Invite Expel Pardon, answered by Done or Refused
    to and from a relay     Relay Relayed RelayLost
    both                    Hello (the first message on every connection: who speaks), Credit
"""

from __future__ import annotations

from gridtrain.core.messages.admin import (
    MAX_BUNDLE_BYTES as MAX_BUNDLE_BYTES,
)
from gridtrain.core.messages.admin import (
    BundleBlock as BundleBlock,
)
from gridtrain.core.messages.admin import (
    BundleRequest as BundleRequest,
)
from gridtrain.core.messages.admin import (
    DiagnosticReply as DiagnosticReply,
)
from gridtrain.core.messages.admin import (
    DiagnosticRequest as DiagnosticRequest,
)
from gridtrain.core.messages.admin import (
    Invite as Invite,
)
from gridtrain.core.messages.admin import (
    OperatorReply as OperatorReply,
)
from gridtrain.core.messages.admin import (
    RemoveWorker as RemoveWorker,
)
from gridtrain.core.messages.admin import (
    StatusReply as StatusReply,
)
from gridtrain.core.messages.admin import (
    StatusRequest as StatusRequest,
)
from gridtrain.core.messages.admin import (
    Unban as Unban,
)
from gridtrain.core.messages.coordination import MAX_MEMBER_PAGES as MAX_MEMBER_PAGES
from gridtrain.core.messages.coordination import MAX_MEMBERS_PER_PAGE as MAX_MEMBERS_PER_PAGE
from gridtrain.core.messages.coordination import (
    STATE_LEFT as STATE_LEFT,
)
from gridtrain.core.messages.coordination import (
    Admitted as Admitted,
)
from gridtrain.core.messages.coordination import (
    ConnectionLost as ConnectionLost,
)
from gridtrain.core.messages.coordination import (
    CurrentGeneration as CurrentGeneration,
)
from gridtrain.core.messages.coordination import (
    Enrol as Enrol,
)
from gridtrain.core.messages.coordination import (
    Enrolled as Enrolled,
)
from gridtrain.core.messages.coordination import (
    ExpectProbes as ExpectProbes,
)
from gridtrain.core.messages.coordination import (
    Freeze as Freeze,
)
from gridtrain.core.messages.coordination import (
    FreezeReport as FreezeReport,
)
from gridtrain.core.messages.coordination import (
    Heartbeat as Heartbeat,
)
from gridtrain.core.messages.coordination import (
    HeartbeatReply as HeartbeatReply,
)
from gridtrain.core.messages.coordination import (
    Hello as Hello,
)
from gridtrain.core.messages.coordination import (
    Join as Join,
)
from gridtrain.core.messages.coordination import (
    Leave as Leave,
)
from gridtrain.core.messages.coordination import (
    LinkLatencies as LinkLatencies,
)
from gridtrain.core.messages.coordination import (
    LinkRates as LinkRates,
)
from gridtrain.core.messages.coordination import (
    MemberListPage as MemberListPage,
)
from gridtrain.core.messages.coordination import (
    MembershipView as MembershipView,
)
from gridtrain.core.messages.coordination import (
    PeersUnreachable as PeersUnreachable,
)
from gridtrain.core.messages.coordination import (
    Reachability as Reachability,
)
from gridtrain.core.messages.coordination import (
    Ready as Ready,
)
from gridtrain.core.messages.coordination import (
    Refused as Refused,
)
from gridtrain.core.messages.coordination import (
    Rejoin as Rejoin,
)
from gridtrain.core.messages.coordination import (
    ReplicaDigest as ReplicaDigest,
)
from gridtrain.core.messages.coordination import (
    ReplicaDiverged as ReplicaDiverged,
)
from gridtrain.core.messages.coordination import (
    RoundStalled as RoundStalled,
)
from gridtrain.core.messages.coordination import (
    RunFinished as RunFinished,
)
from gridtrain.core.messages.coordination import (
    RunStateUpdate as RunStateUpdate,
)
from gridtrain.core.messages.coordination import (
    Setup as Setup,
)
from gridtrain.core.messages.coordination import (
    StageCheckpointList as StageCheckpointList,
)
from gridtrain.core.messages.coordination import (
    StandbyNotice as StandbyNotice,
)
from gridtrain.core.messages.coordination import (
    StartGeneration as StartGeneration,
)
from gridtrain.core.messages.coordination import (
    TemporaryLeave as TemporaryLeave,
)
from gridtrain.core.messages.coordination import (
    ViolationReport as ViolationReport,
)
from gridtrain.core.messages.coordination import (
    Welcome as Welcome,
)
from gridtrain.core.messages.coordination import (
    WorkerInfo as WorkerInfo,
)
from gridtrain.core.messages.declaration import ADDRESS as ADDRESS
from gridtrain.core.messages.declaration import MAX_STAGES as MAX_STAGES
from gridtrain.core.messages.declaration import MESSAGE_TYPES as MESSAGE_TYPES
from gridtrain.core.messages.declaration import NAME as NAME
from gridtrain.core.messages.declaration import FieldError as FieldError
from gridtrain.core.messages.declaration import PeerId as PeerId
from gridtrain.core.messages.round import (
    Data as Data,
)
from gridtrain.core.messages.round import (
    Decision as Decision,
)
from gridtrain.core.messages.round import (
    MeanReply as MeanReply,
)
from gridtrain.core.messages.round import (
    MeanRequest as MeanRequest,
)
from gridtrain.core.messages.round import (
    RoundProgress as RoundProgress,
)
from gridtrain.core.messages.round import (
    Vote as Vote,
)
from gridtrain.core.messages.transfer import (
    BURST_MESSAGE_BYTES as BURST_MESSAGE_BYTES,
)
from gridtrain.core.messages.transfer import (
    BURST_MESSAGES as BURST_MESSAGES,
)
from gridtrain.core.messages.transfer import MAX_RESIDUAL_BLOCKS as MAX_RESIDUAL_BLOCKS
from gridtrain.core.messages.transfer import (
    Burst as Burst,
)
from gridtrain.core.messages.transfer import (
    BurstReceived as BurstReceived,
)
from gridtrain.core.messages.transfer import (
    BurstRequest as BurstRequest,
)
from gridtrain.core.messages.transfer import (
    CatchUpFrom as CatchUpFrom,
)
from gridtrain.core.messages.transfer import (
    CatchUpReport as CatchUpReport,
)
from gridtrain.core.messages.transfer import (
    CheckpointBlock as CheckpointBlock,
)
from gridtrain.core.messages.transfer import (
    CheckpointRequest as CheckpointRequest,
)
from gridtrain.core.messages.transfer import (
    Credit as Credit,
)
from gridtrain.core.messages.transfer import (
    Ping as Ping,
)
from gridtrain.core.messages.transfer import (
    Pong as Pong,
)
from gridtrain.core.messages.transfer import (
    RelayedMessage as RelayedMessage,
)
from gridtrain.core.messages.transfer import (
    RelayFailed as RelayFailed,
)
from gridtrain.core.messages.transfer import (
    RelayRequest as RelayRequest,
)
from gridtrain.core.messages.transfer import (
    ResidualBlock as ResidualBlock,
)
from gridtrain.core.messages.transfer import (
    ResidualReply as ResidualReply,
)
from gridtrain.core.messages.transfer import (
    ServeCatchUp as ServeCatchUp,
)
from gridtrain.core.messages.transfer import (
    SnapshotBlock as SnapshotBlock,
)
from gridtrain.core.messages.transfer import (
    SnapshotBlocksRequest as SnapshotBlocksRequest,
)
from gridtrain.core.messages.transfer import (
    SnapshotDigests as SnapshotDigests,
)
from gridtrain.core.messages.transfer import (
    SnapshotRequest as SnapshotRequest,
)
from gridtrain.core.messages.transfer import (
    SnapshotUnavailable as SnapshotUnavailable,
)
from gridtrain.core.messages.transfer import (
    StateBlock as StateBlock,
)
from gridtrain.core.messages.transfer import (
    StateDigest as StateDigest,
)
from gridtrain.core.messages.transfer import (
    StateRequest as StateRequest,
)
from gridtrain.core.messages.transfer import (
    UpdateLogEntry as UpdateLogEntry,
)
from gridtrain.core.messages.transfer import (
    UpdatesRequest as UpdatesRequest,
)
from gridtrain.core.messages.types import MAX_BLOCK_BYTES as MAX_BLOCK_BYTES
from gridtrain.core.messages.types import (
    MAX_CHECKPOINT_SOURCES as MAX_CHECKPOINT_SOURCES,
)
from gridtrain.core.messages.types import (
    MAX_LAYERS as MAX_LAYERS,
)
from gridtrain.core.messages.types import (
    MAX_STAGE_CHECKPOINTS as MAX_STAGE_CHECKPOINTS,
)
from gridtrain.core.messages.types import (
    PROTOCOL_VERSION as PROTOCOL_VERSION,
)
from gridtrain.core.messages.types import (
    RELAY_PREFIX as RELAY_PREFIX,
)
from gridtrain.core.messages.types import (
    Channel as Channel,
)
from gridtrain.core.messages.types import (
    CheckpointInfo as CheckpointInfo,
)
from gridtrain.core.messages.types import (
    CollectivePhase as CollectivePhase,
)
from gridtrain.core.messages.types import (
    Facts as Facts,
)
from gridtrain.core.messages.types import (
    LayerCosts as LayerCosts,
)
from gridtrain.core.messages.types import (
    LedgerSpec as LedgerSpec,
)
from gridtrain.core.messages.types import (
    LedgerState as LedgerState,
)
from gridtrain.core.messages.types import (
    Member as Member,
)
from gridtrain.core.messages.types import (
    PayloadSlot as PayloadSlot,
)
from gridtrain.core.messages.types import (
    RoundId as RoundId,
)
from gridtrain.core.messages.types import (
    Span as Span,
)
from gridtrain.core.messages.types import (
    StagedModel as StagedModel,
)
from gridtrain.core.messages.types import (
    Verdict as Verdict,
)
from gridtrain.core.messages.types import (
    relay_of as relay_of,
)

Message = (
    Hello
    | Credit
    | Enrol
    | Invite
    | RemoveWorker
    | Unban
    | Join
    | Setup
    | LinkLatencies
    | LinkRates
    | WorkerInfo
    | StageCheckpointList
    | Heartbeat
    | FreezeReport
    | CurrentGeneration
    | Ready
    | RoundStalled
    | ViolationReport
    | ConnectionLost
    | PeersUnreachable
    | Leave
    | TemporaryLeave
    | DiagnosticRequest
    | DiagnosticReply
    | BurstRequest
    | RunFinished
    | StatusRequest
    | BundleRequest
    | BundleBlock
    | Welcome
    | Refused
    | Enrolled
    | OperatorReply
    | Reachability
    | ExpectProbes
    | Admitted
    | HeartbeatReply
    | Freeze
    | MemberListPage
    | MembershipView
    | StandbyNotice
    | StartGeneration
    | RunStateUpdate
    | Rejoin
    | StatusReply
    | Data
    | Vote
    | Decision
    | RoundProgress
    | MeanRequest
    | MeanReply
    | Ping
    | Pong
    | Burst
    | BurstReceived
    | StateRequest
    | StateDigest
    | StateBlock
    | CheckpointRequest
    | CheckpointBlock
    | SnapshotRequest
    | SnapshotDigests
    | SnapshotBlocksRequest
    | SnapshotBlock
    | UpdatesRequest
    | UpdateLogEntry
    | SnapshotUnavailable
    | ReplicaDigest
    | ReplicaDiverged
    | CatchUpReport
    | CatchUpFrom
    | ServeCatchUp
    | ResidualBlock
    | ResidualReply
    | RelayRequest
    | RelayedMessage
    | RelayFailed
)
