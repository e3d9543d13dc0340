"""The attempts at the open step of a generation: a `TwoPhaseCommit` and its collectives for each attempt.

    submit --> TwoPhaseCommit + collectives --Data, Vote, Decision--> COMMIT: `StepCommitted`, the next step
                     ^                                                ABORT: the next attempt, same gradient
                     +---- early messages, held ----+                 two in a row: the root requests a FREEZE

While the trainer still computes its last buckets, the first ones may be exchanged already (`begin`).  No
attempt is open then: votes, decisions and failures wait, as they do for a trainer that has not submitted at
all.

A pipeline's attempt is open from its first activation on (`submit(has_more=True)`), as its members wait for
each other long before there is a gradient: a member that is lost, or votes NO, ends the wait of all.  Its
trainer is notified of each complete collective (`CollectiveCompleted`) and adds further ones
(`add_collectives`) up to the last one.

A message that an honest member may have sent is processed, held or dropped; any other raises
`RemoteProtocolError`.  PROTOCOL.md section 6 has the rules.
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
    PayloadReceived,
    SendTo,
)
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.commit.two_phase_commit import (
    ROOT,
    AnnounceDecision,
    CastVote,
    CommitEffect,
    CommitEvent,
    Decided,
    DecisionReceived,
    Failed,
    LaterStepSeen,
    Prepared,
    ProgressReceived,
    TwoPhaseCommit,
    VoteReceived,
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
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

ABORTS_BEFORE_FREEZE = 2

MAX_EARLY_MESSAGES = 8192
"""Largest number of early messages held for one peer."""

MAX_EARLY_BYTES = (32 + 64 + 1) << 20
"""Largest size of their frames: the flow control window, one largest message beyond it, and small
messages."""

MAX_STALE_MESSAGES = 20_000
"""Largest number of messages of past rounds from one peer between two commits: an honest one has no more in
flight."""

MAX_STEPS_AHEAD = 1
"""Step s + 1 begins when s is committed, which takes all votes, so no member is further ahead than this."""

_REMEDY = "drop that peer; an honest one of the same version never sends this"

AttemptMessage = m.Data | m.Vote | m.Decision


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The open step is committed: the caller applies it to history and ledger."""

    round: m.RoundId
    digest: bytes
    skip: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EarlyViolation:
    """A message held for the round violates the protocol, as is known now: treat it as
    `ProtocolViolation`."""

    peer: m.PeerId
    reason: str


AttemptEffect = MemberEffect | StepCommitted | EarlyViolation


@dataclass(slots=True)
class _EarlyMessages:
    """Messages that one peer sent early, in order, each with its size in bytes."""

    messages: list[tuple[AttemptMessage, int]] = field(default_factory=list)
    nbytes: int = 0


