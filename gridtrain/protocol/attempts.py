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

from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.collective import Arrived, Collective, CollectiveEffect, Complete, SendTo
from gridtrain.protocol.member_io import Effect, Extend, Fill, Note, Post, Reached, Resolve, Seal, Ship
from gridtrain.protocol.ring import Ring
from gridtrain.protocol.round import (
    ROOT,
    Announce,
    CastVote,
    Decided,
    DecisionCame,
    Failed,
    LaterStepSeen,
    Moved,
    Prepared,
    Round,
    RoundEffect,
    RoundEvent,
    VoteCame,
    check_decision,
    check_vote,
)
from gridtrain.protocol.seats import Seats

ABORTS_BEFORE_FREEZE = 2

MAX_HELD_MESSAGES = 8192
"""Early messages that are held for one peer."""

MAX_HELD_BYTES = (32 + 64 + 1) << 20
"""Their frames: an honest sender's window of credit, one largest message beyond it, and what is no bulk."""

MOST_STALE = 20_000
"""Messages of rounds that are over, from one peer between two commits: what an honest one had under way."""

MAX_STEPS_AHEAD = 1
"""Step s + 1 begins when s is committed, which takes everybody's vote: nobody is further ahead."""

_REMEDY = "drop that peer; an honest one of the same version never sends this"

