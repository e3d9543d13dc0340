"""Manages a member's attempts at each step: retries after an abort, and messages of other rounds.

    submit --> TwoPhaseCommit + collectives --Data, Vote, Decision--> COMMIT: `StepCommitted`, the next step
                     ^                                                ABORT: the next attempt, same gradient
                     +-- early messages, deferred --+                 ABORT twice: the root requests a Freeze

The first buckets can be exchanged while the trainer is still computing the last ones (`begin`).  No attempt
is open at that time, so votes, decisions and failures wait until the trainer has submitted the rest.

In a pipeline, the members wait for each other's activations long before there is a gradient.  The attempt
therefore opens before the first activation is sent (`submit(has_more=True)`), so that all members stop
waiting if one of them is lost or votes NO.  The trainer is notified of each complete collective
(`CollectiveCompleted`), and adds more collectives (`add_collectives`) until it has added the last one.

A message that a correct member could have sent is processed, deferred or dropped; any other message raises
`RemoteProtocolError`.  Section 6 of PROTOCOL.md defines the rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import (
    Collective,
    CollectiveComplete,
    CollectiveEffect,
    SendTo,
)
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.commit.two_phase_commit import (
    ROOT,
    CommitEffect,
    Decided,
    TwoPhaseCommit,
    check_decision,
    check_vote,
)
from gridtrain.core.group.member_events import (
    AddCollectives,
    ApplyToBuffer,
    CollectiveCompleted,
    ComputeDigest,
    LogEvent,
    MemberEffect,
    ResolveRound,
    Send,
    SendPayload,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.round_flags import SKIP, absent_flag, is_absent
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

ABORTS_BEFORE_FREEZE = 2

MAX_EARLY_MESSAGES = 8192
"""Maximum number of early messages from one peer that are deferred."""

MAX_EARLY_BYTES = (32 + 64 + 1) << 20
"""Largest total size of the early messages from one peer that are deferred.

The size covers a flow control window (32 MiB), one message beyond the window (64 MiB), and small messages.
"""

MAX_STALE_MESSAGES = 20_000
"""Maximum number of messages for past rounds that a correct peer can send between two commits.

Reading a message only to drop it costs as much as reading any other message.
"""

MAX_STEPS_AHEAD = 1
"""Maximum number of steps by which a member can be ahead of another member.

Step s + 1 begins only after step s is committed, which requires the votes of all members.
"""


AttemptMessage = m.Data | m.Vote | m.Decision
PreparedVote = tuple[m.RoundId | None, bytes, int]
"""The prepared round, the digest of its update, and its flags."""

NO_VOTE: PreparedVote = (None, b"", 0)


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The open step is committed; the caller updates the history and the ledger."""

    round: m.RoundId
    digest: bytes
    flags: int
    reason: str


@dataclass(frozen=True, slots=True)
class EarlyViolation:
    """A deferred message from `peer` violates the protocol.  Handle this effect like `ProtocolViolation`."""

    peer: m.PeerId
    reason: str


AttemptEffect = MemberEffect | StepCommitted | EarlyViolation


@dataclass(slots=True)
class _EarlyMessages:
    """Messages that one peer sent too early, in order, each with its size in bytes."""

    messages: list[tuple[AttemptMessage, int]] = field(default_factory=list)
    nbytes: int = 0


