"""A worker's side of the protocol: its place in the group, from joining to the end of the run.

Decides when the trainer may begin a step, what the coordinator and the peers are told, and when an
update counts as applied.  Never opens a payload, never touches a socket, a clock, a tensor or a
thread.  The open step is `protocol.attempts`; events and effects are `protocol.member_io`.

             Enter            View: verdict, roster        state and edges are there
    APART ----------> APART ------------------> FORMING ----------------------> FORMING (READY sent)
                                                   ^                                |  Start
                                          View     |                                v
                                        FROZEN <---+----------- Freeze --------- RUNNING
                                                                                 |  ^
                                                             Submit -> Attempts  |  | Committed
                                                                                 +--+
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gridtrain.config import Deadlines
from gridtrain.errors import JoinRefused, LocalProtocolError, RemoteProtocolError
from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import AttemptEffect, Attempts, Committed, Offended, Seat
from gridtrain.protocol.handover import Handover
from gridtrain.protocol.means import Means
from gridtrain.protocol.member_io import (
    Arrive,
    AskMean,
    Broke,
    CaughtUp,
    Compare,
    Depart,
    Dial,
    Discard,
    Donating,
    DonorDown,
    DonorUp,
    EdgeDown,
    EdgeUp,
    Effect,
    Enter,
    Event,
    Extend,
    Feed,
    Follow,
    GiveState,
    HandOn,
    HangUp,
    Heard,
    Inherited,
    Keeping,
    LastCall,
    Loading,
    MeanKnown,
    Note,
    Offence,
    PassOn,
    Post,
    Probe,
    Probed,
    Pulse,
    PutAside,
    Refuted,
    Reload,
    Resolve,
    Restored,
    Sealed,
    SendCopy,
    Stage,
    Stop,
    Strayed,
    Submit,
    TakeBlock,
    TakeCopy,
    TakeDigest,
    Withdraw,
)
from gridtrain.protocol.names import spoken
from gridtrain.protocol.passing_on import PassingOn
from gridtrain.protocol.recutting import cuts_of
from gridtrain.protocol.round import HISTORY_START, ROOT, Failed, Moved, Prepared, extend_history
from gridtrain.protocol.routes import relay_of
from gridtrain.protocol.unmet import Unmet
from gridtrain.protocol.wakefulness import Wakefulness, no_earlier

MAX_EXPECTED = 512
MAX_REASON = 200
_SAYS_ITS_TERM = (m.Welcome, m.Freeze, m.Roster, m.View, m.Start)
"""Of an old coordinator these are seen to be old by themselves; all else counts by its last Welcome."""


_OF_FOLLOWERS = (m.ImageAsk, m.BlocksAsk, m.UpdatesAsk)
_OF_DONORS = (m.ImageTable, m.ImageBlock, m.Update, m.NoImage)
_OF_FOLLOWING = (*_OF_FOLLOWERS, *_OF_DONORS)


class MemberCore:
    """See the module's text.

    Args:
        me: this worker's key.
        coordinator: the coordinator's key.
        join: the Join message to introduce ourselves with.
        deadlines: see `gridtrain.config.Deadlines`.

    Attributes:
        applied: the last step applied here; -1: none.
        history: chained digest of all updates applied.
        synced: this worker holds the state that `applied` and `history` name, of its seat's stage.
        run_state: what the coordinator last said of the run, and why.
        reach: an address at which the coordinator got through to us; empty: nobody from outside can;
            None: it has not said yet.
    """

    def __init__(self, me: m.PeerId, coordinator: m.PeerId, join: m.Join, deadlines: Deadlines) -> None:
        self.me = me
        self.coordinator = coordinator
        self.stage = Stage.APART
        self.term = 0
        self.applied = -1
        self.history = HISTORY_START
        self.ledger = m.LedgerState()
        self.synced = False
        self._state_blocks = m.Span(0, 1)  # that this worker's state is of, where it is synced
        self._memory: m.Span | None = None  # of which blocks it has the state, where its seat is of others
        self._aside: m.Held | None = None  # what of that is being written to the disk
        self._unwritten = False  # and cannot be: it stays in memory until the coordinator has planned anew
        self._kept: tuple[m.Held, ...] = ()  # checkpoints of stages on its disk
        self._reloading: tuple[m.Held, ...] = ()
        self._state_asked: dict[m.PeerId, m.StateRequest] = {}  # to be answered once it is synced
        self._pieces_asked: dict[m.PeerId, m.PieceAsk] = {}  # to be answered once it is on the disk
        self._touched = False  # the model is not the one any more that the script made
        self.welcomed = False
        self._fenced = False  # whoever answers for the coordinator does so in a term that is over
        self.run_state = ("", "")
        self.reach: str | None = None
        self._join = join
        self._deadlines = deadlines
        self._wakefulness = Wakefulness()
        self._setup: m.Setup | None = None
        self._about: m.About | None = None
        self._edges: Callable[..., frozenset[int]] = lambda rank, world_size: frozenset()
        self._choices: Mapping[str, Callable[[int, int], frozenset[int]]] = {}
        self._needed_in: tuple[Seat | None, set[int]] = None, set()
        self._attempts: Attempts | None = None  # of the generation that this worker is in
        self._means: Means | None = None
        self.first_step = 0  # of this generation
        self._handover = Handover()
        self._pages: dict[int, m.Roster] = {}
        self._early_requests: dict[m.PeerId, m.StateRequest | m.PieceAsk] = {}
        self._up: set[m.PeerId] = set()
        self._dialled: dict[m.PeerId, str] = {}  # connected or not: the loop keeps trying until HangUp
        self._expected: dict[m.PeerId, int] = {}  # who may measure its link to us, since which generation
        self._offenders: set[m.PeerId] = set()  # of this generation
        self._donors: tuple[m.PeerId, ...] = ()  # this worker follows them
        self._unmet = Unmet(deadlines.route_s)
        self._followers: frozenset[m.PeerId] = frozenset()
        self._caught: m.Caught | None = None
        self._formed_s = math.inf  # when the way into the generation began; infinite: NoRoute is sent
        self._passing = PassingOn()
        self._ready_sent = False
        self._stall_told = False
        self._edges_down_since_s = 0.0
        self._step_began_s: float | None = None
        self._usual_step_s: float | None = None
        self._beats = 0
        self._progress = 0

    # -- what the loop and the trainer ask -----------------------------------------------------

    @property
    def seat(self) -> Seat | None:
        """This worker's place in the latest generation that named it."""
        return self._attempts.seat if self._attempts is not None else None

    @property
    def generation(self) -> int:
        return self.seat.generation if self.seat is not None else 0

    @property
    def awaits_choice(self) -> bool:
        """Which exchange its round uses is not chosen yet."""
        seat = self.seat
        return bool(self._choices) and seat is not None and not seat.exchange and "" not in self._choices

    @property
    def step(self) -> int:
        """The step that is open or comes next."""
        return self.applied + 1

    @property
    def acquaintances(self) -> frozenset[m.PeerId]:
        """Whom this worker deals with: the coordinator, the members, and who was announced; nobody else."""
        members = {member.peer for member in self.seat.roster} if self.seat is not None else set()
        near = {self.coordinator, *self._donors} | self._followers
        return frozenset((near | members | set(self._expected)) - self._offenders)

    @property
    def next_round(self) -> m.RoundId | None:
        """The round that the trainer may submit its part to now; None: wait."""
        mine = self._attempts
        if self.stage is not Stage.RUNNING or mine is None or mine.round is not None:
            return None
        over = mine.stuck or self.finished or self._handover.leaving
        return None if over or self._missing_edges() else mine.next_round

    @property
    def takes_over(self) -> bool:
        """Another member may still hand its residual to this one."""
        return not self._handover.refusing

    @property
    def touched(self) -> bool:
        """The model is not the one any more that the script made, or a checkpoint had."""
        return self._touched

    @property
    def finished(self) -> bool:
        """The ledger has ended the run, as far as this worker has applied it."""
        return self.synced and self._setup is not None and ledger.finished(self._setup.ledger, self.ledger)

    @property
    def paused(self) -> str:
        """Why nothing can go on until the coordinator is back (rule 10); empty: training can."""
        if self.coordinator in self._up or not self.term:
            return ""
        if self.stage is not Stage.RUNNING:
            return "the next generation needs the coordinator"
        missing = self._missing_edges()
        if missing:
            return f"{len(missing)} peers are gone, and only the coordinator can plan without them"
        return (
            "a step cannot be committed, and only the coordinator can freeze it" if self._stall_told else ""
        )

    @property
    def open_round(self) -> m.RoundId | None:
        """The round that the trainer has submitted to and that is not decided here."""
        return self._attempts.round.id if self._attempts and self._attempts.round else None

    @property
    def doomed(self) -> m.RoundId | None:
        """The open round, if it cannot be committed from here: voted NO on, or not at all before a FREEZE."""
        mine = self._attempts
        if mine is None or mine.round is None or mine.round.voted is True:
            return None
        lost = self.stage is not Stage.RUNNING or mine.round.voted is False
        return mine.round.id if lost else None

    @property
    def due_round(self) -> m.RoundId | None:
        """The round that comes next in this generation, whether or not it can begin now."""
        return self._attempts.next_round if self._attempts is not None else None

    def held_bytes(self, peer: m.PeerId) -> int:
        """What of the peer's messages is held for a round to come."""
        return self._attempts.held_bytes(peer) if self._attempts is not None else 0

    def positions(self) -> tuple[tuple[m.Span, ...], int]:
        """What of the open step this member works on, and the samples of the whole step.

        The members of a pipeline work on what all of them hold, first stage first: the same samples.
        """
        assignment, seat = self.assignment(), self.seat
        assert seat is not None and self._setup is not None
        mine: tuple[m.PeerId, ...] = (self.me,)
        if self._is_pipeline:
            line = seat.seats.pipeline(seat.seats.replica_of(seat.rank))
            mine = tuple(seat.roster[rank].peer for rank in line)
        held = tuple(span for peer in mine for span in assignment.get(peer, ()))
        return held, sum(ledger.samples(spans) for spans in assignment.values())

    def assignment(self) -> dict[m.PeerId, tuple[m.Span, ...]]:
        """Who holds which positions of the open step: a pure function of replicated state."""
        if self._setup is None or self.seat is None:
            raise LocalProtocolError("positions are asked for before there is a generation")
        return ledger.assign(self._setup.ledger, self.ledger, self.seat.shares)

    @property
    def patience_s(self) -> float:
        """How long a member may show neither vote nor sign of life."""
        usual_s = self._usual_step_s
        if usual_s is None:
            return self._deadlines.first_step_s
        return self._deadlines.patience_floor_s + self._deadlines.patience_factor * usual_s

    @property
    def deadline_s(self) -> float:
        """When `tick` has something to do."""
        mine = self._attempts
        if self.seat is None:
            return self._unmet.deadline_s(self._donors, self._up)
        if self.stage is Stage.FORMING:
            route_s = self._formed_s + self._deadlines.route_s if self._missing_edges() else math.inf
            return route_s if self.synced else min(route_s, self._passing.deadline_s)
        if self.stage is not Stage.RUNNING or mine is None or self._stall_told:
            return math.inf
        if mine.stuck and mine.rank == ROOT:
            return -math.inf
        if self._missing_edges():
            return self._edges_down_since_s + 2 * self._deadlines.regreet_s
        return mine.deadline_s

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Raises `RemoteProtocolError` when a peer's message breaks the protocol."""
        self._second_chance(now_s)
        match event:
            case Heard(peer, message, nbytes):
                return self._heard(peer, message, nbytes, now_s)
            case EdgeUp(peer):
                return self._edge_up(peer, now_s)
            case EdgeDown(peer, reason):
                return self._edge_down(peer, reason, now_s)
            case Enter(setup, edges, about, choices):
                self._setup, self._edges, self._about, self._choices = setup, edges, about, choices
                self._kept = setup.kept
                self._needed_in = None, set()
                if setup.held is not None and self.seat is None:
                    held = setup.held
                    self.applied, self.history, self.ledger = held.applied, held.history, held.ledger
                    self.synced = True
                return self._introduction() if self.welcomed else []
            case Submit():
                return self._submit(event, now_s)
            case Extend():
                return self._running(lambda mine: mine.extend(event, now_s), now_s)
            case Sealed(digest):
                return self._running(lambda mine: mine.advance(Prepared(digest), now_s), now_s)
            case Broke(reason):
                return self._running(lambda mine: mine.advance(Failed(reason), now_s), now_s)
            case Offence(peer, reason):
                return self._offence(peer, reason, now_s)
            case Restored(term, generation):
                self._touched = True
                if self.seat is None or (term, generation) != (self.seat.term, self.seat.generation):
                    return []  # a state of an earlier generation: the one that counts is on its way
                self.synced, self._donors, self._caught = True, (), None
                self._state_blocks, self._reloading, self._memory = self.seat.blocks, (), None
                return [*self._give_late(), *self._maybe_ready()]
            case Refuted(generation):
                due = self.stage is Stage.FORMING and generation == self.generation and not self.synced
                return self._go_round("the state that came is another one") if due else []
            case Keeping(states, unwritten):
                self._unwritten = self._unwritten or (unwritten is not None and unwritten == self._aside)
                return self._keep(states)
            case Pulse():
                return self._pulse(event, now_s)
            case AskMean(step, index, value):
                if self._means is None or self.stage is not Stage.RUNNING:
                    return [MeanKnown(None)]
                return self._means.ask((step, index), value)
            case Compare(step, digest):
                if self.seat is None or self.stage is not Stage.RUNNING or step != self.applied:
                    return []
                here = self.seat
                return [Post(self.coordinator, m.Fingerprint(here.term, here.generation, step, digest))]
            case Loading():
                self._overwritten()
                return []
            case CaughtUp(applied, history):
                self._overwritten()
                self._caught = m.Caught(applied, history)
                return [Post(self.coordinator, self._caught)] if self.welcomed and self.seat is None else []
            case Strayed(reason):
                self._donors, self._caught = (), m.Caught(-1, b"")
                note = Note("strayed", {"reason": reason})
                if self.seat is None:
                    return [note, Post(self.coordinator, self._caught)]
                return [note, *self._ask_state()]
            case Withdraw():
                voted = self._running(lambda mine: mine.advance(Failed("this worker leaves"), now_s), now_s)
                mine = self._attempts
                if mine is None or mine.round is None or mine.round.voted is not False:
                    return voted
                # Without our YES it cannot be committed: there is no need to wait for the root's trainer.
                return [*voted, Resolve(mine.round.id, False, False, "this worker leaves")]
            case LastCall():
                self._handover.refusing = True
                return []
            case HandOn(pieces):
                mine = self._attempts
                free = mine is not None and (mine.round is None or mine.round.voted is False)
                seat = self.seat if free and self.stage is Stage.RUNNING else None
                return self._handover.begin(pieces, seat, self._up, self.applied, self.history)
            case Inherited(peer):
                return self._handover.complete(self.seat, peer)
            case Probed(rtt_s):
                return [Post(self.coordinator, m.Links(rtt_s))]
            case Depart(reason, pausing):
                return [Post(self.coordinator, m.Pausing(reason) if pausing else m.Leave(reason))]

    def tick(self, now_s: float) -> list[Effect]:
        """To be called when `deadline_s` has passed: tell the coordinator what does not move."""
        self._second_chance(now_s)
        mine = self._attempts
        if mine is None:
            return self._not_met(now_s)
        if now_s < self.deadline_s:
            return []
        missing = self._missing_edges()
        if self.stage is Stage.FORMING:
            late = not self.synced and now_s >= self._passing.deadline_s
            asked = self._go_round("nothing came") if late else []
            by_now = missing and now_s >= self._formed_s + self._deadlines.route_s
            return asked + (self._no_route(mine.seat, missing) if by_now else [])
        if mine.stuck and mine.rank == ROOT:
            reason = f"attempts at step {self.step} abort: {mine.why}"
            return self._stalled(mine.suspects, mine.silent_s, reason)
        if missing:
            names = ", ".join(p.hex()[:8] for p in missing)
            relayed = [p for p in missing if relay_of(self._way(mine.seat, p)) is not None]
            other_ways = self._no_route(mine.seat, relayed) if relayed else []
            return [*other_ways, *self._stalled(missing, 0.0, f"no connection to {names}")]
        if mine.rank != ROOT:
            reason = f"no decision on step {self.step} for {self.patience_s:.1f} s"
            return self._stalled((mine.seat.roster[ROOT].peer,), self.patience_s, reason)
        return self._settled(mine.tick(now_s), now_s)

    def _second_chance(self, now_s: float) -> None:
        """If this worker itself stood still, nobody is to blame for a silence that it slept through."""
        if not self._wakefulness.is_late(now_s):
            self._wakefulness.called(now_s)
            return
        limits = self._deadlines
        if not self._wakefulness.overslept(self.deadline_s, now_s):
            return
        until_s = now_s + 2 * limits.beat_s
        if self._attempts is not None:
            self._attempts.second_chance(until_s)
        self._passing.second_chance(until_s)
        self._unmet.second_chance(until_s)
        self._formed_s = no_earlier(self._formed_s, limits.route_s, until_s)
        self._edges_down_since_s = no_earlier(self._edges_down_since_s, 2 * limits.regreet_s, until_s)

    def _heard(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[Effect]:
        if peer == self.coordinator:
            return self._from_coordinator(message, now_s)
        if peer in self._offenders:
            return []  # read before it was hung up on
        if isinstance(message, _OF_FOLLOWING):
            asked = peer in (self._followers if isinstance(message, _OF_FOLLOWERS) else self._donors)
            if asked:
                return [Feed(peer, message)]
            return [Note("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]
        if isinstance(message, m.StateRequest | m.PieceAsk) and message.generation > self.generation:
            self._early_requests[peer] = message  # the VIEW reached the joiner first
            return []
        mine = self._attempts
        if mine is None or mine.seat.rank_of(peer) is None:
            return [Note("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]
        match message:
            case m.Data() | m.Vote() | m.Decision():
                # FORMING: held, since a peer may hear START first.  FROZEN: neither vote nor apply (rule 5).
                if self.stage is Stage.FROZEN:
                    return []
                return self._settled(mine.receive(peer, message, nbytes, now_s), now_s)
            case m.Progress():
                mine.progressed(peer, message, now_s)
                return []
            case m.MeanAsk() | m.MeanTell():
                return self._means.heard(peer, message) if self._means is not None else []
            case m.HandOver():
                return self._handover.piece(mine.seat, peer, message, self.applied, self.synced)
            case m.TakenOver():
                at = self.applied, self.history
                return self._handover.answered(peer, message, mine.seat, self._up, at)
            case m.StateRequest(term, generation):
                current = (term, generation) == (mine.seat.term, mine.seat.generation)
                return self._give_state(mine.seat, peer, message) if current else []
            case m.PieceAsk(term, generation):
                current = (term, generation) == (mine.seat.term, mine.seat.generation)
                return self._give_piece(mine.seat, peer, message) if current else []
            case m.StateBlock(term, generation):
                current = (term, generation) == (mine.seat.term, mine.seat.generation)
                if not current or self.synced or peer not in (self.donor, self._passing.giver):
                    return []
                if not self._passing.takes(peer, message.index, now_s):
                    return []
                if message.index == message.total - 1:
                    self._memory, self._touched = None, True  # the trainer may have begun to load
                return [TakeBlock(peer, message)]
            case m.StateDigest(term, generation, digest):
                current = (term, generation) == (mine.seat.term, mine.seat.generation)
                if not current or peer != self.donor:
                    return []
                self._passing.moved(now_s)
                return [TakeDigest(generation, digest)]
            case m.Copy(term, generation):
                current = (term, generation) == (mine.seat.term, mine.seat.generation)
                return self._take_copy(mine.seat, peer, message) if current else []
            case _:
                name = type(message).__name__
                raise RemoteProtocolError(f"{name} from a member; only the coordinator may send it")

    # -- the coordinator -----------------------------------------------------------------------

    def _from_coordinator(self, message: m.Message, now_s: float) -> list[Effect]:
        match message:
            case m.Welcome(term) if term < self.term:
                self._fenced = True
                return [Note("old_coordinator", {"term": term, "ours": self.term}), *self._seated()]
            case _ if self._fenced and not isinstance(message, _SAYS_ITS_TERM):
                return []  # whatever it says, it is not the coordinator any more
            case m.Rejoin() if not self.welcomed:
                return []  # the Join is on its way
            case m.Rejoin(reason):
                self.welcomed = False
                return [Note("rejoin", {"reason": reason}), self._joins()]
            case m.Welcome(term):
                self.term = max(self.term, term)
                self.welcomed, self._stall_told, self._fenced = True, False, False
                return [*(self._seated() if self.seat is not None else []), *self._repeat()]
            case m.Refused(code, reason, remedy):
                return [Stop(JoinRefused(code, reason, remedy=remedy))]
            case m.Reach(address):
                self.reach = address
                return [Note("reach", {"address": address})]
            case m.Expect(peers):
                return self._expect(peers)
            case m.Drifted():
                return self._drifted(message)
            case m.Fetch(term, donors):
                return self._follow(term, donors, now_s)
            case m.Donate(term, step, to):
                if term < self.term or self.seat is None:
                    return []
                self._followers = frozenset(to) - {self.me}
                return [*self._let_go(), Donating(step, to)]
            case m.Admitted(probe):
                return [*self._expect(probe), Probe(probe)]
            case m.Freeze():
                return self._freeze(message)
            case m.Roster(term, generation):
                if term >= self.term and generation > self.generation:
                    self._pages[message.page] = message
                return []
            case m.View():
                return self._view(message, now_s)
            case m.Spared():
                return self._spared(message)
            case m.Start(term, generation):
                return self._start(term, generation, now_s)
            case m.RunState(state, reason):
                self.run_state = (state, reason)
                return [Note("run_state", {"state": state, "reason": reason})]
            case m.BeatReply():
                return []
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} from the coordinator")

    def _joins(self) -> Post:
        join = replace(self._join, again=self.term > 0, generation=self.generation)
        return Post(self.coordinator, join)

    def _introduction(self) -> list[Effect]:
        if self._setup is None:
            return []
        about: list[Effect] = [Post(self.coordinator, self._about)] if self._about is not None else []
        begins = b"" if self._touched else self._setup.begins
        return [*about, Post(self.coordinator, replace(self._setup, kept=self._kept, begins=begins))]

    def _repeat(self) -> list[Effect]:
        """What the coordinator may have missed while the connection was broken."""
        effects = self._introduction()
        if self._caught is not None and self.seat is None:
            effects.append(Post(self.coordinator, self._caught))
        if self.stage is Stage.FORMING and self._ready_sent:
            effects.append(self._ready())
        missing = self._missing_edges()
        if self.seat is not None and self.stage is Stage.FORMING and missing and math.isinf(self._formed_s):
            effects += self._no_route(self.seat, missing)
        return effects + (self._maybe_finished() if self.stage is Stage.RUNNING else [])

    def _seated(self) -> list[Effect]:
        """Where this worker is, for a coordinator whose journal may be older than that (rule 11)."""
        if not self.term:
            return []
        roster = self.seat.roster if self.seat is not None else ()  # in none: the term alone may be news
        members = tuple((member.peer, member.share) for member in roster)
        cuts = self.seat.cuts if self.seat is not None else ()
        return [Post(self.coordinator, m.Seated(self.term, self.generation, members, cuts))]

    def _freeze(self, freeze: m.Freeze) -> list[Effect]:
        term, generation, reason = freeze.term, freeze.generation, freeze.reason
        if term < self.term or generation < self.generation:
            return []
        self._offenders |= set(freeze.without) - {self.me}
        gone = self._let_go()
        if self.stage in (Stage.RUNNING, Stage.FORMING):
            self.stage = Stage.FROZEN
        given_up = self._means.give_up() if self._means is not None else []
        mine = self._attempts
        prepared = mine.prepared if mine is not None else None
        report = m.Report(
            term=term,
            generation=generation,
            synced=self.synced or self._memory is not None,
            applied=self.applied,
            history=self.history,
            ledger=self.ledger,
            prepared=prepared.id if prepared is not None else None,
            digest=prepared.digest if prepared is not None else b"",
            skip=mine.skip if mine is not None and prepared is not None else False,
            blocks=self._memory or self._state_blocks,
        )
        return [Note("frozen", {"reason": reason}), Post(self.coordinator, report), *gone, *given_up]

    def _overwritten(self) -> None:
        """By a state that this worker follows: it is not what the script made, nor what a checkpoint had."""
        self._touched = True
        if self.seat is None:
            self.synced, self.applied, self.history = False, -1, HISTORY_START
            self.ledger = m.LedgerState()

    def _follow(self, term: int, donors: Sequence[tuple[m.PeerId, str]], now_s: float) -> list[Effect]:
        """Take over the donors' state while they train on.  A member has no use for it."""
        if term < self.term:
            return []
        if self.seat is not None:  # it was a member, and what it holds is replaced when it is one again
            return [Post(self.coordinator, m.Caught(self.applied, self.history))]
        before, self._donors = self._donors, tuple(peer for peer, _ in donors)
        self._unmet.told(now_s)
        effects: list[Effect] = [] if before else [Follow()]
        effects += self._dial(donors)
        effects += [DonorDown(peer) for peer in before if peer not in self._donors]
        return effects + [DonorUp(p) for p in self._donors if p in self._up and p not in before]

    def _not_met(self, now_s: float) -> list[Effect]:
        """No donor could be reached: there may be another way."""
        peers = self._unmet.named(self._donors, self._expected, self._up, now_s)
        if not peers:
            return []
        named = ", ".join(peer.hex()[:8] for peer in self._donors)
        return [Note("no_route", {"peers": named}), Post(self.coordinator, m.NoRoute(self.term, 0, peers))]

    def _view(self, view: m.View, now_s: float) -> list[Effect]:
        if view.term < self.term or view.generation <= self.generation:
            return []
        pages = [page for _, page in sorted(self._pages.items()) if page.generation == view.generation]
        roster = tuple(member for page in pages for member in page.members)
        self._pages.clear()
        cuts = self._cuts(view)
        stages = max(1, len(cuts) - 1)
        seat = Seat(self.me, view.term, view.generation, roster, stages, view.exchange, cuts)
        if len(roster) != view.world_size or seat.rank_of(self.me) is None:
            raise RemoteProtocolError(f"VIEW of {view.world_size} came with a roster of {len(roster)}")
        if view.exchange and view.exchange not in self._choices:
            raise RemoteProtocolError(f"VIEW with the exchange {view.exchange!r}, which is none to choose")
        if len(roster) % seat.stages:
            raise RemoteProtocolError(f"VIEW of {len(roster)} members of a model in {seat.stages} stages")
        calls = spoken(self._join.name, self.seat.roster if self.seat is not None else (), roster, seat.rank)
        self._join = replace(
            self._join, name=roster[seat.rank].name
        )  # as the run calls it, should it join anew
        left_behind = self.seat is not None and self.seat.generation + 1 < view.generation and self.synced
        before = self.applied, self.history
        effects = [*calls, *self._execute_verdict(view)]
        if self._memory is not None and before == (view.applied, view.history):
            self.synced, self._state_blocks = True, self._memory  # it was not put together from that
        self._memory = self._state_blocks if self.synced and self._state_blocks != seat.blocks else None
        self.synced = self.synced and self._memory is None
        left_behind = left_behind and not self.synced
        named = view.applied >= 0 and not (roster[seat.rank].joining or self._is_pipeline)
        if named and self.seat is None and self._touched:
            return [*effects, Stop(_stale_model())]  # for its checkpoint, but the model has followed since
        effects += self._means.give_up() if self._means is not None else []
        self._attempts, self._means = Attempts(seat, view.applied + 1), Means(seat)
        self.first_step = view.applied + 1
        self.term, self.ledger, self.stage = view.term, view.ledger, Stage.FORMING
        self._stall_told = self._ready_sent = False
        self._edges_down_since_s, self._step_began_s = now_s, None
        if not self.synced:
            self.applied, self.history = view.applied, view.history  # what we shall hold once restored
            # The first generation starts from the state of the member that is not `joining`.
            begins = view.applied < 0 and not roster[seat.rank].joining
            if begins and self._touched and not self._is_pipeline:  # a stage is built anew
                return [*effects, Stop(_stale_model())]
            self.synced = begins and self._setup is not None and self._setup.held is None
            self._state_blocks = seat.blocks
            if self.synced:
                self._memory = None  # it is built anew: what it was is gone
        self._state_asked.clear()
        self._pieces_asked.clear()
        self._reloading = ()
        effects += self._put_aside(seat) + self._lacking(seat) + self._reload(seat)
        effects += self._handover.viewed(seat, view.applied, view.history, self.synced)
        fields = {"generation": view.generation, "rank": seat.rank, "of": len(roster), "reason": view.reason}
        effects.append(Note("view", fields))
        if left_behind:
            effects.append(Note("left_behind", {"step": view.applied}))
        known = {member.peer for member in roster}
        # Who was announced shortly before may still be measuring.
        self._expected = {
            peer: since
            for peer, since in self._expected.items()
            if peer not in known and since >= view.generation - 1
        }
        self._offenders.clear()
        self._formed_s = now_s
        follows = self._setup is not None and self._setup.follows and view.applied >= 0
        chained = not (self._is_pipeline or follows or self.synced)
        self._passing = PassingOn(seat, chained=chained)
        if self.synced:
            self._donors = ()
        elif self._donors:
            effects.append(Arrive(view.applied, view.history))
        effects += self._let_go() + self._dials(seat)
        early, self._early_requests = self._early_requests, {}
        for peer, request in early.items():
            effects += self._heard(peer, request, 0, now_s)
        return effects + self._ask_state() + self._maybe_ready()

    def _dials(self, seat: Seat) -> list[Effect]:
        """What is told to dial whom: the members needed, and the relays on the way to them."""
        needed = {seat.roster[rank].peer for rank in self._needed()}
        needed |= self._passing.near if self.stage is Stage.FORMING else frozenset()
        ways = {member.peer: member.address for member in seat.roster}
        relays = {relay for peer in needed if (relay := relay_of(ways[peer])) is not None}
        return self._dial([(peer, ways.get(peer, "")) for peer in sorted(needed | relays)])

    def _dial(self, peers: Sequence[tuple[m.PeerId, str]]) -> list[Effect]:
        """Whoever has no address will come, or is reached through the coordinator.

        Who is connected stays so, but for a relay: there is a better one now, or none is needed.
        """
        effects: list[Effect] = []
        for peer, address in peers:
            known = self._dialled.get(peer, "")
            stays = peer in self._up and (known == address or relay_of(known) is None)
            if address and peer not in (self.coordinator, self.me) and not stays:
                self._dialled[peer] = address
                effects.append(Dial(peer, address))
        return effects

    def _let_go(self) -> list[Effect]:
        """Of whom we do not deal with any more.

        A connection that was accepted stays until the other side lets go of it, or says something, which
        the transport's gate then cuts: closed from here alone, the other would believe in it and, back in
        the group, not dial again.
        """
        strangers = set(self._dialled) - self.acquaintances
        self._dialled = {peer: way for peer, way in self._dialled.items() if peer not in strangers}
        self._up -= strangers
        return [HangUp(peer) for peer in sorted(strangers)]

    def _expect(self, peers: Sequence[tuple[m.PeerId, str]]) -> list[Effect]:
        """Workers outside of the generation that measure their links, or whose links we measure."""
        for peer, _ in peers:
            self._expected.pop(peer, None)
            self._expected[peer] = self.generation
        for peer in list(self._expected)[:-MAX_EXPECTED]:
            del self._expected[peer]
        return self._dial(peers)

    def _way(self, seat: Seat, peer: m.PeerId) -> str:
        return next((member.address for member in seat.roster if member.peer == peer), "")

    def _no_route(self, seat: Seat, missing: Sequence[m.PeerId]) -> list[Effect]:
        """Whoever was told how to connect, and could not, says so: there may be another way."""
        self._formed_s = math.inf
        ways = {member.peer: member.address for member in seat.roster}
        tried = tuple(peer for peer in missing if ways[peer])
        if not tried:
            return []
        names = ", ".join(f"{peer.hex()[:8]} at {ways[peer]}" for peer in tried)
        return [
            Note("no_route", {"peers": names}),
            Post(self.coordinator, m.NoRoute(seat.term, seat.generation, tried)),
        ]

    def _offence(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        """Drop the peer until the next generation, and let the coordinator judge."""
        if peer == self.coordinator:
            return [Note("offence", {"peer": "the coordinator", "reason": reason})]
        text = f"peer {peer.hex()[:8]} broke the protocol: {reason}"
        self._up.discard(peer)
        self._dialled.pop(peer, None)
        if peer in self._offenders:
            return [HangUp(peer)]
        self._offenders.add(peer)
        if self._attempts is not None:
            self._attempts.forget(peer)
        effects: list[Effect] = [Note("offence", {"peer": peer.hex()[:8], "reason": reason}), HangUp(peer)]
        if peer in self._donors:
            effects.append(DonorDown(peer))
        if peer == self._passing.giver and self.stage is Stage.FORMING and not self.synced:
            effects += self._go_round("it broke the protocol")
        if self.seat is not None and self.seat.rank_of(peer) is not None:
            self._edges_down_since_s = now_s
            effects.append(Post(self.coordinator, m.Accuse(peer, reason[:MAX_REASON])))
            effects += self._running(lambda mine: mine.edge_down(text, now_s), now_s)
        return effects

    def _spared(self, view: m.Spared) -> list[Effect]:
        """In no seat of this generation: after the verdict this worker is as one that has just come."""
        if view.term < self.term or (self.seat is not None and view.generation <= self.generation):
            return []
        self.term = view.term
        effects: list[Effect] = [Note("spare", {"generation": view.generation, "reason": view.reason})]
        if self.seat is not None:
            # Told later, to one that comes with checkpoints of a life before, it may be behind these.
            effects += [*self._discard(view.applied), *self._execute_verdict(view)]
            effects += self._means.give_up() if self._means is not None else []
            self._stall_told = self._ready_sent = False
            self._reloading, self._memory, self._aside = (), None, None
            self.ledger = view.ledger
            if self.finished:  # nothing comes after it
                self.stage, self._attempts = Stage.FROZEN, Attempts(self.seat, view.applied + 1)
                return [*effects, *self._maybe_finished()]
            self.stage, self.synced, self._attempts, self._means = Stage.APART, False, None, None
            self._offenders.clear()
        return [*effects, *self._let_go()]

    def _execute_verdict(self, view: m.View | m.Spared) -> list[Effect]:
        """Bring this member to `view.applied` and `view.history`, or mark it as lacking the state."""
        mine = self._attempts
        pending = mine.round if mine is not None else None
        if mine is not None and mine.prepared is not None and view.applied == self.step:
            history = extend_history(self.history, mine.prepared.digest)
            if history == view.history:
                self.applied, self.history, self._touched = view.applied, history, True
                return [Resolve(mine.prepared.id, True, mine.skip, view.reason)]
        self.synced = self.synced and (view.applied, view.history) == (self.applied, self.history)
        return [] if pending is None else [Resolve(pending.id, False, False, view.reason)]

    def _start(self, term: int, generation: int, now_s: float) -> list[Effect]:
        seat = self.seat
        if seat is None or (term, generation) != (seat.term, seat.generation):
            return []
        if self.stage is not Stage.FORMING or term < self.term:
            return []
        if not self._ready_sent:  # all were READY, so another process with this key was, and this one is not
            return [Note("not_ready", {"generation": generation, "rank": seat.rank})]
        self.stage, self._edges_down_since_s = Stage.RUNNING, now_s
        fields = {"generation": generation, "rank": seat.rank, "of": seat.world_size}
        # Not with the VIEW: after a restart of the coordinator it may say where a generation began that is
        # long further on, and what this worker's disk holds may be of just these steps.
        return [Note("start", fields), *self._discard(self.applied), *self._maybe_finished()]

    def _maybe_finished(self) -> list[Effect]:
        if not self.finished:
            return []
        return [Post(self.coordinator, m.Finished(self.applied, self.history))]

    def _stalled(self, suspects: Sequence[m.PeerId], silent_s: float, reason: str) -> list[Effect]:
        assert self._attempts is not None
        self._stall_told = True
        open_round = self._attempts.round
        round_id = open_round.id if open_round is not None else self._attempts.next_round
        stalled = m.Stalled(round_id, tuple(suspects), silent_s, reason)
        return [Note("stalled", {"reason": reason}), Post(self.coordinator, stalled)]

    def _drifted(self, drifted: m.Drifted) -> list[Effect]:
        """What this worker holds is no state of this run any more; another generation gives it anew."""
        here = self.seat
        if here is None or (drifted.term, drifted.generation) != (here.term, here.generation):
            return []
        self.synced = False
        return [Note("drifted", {"step": drifted.step})]

    @property
    def compares_next(self) -> bool:
        """The step that comes next is followed by a comparison: newcomers have just entered, or all began
        alike, by what they say themselves."""
        here = self.seat
        if here is None or self.step != self.first_step:
            return False
        begins = self.first_step == 0 and not self._is_pipeline and here.world_size > 1
        return begins or any(x.joining for x in here.roster)

    # -- the way into a generation: state and edges ------------------------------------------------

    @property
    def _is_pipeline(self) -> bool:
        return self._setup is not None and self._setup.stages > 1

    def _cuts(self, view: m.View) -> tuple[int, ...]:
        """Where this generation's stages begin; (): it is in one piece.  Raises `RemoteProtocolError`."""
        if self._setup is None or not self._is_pipeline:
            return ()
        defined = cuts_of(self._setup)
        cuts = view.cuts or defined
        ascending = cuts[0] == 0 and all(a < b for a, b in pairwise(cuts))
        if len(cuts) < 2 or not ascending or cuts[-1] != defined[-1]:
            raise RemoteProtocolError(f"VIEW of a model of {defined[-1]} blocks, cut at {list(cuts)[:8]}")
        return cuts

    def _keep(self, states: tuple[m.Held, ...]) -> list[Effect]:
        """The disk holds something else now; if what was to be loaded is gone, a donor may give it."""
        before, self._kept = self._kept, states
        lost = not set(self._reloading) <= set(states)
        if self._aside is not None and self._on_disk(self._aside.blocks) is not None:
            self._aside = None
        effects = self._tell_kept()
        begun = self._ready_sent or self.stage is Stage.FORMING  # else the VIEW may be an old one, see _start
        if self.seat is not None and self.synced and begun:  # what was being written as the group went back
            effects += self._discard(self.applied)
        effects += self._send_copy([held for held in self._kept if held not in before])
        if lost:
            self._reloading = ()
            effects += self._ask_state()
        seat = self.seat
        if seat is not None and self.stage is Stage.FORMING:
            asked, self._pieces_asked = self._pieces_asked, {}
            effects += [told for p, request in asked.items() for told in self._give_piece(seat, p, request)]
            if not (self._reloading or seat.roster[seat.rank].joining):
                effects += self._reload(seat)
        return effects

    def _send_copy(self, new: Sequence[m.Held]) -> list[Effect]:
        """A dead disk alone must not lose a stage: our latest checkpoint goes to the next stage's too."""
        seat = self.seat
        if not self._is_pipeline or seat is None or self.stage is not Stage.RUNNING:
            return []
        own = [held for held in new if held.blocks == seat.blocks and held.applied <= self.applied]
        if not own:
            return []
        keeper = seat.roster[seat.seats.keeper(seat.rank)].peer
        latest = max(own, key=lambda held: held.applied)
        return [SendCopy(keeper, seat.term, seat.generation, latest)] if keeper in self._up else []

    def _take_copy(self, seat: Seat, peer: m.PeerId, block: m.Copy) -> list[Effect]:
        """Raises `RemoteProtocolError` for a stage that is not ours to keep."""
        owner, rank, held = seat.seats.kept_for(seat.rank), seat.rank_of(peer), block.held
        at = self.applied, self.history
        if rank is not None and (held.blocks, rank) in seat.pieces and (held.applied, held.history) == at:
            known = seat.piece_digest(held.blocks, rank)
            if known and held.digest != known:
                raise RemoteProtocolError(
                    f"rank {rank} sent a checkpoint of blocks {held.blocks.start} to {held.blocks.stop - 1} "
                    f"with the digest {held.digest.hex()[:12]}, known is {known.hex()[:12]}"
                )
            return [TakeCopy(peer, block)]
        blocks = seat.blocks_of(seat.seats.stage_of(owner))
        if not self._is_pipeline or rank != owner or held.blocks != blocks:
            raise RemoteProtocolError(
                f"rank {rank} sent a checkpoint of blocks {held.blocks.start} to {held.blocks.stop - 1}; "
                f"rank {seat.rank} keeps those of rank {owner} alone"
            )
        if block.held.applied > self.applied + 1:
            raise RemoteProtocolError(
                f"rank {owner} sent a checkpoint of step {block.held.applied + 1}; {self.step} is open here"
            )
        return [TakeCopy(peer, block)]

    def _discard(self, applied: int) -> list[Effect]:
        """Nothing after the last committed step is of this history: the group went back beyond it."""
        kept = tuple(held for held in self._kept if held.applied <= applied)
        if len(kept) == len(self._kept):
            return []
        self._kept = kept
        return [Discard(applied), *self._tell_kept()]

    def _on_disk(self, blocks: m.Span) -> m.Held | None:
        """Our checkpoint of these blocks of the state with which this generation begins."""
        at = blocks, self.applied, self.history
        return next((held for held in self._kept if held.is_of(*at)), None)

    def _put_aside(self, seat: Seat) -> list[Effect]:
        """What is in memory alone, and others or we ourselves put a stage of another cut together from."""
        blocks, self._aside, self._unwritten = self._memory, None, False
        wanted = {piece for member in seat.roster for piece in member.pieces}
        if blocks is None or (blocks, seat.rank) not in wanted or self._on_disk(blocks) is not None:
            return []
        self._aside = m.Held(self.applied, self.history, self.ledger, blocks)
        return [PutAside(self._aside)]

    def _lacking(self, seat: Seat) -> list[Effect]:
        """A piece that is to come from here is not here: the coordinator has to plan without it."""
        wanted = {blocks for x in seat.roster for blocks, rank in x.pieces if rank == seat.rank}
        coming = self._aside.blocks if self._aside is not None else None
        if all(blocks == coming or self._on_disk(blocks) is not None for blocks in wanted):
            return []
        return self._tell_kept()

    def _tell_kept(self) -> list[Effect]:
        """Not before it is known whether what is put aside is there: else it would be planned without."""
        if not self.welcomed or (self._aside is not None and not self._unwritten):
            return []
        return [Post(self.coordinator, m.Kept(self._kept, self.generation))]

    def _reload(self, seat: Seat) -> list[Effect]:
        """Sent by nobody: it is on our disk, or comes there from those who have it, one after the other."""
        if not self._is_pipeline or self.synced or self._aside is not None:
            return []
        wanted = seat.pieces or ((seat.blocks, seat.rank),)
        found = [held for blocks, _ in wanted if (held := self._on_disk(blocks)) is not None]
        if len(found) == len(wanted):
            self._reloading, self._memory = tuple(found), None  # the trainer may have begun to load
            return [Reload(seat.term, seat.generation, self._reloading, seat.blocks)]
        for blocks, rank in seat.pieces:
            peer = seat.roster[rank].peer if rank < seat.world_size else self.me
            if self._on_disk(blocks) is None and peer != self.me:
                asks = Post(peer, m.PieceAsk(seat.term, seat.generation, blocks))
                return [asks] if peer in self._up else []
        return []

    def _give_piece(self, seat: Seat, peer: m.PeerId, asked: m.PieceAsk) -> list[Effect]:
        """A checkpoint that another member needs for its stage.  Raises `RemoteProtocolError`."""
        rank = seat.rank_of(peer)
        if rank is None or (asked.blocks, seat.rank) not in seat.roster[rank].pieces:
            blocks = f"{asked.blocks.start} to {asked.blocks.stop - 1}"
            raise RemoteProtocolError(f"rank {rank} asked for blocks {blocks}, which it is to get elsewhere")
        held = self._on_disk(asked.blocks)
        if held is None:
            self._pieces_asked[peer] = asked
            return []
        return [SendCopy(peer, seat.term, seat.generation, held, awaited=True)]

    def _give_state(self, seat: Seat, peer: m.PeerId, asked: m.StateRequest) -> list[Effect]:
        """What a joining member needs: our state, later if we have none yet, or a checkpoint of its stage."""
        rank = seat.rank_of(peer)
        stage = seat.seats.stage_of(rank) if rank is not None else 0
        kept = self._on_disk(seat.blocks_of(stage)) if stage != seat.stage else None
        if stage != seat.stage and kept is None:
            return [Note("no_such_stage", {"stage": stage, "peer": peer.hex()[:8]}), *self._tell_kept()]
        if peer == self._passing.next and not asked.digest and seat.roster[seat.rank].joining:
            return [PassOn(peer, seat.term, seat.generation, asked.have)]
        if kept is None and not self.synced:
            self._state_asked[peer] = asked
            return []
        return [GiveState(peer, seat.term, seat.generation, asked.whole, kept, asked.have, asked.digest)]

    def _give_late(self) -> list[Effect]:
        asked, self._state_asked = self._state_asked, {}
        seat = self.seat
        if seat is None or not self._is_pipeline:
            return []
        return [told for peer, request in asked.items() for told in self._give_state(seat, peer, request)]

    def _donor(self, seat: Seat) -> int | None:
        """The rank that the coordinator chose, else the lowest that holds the state (of our stage)."""
        if self._is_pipeline:
            mine = seat.roster[seat.rank]
            if mine.pieces:
                return None
            group = seat.seats.group(seat.stage)
            lowest = next((rank for rank in group if not seat.roster[rank].joining), None)
            return mine.donor if 0 <= mine.donor < seat.world_size else lowest
        named = (member.donor for member in seat.roster if member.joining)
        holders = (rank for rank, member in enumerate(seat.roster) if not member.joining)
        return next((rank for rank in named if 0 <= rank < seat.world_size), next(holders, None))

    @property
    def donor(self) -> m.PeerId | None:
        """Who gives this member the state that it lacks."""
        rank = self._donor(self.seat) if self.seat is not None and not self.synced else None
        return self.seat.roster[rank].peer if self.seat is not None and rank is not None else None

    def _needed(self) -> set[int]:
        """Ranks this member must be connected to: its exchange's, the root, and who gives the state."""
        seat = self.seat
        if seat is None:
            return set()
        if self._needed_in[0] is seat:  # asked for several times with each message
            return self._needed_in[1]
        if self._is_pipeline:
            self._needed_in = seat, self._needed_in_stages(seat)
            return self._needed_in[1]
        centres = {ROOT, self._donor(seat)} - {None}
        edges: Callable[..., frozenset[int]] = self._choices.get(seat.exchange, self._edges)
        needed = set(edges(seat.rank, seat.world_size)) | {rank for rank in centres if rank is not None}
        if seat.rank in centres:
            needed = set(range(seat.world_size))
        self._needed_in = seat, needed - {seat.rank}
        return self._needed_in[1]

    def _needed_in_stages(self, seat: Seat) -> set[int]:
        """The exchange's ranks, our neighbours in the pipeline (as a ring: the ends keep each other's
        checkpoints), the root, our donor, and whose we are."""
        if seat.rank == ROOT:
            return set(range(seat.world_size)) - {ROOT}
        near: set[int | None] = {ROOT, seat.seats.keeper(seat.rank), seat.seats.kept_for(seat.rank)}
        if seat.roster[seat.rank].joining:
            near.add(self._donor(seat))
        near |= {rank for rank, member in enumerate(seat.roster) if member.donor == seat.rank}
        near |= {rank for _, rank in seat.pieces if rank < seat.world_size}
        mine = seat.rank
        near |= {r for r, member in enumerate(seat.roster) if any(rank == mine for _, rank in member.pieces)}
        edges = self._edges(seat.rank, seat.world_size, seat.cuts)
        return (set(edges) | {rank for rank in near if rank is not None}) - {seat.rank}

    def _missing_edges(self) -> tuple[m.PeerId, ...]:
        seat = self.seat
        if seat is None:
            return ()
        peers = (seat.roster[rank].peer for rank in sorted(self._needed()))
        return tuple(peer for peer in peers if peer not in self._up)

    def _ask_state(self, of: m.PeerId | None = None) -> list[Effect]:
        """`of`: this one alone has just been connected.  The loop says how much is here already."""
        seat, donor, giver = self.seat, self.donor, self._passing.giver
        if self.synced or seat is None or self._reloading:
            return []
        whole = not self._donors  # a follower has the rest, or will have it
        asks: list[tuple[m.PeerId | None, m.StateRequest]] = [
            (donor, m.StateRequest(seat.term, seat.generation, whole, digest=whole and giver is not None))
        ]
        asks += [(giver, m.StateRequest(seat.term, seat.generation))] if whole else []
        return [Post(peer, ask) for peer, ask in asks if peer in self._up and of in (None, peer) and peer]

    def _go_round(self, reason: str) -> list[Effect]:
        """Whoever was to pass the state on to this member does not: the donor gives it."""
        giver = self._passing.giver
        self._passing.go_round()
        fields = {"peer": giver.hex()[:8] if giver is not None else "", "reason": reason}
        return [Note("not_passed_on", fields), *self._ask_state()]

    @property
    def passes_on(self) -> bool:
        """Another member gets the state from this one, as it comes."""
        return self._passing.next is not None

    def _maybe_ready(self) -> list[Effect]:
        if self.stage is not Stage.FORMING or self._ready_sent or not self.synced or self._missing_edges():
            return []
        self._ready_sent = True
        return [self._ready()]

    def _ready(self) -> Post:
        assert self.seat is not None
        return Post(self.coordinator, m.Ready(self.seat.term, self.seat.generation, self.history))

    def _edge_up(self, peer: m.PeerId, now_s: float) -> list[Effect]:
        effects: list[Effect] = [DonorUp(peer)] if peer in self._donors else []
        return effects + self._edge_is_up(peer, now_s)

    def _edge_is_up(self, peer: m.PeerId, now_s: float) -> list[Effect]:
        self._up.add(peer)
        seat = self.seat
        if peer == self.coordinator:
            self._fenced = False  # until it says its term
            return [self._joins()]
        if seat is not None and self.stage is Stage.FORMING:
            asked = self._ask_state(peer)
            if not self._reloading and any(seat.roster[rank].peer == peer for _, rank in seat.pieces):
                asked = self._reload(seat)
            return asked + self._maybe_ready()
        asked = self._means.edge_up(peer) if self._means is not None and self.stage is Stage.RUNNING else []
        return asked + self._running(lambda mine: mine.edge_up(peer), now_s)

    def _edge_down(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        effects: list[Effect] = [DonorDown(peer)] if peer in self._donors else []
        if peer in self._donors:
            self._unmet.told(now_s)
        return effects + self._edge_is_down(peer, reason, now_s)

    def _edge_is_down(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        self._up.discard(peer)
        if peer == self.coordinator:
            self.welcomed = False
            return [Note("coordinator_away", {"reason": reason})]
        if self._handover.leaving:
            return self._handover.lost(peer)
        rank = self.seat.rank_of(peer) if self.seat is not None else None
        if self.seat is not None and self.stage is Stage.FORMING:
            if math.isinf(self._formed_s) or self._missing_edges() == (peer,):
                self._formed_s = now_s  # it was up, so there is a way: it may come back over that
            return self._dials(self.seat)  # it was there when the VIEW came, so nobody had dialled it
        if self.stage is not Stage.RUNNING or rank not in self._needed():
            return []
        self._edges_down_since_s = now_s
        text = f"connection to rank {rank} broke: {reason}"
        note = Note("edge_down", {"peer": peer.hex()[:8], "reason": reason})
        told = Post(self.coordinator, m.Broken(self.term, self.generation, peer))
        return [note, told, *self._running(lambda mine: mine.edge_down(text, now_s), now_s)]

    # -- the open step ---------------------------------------------------------------------------

    def _submit(self, submit: Submit, now_s: float) -> list[Effect]:
        mine = self._attempts
        if mine is None or self.stage is not Stage.RUNNING or submit.round != mine.next_round:
            return [Resolve(submit.round, False, False, "the generation changed before the round began")]
        self._step_began_s = now_s if self._step_began_s is None else self._step_began_s
        if not submit.whole:
            return self._settled(mine.begin(submit.collectives, now_s), now_s)
        begun = mine.submit(submit.round, submit.collectives, self.patience_s, now_s, submit.more)
        return self._settled(begun, now_s)

    def _running(self, do: Callable[[Attempts], list[AttemptEffect]], now_s: float) -> list[Effect]:
        """Only while the generation runs: frozen, a member neither votes nor applies (rule 5)."""
        if self._attempts is None or self.stage is not Stage.RUNNING:
            return []
        return self._settled(do(self._attempts), now_s)

    def _settled(self, effects: list[AttemptEffect], now_s: float) -> list[Effect]:
        """Apply what was committed, drop who offended; pass everything else on."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Committed():
                    out += self._commit(effect, now_s)
                case Offended(peer, reason):
                    out += self._offence(peer, reason, now_s)
                case _:
                    out.append(effect)
        return out

    def _commit(self, committed: Committed, now_s: float) -> list[Effect]:
        assert self._setup is not None
        spec, assignment = self._setup.ledger, self.assignment()
        self.ledger = ledger.commit(spec, self.ledger, assignment, skipped=committed.skip)
        self.applied, self._touched = committed.round.step, True
        self.history = extend_history(self.history, committed.digest)
        self._stall_told = False
        if self._step_began_s is not None:
            took_s = now_s - self._step_began_s
            usual_s = self._usual_step_s if self._usual_step_s is not None else took_s
            self._usual_step_s = 0.9 * usual_s + 0.1 * took_s
        self._step_began_s = now_s  # the next step's compute counts as part of it
        voided = self._handover.committed(self.applied)
        resolved = Resolve(committed.round, True, committed.skip, committed.reason)
        return [resolved, *voided, *self._maybe_finished()]

    def _pulse(self, pulse: Pulse, now_s: float) -> list[Effect]:
        """Members tell the root that they live, the root tells all: that extends deadlines."""
        effects: list[Effect] = []
        if self.coordinator in self._up:
            self._beats += 1
            effects.append(
                Post(self.coordinator, m.Beat(self._beats, self.step, pulse.progress, pulse.figures))
            )
        stirred, self._progress = pulse.progress > self._progress, pulse.progress
        mine = self._attempts
        if mine is None or self.stage is not Stage.RUNNING or not (stirred or pulse.waiting):
            return effects
        if mine.rank == ROOT:
            effects += self._settled(mine.advance(Moved(ROOT, stirred), now_s), now_s)
        audience = mine.seat.roster if mine.rank == ROOT else mine.seat.roster[ROOT : ROOT + 1]
        progress = m.Progress(mine.next_round, pulse.progress)
        return effects + [
            Post(x.peer, progress) for x in audience if x.peer != self.me and x.peer in self._up
        ]


def _stale_model() -> JoinRefused:
    return JoinRefused(
        "stale-model",
        "nobody holds the run's state any more, and this worker's model is of steps that are gone",
        remedy="restart this worker: it begins from its latest checkpoint, or as the script does",
    )