OfRound = m.Data | m.Vote | m.Decision


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place in one generation; `roster` is in rank order, of a model in so many `stages`;
    `exchange`: as in `View`.

    `cuts`: (stages + 1,) where these begin, and the number of the model's blocks; (): a stage is a block.
    """

    me: m.PeerId
    term: int
    generation: int
    roster: tuple[m.Member, ...]
    stages: int = 1
    exchange: str = ""
    cuts: tuple[int, ...] = ()
    _ranks: dict[m.PeerId, int] = field(init=False, repr=False, compare=False)  # asked for with each message

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", {member.peer: rank for rank, member in enumerate(self.roster)})

    @property
    def world_size(self) -> int:
        return len(self.roster)

    @property
    def shares(self) -> tuple[tuple[m.PeerId, int], ...]:
        """For `ledger.assign`."""
        return tuple((member.peer, member.share) for member in self.roster)

    def rank_of(self, peer: m.PeerId) -> int | None:
        return self._ranks.get(peer)

    @property
    def rank(self) -> int:
        rank = self.rank_of(self.me)
        if rank is None:
            raise LocalProtocolError(f"not a member of generation {self.generation}")
        return rank

    @property
    def seats(self) -> Seats:
        return Seats.of(self.stages, self.world_size)

    @property
    def stage(self) -> int:
        """Of the model, that this member holds."""
        return self.seats.stage_of(self.rank)

    @property
    def blocks(self) -> m.Span:
        """Of the model, that this member holds."""
        return self.blocks_of(self.stage)

    def blocks_of(self, stage: int) -> m.Span:
        return m.Span(*self.cuts[stage : stage + 2]) if self.cuts else m.Span(stage, stage + 1)

    @property
    def pieces(self) -> tuple[tuple[m.Span, int], ...]:
        """From which this member puts its stage together: blocks, and whose rank has them."""
        return self.roster[self.rank].pieces

    def piece_digest(self, blocks: m.Span, rank: int) -> bytes:
        """Of one of `pieces`, as the coordinator knows it; empty: it does not."""
        mine = self.roster[self.rank]
        return dict(zip(mine.pieces, mine.piece_digests, strict=False)).get((blocks, rank), b"")


@dataclass(frozen=True, slots=True)
class Committed:
    """The open step is committed: the caller applies it to the history and the ledger."""

    round: m.RoundId
    digest: bytes
    skip: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Offended:
    """What `peer` sent early shows to be wrong now that the round is open: treat it as `Offence`."""

    peer: m.PeerId
    reason: str


AttemptEffect = Effect | Committed | Offended


@dataclass(slots=True)
class _Held:
    """What one peer sent early, in order, with the bytes of each message."""

    messages: list[tuple[OfRound, int]] = field(default_factory=list)
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

    def __init__(self, seat: Seat, step: int) -> None:
        self.seat = seat
        self.rank = seat.rank
        self.round: Round | None = None
        self.skip = False
        self.why = ""
        self.suspects: tuple[m.PeerId, ...] = ()
        self.silent_s = 0.0
        self._rank_of = {member.peer: rank for rank, member in enumerate(seat.roster)}
        self._step = step
        self._attempt = 0
        self._aborts = 0
        self._more = False  # the open round is to have further collectives
        self._collectives: dict[m.Channel, Collective] = {}
        self._before: dict[m.Channel, Collective] = {}  # of the attempt that was aborted last
        self._held: dict[m.PeerId, _Held] = {}
        self._last_committed: m.RoundId | None = None
        self._progress_of: dict[m.PeerId, int] = {}
        self._torn = ""  # why what was sent for the next round may be lost
        self._stale_of: Counter[m.PeerId] = Counter()

    @property
    def next_round(self) -> m.RoundId:
        return m.RoundId(self.seat.term, self.seat.generation, self._step, self._attempt)

    @property
    def stuck(self) -> bool:
        return self._aborts >= ABORTS_BEFORE_FREEZE

    @property
    def deadline_s(self) -> float:
        return self.round.deadline_s if self.round is not None else math.inf

    @property
    def prepared(self) -> Round | None:
        """The round that this member voted YES for and that is not decided."""
        return self.round if self.round is not None and self.round.prepared else None

    def held_bytes(self, peer: m.PeerId) -> int:
        """Bytes of this peer's early messages that are held here: it gets no credit for them yet."""
        return self._held[peer].nbytes if peer in self._held else 0

    # -- what happens ----------------------------------------------------------------------------

    def begin(self, collectives: Mapping[m.Channel, Collective], now_s: float) -> list[AttemptEffect]:
        """A bucket of the trainer's part is prepared; `submit` will bring what else the round has."""
        if self.round is not None:
            raise LocalProtocolError(f"a part of round {self.next_round} begun while {self.round.id} is open")
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
        if self.round is not None:
            raise LocalProtocolError(f"round {round_id} submitted while {self.round.id} is open")
        self.round = Round(round_id, self.rank, self.seat.world_size, patience_s, now_s)
        self._more = more
        before, self._before = self._before, {}
        torn, self._torn = self._torn, ""
        if not _goes_on({**self._collectives, **collectives}, before):
            why = "what had arrived for this ring is not held any more"
        else:
            why = torn and f"{torn}, before the round began"
        if why:
            self._collectives |= collectives
            effects = self.advance(Failed(why), now_s)
        else:
            effects = self._add(collectives, now_s) + self._if_complete()
        return effects + self._replay_all(now_s)

    def extend(self, event: Extend, now_s: float) -> list[AttemptEffect]:
        """Further collectives of the open round; nothing if it is over, or was voted on."""
        if self.round is None or self.round.id != event.round or self.round.voted is not None:
            return []
        if event.reason:
            return self.advance(Failed(event.reason), now_s)
        if not self._more:
            raise LocalProtocolError(f"round {event.round} extended after its last collective")
        self._more = event.more
        return self._add(event.collectives, now_s) + self._if_complete() + self._replay_all(now_s)

    def receive(self, peer: m.PeerId, message: OfRound, nbytes: int, now_s: float) -> list[AttemptEffect]:
        """Older ids are dropped, later ones held, bounded for each peer (commit rule 1).

        Args:
            peer: a member of this generation.
            nbytes: all frames of the message; counted while it is held.

        Raises:
            RemoteProtocolError: `peer` cannot be an honest member.
        """
        here, there, rank = self._here, message.round, self._rank_of[peer]
        if _is_foreign(there, here):
            self._count_stale(peer, rank)
            return []
        _check_role(message, rank, self.rank)
        _check_reach(there, here, rank)
        if _is_over(there, here):
            self._count_stale(peer, rank)
            return self._late(peer, message)
        begun = isinstance(message, m.Data) and message.channel in self._collectives
        to_come = isinstance(message, m.Data) and self._awaits(message.channel)
        if there == here and (self.round is not None or begun) and not to_come:
            return self._deliver(peer, message, now_s)
        self._hold(peer, message, nbytes)
        if there.step == here.step + 1 and self.prepared is not None and _proves_commit(rank):
            return self.advance(LaterStepSeen(), now_s)
        return []

    def forget(self, peer: m.PeerId) -> None:
        """It has broken the protocol: what is held of it is of no use."""
        self._held.pop(peer, None)

    def advance(self, event: RoundEvent, now_s: float) -> list[AttemptEffect]:
        """Something happened to the open round; nothing if none is open."""
        if self.round is None:
            if self._collectives and isinstance(event, Failed):
                self._torn = event.reason
            return []
        if isinstance(event, Prepared) and self.round.voted is not None:
            return []  # an effect before the Seal failed, and the vote was NO
        return self._carry_out(self.round, self.round.handle(event, now_s))

    def tick(self, now_s: float) -> list[AttemptEffect]:
        """The root's patience with the open round."""
        return self._carry_out(self.round, self.round.tick(now_s)) if self.round is not None else []

    def second_chance(self, until_s: float) -> None:
        """We slept: nobody's patience with the open round, our own with the others, ends before `until_s`."""
        if self.round is not None:
            self.round.second_chance(until_s)

    def edge_up(self, peer: m.PeerId) -> list[AttemptEffect]:
        """The vote may have been lost with the connection, or the decision that answered it."""
        mine = self.round
        if mine is None or mine.voted is None or self._rank_of.get(peer) != ROOT:
            return []
        return [Post(peer, m.Vote(mine.id, mine.voted, mine.digest, "repeated"))]

    def edge_down(self, reason: str, now_s: float) -> list[AttemptEffect]:
        """Payloads may be lost: of this round, or, as peers can be a step ahead, of the next."""
        self._torn = reason if self.round is None or self.round.voted is not None else ""
        return self.advance(Failed(reason), now_s)

    def progressed(self, peer: m.PeerId, message: m.Progress, now_s: float) -> None:
        """A sign of life.  Raises `RemoteProtocolError` for one of a step that nobody can be at."""
        here, there, rank = self._here, message.round, self._rank_of[peer]
        if _is_foreign(there, here):
            return
        # Its attempt may be one that is never begun: the next one, after the last abort.
        _check_reach(replace(there, attempt=0), here, rank)
        before = self._progress_of.get(peer, 0)
        self._progress_of[peer] = max(before, message.progress)
        if self.round is not None and there.step == here.step:
            self.round.handle(Moved(rank, message.progress > before), now_s)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _here(self) -> m.RoundId:
        return self.round.id if self.round is not None else self.next_round

    def _awaits(self, channel: m.Channel) -> bool:
        """No collective of the open round has this channel yet, but one that is still to come may."""
        mine = self.round
        return mine is not None and mine.voted is None and self._more and channel not in self._collectives

    def _hold(self, peer: m.PeerId, message: OfRound, nbytes: int) -> None:
        held = self._held.setdefault(peer, _Held())
        _check_room(self._rank_of[peer], len(held.messages) + 1, held.nbytes + nbytes)
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
        held, self._held = self._held, {}
        return [effect for peer, early in held.items() for effect in self._replay(peer, early, now_s)]

    def _replay(self, peer: m.PeerId, early: _Held, now_s: float) -> list[AttemptEffect]:
        """What was held finds its round, or is held on."""
        effects: list[AttemptEffect] = []
        for message, nbytes in early.messages:
            try:
                effects += self.receive(peer, message, nbytes, now_s)
            except RemoteProtocolError as error:
                self.forget(peer)
                text = f"rank {self._rank_of[peer]} broke the protocol: {error.reason}"
                effects += [Offended(peer, error.reason), *self.advance(Failed(text), now_s)]
                break
        return effects

    def _count_stale(self, peer: m.PeerId, rank: int) -> None:
        self._stale_of[peer] += 1
        if is_too_stale(self._stale_of[peer]):
            raise RemoteProtocolError(
                f"rank {rank} has sent {self._stale_of[peer]} messages of rounds that are over, at most "
                f"{MOST_STALE} can have been under way",
                remedy=_REMEDY,
            )

    def _late(self, peer: m.PeerId, message: OfRound) -> list[AttemptEffect]:
        """The root repeats its verdict to a voter whose connection broke; the rest is dropped."""
        there, here = message.round, self.next_round
        if not isinstance(message, m.Vote) or self.rank != ROOT:
            return []
        if (there.term, there.generation, there.step) == (here.term, here.generation, here.step):
            return [Post(peer, m.Decision(there, m.Verdict.ABORT, "repeated"))]
        if there == self._last_committed:
            return [Post(peer, m.Decision(there, m.Verdict.COMMIT, "repeated"))]
        return []

    def _deliver(self, peer: m.PeerId, message: OfRound, now_s: float) -> list[AttemptEffect]:
        rank = self._rank_of[peer]
        match message:
            case m.Vote(_, yes, digest, reason):
                return self.advance(VoteCame(rank, yes, digest, reason), now_s)
            case m.Decision(_, verdict, reason):
                return self.advance(DecisionCame(rank, verdict, reason), now_s)
            case m.Data(_, channel, place, skip, payload):
                if self.round is not None and self.round.voted is False:
                    return []
                collective = self._collectives.get(channel)
                if collective is None:
                    raise RemoteProtocolError(
                        f"rank {rank} sent data for {channel}; round {self._here} has "
                        f"{len(self._collectives)} channels, and no such one",
                        remedy=_REMEDY,
                    )
                arrived = collective.handle(Arrived(rank, place, skip, payload), now_s)
                return self._translate(channel, arrived) + self._if_complete()

    def _translate(self, channel: m.Channel, effects: list[CollectiveEffect]) -> list[AttemptEffect]:
        out: list[AttemptEffect] = []
        for effect in effects:
            match effect:
                case SendTo(to_rank, place, skip):
                    out.append(Ship(self.seat.roster[to_rank].peer, self._here, channel, place, skip))
                case Complete(skip):
                    self.skip = self.skip or skip
                    if self._more:
                        out.append(Reached(channel, skip))
                case _:
                    sender = self.seat.roster[effect.source.rank].peer
                    out.append(Fill(channel, effect, sender))
        return out

    def _if_complete(self) -> list[AttemptEffect]:
        if self.round is None or self.round.voted is not None or self._more:
            return []
        return [Seal(self.skip)] if all(c.complete for c in self._collectives.values()) else []

    def _carry_out(self, of: Round, round_effects: list[RoundEffect]) -> list[AttemptEffect]:
        effects: list[AttemptEffect] = []
        for effect in round_effects:
            match effect:
                case CastVote(yes, digest, reason):
                    effects.append(Post(self.seat.roster[ROOT].peer, m.Vote(of.id, yes, digest, reason)))
                case Announce(verdict, reason):
                    decision = m.Decision(of.id, verdict, reason)
                    effects += [Post(x.peer, decision) for x in self.seat.roster if x.peer != self.seat.me]
                case Decided(m.Verdict.COMMIT, reason):
                    effects.append(self._commit(of, reason))
                case Decided():
                    effects += self._abort(of, effect)
        return effects

    def _commit(self, ended: Round, reason: str) -> Committed:
        self.round, self._collectives = None, {}
        self._last_committed = ended.id
        self._stale_of.clear()
        self._step, self._attempt, self._aborts = ended.id.step + 1, 0, 0
        return Committed(ended.id, ended.digest, self.skip, reason)

    def _abort(self, ended: Round, decided: Decided) -> list[AttemptEffect]:
        self.round, self._before, self._collectives = None, self._collectives, {}
        self._attempt, self._aborts = self._attempt + 1, self._aborts + 1
        self.why, self.silent_s = decided.reason, decided.silent_s
        self.suspects = tuple(self.seat.roster[rank].peer for rank in decided.suspects)
        note = {"step": ended.id.step, "attempt": ended.id.attempt, "reason": decided.reason}
        return [Note("aborted", note), Resolve(ended.id, False, False, decided.reason)]


