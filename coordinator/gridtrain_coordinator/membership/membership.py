"""The coordinator's side of the protocol: who is a member, and what became of the open step.

Takes events, hands each to the part that it is for, and then takes every step towards the next generation
that can be taken.  Never sees a gradient, never touches a socket, a clock or a disk: what must be durable
leaves as a `Journal` effect, and the loop makes it so before it carries out what follows.

    WAITING --enough workers--> FORMING --all READY--> TRAINING --all Finished--> FINISHED
                                 ^   |                    |
                            VIEW |   | a member is lost   | join, leave, loss, stall
                                 |   v                    v
                               FREEZING <-----------------+      (FREEZE sent, REPORTs awaited)

Commit rules 5 to 8 (DESIGN section 7).  Where all members are lost the run waits, and starts anew.

    run         who is on the roll, who is a member      \\ what all parts share
    making      NONE, FREEZING, FORMING; why             /
    admission   Join, Setup: a worker comes              partings     it goes
    complaints  what members say of each other           plans        what is measured, and a better plan
    freezing    whose REPORTs are awaited                recalling    a journal that is older than the run
    in_stages   every stage in somebody's hands          placing      who sits where     on_disks  checkpoints
    generations the next one is made, and told           readying     whose READYs are awaited
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import group_by_stage
from gridtrain.core.group.stall_detection import LoopStallDetector, extend_start
from gridtrain_coordinator.membership.catch_up import CatchUp
from gridtrain_coordinator.membership.complaints import Complaints
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.membership.freeze_phase import FreezePhase
from gridtrain_coordinator.membership.generation_reports import GenerationReports
from gridtrain_coordinator.membership.member_recovery import MemberRecovery
from gridtrain_coordinator.membership.pipeline_recovery import PipelineRecovery
from gridtrain_coordinator.membership.readiness import Readiness
from gridtrain_coordinator.membership.view_installer import ViewInstaller
from gridtrain_coordinator.membership.worker_admission import WorkerAdmission
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergedMembers, DivergenceDetector
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Disconnect,
    Effect,
    Event,
    LogEvent,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    ProtocolViolation,
    RecordViolation,
    RunPhase,
    Send,
    WorkerRemoved,
)
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.journal_recovery import RecoveredRun
from gridtrain_coordinator.run.paused_workers import PausedWorkers
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import MAX_STEPS, RunState
from gridtrain_coordinator.run.view_change import ViewChange
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog
from gridtrain_coordinator.stages.checkpoint_quorum import CheckpointQuorum
from gridtrain_coordinator.stages.placement import StagePlacement


class Membership:
    """See the module's text.

    Args:
        me: the coordinator's key.
        run: the run's name; joins for another are refused.
        term: how often the coordinator has started, already journalled.
        min_workers: a run starts only with so many.
        deadlines: see `gridtrain.config.Deadlines`.
        software: this program's version, shown to workers.
        recovered: the run as an earlier term left it; its members are waited for.
        plans: False: ranks go by the order of joining, whatever the links are like.
    """

    def __init__(
        self,
        *,
        me: m.PeerId,
        run: str,
        term: int,
        deadlines: Deadlines,
        software: str,
        min_workers: int = 1,
        recovered: RecoveredRun | None = None,
        plans: bool = True,
    ) -> None:
        self.run = RunState(run, term, deadlines, min_workers=min_workers, software=software)
        self._create_parts(me, recovered, by_links=plans)
        self._loop_stalls = LoopStallDetector()
        self._events: deque[dict[str, Any]] = deque(maxlen=50)
        self._settled_reason: str | None = None  # with this change wanted a beat moves nothing; None: it may
        self._cached_deadline_s: float | None = None  # see deadline_s
        if recovered is not None:
            self._restore(recovered)

    def _create_parts(self, me: m.PeerId, recovered: RecoveredRun | None, *, by_links: bool) -> None:
        """The parts: each knows those above it here, and no others."""
        run = self.run
        known = frozenset(x.peer for x in recovered.roster) if recovered is not None else frozenset()
        recall = GenerationReports(known, recovered.generation if recovered is not None else 0)
        witnesses = CheckpointQuorum(recovered.checkpoints if recovered is not None else {})
        making = self._view_change = ViewChange(run)
        whereabouts = self._addresses = AddressBook(me)
        drifts, drifted = DivergenceDetector(), DivergedMembers()
        self._diverged, self._paused_workers = drifted, PausedWorkers()
        self._catch_up = CatchUp(run, whereabouts)
        plans = self._planner = GenerationPlanner(run, making, whereabouts, by_links=by_links)
        partings = self._departures = Departures(run, making, plans, whereabouts, drifted)
        readying = self._readiness = Readiness(run, making, plans, partings)
        generations = self._view_installer = ViewInstaller(
            run, making, plans, readying, whereabouts, drifts, drifted, recall
        )
        disks = self._checkpoints = CheckpointCatalog(run, making, witnesses)
        placing = StagePlacement(run, making, plans, disks)
        stages = self._pipeline_recovery = PipelineRecovery(
            run, making, partings, generations, placing, disks
        )
        freezing = self._freeze_phase = FreezePhase(
            run, making, partings, generations, stages, drifted, recall
        )
        self._member_recovery = MemberRecovery(run, making, freezing, recall)
        self._complaints = Complaints(run, making, plans, partings, whereabouts, drifts, drifted)
        self._admission = WorkerAdmission(run, plans, partings, disks, whereabouts, self._paused_workers)

    def _restore(self, recovered: RecoveredRun) -> None:
        self.run.restore(recovered)
        view = recovered.view
        chosen, alone = ("", False) if view is None else (view.exchange, view.world_size == 1)
        self._planner.exchange_choice.configure(recovered.definition, chosen, alone)
        if view is not None and not self.run.is_finished:
            self._freeze_phase.delay_freeze(math.inf)
            self._view_change.request("the coordinator restarted")

    # -- interface -----------------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self.run.term

    @property
    def phase(self) -> RunPhase:
        return self.run.phase

    @property
    def reason(self) -> str:
        return self.run.reason

    @property
    def generation(self) -> int:
        return self.run.generation

    def start(self, now_s: float) -> list[Effect]:
        if self._view_change.is_freezing:
            self._freeze_phase.delay_freeze(now_s)
        entry = self.run.term_entry()
        return self._log_events([entry, LogEvent("info", "started", dict(entry.body))], now_s)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        woken = self._compensate_own_stall(now_s)
        if not (isinstance(event, MessageReceived) and isinstance(event.message, m.Heartbeat)):
            self._settled_reason, self._cached_deadline_s = None, None
        worker = self.run.workers.get(event.peer)
        effects: list[Effect] = []
        match event:
            case PeerConnected(peer, host):
                self._addresses.on_connected(peer, host)
                if worker is not None:
                    worker.disconnected_s, worker.link_broken_s, worker.last_heard_s = None, -math.inf, now_s
            case PeerDisconnected(peer, _):
                self._addresses.on_disconnected(peer)
                if worker is not None:
                    worker.disconnected_s = now_s
            case ProtocolViolation(peer, reason):
                effects = [RecordViolation(peer, reason)]
            case DialBackResult(peer, address):
                effects = self._admission.handle_dial_back_result(peer, address, now_s)
            case WorkerRemoved():
                effects = self._handle_removal(event)
            case MessageReceived(peer, message):
                if worker is not None:
                    worker.last_heard_s = now_s
                effects = self._handle_message(peer, message, now_s)
        effects = woken + effects + self._advance(now_s)
        if self._settled_reason is None:
            self._cached_deadline_s = None
        return self._log_events(effects, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """To be called when `deadline_s` has passed."""
        self._settled_reason = None
        effects = self._compensate_own_stall(now_s)  # held against what the loop was told
        for worker in list(self.run.workers.values()):
            gone = worker.failure_reason(self.run.limits, now_s)
            if gone:
                effects += self._departures.remove_lost(worker.peer, gone)
            elif not worker.is_admitted and now_s >= worker.probe_deadline_s:
                worker.is_admitted = True
        raised = self._member_recovery.raise_term(now_s) if not self.run.is_finished else []
        if raised:
            effects += [
                *raised,
                *(told for peer in list(self.run.workers) for told in self._resend_missed(peer)),
            ]
        effects += self._advance(now_s)
        if self._view_change.is_idle and self._view_change.deadline_s <= now_s:
            self._view_change.reset()  # who was waited for, or asked it, is gone
        self._cached_deadline_s = None
        return self._log_events(effects, now_s)

    def introduce_pending_member(
        self, guest: m.PeerId, most: int
    ) -> tuple[list[Effect], tuple[tuple[m.PeerId, str], ...]]:
        """Members that can be dialled, and where; they expect a guest now that measures its line to them."""
        return self._addresses.introduce_pending_member(guest, self.run.member_order, most)

    def worker_name(self, peer: m.PeerId) -> str:
        """By which people know it; empty: they do not."""
        worker = self.run.workers.get(peer)
        return worker.name if worker is not None else self._paused_workers.worker_name(peer)

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """What `gridtrain status` shows; JSON-able."""
        run, exchanging = self.run, self._planner.exchange_choice
        rank_of = {peer: rank for rank, peer in enumerate(run.member_order)}
        stage_of = {
            p: n for n, group in enumerate(group_by_stage(run.member_order, run.stage_count)) for p in group
        }
        steps = [run.highest_step, *(run.workers[peer].step for peer in run.present_members)]
        return {
            "run": run.name,
            "phase": str(run.phase),
            "reason": run.reason,
            "term": run.term,
            "generation": run.generation,
            "step": max(steps),
            "world_size": len(run.member_list),
            "stages": run.stage_count,
            "finished": run.is_finished,
            "facts": dict(exchanging.effective_setup.facts) if exchanging.effective_setup else {},
            "exchange_reason": exchanging.description,
            "global_batch_size": run.definition.global_batch_size if run.definition else None,
            "plan_reason": self._planner.plan_reason,
            "links": self._planner.measured_links.link_rows(run.member_order),
            "relayed": self._addresses.relayed_pairs(run.member_order),
            "drifts": self._complaints.divergence_count,
            "members": [
                {
                    **w.status_row(rank_of.get(w.peer), run.member_list, now_s),
                    "stage": stage_of.get(w.peer),
                    "reach": self._addresses.reachability_text(w.peer),
                }
                for w in run.workers.values()
            ],
            "resting": self._paused_workers.status_rows(now_s),
            "events": [dict(event) for event in self._events],
        }

    def _log_events(self, effects: list[Effect], now_s: float) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, LogEvent):
                self._events.append({"at_s": round(now_s, 3), "event": effect.event, **effect.fields})
        return effects

    # -- time ----------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """When `tick` may have something to do; infinite if nothing is waited for."""
        if self._cached_deadline_s is None:
            self._cached_deadline_s = self._compute_deadline_s()
        return self._cached_deadline_s

    def _compute_deadline_s(self) -> float:
        """A beat only puts this off: it is worked out again when it has come, or with other news."""
        run, making, held_s = self.run, self._view_change, self._freeze_phase.delayed_until_s
        times = [making.deadline_s, *(worker.deadline_s(self.run.limits) for worker in run.workers.values())]
        if held_s is not None:
            times.append(held_s)
        if making.is_forming and making.unrouted_reason:
            times.append(self._readiness.state_transfer_deadline_s())
        if run.is_finished:
            return min(times)
        times.append(self._member_recovery.deadline_s)
        if making.is_idle and any(run.workers[peer].disconnected_s is None for peer in run.present_members):
            times.append(self._catch_up.deadline_s())
        enough = run.member_list or sum(w.is_admitted for w in run.workers.values()) >= run.required_workers
        if making.is_idle and making.reason and enough:
            times.append(making.earliest_begin_s())
        return min(times)

    def _compensate_own_stall(self, now_s: float) -> list[Effect]:
        """If this coordinator itself stood still, nobody is to blame for a silence that it slept through."""
        if not self._loop_stalls.may_have_stalled(now_s):
            self._loop_stalls.record_call(now_s)
            return []
        slept_s = self._loop_stalls.measure_stall(self.deadline_s, now_s)
        if not slept_s:
            return []
        limits = self.run.limits
        until_s = now_s + 2 * limits.beat_s  # what was said meanwhile is read by then, and more comes
        for worker in self.run.workers.values():
            worker.last_heard_s = extend_start(worker.last_heard_s, limits.silence_s, until_s)
            worker.probe_deadline_s = max(worker.probe_deadline_s, until_s)
            worker.progressed_s += slept_s
            worker.state_progress.progressed_s += slept_s
            if worker.disconnected_s is not None:
                worker.disconnected_s = extend_start(worker.disconnected_s, limits.regreet_s, until_s)
        self._view_change.deadline_s = max(self._view_change.deadline_s, until_s)
        return [LogEvent("warning", "overslept", {"late_s": round(slept_s, 3)})]

    # -- messages ------------------------------------------------------------------------------

    def _handle_message(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[Effect]:
        run, worker = self.run, self.run.workers.get(peer)
        if isinstance(message, m.Join):
            return self._handle_join(peer, message, now_s)
        if worker is None:
            reason = f"a {type(message).__name__} came from a worker that is not on the roll"
            return [Send(peer, m.Rejoin(reason))]
        match message:
            case m.Setup():
                return self._admission.handle_setup(worker, message, now_s)
            case m.WorkerInfo(texts):
                worker.info = dict(texts)
            case m.LinkLatencies(rtt_s):
                worker.rtt_s = dict(rtt_s)
                worker.is_admitted = worker.setup is not None
            case m.LinkRates():
                self._planner.record_rates(peer, message)
            case m.Heartbeat():
                return self._handle_heartbeat(worker, message, now_s)
            case m.FreezeReport():
                return self._freeze_phase.handle_report(worker, message, now_s)
            case m.Ready(term, generation, history):
                if self._view_change.is_forming and run.is_current(term, generation):
                    self._view_change.ready_histories[peer], worker.is_loading_state = history, False
                    self._diverged.clear_if_recovered(peer, generation)
            case m.RoundStalled():
                self._freeze_phase.shorten_delay(message.round.generation, now_s)
                return self._complaints.handle_stall(worker, message, now_s)
            case m.PeersUnreachable() if peer not in run.members:
                return self._catch_up.handle_no_route(worker, message, now_s)
            case m.PeersUnreachable():
                return self._complaints.handle_no_route(worker, message)
            case m.ReplicaDigest():
                return self._complaints.compare_digest(peer, message)
            case m.ConnectionLost():
                return self._complaints.handle_broken_link(worker, message, now_s)
            case m.ViolationReport():
                return self._complaints.handle_accusation(peer, message)
            case m.StageCheckpointList():
                return self._checkpoints.update(worker, message)
            case m.CatchUpReport(applied):
                worker.has_caught_up = True
                return [LogEvent("info", "caught_up", {"name": worker.name, "step": applied})]
            case m.CurrentGeneration():
                return self._member_recovery.handle_report(worker, message, now_s)
            case m.Leave(reason):
                return self._departures.remove(peer, f"left: {reason}")
            case m.TemporaryLeave(reason):
                self._paused_workers.add(peer, worker.name, reason, now_s)
                return self._departures.remove(peer, f"left: {self._paused_workers.reason_text(peer)}")
            case m.RunFinished(applied):
                run.finished_members.add(peer)
                if peer in run.members:  # others have finished nothing
                    run.highest_step = max(run.highest_step, min(applied, MAX_STEPS) + 1)
                return [LogEvent("info", "worker_finished", {"name": worker.name, "step": applied})]
            case _:
                return [RecordViolation(peer, f"sent {type(message).__name__}, which only others may send")]
        return []

    def _handle_heartbeat(self, worker: Worker, beat: m.Heartbeat, now_s: float) -> list[Effect]:
        run = self.run
        if beat.progress > worker.progress:
            worker.progress, worker.progressed_s = beat.progress, now_s
        worker.step, worker.figures = beat.step, dict(beat.metrics)
        worker.state_progress.update(worker.figures.get(m.STATE_LEFT, 0.0), now_s)
        self._planner.record_compute_metrics(worker.peer, worker.figures)
        self._planner.request_if_faster(now_s)
        if self._view_change.is_idle and worker.peer in run.members:
            run.highest_step = max(run.highest_step, beat.step)  # so that a rollback is seen to be one
        return [Send(worker.peer, m.HeartbeatReply(run.term, beat.sequence))]

    def _handle_join(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        if refused := self._admission.check_join(peer, join):
            return refused
        effects: list[Effect] = []
        if self._is_new_process(peer, join):
            effects = self._departures.replace_process(peer, join.name) + self._advance(now_s)
            self._settled_reason = None
        effects += self._admission.register(peer, join, now_s)
        self._catch_up.on_reconnected(peer)
        return [*effects, *self._diverged.resend(peer), *self._resend_missed(peer)]

    def _is_new_process(self, peer: m.PeerId, join: m.Join) -> bool:
        """Than the one that is known by this key."""
        run, worker = self.run, self.run.workers.get(peer)
        member = peer in run.members - run.departed_members
        known = member or (worker is not None and worker.setup is not None)
        # Who has said READY has a seat, and who has none never was a member in another term of ours.
        elsewhere = member and (
            (peer in self._view_change.ready_histories and join.generation < run.generation)
            or (worker is None and not join.generation)
        )
        return known and (elsewhere or not join.is_rejoin)

    def _handle_removal(self, event: WorkerRemoved) -> list[Effect]:
        peer = event.peer
        self._paused_workers.discard(peer)
        if peer not in self.run.workers:
            return [Disconnect(peer)]
        refused = Send(peer, m.Refused(event.code, event.reason, event.remedy))
        return [refused, *self._departures.remove(peer, event.reason, told=True)]

    def _resend_missed(self, peer: m.PeerId) -> list[Effect]:
        """What a worker may have missed while its connection was broken."""
        if peer not in self.run.members:
            return (
                self._pipeline_recovery.mark_standby([peer]) if self.run.workers[peer].standby_reason else []
            )
        if self._view_change.is_freezing and self._freeze_phase.delayed_until_s is not None:
            return []  # it comes when the FREEZE does
        return self._view_installer.resend_view(peer)

    # -- towards the next generation -----------------------------------------------------------

    def _advance(self, now_s: float) -> list[Effect]:
        """Take every step towards the next generation that can be taken now."""
        making = self._view_change
        if self.run.is_finished or self._settled_reason == making.reason:
            return []
        before = making.phase, making.deadline_s, making.reason
        if making.is_freezing:
            effects = self._freeze_phase.advance(now_s)
        elif making.is_forming:
            effects, given_up = self._readiness.advance(now_s)
            effects += self._advance(now_s) if given_up else []
        else:
            effects = self._catch_up.advance(making.last_installed_s, now_s) + self._begin_view_change(now_s)
        changed = effects or before != (making.phase, making.deadline_s, making.reason)
        fed = making.is_forming and making.unrouted_reason  # which beats tell
        moves = changed or fed or self._catch_up.is_active or self.run.is_pipeline
        self._settled_reason = None if moves else making.reason
        return effects

    def _begin_view_change(self, now_s: float) -> list[Effect]:
        run, making = self.run, self._view_change
        if run.members and run.members <= run.finished_members:
            return self._departures.finish_run()
        if run.members and not run.present_members:
            return self._freeze_phase.await_members(now_s)
        newcomers = run.newcomers()
        if run.is_pipeline and not making.reason and run.members:
            spared = self._pipeline_recovery.consider_newcomers(newcomers)
            if spared is not None:
                return spared
        if newcomers:
            making.request(", ".join(w.name for w in newcomers) + " joined")
        if not making.reason or now_s < making.earliest_begin_s():
            return []
        if run.members:
            return self._freeze_phase.freeze_members(now_s)
        if len(newcomers) < run.required_workers:
            return []
        return (
            self._pipeline_recovery.begin_first(now_s)
            if run.is_pipeline
            else self._view_installer.install_first(now_s)
        )