class Attempts:
    """The attempts of one member in one generation.

    Args:
        step: the generation's first.

    Attributes:
        rank: of this member.
        open_attempt: None between two attempts.
        skip: a contribution to the round is not finite, so that its update will be empty.
        abort_reason, suspects, silent_s: of the latest abort, see `two_phase_commit.Decided`.
    """

    def __init__(self, assignment: RankAssignment, step: int) -> None:
        self.rank = assignment.rank
        self.open_attempt: TwoPhaseCommit | None = None
        self.skip = False
        self.abort_reason = ""
        self.suspects: tuple[m.PeerId, ...] = ()
        self.silent_s = 0.0
        self.rank_assignment = assignment
        self._step = step
        self._attempt = 0
        self._aborts = 0
        self._has_more = False  # the open round will have further collectives
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
        """Too many attempts in a row were aborted: only another generation helps."""
        return self._aborts >= ABORTS_BEFORE_FREEZE

    @property
    def deadline_s(self) -> float:
        return self.open_attempt.deadline_s if self.open_attempt is not None else math.inf

    @property
    def prepared_attempt(self) -> TwoPhaseCommit | None:
        """The attempt that this member voted YES for and that is not decided."""
        return self.open_attempt if self.open_attempt is not None and self.open_attempt.is_prepared else None

    @property
    def prepared_vote(self) -> tuple[m.RoundId, bytes, bool] | None:
        """The round of the prepared attempt, its digest, and whether it is skipped."""
        prepared = self.prepared_attempt
        return (prepared.round_id, prepared.digest, self.skip) if prepared is not None else None

    def early_bytes(self, peer: m.PeerId) -> int:
        """Bytes of this peer's early messages that are held: flow control has not acknowledged them."""
        return self._early[peer].nbytes if peer in self._early else 0

    # -- events ----------------------------------------------------------------------------------

    def begin(self, collectives: Mapping[m.Channel, Collective], now_s: float) -> list[AttemptEffect]:
        """Start the collectives of a bucket; `submit` follows with the rest."""
        if self.open_attempt is not None:
            raise LocalProtocolError(
                f"a part of round {self.next_round} was begun while {self.open_attempt.round_id} is open"
            )
        return self._add(collectives, now_s) + self._replay_all(now_s)

    def submit(
        self,
        round_id: m.RoundId,
        collectives: Mapping[m.Channel, Collective],
        timeout_s: float,
        now_s: float,
        has_more: bool = False,
    ) -> list[AttemptEffect]:
        """Open the attempt with the trainer's part, or the rest of it.  `has_more`: `add_collectives`
        follows."""
        if self.open_attempt is not None:
            raise LocalProtocolError(
                f"round {round_id} was submitted while {self.open_attempt.round_id} is open"
            )
        world_size = self.rank_assignment.world_size
        self.open_attempt = TwoPhaseCommit(round_id, self.rank, world_size, timeout_s, now_s)
        self._has_more = has_more
        before, self._aborted_collectives = self._aborted_collectives, {}
        loss_reason, self._loss_reason = self._loss_reason, ""
        failure = loss_reason and f"{loss_reason}, before the round began"
        if not _can_resume({**self._collectives, **collectives}, before):
            failure = "the part of this ring that had arrived is no longer held"
        if failure:
            self._collectives |= collectives
            effects = self.advance(Failed(failure), now_s)
        else:
            effects = self._add(collectives, now_s) + self._check_complete()
        return effects + self._replay_all(now_s)

    def add_collectives(self, event: AddCollectives, now_s: float) -> list[AttemptEffect]:
        """Further collectives of the open round; ignored if it is over, or was voted on."""
        attempt = self.open_attempt
        if attempt is None or attempt.round_id != event.round or attempt.vote is not None:
            return []
        if event.failure:
            return self.advance(Failed(event.failure), now_s)
        if not self._has_more:
            raise LocalProtocolError(f"round {event.round} was extended after its last collective")
        self._has_more = event.has_more
        return self._add(event.collectives, now_s) + self._check_complete() + self._replay_all(now_s)

    def receive(
        self, peer: m.PeerId, message: AttemptMessage, nbytes: int, now_s: float
    ) -> list[AttemptEffect]:
        """Messages of past rounds are dropped, those of later ones held, bounded for each peer (commit rule
        1).

        Args:
            peer: a member of this generation.
            nbytes: size of all frames of the message; counted while it is held.

        Raises:
            RemoteProtocolError: `peer` cannot be an honest member.
        """
        here, there, rank = self._current_round, message.round, self._rank(peer)
        if _is_foreign(there, here):
            self._count_stale(peer, rank)
            return []
        _check_role(message, rank, self.rank)
        _check_not_ahead(there, here, rank)
        if _is_over(there, here):
            self._count_stale(peer, rank)
            return self._handle_late(peer, message)
        is_begun = isinstance(message, m.Data) and message.channel in self._collectives
        is_awaited = isinstance(message, m.Data) and self._awaits(message.channel)
        if there == here and (self.open_attempt is not None or is_begun) and not is_awaited:
            return self._deliver(rank, message, now_s)
        self._store_early(peer, message, nbytes)
        if there.step == here.step + 1 and self.prepared_attempt is not None and _proves_commit(rank):
            return self.advance(LaterStepSeen(), now_s)
        return []

    def drop_early(self, peer: m.PeerId) -> None:
        """The peer has violated the protocol: drop its held messages."""
        self._early.pop(peer, None)

    def advance(self, event: CommitEvent, now_s: float) -> list[AttemptEffect]:
        """An event of the open attempt; ignored if none is open."""
        if self.open_attempt is None:
            if self._collectives and isinstance(event, Failed):
                self._loss_reason = event.reason
            return []
        if isinstance(event, Prepared) and self.open_attempt.vote is not None:
            return []  # an effect before ComputeDigest failed, and the vote was NO
        return self._process_commit_effects(self.open_attempt, self.open_attempt.handle(event, now_s))

    def tick(self, now_s: float) -> list[AttemptEffect]:
        """The root aborts an attempt that has timed out."""
        attempt = self.open_attempt
        return self._process_commit_effects(attempt, attempt.tick(now_s)) if attempt is not None else []

    def extend_timeouts(self, until_s: float) -> None:
        """Our own loop stalled: no timeout ends before `until_s`."""
        if self.open_attempt is not None:
            self.open_attempt.extend_timeouts(until_s)

    def peer_connected(self, peer: m.PeerId) -> list[AttemptEffect]:
        """Repeat the vote: it, or the decision, may have been lost with the connection to the root."""
        attempt = self.open_attempt
        if attempt is None or attempt.vote is None or self.rank_assignment.rank_of(peer) != ROOT:
            return []
        return [Send(peer, m.Vote(attempt.round_id, attempt.vote, attempt.digest, "repeated"))]

    def peer_disconnected(self, reason: str, now_s: float) -> list[AttemptEffect]:
        """Payloads may be lost: of this round or, as peers can be a step ahead, of the next."""
        self._loss_reason = reason if self.open_attempt is None or self.open_attempt.vote is not None else ""
        return self.advance(Failed(reason), now_s)

    def record_progress(self, peer: m.PeerId, message: m.RoundProgress, now_s: float) -> None:
        """A member makes progress.  Raises `RemoteProtocolError` for a step that no member can have
        reached."""
        here, there, rank = self._current_round, message.round, self._rank(peer)
        if _is_foreign(there, here):
            return
        # After the last abort it names the next attempt, which is never begun.
        _check_not_ahead(replace(there, attempt=0), here, rank)
        before = self._progress_of.get(peer, 0)
        self._progress_of[peer] = max(before, message.progress)
        if self.open_attempt is not None and there.step == here.step:
            self.open_attempt.handle(ProgressReceived(rank, message.progress > before), now_s)

    # -- internal ----------------------------------------------------------------------------------

    @property
    def _current_round(self) -> m.RoundId:
        return self.open_attempt.round_id if self.open_attempt is not None else self.next_round

    def _rank(self, peer: m.PeerId) -> int:
        rank = self.rank_assignment.rank_of(peer)
        assert rank is not None, f"{peer.hex()[:8]} is no member"
        return rank

    def _peer(self, rank: int) -> m.PeerId:
        return self.rank_assignment.members[rank].peer

    def _awaits(self, channel: m.Channel) -> bool:
        """Whether a later collective of the open round may have this channel."""
        if self.open_attempt is None or self.open_attempt.vote is not None:
            return False
        return self._has_more and channel not in self._collectives

    def _store_early(self, peer: m.PeerId, message: AttemptMessage, nbytes: int) -> None:
        early = self._early.setdefault(peer, _EarlyMessages())
        _check_early_limits(self._rank(peer), len(early.messages) + 1, early.nbytes + nbytes)
        early.messages.append((message, nbytes))
        early.nbytes += nbytes

    def _add(self, collectives: Mapping[m.Channel, Collective], now_s: float) -> list[AttemptEffect]:
        if not self._collectives:
            self.skip = False
        self._collectives |= collectives
        return [
            effect
            for channel, collective in collectives.items()
            for effect in self._translate(channel, collective.start(now_s))
        ]

    def _replay_all(self, now_s: float) -> list[AttemptEffect]:
        held, self._early = self._early, {}
        return [effect for peer, early in held.items() for effect in self._replay(peer, early, now_s)]

    def _replay(self, peer: m.PeerId, early: _EarlyMessages, now_s: float) -> list[AttemptEffect]:
        """Process held messages; those of later rounds are held again."""
        effects: list[AttemptEffect] = []
        for message, nbytes in early.messages:
            try:
                effects += self.receive(peer, message, nbytes, now_s)
            except RemoteProtocolError as error:
                self.drop_early(peer)
                text = f"rank {self._rank(peer)} violated the protocol: {error.reason}"
                effects += [EarlyViolation(peer, error.reason), *self.advance(Failed(text), now_s)]
                break
        return effects

    def _count_stale(self, peer: m.PeerId, rank: int) -> None:
        self._stale_messages[peer] += 1
        if exceeds_stale_limit(self._stale_messages[peer]):
            raise RemoteProtocolError(
                f"rank {rank} has sent {self._stale_messages[peer]} messages of past rounds; at most "
                f"{MAX_STALE_MESSAGES} can have been in flight",
                remedy=_REMEDY,
            )

    def _handle_late(self, peer: m.PeerId, message: AttemptMessage) -> list[AttemptEffect]:
        """The root repeats its verdict to a voter whose connection broke; the rest is dropped."""
        there, here = message.round, self.next_round
        if not isinstance(message, m.Vote) or self.rank != ROOT:
            return []
        if (there.term, there.generation, there.step) == (here.term, here.generation, here.step):
            return [Send(peer, m.Decision(there, m.Verdict.ABORT, "repeated"))]
        if there == self._last_committed:
            return [Send(peer, m.Decision(there, m.Verdict.COMMIT, "repeated"))]
        return []

    def _deliver(self, rank: int, message: AttemptMessage, now_s: float) -> list[AttemptEffect]:
        match message:
            case m.Vote(_, yes, digest, reason):
                return self.advance(VoteReceived(rank, yes, digest, reason), now_s)
            case m.Decision(_, verdict, reason):
                return self.advance(DecisionReceived(rank, verdict, reason), now_s)
            case m.Data(_, channel, slot, skip, payload):
                if self.open_attempt is not None and self.open_attempt.vote is False:
                    return []
                collective = self._collectives.get(channel)
                if collective is None:
                    raise RemoteProtocolError(
                        f"rank {rank} sent data for {channel}, which is none of the "
                        f"{len(self._collectives)} channels of round {self._current_round}",
                        remedy=_REMEDY,
                    )
                effects = collective.handle(PayloadReceived(rank, slot, skip, payload), now_s)
                return self._translate(channel, effects) + self._check_complete()

    def _translate(self, channel: m.Channel, effects: list[CollectiveEffect]) -> list[AttemptEffect]:
        out: list[AttemptEffect] = []
        for effect in effects:
            match effect:
                case SendTo(to_rank, slot, skip):
                    out.append(SendPayload(self._peer(to_rank), self._current_round, channel, slot, skip))
                case CollectiveComplete(skip):
                    self.skip = self.skip or skip
                    if self._has_more:
                        out.append(CollectiveCompleted(channel, skip))
                case _:
                    out.append(ApplyToBuffer(channel, effect, self._peer(effect.provenance.rank)))
        return out

    def _check_complete(self) -> list[AttemptEffect]:
        if self.open_attempt is None or self.open_attempt.vote is not None or self._has_more:
            return []
        return [ComputeDigest(self.skip)] if all(c.complete for c in self._collectives.values()) else []

    def _process_commit_effects(
        self, attempt: TwoPhaseCommit, effects: list[CommitEffect]
    ) -> list[AttemptEffect]:
        out: list[AttemptEffect] = []
        for effect in effects:
            match effect:
                case CastVote(yes, digest, reason):
                    out.append(Send(self._peer(ROOT), m.Vote(attempt.round_id, yes, digest, reason)))
                case AnnounceDecision(verdict, reason):
                    decision, at = m.Decision(attempt.round_id, verdict, reason), self.rank_assignment
                    out += [Send(x.peer, decision) for x in at.members if x.peer != at.own_id]
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
        return StepCommitted(ended.round_id, ended.digest, self.skip, reason)

    def _abort(self, ended: TwoPhaseCommit, decided: Decided) -> list[AttemptEffect]:
        self.open_attempt, self._aborted_collectives, self._collectives = None, self._collectives, {}
        self._attempt, self._aborts = self._attempt + 1, self._aborts + 1
        self.abort_reason, self.silent_s = decided.reason, decided.silent_s
        self.suspects = tuple(self._peer(rank) for rank in decided.suspects)
        fields = {"step": ended.round_id.step, "attempt": ended.round_id.attempt, "reason": decided.reason}
        return [LogEvent("aborted", fields), ResolveRound(ended.round_id, False, False, decided.reason)]


