"""Messages between a worker and the coordinator: joining, heartbeats, generations, leaving."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from gridtrain.core.messages.declaration import (
    Address,
    AppliedStep,
    AtMost,
    Count,
    Digest,
    Flops,
    Name,
    PeerId,
    Positive,
    Rate,
    Reason,
    RunStateWord,
    Seconds,
    StageBounds,
    StageCount,
    Text,
    UInt,
    message,
)
from gridtrain.core.messages.types import (
    MAX_STAGE_CHECKPOINTS,
    CheckpointInfo,
    Facts,
    LedgerSpec,
    LedgerState,
    Member,
    RoundId,
    Span,
    StagedModel,
    Verdict,
)


@message(1)
@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every connection: the dialling peer's key, protocol version and software."""

    peer: PeerId
    version: UInt
    software: Name


@message(5)
@dataclass(frozen=True, slots=True)
class Enrol:
    """Sent with an invitation's key: admit `peer`, the sender's own public key, from now on."""

    peer: PeerId


@message(10)
@dataclass(frozen=True, slots=True)
class Join:
    """Request to take part in `run`.

    Attributes:
        address: where peers may reach this worker.
        can_relay: this worker is willing to forward what other members send one another.
        is_rejoin: this process has been welcomed before.  False after a restart, even with a known key.
        generation: the generation that this process is in; 0: none.
    """

    run: Name
    name: Name
    address: Address
    can_relay: bool = True
    is_rejoin: bool = False
    generation: UInt = 0


@message(11)
@dataclass(frozen=True, slots=True)
class Setup:
    """What this worker will train.

    Attributes:
        facts: short texts that must be equal on all workers of a run, such as
            ("model", "120576 parameters, digest 3fa9..."), ("exchange", "GTopK(density=0.05)").
        checkpoint: this worker's checkpoint; the run resumes from it if nobody holds a later state.
        can_catch_up: it can copy a state while the others train, and apply their updates after that.
        stages: number of stages of the model (`core.group.rank_layout`); 1: every worker holds all of it.
        stage_checkpoints: for a model in stages, the checkpoints on this worker's disk.
        model: for a model in stages, its partition; None: each stage is one layer.
        memory_bytes: memory that training may use; 0: unknown.
        flops: compute speed, only compared with the others'; 0: unknown.
        initial_state_digest: digest of the state as the script built it here, all that a joining member would
            be sent; empty: changed since, or unknown.
    """

    facts: Facts
    ledger: LedgerSpec
    batch_size: Count
    global_batch_size: Count | None
    checkpoint: CheckpointInfo | None = None
    can_catch_up: bool = False
    stages: StageCount = 1
    stage_checkpoints: Annotated[tuple[CheckpointInfo, ...], AtMost(MAX_STAGE_CHECKPOINTS)] = ()
    model: StagedModel | None = None
    memory_bytes: UInt = 0
    flops: Flops = 0.0
    initial_state_digest: Digest = b""


@message(77)
@dataclass(frozen=True, slots=True)
class StageCheckpointList:
    """All stage checkpoints on this worker's disk; replaces `Setup.stage_checkpoints`.

    `generation`: of the last VIEW that the worker had received by then.
    """

    checkpoints: Annotated[tuple[CheckpointInfo, ...], AtMost(MAX_STAGE_CHECKPOINTS)]
    generation: UInt = 0


@message(12)
@dataclass(frozen=True, slots=True)
class LinkLatencies:
    """Round-trip times in seconds from this worker to the peers that it was asked to probe."""

    rtt_s: Annotated[tuple[tuple[PeerId, Seconds], ...], AtMost(256)]


@message(26)
@dataclass(frozen=True, slots=True)
class LinkRates:
    """(peer, rate to it, rate from it) of bulk messages in bytes per second; 0: not measured.

    If the two ends of a link report different rates, the lower one is used.
    """

    rates_Bps: Annotated[tuple[tuple[PeerId, Rate, Rate], ...], AtMost(256)]


@message(80)
@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """This worker's device and versions, for display only."""

    texts: Annotated[tuple[tuple[Name, Text], ...], AtMost(16)]


