"""The attempts at the open step, in one generation: one `Round` and its collectives after the other.

Decides which messages belong to the open round, when it is voted on, and what follows an ABORT.
Never decides when a generation begins or ends, and never opens a payload.

    Submit --> Round + collectives --Data, Vote, Decision--> COMMIT: `Committed`, the next step
                     ^                                       ABORT: the next attempt, same gradient
                     +---- held: what came early ----+       two in a row: the root wants a FREEZE

While the trainer still computes its last buckets the first ones may travel already (`begin`).  There is no
`Round` yet then: votes, decisions and failures wait, as they do for a trainer that has not submitted at all.

A pipeline's round is open from its first activation on (`submit(more=True)`), as its members wait for each
other long before there is a gradient: whoever is lost, or votes NO, ends the wait of all.  Its trainer is
told of each collective that is complete (`Reached`), and adds others (`extend`), the last one marked so.

What a member sends is taken, held or dropped where an honest one may have sent it, and otherwise raises
`RemoteProtocolError`, as PROTOCOL.md section 6 tells them apart.  So does whatever fits no collective.
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
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

ABORTS_BEFORE_FREEZE = 2

MAX_EARLY_MESSAGES = 8192
"""Early messages that are held for one peer."""

MAX_EARLY_BYTES = (32 + 64 + 1) << 20
"""Their frames: an honest sender's window of credit, one largest message beyond it, and what is no bulk."""

MAX_STALE_MESSAGES = 20_000
"""Messages of rounds that are over, from one peer between two commits: what an honest one had under way."""

MAX_STEPS_AHEAD = 1
"""Step s + 1 begins when s is committed, which takes everybody's vote: nobody is further ahead."""

_REMEDY = "drop that peer; an honest one of the same version never sends this"

RoundMessage = m.Data | m.Vote | m.Decision


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A member's place in one generation; `roster` is in rank order, of a model in so many `stages`;
    `exchange`: as in `View`.

    `cuts`: (stages + 1,) where these begin, and the number of the model's blocks; (): a stage is a block.
    """

    own_id: m.PeerId
    term: int
    generation: int
    members: tuple[m.Member, ...]
    stages: int = 1
    exchange: str = ""
    stage_bounds: tuple[int, ...] = ()
    _ranks: dict[m.PeerId, int] = field(init=False, repr=False, compare=False)  # asked for with each message

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", {member.peer: rank for rank, member in enumerate(self.members)})

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def shares(self) -> tuple[tuple[m.PeerId, int], ...]:
        """For `ledger.assign`."""
        return tuple((member.peer, member.share) for member in self.members)

    def rank_of(self, peer: m.PeerId) -> int | None:
        return self._ranks.get(peer)

    @property
    def rank(self) -> int:
        rank = self.rank_of(self.own_id)
        if rank is None:
            raise LocalProtocolError(f"not a member of generation {self.generation}")
        return rank

    @property
    def layout(self) -> RankLayout:
        return RankLayout.for_world_size(self.stages, self.world_size)

    @property
    def stage(self) -> int:
        """Of the model, that this member holds."""
        return self.layout.stage_of(self.rank)

    @property
    def layers(self) -> m.Span:
        """Of the model, that this member holds."""
        return self.layers_of_stage(self.stage)

    def layers_of_stage(self, stage: int) -> m.Span:
        return (
            m.Span(*self.stage_bounds[stage : stage + 2]) if self.stage_bounds else m.Span(stage, stage + 1)
        )

    @property
    def checkpoint_sources(self) -> tuple[tuple[m.Span, int], ...]:
        """From which this member puts its stage together: blocks, and whose rank has them."""
        return self.members[self.rank].pieces

    def checkpoint_source_digest(self, blocks: m.Span, rank: int) -> bytes:
        """Of one of `pieces`, as the coordinator knows it; empty: it does not."""
        mine = self.members[self.rank]
        return dict(zip(mine.pieces, mine.piece_digests, strict=False)).get((blocks, rank), b"")


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The open step is committed: the caller applies it to the history and the ledger."""

    round: m.RoundId
    digest: bytes
    skip: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EarlyViolation:
    """What `peer` sent early shows to be wrong now that the round is open: treat it as `Offence`."""

    peer: m.PeerId
    reason: str


