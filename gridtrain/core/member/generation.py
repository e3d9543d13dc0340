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

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.attempts import (
    AttemptEffect,
    Attempts,
    EarlyViolation,
    RankAssignment,
    StepCommitted,
)
from gridtrain.core.commit.two_phase_commit import ROOT, Failed, ProgressReceived
from gridtrain.core.group.member_events import (
    DeliverMean,
    HeartbeatDue,
    LogEvent,
    MemberEffect,
    MemberPhase,
    ResolveRound,
    Send,
    StageCheckpointsChanged,
    SubmitRound,
    TransferResidual,
)
from gridtrain.core.group.stall_detection import extend_start
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.incoming_state import IncomingState
from gridtrain.core.member.required_peers import required_ranks
from gridtrain.core.member.scalar_means import ScalarMeans
from gridtrain.core.messages import relay_of
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

MAX_REASON_LENGTH = 200


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

    def __init__(
        self, seat: RankAssignment, first_step: int, lasting: MemberContext, now_s: float, *, chained: bool
    ) -> None:
        self.rank_assignment = seat
        self.phase = MemberPhase.FORMING
        self.attempts = Attempts(seat, first_step)
        self.state_transfer = IncomingState(seat, lasting, chained=chained)
        self.is_ready_sent = False
        self.is_stall_reported = False
        self._context = lasting
        self._means = ScalarMeans(seat)
        self._formed_s = now_s  # when the way into it began; infinite: NoRoute is sent
        self._disconnected_since_s = now_s
        self._required_ranks: frozenset[int] | None = None

    @property
    def is_running(self) -> bool:
        return self.phase is MemberPhase.RUNNING

    @property
    def is_forming(self) -> bool:
        return self.phase is MemberPhase.FORMING

    # -- what the trainer asks -----------------------------------------------------------------

    @property
    def next_round(self) -> m.RoundId | None:
        """The round that the trainer may submit its part to now; None: wait."""
        mine, lasting = self.attempts, self._context
        if not self.is_running or mine.open_attempt is not None:
            return None
        over = mine.is_stuck or lasting.is_finished or lasting.residual_transfer.is_leaving
        return None if over or self.missing_peers else mine.next_round

    @property
    def doomed_round(self) -> m.RoundId | None:
        """The open round, if it cannot be committed from here."""
        mine = self.attempts.open_attempt
        if mine is None or mine.vote is True:
            return None
        return mine.round_id if not self.is_running or mine.vote is False else None

    def data_positions(self) -> tuple[tuple[m.Span, ...], int]:
        """What of the open step this member works on, and the samples of the whole step.

        The members of a pipeline work on what all of them hold, first stage first: the same samples.
        """
        assignment, seat = self.data_assignment(), self.rank_assignment
        mine: tuple[m.PeerId, ...] = (seat.own_id,)
        if self._context.is_pipelined:
            line = seat.layout.pipeline_ranks(seat.layout.replica_of(seat.rank))
            mine = tuple(seat.members[rank].peer for rank in line)
        held = tuple(span for peer in mine for span in assignment.get(peer, ()))
        return held, sum(data_ledger.count_samples(spans) for spans in assignment.values())

    def data_assignment(self) -> dict[m.PeerId, tuple[m.Span, ...]]:
        """Who holds which positions of the open step: a pure function of replicated state."""
        setup = self._context.setup
        if setup is None:
            raise LocalProtocolError("positions are asked for before the trainer has entered")
        return data_ledger.assign(
            setup.ledger, self._context.replica_state.ledger, self.rank_assignment.shares
        )

    # -- the clock -----------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """When `tick` has something to do."""
        mine, limits = self.attempts, self._context.deadlines
        if self.is_forming:
            route_s = self._formed_s + limits.route_s if self.missing_peers else math.inf
            synced = self._context.replica_state.is_synced
            return route_s if synced else min(route_s, self.state_transfer.forwarding.deadline_s)
        if not self.is_running or self.is_stall_reported:
            return math.inf
        if mine.is_stuck and mine.rank == ROOT:
            return -math.inf
        if self.missing_peers:
            return self._disconnected_since_s + 2 * limits.regreet_s
        return mine.deadline_s

    def tick(self, now_s: float) -> list[MemberEffect]:
        """`deadline_s` has passed: tell the coordinator what does not move."""
        mine, missing = self.attempts, self.missing_peers
        if self.is_forming:
            late = (
                not self._context.replica_state.is_synced
                and now_s >= self.state_transfer.forwarding.deadline_s
            )
            asked = self.state_transfer.bypass_forwarder("nothing came") if late else []
            by_now = now_s >= self._formed_s + self._context.deadlines.route_s
            return asked + (self._report_unreachable(missing) if missing and by_now else [])
        step, patience_s = self._step, self._context.step_pace.timeout_s
        if mine.is_stuck and mine.rank == ROOT:
            return self._report_stall(
                mine.suspects, mine.silent_s, f"attempts at step {step} abort: {mine.abort_reason}"
            )
        if missing:
            names = ", ".join(p.hex()[:8] for p in missing)
            ways = self._addresses
            relayed = [p for p in missing if relay_of(ways[p]) is not None]
            other_ways = self._report_unreachable(relayed) if relayed else []
            return [*other_ways, *self._report_stall(missing, 0.0, f"no connection to {names}")]
        if mine.rank != ROOT:
            reason = f"no decision on step {step} for {patience_s:.1f} s"
            return self._report_stall((self.rank_assignment.members[ROOT].peer,), patience_s, reason)
        return self._process_effects(mine.tick(now_s), now_s)

    def extend_timeouts(self, until_s: float) -> None:
        """This worker slept: nobody is to blame for a silence before `until_s`."""
        limits = self._context.deadlines
        self.attempts.extend_timeouts(until_s)
        self.state_transfer.forwarding.extend_timeouts(until_s)
        self._formed_s = extend_start(self._formed_s, limits.route_s, until_s)
        self._disconnected_since_s = extend_start(self._disconnected_since_s, 2 * limits.regreet_s, until_s)

    @property
    def _step(self) -> int:
        return self._context.replica_state.applied + 1

    def _report_stall(self, suspects: Sequence[m.PeerId], silent_s: float, reason: str) -> list[MemberEffect]:
        self.is_stall_reported = True
        mine = self.attempts
        round_id = mine.open_attempt.round_id if mine.open_attempt is not None else mine.next_round
        told = m.RoundStalled(round_id, tuple(suspects), silent_s, reason)
        return [LogEvent("stalled", {"reason": reason}), Send(self._context.coordinator, told)]

    # -- edges ---------------------------------------------------------------------------------

    @property
    def _addresses(self) -> dict[m.PeerId, str]:
        return {member.peer: member.address for member in self.rank_assignment.members}

    @property
    def required_ranks(self) -> frozenset[int]:
        """Ranks this member must be connected to."""
        if self._required_ranks is None:  # asked for several times with each message
            self._required_ranks = required_ranks(self.rank_assignment, self._context.trainer)
        return self._required_ranks

    def trainer_joined(self) -> None:
        """The trainer has said anew with whom it exchanges."""
        self._required_ranks = None

    @property
    def missing_peers(self) -> tuple[m.PeerId, ...]:
        """Of these, who is not connected."""
        peers = (self.rank_assignment.members[rank].peer for rank in sorted(self.required_ranks))
        return tuple(peer for peer in peers if peer not in self._context.peer_links.connected)

    def dial_members(self) -> list[MemberEffect]:
        """What is told to dial whom."""
        peers = {self.rank_assignment.members[rank].peer for rank in self.required_ranks}
        peers |= self.state_transfer.forwarding.adjacent_peers if self.is_forming else frozenset()
        return self._context.peer_links.dial_members(self.rank_assignment, peers)

    def resend_unreachable(self) -> list[MemberEffect]:
        """The coordinator may have missed it."""
        missing = self.missing_peers if self.is_forming and math.isinf(self._formed_s) else ()
        return self._report_unreachable(missing) if missing else []

    def _report_unreachable(self, missing: Sequence[m.PeerId]) -> list[MemberEffect]:
        """Whoever was told how to connect, and could not, says so: there may be another way."""
        self._formed_s = math.inf
        ways, seat = self._addresses, self.rank_assignment
        tried = tuple(peer for peer in missing if ways[peer])
        if not tried:
            return []
        names = ", ".join(f"{peer.hex()[:8]} at {ways[peer]}" for peer in tried)
        told = m.PeersUnreachable(seat.term, seat.generation, tried)
        return [LogEvent("no_route", {"peers": names}), Send(self._context.coordinator, told)]

    def peer_connected(self, peer: m.PeerId, now_s: float) -> list[MemberEffect]:
        if self.is_forming:
            seat, asked = self.rank_assignment, self.state_transfer.request(peer)
            gives_a_piece = any(seat.members[rank].peer == peer for _, rank in seat.checkpoint_sources)
            if gives_a_piece and not self._context.checkpoints.loading:
                asked = self._load_checkpoints()
            return asked + self.check_ready()
        asked = self._means.peer_connected(peer) if self.is_running else []
        return asked + self.handle_round_event(lambda mine: mine.peer_connected(peer), now_s)

    def peer_disconnected(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        rank = self.rank_assignment.rank_of(peer)
        if self.is_forming:
            if math.isinf(self._formed_s) or self.missing_peers == (peer,):
                self._formed_s = now_s  # it was up, so there is a way: it may come back over that
            return self.dial_members()  # it was there when the VIEW came, so nobody had dialled it
        if not self.is_running or rank not in self.required_ranks:
            return []
        self._disconnected_since_s = now_s
        text = f"connection to rank {rank} broke: {reason}"
        note = LogEvent("edge_down", {"peer": peer.hex()[:8], "reason": reason})
        broken = m.ConnectionLost(self._context.coordinator_link.term, self.rank_assignment.generation, peer)
        told = Send(self._context.coordinator, broken)
        return [note, told, *self.handle_round_event(lambda mine: mine.peer_disconnected(text, now_s), now_s)]

    def protocol_violation(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        """Drop the peer until the next generation, and let the coordinator judge."""
        lasting = self._context
        known = peer in lasting.peer_links.excluded
        effects = lasting.exclude_peer(peer, reason)
        if known:
            return effects
        self.attempts.drop_early(peer)
        if (
            peer == self.state_transfer.forwarding.upstream
            and self.is_forming
            and not lasting.replica_state.is_synced
        ):
            effects += self.state_transfer.bypass_forwarder("it broke the protocol")
        if self.rank_assignment.rank_of(peer) is not None:
            self._disconnected_since_s = now_s
            effects.append(Send(lasting.coordinator, m.ViolationReport(peer, reason[:MAX_REASON_LENGTH])))
            text = f"peer {peer.hex()[:8]} broke the protocol: {reason}"
            effects += self.handle_round_event(lambda mine: mine.peer_disconnected(text, now_s), now_s)
        return effects

    # -- the way into it -----------------------------------------------------------------------

    def check_ready(self) -> list[MemberEffect]:
        if (
            not self.is_forming
            or self.is_ready_sent
            or not self._context.replica_state.is_synced
            or self.missing_peers
        ):
            return []
        self.is_ready_sent = True
        return [self._ready_message()]

    def resend_ready(self) -> list[MemberEffect]:
        """The coordinator may have missed it."""
        return [self._ready_message()] if self.is_forming and self.is_ready_sent else []

    def _ready_message(self) -> Send:
        told = m.Ready(
            self.rank_assignment.term, self.rank_assignment.generation, self._context.replica_state.history
        )
        return Send(self._context.coordinator, told)

    def state_loaded(self, term: int, generation: int) -> list[MemberEffect]:
        """The trainer has loaded the state of this generation, or of an earlier one."""
        holding = self._context.replica_state
        holding.is_modified = True
        if (term, generation) != (self.rank_assignment.term, self.rank_assignment.generation):
            return []  # the one that counts is on its way
        self._context.catch_up.finish()
        self._context.checkpoints.loading = ()
        holding.state_loaded(self.rank_assignment.layers)
        return [*self._report_again(), *self.state_transfer.serve_pending(), *self.check_ready()]

    def _report_again(self) -> list[MemberEffect]:
        """The report that answered FREEZE said that the state was missing.  The run may be paused because of
        that, and this state may be the last copy."""
        if self.phase is not MemberPhase.FROZEN:
            return []
        lasting = self._context
        at = lasting.coordinator_link.term, self.rank_assignment.generation
        return [Send(lasting.coordinator, lasting.replica_state.make_report(*at, self.prepared_vote))]

    def state_digest_mismatch(self, generation: int) -> list[MemberEffect]:
        """What was passed on is another state than the donor's."""
        due = (
            self.is_forming
            and generation == self.rank_assignment.generation
            and not self._context.replica_state.is_synced
        )
        return self.state_transfer.bypass_forwarder("the state that came is another one") if due else []

    def stage_checkpoints_changed(self, event: StageCheckpointsChanged) -> list[MemberEffect]:
        """The disk holds something else now."""
        lasting, seat = self._context, self.rank_assignment
        checkpoints = lasting.checkpoints
        new, lost = checkpoints.update_stored(event.checkpoints, event.failed_write)
        effects = checkpoints.report()
        begun = self.is_ready_sent or self.is_forming  # else the VIEW may be an old one, see `started`
        if lasting.replica_state.is_synced and begun:  # what was being written as the group went back
            effects += checkpoints.discard(lasting.replica_state.applied)
        if lasting.is_pipelined and self.is_running:
            effects += checkpoints.replicate(seat, new, lasting.peer_links.connected)
        if lost:
            effects += self.state_transfer.request()
        if self.is_forming:
            effects += checkpoints.serve_pending(seat)
            if not (checkpoints.loading or seat.members[seat.rank].joining):
                effects += self._load_checkpoints()
        return effects

    def _load_checkpoints(self) -> list[MemberEffect]:
        lasting = self._context
        return (
            lasting.checkpoints.load(self.rank_assignment, lasting.peer_links.connected)
            if lasting.is_pipelined
            else []
        )

    def start(self, now_s: float) -> list[MemberEffect]:
        """All are READY."""
        if not self.is_forming:
            return []
        seat = self.rank_assignment
        if (
            not self.is_ready_sent
        ):  # all were READY, so another process with this key was, and this one is not
            return [LogEvent("not_ready", {"generation": seat.generation, "rank": seat.rank})]
        self.phase, self._disconnected_since_s = MemberPhase.RUNNING, now_s
        fields = {"generation": seat.generation, "rank": seat.rank, "of": seat.world_size}
        # Not with the VIEW: after a restart of the coordinator it may say where a generation began that is
        # long further on, and what this worker's disk holds may be of just these steps.
        discarded = self._context.checkpoints.discard(self._context.replica_state.applied)
        return [LogEvent("start", fields), *discarded, *self._context.report_finished()]

    # -- its end -------------------------------------------------------------------------------

    def freeze(self) -> list[MemberEffect]:
        self.phase = MemberPhase.FROZEN
        return self._means.cancel()

    def close(self, first_step: int) -> None:
        """The run has ended, and nothing comes after this."""
        self.phase, self.is_ready_sent, self.is_stall_reported = MemberPhase.FROZEN, False, False
        self.attempts = Attempts(self.rank_assignment, first_step)

    @property
    def prepared_vote(self) -> tuple[m.RoundId, bytes, bool] | None:
        """The round that is prepared, its digest and whether it is skipped."""
        mine = self.attempts
        return (
            (mine.prepared_attempt.round_id, mine.prepared_attempt.digest, mine.skip)
            if mine.prepared_attempt is not None
            else None
        )

    def end(self, view: m.MembershipView | m.StandbyNotice) -> list[MemberEffect]:
        """Bring this member to `view.applied` and `view.history`, or mark it as lacking the state; who waits
        for an average goes on without it."""
        mine = self.attempts
        pending, prepared = mine.open_attempt, mine.prepared_attempt
        given_up = self._means.cancel()
        took = self._context.replica_state.apply_verdict(
            view, prepared.digest if prepared is not None else None
        )
        if took and prepared is not None:
            return [ResolveRound(prepared.round_id, True, mine.skip, view.reason), *given_up]
        ended = [ResolveRound(pending.round_id, False, False, view.reason)] if pending is not None else []
        return [*ended, *given_up]

    # -- what members say ----------------------------------------------------------------------

    def receive(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[MemberEffect]:
        """Of a member.  Raises `RemoteProtocolError`."""
        lasting, seat, mine = self._context, self.rank_assignment, self.attempts
        match message:
            case m.Data() | m.Vote() | m.Decision():
                # FORMING: held, since a peer may hear START first.  FROZEN: neither vote nor apply (rule 5).
                if self.phase is MemberPhase.FROZEN:
                    return []
                return self._process_effects(mine.receive(peer, message, nbytes, now_s), now_s)
            case m.RoundProgress():
                mine.record_progress(peer, message, now_s)
                return []
            case m.MeanRequest() | m.MeanReply():
                return self._means.receive(peer, message)
            case m.ResidualBlock():
                holding = lasting.replica_state
                return lasting.residual_transfer.receive_block(
                    seat, peer, message, holding.applied, holding.is_synced
                )
            case m.ResidualReply():
                at = lasting.replica_state.position
                return lasting.residual_transfer.receive_reply(
                    peer, message, seat, lasting.peer_links.connected, at
                )
            case (
                m.StateRequest()
                | m.CheckpointRequest()
                | m.StateBlock()
                | m.StateDigest()
                | m.CheckpointBlock()
            ):
                if (message.term, message.generation) != (seat.term, seat.generation):
                    return []
                return self._receive_state_message(peer, message, now_s)
            case _:
                name = type(message).__name__
                raise RemoteProtocolError(f"{name} from a member; only the coordinator may send it")

    def _receive_state_message(
        self,
        peer: m.PeerId,
        message: m.StateRequest | m.CheckpointRequest | m.StateBlock | m.StateDigest | m.CheckpointBlock,
        now_s: float,
    ) -> list[MemberEffect]:
        checkpoints = self._context.checkpoints
        match message:
            case m.StateRequest():
                return self.state_transfer.serve(peer, message)
            case m.CheckpointRequest():
                return checkpoints.serve(self.rank_assignment, peer, message)
            case m.StateBlock():
                return self.state_transfer.receive_block(peer, message, now_s)
            case m.StateDigest():
                return self.state_transfer.receive_digest(peer, message, now_s)
            case m.CheckpointBlock():
                return checkpoints.receive_block(
                    self.rank_assignment, self._context.is_pipelined, peer, message
                )

    # -- the open step -------------------------------------------------------------------------

    def submit(self, submit: SubmitRound, now_s: float) -> list[MemberEffect]:
        mine, pace = self.attempts, self._context.step_pace
        if not self.is_running or submit.round != mine.next_round:
            return [late_submission(submit)]
        pace.step_started(now_s)
        if not submit.is_complete:
            return self._process_effects(mine.begin(submit.collectives, now_s), now_s)
        begun = mine.submit(submit.round, submit.collectives, pace.timeout_s, now_s, submit.has_more)
        return self._process_effects(begun, now_s)

    def abandon_round(self, now_s: float) -> list[MemberEffect]:
        """The trainer leaves in the middle of a round."""
        voted = self.handle_round_event(lambda mine: mine.advance(Failed("this worker leaves"), now_s), now_s)
        mine = self.attempts.open_attempt
        if mine is None or mine.vote is not False:
            return voted
        # Without our YES it cannot be committed: there is no need to wait for the root's trainer.
        return [*voted, ResolveRound(mine.round_id, False, False, "this worker leaves")]

    def transfer_residual(self, event: TransferResidual) -> list[MemberEffect]:
        """The trainer leaves between two rounds."""
        mine, lasting = self.attempts.open_attempt, self._context
        free = self.is_running and (mine is None or mine.vote is False)
        seat = self.rank_assignment if free else None
        return lasting.residual_transfer.begin(
            event.blocks, seat, lasting.peer_links.connected, *lasting.replica_state.position
        )

    def send_digest(self, step: int, digest: bytes) -> list[MemberEffect]:
        """For the coordinator, which compares the members' fingerprints."""
        if not self.is_running or step != self._context.replica_state.applied:
            return []
        told = m.ReplicaDigest(self.rank_assignment.term, self.rank_assignment.generation, step, digest)
        return [Send(self._context.coordinator, told)]

    def request_mean(self, step: int, index: int, value: float) -> list[MemberEffect]:
        return self._means.request((step, index), value) if self.is_running else [DeliverMean(None)]

    def send_heartbeat(self, pulse: HeartbeatDue, stirred: bool, now_s: float) -> list[MemberEffect]:
        """Members tell the root that they live, the root tells all: that extends deadlines."""
        mine, roster = self.attempts, self.rank_assignment.members
        if not self.is_running or not (stirred or pulse.is_waiting):
            return []
        effects: list[MemberEffect] = []
        if mine.rank == ROOT:
            effects += self._process_effects(mine.advance(ProgressReceived(ROOT, stirred), now_s), now_s)
        audience = roster if mine.rank == ROOT else roster[ROOT : ROOT + 1]
        progress, up = m.RoundProgress(mine.next_round, pulse.progress), self._context.peer_links.connected
        return effects + [
            Send(x.peer, progress) for x in audience if x.peer != self.rank_assignment.own_id and x.peer in up
        ]

    def handle_round_event(
        self, act: Callable[[Attempts], list[AttemptEffect]], now_s: float
    ) -> list[MemberEffect]:
        """Only while it runs: frozen, a member neither votes nor applies (rule 5)."""
        return self._process_effects(act(self.attempts), now_s) if self.is_running else []

    def _process_effects(self, effects: list[AttemptEffect], now_s: float) -> list[MemberEffect]:
        """Apply what was committed, drop who offended; pass everything else on."""
        out: list[MemberEffect] = []
        for effect in effects:
            match effect:
                case StepCommitted():
                    out += self._commit(effect, now_s)
                case EarlyViolation(peer, reason):
                    out += self.protocol_violation(peer, reason, now_s)
                case _:
                    out.append(effect)
        return out

    def _commit(self, committed: StepCommitted, now_s: float) -> list[MemberEffect]:
        lasting = self._context
        assert lasting.setup is not None
        spec, holding = lasting.setup.ledger, lasting.replica_state
        state = data_ledger.commit(spec, holding.ledger, self.data_assignment(), skipped=committed.skip)
        holding.commit_step(committed.round.step, committed.digest, state)
        self.is_stall_reported = False
        lasting.step_pace.step_committed(now_s)
        voided = lasting.residual_transfer.step_committed(holding.applied)
        resolved = ResolveRound(committed.round, True, committed.skip, committed.reason)
        return [resolved, *voided, *lasting.report_finished()]


def late_submission(submit: SubmitRound) -> ResolveRound:
    return ResolveRound(submit.round, False, False, "the generation changed before the round began")
