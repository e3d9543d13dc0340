"""Messages between a worker and the coordinator for joining, heartbeats, generations and leaving."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from hashlib import blake2b
from typing import Annotated

from gridtrain.core.messages.declaration import (
    Address,
    AppliedStep,
    AtMost,
    Count,
    Digest,
    Flops,
    GenerationMessage,
    Message,
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
    MAX_GENERATION_MEMBERS,
    MAX_STAGE_CHECKPOINTS,
    CheckpointInfo,
    Facts,
    LedgerSpec,
    LedgerState,
    Member,
    RoundId,
    Span,
    Spans,
    StagedModel,
    Verdict,
)


@message(1)
class Hello(Message):
    """First message on every connection: the dialling peer's key, protocol version and software."""

    peer: PeerId
    version: UInt
    software: Name


@message(5)
class Enrol(Message):
    """Request, on a connection that uses an invitation's key, to admit the sender's own key, `peer`."""

    peer: PeerId


@message(10)
class Join(Message):
    """Request to take part in `run`.

    Attributes:
        address: the address at which peers can reach this worker.
        can_relay: whether this worker agrees to forward messages between other members.
        is_rejoin: whether this process has been welcomed before; False after a restart, even with a known
            key.
        generation: the generation to which this process belongs; 0 if it belongs to none.
    """

    run: Name
    name: Name
    address: Address
    can_relay: bool = True
    is_rejoin: bool = False
    generation: UInt = 0


@message(11)
class Setup(Message):
    """The model and the data with which this worker will train, and the worker's capabilities.

    Attributes:
        facts: short strings that must be equal on all workers of a run, such as
            ("model", "120576 parameters, digest 3fa9..."), ("exchange", "GTopK(density=0.05)").
        checkpoint: this worker's checkpoint; the run resumes from it if no worker holds a later state.
        can_catch_up: whether the worker can copy a state from members that continue to train, and then apply
            their updates.
        stages: number of stages of the model (`core.group.rank_layout`); 1 if every worker holds the whole
            model.
        stage_checkpoints: for a model in stages, the checkpoints on this worker's disk.
        model: for a model in stages, its partition; None if each stage is treated as one layer.
        memory_bytes: memory that training may use; 0 if unknown.
        flops: floating-point operations per second, used only to compare workers; 0 if unknown.
        initial_state_digest: digest of the state that the script built on this worker, as it would be sent to
            a joining member; empty if the state has changed since, or the digest is unknown.
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
class StageCheckpointList(Message):
    """All stage checkpoints on this worker's disk; replaces `Setup.stage_checkpoints`.

    `generation` is taken from the last MembershipView that the worker had received when it sent this list.
    """

    checkpoints: Annotated[tuple[CheckpointInfo, ...], AtMost(MAX_STAGE_CHECKPOINTS)]
    generation: UInt = 0


@message(12)
class LinkLatencies(Message):
    """Round-trip times in seconds between this worker and the peers that it was asked to probe."""

    rtt_s: Annotated[tuple[tuple[PeerId, Seconds], ...], AtMost(256)]


@message(26)
class LinkRates(Message):
    """Measured rates of bulk messages, as triples (peer, rate to the peer, rate from the peer).

    The rates are in bytes per second; 0 means that a rate was not measured.  If the two ends of a link report
    different rates, the coordinator uses the lower rate.
    """

    rates_Bps: Annotated[tuple[tuple[PeerId, Rate, Rate], ...], AtMost(256)]


@message(80)
class WorkerInfo(Message):
    """This worker's device and software versions, for display only."""

    texts: Annotated[tuple[tuple[Name, Text], ...], AtMost(16)]


STATE_LEFT = "state_left_bytes"
"""Heartbeat metric: number of bytes of the state that the worker has not received yet."""

KEPT_STEP = "kept_step"
"""Heartbeat metric: step of the checkpoint that the worker keeps when it leaves."""

STATE_BYTES = "state_bytes"
"""Heartbeat metric: number of bytes of state that the worker has received since it joined."""