def _goes_on(now: Mapping[m.Channel, Collective], before: Mapping[m.Channel, Collective]) -> bool:
    """All members' rings go on from what they have, or none may: see `protocol.ring`."""
    for channel, collective in now.items():
        earlier = before.get(channel)
        due = earlier.attempt + 1 if isinstance(earlier, Ring) else 0
        if isinstance(collective, Ring) and collective.attempt != due:
            return False
    return True


def _check_role(message: OfRound, from_rank: int, rank: int) -> None:
    """A member votes at the root, the root decides; at once, not only when the round is open."""
    match message:
        case m.Vote():
            check_vote(from_rank, rank)
        case m.Decision():
            check_decision(from_rank, rank)


def _check_reach(there: m.RoundId, here: m.RoundId, from_rank: int) -> None:
    """A round that nobody can be at cannot be meant honestly, and would be held for ever."""
    if there.step > here.step + MAX_STEPS_AHEAD or there.attempt >= ABORTS_BEFORE_FREEZE:
        raise RemoteProtocolError(
            f"rank {from_rank} is at step {there.step}, attempt {there.attempt}; nobody can be past step "
            f"{here.step + MAX_STEPS_AHEAD} while this member is at {here.step}, nor past attempt "
            f"{ABORTS_BEFORE_FREEZE - 1}",
            remedy=_REMEDY,
        )


def _check_room(from_rank: int, messages: int, nbytes: int) -> None:
    if messages > MAX_HELD_MESSAGES or nbytes > MAX_HELD_BYTES:
        raise RemoteProtocolError(
            f"rank {from_rank} has sent {messages} early messages of {nbytes} bytes; at most "
            f"{MAX_HELD_MESSAGES} and {MAX_HELD_BYTES} are held for one member",
            remedy=_REMEDY,
        )


def _is_foreign(there: m.RoundId, here: m.RoundId) -> bool:
    return (there.term, there.generation) != (here.term, here.generation)


def is_too_stale(messages: int) -> bool:
    """The defence: reading what nobody needs costs as much as reading what counts."""
    return messages > MOST_STALE


def _is_over(there: m.RoundId, here: m.RoundId) -> bool:
    return there < here


def _proves_commit(from_rank: int) -> bool:
    """Commit rule 3: whoever is at the next step knows this one's verdict.  The root decided it, others
    have it from the root: from them it is hearsay, and could make one member apply alone."""
    return from_rank == ROOT