AttemptEffect = MemberEffect | StepCommitted | EarlyViolation


@dataclass(slots=True)
class _EarlyMessages:
    """What one peer sent early, in order, with the bytes of each message."""

    messages: list[tuple[RoundMessage, int]] = field(default_factory=list)
    nbytes: int = 0


class Attempts:
    """See the module's text.

    Args:
        seat: of this member, in the generation.
        step: the generation's first.

    Attributes:
        round: the open one; None between two attempts.
        stuck: too many attempts were aborted in a row; only another generation helps.
        why, suspects, silent_s: of the latest abort, see `round.Decided`.
    """

    def __init__(self, seat: RankAssignment, step: int) -> None:
        self.rank_assignment = seat
        self.rank = seat.rank
        self.open_attempt: TwoPhaseCommit | None = None
        self.skip = False
        self.abort_reason = ""
        self.suspects: tuple[m.PeerId, ...] = ()
        self.silent_s = 0.0
        self._rank_of = {member.peer: rank for rank, member in enumerate(seat.members)}
        self._step = step
        self._attempt = 0
        self._aborts = 0
        self._has_more = False  # the open round is to have further collectives
        self._collectives: dict[m.Channel, Collective] = {}
        self._aborted_collectives: dict[m.Channel, Collective] = {}  # of the attempt that was aborted last
        self._early: dict[m.PeerId, _EarlyMessages] = {}
        self._last_committed: m.RoundId | None = None
        self._progress_of: dict[m.PeerId, int] = {}
        self._loss_reason = ""  # why what was sent for the next round may be lost
        self._stale_messages: Counter[m.PeerId] = Counter()

    @property
    def next_round(self) -> m.RoundId:
        return m.RoundId(
            self.rank_assignment.term, self.rank_assignment.generation, self._step, self._attempt
        )

    @property
    def is_stuck(self) -> bool:
        return self._aborts >= ABORTS_BEFORE_FREEZE

    @property
    def deadline_s(self) -> float:
        return self.open_attempt.deadline_s if self.open_attempt is not None else math.inf

    @property
    def prepared_attempt(self) -> TwoPhaseCommit | None:
        """The round that this member voted YES for and that is not decided."""
        return self.open_attempt if self.open_attempt is not None and self.open_attempt.is_prepared else None

    def early_bytes(self, peer: m.PeerId) -> int:
        """Bytes of this peer's early messages that are held here: it gets no credit for them yet."""
        return self._early[peer].nbytes if peer in self._early else 0

    # -- what happens ----------------------------------------------------------------------------

    def begin(self, collectives: Mapping[m.Channel, Collective], now_s: float) -> list[AttemptEffect]:
        """A bucket of the trainer's part is prepared; `submit` will bring what else the round has."""
        if self.open_attempt is not None:
            raise LocalProtocolError(
                f"a part of round {self.next_round} begun while {self.open_attempt.round_id} is open"
            )
        return self._add(collectives, now_s) + self._replay_all(now_s)

    def submit(
        self,
        round_id: m.RoundId,
        collectives: Mapping[m.Channel, Collective],
        patience_s: float,
        now_s: float,
        more: bool = False,
    ) -> list[AttemptEffect]:
        """The trainer's part, or the rest of it, is prepared: open the round.  `more`: `extend` follows."""
        if self.open_attempt is not None:
            raise LocalProtocolError(f"round {round_id} submitted while {self.open_attempt.round_id} is open")
        self.open_attempt = TwoPhaseCommit(
            round_id, self.rank, self.rank_assignment.world_size, patience_s, now_s
        )
        self._has_more = more
        before, self._aborted_collectives = self._aborted_collectives, {}
        torn, self._loss_reason = self._loss_reason, ""
        if not _can_resume({**self._collectives, **collectives}, before):
            why = "what had arrived for this ring is not held any more"
        else:
            why = torn and f"{torn}, before the round began"
        if why:
            self._collectives |= collectives
            effects = self.advance(Failed(why), now_s)
        else:
            effects = self._add(collectives, now_s) + self._check_complete()
        return effects + self._replay_all(now_s)

    def add_collectives(self, event: AddCollectives, now_s: float) -> list[AttemptEffect]:
        """Further collectives of the open round; nothing if it is over, or was voted on."""
        if (
            self.open_attempt is None
            or self.open_attempt.round_id != event.round
            or self.open_attempt.vote is not None
        ):
            return []
        if event.failure:
            return self.advance(Failed(event.failure), now_s)
        if not self._has_more:
            raise LocalProtocolError(f"round {event.round} extended after its last collective")
        self._has_more = event.has_more
        return self._add(event.collectives, now_s) + self._check_complete() + self._replay_all(now_s)

    def receive(
        self, peer: m.PeerId, message: RoundMessage, nbytes: int, now_s: float
    ) -> list[AttemptEffect]:
        """Older ids are dropped, later ones held, bounded for each peer (commit rule 1).

        Args:
            peer: a member of this generation.
            nbytes: all frames of the message; counted while it is held.

        Raises:
            RemoteProtocolError: `peer` cannot be an honest member.
        """
        here, there, rank = self._current_round, message.round, self._rank_of[peer]
        if _is_foreign(there, here):
            self._count_stale(peer, rank)
            return []
        _check_role(message, rank, self.rank)
        _check_not_ahead(there, here, rank)
        if _is_over(there, here):
            self._count_stale(peer, rank)
            return self._handle_late(peer, message)
        begun = isinstance(message, m.Data) and message.channel in self._collectives
        to_come = isinstance(message, m.Data) and self._awaits(message.channel)
        if there == here and (self.open_attempt is not None or begun) and not to_come:
            return self._deliver(peer, message, now_s)
        self._store_early(peer, message, nbytes)
        if there.step == here.step + 1 and self.prepared_attempt is not None and _proves_commit(rank):
            return self.advance(LaterStepSeen(), now_s)
        return []

    def drop_early(self, peer: m.PeerId) -> None:
        """It has broken the protocol: what is held of it is of no use."""
        self._early.pop(peer, None)

    def advance(self, event: CommitEvent, now_s: float) -> list[AttemptEffect]:
        """Something happened to the open round; nothing if none is open."""
        if self.open_attempt is None:
            if self._collectives and isinstance(event, Failed):
                self._loss_reason = event.reason
            return []
        if isinstance(event, Prepared) and self.open_attempt.vote is not None:
            return []  # an effect before the Seal failed, and the vote was NO
        return self._process_commit_effects(self.open_attempt, self.open_attempt.handle(event, now_s))

    def tick(self, now_s: float) -> list[AttemptEffect]:
        """The root's patience with the open round."""
        return (
            self._process_commit_effects(self.open_attempt, self.open_attempt.tick(now_s))
            if self.open_attempt is not None
            else []
        )

    def extend_timeouts(self, until_s: float) -> None:
        """We slept: nobody's patience with the open round, our own with the others, ends before `until_s`."""
        if self.open_attempt is not None:
            self.open_attempt.extend_timeouts(until_s)

    def peer_connected(self, peer: m.PeerId) -> list[AttemptEffect]:
        """The vote may have been lost with the connection, or the decision that answered it."""
        mine = self.open_attempt
        if mine is None or mine.vote is None or self._rank_of.get(peer) != ROOT:
            return []
        return [Send(peer, m.Vote(mine.round_id, mine.vote, mine.digest, "repeated"))]

    def peer_disconnected(self, reason: str, now_s: float) -> list[AttemptEffect]:
        """Payloads may be lost: of this round, or, as peers can be a step ahead, of the next."""
        self._loss_reason = reason if self.open_attempt is None or self.open_attempt.vote is not None else ""
        return self.advance(Failed(reason), now_s)

    def record_progress(self, peer: m.PeerId, message: m.RoundProgress, now_s: float) -> None:
        """A sign of life.  Raises `RemoteProtocolError` for one of a step that nobody can be at."""
        here, there, rank = self._current_round, message.round, self._rank_of[peer]
        if _is_foreign(there, here):
            return
        # Its attempt may be one that is never begun: the next one, after the last abort.
        _check_not_ahead(replace(there, attempt=0), here, rank)
        before = self._progress_of.get(peer, 0)
        self._progress_of[peer] = max(before, message.progress)
        if self.open_attempt is not None and there.step == here.step:
            self.open_attempt.handle(ProgressReceived(rank, message.progress > before), now_s)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _current_round(self) -> m.RoundId:
        return self.open_attempt.round_id if self.open_attempt is not None else self.next_round

    def _awaits(self, channel: m.Channel) -> bool:
        """No collective of the open round has this channel yet, but one that is still to come may."""
        mine = self.open_attempt
        return mine is not None and mine.vote is None and self._has_more and channel not in self._collectives

    def _store_early(self, peer: m.PeerId, message: RoundMessage, nbytes: int) -> None:
        held = self._early.setdefault(peer, _EarlyMessages())
        _check_early_limits(self._rank_of[peer], len(held.messages) + 1, held.nbytes + nbytes)
        held.messages.append((message, nbytes))
        held.nbytes += nbytes

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
        """What was held finds its round, or is held on."""
        effects: list[AttemptEffect] = []
        for message, nbytes in early.messages:
            try:
                effects += self.receive(peer, message, nbytes, now_s)
            except RemoteProtocolError as error:
                self.drop_early(peer)
                text = f"rank {self._rank_of[peer]} broke the protocol: {error.reason}"
                effects += [EarlyViolation(peer, error.reason), *self.advance(Failed(text), now_s)]
                break
        return effects

    def _count_stale(self, peer: m.PeerId, rank: int) -> None:
        self._stale_messages[peer] += 1
        if exceeds_stale_limit(self._stale_messages[peer]):
            raise RemoteProtocolError(
                f"rank {rank} has sent {self._stale_messages[peer]} messages of rounds that are over, at most "
                f"{MAX_STALE_MESSAGES} can have been under way",
                remedy=_REMEDY,
            )

    def _handle_late(self, peer: m.PeerId, message: RoundMessage) -> list[AttemptEffect]:
        """The root repeats its verdict to a voter whose connection broke; the rest is dropped."""
        there, here = message.round, self.next_round
        if not isinstance(message, m.Vote) or self.rank != ROOT:
            return []
        if (there.term, there.generation, there.step) == (here.term, here.generation, here.step):
            return [Send(peer, m.Decision(there, m.Verdict.ABORT, "repeated"))]
        if there == self._last_committed:
            return [Send(peer, m.Decision(there, m.Verdict.COMMIT, "repeated"))]
        return []

    def _deliver(self, peer: m.PeerId, message: RoundMessage, now_s: float) -> list[AttemptEffect]:
        rank = self._rank_of[peer]
        match message:
            case m.Vote(_, yes, digest, reason):
                return self.advance(VoteReceived(rank, yes, digest, reason), now_s)
            case m.Decision(_, verdict, reason):
                return self.advance(DecisionReceived(rank, verdict, reason), now_s)
            case m.Data(_, channel, place, skip, payload):
                if self.open_attempt is not None and self.open_attempt.vote is False:
                    return []
                collective = self._collectives.get(channel)
                if collective is None:
                    raise RemoteProtocolError(
                        f"rank {rank} sent data for {channel}; round {self._current_round} has "
                        f"{len(self._collectives)} channels, and no such one",
                        remedy=_REMEDY,
                    )
                arrived = collective.handle(PayloadReceived(rank, place, skip, payload), now_s)
                return self._translate(channel, arrived) + self._check_complete()

    def _translate(self, channel: m.Channel, effects: list[CollectiveEffect]) -> list[AttemptEffect]:
        out: list[AttemptEffect] = []
        for effect in effects:
            match effect:
                case SendTo(to_rank, place, skip):
                    out.append(
                        SendPayload(
                            self.rank_assignment.members[to_rank].peer,
                            self._current_round,
                            channel,
                            place,
                            skip,
                        )
                    )
                case CollectiveComplete(skip):
                    self.skip = self.skip or skip
                    if self._has_more:
                        out.append(CollectiveCompleted(channel, skip))
                case _:
                    sender = self.rank_assignment.members[effect.provenance.rank].peer
                    out.append(ApplyToBuffer(channel, effect, sender))
        return out

    def _check_complete(self) -> list[AttemptEffect]:
        if self.open_attempt is None or self.open_attempt.vote is not None or self._has_more:
            return []
        return [ComputeDigest(self.skip)] if all(c.complete for c in self._collectives.values()) else []

    def _process_commit_effects(
        self, of: TwoPhaseCommit, round_effects: list[CommitEffect]
    ) -> list[AttemptEffect]:
        effects: list[AttemptEffect] = []
        for effect in round_effects:
            match effect:
                case CastVote(yes, digest, reason):
                    effects.append(
                        Send(
                            self.rank_assignment.members[ROOT].peer, m.Vote(of.round_id, yes, digest, reason)
                        )
                    )
                case AnnounceDecision(verdict, reason):
                    decision = m.Decision(of.round_id, verdict, reason)
                    effects += [
                        Send(x.peer, decision)
                        for x in self.rank_assignment.members
                        if x.peer != self.rank_assignment.own_id
                    ]
                case Decided(m.Verdict.COMMIT, reason):
                    effects.append(self._commit(of, reason))
                case Decided():
                    effects += self._abort(of, effect)
        return effects

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
        self.suspects = tuple(self.rank_assignment.members[rank].peer for rank in decided.suspects)
        note = {"step": ended.round_id.step, "attempt": ended.round_id.attempt, "reason": decided.reason}
        return [LogEvent("aborted", note), ResolveRound(ended.round_id, False, False, decided.reason)]