OWN_SKIPPED_STEPS = "own_skipped_steps"
"""Heartbeat metric: number of steps that the group skipped because of this worker's gradient."""

SKIPPED_SAMPLES = "skipped_samples"
"""Heartbeat metric: number of samples in the run's skipped steps."""

COMMITTED_SAMPLES = "committed_samples"
"""Heartbeat metric: total number of samples in the run's committed steps."""

SKIPPED_IN_A_ROW = "skipped_in_a_row"
"""Heartbeat metric: number of consecutive steps, up to the latest, that this worker knows were skipped."""

MISSED_STEPS = "missed_steps"
"""Heartbeat metric: number of steps that the group committed while this worker's trainer was stalled."""

IS_WAITING = "is_waiting"
"""Heartbeat metric: 1 while the worker's trainer waits inside gridtrain, for example for other members."""

LONE_MEANS = "lone_means"
"""Heartbeat metric: number of steps in which this worker called `grid.mean` and other workers did not."""

FAILED_CHECKPOINTS = "failed_checkpoints"
"""Heartbeat metric: number of consecutive checkpoints, up to the latest, that this worker could not write."""

FAILED_UPLOADS = "failed_uploads"
"""Heartbeat metric: number of consecutive failed attempts, up to the latest, to upload a checkpoint."""

EXPORT_ATTEMPTS = "export_attempts"
"""Heartbeat metric: number of attempts by this worker to write the final model, including the one in
progress; 0 once the model is written."""


MAX_METRICS = 64


@message(13)
class Heartbeat(Message):
    """Report that a worker is alive, sent twice a second, with the values that `gridtrain status` displays.

    Attributes:
        step: the open step, or the next one if none is open.
        progress: a counter that increases whenever the trainer or an exchange makes progress, so that a hung
            trainer is detected.
        metrics: values for display, such as the loss, or the seconds spent computing.
    """

    sequence: UInt
    step: AppliedStep
    progress: UInt
    metrics: Annotated[tuple[tuple[Name, float], ...], AtMost(MAX_METRICS)]


@message(14)
class FreezeReport(GenerationMessage):
    """Answer to Freeze: the worker's state (commit rule 5).

    Attributes:
        is_synced: whether the worker holds a state, which the following fields describe.
        applied: the last step applied; -1 if there is none.
        history: chained digest of all applied updates.
        prepared, digest, flags: the undecided round for which this worker voted YES, with the digest of its
            update and its flags; None, empty and 0 if there is no such round.
        layers: layers of the model that the state covers.
    """

    is_synced: bool
    applied: AppliedStep
    history: Digest
    ledger: LedgerState
    prepared: RoundId | None
    digest: Digest
    flags: UInt
    layers: Span = field(default=Span(0, 1))


@message(23)
class CurrentGeneration(GenerationMessage):
    """The worker's generation: its members with their shares, in rank order, and the partition of its model.

    A member sends it after each Welcome, because a coordinator that was restored from a backup may not know
    the generation (commit rule 11).  If the term of the Welcome is outdated, other workers also send it, with
    the generation 0.
    """

    members: Annotated[tuple[tuple[PeerId, Count], ...], AtMost(MAX_GENERATION_MEMBERS)]
    stage_bounds: StageBounds = ()


@message(15)
class Ready(GenerationMessage):
    """Report that the sender has executed the verdict, is synced, and is connected (commit rule 8)."""

    history: Digest


@message(16)
class RoundStalled(Message):
    """Report that a round cannot end, because the suspects are silent, are not connected, or disagree.

    Attributes:
        silent_s: the time for which the suspects have been silent; 0 if they are suspected for another
            reason.
    """

    round: RoundId
    suspects: Annotated[tuple[PeerId, ...], AtMost(MAX_GENERATION_MEMBERS)]
    silent_s: Seconds
    reason: Reason


@message(20)
class ViolationReport(Message):
    """Report that `peer` violated the protocol and that the sender has disconnected it."""

    peer: PeerId
    reason: Reason


