"""Decides whether a pipeline that has lost workers continues, rolls back or pauses, and who is on standby.

    all reports received --> every stage is held in memory or on disk -----> the next generation
                             every stage of an earlier step is on disk ----> rollback, the next generation
                             neither --------------------------------------> PAUSED until a worker joins;
                                      if the owner ended it: FINISHED without a model after `regather_s`
    a later step is on the disks of workers that left: PAUSED until they join or are removed (`_await_left`);
                                      if the owner ended it: as above
    fewer workers than stages: PAUSED for `recut_s`, then repartitioned across the workers, if it fits
    generation installed --> workers without a rank are on standby, and are notified

The step is chosen by `stages.whole_state`; the partition and the ranks by `stages.placement`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.verdict import Outcome
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain.core.stages.repartition import uncovered_spans
from gridtrain.quantities import MAX_NAMES, format_count, list_first
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.membership.view_installer import ViewInstaller, decide_open_step, initial_outcome
from gridtrain_coordinator.run.events import Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog, depends_on_unwritten
from gridtrain_coordinator.stages.checkpoint_quorum import ReportedCheckpoints
from gridtrain_coordinator.stages.placement import LiveStates, PlacementResult, StagePlacement
from gridtrain_coordinator.stages.whole_state import (
    EXPORT,
    UNSAVED_REMEDY,
    RestartPoint,
    end_reason,
    find_restart_point,
)


@dataclass(slots=True, eq=False)
class PipelineRecovery:
    """Decides how a pipeline continues, from the workers that are present and the states that they hold."""

    _run: RunState
    _departures: Departures
    _view_installer: ViewInstaller
    _placement: StagePlacement
    _checkpoints: CheckpointCatalog
    _pending_end: tuple[float, str] | None = None  # when and how an ended run ends
    _end_s: float = math.inf  # when a run that its owner has ended ends without a model
    _stop_reason: str = ""  # why the latest generation ended, if the run has paused since

    # -- the next generation -----------------------------------------------------------------------

    def begin_first(self, now_s: float) -> list[Effect]:
        """If the run has no members, install a generation of eligible workers, or pause.

        Committed steps can then be restored only from checkpoints that cover all stages.
        """
        run = self._run
        restart = self._find_restart_point(None, run.highest_step - 1, {}, has_committed=run.highest_step > 0)
        if restart.outcome is None and not run.highest_step:
            restart = RestartPoint(initial_outcome(), StateLocations())
        if left := self._await_left(restart, run.highest_step - 1):
            run.view_change.withdraw()
            return self._pause(left[0])
        result = self._placement.place(restart, {}, now_s)
        if isinstance(result, str) or restart.outcome is None:
            run.view_change.withdraw()
            return self._pause(str(result))
        rollback = self._roll_back(run.highest_step - 1, restart.outcome.applied, is_certain=False)
        return rollback + self._install(restart.outcome, result, now_s)

    def decide(
        self, reports: Mapping[m.PeerId, m.FreezeReport], patience_s: float, now_s: float
    ) -> list[Effect]:
        """Continue from the latest step for which workers hold every stage; pause if there is none.

        Called when all connected members have reported.

        Args:
            reports: the reports of the members that hold a state.
            patience_s: the time until which to wait for absent members if a stage or a worker is missing;
                -inf if none is awaited.
        """
        run = self._run
        outcome: Outcome | None = None
        if reports:
            outcome = decide_open_step(run, reports)
            if self._is_finished(outcome):
                return self._finish_run(outcome)
        elif not run.has_started:
            outcome = initial_outcome()
        live = {peer: report.layers for peer, report in reports.items()}
        last = outcome.applied if outcome is not None else run.highest_step - 1
        restart = self._find_restart_point(outcome, last, live)
        has_enough = len(run.eligible_workers()) >= run.partition.stage_count
        is_certain = outcome is not None and restart.outcome is outcome and has_enough
        if not is_certain and now_s < patience_s:
            run.view_change.wait_until(patience_s)  # the member that has the missing stage may come back
            return []
        if outcome is None and (left := self._await_left(restart, last)):
            return self._await_end(restart, last, left[0], now_s, left[1])
        restart, result = self._place(outcome, restart, last, live, now_s)
        if isinstance(result, str) or restart.outcome is None:
            self._stop_reason = self._stop_reason or run.view_change.reason
            cause = f"; training stopped because {self._stop_reason}" if self._stop_reason else ""
            return self._await_end(restart, last, f"{result}{cause}", now_s)
        effects: list[Effect] = []
        if outcome is None or restart.outcome is not outcome:
            effects = self._roll_back(last, restart.outcome.applied, is_certain=outcome is not None)
        run.view_change.reset()
        return effects + self._install(restart.outcome, result, now_s)

    def _place(
        self, outcome: Outcome | None, restart: RestartPoint, last: int, live: LiveStates, now_s: float
    ) -> tuple[RestartPoint, PlacementResult | str]:
        """Place the workers for the restart point.

        If possible, no member needs a state that exists only in the memory of a worker with a full disk.

        Returns the restart point used, which may be an earlier one, and the placement or the reason why there
        is none.
        """
        in_memory = live if outcome is not None and restart.outcome is outcome else {}
        result = self._placement.place(restart, in_memory, now_s)
        if not self._depends_on_full_disks(result, restart, in_memory):
            return restart, result
        previous = self._placement.place_in_previous_partition(restart, in_memory, now_s)
        if previous is not None and not self._depends_on_full_disks(previous, restart, in_memory):
            return restart, previous
        written = {p: span for p, span in in_memory.items() if not self._run.workers[p].is_disk_full}
        restart = self._find_restart_point(outcome, last, written)
        is_unchanged = restart.outcome is outcome
        return restart, self._placement.place(restart, written if is_unchanged else {}, now_s)

    def _depends_on_full_disks(
        self, result: PlacementResult | str, restart: RestartPoint, live: LiveStates
    ) -> bool:
        """Return whether a member needs a state that a worker with a full disk holds only in memory."""
        full = {peer for peer, worker in self._run.workers.items() if worker.is_disk_full}
        if not full or isinstance(result, str) or restart.outcome is None:
            return False
        on_disks = self._checkpoints.trusted_checkpoints()
        return depends_on_unwritten(result[0], restart.outcome, full, live, on_disks)

    def _await_left(self, restart: RestartPoint, last: int) -> tuple[str, str] | None:
        """Return why the run waits for workers that left with a state later than the restart point.

        The result is a pair: the reason for the wait, and the reason why no model is written if the run ends
        before these workers rejoin.

        Returns None if there are no such workers, or if enough workers for all stages are present; in the
        latter case, the run continues from the restart point, and the later steps are lost.
        """
        run, left = self._run, self._run.left_workers
        # Enough for all defined stages, even if the model is repartitioned over fewer workers.
        has_enough = len(run.eligible_workers()) >= max(run.partition.stage_count, run.defined_setup.stages)
        if not left or has_enough or restart.outcome is None:
            return None
        is_trusted = self._checkpoints.quorum.is_trusted
        stored = {peer: tuple(filter(is_trusted, worker.checkpoints)) for peer, worker in left.items()}
        later = self._find_restart_point(None, last, {}, absent=stored).outcome
        if later is None or later.applied <= restart.outcome.applied:
            return None
        run.view_change.wait_until(math.inf)
        at = later.applied, later.history
        names = [w.name for w in left.values() if any((x.applied, x.history) == at for x in w.checkpoints)]
        which, back = ("its disk", "it rejoins") if len(names) == 1 else ("their disks", "they rejoin")
        kicked = names[0] if len(names) == 1 else "for each of them"
        cause = f"{list_first(names, MAX_NAMES)} left with a stage of step {later.applied + 1} on {which}"
        return (
            f"{cause}; training continues when {back}, or, from step {restart.outcome.applied + 1}, "
            f"after gridtrain kick {kicked}",
            f"{cause}; {EXPORT} the model of step {later.applied + 1}",
        )

    def _find_restart_point(
        self,
        outcome: Outcome | None,
        last: int,
        live: LiveStates,
        *,
        has_committed: bool = True,
        absent: ReportedCheckpoints = MappingProxyType({}),
    ) -> RestartPoint:
        """Return the restart point for these states and the workers' checkpoints.

        Args:
            has_committed: whether any steps were committed; if so, the quorum must confirm a state, so that
                false reports cannot undo these steps.
            absent: the checkpoints of absent workers that are to be considered as well.
        """
        run = self._run
        quorum = self._checkpoints.quorum if has_committed else None
        checkpoints = {**absent, **self._checkpoints.trusted_checkpoints()}
        restart = find_restart_point(
            run.defined_setup.ledger, outcome, last, live, checkpoints, run.partition.bounds, quorum
        )
        is_saved = run.left_workers or any(checkpoints.values()) or self._checkpoints.quorum.has_confirmed
        return restart if restart.outcome is not None or is_saved else replace(restart, remedy=UNSAVED_REMEDY)

    def _install(self, outcome: Outcome, result: PlacementResult, now_s: float) -> list[Effect]:
        placement, bounds = result
        self._end_s, self._pending_end, self._stop_reason = math.inf, None, ""
        self._placement.adopt_partition(bounds)
        placement = self._checkpoints.add_digests(placement, outcome)
        effects = self._view_installer.install(outcome, now_s, placement=placement)
        return effects + self.mark_standby(placement.standbys)

    def _roll_back(self, last: int, applied: int, *, is_certain: bool) -> list[Effect]:
        """Roll back model and ledger together; return the journal entry and the log event.

        Args:
            last: the last committed step.
            applied: the step after which the run continues.
            is_certain: whether members have reported `last`.
        """
        run = self._run
        run.roll_back(applied)
        self._checkpoints.roll_back(applied)
        if last <= applied:  # no remaining worker has the last step, or the run has just begun
            return [LogEvent("warning", "restored", {"step": applied + 1})] if applied >= 0 else []
        lost = {"from": last + 1, "to": applied + 1, "at_least": not is_certain}
        reason = f"a stage of step {last + 1} is lost, so the run returns to step {applied + 1}"
        before = run.view_change.reason
        run.view_change.replace_reason(f"{before}; {reason}" if before else reason)
        return [run.phase_entry(run.phase, reason, rollback=lost), LogEvent("error", "rollback", lost)]

    def _pause(self, reason: str) -> list[Effect]:
        """Pause the run; the coordinator checks after each message whether the run can continue."""
        run = self._run
        if (run.phase, run.reason) == (RunPhase.PAUSED, reason):
            return []
        run.enter_phase(RunPhase.PAUSED, reason)
        # If there are no members, the journal records the phase WAITING, because no member can come back.
        phase = RunPhase.PAUSED if run.member_list else RunPhase.WAITING
        return [
            run.phase_entry(phase, reason, reached=run.highest_step),
            LogEvent("error", "paused", {"reason": reason}),
            *(run.phase_message(peer) for peer in run.workers),
        ]

    # -- standbys ----------------------------------------------------------------------------------

    def consider_newcomers(self, newcomers: Sequence[Worker]) -> list[Effect] | None:
        """Notify each newcomer once that it is on standby.

        Returns None if these newcomers justify another generation.
        """
        if self._placement.adds_replica_or_stage(newcomers):
            return None
        return self.mark_standby([worker.peer for worker in newcomers if not worker.standby_reason])

    def mark_standby(self, peers: Sequence[m.PeerId]) -> list[Effect]:
        """Record that these workers are on standby, and that no member is; return the notices."""
        run, view = self._run, self._run.view
        if view is None:
            return []
        layout = RankLayout.for_world_size(run.partition.stage_count, len(run.member_list))
        reason = (
            f"standby: {format_count(layout.stages, 'stage')} x {format_count(layout.replicas, 'replica')} "
            f"use {format_count(layout.world_size, 'worker')}; this worker replaces a worker that leaves, or "
            f"joins another replica when {layout.stages} workers are on standby"
        )
        for peer in run.present_members:
            run.workers[peer].standby_reason = ""
        for peer in peers:
            run.workers[peer].standby_reason = reason
        position = view.decided_round, view.applied, view.history, view.ledger
        notice = m.StandbyNotice(run.term, run.generation, *position, reason)
        return [Send(peer, notice) for peer in peers]

    # -- end of the run ----------------------------------------------------------------------------

    def end_without_members(self, now_s: float) -> list[Effect]:
        """End the run on its owner's order while no worker is a member; first wait for workers that left."""
        run = self._run
        if not run.highest_step:
            return self._departures.finish_run()
        last = run.highest_step - 1
        restart = self._find_restart_point(None, last, {})
        if run.left_workers:
            run.view_change.withdraw()
            reason, incomplete = self._await_left(restart, last) or (run.reason, "")
            return self._await_end(restart, last, reason, now_s, incomplete)
        return self._end_incomplete(last, self._end_reason(restart, last))

    def describe_pending_end(self, now_s: float) -> str:
        """Describe when and how the run will end, now that its owner has ended it; "" if the run is not
        waiting for workers."""
        if self._pending_end is None:
            return ""
        until_s, how = self._pending_end
        return f"ends in {math.ceil(max(0.0, until_s - now_s))} s {how}"

    def _await_end(
        self, restart: RestartPoint, last: int, reason: str, now_s: float, incomplete: str = ""
    ) -> list[Effect]:
        """Pause the run; if its owner has ended it, end it after `regather_s` unless it can continue by then.

        If no worker is present, the run stays paused as long as members may come back.

        Args:
            incomplete: why no model is written if the run ends; by default, the reason that `_end_reason`
                gives.
        """
        run = self._run
        awaits_members = not run.eligible_workers() and bool(run.members - run.departed_members)
        if not run.is_ending or awaits_members:
            self._end_s, self._pending_end = math.inf, None
            return self._pause(reason)
        self._end_s = min(self._end_s, now_s + run.limits.regather_s)
        if restart.outcome is not None and run.view_change.deadline_s < math.inf:
            at = restart.outcome.applied
            later = ", or of a later one if a worker that holds it joins first" if at < last else ""
            self._pending_end = run.view_change.deadline_s, f"with the model of step {at + 1}{later}"
            return self._pause(reason)
        incomplete = incomplete or self._end_reason(restart, last)
        how = f"without a model, unless workers with the missing part join first: {incomplete}"
        self._pending_end = self._end_s, how
        if now_s >= self._end_s:
            return self._end_incomplete(last, incomplete)
        run.view_change.shorten_deadline(self._end_s)
        return self._pause(reason)

    def _end_reason(self, restart: RestartPoint, last: int) -> str:
        """Return why no model is written if the run ends now, and where `gridtrain export` finds one."""
        if restart.outcome is None:
            return end_reason(restart, last)
        at, layers = (restart.outcome.applied, restart.outcome.history), self._run.partition.bounds[-1]
        whole = (
            self._run.workers[peer].name
            for peer, stored in self._checkpoints.trusted_checkpoints().items()
            if not uncovered_spans([x.layers for x in stored if (x.applied, x.history) == at], layers)
        )
        return end_reason(restart, last, next(whole, ""))

    def _end_incomplete(self, last: int, reason: str) -> list[Effect]:
        """End the run on its owner's order although the connected workers cannot continue.

        These workers are refused, like workers that join too late, but the refusal contains `reason`.  They
        keep their states.
        """
        self._run.record_step(last + 1)
        self._run.view_change.reset()
        return self._departures.finish_run(reason)

    def _is_finished(self, outcome: Outcome) -> bool:
        """Return whether the run's last step is committed, and no stage of its state is lost.

        A stage is not lost if a member holds it, or held it when that member finished the run.
        """
        run = self._run
        if not data_ledger.is_finished(run.defined_setup.ledger, outcome.ledger):
            return False
        done = {run.stage_of(peer) for peer in outcome.state_holders | run.finished_members}
        return done >= set(range(run.partition.stage_count))

    def _finish_run(self, outcome: Outcome) -> list[Effect]:
        """Finish a run that some members left at its end; notify the others, but install no generation."""
        run, reason = self._run, "the run is over"
        position = outcome.decided_round, outcome.applied, outcome.history, outcome.ledger
        notice = m.StandbyNotice(run.term, run.generation + 1, *position, reason)
        run.view_change.reset()
        present = [peer for peer in run.view_change.freeze_reports if peer in run.workers]
        return [*(Send(peer, notice) for peer in present), *self._departures.finish_run()]