class Attempts:
    """The attempts of one member in one generation.

    Args:
        step: the generation's first step.
        may_be_absent: whether members may be absent from a step in this generation.

    Attributes:
        rank: rank of this member.
        open_attempt: the attempt in progress; None between two attempts.
        flags: the combined flags of the round's complete collectives (`core.group.round_flags`).
        is_absent: whether this member's contribution to the open attempt is empty.
        compute_s: the trainer's delay, which the vote contains (see `m.Vote`); None in a retry, or if the
            trainer is absent or the delay is unknown.
        abort_reason, suspects, silent_s: details of the latest abort; see `two_phase_commit.Decided`.
    """

    def __init__(self, assignment: RankAssignment, step: int, *, may_be_absent: bool = False) -> None:
        self.rank = assignment.rank
        self.open_attempt: TwoPhaseCommit | None = None
        self.flags = 0
        self.is_absent = False
        self.compute_s: float | None = None
        self.abort_reason = ""
        self.suspects: tuple[m.PeerId, ...] = ()
        self.silent_s = 0.0
        self.rank_assignment = assignment
        self._possible_flags = absent_flag(assignment.world_size) - 1 if may_be_absent else SKIP
        self._step = step
        self._attempt = 0
        self._aborts = 0
        self._has_more = False  # the open round will have more collectives
        self._collectives: dict[m.Channel, Collective] = {}
        self._aborted_collectives: dict[m.Channel, Collective] = {}  # of the latest aborted attempt
        self._early: dict[m.PeerId, _EarlyMessages] = {}
        self._last_committed: m.RoundId | None = None
        self._progress_of: dict[m.PeerId, int] = {}
        self._loss_reason = ""  # why messages for the next round may have been lost
        self._stale_messages: Counter[m.PeerId] = Counter()

    @property
    def next_round(self) -> m.RoundId:
        at = self.rank_assignment
        return m.RoundId(at.term, at.generation, self._step, self._attempt)

    @property
    def is_stuck(self) -> bool:
        """Whether so many consecutive attempts were aborted that only a new generation can continue."""
        return self._aborts >= ABORTS_BEFORE_FREEZE

    @property
    def deadline_s(self) -> float:
        return self.open_attempt.deadline_s if self.open_attempt is not None else math.inf

    @property
    def prepared_attempt(self) -> TwoPhaseCommit | None:
        """The undecided attempt for which this member voted YES, or None."""
        return self.open_attempt if self.open_attempt is not None and self.open_attempt.is_prepared else None

    @property
    def prepared_vote(self) -> PreparedVote:
        """The round, digest and flags of the prepared attempt; `NO_VOTE` if no attempt is prepared."""
        prepared = self.prepared_attempt
        return (prepared.round_id, prepared.digest, self.flags) if prepared is not None else NO_VOTE

    def early_bytes(self, peer: m.PeerId) -> int:
        """Return the size in bytes of the peer's deferred messages, which are not acknowledged yet."""
        return self._early[peer].nbytes if peer in self._early else 0

    # -- events ----------------------------------------------------------------------------------

    def begin(self, collectives: Mapping[m.Channel, Collective], now_s: float) -> list[AttemptEffect]:
        """Start the collectives of some buckets before the attempt opens; `submit` adds the rest.

        Raises:
            LocalProtocolError: an attempt is already open.
        """
        if self.open_attempt is not None:
            raise LocalProtocolError(
                f"a part of round {self.next_round} was begun while {self.open_attempt.round_id} was open"
            )
        return self._add(collectives) + self._replay_all(now_s)

    def submit(
        self,
        round_id: m.RoundId,
        collectives: Mapping[m.Channel, Collective],
        timeout_s: float,
        now_s: float,
        *,
        has_more: bool = False,
        is_absent: bool = False,
    ) -> list[AttemptEffect]:
        """Open the attempt, and start the collectives that `begin` has not started.

        If messages for this round may have been lost, or a ring cannot be resumed, this member votes NO
        instead of starting the collectives.

        Args:
            has_more: whether `add_collectives` adds more collectives later.
            is_absent: whether the contribution is empty, because the trainer has stalled.

        Raises:
            LocalProtocolError: an attempt is already open.
        """
        if self.open_attempt is not None:
            raise LocalProtocolError(
                f"round {round_id} was submitted while {self.open_attempt.round_id} was open"
            )
        world_size = self.rank_assignment.world_size
        self.open_attempt = TwoPhaseCommit(round_id, self.rank, world_size, timeout_s, now_s)
        self._has_more, self.is_absent = has_more, is_absent
        before, self._aborted_collectives = self._aborted_collectives, {}
        loss_reason, self._loss_reason = self._loss_reason, ""
        failure = loss_reason and f"{loss_reason}, before the round began"
        if not _can_resume({**self._collectives, **collectives}, before):
            failure = "the messages of the ring's aborted attempt have been discarded"
        if failure:
            self._collectives |= collectives
            effects = self.fail(failure, now_s)
        else:
            effects = [*self._add(collectives), *self._check_complete()]
        return effects + self._replay_all(now_s)

    def add_collectives(self, event: AddCollectives, now_s: float) -> list[AttemptEffect]:
        """Start the additional collectives of the event or, if the event reports a failure, vote NO.

        The event is ignored if its round is not open or this member has already voted.

        Raises:
            LocalProtocolError: the round was opened, or last extended, without `has_more`.
        """
        attempt = self.open_attempt
        if attempt is None or attempt.round_id != event.round or attempt.vote is not None:
            return []
        if event.failure:
            return self.fail(event.failure, now_s)
        if not self._has_more:
            raise LocalProtocolError(f"round {event.round} was extended after its last collective")
        self._has_more = event.has_more
        return [*self._add(event.collectives), *self._check_complete(), *self._replay_all(now_s)]

    def deliver_data(self, rank: int, data: m.Data) -> list[MemberEffect] | None:
        """Process a payload for a collective of the open attempt.

        Return None without processing the payload if it belongs to no such collective, or if this member has
        already voted; the caller then passes the payload to `receive`.

        Raises:
            RemoteProtocolError: a correct member would not have sent the payload.
        """
        attempt, collective = self.open_attempt, self._collectives.get(data.channel)
        if attempt is None or attempt.vote is not None or collective is None:
            return None
        if data.round != attempt.round_id:
            return None
        return self._advance_collective(collective, rank, data)

    def receive(
        self, peer: m.PeerId, message: AttemptMessage, nbytes: int, now_s: float
    ) -> list[AttemptEffect]:
        """Process a message according to its round (commit rule 1).

        A message of the open round is processed.  A message of a later round, or for a later collective of
        the open round, is deferred.  A message of a past round is dropped, except that the root may answer a
        vote.

        Args:
            peer: a member of this generation.
            nbytes: size of all frames of the message; it counts towards the peer's limit while the message is
                deferred.

        Raises:
            RemoteProtocolError: a correct member would not have sent the message, or a limit is exceeded.
        """
        here, there, rank = self._current_round, message.round, self._rank(peer)
        if _is_foreign(there, here):
            self._count_stale(peer, rank)
            return []
        _check_role(message, rank, self.rank)
        _check_not_ahead(there, here, rank)
        if there < here:
            self._count_stale(peer, rank)
            return self._handle_late(peer, message)
        is_begun = isinstance(message, m.Data) and message.channel in self._collectives
        is_awaited = isinstance(message, m.Data) and self._awaits(message.channel)
        if there == here and (self.open_attempt is not None or is_begun) and not is_awaited:
            return self._deliver(rank, message, now_s)
        self._store_early(peer, message, nbytes)
        prepared = self.prepared_attempt
        if there.step == here.step + 1 and prepared is not None and _proves_commit(rank):
            reason = "a message of the next step proves the commit"
            decision = m.Decision(prepared.round_id, m.Verdict.COMMIT, reason)
            return self._process_commit_effects(prepared, prepared.accept_decision(ROOT, decision))
        return []

    def drop_early(self, peer: m.PeerId) -> None:
        """Drop the deferred messages of a peer that has violated the protocol."""
        self._early.pop(peer, None)

    def prepare(self, digest: bytes, now_s: float) -> list[AttemptEffect]:
        """Vote YES on the open attempt, or NO if the flags contradict `is_absent`.

        Nothing happens if no attempt is open, or if this member has already voted.
        """
        attempt = self.open_attempt
        if attempt is None or attempt.vote is not None:
            return []  # a vote already cast was NO, because an effect before ComputeDigest had failed
        if is_absent(self.flags, self.rank) != self.is_absent:
            state = "present" if self.is_absent else "absent"
            return self.fail(f"the round's flags say that this member is {state}", now_s)
        return self._process_commit_effects(attempt, attempt.prepare(digest, now_s))

    def fail(self, reason: str, now_s: float) -> list[AttemptEffect]:
        """Vote NO on the open attempt, unless this member has already voted.

        If no attempt is open but `begin` has started collectives, the next attempt fails.
        """
        if self.open_attempt is None:
            if self._collectives:
                self._loss_reason = reason
            return []
        return self._process_commit_effects(self.open_attempt, self.open_attempt.fail(reason, now_s))

    def tick(self, now_s: float) -> list[AttemptEffect]:
        """Abort the open attempt if this member is the root and a timeout has passed."""
        attempt = self.open_attempt
        return self._process_commit_effects(attempt, attempt.tick(now_s)) if attempt is not None else []

    def extend_timeouts(self, until_s: float) -> None:
        """After a stall of this worker's loop, postpone the deadlines to `until_s` or later."""
        if self.open_attempt is not None:
            self.open_attempt.extend_timeouts(until_s)

    def peer_connected(self, peer: m.PeerId) -> list[AttemptEffect]:
        """If the root has reconnected, repeat the vote, because it or the answer to it may have been lost."""
        attempt = self.open_attempt
        if attempt is None or attempt.vote is None or self.rank_assignment.rank_of(peer) != ROOT:
            return []
        return [Send(peer, m.Vote(attempt.round_id, attempt.vote, attempt.digest, "repeated", None))]

    def peer_disconnected(self, reason: str, now_s: float) -> list[AttemptEffect]:
        """Vote NO on the open round, because some of its payloads may have been lost.

        If no round is open, or this member has already voted, it votes NO on the next round instead.
        """
        self._loss_reason = reason if self.open_attempt is None or self.open_attempt.vote is not None else ""
        return self.fail(reason, now_s)

    def record_progress(self, peer: m.PeerId, message: m.RoundProgress, now_s: float) -> None:
        """Record that a member is alive, and whether it has made progress since its previous message.

        Raises:
            RemoteProtocolError: no member can have reached the step that the message names.
        """
        here, there, rank = self._current_round, message.round, self._rank(peer)
        if _is_foreign(there, here):
            return
        # After the last abort, the message names the next attempt, which is never begun.
        _check_not_ahead(replace(there, attempt=0), here, rank)
        before = self._progress_of.get(peer, 0)
        self._progress_of[peer] = max(before, message.progress)
        if self.open_attempt is not None and there.step == here.step:
            self.open_attempt.record_progress(rank, message.progress > before, now_s)

    # -- internal ----------------------------------------------------------------------------------

    @property
    def _current_round(self) -> m.RoundId:
        return self.open_attempt.round_id if self.open_attempt is not None else self.next_round

    def _rank(self, peer: m.PeerId) -> int:
        rank = self.rank_assignment.rank_of(peer)
        assert rank is not None, f"{peer.hex()[:8]} is not a member"
        return rank

    def _peer(self, rank: int) -> m.PeerId:
        return self.rank_assignment.members[rank].peer

    def _awaits(self, channel: m.Channel) -> bool:
        """Return whether a collective that is added to the open round later could use this channel."""
        if self.open_attempt is None or self.open_attempt.vote is not None:
            return False
        return self._has_more and channel not in self._collectives

    def _store_early(self, peer: m.PeerId, message: AttemptMessage, nbytes: int) -> None:
        early = self._early.setdefault(peer, _EarlyMessages())
        count, total_bytes = len(early.messages) + 1, early.nbytes + nbytes
        if count > MAX_EARLY_MESSAGES or total_bytes > MAX_EARLY_BYTES:
            raise RemoteProtocolError(
                f"rank {self._rank(peer)} has sent {count} early messages, {total_bytes} bytes in all; at "
                f"most {MAX_EARLY_MESSAGES} messages and {MAX_EARLY_BYTES} bytes from one member are deferred"
            )
        early.messages.append((message, nbytes))
        early.nbytes = total_bytes

    def _add(self, collectives: Mapping[m.Channel, Collective]) -> list[AttemptEffect]:
        if not self._collectives:
            self.flags = 0
        self._collectives |= collectives
        return [
            effect
            for channel, collective in collectives.items()
            for effect in self._translate(channel, collective.start())
        ]

    def _replay_all(self, now_s: float) -> list[AttemptEffect]:
        held, self._early = self._early, {}
        return [effect for peer, early in held.items() for effect in self._replay(peer, early, now_s)]

    def _replay(self, peer: m.PeerId, early: _EarlyMessages, now_s: float) -> list[AttemptEffect]:
        """Process a peer's deferred messages; messages of later rounds remain deferred."""
        effects: list[AttemptEffect] = []
        for message, nbytes in early.messages:
            try:
                effects += self.receive(peer, message, nbytes, now_s)
            except RemoteProtocolError as error:
                self.drop_early(peer)
                text = f"rank {self._rank(peer)} violated the protocol: {error.reason}"
                effects += [EarlyViolation(peer, error.reason), *self.fail(text, now_s)]
                break
        return effects

    def _count_stale(self, peer: m.PeerId, rank: int) -> None:
        self._stale_messages[peer] += 1
        if self._stale_messages[peer] > MAX_STALE_MESSAGES:
            raise RemoteProtocolError(
                f"rank {rank} has sent {self._stale_messages[peer]} messages of past rounds; at most "
                f"{MAX_STALE_MESSAGES} could have been in flight",
            )

    def _handle_late(self, peer: m.PeerId, message: AttemptMessage) -> list[AttemptEffect]:
        """As the root, repeat the verdict in answer to a vote on a past round; drop any other message.

        The voter may have missed the verdict because its connection broke.  Verdicts are repeated for the
        current step's aborted attempts and for the last committed round.
        """
        there, here = message.round, self.next_round
        if not isinstance(message, m.Vote) or self.rank != ROOT:
            return []
        if (there.term, there.generation, there.step) == (here.term, here.generation, here.step):
            return [Send(peer, m.Decision(there, m.Verdict.ABORT, "repeated"))]
        if there == self._last_committed:
            return [Send(peer, m.Decision(there, m.Verdict.COMMIT, "repeated"))]
        return []

    def _deliver(self, rank: int, message: AttemptMessage, now_s: float) -> list[AttemptEffect]:
        attempt = self.open_attempt
        if isinstance(message, m.Data):
            if attempt is not None and attempt.vote is False:
                return []
            collective = self._collectives.get(message.channel)
            if collective is None:
                raise RemoteProtocolError(
                    f"rank {rank} sent data for {message.channel}, which is not a channel of round "
                    f"{self._current_round}",
                )
            return list(self._advance_collective(collective, rank, message))
        assert attempt is not None, "only payloads are delivered before the attempt opens"
        if isinstance(message, m.Vote):
            return self._process_commit_effects(attempt, attempt.count_vote(rank, message, now_s))
        return self._process_commit_effects(attempt, attempt.accept_decision(rank, message))

    def _advance_collective(self, collective: Collective, rank: int, data: m.Data) -> list[MemberEffect]:
        if data.flags & ~self._possible_flags:
            raise RemoteProtocolError(
                f"rank {rank} sent data with the flags {data.flags:#x}; in this generation only the flags "
                f"{self._possible_flags:#x} can be set",
            )
        effects = collective.handle(rank, data.slot, data.flags, data.payload)
        translated = self._translate(data.channel, effects)
        return translated + self._check_complete() if collective.complete else translated

    def _translate(self, channel: m.Channel, effects: list[CollectiveEffect]) -> list[MemberEffect]:
        out: list[MemberEffect] = []
        for effect in effects:
            match effect:
                case SendTo(to_rank, slot, flags):
                    out.append(SendPayload(self._peer(to_rank), self._current_round, channel, slot, flags))
                case CollectiveComplete(flags):
                    self.flags |= flags
                    if self._has_more:
                        out.append(CollectiveCompleted(channel, flags))
                case _:
                    out.append(ApplyToBuffer(channel, effect, self._peer(effect.provenance.rank)))
        return out

    def _check_complete(self) -> list[MemberEffect]:
        if self.open_attempt is None or self.open_attempt.vote is not None or self._has_more:
            return []
        return [ComputeDigest(self.flags)] if all(c.complete for c in self._collectives.values()) else []

    def _process_commit_effects(
        self, attempt: TwoPhaseCommit, effects: list[CommitEffect]
    ) -> list[AttemptEffect]:
        out: list[AttemptEffect] = []
        for effect in effects:
            match effect:
                case m.Vote():
                    out.append(Send(self._peer(ROOT), replace(effect, compute_s=self.compute_s)))
                case m.Decision():
                    at = self.rank_assignment
                    out += [Send(x.peer, effect) for x in at.members if x.peer != at.own_id]
                case Decided(m.Verdict.COMMIT, reason):
                    out.append(self._commit(attempt, reason))
                case Decided():
                    out += self._abort(attempt, effect)
        return out

    def _commit(self, ended: TwoPhaseCommit, reason: str) -> StepCommitted:
        self.open_attempt, self._collectives = None, {}
        self._last_committed = ended.round_id
        self._stale_messages.clear()
        self._step, self._attempt, self._aborts = ended.round_id.step + 1, 0, 0
        return StepCommitted(ended.round_id, ended.digest, self.flags, reason)

    def _abort(self, ended: TwoPhaseCommit, decided: Decided) -> list[AttemptEffect]:
        self.open_attempt, self._aborted_collectives, self._collectives = None, self._collectives, {}
        self._attempt, self._aborts = self._attempt + 1, self._aborts + 1
        self.abort_reason, self.silent_s = decided.reason, decided.silent_s
        self.suspects = tuple(self._peer(rank) for rank in decided.suspects)
        step, attempt = ended.round_id.step + 1, ended.round_id.attempt + 1
        fields = {"step": step, "attempt": attempt, "reason": decided.reason}
        return [LogEvent("aborted", fields), ResolveRound(ended.round_id, False, 0, decided.reason)]


