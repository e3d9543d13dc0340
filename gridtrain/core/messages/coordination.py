"""Messages between a worker and the coordinator: joining, heartbeats, generations, leaving."""

from __future__ import annotations

from dataclasses import dataclass, field

from gridtrain.core.messages.types import (
    CheckpointInfo,
    Facts,
    LedgerSpec,
    LedgerState,
    Member,
    PeerId,
    RoundId,
    Span,
    StagedModel,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every connection: the dialling peer's key, protocol version and software."""

    peer: PeerId
    version: int
    software: str


@dataclass(frozen=True, slots=True)
class Enrol:
    """Sent with an invitation's key: admit `peer`, the sender's own public key, from now on."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Join:
    """Request to take part in `run`.

    Attributes:
        address: where peers may reach this worker.
        can_relay: this worker is willing to forward what other members send one another.
        is_rejoin: this process has been welcomed before.  False after a restart, even with a known key.
        generation: the generation that this process is in; 0: none.
    """

    run: str
    name: str
    address: str
    can_relay: bool = True
    is_rejoin: bool = False
    generation: int = 0


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
    batch_size: int
    global_batch_size: int | None
    checkpoint: CheckpointInfo | None = None
    can_catch_up: bool = False
    stages: int = 1
    stage_checkpoints: tuple[CheckpointInfo, ...] = ()
    model: StagedModel | None = None
    memory_bytes: int = 0
    flops: float = 0.0
    initial_state_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class StageCheckpointList:
    """All stage checkpoints on this worker's disk; replaces `Setup.stage_checkpoints`.

    `generation`: of the last VIEW that the worker had received by then.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    generation: int = 0


@dataclass(frozen=True, slots=True)
class LinkLatencies:
    """Round-trip times in seconds from this worker to the peers that it was asked to probe."""

    rtt_s: tuple[tuple[PeerId, float], ...]


@dataclass(frozen=True, slots=True)
class LinkRates:
    """(peer, rate to it, rate from it) of bulk messages in bytes per second; 0: not measured.

    If the two ends of a link report different rates, the lower one is used.
    """

    rates_Bps: tuple[tuple[PeerId, float, float], ...]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """This worker's device and versions, for display only."""

    texts: tuple[tuple[str, str], ...]


STATE_LEFT = "state_left_bytes"
"""Heartbeat metric: bytes of its state that a worker has not received yet."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent twice a second, with what `gridtrain status` shows.

    `progress` grows whenever the trainer or an exchange makes progress, so that a hung trainer is detected.
    `metrics` are numbers for people: loss, bytes, seconds of compute, ...
    """

    sequence: int
    step: int
    progress: int
    metrics: tuple[tuple[str, float], ...]


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

    term: int
    generation: int
    is_synced: bool
    applied: int
    history: bytes
    ledger: LedgerState
    prepared: RoundId | None
    digest: bytes
    skip: bool
    layers: Span = field(default=Span(0, 1))


@dataclass(frozen=True, slots=True)
class CurrentGeneration:
    """Follows every Welcome: the worker's generation, its members and shares in rank order, its partition.

    A coordinator that was restored from a backup may not know that generation (commit rule 11).
    """

    term: int
    generation: int
    members: tuple[tuple[PeerId, int], ...]
    stage_bounds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The sender has executed the VIEW's verdict, holds the state, and is connected (commit rule 8)."""

    term: int
    generation: int
    history: bytes


@dataclass(frozen=True, slots=True)
class RoundStalled:
    """A round does not end: the suspects are silent, not connected, or disagree.

    `silent_s`: how long the suspects showed no progress; 0: they are suspected of something else.
    """

    round: RoundId
    suspects: tuple[PeerId, ...]
    silent_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class ViolationReport:
    """`peer` violated the protocol, and the sender has disconnected it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The sender's connection to this member of the running generation broke."""

    term: int
    generation: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeersUnreachable:
    """These members of the generation cannot be reached at the addresses in the member list."""

    term: int
    generation: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDigest:
    """Digest of this member's parameters, optimizer and settings after step `step`."""

    term: int
    generation: int
    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker leaves the run."""

    reason: str


@dataclass(frozen=True, slots=True)
class TemporaryLeave:
    """As Leave; the owner wants the machine for something else, and the worker will rejoin."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The ledger ended the run on this worker."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Join; `term` fences older coordinators (commit rule 11)."""

    term: int
    run: str
    software: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to Join or Setup, or a dismissal; `code` is stable, the rest is for people."""

    code: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Answer to Enrol: the key may now connect, and join `run`."""

    run: str


@dataclass(frozen=True, slots=True)
class Reachability:
    """Result of the coordinator's call back: `address` reaches this worker; empty: no address does."""

    address: str


@dataclass(frozen=True, slots=True)
class ReplicaDiverged:
    """This member's replica digest after `step` differs from the majority's: its state will be replaced."""

    term: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class ExpectProbes:
    """Workers that will measure their links to the receiver; it dials those with an address (`Member`)."""

    peers: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The Setup is accepted; the receiver measures round trips to `probe_targets` (addresses as in `Member`)
    and answers with LinkLatencies."""

    probe_targets: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Answer to Heartbeat."""

    term: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """Neither vote nor apply in this generation from now on, and answer with FreezeReport (commit rule 5).

    `removed`: members that left or were removed; they are disconnected now, before the next VIEW.
    """

    term: int
    generation: int
    reason: str
    removed: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberListPage:
    """One page of the members of the next VIEW, in rank order; all pages precede the MembershipView."""

    term: int
    generation: int
    page: int
    pages: int
    members: tuple[Member, ...]


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

    term: int
    generation: int
    world_size: int
    verdict: Verdict
    decided_round: RoundId | None
    applied: int
    history: bytes
    ledger: LedgerState
    reason: str
    exchange: str = ""
    stage_bounds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StandbyNotice:
    """The receiver is admitted and on standby: this generation has no stage for it.

    `applied`, `history` and `ledger` are those of the VIEW: a former member executes the same verdict.
    """

    term: int
    generation: int
    applied: int
    history: bytes
    ledger: LedgerState
    reason: str


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """START: all members are READY (commit rule 8)."""

    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class RunStateUpdate:
    """The run is `waiting`, `training`, `paused` or `finished`, and why."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The receiver is not registered: it introduces itself again with Join."""

    reason: str


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