STATE_LEFT = "state_left_bytes"
"""Heartbeat metric: bytes of its state that a worker has not received yet."""


@message(13)
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent twice a second, with what `gridtrain status` shows.

    `progress` grows whenever the trainer or an exchange makes progress, so that a hung trainer is detected.
    `metrics` are numbers for people: loss, bytes, seconds of compute, ...
    """

    sequence: UInt
    step: AppliedStep
    progress: UInt
    metrics: Annotated[tuple[tuple[Name, float], ...], AtMost(64)]


@message(14)
@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Answer to FREEZE: the worker's state (commit rule 5).

    Attributes:
        is_synced: the worker holds a state; the following fields describe it.
        applied: the last step applied; -1: none.
        history: chained digest of all applied updates.
        prepared, digest, skip: the round that this worker voted YES for, if any.
        layers: layers of the model that this state covers.
    """

    term: UInt
    generation: UInt
    is_synced: bool
    applied: AppliedStep
    history: Digest
    ledger: LedgerState
    prepared: RoundId | None
    digest: Digest
    skip: bool
    layers: Span = field(default=Span(0, 1))


@message(23)
@dataclass(frozen=True, slots=True)
class CurrentGeneration:
    """Follows every Welcome: the worker's generation, its members and shares in rank order, its partition.

    A coordinator that was restored from a backup may not know that generation (commit rule 11).
    """

    term: UInt
    generation: UInt
    members: Annotated[tuple[tuple[PeerId, Count], ...], AtMost(1024)]
    stage_bounds: StageBounds = ()


@message(15)
@dataclass(frozen=True, slots=True)
class Ready:
    """The sender has executed the VIEW's verdict, holds the state, and is connected (commit rule 8)."""

    term: UInt
    generation: UInt
    history: Digest


@message(16)
@dataclass(frozen=True, slots=True)
class RoundStalled:
    """A round does not end: the suspects are silent, not connected, or disagree.

    `silent_s`: how long the suspects showed no progress; 0: they are suspected of something else.
    """

    round: RoundId
    suspects: Annotated[tuple[PeerId, ...], AtMost(1024)]
    silent_s: Seconds
    reason: Reason


@message(20)
@dataclass(frozen=True, slots=True)
class ViolationReport:
    """`peer` violated the protocol, and the sender has disconnected it."""

    peer: PeerId
    reason: Reason


@message(22)
@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The sender's connection to this member of the running generation broke."""

    term: UInt
    generation: UInt
    peer: PeerId


@message(21)
@dataclass(frozen=True, slots=True)
class PeersUnreachable:
    """These members of the generation cannot be reached at the addresses in the member list."""

    term: UInt
    generation: UInt
    peers: Annotated[tuple[PeerId, ...], AtMost(1024)]


@message(24)
@dataclass(frozen=True, slots=True)
class ReplicaDigest:
    """Digest of this member's parameters, optimizer and settings after step `step`."""

    term: UInt
    generation: UInt
    step: UInt
    digest: Digest


@message(17)
@dataclass(frozen=True, slots=True)
class Leave:
    """The worker leaves the run."""

    reason: Reason


@message(83)
@dataclass(frozen=True, slots=True)
class TemporaryLeave:
    """As Leave; the owner wants the machine for something else, and the worker will rejoin."""

    reason: Reason


@message(18)
@dataclass(frozen=True, slots=True)
class RunFinished:
    """The ledger ended the run on this worker."""

    applied: AppliedStep
    history: Digest


@message(30)
@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Join; `term` fences older coordinators (commit rule 11)."""

    term: UInt
    run: Name
    software: Name


@message(31)
@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to Join or Setup, or a dismissal; `code` is stable, the rest is for people."""

    code: Name
    reason: Reason
    remedy: Reason


@message(41)
@dataclass(frozen=True, slots=True)
class Enrolled:
    """Answer to Enrol: the key may now connect, and join `run`."""

    run: Name


@message(43)
@dataclass(frozen=True, slots=True)
class Reachability:
    """Result of the coordinator's call back: `address` reaches this worker; empty: no address does."""

    address: Address


