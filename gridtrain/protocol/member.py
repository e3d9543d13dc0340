"""A worker's side of the protocol: membership, the open round and its collectives, in one core.

Decides when the trainer may begin a step, what is sent to whom, when a vote is cast and when an
update is applied.  Never opens a payload, never touches a socket, a clock, a tensor or a thread.

             Enter            View: verdict, roster        state and edges are there
    APART ----------> APART ------------------> FORMING ----------------------> FORMING (READY sent)
                                                   ^                                |  Start
                                          View     |                                v
                                        FROZEN <---+----------- Freeze --------- RUNNING
                                                                                 |  ^
                                                   Submit -> Round + collectives |  | Decision
                                                                                 +--+
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.errors import JoinRefused, LocalProtocolError, RemoteProtocolError
from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.collective import (
    Arrived,
    Collective,
    CollectiveEffect,
    Complete,
    DropPayload,
    SendTo,
    WorkspaceEffect,
)
from gridtrain.protocol.round import (
    HISTORY_START,
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
    VoteCame,
    extend_history,
)

MAX_HELD_MESSAGES = 8192
ABORTS_BEFORE_FREEZE = 2


class Stage(StrEnum):
    APART = "apart"  # in no generation
    FORMING = "forming"  # a VIEW has come, START has not
    RUNNING = "running"
    FROZEN = "frozen"  # FREEZE has come, the next VIEW has not


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class EdgeUp:
    peer: m.PeerId


@dataclass(frozen=True, slots=True)
class EdgeDown:
    peer: m.PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Enter:
    """The trainer knows its model and data, and asks to take part.

    `edges(rank, world_size)`: ranks that a rank exchanges with directly; symmetric.
    """

    setup: m.Setup
    edges: Callable[[int, int], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Submit:
    """The trainer's contribution to `round` is prepared; here are its collectives by channel."""

    round: m.RoundId
    collectives: Mapping[m.Channel, Collective]


