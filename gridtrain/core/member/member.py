"""A worker's state machine: turns events from the I/O loop, the trainer and the network into effects.

    event --> MemberCore       events and effects are in `core.group.member_events`
                 |
                 v
             ViewChanges       follows the generations that the coordinator announces, routes messages
                 |
                 v
             Generation        one at a time, with `Attempts` at the open step, the averages of `grid.mean`
                 |             and the incoming state
                 v
             MemberContext     for the lifetime of the worker: links to coordinator and peers, replica state,
                               checkpoints, catch-up, residual transfer, step pace

The state machine never reads a payload, and uses no socket, clock, tensor or thread.
"""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.io_loop_stalls import LoopStallDetector
from gridtrain.core.group.member_events import (
    AddressChanged,
    CatchUpFailed,
    CaughtUp,
    DeliverMean,
    GenerationEvent,
    HeartbeatDue,
    LeaveGroup,
    LogEvent,
    MemberEffect,
    MemberEvent,
    MemberPhase,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    ProbeResults,
    ProtocolViolation,
    RefuseResiduals,
    RequestMean,
    ResidualReceived,
    Send,
    StageCheckpointsChanged,
    StateLoaded,
    StateSnapshotLoading,
    SubmitRound,
    TrainerJoined,
    TransferResidual,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.generation import Generation, late_submission
from gridtrain.core.member.view_changes import ViewChanges
from gridtrain.errors import LocalProtocolError


class MemberCore:
    """A worker's state machine.

    Args:
        own_id: public key of this worker.
        coordinator: public key of the coordinator.
        join: the Join message that introduces this worker.
        deadlines: time limits; see `gridtrain.config.Deadlines`.

    Attributes:
        coordinator_link, replica_state, residual_transfer: parts of the state machine; read-only.
    """

    def __init__(self, own_id: m.PeerId, coordinator: m.PeerId, join: m.Join, deadlines: Deadlines) -> None:
        self.own_id = own_id
        self.coordinator = coordinator
        self._context = context = MemberContext(own_id, coordinator, join, deadlines)
        self.coordinator_link, self.replica_state = context.coordinator_link, context.replica_state
        self.residual_transfer = context.residual_transfer
        self._view_changes = ViewChanges(self._context)
        self._stall_detector = LoopStallDetector()

    # -- state, read-only: the values that are read most often --------------------------------------

    @property
    def current_generation(self) -> Generation | None:
        """The generation to which this worker belongs; None if it belongs to none."""
        return self._view_changes.generation

    @property
    def term(self) -> int:
        return self.coordinator_link.term

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 if there is none."""
        return self._view_changes.generation_number

    @property
    def phase(self) -> MemberPhase:
        generation = self._view_changes.generation
        return generation.phase if generation is not None else MemberPhase.APART

    @property
    def rank_assignment(self) -> RankAssignment | None:
        """This worker's rank and the members of the current generation."""
        return self._view_changes.rank_assignment

    @property
    def known_peers(self) -> frozenset[m.PeerId]:
        """Peers whose messages are accepted."""
        return self._context.known_peers(self.rank_assignment)

    @property
    def applied(self) -> int:
        """The last step applied; -1 if there is none."""
        return self.replica_state.applied

    @property
    def step(self) -> int:
        """The open step, or the next one if none is open."""
        return self.replica_state.step

    @property
    def history(self) -> bytes:
        """Chained digest of all updates applied."""
        return self.replica_state.history

    @property
    def is_synced(self) -> bool:
        """Whether this worker holds the state of its stage that `applied` and `history` identify."""
        return self.replica_state.is_synced

    @property
    def is_finished(self) -> bool:
        """See `MemberContext.is_finished`."""
        return self._context.is_finished

    @property
    def is_ended_early(self) -> bool:
        """See `MemberContext.is_ended_early`."""
        return self._context.is_ended_early

    @property
    def next_round(self) -> m.RoundId | None:
        """The round for which the trainer may submit its contribution now; None if it must wait."""
        generation = self._view_changes.generation
        return generation.next_round if generation is not None else None

    @property
    def absent_round(self) -> tuple[m.RoundId, bytes] | None:
        """See `Generation.absent_round`."""
        generation = self._view_changes.generation
        return generation.absent_round if generation is not None else None

    @property
    def pause_reason(self) -> str:
        """The reason why training must wait for the coordinator (commit rule 10); empty if there is none."""
        is_obeyed = not self.coordinator_link.is_fenced  # a fenced coordinator is ignored
        if self.coordinator in self._context.peer_links.connected and is_obeyed:
            return ""
        if not self.term or self.is_finished:
            return ""
        generation = self._view_changes.generation
        return (
            generation.pause_reason if generation is not None else "the next generation needs the coordinator"
        )

    def early_bytes(self, peer: m.PeerId) -> int:
        """Return the size in bytes of the peer's messages that are deferred to a later round."""
        generation = self._view_changes.generation
        return generation.attempts.early_bytes(peer) if generation is not None else 0

    @property
    def deadline_s(self) -> float:
        """The time at which to call `tick`."""
        generation = self._view_changes.generation
        return generation.deadline_s if generation is not None else self._context.catch_up.deadline_s

    # -- events --------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[MemberEffect]:
        """Act on timeouts that have passed, for example by sending a report to the coordinator.

        Call this method when `deadline_s` has passed.
        """
        self._extend_timeouts(now_s)
        generation = self._view_changes.generation
        if generation is None:
            return self._report_unreachable(now_s)
        return generation.tick(now_s) if now_s >= generation.deadline_s else []

    def handle(self, event: MemberEvent, now_s: float) -> list[MemberEffect]:
        """Process an event, and return the effects to be executed, in the order of execution.

        Raises:
            RemoteProtocolError: a peer's message violates the protocol.
        """
        self._extend_timeouts(now_s)
        match event:
            case MessageReceived(peer, m.Data() as data, nbytes):
                return self._view_changes.receive_data(peer, data, nbytes, now_s)
            case MessageReceived(peer, message, nbytes):
                return self._view_changes.receive(peer, message, nbytes, now_s)
            case PeerConnected(peer):
                return self._peer_connected(peer, now_s)
            case PeerDisconnected(peer, reason):
                return self._peer_disconnected(peer, reason, now_s)
            case ProtocolViolation(peer, reason):
                return self._protocol_violation(peer, reason, now_s)
            case AddressChanged(address):
                self.coordinator_link.set_address(address)
                return []
            case TrainerJoined():
                return self._trainer_joined(event)
            case StateSnapshotLoading() | CaughtUp() | CatchUpFailed():
                return self._catch_up_changed(event)
            case HeartbeatDue():
                return self._send_heartbeat(event, now_s)
            case RefuseResiduals():
                self.residual_transfer.is_refusing = True
                return []
            case ResidualReceived(peer):
                return self.residual_transfer.mark_complete(self.rank_assignment, peer)
            case ProbeResults(rtt_s):
                return [Send(self.coordinator, m.LinkLatencies(rtt_s))]
            case LeaveGroup(reason, is_temporary):
                return [Send(self.coordinator, m.TemporaryLeave(reason) if is_temporary else m.Leave(reason))]
            case GenerationEvent():
                generation = self._view_changes.generation
                if generation is None:
                    return self._handle_outside_generation(event)
                return generation.handle(event, now_s)
            case _:
                raise LocalProtocolError(f"a member cannot handle the event {event}")

    def receive_data(self, peer: m.PeerId, data: m.Data, nbytes: int, now_s: float) -> list[MemberEffect]:
        """Process a payload as `handle` does for a `MessageReceived` event, but faster.

        Raises:
            RemoteProtocolError: the payload violates the protocol.
        """
        self._extend_timeouts(now_s)
        return self._view_changes.receive_data(peer, data, nbytes, now_s)

    def _handle_outside_generation(self, event: GenerationEvent) -> list[MemberEffect]:
        """Process an event that the trainer sent before it learned that the generation had ended."""
        context = self._context
        match event:
            case SubmitRound():
                return [late_submission(event)]
            case TransferResidual(blocks):
                return context.residual_transfer.begin(blocks, None)
            case RequestMean(step, index):
                return [DeliverMean(step, index, None)]
            case StateLoaded():
                context.replica_state.mark_modified()
                return []
            case StageCheckpointsChanged(checkpoints, failed_write):
                context.checkpoints.update_stored(checkpoints, failed_write)
                return context.checkpoints.report()
            case _:
                return []

    def _report_unreachable(self, now_s: float) -> list[MemberEffect]:
        """Report to the coordinator which catch-up sources and announced peers cannot be reached."""
        catch_up = self._context.catch_up
        peers = catch_up.take_unreachable(now_s)
        if not peers:
            return []
        log = self._context.peer_links.log_unreachable([peer.hex()[:8] for peer in catch_up.sources])
        return [log, Send(self.coordinator, m.PeersUnreachable(self.term, 0, peers))]

    def _extend_timeouts(self, now_s: float) -> None:
        """If this worker's own loop has stalled, extend the timeouts by which other peers are judged."""
        if not self._stall_detector.may_have_stalled(now_s):
            self._stall_detector.record_call(now_s)
        elif self._stall_detector.measure_stall(self.deadline_s, now_s):
            until_s = now_s + 2 * self._context.deadlines.beat_s
            self._context.catch_up.extend_timeouts(until_s)
            if self._view_changes.generation is not None:
                self._view_changes.generation.extend_timeouts(until_s)

    def _trainer_joined(self, event: TrainerJoined) -> list[MemberEffect]:
        context, generation = self._context, self._view_changes.generation
        context.trainer_joined(event)
        if generation is not None:
            generation.required_peers.trainer_joined()
        elif event.setup.checkpoint is not None:
            context.replica_state.load_checkpoint(event.setup.checkpoint)
        return context.introduce() if context.coordinator_link.is_welcomed else []

    def _catch_up_changed(self, event: StateSnapshotLoading | CaughtUp | CatchUpFailed) -> list[MemberEffect]:
        context, generation = self._context, self._view_changes.generation
        if not isinstance(event, CatchUpFailed):
            context.replica_state.model_overwritten(is_member=generation is not None)
        match event:
            case StateSnapshotLoading():
                return []
            case CaughtUp(applied, history):
                report = context.catch_up.report(applied, history)
                return context.coordinator_link.send(report) if generation is None else []
            case CatchUpFailed(reason):
                log, report = LogEvent("catch_up_failed", {"reason": reason}), context.catch_up.fail()
                if generation is None:
                    return [log, Send(self.coordinator, report)]
                return [log, *generation.incoming_state.request()]

    def _send_heartbeat(self, event: HeartbeatDue, now_s: float) -> list[MemberEffect]:
        context, generation = self._context, self._view_changes.generation
        effects: list[MemberEffect] = []
        if self.coordinator in context.peer_links.connected:
            skips = context.replica_state.skip_metrics
            effects.append(Send(self.coordinator, context.step_pace.make_heartbeat(self.step, event, skips)))
        has_moved = context.step_pace.update_progress(event.progress)
        return effects + (
            generation.send_heartbeat(event, has_moved, now_s) if generation is not None else []
        )

    # -- connections ---------------------------------------------------------------------------

    def _peer_connected(self, peer: m.PeerId, now_s: float) -> list[MemberEffect]:
        context, generation = self._context, self._view_changes.generation
        effects = context.catch_up.peer_connected(peer)
        context.peer_links.peer_connected(peer)
        if peer == self.coordinator:
            return effects + context.coordinator_link.connected(self.generation)
        return effects + (generation.peer_connected(peer, now_s) if generation is not None else [])

    def _peer_disconnected(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        context, generation = self._context, self._view_changes.generation
        effects = context.catch_up.peer_disconnected(peer, now_s)
        context.peer_links.peer_disconnected(peer)
        if peer == self.coordinator:
            return effects + context.coordinator_link.disconnected(reason)
        if context.residual_transfer.is_leaving:
            return effects + context.residual_transfer.recipient_lost(peer)
        return effects + (generation.peer_disconnected(peer, reason, now_s) if generation is not None else [])

    def _protocol_violation(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        if peer == self.coordinator:
            return [LogEvent("offence", {"peer": "the coordinator", "reason": reason})]
        generation = self._view_changes.generation
        if generation is None:
            return self._context.exclude_peer(peer, reason)
        return generation.protocol_violation(peer, reason, now_s)
