"""A worker's side of the protocol: its place in the group, from joining to the end of the run.

Decides which part of this worker an event concerns, and what its loop and its trainer are to know.  Never
opens a payload, never touches a socket, a clock, a tensor or a thread.

    event --> MemberCore      events and effects: `member_io`
                 |
                 v
              Course          through the generations, by what the coordinator says: `course`
                 |
                 v
              Generation      one at a time: `generation`, and in it the open step (`attempts`), numbers for
                 |            people (`means`), the way of the state to who lacks it (`state_transfer`)
                 v
              Lasting         for life: `edges`, the state (`holding`), the disk (`checkpoints`), `following`,
                              a leaver's residual (`handover`), `pace`, whom it obeys (`allegiance`)
"""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.errors import LocalProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.allegiance import Allegiance
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.checkpoints import Checkpoints
from gridtrain.protocol.course import Course
from gridtrain.protocol.edges import Edges
from gridtrain.protocol.following import Following
from gridtrain.protocol.generation import Generation, too_late
from gridtrain.protocol.handover import Handover
from gridtrain.protocol.holding import Holding
from gridtrain.protocol.lasting import Lasting
from gridtrain.protocol.member_io import (
    AskMean,
    Broke,
    CaughtUp,
    Compare,
    Depart,
    EdgeDown,
    EdgeUp,
    Effect,
    Enter,
    Event,
    Extend,
    HandOn,
    Heard,
    Inherited,
    Keeping,
    LastCall,
    Loading,
    MeanKnown,
    Note,
    Offence,
    Post,
    Probed,
    Pulse,
    Refuted,
    Restored,
    Sealed,
    Stage,
    Strayed,
    Submit,
    Withdraw,
)
from gridtrain.protocol.pace import Pace
from gridtrain.protocol.round import Failed, Prepared
from gridtrain.protocol.wakefulness import Wakefulness