@dataclass(frozen=True, slots=True)
class Sealed:
    """The loop has computed the digest of all updates of the open round."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Broke:
    """The open round cannot complete here (bad payload, full queue)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The trainer has loaded the donor's state."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Time for a sign of life.

    `progress` grows when something moved: a payload, a block of state, the trainer's computing.
    `waiting`: the trainer waits inside of gridtrain, so that it is not hung even if nothing moves.
    """

    progress: int
    waiting: bool
    figures: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Depart:
    reason: str


@dataclass(frozen=True, slots=True)
class Probed:
    rtt_s: tuple[tuple[m.PeerId, float], ...]


Event = Heard | EdgeUp | EdgeDown | Enter | Submit | Sealed | Broke | Restored | Pulse | Depart | Probed


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Post:
    peer: m.PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class Ship:
    """Send what the workspace of `channel` holds at `place`, as Data."""

    peer: m.PeerId
    round: m.RoundId
    channel: m.Channel
    place: m.Place
    skip: bool


@dataclass(frozen=True, slots=True)
class Fill:
    """Apply to the workspace of `channel`."""

    channel: m.Channel
    effect: WorkspaceEffect


@dataclass(frozen=True, slots=True)
class Seal:
    """All collectives are complete: answer with `Sealed`."""

    skip: bool


@dataclass(frozen=True, slots=True)
class Resolve:
    """The submitted round ended: the trainer applies its update, or tries again."""

    round: m.RoundId
    committed: bool
    skip: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Dial:
    peer: m.PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Measure round trips to these peers and answer with `Probed`."""

    targets: tuple[tuple[m.PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class GiveState:
    """A joiner asked for our state."""

    peer: m.PeerId
    term: int
    generation: int


@dataclass(frozen=True, slots=True)
class TakeBlock:
    """A block of the donor's state; `Restored` follows when the trainer has loaded all."""

    block: m.StateBlock


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker cannot go on: refused, dismissed."""

    error: JoinRefused


@dataclass(frozen=True, slots=True)
class Note:
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


Effect = Post | Ship | Fill | Seal | Resolve | Dial | Probe | GiveState | TakeBlock | Stop | Note


class MemberCore:
    """See the module's text.

    Args:
        me: this worker's key.
        coordinator: the coordinator's key, as learnt from its Hello.
        join: the Join message to introduce ourselves with.
        deadlines: see `gridtrain.config.Deadlines`.
    """

    def __init__(
        self,
        me: m.PeerId,
        coordinator: m.PeerId,
        join: m.Join,
        deadlines: Deadlines,
    ) -> None:
        self.me = me
        self.coordinator = coordinator
        self.stage = Stage.APART
        self.term = 0
        self.generation = 0
        self.roster: tuple[m.Member, ...] = ()
        self.applied = -1
        self.history = HISTORY_START
        self.ledger = m.LedgerState()
        self.synced = False
        self.attempt = 0
        self.round: Round | None = None
        self.run_state = ("", "")
        self._join = join
        self._edges: Callable[[int, int], frozenset[int]] = lambda rank, world_size: frozenset()
        self._deadlines = deadlines
        self._setup: m.Setup | None = None
        self.welcomed = False
        self._ready_sent = False
        self._pages: dict[int, m.Roster] = {}
        self._collectives: dict[m.Channel, Collective] = {}
        self._skip = False
        self._aborts = 0  # in a row, at this step in this generation
        self._why = ""
        self._suspects: tuple[m.PeerId, ...] = ()
        self._stall_told = False
        self._up: set[m.PeerId] = set()
        self._rank_of: dict[m.PeerId, int] = {}
        self._early_requests: dict[m.PeerId, m.StateRequest] = {}
        self._held: list[tuple[m.PeerId, m.Data | m.Vote | m.Decision]] = []
        self._last_committed: m.RoundId | None = None
        self._waiting_since_s = 0.0
        self._step_began_s: float | None = None
        self._usual_step_s: float | None = None
        self._beats = 0
        self._progress = 0
        self._progress_of: dict[m.PeerId, int] = {}
        self._torn = False

    # -- what the loop and the trainer ask -----------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank_of[self.me]

    @property
    def world_size(self) -> int:
        return len(self.roster)

    @property
    def step(self) -> int:
        """The step that is open or comes next."""
        return self.applied + 1

    @property
    def may_begin(self) -> bool:
        """The trainer may submit its contribution to `next_round`."""
        return (
            self.stage is Stage.RUNNING
            and self.round is None
            and self._aborts < ABORTS_BEFORE_FREEZE
            and not self._missing_edges()
        )

    @property
    def next_round(self) -> m.RoundId:
        return m.RoundId(self.term, self.generation, self.step, self.attempt)

    @property
    def finished(self) -> bool:
        """The ledger has ended the run, as far as this worker has applied it."""
        return self.synced and self._setup is not None and ledger.finished(self._setup.ledger, self.ledger)

    def assignment(self) -> dict[m.PeerId, tuple[m.Span, ...]]:
        """Who holds which positions of the open step: a pure function of replicated state."""
        assert self._setup is not None
        shares = [(member.peer, member.share) for member in self.roster]
        return ledger.assign(self._setup.ledger, self.ledger, shares)

    @property
    def patience_s(self) -> float:
        """How long a member may show neither vote nor progress."""
        usual_s = self._usual_step_s
        if usual_s is None:
            return self._deadlines.first_step_s
        return self._deadlines.patience_floor_s + self._deadlines.patience_factor * usual_s

    @property
    def deadline_s(self) -> float:
        """When `tick` has something to do."""
        if self.stage is not Stage.RUNNING or self._stall_told:
            return math.inf
        if self._aborts >= ABORTS_BEFORE_FREEZE and self.rank == ROOT:
            return -math.inf
        if self._missing_edges():
            return self._waiting_since_s + 2 * self._deadlines.regreet_s
        return self.round.deadline_s if self.round is not None else math.inf

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Raises `RemoteProtocolError` when a peer's message breaks the protocol; nothing changed then."""
        match event:
            case Heard(peer, message):
                return self._heard(peer, message, now_s)
            case EdgeUp(peer):
                return self._edge_up(peer, now_s)
            case EdgeDown(peer, reason):
                return self._edge_down(peer, reason, now_s)
            case Enter(setup, edges):
                self._setup, self._edges = setup, edges
                return [Post(self.coordinator, setup)] if self.welcomed else []
            case Submit(round_id, collectives):
                return self._submit(round_id, collectives, now_s)
            case Sealed(digest):
                if self.round is None or self.round.voted is not None:
                    return []  # an effect before the Seal failed, and the vote was NO
                return self._advance(Prepared(digest), now_s)
            case Broke(reason):
                return self._advance(Failed(reason), now_s)
            case Restored():
                return self._restored(now_s)
            case Pulse(progress, waiting, figures):
                return self._pulse(progress, waiting, figures, now_s)
            case Probed(rtt_s):
                return [Post(self.coordinator, m.Links(rtt_s))]
            case Depart(reason):
                return [Post(self.coordinator, m.Leave(reason))]

    def tick(self, now_s: float) -> list[Effect]:
        """To be called when `deadline_s` has passed."""
        if now_s < self.deadline_s:
            return []
        if self._aborts >= ABORTS_BEFORE_FREEZE and self.rank == ROOT:
            return self._stalled(
                self._suspects, f"{self._aborts} attempts at step {self.step} aborted: {self._why}"
            )
        missing = self._missing_edges()
        if missing:
            return self._stalled(missing, "no connection to " + ", ".join(p.hex()[:8] for p in missing))
        assert self.round is not None
        if self.rank != ROOT:
            reason = f"no decision on step {self.step} for {self.patience_s:.1f} s"
            return self._stalled((self.roster[ROOT].peer,), reason)
        return self._carry_out(self.round.tick(now_s), now_s)

    def _heard(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[Effect]:
        if peer == self.coordinator:
            return self._from_coordinator(message, now_s)
        if isinstance(message, m.StateRequest) and message.generation > self.generation:
            self._early_requests[peer] = message  # the VIEW reached the joiner first
            return []
        if peer not in self._rank_of:
            return [Note("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]
        match message:
            case m.Data() | m.Vote() | m.Decision():
                return self._of_round(peer, message, now_s)
            case m.Progress():
                return self._progressed(peer, message, now_s)
            case m.StateRequest(term, generation):
                if (term, generation) != (self.term, self.generation) or not self.synced:
                    return []
                return [GiveState(peer, term, generation)]
            case m.StateBlock(term, generation):
                if (term, generation) != (self.term, self.generation) or self.synced:
                    return []
                return [TakeBlock(message)]
            case _:
                name = type(message).__name__
                raise RemoteProtocolError(f"{name} from a member; only the coordinator may send it")

    def _progressed(self, peer: m.PeerId, message: m.Progress, now_s: float) -> list[Effect]:
        stirred = message.progress > self._progress_of.get(peer, 0)
        self._progress_of[peer] = message.progress
        here, there = self.round, message.round
        if here is not None and (there.generation, there.step) == (here.id.generation, here.id.step):
            here.handle(Moved(self._rank_of[peer], stirred), now_s)
        return []

    # -- the coordinator -----------------------------------------------------------------------

    def _from_coordinator(self, message: m.Message, now_s: float) -> list[Effect]:
        match message:
            case m.Welcome(term):
                self.term = max(self.term, term)
                self.welcomed, self._stall_told = True, False
                return self._repeat()
            case m.Refused(code, reason, remedy):
                return [Stop(JoinRefused(code, reason, remedy=remedy))]
            case m.Admitted(probe):
                return [Probe(probe)]
            case m.Freeze(term, generation, reason):
                return self._freeze(term, generation, reason)
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
        if self.stage is Stage.FORMING and self._ready_sent:
            effects.append(Post(self.coordinator, m.Ready(self.term, self.generation, self.history)))
        if self.stage is Stage.RUNNING:
            effects += self._maybe_finished()
        return effects

    def _freeze(self, term: int, generation: int, reason: str) -> list[Effect]:
        if term < self.term:
            return []
        if self.stage in (Stage.RUNNING, Stage.FORMING):
            self.stage = Stage.FROZEN
        prepared = self.round if self.round is not None and self.round.prepared else None
        report = m.Report(
            term=term,
            generation=generation,
            synced=self.synced,
            applied=self.applied,
            history=self.history,
            ledger=self.ledger,
            prepared=prepared.id if prepared else None,
            digest=prepared.digest if prepared else b"",
            skip=self._skip if prepared else False,
        )
        return [Note("frozen", {"reason": reason}), Post(self.coordinator, report)]

    def _view(self, view: m.View, now_s: float) -> list[Effect]:
        if view.term < self.term or view.generation <= self.generation:
            return []
        pages = [page for _, page in sorted(self._pages.items()) if page.generation == view.generation]
        roster = tuple(member for page in pages for member in page.members)
        self._pages.clear()
        if len(roster) != view.world_size or self.me not in {member.peer for member in roster}:
            raise RemoteProtocolError(
                f"VIEW of {view.world_size} members came with a roster of {len(roster)}"
            )
        effects = self._execute_verdict(view)
        self.term, self.generation, self.roster = view.term, view.generation, roster
        self._rank_of = {member.peer: rank for rank, member in enumerate(roster)}
        self.ledger = view.ledger
        self.stage, self.attempt = Stage.FORMING, 0
        self._aborts, self._stall_told, self._ready_sent, self._torn = 0, False, False, False
        self._waiting_since_s, self._step_began_s = now_s, None
        self._held.clear()  # all of it was for an older generation
        effects.append(
            Note(
                "view",
                {"generation": view.generation, "rank": self.rank, "of": len(roster), "reason": view.reason},
            )
        )
        for rank in sorted(self._needed()):
            # One side dials, so that two members never open two connections at once.
            if rank < self.rank and roster[rank].peer not in self._up:
                effects.append(Dial(roster[rank].peer, roster[rank].address))
        if not self.synced:
            self.applied, self.history = view.applied, view.history  # what we shall hold once restored
            # The first generation starts from the state of the member that is not `joining`.
            self.synced = view.applied < 0 and not roster[self.rank].joining
        early, self._early_requests = self._early_requests, {}
        for peer, request in early.items():
            effects += self._heard(peer, request, now_s)
        return effects + self._ask_state() + self._maybe_ready()

    def _execute_verdict(self, view: m.View) -> list[Effect]:
        """Bring this member to `view.applied` / `view.history`, or mark it as lacking the state."""
        pending, self.round = self.round, None
        self._collectives = {}
        if not self.synced:
            return [] if pending is None else [Resolve(pending.id, False, False, view.reason)]
        if pending is not None and pending.prepared and view.applied == self.applied + 1:
            history = extend_history(self.history, pending.digest)
            if history == view.history:
                self.applied, self.history = view.applied, history
                return [Resolve(pending.id, True, self._skip, view.reason)]
        if (view.applied, view.history) != (self.applied, self.history):
            self.synced = False
        return [] if pending is None else [Resolve(pending.id, False, False, view.reason)]

    def _donor(self) -> int | None:
        """The lowest rank that holds the state."""
        return next((rank for rank, member in enumerate(self.roster) if not member.joining), None)

    def _needed(self) -> set[int]:
        """Ranks this member must be connected to."""
        needed = set(self._edges(self.rank, self.world_size))
        needed |= set(range(self.world_size)) if self.rank == ROOT else {ROOT}
        donor = self._donor()
        if donor is not None:
            if self.rank == donor:
                needed |= set(range(self.world_size))
            needed.add(donor)
        return needed - {self.rank}

    def _missing_edges(self) -> tuple[m.PeerId, ...]:
        if self.me not in self._rank_of:
            return ()
        return tuple(p for p in (self.roster[r].peer for r in sorted(self._needed())) if p not in self._up)

    def _ask_state(self) -> list[Effect]:
        donor = self._donor()
        if self.synced or donor is None or self.roster[donor].peer not in self._up:
            return []
        if self.roster[donor].peer == self.me:
            raise LocalProtocolError(f"rank {self.rank} is to give a state that it does not hold")
        return [Post(self.roster[donor].peer, m.StateRequest(self.term, self.generation))]

    def _restored(self, now_s: float) -> list[Effect]:
        self.synced = True
        return self._maybe_ready()

    def _maybe_ready(self) -> list[Effect]:
        if self.stage is not Stage.FORMING or self._ready_sent or not self.synced or self._missing_edges():
            return []
        self._ready_sent = True
        return [Post(self.coordinator, m.Ready(self.term, self.generation, self.history))]

    def _start(self, term: int, generation: int, now_s: float) -> list[Effect]:
        if (term, generation) != (self.term, self.generation) or self.stage is not Stage.FORMING:
            return []
        self.stage, self._waiting_since_s = Stage.RUNNING, now_s
        note = Note("start", {"generation": generation, "rank": self.rank, "of": self.world_size})
        return [note, *self._maybe_finished()]

    def _maybe_finished(self) -> list[Effect]:
        if not self.finished:
            return []
        return [Post(self.coordinator, m.Finished(self.applied, self.history))]

    # -- edges ---------------------------------------------------------------------------------

    def _edge_up(self, peer: m.PeerId, now_s: float) -> list[Effect]:
        self._up.add(peer)
        if peer == self.coordinator:
            return [Post(peer, self._join)]
        if self.stage is Stage.FORMING:
            donor = self._donor()
            asked = self._ask_state() if donor is not None and self.roster[donor].peer == peer else []
            return asked + self._maybe_ready()
        # The vote or the decision may have been lost with the connection.
        mine = self.round
        if mine is not None and mine.voted is not None and self._rank_of.get(peer) == ROOT:
            return [Post(peer, m.Vote(mine.id, mine.voted, mine.digest, "repeated"))]
        return []

    def _edge_down(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        self._up.discard(peer)
        if peer == self.coordinator:
            self.welcomed = False
            return [Note("coordinator_away", {"reason": reason})]
        if self.stage is not Stage.RUNNING or self._rank_of.get(peer) not in self._needed():
            return []
        self._waiting_since_s = now_s
        # Payloads of the coming round may be lost, too: peers can be a step ahead.
        self._torn = self.round is None or self.round.voted is not None
        text = f"connection to rank {self._rank_of[peer]} broke: {reason}"
        return [
            Note("edge_down", {"peer": peer.hex()[:8], "reason": reason}),
            *self._advance(Failed(text), now_s),
        ]

    def _stalled(self, suspects: tuple[m.PeerId, ...], reason: str) -> list[Effect]:
        self._stall_told = True
        round_id = self.round.id if self.round is not None else self.next_round
        return [
            Note("stalled", {"reason": reason}),
            Post(self.coordinator, m.Stalled(round_id, suspects, reason)),
        ]

    # -- the open round --------------------------------------------------------------------------

    def _submit(
        self, round_id: m.RoundId, collectives: Mapping[m.Channel, Collective], now_s: float
    ) -> list[Effect]:
        if round_id != self.next_round or self.stage is not Stage.RUNNING:
            return [Resolve(round_id, False, False, "the generation changed before the round began")]
        if self.round is not None:
            raise LocalProtocolError(f"round {round_id} submitted while {self.round.id} is open")
        self.round = Round(round_id, self.rank, self.world_size, self.patience_s, now_s)
        self._collectives, self._skip = dict(collectives), False
        self._step_began_s = now_s if self._step_began_s is None else self._step_began_s
        if self._torn:
            self._torn = False
            return self._advance(Failed("a connection broke before the round began"), now_s)
        effects: list[Effect] = []
        for channel, collective in self._collectives.items():
            effects += self._translate(channel, collective.start(now_s))
        effects += self._if_complete()
        held, self._held = self._held, []
        for peer, message in held:
            effects += self._of_round(peer, message, now_s)
        return effects

    def _of_round(self, peer: m.PeerId, message: m.Data | m.Vote | m.Decision, now_s: float) -> list[Effect]:
        """Older ids are dropped, later ones held, bounded (rule 1)."""
        here = self.round.id if self.round is not None else self.next_round
        there = message.round
        if (there.term, there.generation) != (self.term, self.generation) or there < here:
            return self._late(peer, message)
        if self.stage is Stage.FROZEN:
            return []
        if there == here and self.round is not None:
            return self._deliver(peer, message, now_s)
        if len(self._held) >= MAX_HELD_MESSAGES:
            raise RemoteProtocolError(f"more than {MAX_HELD_MESSAGES} early messages held; last: {there}")
        self._held.append((peer, message))
        if there.step == here.step + 1 and self.round is not None and self.round.prepared:
            return self._advance(LaterStepSeen(), now_s)
        return []

    def _late(self, peer: m.PeerId, message: m.Data | m.Vote | m.Decision) -> list[Effect]:
        """The root repeats its verdict to a voter whose connection broke; the rest is dropped."""
        there, here = message.round, self.next_round if self.round is None else self.round.id
        if not isinstance(message, m.Vote) or self.rank != ROOT:
            return []
        if (there.generation, there.step) == (here.generation, here.step):
            return [Post(peer, m.Decision(there, m.Verdict.ABORT, "repeated"))]
        if there == self._last_committed:
            return [Post(peer, m.Decision(there, m.Verdict.COMMIT, "repeated"))]
        return []

    def _deliver(self, peer: m.PeerId, message: m.Data | m.Vote | m.Decision, now_s: float) -> list[Effect]:
        rank = self._rank_of[peer]
        match message:
            case m.Vote(_, yes, digest, reason):
                return self._advance(VoteCame(rank, yes, digest, reason), now_s)
            case m.Decision(_, verdict, reason):
                return self._advance(DecisionCame(rank, verdict, reason), now_s)
            case m.Data(_, channel, place, skip, payload):
                if self.round is None or self.round.voted is False:
                    return []
                collective = self._collectives.get(channel)
                if collective is None:
                    raise RemoteProtocolError(
                        f"rank {rank} sent data for {channel}, which round {message.round} lacks"
                    )
                arrived = collective.handle(Arrived(rank, place, skip, payload), now_s)
                return self._translate(channel, arrived) + self._if_complete()

    def _translate(self, channel: m.Channel, effects: list[CollectiveEffect]) -> list[Effect]:
        assert self.round is not None
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case SendTo(to_rank, place, skip):
                    out.append(Ship(self.roster[to_rank].peer, self.round.id, channel, place, skip))
                case Complete(skip):
                    self._skip = self._skip or skip
                case DropPayload(_, reason):
                    out.append(Note("dropped_payload", {"reason": reason}))
                case _:
                    out.append(Fill(channel, effect))
        return out

    def _if_complete(self) -> list[Effect]:
        if self.round is None or self.round.voted is not None:
            return []
        return [Seal(self._skip)] if all(c.complete for c in self._collectives.values()) else []

    def _advance(
        self,
        event: Prepared | Failed | VoteCame | DecisionCame | LaterStepSeen,
        now_s: float,
    ) -> list[Effect]:
        if self.round is None or self.stage is not Stage.RUNNING:
            return []  # frozen: neither vote nor apply (rule 5)
        return self._carry_out(self.round.handle(event, now_s), now_s)

    def _carry_out(self, round_effects: list[RoundEffect], now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        assert self.round is not None
        round_id = self.round.id
        for effect in round_effects:
            match effect:
                case CastVote(yes, digest, reason):
                    effects.append(Post(self.roster[ROOT].peer, m.Vote(round_id, yes, digest, reason)))
                case Announce(verdict, reason):
                    decision = m.Decision(round_id, verdict, reason)
                    effects += [Post(x.peer, decision) for x in self.roster if x.peer != self.me]
                case Decided(m.Verdict.COMMIT, reason):
                    effects += self._commit(reason, now_s)
                case Decided(_, reason, suspects):
                    effects += self._abort(reason, suspects)
        return effects

    def _commit(self, reason: str, now_s: float) -> list[Effect]:
        assert self.round is not None and self._setup is not None
        ended, self.round = self.round, None
        self._last_committed = ended.id
        self.ledger = ledger.commit(self._setup.ledger, self.ledger, self.assignment(), skipped=self._skip)
        self.applied, self.history = ended.id.step, extend_history(self.history, ended.digest)
        self._collectives, self.attempt, self._aborts, self._stall_told = {}, 0, 0, False
        if self._step_began_s is not None:
            took_s = now_s - self._step_began_s
            self._usual_step_s = (
                took_s if self._usual_step_s is None else 0.9 * self._usual_step_s + 0.1 * took_s
            )
        self._step_began_s = now_s  # the next step's compute counts as part of it
        return [Resolve(ended.id, True, self._skip, reason), *self._maybe_finished()]

    def _abort(self, reason: str, suspects: tuple[int, ...]) -> list[Effect]:
        assert self.round is not None
        ended, self.round = self.round, None
        self._collectives, self.attempt, self._aborts = {}, self.attempt + 1, self._aborts + 1
        self._why, self._suspects = reason, tuple(self.roster[rank].peer for rank in suspects)
        note = {"step": ended.id.step, "attempt": ended.id.attempt, "reason": reason}
        return [Note("aborted", note), Resolve(ended.id, False, False, reason)]

    # -- signs of life -------------------------------------------------------------------------

    def _pulse(
        self, progress: int, waiting: bool, figures: tuple[tuple[str, float], ...], now_s: float
    ) -> list[Effect]:
        """Members tell the root that they live, the root tells all: that extends deadlines."""
        effects: list[Effect] = []
        if self.coordinator in self._up:
            self._beats += 1
            effects.append(Post(self.coordinator, m.Beat(self._beats, self.step, progress, figures)))
        stirred, self._progress = progress > self._progress, progress
        if not (stirred or waiting) or self.stage is not Stage.RUNNING:
            return effects
        if self.round is not None and self.rank == ROOT:
            self.round.handle(Moved(ROOT, stirred), now_s)
        audience = self.roster if self.rank == ROOT else self.roster[ROOT : ROOT + 1]
        told = [x.peer for x in audience if x.peer != self.me and x.peer in self._up]
        return effects + [Post(peer, m.Progress(self.next_round, progress)) for peer in told]
