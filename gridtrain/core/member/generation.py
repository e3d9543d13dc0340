"""One member's part in a generation, from the generation's MembershipView to the next one.

    FORMING  synced and connected? --> Ready      StartGeneration  RUNNING  <--+
       |     not connected: PeersUnreachable     ------------->       |        |
       |     no block arrives: ask the source                    SubmitRound   |  StepCommitted
       |                                                              v        |
       +--------------- Freeze ----------> FROZEN <---- Freeze ---- Attempts --+
                                           neither votes nor applies (commit rule 5)

`view_changes` decides when a generation begins and ends; `attempts` runs the attempts at the open step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.attempts import AttemptEffect, Attempts, EarlyViolation, StepCommitted
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group.member_events import (
    AbandonRound,
    AddCollectives,
    CompareReplicas,
    DeliverMean,
    DigestComputed,
    GenerationEvent,
    HeartbeatDue,
    LogEvent,
    MemberEffect,
    MemberPhase,
    RequestMean,
    ResolveRound,
    RoundFailed,
    Send,
    StageCheckpointsChanged,
    StateDigestMismatch,
    StateLoaded,
    StayPresent,
    SubmitRound,
    TrainerReturned,
    TransferResidual,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.round_flags import absent_ranks, is_skipped
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.incoming_state import IncomingState
from gridtrain.core.member.required_peers import RequiredPeers
from gridtrain.core.member.scalar_means import MeanKey, ScalarMeans
from gridtrain.core.member.stragglers import Stragglers
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.quantities import MAX_NAMES, insert_names, list_first

MAX_REASON_LENGTH = 200
_STATE_MESSAGES = (m.StateRequest, m.StateDigest, m.StateBlock, m.CheckpointRequest, m.CheckpointBlock)


class Generation:
    """State machine of one member in one generation: FORMING, RUNNING, FROZEN.

    Args:
        first_step: the generation's first step.
        known_means: see `ScalarMeans`.
        chained: see `IncomingState`.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        first_step: int,
        context: MemberContext,
        now_s: float,
        *,
        known_means: Mapping[MeanKey, float],
        chained: bool,
    ) -> None:
        self.rank_assignment = assignment
        self.first_step = first_step
        self.phase = MemberPhase.FORMING
        self.required_peers = RequiredPeers(assignment, context, now_s)
        self.incoming_state = IncomingState(assignment, context, chained=chained)
        self._context = context
        self._means = ScalarMeans(assignment, first_step, known_means)
        trainer = context.trainer
        self.stragglers = Stragglers(
            assignment,
            self._count_samples,
            context.usual_delays,
            is_enabled=trainer is not None and trainer.may_be_absent,
        )
        self.attempts = Attempts(assignment, first_step, may_be_absent=self.stragglers.is_enabled)
        self._is_ready_sent = False
        self._is_stall_reported = False
        self._attempt_ended_s = now_s
        self._assigned: tuple[m.LedgerState, dict[m.PeerId, tuple[m.Span, ...]]] | None = None

    @property
    def _is_running(self) -> bool:
        return self.phase is MemberPhase.RUNNING

    @property
    def _is_forming(self) -> bool:
        return self.phase is MemberPhase.FORMING

    @property
    def awaited_newcomers(self) -> tuple[str, ...]:
        """While the generation forms: the names of the other members that must first receive the state."""
        if not self._is_forming:
            return ()
        at = self.rank_assignment
        return tuple(member.name for member in at.members if member.joining and member.peer != at.own_id)

    # -- the open step, for the trainer --------------------------------------------------------

    @property
    def next_round(self) -> m.RoundId | None:
        """The round for which the trainer may submit its contribution now; None if it must wait."""
        return self._next_round if self.stragglers.absence is None else None

    @property
    def absent_round(self) -> tuple[m.RoundId, bytes] | None:
        """The round that now needs an empty contribution, and the optimizer settings for applying its update.

        None if there is no such round.  `SubmitRound` or `StayPresent` follows.
        """
        round_id, absence = self._next_round, self.stragglers.absence
        if round_id is None or absence is None or self._context.residual_transfer.is_refusing:
            return None
        return round_id, absence[1]

    @property
    def _next_round(self) -> m.RoundId | None:
        attempts, context = self.attempts, self._context
        if not self._is_running or attempts.open_attempt is not None:
            return None
        if attempts.is_stuck or context.is_finished or context.residual_transfer.is_leaving:
            return None
        return None if self.required_peers.missing else attempts.next_round

    @property
    def doomed_round(self) -> m.RoundId | None:
        """The open round if it can no longer commit, because this member has voted NO, or had not voted
        before the Freeze; otherwise None."""
        attempt = self.attempts.open_attempt
        if attempt is None or attempt.vote is True:
            return None
        return attempt.round_id if not self._is_running or attempt.vote is False else None

    def data_positions(self) -> tuple[tuple[m.Span, ...], int, int]:
        """Return this member's data positions in the open step, and two sample counts that weight its
        contribution.

        `data_ledger.contribution_weight` returns the counts: those of this member's and of all members'
        contributions.  In a pipeline, all members of one replica process the same
        samples, so the positions and the first count cover all of these members, first stage first.

        Raises:
            LocalProtocolError: the trainer has not joined.
        """
        spans_of, assignment = self.data_assignment(), self.rank_assignment
        spec, ledger = self._ledger_spec, self._context.replica_state.ledger
        weight = data_ledger.contribution_weight(spec, ledger, spans_of, assignment.own_id)
        if not self._context.is_pipelined:
            return (spans_of[assignment.own_id], *weight)
        ranks = assignment.layout.pipeline_ranks(assignment.layout.replica_of(assignment.rank))
        spans = tuple(span for rank in ranks for span in spans_of[assignment.members[rank].peer])
        return spans, data_ledger.count_samples(spans), weight[1]

    def _count_samples(self) -> list[int]:
        """Return the number of samples that the open step assigns to each rank."""
        spans_of = self.data_assignment()
        return [data_ledger.count_samples(spans_of[member.peer]) for member in self.rank_assignment.members]

    def data_assignment(self) -> dict[m.PeerId, tuple[m.Span, ...]]:
        """Return each member's data positions in the open step, computed only from replicated state.

        The positions are computed once for each state of the ledger.
        """
        ledger = self._context.replica_state.ledger
        if self._assigned is None or self._assigned[0] is not ledger:
            spans_of = data_ledger.assign(self._ledger_spec, ledger, self.rank_assignment.shares)
            self._assigned = ledger, spans_of
        return self._assigned[1]

    @property
    def is_last_step(self) -> bool:
        """Whether the open step ends the run, if no member is absent from it."""
        ledger = self._context.replica_state.ledger
        return data_ledger.can_be_last(self._ledger_spec, ledger, self.data_assignment())

    @property
    def _ledger_spec(self) -> m.LedgerSpec:
        setup = self._context.setup
        if setup is None:
            raise LocalProtocolError("data positions were requested before the trainer had joined")
        return setup.ledger

    @property
    def is_comparison_due(self) -> bool:
        """Whether the replicas must be compared after the next step.

        They are compared after the first step of a generation that members have joined, and after the first
        step of a run, whose members may all have built the initial state themselves.
        """
        if self._context.replica_state.step != self.first_step:
            return False
        members = self.rank_assignment.members
        return (self.first_step == 0 and len(members) > 1) or any(member.joining for member in members)

    @property
    def pause_reason(self) -> str:
        """The reason why training must wait for the coordinator (commit rule 10); empty if there is none."""
        if not self._is_running:
            return "the next generation needs the coordinator"
        if missing := self.required_peers.missing:
            lost = "the connection to 1 peer is" if len(missing) == 1 else f"{len(missing)} connections are"
            return (
                f"{lost} lost; only the coordinator can make a generation without "
                f"{'this peer' if len(missing) == 1 else 'these peers'}"
            )
        if self._is_stall_reported:
            return "a step cannot be committed, and only the coordinator can start a new generation"
        return ""

    # -- the clock -----------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """The time at which to call `tick`."""
        attempts, required = self.attempts, self.required_peers
        if self._is_forming:
            if self._context.replica_state.is_synced:
                return required.forming_deadline_s
            return min(required.forming_deadline_s, self.incoming_state.forwarding.deadline_s)
        if not self._is_running or self._is_stall_reported:
            return math.inf
        if attempts.is_stuck and attempts.rank == ROOT:
            return -math.inf
        if required.missing and not self._context.is_declared_finished:
            return required.running_deadline_s
        return min(attempts.deadline_s, self.stragglers.deadline_s, self._mean_due_s)

    def tick(self, now_s: float) -> list[MemberEffect]:
        """Act on a timeout that has passed: for example, report a stall or abort the attempt."""
        attempts, required = self.attempts, self.required_peers
        if self._is_forming:
            is_synced = self._context.replica_state.is_synced
            is_late = not is_synced and now_s >= self.incoming_state.forwarding.deadline_s
            bypass = self.incoming_state.bypass_forwarder("no block arrived in time") if is_late else []
            return bypass + required.report_late(now_s)
        step, timeout_s = self._context.replica_state.step + 1, self._context.step_pace.timeout_s
        if attempts.is_stuck and attempts.rank == ROOT:
            reason = f"attempts at step {step} were aborted: {attempts.abort_reason}"
            return self._report_stall(attempts.suspects, attempts.silent_s, reason)
        if (missing := required.missing) and not self._context.is_declared_finished:
            names = list_first([self.rank_assignment.name_of(peer) for peer in missing], MAX_NAMES)
            # A peer that violated the protocol was disconnected on purpose.
            excluded = self._context.peer_links.excluded
            unreachable = required.report_unreachable([peer for peer in missing if peer not in excluded])
            return unreachable + self._report_stall(missing, 0.0, f"no connection to {names}")
        if now_s < attempts.deadline_s:
            means = self._means.complete() if now_s >= self._mean_due_s else []
            return means + self.stragglers.tick(now_s)
        if attempts.rank != ROOT:
            reason = f"no decision on step {step} for {timeout_s:.1f} s"
            return self._report_stall((self.rank_assignment.members[ROOT].peer,), timeout_s, reason)
        return self._process_effects(attempts.tick(now_s), now_s)

    @property
    def _mean_due_s(self) -> float:
        """The time at which the root completes averages without the ranks that have not contributed.

        Infinite if steps cannot continue without members whose trainers have stalled.
        """
        if not self.stragglers.is_enabled:
            return math.inf
        return self.stragglers.late_s(self._means.awaited_ranks)

    def extend_timeouts(self, until_s: float) -> None:
        """After a stall of this worker's loop, postpone the deadlines to `until_s` or later."""
        self.attempts.extend_timeouts(until_s)
        self.stragglers.extend_timeouts(until_s)
        self.incoming_state.forwarding.extend_timeouts(until_s)
        self.required_peers.extend_timeouts(until_s)

    def _report_stall(self, suspects: Sequence[m.PeerId], silent_s: float, reason: str) -> list[MemberEffect]:
        self._is_stall_reported = True
        attempt = self.attempts.open_attempt
        round_id = attempt.round_id if attempt is not None else self.attempts.next_round
        report = m.RoundStalled(round_id, tuple(suspects), silent_s, reason)
        names = {f"rank {rank}": member.name for rank, member in enumerate(self.rank_assignment.members)}
        named = {"reason": insert_names(reason, names.get)}
        log = [LogEvent("stalled", named)] if self._context.coordinator_link.is_welcomed else []
        return [*log, Send(self._context.coordinator, report)]

    # -- connections ---------------------------------------------------------------------------

    def dial_members(self) -> list[MemberEffect]:
        chain = self.incoming_state.forwarding.adjacent_peers if self._is_forming else frozenset()
        return self.required_peers.dial(chain)

    def peer_connected(self, peer: m.PeerId, now_s: float) -> list[MemberEffect]:
        if self._is_forming:
            assignment = self.rank_assignment
            effects = self.incoming_state.request(peer)
            is_source = any(assignment.members[r].peer == peer for _, r in assignment.checkpoint_sources)
            if is_source and not self._context.checkpoints.loading:
                effects = self._load_checkpoints()
            return effects + self.check_ready()
        effects = self._means.peer_connected(peer) if self._is_running else []
        return effects + self._update_round(lambda attempts: attempts.peer_connected(peer), now_s)

    def peer_disconnected(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        """Tell the coordinator that a required connection was lost; while RUNNING, fail the open round.

        The report is sent in every phase, so that the exit of a member between two generations is also
        detected.  While FORMING, the member is dialled again.
        """
        effects: list[MemberEffect] = []
        rank, required = self.rank_assignment.rank_of(peer), self.required_peers
        if rank in required.ranks:
            term, generation = self._context.coordinator_link.term, self.rank_assignment.generation
            lost = m.ConnectionLost(term, generation, peer)
            log = LogEvent("edge_down", {"peer": peer.hex()[:8], "reason": reason})
            effects = [log, Send(self._context.coordinator, lost)]
        if self._is_forming:
            required.disconnected_while_forming(peer, now_s)
            # A peer that was connected when the MembershipView arrived was not dialled.
            return effects + self.dial_members()
        if not self._is_running or not effects:
            return effects
        required.restart_running_wait(now_s)
        text = f"connection to rank {rank} broke: {reason}"
        return effects + self._update_round(lambda attempts: attempts.peer_disconnected(text, now_s), now_s)

    def protocol_violation(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        """Exclude the peer until the next generation; if it is a member, report it and fail the round."""
        context, forwarding = self._context, self.incoming_state.forwarding
        was_excluded = peer in context.peer_links.excluded
        effects = context.exclude_peer(peer, reason)
        if was_excluded:
            return effects
        self.attempts.drop_early(peer)
        if peer == forwarding.upstream and self._is_forming and not context.replica_state.is_synced:
            effects += self.incoming_state.bypass_forwarder("it violated the protocol")
        if self.rank_assignment.rank_of(peer) is not None:
            self.required_peers.restart_running_wait(now_s)
            effects.append(Send(context.coordinator, m.ViolationReport(peer, reason[:MAX_REASON_LENGTH])))
            text = f"peer {peer.hex()[:8]} violated the protocol: {reason}"
            effects += self._update_round(lambda attempts: attempts.peer_disconnected(text, now_s), now_s)
        return effects

    # -- the coordinator -----------------------------------------------------------------------

    def coordinator_returned(self) -> list[MemberEffect]:
        """After the coordinator's Welcome, repeat the messages that it may have missed."""
        self._is_stall_reported = False
        if not self._is_forming:
            return self._context.report_finished() if self._is_running else []
        ready = [self._ready_message()] if self._is_ready_sent else []
        return [*ready, *self.required_peers.repeat_unreachable()]

    def check_ready(self) -> list[MemberEffect]:
        """Send Ready, once, as soon as this member is synced and its required peers are connected."""
        is_synced = self._context.replica_state.is_synced
        if not self._is_forming or self._is_ready_sent or not is_synced or self.required_peers.missing:
            return []
        self._is_ready_sent = True
        awaited = self.awaited_newcomers
        return [*([LogEvent("awaited", {"names": awaited})] if awaited else []), self._ready_message()]

    def _ready_message(self) -> Send:
        assignment, history = self.rank_assignment, self._context.replica_state.history
        return Send(self._context.coordinator, m.Ready(assignment.term, assignment.generation, history))

    def start(self, now_s: float) -> list[MemberEffect]:
        """Handle StartGeneration: all members are ready, so training begins."""
        if not self._is_forming:
            return []
        assignment, context = self.rank_assignment, self._context
        fields = {"generation": assignment.generation, "rank": assignment.rank}
        if not self._is_ready_sent:  # Ready was sent by another process with this key
            return [LogEvent("not_ready", fields)]
        self.phase = MemberPhase.RUNNING
        self.stragglers.started([batch.peer for batch in context.replica_state.ledger.late], now_s)
        self.required_peers.restart_running_wait(now_s)
        # Not discarded at the MembershipView, because a restarted coordinator may send the MembershipView of
        # a generation that has since committed steps, whose checkpoints may be on this disk.
        discarded = context.checkpoints.discard(context.replica_state.applied)
        event = LogEvent("start", {**fields, "of": assignment.world_size})
        means = self._means.repeat_known() if self.stragglers.is_enabled else []
        return [event, *discarded, *means, *context.report_finished()]

    @property
    def known_means(self) -> Mapping[MeanKey, float]:
        """The averages that the trainer has received, for use in the next generation."""
        return self._means.known

    def freeze(self) -> None:
        """Handle Freeze: stop voting and applying updates.

        Averaging continues, because some members may already have received the pending average.
        """
        self.phase = MemberPhase.FROZEN

    def end(
        self, view: m.MembershipView | m.StandbyNotice, *, must_know_round: bool = False
    ) -> list[MemberEffect]:
        """Apply the prepared update if `view` commits it, and end the open round.

        If the member does not hold the state of `view` afterwards, it is marked as not synced.

        Args:
            must_know_round: see `ReplicaState.apply_verdict`.
        """
        prepared, digest, flags = self.attempts.prepared_vote
        is_applied = self._context.replica_state.apply_verdict(
            view, prepared, digest, must_know_round=must_know_round
        )
        if is_applied and prepared is not None:
            resolved = ResolveRound(prepared, True, flags, view.reason)
            return [resolved, *self._means.cancel()]
        return self.abandon(view.reason, is_unknown=is_applied is None)

    def abandon(self, reason: str, *, is_unknown: bool = False) -> list[MemberEffect]:
        """End the open round without applying its update; `is_unknown` is as in ResolveRound."""
        cancelled, attempt = self._means.cancel(), self.attempts.open_attempt
        if attempt is None:
            return cancelled
        return [ResolveRound(attempt.round_id, False, 0, reason, is_unknown), *cancelled]

    def close(self, first_step: int) -> None:
        """Discard the open attempt after the run's last step; the trainer then learns that the run is over.

        Args:
            first_step: the step after the last one.
        """
        self.phase, self._is_ready_sent, self._is_stall_reported = MemberPhase.RUNNING, False, False
        self.attempts = Attempts(self.rank_assignment, first_step)

    # -- other members -------------------------------------------------------------------------

    def receive_data(self, rank: int, data: m.Data, nbytes: int, now_s: float) -> list[MemberEffect]:
        """Process a payload from the member with this rank.

        Raises:
            RemoteProtocolError: the payload violates the protocol.
        """
        if self.phase is MemberPhase.FROZEN:
            return []
        effects = self.attempts.deliver_data(rank, data)
        if effects is None:  # not for the open attempt: to be dropped, deferred, or rejected as a violation
            peer = self.rank_assignment.members[rank].peer
            return self._process_effects(self.attempts.receive(peer, data, nbytes, now_s), now_s)
        return effects

    def receive(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[MemberEffect]:
        """Process a message of any type except Data from a member.

        Raises:
            RemoteProtocolError: the message violates the protocol.
        """
        context, assignment, state = self._context, self.rank_assignment, self._context.replica_state
        if isinstance(message, _STATE_MESSAGES) and not assignment.is_generation_of(message):
            return []
        match message:
            case m.Vote() | m.Decision():
                # While FORMING, the message is deferred: the peer may have received StartGeneration first.
                if self.phase is MemberPhase.FROZEN:
                    return []
                effects = self.attempts.receive(peer, message, nbytes, now_s)
                if isinstance(message, m.Vote) and self.attempts.rank == ROOT and self._is_running:
                    rank = assignment.rank_of(peer)
                    assert rank is not None
                    self.stragglers.voted(rank, message.compute_s)
                return self._process_effects(effects, now_s)
            case m.Waiting() | m.ProceedWithout():
                rank = assignment.rank_of(peer)
                if rank is None or not assignment.is_generation_of(message.round) or not self._is_running:
                    return []
                return self.stragglers.receive(rank, message, state.step, now_s)
            case m.RoundProgress():
                self.attempts.record_progress(peer, message, now_s)
                return []
            case m.MeanRequest() | m.MeanReply():
                return self._means.receive(peer, message)
            case m.ResidualBlock():
                return context.residual_transfer.receive_block(assignment, peer, message)
            case m.ResidualReply():
                return context.residual_transfer.receive_reply(assignment, peer, message)
            case m.StateRequest():
                # When StartGeneration arrives, all members hold the state; a later request would only keep
                # the trainer busy.
                return self.incoming_state.serve(peer, message) if not self._is_running else []
            case m.CheckpointRequest():
                return context.checkpoints.serve(assignment, peer, message)
            case m.StateBlock():
                return self.incoming_state.receive_block(peer, message, now_s)
            case m.StateDigest():
                return self.incoming_state.receive_digest(peer, message, now_s)
            case m.CheckpointBlock():
                return context.checkpoints.receive_block(assignment, context.is_pipelined, peer, message)
            case _:
                name = type(message).__name__
                raise RemoteProtocolError(f"a member sent {name}; only the coordinator may send it")

    # -- the trainer and the loop --------------------------------------------------------------

    def handle(self, event: GenerationEvent, now_s: float) -> list[MemberEffect]:
        match event:
            case SubmitRound():
                return self._submit(event, now_s)
            case StayPresent(round_id):
                if round_id.step == self.attempts.next_round.step:
                    self.stragglers.take_part()
                return []
            case TrainerReturned():
                self.stragglers.trainer_returned(now_s)
                return []
            case AddCollectives():
                return self._update_round(lambda attempts: attempts.add_collectives(event, now_s), now_s)
            case DigestComputed(digest):
                return self._update_round(lambda attempts: attempts.prepare(digest, now_s), now_s)
            case RoundFailed(reason):
                return self._update_round(lambda attempts: attempts.fail(reason, now_s), now_s)
            case AbandonRound():
                return self._abandon_round(now_s)
            case TransferResidual(blocks):
                return self._transfer_residual(blocks)
            case RequestMean(step, index, value):
                if self._is_running and not self._context.is_ended_early:
                    return self._means.request((step, index), value)
                return [DeliverMean(step, index, None)]
            case CompareReplicas(step, digest):
                return self._send_digest(step, digest)
            case StateLoaded(term, generation):
                return self._state_loaded(term, generation)
            case StateDigestMismatch(generation):
                return self._state_digest_mismatch(generation)
            case StageCheckpointsChanged():
                return self._stage_checkpoints_changed(event)
            case _:
                raise LocalProtocolError(f"a generation cannot handle the event {event}")

    def send_heartbeat(self, event: HeartbeatDue, has_moved: bool, now_s: float) -> list[MemberEffect]:
        """Report progress to the root or, as the root, to all members; receivers extend their deadlines."""
        attempts, members = self.attempts, self.rank_assignment.members
        effects = self._means.ask_missing() if self._is_running and attempts.rank == ROOT else []
        if not self._is_running or not (has_moved or event.is_waiting):
            return effects
        timeout_s = self._context.step_pace.timeout_s
        is_overdue = attempts.is_stuck and now_s >= self._attempt_ended_s + timeout_s
        if is_overdue and not self._is_stall_reported:  # the root has not reported the stall
            reason = (
                f"step {attempts.next_round.step + 1} was aborted, but no Freeze arrived within "
                f"{timeout_s:.1f} s"
            )
            effects += self._report_stall((members[ROOT].peer,), 0.0, reason)
        self.stragglers.repeat()
        computed = attempts.next_round.step - self._ledger_spec.delay  # with a delay, an earlier batch
        if attempts.open_attempt is not None and not attempts.is_absent and computed >= 0:
            effects += self._means.trainer_submitted(computed)
        if attempts.rank == ROOT and attempts.open_attempt is not None:
            attempts.open_attempt.record_progress(ROOT, has_moved, now_s)
        receivers = members if attempts.rank == ROOT else members[ROOT : ROOT + 1]
        progress = m.RoundProgress(attempts.next_round, event.progress)
        own_id, connected = self.rank_assignment.own_id, self._context.peer_links.connected
        return effects + [
            Send(x.peer, progress) for x in receivers if x.peer != own_id and x.peer in connected
        ]

    def _state_loaded(self, term: int, generation: int) -> list[MemberEffect]:
        """Handle a `StateLoaded` event for this generation or for an earlier generation."""
        context, assignment = self._context, self.rank_assignment
        if (term, generation) != (assignment.term, assignment.generation):
            context.replica_state.mark_modified()
            return []  # this generation's state has been requested
        context.catch_up.finish()
        context.checkpoints.finish_loading()
        context.replica_state.state_loaded(assignment.layers)
        return [*self._repeat_freeze_report(), *self.incoming_state.serve_pending(), *self.check_ready()]

    def _repeat_freeze_report(self) -> list[MemberEffect]:
        """If FROZEN, send a second FreezeReport, because the first one says that this member is not synced.

        The run may be paused for that reason, and the state that was loaded since then may be the only copy.
        """
        if self.phase is not MemberPhase.FROZEN:
            return []
        context = self._context
        at = context.coordinator_link.term, self.rank_assignment.generation
        report = context.replica_state.make_freeze_report(*at, self.attempts.prepared_vote)
        return [Send(context.coordinator, report)]

    def _state_digest_mismatch(self, generation: int) -> list[MemberEffect]:
        """Handle a forwarded state with the wrong digest: request the state from its source."""
        is_current = self._is_forming and generation == self.rank_assignment.generation
        if not is_current or self._context.replica_state.is_synced:
            return []
        return self.incoming_state.bypass_forwarder("the state's digest differs from the source's")

    def _stage_checkpoints_changed(self, event: StageCheckpointsChanged) -> list[MemberEffect]:
        context, assignment, checkpoints = self._context, self.rank_assignment, self._context.checkpoints
        new, is_lost = checkpoints.update_stored(event.checkpoints, event.failed_write)
        effects = checkpoints.report()
        # If neither is true, the MembershipView may be old; see `start`.
        has_begun = self._is_ready_sent or self._is_forming
        if context.replica_state.is_synced and has_begun:  # some may have been written during a rollback
            effects += checkpoints.discard(context.replica_state.applied)
        if context.is_pipelined and self._is_running:
            effects += checkpoints.replicate(assignment, new, context.peer_links.connected)
        if is_lost:
            effects += self.incoming_state.request()
        if self._is_forming:
            effects += checkpoints.serve_pending(assignment)
            if not (checkpoints.loading or assignment.members[assignment.rank].joining):
                effects += self._load_checkpoints()
        return effects

    def _load_checkpoints(self) -> list[MemberEffect]:
        context = self._context
        if not context.is_pipelined:
            return []
        return context.checkpoints.load(self.rank_assignment, context.peer_links.connected)

    def _submit(self, event: SubmitRound, now_s: float) -> list[MemberEffect]:
        attempts, pace = self.attempts, self._context.step_pace
        if not self._is_running or event.round != attempts.next_round:
            return [late_submission(event)]
        if not self.stragglers.accepts(is_absent=event.is_absent):
            return [late_submission(event)]
        pace.step_started(now_s)
        if not event.is_complete:
            return self._process_effects(attempts.begin(event.collectives, now_s), now_s)
        attempts.compute_s = None
        if not event.is_absent:
            attempts.compute_s = self.stragglers.submitted(event.round, event.settings, now_s)
        effects = attempts.submit(
            event.round,
            event.collectives,
            pace.timeout_s,
            now_s,
            has_more=event.has_more,
            is_absent=event.is_absent,
        )
        return self._process_effects(effects, now_s) + self.stragglers.tick(now_s)

    def _abandon_round(self, now_s: float) -> list[MemberEffect]:
        """Vote NO for a trainer that is leaving, and end the round for it without the root's decision.

        If the member has already voted YES, the round continues.
        """
        reason = "this worker is leaving"
        effects = self._update_round(lambda attempts: attempts.fail(reason, now_s), now_s)
        attempt = self.attempts.open_attempt
        if attempt is None or attempt.vote is not False:
            return effects
        return [*effects, ResolveRound(attempt.round_id, False, 0, reason)]

    def _transfer_residual(self, blocks: Sequence[object]) -> list[MemberEffect]:
        """Start to transfer the residual of a trainer that is leaving.

        The transfer fails unless this member is RUNNING, and no round is open or it has voted NO on it.
        """
        attempt = self.attempts.open_attempt
        is_free = self._is_running and (attempt is None or attempt.vote is False)
        return self._context.residual_transfer.begin(blocks, self.rank_assignment if is_free else None)

    def _send_digest(self, step: int, digest: bytes) -> list[MemberEffect]:
        """Send this replica's digest to the coordinator, which compares the digests of all replicas.

        After a stall, the trainer's digest may be for an earlier step of this generation.
        """
        if not self._is_running or not self.first_step <= step <= self._context.replica_state.applied:
            return []
        assignment = self.rank_assignment
        message = m.ReplicaDigest(assignment.term, assignment.generation, step, digest)
        return [Send(self._context.coordinator, message)]

    # -- the open step -------------------------------------------------------------------------

    def _update_round(
        self, act: Callable[[Attempts], list[AttemptEffect]], now_s: float
    ) -> list[MemberEffect]:
        """Call `act` and process its effects, but only while RUNNING: a frozen member neither votes nor
        commits (rule 5)."""
        return self._process_effects(act(self.attempts), now_s) if self._is_running else []

    def _process_effects(self, effects: list[AttemptEffect], now_s: float) -> list[MemberEffect]:
        """Apply commits, exclude peers that violated the protocol, and return all other effects unchanged."""
        out: list[MemberEffect] = []
        for effect in effects:
            match effect:
                case StepCommitted():
                    out += self._commit(effect, now_s)
                case EarlyViolation(peer, reason):
                    out += self.protocol_violation(peer, reason, now_s)
                case ResolveRound():
                    self._attempt_ended_s = now_s
                    self.stragglers.attempt_ended()
                    out.append(effect)
                case _:
                    out.append(effect)
        return out

    def _commit(self, committed: StepCommitted, now_s: float) -> list[MemberEffect]:
        context, state = self._context, self._context.replica_state
        spans_of, flags = self.data_assignment(), committed.flags
        absent = {self.rank_assignment.members[rank].peer for rank in absent_ranks(flags)}
        ledger = data_ledger.commit(
            self._ledger_spec, state.ledger, spans_of, skipped=is_skipped(flags), absent=absent
        )
        state.commit_step(committed.round.step, committed.digest, ledger)
        proceeded = self.stragglers.committed(flags, now_s)
        means = self._means.complete() if self.stragglers.is_enabled else []  # answers late calls
        self._means.absent = self.stragglers.absent
        self._is_stall_reported = False
        context.step_pace.step_committed(now_s)
        dropped = context.residual_transfer.step_committed()
        resolved = ResolveRound(committed.round, True, flags, committed.reason)
        return [resolved, *proceeded, *means, *dropped, *context.report_finished()]


def late_submission(event: SubmitRound) -> ResolveRound:
    """Return the answer to a submission for a round that can no longer begin."""
    return ResolveRound(event.round, False, 0, "the round can no longer begin")