def _can_resume(now: Mapping[m.Channel, Collective], before: Mapping[m.Channel, Collective]) -> bool:
    """Return whether each ring in `now` resumes its channel's ring in `before`, or is new if there is none.

    Both arguments contain the collectives of one attempt, by channel.  A ring can be resumed only if all
    members resume it.
    """
    for channel, collective in now.items():
        earlier = before.get(channel)
        due = earlier.attempt + 1 if isinstance(earlier, RingAllReduce) else 0
        if isinstance(collective, RingAllReduce) and collective.attempt != due:
            return False
    return True


def _check_role(message: AttemptMessage, from_rank: int, rank: int) -> None:
    """Raise `RemoteProtocolError` if the sender must not send this message to this rank.

    Only the root receives votes, and only the root sends decisions.  The check takes place on arrival, before
    a message is deferred.
    """
    match message:
        case m.Vote():
            check_vote(from_rank, rank)
        case m.Decision():
            check_decision(from_rank, rank)


def _check_not_ahead(there: m.RoundId, here: m.RoundId, from_rank: int) -> None:
    """Raise `RemoteProtocolError` for a round that no member can have reached.

    Such a message would be deferred forever.
    """
    if there.step > here.step + MAX_STEPS_AHEAD or there.attempt >= ABORTS_BEFORE_FREEZE:
        raise RemoteProtocolError(
            f"rank {from_rank} is at step {there.step + 1}, attempt {there.attempt + 1}; no member can be "
            f"past step {here.step + 1 + MAX_STEPS_AHEAD} while this member is at step {here.step + 1}, nor "
            f"past attempt {ABORTS_BEFORE_FREEZE}",
        )


def _is_foreign(there: m.RoundId, here: m.RoundId) -> bool:
    return (there.term, there.generation) != (here.term, here.generation)


def _proves_commit(from_rank: int) -> bool:
    """Return whether a message for the next step from this rank proves this step's commit (commit rule 3).

    A member at the next step has received the verdict on this step.  Only the root is trusted, because a
    faulty member could otherwise make this member alone apply the update.
    """
    return from_rank == ROOT
