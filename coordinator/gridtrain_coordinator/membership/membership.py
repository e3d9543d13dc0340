"""The coordinator's state machine: begins generations, waits for newcomers, ends the run and records events.

    WAITING --enough workers--> FORMING --all Ready--> TRAINING --all RunFinished--> FINISHED
                                 ^   |                    |
                  MembershipView |   | a member is lost   | join, leave, loss, stall
                                 |   v                    v
                               FREEZING <-----------------+      (Freeze sent, waiting for FreezeReports)

Implements commit rules 5 to 8 (docs/architecture.md).  If all members are lost, the run waits and starts
over.

`Membership` takes events, passes each to the part that handles it, and then takes every possible step towards
the next generation.  It handles no gradients and uses no sockets, clock or disk: durable decisions are
returned as `JournalEntry` effects, which the caller writes before it carries out the effects that follow.

    shared state    RunState: registered workers, members, phase; ViewChange: the next generation
    workers         WorkerAdmission (join)  Departures (leave)  CatchUp (receive the state)  Complaints
    view changes    FreezePhase  ViewInstaller  Readiness  MemberRecovery (journal older than the run)
    plans           GenerationPlanner  AddressBook
    pipelines       PipelineRecovery  StagePlacement  CheckpointCatalog
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.group.io_loop_stalls import LoopStallDetector
from gridtrain.core.group.rank_layout import group_by_stage
from gridtrain.quantities import MAX_NAMES, format_count, list_first
from gridtrain_coordinator.membership.catch_up import CatchUp
from gridtrain_coordinator.membership.complaints import Complaints, StalledStep
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.membership.freeze_phase import FreezePhase
from gridtrain_coordinator.membership.generation_reports import GenerationReports
from gridtrain_coordinator.membership.member_lists import MemberLists
from gridtrain_coordinator.membership.member_recovery import MemberRecovery
from gridtrain_coordinator.membership.pipeline_recovery import PipelineRecovery
from gridtrain_coordinator.membership.readiness import Readiness
from gridtrain_coordinator.membership.state_sources import StateSources
from gridtrain_coordinator.membership.view_installer import ViewInstaller
from gridtrain_coordinator.membership.worker_admission import WorkerAdmission
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import (
    DialBackResult,
    Disconnect,
    Effect,
    Event,
    JournalEntry,
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
from gridtrain_coordinator.run.link_remeasurement import LinkRemeasurement
from gridtrain_coordinator.run.registry import Candidates, Worker, shown_facts
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.slow_member import describe_idle
from gridtrain_coordinator.run.unique_names import WorkerNames
from gridtrain_coordinator.run.worker_problems import SkippedSteps
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog
from gridtrain_coordinator.stages.checkpoint_quorum import CheckpointQuorum
from gridtrain_coordinator.stages.placement import StagePlacement

MAX_EVENTS = 50  # shown in the status


class Membership:
    """The state machine of one run: `handle` and `tick` return the effects to carry out, in order.

    Args:
        me: the coordinator's key.
        run: the run's name; requests to join another run are refused.
        term: the number of times that the coordinator has started; already written to the journal.
        min_workers: the number of workers that the run needs to start.
        deadlines: the time limits; see `gridtrain.config.Deadlines`.
        software: this program's version, which is sent to workers.
        recovered: the run described by the journal, whose members the coordinator waits for; None for a new
            run.
        plans: whether ranks are ordered by the measured links; otherwise they are in joining order.
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
        self._loop_stalls = LoopStallDetector()
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        # The value of `view_change.reason` for which `_advance` has nothing to do until an event other than a
        # heartbeat arrives; None if not yet determined.
        self._settled_reason: str | None = None
        self._cached_deadline_s: float | None = None  # None if it must be computed
        self._cached_candidates: Candidates | None = None
        self._workers_deadline_s: float | None = None  # no later than any worker's; None: not computed
        recovered = recovered or RecoveredRun()
        reports = GenerationReports(frozenset(x.peer for x in recovered.roster), recovered.generation)
        self._addresses = AddressBook(me)
        self._divergence = DivergenceDetector()
        self._worker_names = WorkerNames(recovered.names)
        self._create_parts(reports, CheckpointQuorum(recovered.checkpoints), by_links=plans)
        self._restore(recovered)

    def _create_parts(self, reports: GenerationReports, quorum: CheckpointQuorum, *, by_links: bool) -> None:
        """Create the parts of the state machine; each part uses only parts that are created before it."""
        run, addresses, divergence = self.run, self._addresses, self._divergence
        self._catch_up = CatchUp(run, addresses)
        planner = self._planner = GenerationPlanner(run, addresses, by_links=by_links)
        self._link_remeasurement = LinkRemeasurement(run, planner, addresses)
        departures = self._departures = Departures(run, planner, addresses, divergence)
        stalled_step = StalledStep(run, planner.link_failures)
        self._complaints = Complaints(run, planner, departures, addresses, divergence, stalled_step)
        checkpoints = self._checkpoints = CheckpointCatalog(run, quorum)
        self._admission = WorkerAdmission(
            run, planner, departures, checkpoints, addresses, self._worker_names
        )
        sources = StateSources()
        self._readiness = Readiness(run, planner, departures, sources)
        installer = self._view_installer = ViewInstaller(
            run,
            planner,
            self._readiness,
            addresses,
            divergence,
            reports,
            sources,
            MemberLists(run, addresses),
        )
        self._pipeline_recovery = PipelineRecovery(
            run, departures, installer, StagePlacement(run, planner, checkpoints), checkpoints
        )
        self._freeze_phase = FreezePhase(
            run, planner, departures, installer, self._pipeline_recovery, divergence, reports
        )
        self._member_recovery = MemberRecovery(run, self._freeze_phase, reports)

    def _restore(self, recovered: RecoveredRun) -> None:
        self.run.restore(recovered)
        view = recovered.view
        chosen, alone = ("", False) if view is None else (view.exchange, view.world_size == 1)
        self._planner.exchange_choice.configure(recovered.definition, chosen, alone)
        if view is not None and not self.run.is_finished:
            self._freeze_phase.delay_freeze(math.inf)
            self.run.view_change.request("the coordinator restarted", can_wait=True)

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
        run = self.run
        if run.view_change.is_freezing:
            self._freeze_phase.delay_freeze(now_s)
        elif run.is_ending and not run.is_finished:  # workers with checkpoints may come back
            run.view_change.wait_until(now_s + run.limits.regather_s)
        entry = self.run.term_entry()
        fields = {**entry.body, **self._continuation_fields()}
        return self._log_events([entry, LogEvent("info", "started", fields)], now_s)

    def _continuation_fields(self) -> dict[str, Any]:
        """Return log fields about a run that has begun, as the journal records it."""
        run = self.run
        if not run.generation:
            return {}
        text = f"the run continues; generation {run.generation} began at step {run.highest_step}"
        return {
            "members": ", ".join(map(self.worker_name, run.member_order)) or "none",
            "reason": "the run is finished" if run.is_finished else text,
        }

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        warnings = self._compensate_own_stall(now_s)
        if not (isinstance(event, MessageReceived) and isinstance(event.message, m.Heartbeat)):
            self._settled_reason, self._cached_deadline_s = None, None
            self._forget_workers_deadline_of(event.peer)
        worker, generation = self.run.workers.get(event.peer), self.run.generation
        effects: list[Effect] = []
        match event:
            case PeerConnected(peer, host):
                self._addresses.on_connected(peer, host)
                if worker is not None:
                    worker.liveness.record_connected(now_s)
            case PeerDisconnected(peer, _):
                self._addresses.on_disconnected(peer)
                if worker is not None:
                    worker.liveness.record_disconnected(now_s)
            case ProtocolViolation(peer, reason):
                effects = [RecordViolation(peer, reason)]
            case DialBackResult(peer, address):
                effects = self._admission.handle_dial_back_result(peer, address, now_s)
            case WorkerRemoved():
                effects = self._handle_removal(event)
            case MessageReceived(peer, message):
                if worker is not None:
                    worker.liveness.record_message(now_s)
                effects = self._handle_message(peer, message, now_s)
        effects = warnings + effects + self._advance(now_s)
        if self._settled_reason is None:
            self._cached_deadline_s = None
        self._lower_workers_deadline(event, generation, now_s)
        return self._log_events(effects, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Handle expired timeouts; call this method once `deadline_s` is reached."""
        self._settled_reason = None
        run = self.run
        effects = self._compensate_own_stall(now_s)
        for worker in list(run.workers.values()):
            reason = worker.failure_reason(run.limits, now_s)
            if reason:
                run.workers.record_lost(worker)
                effects += self._departures.remove_lost(worker.peer, reason)
            elif not worker.is_admitted and now_s >= worker.probe_deadline_s:
                worker.admit()
        raised = self._member_recovery.raise_term(now_s) if not run.is_finished else []
        if raised:
            effects += [*raised, *(x for peer in list(run.workers) for x in self._resend_missed(peer))]
        effects += self._advance(now_s)
        if run.view_change.is_idle and run.view_change.deadline_s <= now_s:
            run.view_change.reset()  # the awaited or requesting worker has left
        self._cached_deadline_s = self._workers_deadline_s = None
        return self._log_events(effects, now_s)

    def ending_entries(self) -> list[JournalEntry]:
        """Return the journal entries of the owner's order to end the run; none if it would change nothing."""
        run = self.run
        if run.is_finished or not (run.generation or run.workers):
            return []
        return run.ending_entries()

    def end_run(self, now_s: float) -> tuple[list[Effect], m.OperatorReply | m.Refused]:
        """End the run on its owner's order; return the effects and the reply to the owner.

        The members finish or drop the open step, adopt the same state, and are notified that the run is
        finished.  A pipeline with a missing stage may end without a model.  The order is refused if no worker
        has joined the run yet, because the run could then never begin.  The effects begin with
        `ending_entries`.
        """
        run = self.run
        if run.is_finished:
            return [], m.OperatorReply(f'the run "{run.name}" is already finished')
        if not (run.generation or run.workers):
            return [], m.Refused(
                "not-begun",
                f'there is nothing to finish: no worker has begun to train in the run "{run.name}"',
                "stop the coordinator with Ctrl-C, or invite workers",
            )
        entries = run.end_early()
        self._settled_reason, self._cached_deadline_s = None, None
        effects = [*entries, *self._log_events(self._advance(now_s), now_s)]
        paused = run.paused_workers.describe_end()
        if run.is_finished:
            text = f"is finished; {run.missing_model or 'no worker was training'}"
        else:
            text = f"{self._describe_pending_end(now_s)}{run.skipped_steps.ending()}"
        return effects, m.OperatorReply(f'the run "{run.name}" {text}{paused}')

    def _describe_pending_end(self, now_s: float) -> str:
        """Describe when and how the run will end, now that its owner has ended it."""
        run = self.run
        if pending := self._pipeline_recovery.describe_pending_end(now_s):
            return pending
        members = format_count(len(run.member_order), "member")
        saved = run.checkpoint_step
        model = "without a model" if saved is None else f"with the model of step {saved:,}"
        until_s = run.view_change.deadline_s
        if not run.members and until_s < math.inf:
            which = "checkpoint" if saved is None else "later checkpoint"
            left_s = math.ceil(max(0.0, until_s - now_s))
            return f"ends in {left_s} s {model}, unless a worker with a {which} joins first"
        if not run.members:
            return f"ends when its workers are admitted, {model}"
        has_lost_state = saved is not None and run.departed_members.issuperset(run.present_members)
        if has_lost_state or not run.present_members:
            holders = run.members - run.departed_members or run.members
            left_s = math.ceil(min(run.limits.regather_s, max(0.0, until_s - now_s)))
            when = f"comes back, or in {left_s} s {model}"
            if run.partition.is_pipeline:
                when = (
                    "or a worker with a checkpoint joins; if a stage is then missing, "
                    f"{run.limits.regather_s:g} s later, without a model"
                )
            if len(holders) == 1:
                who = self.worker_name(*holders) if run.present_members else "its member"
                return f"ends when {who}, which is disconnected, {when}"
            return f"ends when one of its {len(holders)} members, all of which are disconnected, {when}"
        write = "writes" if len(run.member_order) == 1 else "write"
        absent = ", ".join(self.worker_name(peer) for peer in run.member_order if peer not in run.workers)
        waits = self._describe_awaited(now_s) if self._freeze_phase.is_journal_behind else ""
        if absent and not waits and self._freeze_phase.is_awaiting_members:
            most_s = run.limits.regather_s * (2 if run.partition.is_pipeline else 1)
            waits = f"; it may first wait for {absent}, for at most {most_s:g} s"
        # After a restart no member has said yet which step it has reached.
        is_known = run.view_change.has_installed or any(run.workers[p].step for p in run.present_members)
        step = f"step {self._latest_step:,} or a few later" if is_known else "its next step"
        return (
            f"ends at {step}: its {members} {write} the last checkpoints and the model, and all workers exit"
            f"{waits}"
        )

    def _describe_awaited(self, now_s: float) -> str:
        """Describe what is awaited: members, or the checkpoint of a worker that has left; "" if nothing is
        awaited."""
        if self.run.awaits_left_step:
            until_s = self._left_step_deadline_s - now_s
            limit = f", for at most {max(0, math.ceil(until_s))} s" if until_s < math.inf else ""
            return f"; awaiting a worker with the checkpoint of step {self.run.left_step:,}{limit}"
        awaited, delayed_s = self._freeze_phase.awaited_members, self._freeze_phase.delayed_until_s
        left_s = min(self.run.view_change.deadline_s, math.inf if delayed_s is None else delayed_s) - now_s
        if not awaited or not 0 < left_s < math.inf:
            return ""
        names = sorted(self.worker_name(peer) or peer.hex()[:8] for peer in awaited)
        # Without a state, the run continues to wait when the time is up.
        is_limited = delayed_s is not None or self._freeze_phase.has_state
        limit = f", for at most {math.ceil(left_s)} s" if is_limited else ""
        return f"; still awaited{limit}: {list_first(names, MAX_NAMES)}"

    @property
    def _latest_step(self) -> int:
        """The run's step, or a later one that most of the members have reported in heartbeats."""
        run = self.run
        steps = [run.workers[peer].step for peer in run.present_members]
        return max(run.highest_step, median_low(steps or [0]))

    @property
    def is_model_pending(self) -> bool:
        """See `RunState.is_model_pending`."""
        return self.run.is_model_pending

    def introduce_pending_member(
        self, pending: m.PeerId, most: int
    ) -> tuple[list[Effect], tuple[tuple[m.PeerId, str], ...]]:
        """Choose at most `most` members that a pending member may probe to measure its links.

        Returns the messages that notify these members of the probes, and the members' keys and addresses.
        """
        return self._addresses.introduce_pending_member(pending, self.run.member_order, most)

    def worker_name(self, peer: m.PeerId) -> str:
        """Return the name of a worker, even if it has left; empty if no worker with this key is known."""
        return self._worker_names.name(peer)

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the status for `gridtrain status` as a JSON-serializable dictionary."""
        run, choice, stages = self.run, self._planner.exchange_choice, self.run.partition.stage_count
        rank_of = {peer: rank for rank, peer in enumerate(run.member_order)}
        stage_of = {p: n for n, group in enumerate(group_by_stage(run.member_order, stages)) for p in group}
        setup, spec = choice.effective_setup, run.definition.ledger if run.definition else None
        skipped, missing = run.skipped_steps, run.missing_model or run.pending_model
        is_pipeline = run.partition.is_pipeline
        waits = run.members or not is_pipeline or self._pipeline_recovery.describe_pending_end(now_s)
        ends = run.is_ending and waits and not run.is_finished
        end = f"; its owner has ended the run, which {self._describe_pending_end(now_s)}" if ends else ""
        return {
            "run": run.name,
            "phase": str(run.phase),
            "reason": f"{run.describe_phase(now_s)}{end or self._describe_awaited(now_s)}",
            "term": run.term,
            "generation": run.generation,
            "step": self._latest_step,
            "total_steps": spec.steps + spec.delay if spec and spec.steps is not None else None,
            "samples": self._predict_samples(),
            "total_samples": spec.epochs * spec.size if spec and spec.epochs is not None else None,
            "epochs": spec.epochs if spec else None,
            "skipped_samples": skipped.skipped_samples,
            "skipped_in_a_row": skipped.in_a_row,
            "alert": missing if run.is_finished else self._unfinished_alert(skipped),
            "world_size": len(run.member_list),
            "stages": stages,
            "finished": run.is_finished,
            "facts": shown_facts(setup.facts, run.partition.repartitioned_bounds) if setup else {},
            "exchange_reason": choice.description,
            "global_batch_size": run.definition.global_batch_size if run.definition else None,
            "plan_reason": self._planner.plan_reason,
            "entry_shares_reason": self._planner.entry_shares.reason,
            "links": self._planner.measured_links.link_rows(run.member_order),
            "relayed": self._addresses.relayed_pairs(run.member_order),
            "drifts": self._divergence.divergence_count,
            "members": [
                {
                    **w.status_row(rank_of.get(w.peer), run.member_list, now_s),
                    "stage": stage_of.get(w.peer),
                    "reach": self._addresses.route_table.reachability_text(w.peer),
                }
                for w in run.workers.values()
            ],
            "resting": run.paused_workers.status_rows(now_s),
            "events": [dict(event) for event in self._events],
        }

    def _predict_samples(self) -> int | None:
        """Return how many samples are in the committed steps, according to the latest generation."""
        run, share = self.run, sum(member.share for member in self.run.member_list)
        if run.view is None or run.definition is None or not share:
            return None
        steps = max(0, self._latest_step - run.view.applied - 1)
        return data_ledger.predict_consumed(run.definition.ledger, run.view.ledger.consumed, steps, share)

    def _unfinished_alert(self, skipped: SkippedSteps) -> str:
        """Return the alert about skipped steps, or about members without progress; "" if there is none."""
        run = self.run
        if run.present_members and skipped.alert:
            return skipped.alert
        is_training = run.phase is RunPhase.TRAINING and run.view_change.is_idle
        return describe_idle([run.workers[peer] for peer in run.connected_members]) if is_training else ""

    def _log_events(self, effects: list[Effect], now_s: float) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, LogEvent):
                self._events.append({"at_s": round(now_s, 3), "event": effect.event, **effect.fields})
        return effects

    # -- time ----------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """The time at which `tick` must be called; infinite if it need not be called."""
        if self._cached_deadline_s is None:
            self._cached_deadline_s = self._compute_deadline_s()
        return self._cached_deadline_s

    def _compute_deadline_s(self) -> float:
        """Return the time at which `tick` must be called.

        The time is cached until `tick` is called, an event other than a heartbeat arrives, or `_advance` has
        more to do.  Otherwise, a heartbeat can only bring it forward, to the deadline of its sender.
        """
        run, view_change, delayed_s = self.run, self.run.view_change, self._freeze_phase.delayed_until_s
        if self._workers_deadline_s is None:
            deadlines_s = (worker.deadline_s(run.limits) for worker in run.workers.values())
            self._workers_deadline_s = min(deadlines_s, default=math.inf)
        times = [view_change.deadline_s, self._workers_deadline_s]
        if delayed_s is not None:
            times.append(delayed_s)
        if view_change.is_forming and view_change.unrouted_reason:
            times.append(self._readiness.replacement_due_s())
        if run.is_finished:
            return min(times)
        times.append(self._member_recovery.deadline_s)
        catch_up_s = self._catch_up.deadline_s() if view_change.is_idle else math.inf
        if catch_up_s < math.inf and run.connected_members:
            times.append(catch_up_s)
        is_wanted = view_change.is_idle and bool(view_change.reason)
        if is_wanted and (run.member_list or self._candidates.admitted >= run.required_workers):
            times.append(self._earliest_view_change_s())
        return min(times)

    def _forget_workers_deadline_of(self, peer: m.PeerId) -> None:
        """Reset `_workers_deadline_s` before an event if it is the deadline of the worker concerned."""
        known_s, worker = self._workers_deadline_s, self.run.workers.get(peer)
        if known_s is not None and worker is not None and worker.deadline_s(self.run.limits) <= known_s:
            self._workers_deadline_s = None

    def _lower_workers_deadline(self, event: Event, generation: int, now_s: float) -> None:
        """Keep `_workers_deadline_s` no later than any worker's deadline after an event.

        Args:
            generation: the generation before the event.  Only a new generation or a report of a broken
                connection brings forward the deadlines of workers other than the event's.
        """
        message = event.message if isinstance(event, MessageReceived) else None
        known_s, worker = self._workers_deadline_s, self.run.workers.get(event.peer)
        own_s = worker.deadline_s(self.run.limits) if worker is not None else math.inf
        if known_s is None or generation != self.run.generation or isinstance(message, m.ConnectionLost):
            self._workers_deadline_s = None
        elif isinstance(message, m.Heartbeat) or now_s < known_s:
            self._workers_deadline_s = min(known_s, own_s)
        else:
            self._workers_deadline_s = None
        if self._cached_deadline_s is not None:  # after a heartbeat, which may have shortened the timeout
            self._cached_deadline_s = min(self._cached_deadline_s, own_s)

    def _earliest_view_change_s(self) -> float:
        """Return the earliest time for the next generation.

        At most one generation is made per `generation_gap_s`, so that workers that join together enter
        together; if a member is lost, there is no wait.
        """
        run, limits, installed_s = self.run, self.run.limits, self.run.view_change.last_installed_s
        if len(run.present_members) < len(run.member_order):
            return installed_s  # a member is lost, and the others must not wait
        settled_s = self._candidates.measured_s
        if settled_s is None:
            newest_s = max((w.joined_s for w in run.workers.values()), default=-math.inf)
            settled_s = newest_s + limits.settle_s
        if run.highest_step and not run.members:  # a worker says in its setup which checkpoint it has
            unknown_s = [worker.joined_s for worker in run.workers.values() if worker.setup is None]
            settled_s = max([settled_s, *(joined_s + limits.regather_s for joined_s in unknown_s)])
            if run.awaits_left_step:
                settled_s = max(settled_s, self._left_step_deadline_s)
        return max(installed_s + limits.generation_gap_s, settled_s)

    @property
    def _left_step_deadline_s(self) -> float:
        """The time until which the checkpoint of step `left_step` is awaited: `regather_s` after the model
        was lost and enough workers joined; infinite until then."""
        run = self.run
        joined_s = sorted(worker.joined_s for worker in run.workers.values() if worker.is_admitted)
        if len(joined_s) < run.required_workers:
            return math.inf
        return max(run.model_lost_s, joined_s[run.required_workers - 1]) + run.limits.regather_s

    @property
    def _candidates(self) -> Candidates:
        """The candidates for the next generation; computed once per `_advance`, and cached until the next."""
        if self._cached_candidates is None:
            self._cached_candidates = self.run.workers.candidates(self.run.members)
        return self._cached_candidates

    def _compensate_own_stall(self, now_s: float) -> list[Effect]:
        """Extend timeouts after a stall of this coordinator's own loop, which left messages unread."""
        if not self._loop_stalls.may_have_stalled(now_s):
            self._loop_stalls.record_call(now_s)
            return []
        stalled_s = self._loop_stalls.measure_stall(self.deadline_s, now_s)
        if not stalled_s:
            return []
        until_s = now_s + 2 * self.run.limits.beat_s  # by then the pending messages have been read
        for worker in self.run.workers.values():
            worker.excuse_stall(stalled_s, until_s, self.run.limits)
        self.run.view_change.extend_deadline(until_s)
        return [LogEvent("warning", "loop_stalled", {"late_s": round(stalled_s, 3)})]

    # -- messages ------------------------------------------------------------------------------

    def _handle_message(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[Effect]:
        run, worker = self.run, self.run.workers.get(peer)
        if isinstance(message, m.Join):
            return self._handle_join(peer, message, now_s)
        if worker is None:
            reason = f"a worker that is not registered sent {type(message).__name__}"
            return [Send(peer, m.Rejoin(reason))]
        match message:
            case m.Setup():
                return self._admission.handle_setup(worker, message, now_s)
            case m.WorkerInfo(texts):
                worker.info = dict(texts)
            case m.LinkLatencies(rtt_s):
                worker.record_round_trips(dict(rtt_s), run.workers)
                self._link_remeasurement.record_end(peer, now_s)
            case m.LinkRates():
                self._planner.record_rates(peer, message)
            case m.Heartbeat():
                return self._handle_heartbeat(worker, message, now_s)
            case m.FreezeReport():
                return self._freeze_phase.handle_freeze_report(worker, message, now_s)
            case m.Ready(term, generation, history):
                if run.view_change.is_forming and run.is_current(term, generation):
                    run.view_change.record_ready(peer, history)
                    worker.liveness.mark_loading(False)
                    self._divergence.clear_if_recovered(peer, generation)
            case m.RoundStalled():
                self._freeze_phase.shorten_delay(message.round.generation, now_s)
                return self._complaints.handle_stall(worker, message, now_s)
            case m.PeersUnreachable() if peer not in run.members:
                return self._catch_up.handle_no_route(worker, message, now_s)
            case m.PeersUnreachable():
                return self._complaints.handle_no_route(worker, message, now_s)
            case m.ReplicaDigest():
                return self._complaints.compare_digest(peer, message)
            case m.ConnectionLost():
                effects = self._complaints.handle_broken_link(worker, message, now_s)
                self._readiness.end_futile_wait(now_s)
                return effects
            case m.ViolationReport():
                return self._complaints.handle_accusation(peer, message)
            case m.StageCheckpointList():
                return self._checkpoints.update(worker, message)
            case m.CatchUpReport(applied):
                return self._catch_up.handle_catch_up_report(worker, applied)
            case m.CurrentGeneration():
                return self._member_recovery.handle_claim(worker, message, now_s)
            case m.Leave(reason):
                return self._departures.leave(peer, reason)
            case m.TemporaryLeave(reason):
                run.paused_workers.add(peer, worker.name, reason, now_s)
                return self._departures.leave(peer, run.paused_workers.reason_text(peer))
            case m.RunFinished(applied):
                is_repeated = peer in run.finished_members
                run.record_finish(peer, applied)
                fields = {"name": worker.name, "step": applied + 1}
                return [] if is_repeated else [LogEvent("info", "worker_finished", fields)]
            case _:
                return [RecordViolation(peer, f"sent {type(message).__name__}, which a worker may not send")]
        return []

    def _handle_heartbeat(self, worker: Worker, beat: m.Heartbeat, now_s: float) -> list[Effect]:
        run = self.run
        notes: list[Effect] = [*worker.record_heartbeat(beat, now_s)]
        self._planner.worker_speeds.observe(worker.peer, worker.figures)
        if not self._link_remeasurement.is_measuring(now_s):
            self._planner.request_if_faster(now_s)
        if run.view_change.is_idle and worker.peer in run.member_order[:1]:  # reads all members' steps
            run.record_reported_step(worker.peer, beat.step)  # so that a rollback is recognized
            notes += self._link_remeasurement.poll(now_s)
        if run.phase is RunPhase.TRAINING and worker.peer in run.members:
            notes += self._announce_alert(worker, now_s)
        return [*notes, Send(worker.peer, m.HeartbeatReply(run.term, beat.sequence))]

    def _announce_alert(self, worker: Worker, now_s: float) -> list[Effect]:
        """Log the beginning or end of the alert about skipped steps, and notify all workers of it."""
        run = self.run
        if not run.skip_alert.is_check_due(worker.figures, now_s):
            return []
        effects: list[Effect] = []
        for event in run.skip_alert.update(run.skipped_steps, now_s):
            told = m.RunStateUpdate(str(run.phase), event.fields["reason"])
            effects += [event, *(Send(peer, told) for peer in run.workers)]
        return effects

    def _handle_join(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        if refused := self._admission.check_join(peer, join):
            return refused
        effects: list[Effect] = []
        if self._is_new_process(peer, join):
            earlier = self.worker_name(peer) or join.name
            effects = self._departures.replace_process(peer, earlier)
            if not self._freeze_phase.awaits_stages:  # otherwise the new process may have the stage on disk
                effects += self._advance(now_s)
            self._settled_reason = None
        effects += self._admission.register(peer, join, now_s)
        self._catch_up.on_reconnected(peer)
        return [*effects, *self._divergence.resend(peer), *self._resend_missed(peer)]

    def _is_new_process(self, peer: m.PeerId, join: m.Join) -> bool:
        """Return whether the joining process differs from the process that is registered with this key."""
        run, worker = self.run, self.run.workers.get(peer)
        is_member = peer in run.members - run.departed_members
        is_known = is_member or (worker is not None and worker.setup is not None)
        # The known process would name its generation: the current one if it was ready, or an earlier one.
        has_lost_generation = is_member and (
            (peer in run.view_change.ready_histories and join.generation < run.generation)
            or (worker is None and not join.generation)
        )
        return is_known and (has_lost_generation or not join.is_rejoin)

    def _handle_removal(self, event: WorkerRemoved) -> list[Effect]:
        peer = event.peer
        self.run.paused_workers.discard(peer)
        entries = self.run.forget_left(peer)
        if peer not in self.run.workers:
            if peer in self.run.members:
                self.run.record_departure(peer)
            return [*entries, Disconnect(peer)]
        refused = Send(peer, m.Refused(event.code, event.reason, event.remedy))
        return [*entries, refused, *self._departures.dismiss(peer, event.reason, "removed", notify=False)]

    def _resend_missed(self, peer: m.PeerId) -> list[Effect]:
        """Return the messages that a worker may have missed while its connection was broken."""
        run = self.run
        if peer not in run.members:
            return self._pipeline_recovery.mark_standby([peer]) if run.workers[peer].standby_reason else []
        if run.view_change.is_freezing and self._freeze_phase.delayed_until_s is not None:
            return []  # the view is sent together with the `Freeze`
        return self._view_installer.resend_view(peer)

    # -- towards the next generation -----------------------------------------------------------

    def _advance(self, now_s: float) -> list[Effect]:
        """Take every step towards the next generation that is currently possible."""
        run, view_change = self.run, self.run.view_change
        if run.is_finished or self._settled_reason == view_change.reason:
            return []
        self._cached_candidates = None
        before = view_change.phase, view_change.deadline_s, view_change.reason
        if view_change.is_freezing:
            effects = self._freeze_phase.advance(now_s)
        elif view_change.is_forming:
            effects = self._readiness.advance(now_s)
            if view_change.is_idle and not view_change.is_started:  # the generation is abandoned
                effects += self._advance(now_s)
        else:
            effects = self._catch_up.advance(self._candidates.catching_up, now_s)
            if self._candidates.catching_up:
                self._cached_candidates = None  # some workers may have caught up
            effects += self._begin_view_change(now_s)
        has_changed = effects or before != (view_change.phase, view_change.deadline_s, view_change.reason)
        # Heartbeats report the progress of state transfers, of catch-up and of a pipeline's stages.
        depends_on_heartbeats = (
            (view_change.is_forming and view_change.unrouted_reason)
            or self._catch_up.is_active
            or run.partition.is_pipeline
            or self._planner.is_searching_ahead
        )
        self._settled_reason = None if has_changed or depends_on_heartbeats else view_change.reason
        return effects

    def _begin_view_change(self, now_s: float) -> list[Effect]:
        run, view_change = self.run, self.run.view_change
        if (run.members or run.is_ending) and run.members <= run.finished_members:
            end = self._freeze_phase.end_without_members
            return self._departures.finish_run() if run.members else end(now_s)
        if run.members and not run.present_members:
            return self._freeze_phase.await_members(now_s)
        newcomers = self._candidates.newcomers
        if run.partition.is_pipeline and not view_change.reason and run.members:
            notices = self._pipeline_recovery.consider_newcomers(newcomers)
            if notices is not None:
                return notices
        if newcomers:
            joined = ", ".join(w.name for w in newcomers) + " joined"
            # If there are no members, an earlier newcomer may have left while the run waited.
            if run.members:
                view_change.request(joined, can_wait=True)
            else:
                view_change.replace_reason(joined)
        if not view_change.reason or now_s < self._earliest_view_change_s():
            return []
        if run.members:
            return self._freeze_phase.freeze_members(now_s)
        if len(newcomers) < run.required_workers:
            return []
        if run.partition.is_pipeline:
            return self._pipeline_recovery.begin_first(now_s)
        return self._view_installer.install_first(now_s)
