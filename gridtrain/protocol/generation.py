"""One generation as one of its members lives it: from the VIEW that names it to the next one.

Decides when this member is READY, when the trainer may begin a step, when an update counts as applied, and
when the coordinator is told that nothing moves.  Never decides that the generation begins or ends: that is
`protocol.course`.  The open step's rounds are `protocol.attempts`.

    FORMING  state and edges are there? --> Ready      Start      RUNNING  <--+
       |     a way is missing: NoRoute      -------------------->    |        |
       |     nothing comes: ask the donor                         Submit      |  Committed
       |                                                             v        |
       +--------------- Freeze ----------> FROZEN <---- Freeze --- Attempts --+
                                           neither votes nor applies (rule 5)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import AttemptEffect, Attempts, Committed, Offended, Seat
from gridtrain.protocol.lasting import Lasting
from gridtrain.protocol.means import Means
from gridtrain.protocol.member_io import (
    Effect,
    HandOn,
    Keeping,
    MeanKnown,
    Note,
    Post,
    Pulse,
    Resolve,
    Stage,
    Submit,
)
from gridtrain.protocol.neighbours import needed
from gridtrain.protocol.round import ROOT, Failed, Moved
from gridtrain.protocol.routes import relay_of
from gridtrain.protocol.state_transfer import StateTransfer
from gridtrain.protocol.wakefulness import no_earlier

MAX_REASON = 200


class Generation:
    """See the module's text.

    Args:
        seat: of this member.
        first_step: the generation's.
        chained: see `StateTransfer`.

    Attributes:
        stalled: the coordinator was told that nothing moves.
        ready: READY was sent.
    """

    def __init__(self, seat: Seat, first_step: int, lasting: Lasting, now_s: float, *, chained: bool) -> None:
        self.seat = seat
        self.stage = Stage.FORMING
        self.attempts = Attempts(seat, first_step)
        self.state = StateTransfer(seat, lasting, chained=chained)
        self.ready = False
        self.stalled = False
        self._lasting = lasting
        self._means = Means(seat)
        self._formed_s = now_s  # when the way into it began; infinite: NoRoute is sent
        self._edges_down_since_s = now_s
        self._needed: frozenset[int] | None = None

    @property
    def is_running(self) -> bool:
        return self.stage is Stage.RUNNING

    @property
    def is_forming(self) -> bool:
        return self.stage is Stage.FORMING

    # -- what the trainer asks -----------------------------------------------------------------

    @property
    def next_round(self) -> m.RoundId | None:
        """The round that the trainer may submit its part to now; None: wait."""
        mine, lasting = self.attempts, self._lasting
        if not self.is_running or mine.round is not None:
            return None
        over = mine.stuck or lasting.finished or lasting.handover.leaving
        return None if over or self.missing else mine.next_round

    @property
    def doomed(self) -> m.RoundId | None:
        """The open round, if it cannot be committed from here."""
        mine = self.attempts.round
        if mine is None or mine.voted is True:
            return None
        return mine.id if not self.is_running or mine.voted is False else None

    def positions(self) -> tuple[tuple[m.Span, ...], int]:
        """What of the open step this member works on, and the samples of the whole step.

        The members of a pipeline work on what all of them hold, first stage first: the same samples.
        """
        assignment, seat = self.assignment(), self.seat
        mine: tuple[m.PeerId, ...] = (seat.me,)
        if self._lasting.in_stages:
            line = seat.seats.pipeline(seat.seats.replica_of(seat.rank))
            mine = tuple(seat.roster[rank].peer for rank in line)
        held = tuple(span for peer in mine for span in assignment.get(peer, ()))
        return held, sum(ledger.samples(spans) for spans in assignment.values())

    def assignment(self) -> dict[m.PeerId, tuple[m.Span, ...]]:
        """Who holds which positions of the open step: a pure function of replicated state."""
        setup = self._lasting.setup
        if setup is None:
            raise LocalProtocolError("positions are asked for before the trainer has entered")
        return ledger.assign(setup.ledger, self._lasting.holding.ledger, self.seat.shares)

    # -- the clock -----------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """When `tick` has something to do."""
        mine, limits = self.attempts, self._lasting.deadlines
        if self.is_forming:
            route_s = self._formed_s + limits.route_s if self.missing else math.inf
            synced = self._lasting.holding.synced
            return route_s if synced else min(route_s, self.state.passing.deadline_s)
        if not self.is_running or self.stalled:
            return math.inf
        if mine.stuck and mine.rank == ROOT:
            return -math.inf
        if self.missing:
            return self._edges_down_since_s + 2 * limits.regreet_s
        return mine.deadline_s

    def tick(self, now_s: float) -> list[Effect]:
        """`deadline_s` has passed: tell the coordinator what does not move."""
        mine, missing = self.attempts, self.missing
        if self.is_forming:
            late = not self._lasting.holding.synced and now_s >= self.state.passing.deadline_s
            asked = self.state.go_round("nothing came") if late else []
            by_now = now_s >= self._formed_s + self._lasting.deadlines.route_s
            return asked + (self._no_route(missing) if missing and by_now else [])
        step, patience_s = self._step, self._lasting.pace.patience_s
        if mine.stuck and mine.rank == ROOT:
            return self._stall(mine.suspects, mine.silent_s, f"attempts at step {step} abort: {mine.why}")
        if missing:
            names = ", ".join(p.hex()[:8] for p in missing)
            ways = self._ways
            relayed = [p for p in missing if relay_of(ways[p]) is not None]
            other_ways = self._no_route(relayed) if relayed else []
            return [*other_ways, *self._stall(missing, 0.0, f"no connection to {names}")]
        if mine.rank != ROOT:
            reason = f"no decision on step {step} for {patience_s:.1f} s"
            return self._stall((self.seat.roster[ROOT].peer,), patience_s, reason)
        return self._settled(mine.tick(now_s), now_s)

    def second_chance(self, until_s: float) -> None:
        """This worker slept: nobody is to blame for a silence before `until_s`."""
        limits = self._lasting.deadlines
        self.attempts.second_chance(until_s)
        self.state.passing.second_chance(until_s)
        self._formed_s = no_earlier(self._formed_s, limits.route_s, until_s)
        self._edges_down_since_s = no_earlier(self._edges_down_since_s, 2 * limits.regreet_s, until_s)

    @property
    def _step(self) -> int:
        return self._lasting.holding.applied + 1

    def _stall(self, suspects: Sequence[m.PeerId], silent_s: float, reason: str) -> list[Effect]:
        self.stalled = True
        mine = self.attempts
        round_id = mine.round.id if mine.round is not None else mine.next_round
        told = m.Stalled(round_id, tuple(suspects), silent_s, reason)
        return [Note("stalled", {"reason": reason}), Post(self._lasting.coordinator, told)]

    # -- edges ---------------------------------------------------------------------------------

    @property
    def _ways(self) -> dict[m.PeerId, str]:
        return {member.peer: member.address for member in self.seat.roster}

    @property
    def needed(self) -> frozenset[int]:
        """Ranks this member must be connected to."""
        if self._needed is None:  # asked for several times with each message
            self._needed = needed(self.seat, self._lasting.entered)
        return self._needed

    def entered(self) -> None:
        """The trainer has said anew with whom it exchanges."""
        self._needed = None

    @property
    def missing(self) -> tuple[m.PeerId, ...]:
        """Of these, who is not connected."""
        peers = (self.seat.roster[rank].peer for rank in sorted(self.needed))
        return tuple(peer for peer in peers if peer not in self._lasting.edges.up)

    def dials(self) -> list[Effect]:
        """What is told to dial whom."""
        peers = {self.seat.roster[rank].peer for rank in self.needed}
        peers |= self.state.passing.near if self.is_forming else frozenset()
        return self._lasting.edges.dial_members(self.seat, peers)

    def no_route_again(self) -> list[Effect]:
        """The coordinator may have missed it."""
        missing = self.missing if self.is_forming and math.isinf(self._formed_s) else ()
        return self._no_route(missing) if missing else []

    def _no_route(self, missing: Sequence[m.PeerId]) -> list[Effect]:
        """Whoever was told how to connect, and could not, says so: there may be another way."""
        self._formed_s = math.inf
        ways, seat = self._ways, self.seat
        tried = tuple(peer for peer in missing if ways[peer])
        if not tried:
            return []
        names = ", ".join(f"{peer.hex()[:8]} at {ways[peer]}" for peer in tried)
        told = m.NoRoute(seat.term, seat.generation, tried)
        return [Note("no_route", {"peers": names}), Post(self._lasting.coordinator, told)]

    def edge_up(self, peer: m.PeerId, now_s: float) -> list[Effect]:
        if self.is_forming:
            seat, asked = self.seat, self.state.ask(peer)
            gives_a_piece = any(seat.roster[rank].peer == peer for _, rank in seat.pieces)
            if gives_a_piece and not self._lasting.checkpoints.reloading:
                asked = self._reload()
            return asked + self.maybe_ready()
        asked = self._means.edge_up(peer) if self.is_running else []
        return asked + self.do(lambda mine: mine.edge_up(peer), now_s)

    def edge_down(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        rank = self.seat.rank_of(peer)
        if self.is_forming:
            if math.isinf(self._formed_s) or self.missing == (peer,):
                self._formed_s = now_s  # it was up, so there is a way: it may come back over that
            return self.dials()  # it was there when the VIEW came, so nobody had dialled it
        if not self.is_running or rank not in self.needed:
            return []
        self._edges_down_since_s = now_s
        text = f"connection to rank {rank} broke: {reason}"
        note = Note("edge_down", {"peer": peer.hex()[:8], "reason": reason})
        broken = m.Broken(self._lasting.allegiance.term, self.seat.generation, peer)
        told = Post(self._lasting.coordinator, broken)
        return [note, told, *self.do(lambda mine: mine.edge_down(text, now_s), now_s)]

    def offence(self, peer: m.PeerId, reason: str, now_s: float) -> list[Effect]:
        """Drop the peer until the next generation, and let the coordinator judge."""
        lasting = self._lasting
        known = peer in lasting.edges.offenders
        effects = lasting.cut_off(peer, reason)
        if known:
            return effects
        self.attempts.forget(peer)
        if peer == self.state.passing.giver and self.is_forming and not lasting.holding.synced:
            effects += self.state.go_round("it broke the protocol")
        if self.seat.rank_of(peer) is not None:
            self._edges_down_since_s = now_s
            effects.append(Post(lasting.coordinator, m.Accuse(peer, reason[:MAX_REASON])))
            text = f"peer {peer.hex()[:8]} broke the protocol: {reason}"
            effects += self.do(lambda mine: mine.edge_down(text, now_s), now_s)
        return effects

    # -- the way into it -----------------------------------------------------------------------

    def maybe_ready(self) -> list[Effect]:
        if not self.is_forming or self.ready or not self._lasting.holding.synced or self.missing:
            return []
        self.ready = True
        return [self._is_ready()]

    def ready_again(self) -> list[Effect]:
        """The coordinator may have missed it."""
        return [self._is_ready()] if self.is_forming and self.ready else []

    def _is_ready(self) -> Post:
        told = m.Ready(self.seat.term, self.seat.generation, self._lasting.holding.history)
        return Post(self._lasting.coordinator, told)

    def restored(self, term: int, generation: int) -> list[Effect]:
        """The trainer has loaded the state of this generation, or of an earlier one."""
        holding = self._lasting.holding
        holding.touched = True
        if (term, generation) != (self.seat.term, self.seat.generation):
            return []  # the one that counts is on its way
        self._lasting.following.ended()
        self._lasting.checkpoints.reloading = ()
        holding.restored(self.seat.blocks)
        return [*self.state.give_late(), *self.maybe_ready()]

    def refuted(self, generation: int) -> list[Effect]:
        """What was passed on is another state than the donor's."""
        due = self.is_forming and generation == self.seat.generation and not self._lasting.holding.synced
        return self.state.go_round("the state that came is another one") if due else []

    def keeping(self, event: Keeping) -> list[Effect]:
        """The disk holds something else now."""
        lasting, seat = self._lasting, self.seat
        checkpoints = lasting.checkpoints
        new, lost = checkpoints.keep(event.states, event.unwritten)
        effects = checkpoints.tell()
        begun = self.ready or self.is_forming  # else the VIEW may be an old one, see `started`
        if lasting.holding.synced and begun:  # what was being written as the group went back
            effects += checkpoints.discard(lasting.holding.applied)
        if lasting.in_stages and self.is_running:
            effects += checkpoints.send_copy(seat, new, lasting.edges.up)
        if lost:
            effects += self.state.ask()
        if self.is_forming:
            effects += checkpoints.give_late(seat)
            if not (checkpoints.reloading or seat.roster[seat.rank].joining):
                effects += self._reload()
        return effects

    def _reload(self) -> list[Effect]:
        lasting = self._lasting
        return lasting.checkpoints.reload(self.seat, lasting.edges.up) if lasting.in_stages else []

    def started(self, now_s: float) -> list[Effect]:
        """All are READY."""
        if not self.is_forming:
            return []
        seat = self.seat
        if not self.ready:  # all were READY, so another process with this key was, and this one is not
            return [Note("not_ready", {"generation": seat.generation, "rank": seat.rank})]
        self.stage, self._edges_down_since_s = Stage.RUNNING, now_s
        fields = {"generation": seat.generation, "rank": seat.rank, "of": seat.world_size}
        # Not with the VIEW: after a restart of the coordinator it may say where a generation began that is
        # long further on, and what this worker's disk holds may be of just these steps.
        discarded = self._lasting.checkpoints.discard(self._lasting.holding.applied)
        return [Note("start", fields), *discarded, *self._lasting.tell_finished()]

    # -- its end -------------------------------------------------------------------------------

    def freeze(self) -> list[Effect]:
        self.stage = Stage.FROZEN
        return self._means.give_up()

    def close(self, first_step: int) -> None:
        """The run has ended, and nothing comes after this."""
        self.stage, self.ready, self.stalled = Stage.FROZEN, False, False
        self.attempts = Attempts(self.seat, first_step)

    @property
    def voted(self) -> tuple[m.RoundId, bytes, bool] | None:
        """The round that is prepared, its digest and whether it is skipped."""
        mine = self.attempts
        return (mine.prepared.id, mine.prepared.digest, mine.skip) if mine.prepared is not None else None

    def end(self, view: m.View | m.Spared) -> list[Effect]:
        """Bring this member to `view.applied` and `view.history`, or mark it as lacking the state; who waits
        for an average goes on without it."""
        mine = self.attempts
        pending, prepared = mine.round, mine.prepared
        given_up = self._means.give_up()
        took = self._lasting.holding.execute(view, prepared.digest if prepared is not None else None)
        if took and prepared is not None:
            return [Resolve(prepared.id, True, mine.skip, view.reason), *given_up]
        ended = [Resolve(pending.id, False, False, view.reason)] if pending is not None else []
        return [*ended, *given_up]

    # -- what members say ----------------------------------------------------------------------

    def heard(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[Effect]:
        """Of a member.  Raises `RemoteProtocolError`."""
        lasting, seat, mine = self._lasting, self.seat, self.attempts
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
                return self._means.heard(peer, message)
            case m.HandOver():
                holding = lasting.holding
                return lasting.handover.piece(seat, peer, message, holding.applied, holding.synced)
            case m.TakenOver():
                at = lasting.holding.at
                return lasting.handover.answered(peer, message, seat, lasting.edges.up, at)
            case m.StateRequest() | m.PieceAsk() | m.StateBlock() | m.StateDigest() | m.Copy():
                if (message.term, message.generation) != (seat.term, seat.generation):
                    return []
                return self._of_state(peer, message, now_s)
            case _:
                name = type(message).__name__
                raise RemoteProtocolError(f"{name} from a member; only the coordinator may send it")

    def _of_state(
        self,
        peer: m.PeerId,
        message: m.StateRequest | m.PieceAsk | m.StateBlock | m.StateDigest | m.Copy,
        now_s: float,
    ) -> list[Effect]:
        checkpoints = self._lasting.checkpoints
        match message:
            case m.StateRequest():
                return self.state.give(peer, message)
            case m.PieceAsk():
                return checkpoints.give_piece(self.seat, peer, message)
            case m.StateBlock():
                return self.state.block(peer, message, now_s)
            case m.StateDigest():
                return self.state.digest(peer, message, now_s)
            case m.Copy():
                return checkpoints.take_copy(self.seat, self._lasting.in_stages, peer, message)

    # -- the open step -------------------------------------------------------------------------

    def submit(self, submit: Submit, now_s: float) -> list[Effect]:
        mine, pace = self.attempts, self._lasting.pace
        if not self.is_running or submit.round != mine.next_round:
            return [too_late(submit)]
        pace.begun(now_s)
        if not submit.whole:
            return self._settled(mine.begin(submit.collectives, now_s), now_s)
        begun = mine.submit(submit.round, submit.collectives, pace.patience_s, now_s, submit.more)
        return self._settled(begun, now_s)

    def withdraw(self, now_s: float) -> list[Effect]:
        """The trainer leaves in the middle of a round."""
        voted = self.do(lambda mine: mine.advance(Failed("this worker leaves"), now_s), now_s)
        mine = self.attempts.round
        if mine is None or mine.voted is not False:
            return voted
        # Without our YES it cannot be committed: there is no need to wait for the root's trainer.
        return [*voted, Resolve(mine.id, False, False, "this worker leaves")]

    def hand_on(self, event: HandOn) -> list[Effect]:
        """The trainer leaves between two rounds."""
        mine, lasting = self.attempts.round, self._lasting
        free = self.is_running and (mine is None or mine.voted is False)
        seat = self.seat if free else None
        return lasting.handover.begin(event.pieces, seat, lasting.edges.up, *lasting.holding.at)

    def compare(self, step: int, digest: bytes) -> list[Effect]:
        """For the coordinator, which compares the members' fingerprints."""
        if not self.is_running or step != self._lasting.holding.applied:
            return []
        told = m.Fingerprint(self.seat.term, self.seat.generation, step, digest)
        return [Post(self._lasting.coordinator, told)]

    def ask_mean(self, step: int, index: int, value: float) -> list[Effect]:
        return self._means.ask((step, index), value) if self.is_running else [MeanKnown(None)]

    def pulse(self, pulse: Pulse, stirred: bool, now_s: float) -> list[Effect]:
        """Members tell the root that they live, the root tells all: that extends deadlines."""
        mine, roster = self.attempts, self.seat.roster
        if not self.is_running or not (stirred or pulse.waiting):
            return []
        effects: list[Effect] = []
        if mine.rank == ROOT:
            effects += self._settled(mine.advance(Moved(ROOT, stirred), now_s), now_s)
        audience = roster if mine.rank == ROOT else roster[ROOT : ROOT + 1]
        progress, up = m.Progress(mine.next_round, pulse.progress), self._lasting.edges.up
        return effects + [Post(x.peer, progress) for x in audience if x.peer != self.seat.me and x.peer in up]

    def do(self, act: Callable[[Attempts], list[AttemptEffect]], now_s: float) -> list[Effect]:
        """Only while it runs: frozen, a member neither votes nor applies (rule 5)."""
        return self._settled(act(self.attempts), now_s) if self.is_running else []

    def _settled(self, effects: list[AttemptEffect], now_s: float) -> list[Effect]:
        """Apply what was committed, drop who offended; pass everything else on."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Committed():
                    out += self._commit(effect, now_s)
                case Offended(peer, reason):
                    out += self.offence(peer, reason, now_s)
                case _:
                    out.append(effect)
        return out

    def _commit(self, committed: Committed, now_s: float) -> list[Effect]:
        lasting = self._lasting
        assert lasting.setup is not None
        spec, holding = lasting.setup.ledger, lasting.holding
        state = ledger.commit(spec, holding.ledger, self.assignment(), skipped=committed.skip)
        holding.committed(committed.round.step, committed.digest, state)
        self.stalled = False
        lasting.pace.committed(now_s)
        voided = lasting.handover.committed(holding.applied)
        resolved = Resolve(committed.round, True, committed.skip, committed.reason)
        return [resolved, *voided, *lasting.tell_finished()]


def too_late(submit: Submit) -> Resolve:
    return Resolve(submit.round, False, False, "the generation changed before the round began")