@message(22)
class ConnectionLost(GenerationMessage):
    """Report, in any phase, that the sender's connection to this member of its generation broke."""

    peer: PeerId


@message(21)
class PeersUnreachable(GenerationMessage):
    """Report that the sender cannot reach these peers at the addresses that the coordinator sent."""

    peers: Annotated[tuple[PeerId, ...], AtMost(MAX_GENERATION_MEMBERS)]


@message(24)
class ReplicaDigest(GenerationMessage):
    """Digest of this member's parameters, optimizer state and settings after step `step`."""

    step: UInt
    digest: Digest


MODEL_NOT_WRITTEN = "could not write the final model"
"""The beginning of `Leave.reason` if this worker should have written the final model of a finished run, or a
part of it, but could not."""


@message(17)
class Leave(Message):
    """Report that the worker is leaving the run."""

    reason: Reason


NOTHING_LEARNED = "nothing is being learned"
"""The beginning of the reason in `RunStateUpdate` if all recent steps were skipped; see decision 0088."""


ON_REQUEST = "on request"
"""The beginning of the reason for a pause that the worker's owner, and not a rule, has ordered."""


def ends_with_resume(reason: str) -> bool:
    """Return whether this reason means that only the worker's owner has ordered the pause, so that
    `gridtrain worker resume` ends it."""
    return reason == ON_REQUEST or reason.startswith(f"{ON_REQUEST}, until ")


@message(83)
class TemporaryLeave(Message):
    """Report that the worker is leaving the run until its owner's rules allow it to rejoin."""

    reason: Reason


@message(18)
class RunFinished(Message):
    """Report that the sender has reached the end of the run, which may have been ended early."""

    applied: AppliedStep
    history: Digest


@message(30)
class Welcome(Message):
    """Answer to Join; the worker ignores a coordinator whose `term` is outdated (commit rule 11)."""

    term: UInt
    run: Name
    software: Name


@message(31)
class Refused(Message):
    """Tells the receiver that its Join or Setup is refused, or that it is dismissed.

    Only `code` is stable; the other fields are for display.
    """

    code: Name
    reason: Reason
    remedy: Reason


@message(41)
class Enrolled(Message):
    """Answer to Enrol: the key may now connect and join `run`."""

    run: Name


@message(43)
class Reachability(Message):
    """Result of the coordinator's attempt to dial this worker; `address` is empty if the attempt failed."""

    address: Address


@message(47)
class ReplicaDiverged(GenerationMessage):
    """Tells the receiver that its replica digest after `step` differs from the majority's.

    The next generation replaces the receiver's state.
    """

    step: UInt


@message(44)
class ExpectProbes(Message):
    """Announcement of workers that will measure their links to the receiver.

    The receiver dials the workers that have an address (see `Member.address`).
    """

    peers: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(256)]


MEMBER_PROBE_S = 10.0
"""Time limit of a member's measurement in seconds, instead of `Deadlines.probe_s`, because the member's other
messages delay it."""


@message(32)
class Admitted(Message):
    """Answer to an accepted Setup: the receiver measures its round-trip times to `probe_targets`.

    The receiver reports the times with LinkLatencies.  The addresses have the form of `Member.address`.
    Members receive it, too, when they are to measure their links again.
    """

    probe_targets: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(256)]


@message(33)
class HeartbeatReply(Message):
    """Answer to Heartbeat."""

    term: UInt
    sequence: UInt


@message(34)
class Freeze(GenerationMessage):
    """Order to stop voting and applying updates in this generation (commit rule 5).

    The receiver answers with FreezeReport.  It immediately disconnects the members in `removed`, which have
    left or were removed, without waiting for the next MembershipView.
    """

    reason: Reason
    removed: Annotated[tuple[PeerId, ...], AtMost(MAX_GENERATION_MEMBERS)] = ()


MAX_MEMBERS_PER_PAGE = 384
"""Number of members that fit into a message's header even if names and addresses have their full length."""

MAX_MEMBER_PAGES = 256


