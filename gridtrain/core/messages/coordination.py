"""Messages between a worker and the coordinator about who is in the group."""

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
    """First message on every connection: who dials, and which protocol is spoken."""

    peer: PeerId
    version: UInt
    software: Name


@message(5)
@dataclass(frozen=True, slots=True)
class Enrol:
    """Whoever holds an invitation asks that `peer`, its own public key, may come in from now on."""

    peer: PeerId


@message(10)
@dataclass(frozen=True, slots=True)
class Join:
    """I want to take part in `run`; peers may reach me at `address`.

    `relay`: I am willing to pass on what other members send one another.  `again`: this process has been
    welcomed before; `generation`: in which it is, 0: in none.  A process that was started anew with an old
    key knows nothing of what is known of that key.
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
    """What this worker will train.  `facts` must be equal on all workers of a run.

    `facts` are short texts for people and for comparison, such as
    ("model", "120576 parameters, digest 3fa9..."), ("exchange", "GTopK(density=0.05)").
    `held`: from a checkpoint; the run goes on from it if nobody holds a later state.  `follows`: it can take
    over a state while the others train on, and apply their updates after that.  `stages`: how many workers
    hold the model together, each a part (`protocol.seats`); 1: every worker holds all of it.  `kept`: of a
    model in stages, what this worker can load when it knows its stage, or give to others.  `model`: of such
    a model; None: its stages are its blocks.  `memory_bytes`: what training may fill here, `flops`: how
    fast it computes (only compared with the others'); 0: nobody says.  `begins`: digest of all that a
    joining member would be sent, as the script built it here; empty: it is not that any more, or nobody says.
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
    """The checkpoints of stages on this worker's disk, all of them: replaces what `Setup.kept` said.

    `generation`: of the last View that it had heard by then.
    """

    checkpoints: Annotated[tuple[CheckpointInfo, ...], AtMost(MAX_STAGE_CHECKPOINTS)]
    generation: UInt = 0


@message(12)
@dataclass(frozen=True, slots=True)
class LinkLatencies:
    """Round-trip times in seconds from this worker to the peers that it was told to probe."""

    rtt_s: Annotated[tuple[tuple[PeerId, Seconds], ...], AtMost(256)]


@message(26)
@dataclass(frozen=True, slots=True)
class LinkRates:
    """How fast bulk went from this worker to a peer, and from that peer to it, in bytes per second; 0: not
    measured.  Of a link's two ends the more modest one is believed (`protocol.topology`)."""

    rates_Bps: Annotated[tuple[tuple[PeerId, Rate, Rate], ...], AtMost(256)]


@message(80)
@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What this worker is, for people: its device, versions.  Nothing is decided by it."""

    texts: Annotated[tuple[tuple[Name, Text], ...], AtMost(16)]


STATE_LEFT = "state_left_bytes"
"""The metric of a heartbeat that says how many bytes of its state a worker still lacks."""


@message(13)
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life, twice a second, with what `gridtrain status` shows.

    `progress` grows whenever the trainer or an exchange moved; a hung trainer's does not.
    `figures` are numbers for people: loss, bytes, seconds computing, ...
    """

    sequence: UInt
    step: AppliedStep
    progress: UInt
    metrics: Annotated[tuple[tuple[Name, float], ...], AtMost(64)]


@message(14)
@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Answer to FREEZE: where I stand (commit rule 5).

    `applied` is the last step applied (-1: none), `history` the chained digest of all applied
    updates, `prepared`/`digest`/`skip` the round that this worker voted YES for, if any.
    A worker that has no state yet says `synced=False`.  `blocks`: of the model, that this state is of.
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
    """Follows every Welcome: the generation I am in, its members and shares in rank order, and its `cuts`.

    A coordinator that was started from a backup may not know it (commit rule 11).
    """

    term: UInt
    generation: UInt
    members: Annotated[tuple[tuple[PeerId, Count], ...], AtMost(1024)]
    stage_bounds: StageBounds = ()


@message(15)
@dataclass(frozen=True, slots=True)
class Ready:
    """I executed the VIEW's verdict, have the state and my edges (commit rule 8)."""

    term: UInt
    generation: UInt
    history: Digest


@message(16)
@dataclass(frozen=True, slots=True)
class RoundStalled:
    """A round does not come to an end; these peers are waited for, are not connected, or disagree.

    `patience_s`: for how long the suspects showed no sign of life; 0: that is not what they are suspected of.
    """

    round: RoundId
    suspects: Annotated[tuple[PeerId, ...], AtMost(1024)]
    silent_s: Seconds
    reason: Reason


@message(20)
@dataclass(frozen=True, slots=True)
class ViolationReport:
    """`peer` broke the protocol towards this worker, which has dropped it."""

    peer: PeerId
    reason: Reason


@message(22)
@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection to this member of the running generation broke, for a reason that is not mine."""

    term: UInt
    generation: UInt
    peer: PeerId


@message(21)
@dataclass(frozen=True, slots=True)
class PeersUnreachable:
    """These members of the generation cannot be reached at the addresses that the Roster gave."""

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
    """Departure, not silence."""

    reason: Reason


@message(83)
@dataclass(frozen=True, slots=True)
class TemporaryLeave:
    """As Leave; its owner wants the machine for something else, and the worker means to come back."""

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
    term: UInt
    run: Name
    software: Name


@message(31)
@dataclass(frozen=True, slots=True)
class Refused:
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
    """The coordinator called back: `address` reaches this worker; empty: nobody from outside can."""

    address: Address


@message(47)
@dataclass(frozen=True, slots=True)
class ReplicaDiverged:
    """This member's fingerprint of `step` is not that of most: it has to get the state anew."""

    term: UInt
    generation: UInt
    step: UInt


@message(44)
@dataclass(frozen=True, slots=True)
class ExpectProbes:
    """Workers that will measure their links to you.  Connect to those with an address (see `Member`)."""

    peers: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(256)]


@message(32)
@dataclass(frozen=True, slots=True)
class Admitted:
    """The set-up fits; measure the round trip to `probe` and answer with Links.  Addresses as in `Member`."""

    probe_targets: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(256)]


@message(33)
@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    term: UInt
    sequence: UInt


@message(34)
@dataclass(frozen=True, slots=True)
class Freeze:
    """From now on neither vote nor apply in this generation; report (commit rule 5).

    `without`: members that left or were put out; they are to be cut off now, not only by the next VIEW.
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
    """One page of the members of a coming VIEW, in rank order; pages precede the View."""

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
    """The next generation, and the verdict on the step that was open (commit rules 6 and 7).

    `decided` is the round the verdict is about (None: no round was open).  `applied`, `history`
    and `ledger` are those after the verdict: what every member must hold before READY.  `exchange`: where
    the run's script leaves it to the coordinator, what it has chosen, as `Exchange.describe` says it; empty:
    nothing yet, and no round begins.  `cuts`: of a model in stages, where they begin in this generation, and
    the number of its blocks.
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
    """You are admitted and in no seat of this generation: the model has stages for so many only.

    `applied`, `history` and `ledger` are the View's: who was a member before executes the same verdict.
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
    """You are no member (any more): introduce yourself again with Join."""

    reason: Reason