def _can_resume(now: Mapping[m.Channel, Collective], before: Mapping[m.Channel, Collective]) -> bool:
    """Whether the rings can resume where they were aborted: those of all members resume, or none may."""
    for channel, collective in now.items():
        earlier = before.get(channel)
        due = earlier.attempt + 1 if isinstance(earlier, RingAllReduce) else 0
        if isinstance(collective, RingAllReduce) and collective.attempt != due:
            return False
    return True


def _check_role(message: AttemptMessage, from_rank: int, rank: int) -> None:
    """Members vote, the root decides.  Checked on arrival, even where the message is held."""
    match message:
        case m.Vote():
            check_vote(from_rank, rank)
        case m.Decision():
            check_decision(from_rank, rank)


def _check_not_ahead(there: m.RoundId, here: m.RoundId, from_rank: int) -> None:
    """A message of a round that no member can have reached would be held forever."""
    if there.step > here.step + MAX_STEPS_AHEAD or there.attempt >= ABORTS_BEFORE_FREEZE:
        raise RemoteProtocolError(
            f"rank {from_rank} is at step {there.step}, attempt {there.attempt}; no member can be past step "
            f"{here.step + MAX_STEPS_AHEAD} while this one is at {here.step}, nor past attempt "
            f"{ABORTS_BEFORE_FREEZE - 1}",
            remedy=_REMEDY,
        )


def _check_early_limits(from_rank: int, messages: int, nbytes: int) -> None:
    if messages > MAX_EARLY_MESSAGES or nbytes > MAX_EARLY_BYTES:
        raise RemoteProtocolError(
            f"rank {from_rank} has sent {messages} early messages of {nbytes} bytes; at most "
            f"{MAX_EARLY_MESSAGES} and {MAX_EARLY_BYTES} are held for one member",
            remedy=_REMEDY,
        )


def _is_foreign(there: m.RoundId, here: m.RoundId) -> bool:
    return (there.term, there.generation) != (here.term, here.generation)


def exceeds_stale_limit(messages: int) -> bool:
    """Reading a message that is of no use costs as much as reading any other."""
    return messages > MAX_STALE_MESSAGES


def _is_over(there: m.RoundId, here: m.RoundId) -> bool:
    return there < here


def _proves_commit(from_rank: int) -> bool:
    """Commit rule 3: a member at the next step knows this step's verdict.  Only the root's message counts:
    from another member, which has the verdict from the root, it could make this member apply alone."""
    return from_rank == ROOT