@message(35)
class MemberListPage(GenerationMessage):
    """One page of the next generation's members in rank order; all pages precede its MembershipView.

    The coordinator can send MemberListChanges instead to a receiver that has the list of its own generation.
    """

    page: Count
    pages: Positive
    members: Annotated[tuple[Member, ...], AtMost(MAX_MEMBERS_PER_PAGE)]

    def find_problem(self) -> str | None:
        if self.page < self.pages <= MAX_MEMBER_PAGES:
            return None
        return (
            f"page {self.page} of {self.pages}; pages are numbered from 0, and there may be at most "
            f"{MAX_MEMBER_PAGES}"
        )


def member_list_digest(members: Iterable[Member]) -> bytes:
    """Return the 32 bytes with which a member verifies a list that it has built from `MemberListChanges`.

    They are the BLAKE2b hash of one line per member, with the fields in order, separated by tabs.
    """
    text = "".join(map(_member_line, members))
    return blake2b(text.encode(), digest_size=32).digest()


def _member_line(x: Member) -> str:
    pieces = ",".join(f"{layers.start}-{layers.stop}@{rank}" for layers, rank in x.pieces)
    piece_digests = ",".join(digest.hex() for digest in x.piece_digests)
    return (
        f"{x.peer.hex()}\t{x.name}\t{x.address}\t{x.share}\t{int(x.joining)}\t{x.donor}\t{pieces}\t"
        f"{x.digest.hex()}\t{piece_digests}\t{x.entries_share}\n"
    )


@message(81)
class MemberListChanges(GenerationMessage):
    """The next generation's members, as changes to the receiver's list; sent instead of all MemberListPages.

    Attributes:
        base: the receiver's generation, whose list is changed.
        order: the new list, as spans of indices into the concatenation of the list of `base` and `members`.
        members: the entries that are not in the list of `base`.
        digest: `member_list_digest` of the new list.
    """

    base: UInt
    order: Spans
    members: Annotated[tuple[Member, ...], AtMost(MAX_MEMBERS_PER_PAGE)]
    digest: Digest

    def find_problem(self) -> str | None:
        count = sum(span.stop - span.start for span in self.order)
        if count <= MAX_GENERATION_MEMBERS:
            return None
        return f"{count} members; there may be at most {MAX_GENERATION_MEMBERS}"

    def apply(self, base: Sequence[Member]) -> tuple[Member, ...] | None:
        """Return the new list, or None if `base` is not the list to which the changes apply."""
        entries = (*base, *self.members)
        members = tuple(entry for span in self.order for entry in entries[span.start : span.stop])
        return members if member_list_digest(members) == self.digest else None


@message(36)
class MembershipView(GenerationMessage):
    """The next generation, and the verdict on the step that was open (commit rules 6 and 7).

    Attributes:
        decided_round: the round that the verdict commits; if the verdict is ABORT, the round in which step
            `applied` was committed (only its generation matters), or None if that is not known.
        applied, history, ledger: the state after the verdict; each member must hold it to send Ready.
        exchange: the exchange, or the direct topology, that the coordinator has chosen, in the form that
            `describe()` writes; otherwise empty.  If the script leaves the exchange to the coordinator, no
            round can begin while this field is empty.
        stage_bounds: for a model in stages, stages + 1 numbers: the first layer of each stage in this
            generation, then the number of layers.
    """

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
class StandbyNotice(GenerationMessage):
    """Tells the receiver that it is admitted, but on standby, because this generation has no rank for it.

    The other fields are as in the MembershipView, so that a former member executes the same verdict.
    """

    decided_round: RoundId | None
    applied: AppliedStep
    history: Digest
    ledger: LedgerState
    reason: Reason


@message(37)
class StartGeneration(GenerationMessage):
    """Order to begin training, sent when all members are ready (commit rule 8)."""


@message(38)
class RunStateUpdate(Message):
    """State of the run (`waiting`, `training`, `paused` or `finished`), and the reason for it."""

    state: RunStateWord
    reason: Reason


@message(40)
class Rejoin(Message):
    """Order to send Join again, because the receiver is not registered."""

    reason: Reason
