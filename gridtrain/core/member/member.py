"""A worker's state machine: events of the I/O loop, the trainer and the network in, effects out.

    event --> MemberCore       events and effects are in `core.group.member_events`
                 |
                 v
             ViewChanges       follows the generations that the coordinator announces, routes messages
                 |
                 v
             Generation        one at a time; in it `Attempts` at the open step, means, the incoming state
                 |
                 v
             MemberContext     as long as the worker lives: links to coordinator and peers, replica state,
                               checkpoints, catch-up, residual transfer, step pace

It opens no payload and touches no socket, clock, tensor or thread.
"""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.member_events import (
    CatchUpFailed,
    CaughtUp,
    DeliverMean,
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
    SnapshotLoading,
    StageCheckpointsChanged,
    StateLoaded,
    SubmitRound,
    TrainerJoined,
    TransferResidual,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.stall_detection import LoopStallDetector
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.generation import Generation, TrainerEvent, late_submission
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.core.member.residual_transfer import ResidualTransfer
from gridtrain.core.member.view_changes import ViewChanges


class MemberCore:
    """A worker's state machine.

    Args:
        own_id: this worker's key.
        coordinator: the coordinator's key.
        join: the Join message that introduces this worker.
        deadlines: see `gridtrain.config.Deadlines`.
    """

    def __init__(self, own_id: m.PeerId, coordinator: m.PeerId, join: m.Join, deadlines: Deadlines) -> None:
        self.own_id = own_id
        self.coordinator = coordinator
        self._context = MemberContext(own_id, coordinator, join, deadlines)
        self._view_changes = ViewChanges(self._context)
        self._stall_detector = LoopStallDetector()

    # -- state, read-only: the objects that hold it, and the values that are asked for most ------

    @property
    def current_generation(self) -> Generation | None:
        """The generation that this worker is in."""
        return self._view_changes.generation

    @property
    def coordinator_link(self) -> CoordinatorLink:
        return self._context.coordinator_link

    @property
    def replica_state(self) -> ReplicaState:
        return self._context.replica_state

    @property
    def residual_transfer(self) -> ResidualTransfer:
        return self._context.residual_transfer

    @property
    def term(self) -> int:
        return self._context.coordinator_link.term

    @property
    def generation(self) -> int:
        """Number of the current generation; 0: none."""
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
        """The last step applied; -1: none."""
        return self._context.replica_state.applied

    @property
    def step(self) -> int:
        """The step that is open or comes next."""
        return self._context.replica_state.step

    @property
    def history(self) -> bytes:
        """Chained digest of all updates applied."""
        return self._context.replica_state.history

    @property
    def is_synced(self) -> bool:
        """Whether this worker holds the state that `applied` and `history` name, of its stage."""
        return self._context.replica_state.is_synced

    @property
    def is_finished(self) -> bool:
        """Whether the ledger has ended the run, as far as this worker has applied it."""
        return self._context.is_finished

    @property
    def next_round(self) -> m.RoundId | None:
        """The round that the trainer may submit its part to now; None: wait."""
        generation = self._view_changes.generation
        return generation.next_round if generation is not None else None

    @property
    def pause_reason(self) -> str:
        """Why nothing can continue until the coordinator is back (commit rule 10); empty: training can."""
        if self.coordinator in self._context.peer_links.connected or not self.term or self.is_finished:
            return ""
        generation = self._view_changes.generation
        return (
            generation.pause_reason if generation is not None else "the next generation needs the coordinator"
        )

    def early_bytes(self, peer: m.PeerId) -> int:
        """Bytes of the peer's messages that are held for a later round."""
        generation = self._view_changes.generation
        return generation.attempts.early_bytes(peer) if generation is not None else 0

    @property
    def deadline_s(self) -> float:
        """When to call `tick`."""
        generation = self._view_changes.generation
        return generation.deadline_s if generation is not None else self._context.catch_up.deadline_s

    # -- events --------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[MemberEffect]:
        """To be called when `deadline_s` has passed: report what does not move to the coordinator."""
        self._extend_timeouts(now_s)
        generation = self._view_changes.generation
        if generation is None:
            return self._report_unreachable(now_s)
        return generation.tick(now_s) if now_s >= generation.deadline_s else []

    def handle(self, event: MemberEvent, now_s: float) -> list[MemberEffect]:
        """Raises `RemoteProtocolError` when a peer's message violates the protocol."""
        self._extend_timeouts(now_s)
        match event:
            case MessageReceived(peer, message, nbytes):
                return self._view_changes.receive(peer, message, nbytes, now_s)
            case PeerConnected(peer):
                return self._peer_connected(peer, now_s)
            case PeerDisconnected(peer, reason):
                return self._peer_disconnected(peer, reason, now_s)
            case ProtocolViolation(peer, reason):
                return self._protocol_violation(peer, reason, now_s)
            case TrainerJoined():
                return self._trainer_joined(event)
            case SnapshotLoading() | CaughtUp() | CatchUpFailed():
                return self._catch_up_changed(event)
            case HeartbeatDue():
                return self._send_heartbeat(event, now_s)
            case RefuseResiduals():
                self._context.residual_transfer.refuse()
                return []
            case ResidualReceived(peer):
                return self._context.residual_transfer.mark_complete(self.rank_assignment, peer)
            case ProbeResults(rtt_s):
                return [Send(self.coordinator, m.LinkLatencies(rtt_s))]
            case LeaveGroup(reason, is_temporary):
                return [Send(self.coordinator, m.TemporaryLeave(reason) if is_temporary else m.Leave(reason))]
            case _:
                generation = self._view_changes.generation
                if generation is None:
                    return self._handle_outside_generation(event)
                return generation.handle(event, now_s)

    def _handle_outside_generation(self, event: TrainerEvent) -> list[MemberEffect]:
        """The trainer does not know yet that the generation has ended."""
        context = self._context
        match event:
            case SubmitRound():
                return [late_submission(event)]
            case TransferResidual(blocks):
                connected, position = context.peer_links.connected, context.replica_state.position
                return context.residual_transfer.begin(blocks, None, connected, *position)
            case RequestMean():
                return [DeliverMean(None)]
            case StateLoaded():
                context.replica_state.mark_modified()
                return []
            case StageCheckpointsChanged(checkpoints, failed_write):
                context.checkpoints.update_stored(checkpoints, failed_write)
                return context.checkpoints.report()
            case _:
                return []

    def _report_unreachable(self, now_s: float) -> list[MemberEffect]:
        """Report the sources of catch-up that cannot be reached."""
        catch_up = self._context.catch_up
        peers = catch_up.take_unreachable(now_s)
        if not peers:
            return []
        names = ", ".join(peer.hex()[:8] for peer in catch_up.sources)
        report = m.PeersUnreachable(self.term, 0, peers)
        return [LogEvent("no_route", {"peers": names}), Send(self.coordinator, report)]

    def _extend_timeouts(self, now_s: float) -> None:
        """If this worker itself stood still, give the others time for what it has not read."""
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

    def _catch_up_changed(self, event: SnapshotLoading | CaughtUp | CatchUpFailed) -> list[MemberEffect]:
        context, generation = self._context, self._view_changes.generation
        if not isinstance(event, CatchUpFailed):
            context.replica_state.model_overwritten(is_member=generation is not None)
        match event:
            case SnapshotLoading():
                return []
            case CaughtUp(applied, history):
                report = context.catch_up.report(applied, history)
                return context.coordinator_link.send(report) if generation is None else []
            case CatchUpFailed(reason):
                log, report = LogEvent("strayed", {"reason": reason}), context.catch_up.fail()
                if generation is None:
                    return [log, Send(self.coordinator, report)]
                return [log, *generation.incoming_state.request()]

    def _send_heartbeat(self, event: HeartbeatDue, now_s: float) -> list[MemberEffect]:
        context, generation = self._context, self._view_changes.generation
        effects: list[MemberEffect] = []
        if self.coordinator in context.peer_links.connected:
            effects.append(Send(self.coordinator, context.step_pace.make_heartbeat(self.step, event)))
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