class MemberCore:
    """See the module's text.

    Args:
        me: this worker's key.
        coordinator: the coordinator's key.
        join: the Join message to introduce ourselves with.
        deadlines: see `gridtrain.config.Deadlines`.
    """

    def __init__(self, me: m.PeerId, coordinator: m.PeerId, join: m.Join, deadlines: Deadlines) -> None:
        self.me = me
        self.coordinator = coordinator
        self._deadlines = deadlines
        self._wakefulness = Wakefulness()
        self._allegiance = Allegiance(coordinator, join)
        self._edges = Edges(me, coordinator)
        self._holding = Holding()
        self._checkpoints = Checkpoints(self._holding, self._allegiance)
        self._following = Following(deadlines.route_s)
        self._handover = Handover()
        self._pace = Pace(deadlines)
        self._lasting = Lasting(
            me, deadlines, self._allegiance, self._edges, self._holding, self._checkpoints, self._following,
            self._handover, self._pace,
        )  # fmt: skip
        self._course = Course(self._lasting)

    # -- what the loop asks --------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self._allegiance.term

    @property
    def welcomed(self) -> bool:
        """The coordinator has answered our Join, in this connection."""
        return self._allegiance.welcomed

    @property
    def run_state(self) -> tuple[str, str]:
        """What the coordinator last said of the run, and why."""
        return self._allegiance.run_state

    @property
    def reach(self) -> str | None:
        """An address at which the coordinator got through to us; empty: nobody from outside can; None: it
        has not said yet."""
        return self._allegiance.reach

    @property
    def stage(self) -> Stage:
        return self._course.here.stage if self._course.here is not None else Stage.APART

    @property
    def seat(self) -> Seat | None:
        """This worker's place in the latest generation that named it."""
        return self._course.seat

    @property
    def generation(self) -> int:
        return self._course.number

    @property
    def first_step(self) -> int:
        """Of the latest generation that named this worker."""
        return self._course.first_step

    @property
    def acquaintances(self) -> frozenset[m.PeerId]:
        """Whom this worker deals with: the coordinator, the members, and who was announced; nobody else."""
        return self._lasting.acquaintances(self.seat)

    @property
    def donor(self) -> m.PeerId | None:
        """Who gives this member the state that it lacks."""
        return self._course.here.state.donor if self._course.here is not None else None

    @property
    def passes_on(self) -> bool:
        """Another member gets the state from this one, as it comes."""
        return self._course.here is not None and self._course.here.state.passing.next is not None

    def held_bytes(self, peer: m.PeerId) -> int:
        """What of the peer's messages is held for a round to come."""
        return self._course.here.attempts.held_bytes(peer) if self._course.here is not None else 0

    @property
    def deadline_s(self) -> float:
        """When `tick` has something to do."""
        here = self._course.here
        return here.deadline_s if here is not None else self._following.deadline_s(self._edges.up)

    # -- what the trainer asks -----------------------------------------------------------------

    @property
    def applied(self) -> int:
        """The last step applied here; -1: none."""
        return self._holding.applied

    @property
    def step(self) -> int:
        """The step that is open or comes next."""
        return self._holding.applied + 1

    @property
    def history(self) -> bytes:
        """Chained digest of all updates applied."""
        return self._holding.history

    @property
    def ledger(self) -> m.LedgerState:
        """Of the data, after the last step applied here."""
        return self._holding.ledger

    @property
    def synced(self) -> bool:
        """This worker holds the state that `applied` and `history` name, of its seat's stage."""
        return self._holding.synced

    @property
    def touched(self) -> bool:
        """The model is not the one any more that the script made, or a checkpoint had."""
        return self._holding.touched

    @property
    def takes_over(self) -> bool:
        """Another member may still hand its residual to this one."""
        return not self._handover.refusing

    @property
    def finished(self) -> bool:
        """The ledger has ended the run, as far as this worker has applied it."""
        return self._lasting.finished

    @property
    def patience_s(self) -> float:
        """How long a member may show neither vote nor sign of life."""
        return self._pace.patience_s

    @property
    def awaits_choice(self) -> bool:
        """Which exchange its round uses is not chosen yet."""
        choices = self._lasting.entered.choices if self._lasting.entered is not None else {}
        seat = self.seat
        return bool(choices) and seat is not None and not seat.exchange and "" not in choices

    @property
    def next_round(self) -> m.RoundId | None:
        """The round that the trainer may submit its part to now; None: wait."""
        return self._course.here.next_round if self._course.here is not None else None

    @property
    def due_round(self) -> m.RoundId | None:
        """The round that comes next in this generation, whether or not it can begin now."""
        return self._course.here.attempts.next_round if self._course.here is not None else None

    @property
    def open_round(self) -> m.RoundId | None:
        """The round that the trainer has submitted to and that is not decided here."""
        mine = self._course.here.attempts.round if self._course.here is not None else None
        return mine.id if mine is not None else None

    @property
    def doomed(self) -> m.RoundId | None:
        """The open round, if it cannot be committed from here: voted NO on, or not at all before a FREEZE."""
        return self._course.here.doomed if self._course.here is not None else None

    @property
    def paused(self) -> str:
        """Why nothing can go on until the coordinator is back (rule 10); empty: training can."""
        here = self._course.here
        if self.coordinator in self._edges.up or not self.term:
            return ""
        if here is None or not here.is_running:
            return "the next generation needs the coordinator"
        if here.missing:
            return f"{len(here.missing)} peers are gone, and only the coordinator can plan without them"
        return "a step cannot be committed, and only the coordinator can freeze it" if here.stalled else ""

    @property
    def compares_next(self) -> bool:
        """The step that comes next is followed by a comparison: newcomers have just entered, or all began
        alike, by what they say themselves."""
        here = self.seat
        if here is None or self.step != self.first_step:
            return False
        begins = self.first_step == 0 and not self._lasting.in_stages and here.world_size > 1
        return begins or any(x.joining for x in here.roster)

    def positions(self) -> tuple[tuple[m.Span, ...], int]:
        """What of the open step this member works on, and the samples of the whole step."""
        return self._in_generation().positions()

    def assignment(self) -> dict[m.PeerId, tuple[m.Span, ...]]:
        """Who holds which positions of the open step."""
        return self._in_generation().assignment()

    def _in_generation(self) -> Generation:
        if self._course.here is None:
            raise LocalProtocolError("positions are asked for before there is a generation")
        return self._course.here

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Raises `RemoteProtocolError` when a peer's message breaks the protocol."""
        self._second_chance(now_s)
        match event:
            case Heard(peer, message, nbytes):
                return self._course.heard(peer, message, nbytes, now_s)
            case EdgeUp(peer):
                return self._edge_up(peer, now_s)
            case EdgeDown(peer, reason):
                return self._edge_down(peer, reason, now_s)
            case Offence(peer, reason):
                return self._offence(peer, reason, now_s)
            case Enter():
                return self._enter(event)
            case Loading():
                self._holding.overwritten(self._course.here is not None)
                return []
            case CaughtUp(applied, history):
                self._holding.overwritten(self._course.here is not None)
                self._following.caught = m.Caught(applied, history)
                return self._allegiance.tell(self._following.caught) if self._course.here is None else []
            case Strayed(reason):
                note, caught = Note("strayed", {"reason": reason}), self._following.strayed()
                if self._course.here is None:
                    return [note, Post(self.coordinator, caught)]
                return [note, *self._course.here.state.ask()]
            case Pulse():
                return self._pulse(event, now_s)
            case LastCall():
                self._handover.refusing = True
                return []
            case Inherited(peer):
                return self._handover.complete(self.seat, peer)
            case Probed(rtt_s):
                return [Post(self.coordinator, m.Links(rtt_s))]
            case Depart(reason, pausing):
                return [Post(self.coordinator, m.Pausing(reason) if pausing else m.Leave(reason))]
            case _:
                return self._of_generation(event, now_s)

    def _of_generation(self, event: Event, now_s: float) -> list[Effect]:
        """What the trainer says to the group."""
        here = self._course.here
        if here is None:
            return self._in_no_generation(event)
        match event:
            case Submit():
                return here.submit(event, now_s)
            case Extend():
                return here.do(lambda mine: mine.extend(event, now_s), now_s)
            case Sealed(digest):
                return here.do(lambda mine: mine.advance(Prepared(digest), now_s), now_s)
            case Broke(reason):
                return here.do(lambda mine: mine.advance(Failed(reason), now_s), now_s)
            case Withdraw():
                return here.withdraw(now_s)
            case HandOn():
                return here.hand_on(event)
            case AskMean(step, index, value):
                return here.ask_mean(step, index, value)
            case Compare(step, digest):
                return here.compare(step, digest)
            case Restored(term, generation):
                return here.restored(term, generation)
            case Refuted(generation):
                return here.refuted(generation)
            case Keeping():
                return here.keeping(event)
            case _:
                raise LocalProtocolError(f"{type(event).__name__} is no event of a generation")

    def _in_no_generation(self, event: Event) -> list[Effect]:
        """The trainer does not know it yet."""
        match event:
            case Submit():
                return [too_late(event)]
            case HandOn(pieces):
                return self._handover.begin(pieces, None, self._edges.up, *self._holding.at)
            case AskMean():
                return [MeanKnown(None)]
            case Restored():
                self._holding.touched = True
                return []
            case Keeping(states, unwritten):
                self._checkpoints.keep(states, unwritten)
                return self._checkpoints.tell()
            case _:
                return []

    def tick(self, now_s: float) -> list[Effect]:
        """To be called when `deadline_s` has passed: tell the coordinator what does not move."""
        self._second_chance(now_s)
        if self._course.here is None:
            return self._not_met(now_s)
        return self._course.here.tick(now_s) if now_s >= self.deadline_s else []

    def _not_met(self, now_s: float) -> list[Effect]:
        peers = self._following.unmet(self._edges, now_s)
        if not peers:
            return []
        named = ", ".join(peer.hex()[:8] for peer in self._following.donors)
        return [Note("no_route", {"peers": named}), Post(self.coordinator, m.NoRoute(self.term, 0, peers))]

    def _second_chance(self, now_s: float) -> None:
        """If this worker itself stood still, nobody is to blame for a silence that it slept through."""
        if not self._wakefulness.is_late(now_s):
            self._wakefulness.called(now_s)
        elif self._wakefulness.overslept(self.deadline_s, now_s):
            until_s = now_s + 2 * self._deadlines.beat_s
            self._following.second_chance(until_s)
            if self._course.here is not None:
                self._course.here.second_chance(until_s)

    def _enter(self, entered: Enter) -> list[Effect]:
        setup = entered.setup
        self._lasting.entered, self._checkpoints.kept = entered, setup.kept
        if self._course.here is not None:
            self._course.here.entered()
        elif setup.held is not None:
            self._holding.loaded(setup.held)
        return self._lasting.introduction() if self.welcomed else []

    def _pulse(self, pulse: Pulse, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.coordinator in self._edges.up:
            effects.append(Post(self.coordinator, self._pace.beat(self.step, pulse)))
        stirred, here = self._pace.stirred(pulse.progress), self._course.here
        return effects + (here.pulse(pulse, stirred, now_s) if here is not None else [])

    # -- edges ---------------------------------------------------------------------------------

    def _edge_up(self, peer: m.PeerId, now_s: float) -> list[Effect]:
        effects, here = self._following.edge_up(peer), self._course.here
        self._edges.up.add(peer)
        if peer == self.coordinator:
            return effects + self._allegiance.connected(self.generation)
        return effects + (here.edge_up(peer, now_s) if here is not None else [])

    def _edge_down(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        effects, here = self._following.edge_down(peer, now_s), self._course.here
        self._edges.up.discard(peer)
        if peer == self.coordinator:
            return effects + self._allegiance.lost(reason)
        if self._handover.leaving:
            return effects + self._handover.lost(peer)
        return effects + (here.edge_down(peer, reason, now_s) if here is not None else [])

    def _offence(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        if peer == self.coordinator:
            return [Note("offence", {"peer": "the coordinator", "reason": reason})]
        here = self._course.here
        return here.offence(peer, reason, now_s) if here is not None else self._lasting.cut_off(peer, reason)