@message(47)
@dataclass(frozen=True, slots=True)
class ReplicaDiverged:
    """This member's replica digest after `step` differs from the majority's: its state will be replaced."""

    term: UInt
    generation: UInt
    step: UInt


@message(44)
@dataclass(frozen=True, slots=True)
class ExpectProbes:
    """Workers that will measure their links to the receiver; it dials those with an address (`Member`)."""

    peers: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(256)]


@message(32)
@dataclass(frozen=True, slots=True)
class Admitted:
    """The Setup is accepted; the receiver measures round trips to `probe_targets` (addresses as in `Member`)
    and answers with LinkLatencies."""

    probe_targets: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(256)]


@message(33)
@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Answer to Heartbeat."""

    term: UInt
    sequence: UInt


@message(34)
@dataclass(frozen=True, slots=True)
class Freeze:
    """Neither vote nor apply in this generation from now on, and answer with FreezeReport (commit rule 5).

    `removed`: members that left or were removed; they are disconnected now, before the next VIEW.
    """

    term: UInt
    generation: UInt
    reason: Reason
    removed: Annotated[tuple[PeerId, ...], AtMost(1024)] = ()


MAX_MEMBERS_PER_PAGE = 192
"""Such a page still fits a header if all names and addresses are the longest."""

MAX_MEMBER_PAGES = 256


@message(35)
@dataclass(frozen=True, slots=True)
class MemberListPage:
    """One page of the members of the next VIEW, in rank order; all pages precede the MembershipView."""

    term: UInt
    generation: UInt
    page: Count
    pages: Positive
    members: Annotated[tuple[Member, ...], AtMost(MAX_MEMBERS_PER_PAGE)]

    def find_problem(self) -> str | None:
        if self.page < self.pages <= MAX_MEMBER_PAGES:
            return None
        return f"page {self.page} of {self.pages}, must be below that, and that at most {MAX_MEMBER_PAGES}"


@message(36)
@dataclass(frozen=True, slots=True)
class MembershipView:
    """VIEW: the next generation, and the verdict on the step that was open (commit rules 6 and 7).

    Attributes:
        decided_round: the round that the verdict is about; None: no round was open.
        applied, history, ledger: those after the verdict, which every member must hold before READY.
        exchange: the coordinator's choice where the script leaves it to the coordinator, as
            `Exchange.describe` writes it; empty: none yet, and no round begins.
        stage_bounds: for a model in stages, (stages + 1,) first layer of each stage in this generation, and
            the number of layers.
    """

    term: UInt
    generation: UInt
    world_size: Positive
    verdict: Verdict
    decided_round: RoundId | None
    applied: AppliedStep
    history: Digest
    ledger: LedgerState
    reason: Reason
    exchange: Text = ""
    stage_bounds: StageBounds = ()


@message(78)
@dataclass(frozen=True, slots=True)
class StandbyNotice:
    """The receiver is admitted and on standby: this generation has no stage for it.

    `applied`, `history` and `ledger` are those of the VIEW: a former member executes the same verdict.
    """

    term: UInt
    generation: UInt
    applied: AppliedStep
    history: Digest
    ledger: LedgerState
    reason: Reason


@message(37)
@dataclass(frozen=True, slots=True)
class StartGeneration:
    """START: all members are READY (commit rule 8)."""

    term: UInt
    generation: UInt


@message(38)
@dataclass(frozen=True, slots=True)
class RunStateUpdate:
    """The run is `waiting`, `training`, `paused` or `finished`, and why."""

    state: RunStateWord
    reason: Reason


@message(40)
@dataclass(frozen=True, slots=True)
class Rejoin:
    """The receiver is not registered: it introduces itself again with Join."""

    reason: Reason


CoordinationMessage = (
    Hello
    | Enrol
    | Join
    | Setup
    | StageCheckpointList
    | LinkLatencies
    | LinkRates
    | WorkerInfo
    | Heartbeat
    | FreezeReport
    | CurrentGeneration
    | Ready
    | RoundStalled
    | ViolationReport
    | ConnectionLost
    | PeersUnreachable
    | ReplicaDigest
    | Leave
    | TemporaryLeave
    | RunFinished
    | Welcome
    | Refused
    | Enrolled
    | Reachability
    | ReplicaDiverged
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
)
