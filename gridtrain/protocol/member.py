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
from collections.abc import Callable, Sequence

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
    Donating,
    DonorDown,
    DonorUp,
    EdgeDown,
    EdgeUp,
    Effect,
    Enter,
    Event,
    Feed,
    Follow,
    GiveState,
    HandOn,
    HangUp,
    Heard,
    Inherited,
    LastCall,
    Loading,
    MeanKnown,
    Note,
    Offence,
    Post,
    Probe,
    Probed,
    Pulse,
    Resolve,
    Restored,
    Sealed,
    Stage,
    Stop,
    Strayed,
    Submit,
    TakeBlock,
    Withdraw,
)
from gridtrain.protocol.round import HISTORY_START, ROOT, Failed, Moved, Prepared, extend_history
from gridtrain.protocol.routes import relay_of
from gridtrain.protocol.wakefulness import Wakefulness, no_earlier

MAX_EXPECTED = 512
MAX_REASON = 200
_SAYS_ITS_TERM = (m.Welcome, m.Freeze, m.Roster, m.View, m.Start)
"""Of an old coordinator these are seen to be old by themselves; all else counts by its last Welcome."""


_OF_FOLLOWERS = m.ImageAsk | m.BlocksAsk | m.UpdatesAsk
_OF_DONORS = m.ImageTable | m.ImageBlock | m.Update | m.NoImage


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
        synced: this worker holds the state that `applied` and `history` name.
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
        self._touched = False  # the model is not the one any more that the script made
        self.welcomed = False
        self._fenced = False  # whoever answers for the coordinator does so in a term that is over
        self.run_state = ("", "")
        self.reach: str | None = None
        self._join = join
        self._deadlines = deadlines
        self._wakefulness = Wakefulness()
        self._setup: m.Setup | None = None
        self._edges: Callable[[int, int], frozenset[int]] = lambda rank, world_size: frozenset()
        self._needed_in: tuple[Seat | None, set[int]] = None, set()
        self._attempts: Attempts | None = None  # of the generation that this worker is in
        self._means: Means | None = None
        self._first_step = 0  # of this generation
        self._handover = Handover()
        self._pages: dict[int, m.Roster] = {}
        self._early_requests: dict[m.PeerId, m.StateRequest] = {}
        self._up: set[m.PeerId] = set()
        self._dialled: dict[m.PeerId, str] = {}  # connected or not: the loop keeps trying until HangUp
        self._expected: dict[m.PeerId, int] = {}  # who may measure its link to us, since which generation
        self._offenders: set[m.PeerId] = set()  # of this generation
        self._donors: tuple[m.PeerId, ...] = ()  # this worker follows them
        self._followers: frozenset[m.PeerId] = frozenset()
        self._caught: m.Caught | None = None
        self._formed_s = math.inf  # when the way into the generation began; infinite: NoRoute is sent
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
    def due_round(self) -> m.RoundId | None:
        """The round that comes next in this generation, whether or not it can begin now."""
        return self._attempts.next_round if self._attempts is not None else None

    def held_bytes(self, peer: m.PeerId) -> int:
        """What of the peer's messages is held for a round to come."""
        return self._attempts.held_bytes(peer) if self._attempts is not None else 0

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
        if self.stage is Stage.FORMING:
            return self._formed_s + self._deadlines.route_s if self._missing_edges() else math.inf
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
            case Enter(setup, edges):
                self._setup, self._edges = setup, edges
                self._needed_in = None, set()
                if setup.held is not None and self.seat is None:
                    held = setup.held
                    self.applied, self.history, self.ledger = held.applied, held.history, held.ledger
                    self.synced = True
                return [Post(self.coordinator, setup)] if self.welcomed else []
            case Submit():
                return self._submit(event, now_s)
            case Sealed(digest):
                return self._running(lambda mine: mine.advance(Prepared(digest), now_s), now_s)
            case Broke(reason):
                return self._running(lambda mine: mine.advance(Failed(reason), now_s), now_s)
            case Offence(peer, reason):
                return self._offence(peer, reason, now_s)
            case Restored(term, generation):
                if self.seat is None or (term, generation) != (self.seat.term, self.seat.generation):
                    return []  # a state of an earlier generation: the one that counts is on its way
                self.synced, self._donors, self._caught, self._touched = True, (), None, True
                return self._maybe_ready()
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
                self._touched = True
                return []
            case CaughtUp(applied, history):
                self._touched = True
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
            case Depart(reason):
                return [Post(self.coordinator, m.Leave(reason))]

    def tick(self, now_s: float) -> list[Effect]:
        """To be called when `deadline_s` has passed: tell the coordinator what does not move."""
        self._second_chance(now_s)
        mine = self._attempts
        if mine is None or now_s < self.deadline_s:
            return []
        missing = self._missing_edges()
        if self.stage is Stage.FORMING:
            return self._no_route(mine.seat, missing)
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
        self._formed_s = no_earlier(self._formed_s, limits.route_s, until_s)
        self._edges_down_since_s = no_earlier(self._edges_down_since_s, 2 * limits.regreet_s, until_s)

    def _heard(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[Effect]:
        if peer == self.coordinator:
            return self._from_coordinator(message, now_s)
        if peer in self._offenders:
            return []  # read before it was hung up on
        if isinstance(message, _OF_FOLLOWERS | _OF_DONORS):
            asked = peer in (self._followers if isinstance(message, _OF_FOLLOWERS) else self._donors)
            if asked:
                return [Feed(peer, message)]
            return [Note("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]
        if isinstance(message, m.StateRequest) and message.generation > self.generation:
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
            case m.StateRequest(term, generation, whole):
                current = (term, generation) == (mine.seat.term, mine.seat.generation)
                return [GiveState(peer, term, generation, whole)] if current and self.synced else []
            case m.StateBlock(term, generation):
                current = (term, generation) == (mine.seat.term, mine.seat.generation)
                donor = self._donor(mine.seat)
                given = donor is not None and mine.seat.roster[donor].peer == peer
                return [TakeBlock(peer, message)] if current and given and not self.synced else []
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
                return [Note("rejoin", {"reason": reason}), Post(self.coordinator, self._join)]
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
                return self._follow(term, donors)
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
            case m.Start(term, generation):
                return self._start(term, generation, now_s)
            case m.RunState(state, reason):
                self.run_state = (state, reason)
                return [Note("run_state", {"state": state, "reason": reason})]
            case m.BeatReply():
                return []
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} from the coordinator")

    def _repeat(self) -> list[Effect]:
        """What the coordinator may have missed while the connection was broken."""
        effects: list[Effect] = [] if self._setup is None else [Post(self.coordinator, self._setup)]
        if self._caught is not None and self.seat is None:
            effects.append(Post(self.coordinator, self._caught))
        if self.stage is Stage.FORMING and self._ready_sent:
            effects.append(self._ready())
        return effects + (self._maybe_finished() if self.stage is Stage.RUNNING else [])

    def _seated(self) -> list[Effect]:
        """Where this worker is, for a coordinator whose journal may be older than that (rule 11)."""
        if not self.term:
            return []
        roster = self.seat.roster if self.seat is not None else ()  # in none: the term alone may be news
        members = tuple((member.peer, member.share) for member in roster)
        return [Post(self.coordinator, m.Seated(self.term, self.generation, members))]

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
            synced=self.synced,
            applied=self.applied,
            history=self.history,
            ledger=self.ledger,
            prepared=prepared.id if prepared is not None else None,
            digest=prepared.digest if prepared is not None else b"",
            skip=mine.skip if mine is not None and prepared is not None else False,
        )
        return [Note("frozen", {"reason": reason}), Post(self.coordinator, report), *gone, *given_up]

    def _follow(self, term: int, donors: Sequence[tuple[m.PeerId, str]]) -> list[Effect]:
        """Take over the donors' state while they train on.  A member has no use for it."""
        if term < self.term:
            return []
        if self.seat is not None:  # it was a member, and what it holds is replaced when it is one again
            return [Post(self.coordinator, m.Caught(self.applied, self.history))]
        before, self._donors = self._donors, tuple(peer for peer, _ in donors)
        effects: list[Effect] = [] if before else [Follow()]
        effects += self._dial(donors)
        effects += [DonorDown(peer) for peer in before if peer not in self._donors]
        return effects + [DonorUp(p) for p in self._donors if p in self._up and p not in before]

    def _view(self, view: m.View, now_s: float) -> list[Effect]:
        if view.term < self.term or view.generation <= self.generation:
            return []
        pages = [page for _, page in sorted(self._pages.items()) if page.generation == view.generation]
        roster = tuple(member for page in pages for member in page.members)
        self._pages.clear()
        seat = Seat(self.me, view.term, view.generation, roster)
        if len(roster) != view.world_size or seat.rank_of(self.me) is None:
            raise RemoteProtocolError(f"VIEW of {view.world_size} came with a roster of {len(roster)}")
        left_behind = self.seat is not None and self.seat.generation + 1 < view.generation and self.synced
        effects = self._execute_verdict(view)
        left_behind = left_behind and not self.synced
        if self.synced and self.seat is None and self._touched:
            return [*effects, Stop(_stale_model())]  # a checkpoint's step, but the model has followed since
        effects += self._means.give_up() if self._means is not None else []
        self._attempts, self._means = Attempts(seat, view.applied + 1), Means(seat)
        self._first_step = view.applied + 1
        self.term, self.ledger, self.stage = view.term, view.ledger, Stage.FORMING
        self._stall_told = self._ready_sent = False
        self._edges_down_since_s, self._step_began_s = now_s, None
        if not self.synced:
            self.applied, self.history = view.applied, view.history  # what we shall hold once restored
            # The first generation starts from the state of the member that is not `joining`.
            begins = view.applied < 0 and not roster[seat.rank].joining
            if begins and self._touched:
                return [*effects, Stop(_stale_model())]
            self.synced = begins and self._setup is not None and self._setup.held is None
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
        if self.seat is not None and self.seat.rank_of(peer) is not None:
            self._edges_down_since_s = now_s
            effects.append(Post(self.coordinator, m.Accuse(peer, reason[:MAX_REASON])))
            effects += self._running(lambda mine: mine.edge_down(text, now_s), now_s)
        return effects

    def _execute_verdict(self, view: m.View) -> list[Effect]:
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
        self.stage, self._edges_down_since_s = Stage.RUNNING, now_s
        fields = {"generation": generation, "rank": seat.rank, "of": seat.world_size}
        return [Note("start", fields), *self._maybe_finished()]

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
        """The step that comes next is followed by a comparison, as newcomers have just entered."""
        here = self.seat
        return here is not None and self.step == self._first_step and any(x.joining for x in here.roster)

    # -- the way into a generation: state and edges ------------------------------------------------

    def _donor(self, seat: Seat) -> int | None:
        """The lowest rank that holds the state."""
        return next((rank for rank, member in enumerate(seat.roster) if not member.joining), None)

    def _needed(self) -> set[int]:
        """Ranks this member must be connected to: its exchange's, the root, and who gives the state."""
        seat = self.seat
        if seat is None:
            return set()
        if self._needed_in[0] is seat:  # asked for several times with each message
            return self._needed_in[1]
        centres = {ROOT, self._donor(seat)} - {None}
        needed = set(self._edges(seat.rank, seat.world_size)) | {rank for rank in centres if rank is not None}
        if seat.rank in centres:
            needed = set(range(seat.world_size))
        self._needed_in = seat, needed - {seat.rank}
        return self._needed_in[1]

    def _missing_edges(self) -> tuple[m.PeerId, ...]:
        seat = self.seat
        if seat is None:
            return ()
        peers = (seat.roster[rank].peer for rank in sorted(self._needed()))
        return tuple(peer for peer in peers if peer not in self._up)

    def _ask_state(self) -> list[Effect]:
        seat = self.seat
        donor = self._donor(seat) if seat is not None else None
        if self.synced or seat is None or donor is None or seat.roster[donor].peer not in self._up:
            return []
        whole = not self._donors  # a follower has the rest, or will have it
        return [Post(seat.roster[donor].peer, m.StateRequest(seat.term, seat.generation, whole))]

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
            return [Post(peer, self._join)]
        if seat is not None and self.stage is Stage.FORMING:
            donor = self._donor(seat)
            asked = self._ask_state() if donor is not None and seat.roster[donor].peer == peer else []
            return asked + self._maybe_ready()
        return self._running(lambda mine: mine.edge_up(peer), now_s)

    def _edge_down(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        effects: list[Effect] = [DonorDown(peer)] if peer in self._donors else []
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
        return self._settled(mine.submit(submit.round, submit.collectives, self.patience_s, now_s), now_s)

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
