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
from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.commit.two_phase_commit import Failed, Prepared
from gridtrain.core.group.member_events import (
    AbandonRound,
    AddCollectives,
    CatchUpFailed,
    CaughtUp,
    CompareReplicas,
    DeliverMean,
    DigestComputed,
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
    RoundFailed,
    Send,
    SnapshotLoading,
    StageCheckpointsChanged,
    StateDigestMismatch,
    StateLoaded,
    SubmitRound,
    TrainerJoined,
    TransferResidual,
)
from gridtrain.core.group.stall_detection import LoopStallDetector
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.generation import Generation, late_submission
from gridtrain.core.member.member_checkpoints import MemberCheckpoints
from gridtrain.core.member.peer_links import PeerLinks
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.core.member.residual_transfer import ResidualTransfer
from gridtrain.core.member.step_pace import StepPace
from gridtrain.core.member.view_changes import ViewChanges
from gridtrain.core.member.worker_catch_up import WorkerCatchUp
from gridtrain.errors import LocalProtocolError


class MemberCore:
    """See the module's text.

    Args:
        me: this worker's key.
        coordinator: the coordinator's key.
        join: the Join message to introduce ourselves with.
        deadlines: see `gridtrain.config.Deadlines`.
    """

    def __init__(self, me: m.PeerId, coordinator: m.PeerId, join: m.Join, deadlines: Deadlines) -> None:
        self.own_id = me
        self.coordinator = coordinator
        self._deadlines = deadlines
        self._stall_detector = LoopStallDetector()
        self._coordinator_link = CoordinatorLink(coordinator, join)
        self._peer_links = PeerLinks(me, coordinator)
        self._replica_state = ReplicaState()
        self._checkpoints = MemberCheckpoints(self._replica_state, self._coordinator_link)
        self._catch_up = WorkerCatchUp(deadlines.route_s)
        self._residual_transfer = ResidualTransfer()
        self._step_pace = StepPace(deadlines)
        self._context = MemberContext(
            me, deadlines, self._coordinator_link, self._peer_links, self._replica_state, self._checkpoints, self._catch_up,
            self._residual_transfer, self._step_pace,
        )  # fmt: skip
        self._view_changes = ViewChanges(self._context)

    # -- what the loop asks --------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self._coordinator_link.term

    @property
    def is_welcomed(self) -> bool:
        """The coordinator has answered our Join, in this connection."""
        return self._coordinator_link.is_welcomed

    @property
    def run_state(self) -> tuple[str, str]:
        """What the coordinator last said of the run, and why."""
        return self._coordinator_link.run_state

    @property
    def reachable_address(self) -> str | None:
        """An address at which the coordinator got through to us; empty: nobody from outside can; None: it
        has not said yet."""
        return self._coordinator_link.reachable_address

    @property
    def phase(self) -> MemberPhase:
        return (
            self._view_changes.generation.phase
            if self._view_changes.generation is not None
            else MemberPhase.APART
        )

    @property
    def rank_assignment(self) -> RankAssignment | None:
        """This worker's place in the latest generation that named it."""
        return self._view_changes.rank_assignment

    @property
    def generation(self) -> int:
        return self._view_changes.generation_number

    @property
    def first_step(self) -> int:
        """Of the latest generation that named this worker."""
        return self._view_changes.first_step

    @property
    def known_peers(self) -> frozenset[m.PeerId]:
        """Whom this worker deals with: the coordinator, the members, and who was announced; nobody else."""
        return self._context.known_peers(self.rank_assignment)

    @property
    def state_source(self) -> m.PeerId | None:
        """Who gives this member the state that it lacks."""
        return (
            self._view_changes.generation.state_transfer.source
            if self._view_changes.generation is not None
            else None
        )

    @property
    def is_forwarding_state(self) -> bool:
        """Another member gets the state from this one, as it comes."""
        return (
            self._view_changes.generation is not None
            and self._view_changes.generation.state_transfer.forwarding.downstream is not None
        )

    def early_bytes(self, peer: m.PeerId) -> int:
        """What of the peer's messages is held for a round to come."""
        return (
            self._view_changes.generation.attempts.early_bytes(peer)
            if self._view_changes.generation is not None
            else 0
        )

    @property
    def deadline_s(self) -> float:
        """When `tick` has something to do."""
        here = self._view_changes.generation
        return here.deadline_s if here is not None else self._catch_up.deadline_s(self._peer_links.connected)

    # -- what the trainer asks -----------------------------------------------------------------

    @property
    def applied(self) -> int:
        """The last step applied here; -1: none."""
        return self._replica_state.applied

    @property
    def step(self) -> int:
        """The step that is open or comes next."""
        return self._replica_state.applied + 1

    @property
    def history(self) -> bytes:
        """Chained digest of all updates applied."""
        return self._replica_state.history

    @property
    def ledger(self) -> m.LedgerState:
        """Of the data, after the last step applied here."""
        return self._replica_state.ledger

    @property
    def is_synced(self) -> bool:
        """This worker holds the state that `applied` and `history` name, of its seat's stage."""
        return self._replica_state.is_synced

    @property
    def is_modified(self) -> bool:
        """The model is not the one any more that the script made, or a checkpoint had."""
        return self._replica_state.is_modified

    @property
    def can_accept_residual(self) -> bool:
        """Another member may still hand its residual to this one."""
        return not self._residual_transfer.is_refusing

    @property
    def is_finished(self) -> bool:
        """The ledger has ended the run, as far as this worker has applied it."""
        return self._context.is_finished

    @property
    def timeout_s(self) -> float:
        """How long a member may show neither vote nor sign of life."""
        return self._step_pace.timeout_s

    @property
    def is_exchange_undecided(self) -> bool:
        """Which exchange its round uses is not chosen yet."""
        choices = self._context.trainer.neighbours_by_exchange if self._context.trainer is not None else {}
        seat = self.rank_assignment
        return bool(choices) and seat is not None and not seat.exchange and "" not in choices

    @property
    def next_round(self) -> m.RoundId | None:
        """The round that the trainer may submit its part to now; None: wait."""
        return self._view_changes.generation.next_round if self._view_changes.generation is not None else None

    @property
    def due_round(self) -> m.RoundId | None:
        """The round that comes next in this generation, whether or not it can begin now."""
        return (
            self._view_changes.generation.attempts.next_round
            if self._view_changes.generation is not None
            else None
        )

    @property
    def open_round(self) -> m.RoundId | None:
        """The round that the trainer has submitted to and that is not decided here."""
        mine = (
            self._view_changes.generation.attempts.open_attempt
            if self._view_changes.generation is not None
            else None
        )
        return mine.round_id if mine is not None else None

    @property
    def doomed_round(self) -> m.RoundId | None:
        """The open round, if it cannot be committed from here: voted NO on, or not at all before a FREEZE."""
        return (
            self._view_changes.generation.doomed_round if self._view_changes.generation is not None else None
        )

    @property
    def pause_reason(self) -> str:
        """Why nothing can go on until the coordinator is back (rule 10); empty: training can."""
        here = self._view_changes.generation
        if self.coordinator in self._peer_links.connected or not self.term or self.is_finished:
            return ""
        if here is None or not here.is_running:
            return "the next generation needs the coordinator"
        if here.missing_peers:
            return f"{len(here.missing_peers)} peers are gone, and only the coordinator can plan without them"
        return (
            "a step cannot be committed, and only the coordinator can freeze it"
            if here.is_stall_reported
            else ""
        )

    @property
    def is_comparison_due(self) -> bool:
        """The step that comes next is followed by a comparison: newcomers have just entered, or all began
        alike, by what they say themselves."""
        here = self.rank_assignment
        if here is None or self.step != self.first_step:
            return False
        begins = self.first_step == 0 and not self._context.is_pipelined and here.world_size > 1
        return begins or any(x.joining for x in here.members)

    def data_positions(self) -> tuple[tuple[m.Span, ...], int]:
        """What of the open step this member works on, and the samples of the whole step."""
        return self._current_generation().data_positions()

    def data_assignment(self) -> dict[m.PeerId, tuple[m.Span, ...]]:
        """Who holds which positions of the open step."""
        return self._current_generation().data_assignment()

    def _current_generation(self) -> Generation:
        if self._view_changes.generation is None:
            raise LocalProtocolError("positions are asked for before there is a generation")
        return self._view_changes.generation

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: MemberEvent, now_s: float) -> list[MemberEffect]:
        """Raises `RemoteProtocolError` when a peer's message breaks the protocol."""
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
            case SnapshotLoading():
                self._replica_state.model_overwritten(self._view_changes.generation is not None)
                return []
            case CaughtUp(applied, history):
                self._replica_state.model_overwritten(self._view_changes.generation is not None)
                self._catch_up.last_report = m.CatchUpReport(applied, history)
                return (
                    self._coordinator_link.send(self._catch_up.last_report)
                    if self._view_changes.generation is None
                    else []
                )
            case CatchUpFailed(reason):
                note, caught = LogEvent("strayed", {"reason": reason}), self._catch_up.fail()
                if self._view_changes.generation is None:
                    return [note, Send(self.coordinator, caught)]
                return [note, *self._view_changes.generation.state_transfer.request()]
            case HeartbeatDue():
                return self._send_heartbeat(event, now_s)
            case RefuseResiduals():
                self._residual_transfer.is_refusing = True
                return []
            case ResidualReceived(peer):
                return self._residual_transfer.mark_complete(self.rank_assignment, peer)
            case ProbeResults(rtt_s):
                return [Send(self.coordinator, m.LinkLatencies(rtt_s))]
            case LeaveGroup(reason, pausing):
                return [Send(self.coordinator, m.TemporaryLeave(reason) if pausing else m.Leave(reason))]
            case _:
                return self._handle_in_generation(event, now_s)

    def _handle_in_generation(self, event: MemberEvent, now_s: float) -> list[MemberEffect]:
        """What the trainer says to the group."""
        here = self._view_changes.generation
        if here is None:
            return self._handle_outside_generation(event)
        match event:
            case SubmitRound():
                return here.submit(event, now_s)
            case AddCollectives():
                return here.handle_round_event(lambda mine: mine.add_collectives(event, now_s), now_s)
            case DigestComputed(digest):
                return here.handle_round_event(lambda mine: mine.advance(Prepared(digest), now_s), now_s)
            case RoundFailed(reason):
                return here.handle_round_event(lambda mine: mine.advance(Failed(reason), now_s), now_s)
            case AbandonRound():
                return here.abandon_round(now_s)
            case TransferResidual():
                return here.transfer_residual(event)
            case RequestMean(step, index, value):
                return here.request_mean(step, index, value)
            case CompareReplicas(step, digest):
                return here.send_digest(step, digest)
            case StateLoaded(term, generation):
                return here.state_loaded(term, generation)
            case StateDigestMismatch(generation):
                return here.state_digest_mismatch(generation)
            case StageCheckpointsChanged():
                return here.stage_checkpoints_changed(event)
            case _:
                raise LocalProtocolError(f"{type(event).__name__} is no event of a generation")

    def _handle_outside_generation(self, event: MemberEvent) -> list[MemberEffect]:
        """The trainer does not know it yet."""
        match event:
            case SubmitRound():
                return [late_submission(event)]
            case TransferResidual(pieces):
                return self._residual_transfer.begin(
                    pieces, None, self._peer_links.connected, *self._replica_state.position
                )
            case RequestMean():
                return [DeliverMean(None)]
            case StateLoaded():
                self._replica_state.is_modified = True
                return []
            case StageCheckpointsChanged(states, unwritten):
                self._checkpoints.update_stored(states, unwritten)
                return self._checkpoints.report()
            case _:
                return []

    def tick(self, now_s: float) -> list[MemberEffect]:
        """To be called when `deadline_s` has passed: tell the coordinator what does not move."""
        self._extend_timeouts(now_s)
        if self._view_changes.generation is None:
            return self._report_unreachable(now_s)
        return self._view_changes.generation.tick(now_s) if now_s >= self.deadline_s else []

    def _report_unreachable(self, now_s: float) -> list[MemberEffect]:
        peers = self._catch_up.take_unreachable(self._peer_links, now_s)
        if not peers:
            return []
        named = ", ".join(peer.hex()[:8] for peer in self._catch_up.sources)
        return [
            LogEvent("no_route", {"peers": named}),
            Send(self.coordinator, m.PeersUnreachable(self.term, 0, peers)),
        ]

    def _extend_timeouts(self, now_s: float) -> None:
        """If this worker itself stood still, nobody is to blame for a silence that it slept through."""
        if not self._stall_detector.may_have_stalled(now_s):
            self._stall_detector.record_call(now_s)
        elif self._stall_detector.measure_stall(self.deadline_s, now_s):
            until_s = now_s + 2 * self._deadlines.beat_s
            self._catch_up.extend_timeouts(until_s)
            if self._view_changes.generation is not None:
                self._view_changes.generation.extend_timeouts(until_s)

    def _trainer_joined(self, entered: TrainerJoined) -> list[MemberEffect]:
        setup = entered.setup
        self._context.trainer, self._checkpoints.stored = entered, setup.stage_checkpoints
        if self._view_changes.generation is not None:
            self._view_changes.generation.trainer_joined()
        elif setup.checkpoint is not None:
            self._replica_state.load_checkpoint(setup.checkpoint)
        return self._context.introduce() if self.is_welcomed else []

    def _send_heartbeat(self, pulse: HeartbeatDue, now_s: float) -> list[MemberEffect]:
        effects: list[MemberEffect] = []
        if self.coordinator in self._peer_links.connected:
            effects.append(Send(self.coordinator, self._step_pace.make_heartbeat(self.step, pulse)))
        stirred, here = self._step_pace.update_progress(pulse.progress), self._view_changes.generation
        return effects + (here.send_heartbeat(pulse, stirred, now_s) if here is not None else [])

    # -- edges ---------------------------------------------------------------------------------

    def _peer_connected(self, peer: m.PeerId, now_s: float) -> list[MemberEffect]:
        effects, here = self._catch_up.peer_connected(peer), self._view_changes.generation
        self._peer_links.connected.add(peer)
        if peer == self.coordinator:
            return effects + self._coordinator_link.coordinator_connected(self.generation)
        return effects + (here.peer_connected(peer, now_s) if here is not None else [])

    def _peer_disconnected(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        effects, here = self._catch_up.peer_disconnected(peer, now_s), self._view_changes.generation
        self._peer_links.connected.discard(peer)
        if peer == self.coordinator:
            return effects + self._coordinator_link.coordinator_disconnected(reason)
        if self._residual_transfer.is_leaving:
            return effects + self._residual_transfer.recipient_lost(peer)
        return effects + (here.peer_disconnected(peer, reason, now_s) if here is not None else [])

    def _protocol_violation(self, peer: m.PeerId, reason: str, now_s: float) -> list[MemberEffect]:
        if peer == self.coordinator:
            return [LogEvent("offence", {"peer": "the coordinator", "reason": reason})]
        here = self._view_changes.generation
        return (
            here.protocol_violation(peer, reason, now_s)
            if here is not None
            else self._context.exclude_peer(peer, reason)
        )
