"""Collects members' reports for the next generation; awaits absent members (commit rules 5, 6 and 11).

TRAINING --view change requested--> Freeze --all connected members have reported, or time is up--> next view
   |                                  ^                     nobody who reports holds a state --+
   |                                  | some are back                                          |
   +--all members are away--> delayed until `regather_s` <-------------------------------------+
      the coordinator restarted       | nobody came back, and other workers are present
                                      v
                                   WAITING: start over, from checkpoints or at step 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain_coordinator.membership.departures import MODEL_REMEDY, Departures
from gridtrain_coordinator.membership.generation_reports import GenerationReports
from gridtrain_coordinator.membership.pipeline_recovery import PipelineRecovery
from gridtrain_coordinator.membership.view_installer import ViewInstaller
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import Effect, LogEvent, RecordViolation, RunPhase, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import END_REASON, RunState

_NO_HOLDER = f"no worker was training; {MODEL_REMEDY}"


@dataclass(slots=True, eq=False)
class FreezePhase:
    """Freezes the members and collects their reports.

    Attributes:
        delayed_until_s: the time until which the `Freeze` is delayed, so that members can come back; None if
            it is not delayed.
        is_awaiting_members: whether the coordinator waits for members to come back, for example after its
            restart.
    """

    _run: RunState
    _planner: GenerationPlanner
    _departures: Departures
    _view_installer: ViewInstaller
    _pipeline_recovery: PipelineRecovery
    _divergence: DivergenceDetector
    _generation_reports: GenerationReports
    delayed_until_s: float | None = None
    is_awaiting_members: bool = False
    # The last ledger found to be sound, stored because most members report the same one.
    _sound_ledger: tuple[m.LedgerSpec, m.LedgerState, frozenset[m.PeerId]] | None = None
    _silent: m.PeerId = b""  # a member that had not reported when last checked
    _return_deadline_s: float = -math.inf
    _has_delayed: bool = False  # absent members have had time to return
    _addressing_until_s: float = math.inf  # the deadline of the dial-backs; infinite if there are none

    # -- beginning ---------------------------------------------------------------------------------

    def freeze_members(self, now_s: float) -> list[Effect]:
        """Send `Freeze` to the members; return no effects while the search for the next plan goes on."""
        run = self._run
        if not self._planner.search_ahead(now_s):
            return []
        note, freeze = self._begin(now_s), run.freeze_message()
        return [note, *(Send(peer, freeze) for peer in run.present_members)]

    def _begin(self, now_s: float) -> LogEvent:
        self.delayed_until_s = None
        self._run.view_change.begin_freezing(now_s + self._run.limits.report_s)
        fields = {"generation": self._run.generation, "reason": self._run.view_change.reason}
        return LogEvent("info", "freeze", fields)

    def await_members(self, now_s: float) -> list[Effect]:
        """Wait for the members, which are all disconnected.

        Starts over if all members have left permanently, or if the run had not started.
        """
        run = self._run
        if not run.has_started or (run.members <= run.departed_members and not run.left_workers):
            return self._start_over(now_s)
        self.delay_freeze(now_s)
        reason = (
            f"all members are disconnected; waiting {run.limits.regather_s:g} s for them to come back, after "
            "which other workers may continue from their own latest checkpoint"
        )
        return [run.enter_phase(RunPhase.PAUSED, reason), LogEvent("error", "paused", {"reason": reason})]

    def delay_freeze(self, now_s: float) -> None:
        """Wait for the members to come back, and freeze all of them together."""
        self.freeze_on_return(now_s)
        self.delayed_until_s = math.inf

    def freeze_on_return(self, now_s: float) -> None:
        """Wait for the members to come back, and freeze each member as soon as it is back."""
        self._return_deadline_s = now_s + self._run.limits.regather_s
        self._run.view_change.begin_freezing(self._return_deadline_s)
        self.is_awaiting_members = True
        self.delayed_until_s = None

    def _start_over(self, now_s: float) -> list[Effect]:
        """Start over from new workers' checkpoints or at step 0.  Call when no worker holds the model.

        A run that its owner has ended is finished instead, with the model of a checkpoint if there is one.
        """
        run = self._run
        if run.is_ending:
            return self.end_without_members(now_s)
        self._forget_members(now_s)
        lost = {"committed": True} if run.has_committed and not run.highest_step else {}
        what = "the next workers continue from a checkpoint, or start at step 0 if they have none"
        if run.partition.is_pipeline and run.highest_step:
            what = "training continues when workers with checkpoints of all stages have joined"
        reason = f"no connected worker holds the model; {what}; gridtrain finish ends the run"
        return [
            run.enter_phase(RunPhase.WAITING, reason, reached=run.highest_step, **lost),
            LogEvent("error", "waiting", {"reason": reason}),
            *(run.phase_message(peer) for peer in run.workers),
        ]

    def _forget_members(self, now_s: float) -> None:
        run = self._run
        run.lose_model(now_s)
        run.view_change.withdraw()
        run.view_change.reset()
        self.is_awaiting_members, self.delayed_until_s = False, None
        self._view_installer.clear_initial_state()

    def end_without_members(self, now_s: float) -> list[Effect]:
        """End the run on its owner's order.  Call when no member is left that could return with the model.

        If connected workers have checkpoints, the model is written before the run ends: they form a
        generation as soon as a worker with the latest checkpoint is admitted.
        """
        run = self._run
        if run.partition.is_pipeline:
            run.view_change.reset()
            return self._pipeline_recovery.end_without_members(now_s)
        if now_s < run.view_change.deadline_s < math.inf:
            return []  # the coordinator restarted, and workers with checkpoints may come back
        run.view_change.reset()
        step = run.checkpoint_step
        if step is None:
            return self._departures.finish_run(_NO_HOLDER if run.has_started or run.highest_step else "")
        self._forget_members(now_s)
        run.view_change.request(END_REASON)
        for worker in run.workers.values():
            worker.mark_caught_up()  # no member can send the state
        latest = [worker for worker in run.workers.values() if worker.checkpoint_step == step]
        return self._view_installer.install_first(now_s) if any(w.is_admitted for w in latest) else []

    # -- reports -----------------------------------------------------------------------------------

    @property
    def is_journal_behind(self) -> bool:
        """Whether members are awaited, and a worker has reported a later generation than the journal's.

        The awaited members may report this generation as well.
        """
        return self.is_awaiting_members and self._generation_reports.is_journal_behind

    def handle_freeze_report(self, worker: Worker, report: m.FreezeReport, now_s: float) -> list[Effect]:
        """Record a freeze report; return a violation if the report is impossible or not a member's."""
        run, view_change = self._run, self._run.view_change
        if not view_change.is_freezing or report.generation != run.generation:
            return []
        if worker.peer not in run.members:
            return [RecordViolation(worker.peer, "reported on a generation to which it does not belong")]
        if worker.peer in run.departed_members:
            return []  # a new process with the member's key; its `Setup` lists its checkpoints
        if run.definition is None:
            return []  # the journal is lost; the members' setups follow
        spec, ledger = run.definition.ledger, report.ledger
        checked = spec, ledger, run.members
        if checked != self._sound_ledger and data_ledger.is_sound(spec, ledger, run.members):
            self._sound_ledger = checked
        is_sound = checked == self._sound_ledger and ledger.step == report.applied + 1
        is_sound = is_sound and run.partition.can_hold(report.layers)
        least = run.view.applied if run.view is not None else -1
        if report.is_synced and (not is_sound or report.applied < least):
            return [RecordViolation(worker.peer, "reported an impossible step, ledger or stage")]
        if report.is_synced and worker.setup is None:
            return []  # the worker was disconnected; its setup follows this reply to an earlier `Freeze`
        report = self._divergence.without_diverged_state(worker.peer, report)
        view_change.record_freeze_report(worker.peer, report)
        if report.is_synced and not self.is_journal_behind:
            # This report is enough to decide, so absent members are awaited for only one heartbeat timeout.
            view_change.shorten_deadline(now_s + run.limits.silence_s)
        return []

    def shorten_delay(self, generation: int, now_s: float) -> None:
        """Shorten the delay before `Freeze`.  Call when a member has reported a stalled round."""
        if self.delayed_until_s is not None and generation == self._run.generation:
            self.delayed_until_s = min(self.delayed_until_s, now_s + self._run.limits.report_s)

    # -- end ---------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[Effect]:
        """Decide on the next generation once all connected members have reported or time is up."""
        run, view_change = self._run, self._run.view_change
        if self._is_delayed(now_s):
            return []
        if self.delayed_until_s is not None:
            if not self._planner.search_ahead(now_s):
                return []
            self._has_delayed = True
            note = self._begin(now_s)
            resent = [x for peer in run.present_members for x in self._view_installer.resend_view(peer)]
            return [note, *resent]
        if self._is_known_to_wait(now_s):
            return []
        absent = self._silent_members()
        no_holder = not self.has_state
        awaits_absent = self.is_journal_behind or (
            self.is_awaiting_members and (no_holder or not self._has_delayed)
        )
        awaited = absent if awaits_absent else absent & set(run.workers)
        self._silent = next(iter(awaited), b"")
        if awaited and run.partition.is_pipeline and view_change.deadline_s == math.inf:
            view_change.wait_until(now_s + run.limits.report_s)  # they came back while the run was paused
        if awaited and now_s < view_change.deadline_s:
            return []
        if unaddressed := self._unaddressed_workers():
            # Nothing can be planned without these workers, and a worker admitted after the view would begin
            # to measure its links and never become ready.  Workers that rejoin repeatedly are not awaited
            # forever.
            until_s = now_s + run.limits.reach_s + run.limits.settle_s
            self._addressing_until_s = min(self._addressing_until_s, until_s)
            if now_s < self._addressing_until_s:
                view_change.extend_deadline(now_s + run.limits.settle_s)
                return []
            for worker in unaddressed:
                worker.mark_addressable(True)  # treated as a worker that cannot be dialled
        self._addressing_until_s = math.inf
        may_wait = self.is_awaiting_members and no_holder and awaited and run.has_started
        if may_wait and self._keeps_waiting(absent, now_s):
            return []
        effects: list[Effect] = []
        for peer in sorted(awaited & set(run.workers)):
            reason = f"did not report within {run.limits.report_s:.1f} s"
            effects += self._departures.remove_lost(peer, reason)
        return effects + self._decide(now_s)

    def _is_delayed(self, now_s: float) -> bool:
        """Return whether the `Freeze` is still delayed.

        Members that have returned train until all are present, so that a single `Freeze` stops them only
        briefly.  Absent members are not awaited for long, because by commit rule 6 the reports of the others
        are enough to decide.
        """
        if self.delayed_until_s is None:
            return False
        run, present = self._run, set(self._run.workers)
        awaited = run.members - run.departed_members
        if self._generation_reports.is_journal_behind:
            awaited |= self._generation_reports.journaled_members  # they may report a later generation
        elif self.delayed_until_s == math.inf and awaited & present:
            self.delayed_until_s = now_s + run.limits.report_s + run.limits.regreet_s
        return not awaited <= present and now_s < min(self.delayed_until_s, run.view_change.deadline_s)

    def _is_known_to_wait(self, now_s: float) -> bool:
        """Return whether a report of the member `_silent` is still awaited.

        This check avoids a pass over all members for each report.
        """
        run, silent = self._run, self._silent
        is_awaited = silent in run.workers and silent in run.members and silent not in run.departed_members
        is_usual = not run.partition.is_pipeline and not self.is_awaiting_members
        has_reported = silent in run.view_change.freeze_reports
        return is_usual and is_awaited and not has_reported and now_s < run.view_change.deadline_s

    def _silent_members(self) -> frozenset[m.PeerId]:
        """Return the awaited members that have not reported.

        If a worker has reported a later generation than the journal's, these include the journal's members
        that have not joined yet.
        """
        run = self._run
        absent = run.members - set(run.view_change.freeze_reports) - run.departed_members
        if self.is_journal_behind:
            arrived = {w.peer for w in run.workers.values() if w.setup is not None}
            absent |= self._generation_reports.journaled_members - arrived  # may report a later generation
        return absent

    def _new_processes_without_setup(self) -> frozenset[m.PeerId]:
        """Return the members whose new process has not yet sent its `Setup`, which lists the checkpoints on
        disk."""
        run = self._run
        return frozenset(
            peer for peer in run.departed_members if peer in run.workers and run.workers[peer].setup is None
        )

    @property
    def awaits_stages(self) -> bool:
        """Whether members of a pipeline are awaited; they may hold stages in memory or on disk."""
        return self.is_awaiting_members and self._run.partition.is_pipeline

    @property
    def awaited_members(self) -> frozenset[m.PeerId]:
        """The members whose reports are awaited because the journal is outdated, or whose return is awaited
        by those that are back; empty if there are none."""
        run = self._run
        if self.is_journal_behind:
            return self._silent_members()
        if not self.is_awaiting_members or not run.present_members or (self._has_delayed and self.has_state):
            return frozenset()
        return run.members - run.departed_members - set(run.workers)

    @property
    def has_state(self) -> bool:
        """Whether a member has reported that it holds the run's state."""
        return any(report.is_synced for report in self._run.view_change.freeze_reports.values())

    def _unaddressed_workers(self) -> list[Worker]:
        """Return the workers for the next generation whose dial-back is still in progress."""
        # Senders of reports are also included: among them are members whose process was replaced.
        run = self._run
        candidates = {*run.view_change.freeze_reports, *run.eligible_workers()}
        workers = [run.workers[peer] for peer in candidates if peer in run.workers]
        return [worker for worker in workers if not worker.is_addressable]

    def _keeps_waiting(self, absent: frozenset[m.PeerId], now_s: float) -> bool:
        """Return whether to keep waiting for the absent members, one of which must come back with the model.

        The wait ends after `regather_s` if other workers can start over or the owner has ended the run;
        otherwise it is extended.
        """
        run = self._run
        self._has_delayed = False
        if now_s < self._return_deadline_s:
            run.view_change.wait_until(self._return_deadline_s)
            return True
        if run.is_ending or any(w.is_admitted and w.peer not in absent for w in run.workers.values()):
            return False
        self._return_deadline_s = now_s + run.limits.regather_s
        run.view_change.wait_until(self._return_deadline_s)
        return True

    def _decide(self, now_s: float) -> list[Effect]:
        run, view_change = self._run, self._run.view_change
        holders = {p: r for p, r in view_change.freeze_reports.items() if r.is_synced and p in run.workers}
        was_awaiting = self.is_awaiting_members
        if run.partition.is_pipeline:
            awaits = was_awaiting and bool(self._silent_members() or self._new_processes_without_setup())
            patience_s = self._return_deadline_s if awaits else -math.inf
            effects = self._pipeline_recovery.decide(holders, patience_s, now_s)
            self.is_awaiting_members = was_awaiting and view_change.is_freezing
            return effects
        self.is_awaiting_members = False
        view_change.reset()
        if holders:
            return self._view_installer.install_next(holders, now_s)
        return self._start_over(now_s) if was_awaiting else self.await_members(now_s)