def _can_resume(now: Mapping[m.Channel, Collective], before: Mapping[m.Channel, Collective]) -> bool:
    """All members' rings go on from what they have, or none may: see `protocol.ring`."""
    for channel, collective in now.items():
        earlier = before.get(channel)
        due = earlier.attempt + 1 if isinstance(earlier, RingAllReduce) else 0
        if isinstance(collective, RingAllReduce) and collective.attempt != due:
            return False
    return True


def _check_role(message: RoundMessage, from_rank: int, rank: int) -> None:
    """A member votes at the root, the root decides; at once, not only when the round is open."""
    match message:
        case m.Vote():
            check_vote(from_rank, rank)
        case m.Decision():
            check_decision(from_rank, rank)


def _check_not_ahead(there: m.RoundId, here: m.RoundId, from_rank: int) -> None:
    """A round that nobody can be at cannot be meant honestly, and would be held for ever."""
    if there.step > here.step + MAX_STEPS_AHEAD or there.attempt >= ABORTS_BEFORE_FREEZE:
        raise RemoteProtocolError(
            f"rank {from_rank} is at step {there.step}, attempt {there.attempt}; nobody can be past step "
            f"{here.step + MAX_STEPS_AHEAD} while this member is at {here.step}, nor past attempt "
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
    """The defence: reading what nobody needs costs as much as reading what counts."""
    return messages > MAX_STALE_MESSAGES


def _is_over(there: m.RoundId, here: m.RoundId) -> bool:
    return there < here


def _proves_commit(from_rank: int) -> bool:
    """Commit rule 3: whoever is at the next step knows this one's verdict.  The root decided it, others
    have it from the root: from them it is hearsay, and could make one member apply alone."""
    return from_rank == ROOT
