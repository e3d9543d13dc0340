"""Between FREEZE and the next generation: whose REPORT is waited for and how long (rules 5, 6 and 11).

Decides when enough is known to go on, and what a run does of which no member is left.  Never decides the
verdict (`protocol.verdict`), never makes the generation.

    TRAINING --another one is wanted--> FREEZE --all who live have reported, or time is up--> the next one
       |                                  ^                    nobody who reports holds a state --+
       |                                  | some are back,                                        |
       +--all members are away--> held back until `regather_s`  <---------------------------------+
          the coordinator restarted       | nobody came back, and others are here
                                          v
                                       WAITING: begins anew, from checkpoints or at step 0
"""

from __future__ import annotations

import math

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.membership.generation_reports import GenerationReports
from gridtrain_coordinator.membership.pipeline_recovery import PipelineRecovery
from gridtrain_coordinator.membership.view_installer import ViewInstaller
from gridtrain_coordinator.run.divergence import DivergedMembers
from gridtrain_coordinator.run.events import Effect, LogEvent, RecordViolation, RunPhase, Send
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange


class FreezePhase:
    """See the module's text.

    Attributes:
        held_until_s: while members come back the FREEZE is held, until then; None: it is not.
    """

    def __init__(
        self,
        run: RunState,
        making: ViewChange,
        partings: Departures,
        generations: ViewInstaller,
        stages: PipelineRecovery,
        drifted: DivergedMembers,
        recall: GenerationReports,
    ) -> None:
        self._run, self._view_change, self._departures = run, making, partings
        self._view_installer, self._pipeline_recovery = generations, stages
        self._diverged, self._generation_reports = drifted, recall
        self.delayed_until_s: float | None = None
        self._is_awaiting_members = False  # all members are away, and waited for
        self._return_deadline_s = -math.inf
        self._has_delayed = False  # those who are not back by now have had their time

    # -- how it begins -----------------------------------------------------------------------------

    def freeze_members(self, now_s: float) -> list[Effect]:
        """The members train, and are to stop."""
        run, making = self._run, self._view_change
        note, freeze = self._begin(now_s), making.freeze_message()
        return [note, *(Send(peer, freeze) for peer in run.present_members)]

    def _begin(self, now_s: float) -> LogEvent:
        self.delayed_until_s = None
        self._view_change.begin_freezing(now_s + self._run.limits.report_s)
        fields = {"generation": self._run.generation, "reason": self._view_change.reason}
        return LogEvent("info", "freeze", fields)

    def await_members(self, now_s: float) -> list[Effect]:
        """All members are away.  Unless they left for good, or none had begun, they are waited for."""
        run = self._run
        if not run.has_started or run.members <= run.departed_members:
            return self._start_over()
        self.delay_freeze(now_s)
        reason = f"all {len(run.member_list)} members are away; they are waited for"
        return [run.enter_phase(RunPhase.PAUSED, reason), LogEvent("error", "paused", {"reason": reason})]

    def delay_freeze(self, now_s: float) -> None:
        """The members are to come back, and are frozen when they have."""
        self.freeze_on_return(now_s)
        self.delayed_until_s = math.inf

    def freeze_on_return(self, now_s: float) -> None:
        """The members are to come back; those who are here are frozen at once."""
        self._view_change.begin_freezing(now_s + self._run.limits.regather_s)
        self._is_awaiting_members, self._return_deadline_s = True, self._view_change.deadline_s
        self.delayed_until_s = None

    def _start_over(self) -> list[Effect]:
        """Nobody is left who holds the model: wait for workers, and begin from their checkpoints, or at 0."""
        run = self._run
        run.member_list, run.view, run.has_started = (), None, False
        run.departed_members.clear()
        self._view_change.reason = ""
        self._view_change.reset()
        self._is_awaiting_members, self.delayed_until_s = False, None
        self._view_installer.clear_initial_state()
        reason = (
            "all workers that held the model are gone; the next ones begin from a checkpoint, or at step 0"
        )
        return [
            run.enter_phase(RunPhase.WAITING, reason, reached=run.highest_step),
            LogEvent("error", "waiting", {"reason": reason}),
            *(run.phase_message(peer) for peer in run.workers),
        ]

    # -- what comes in -----------------------------------------------------------------------------

    @property
    def _is_journal_behind(self) -> bool:
        """Some have told of a later generation than the journal knows: others may, too."""
        return self._is_awaiting_members and self._generation_reports.is_journal_behind

    def handle_report(self, worker: Worker, report: m.FreezeReport, now_s: float) -> list[Effect]:
        """Where a member of the frozen generation stands; what cannot be so must not reach the ledger."""
        run, making = self._run, self._view_change
        if not making.is_freezing or report.generation != run.generation:
            return []
        if worker.peer not in run.members:
            return [RecordViolation(worker.peer, "reported on a generation that it is no member of")]
        if worker.peer in run.departed_members:
            return []  # of another process with its key: what it has is on its disk, see `Setup`
        sound = data_ledger.is_sound(report.ledger, run.members) and report.ledger.step == report.applied + 1
        sound = sound and run.can_hold(report.layers)
        least = run.view.applied if run.view is not None else -1
        if report.is_synced and (not sound or report.applied < least):
            return [RecordViolation(worker.peer, "reported a step and a ledger that cannot be")]
        if report.is_synced and worker.setup is None:
            return []  # it was away: its set-up is on the way behind an answer to an older FREEZE
        report = self._diverged.without_diverged_state(worker.peer, report)
        making.reports[worker.peer] = report
        if (
            report.is_synced and not self._is_journal_behind
        ):  # it can decide: who is still away is not waited for any longer
            making.deadline_s = min(making.deadline_s, now_s + self._run.limits.silence_s)
        return []

    def shorten_delay(self, generation: int, now_s: float) -> None:
        """Members wait for one that is away: the FREEZE is not held much longer."""
        if self.delayed_until_s is not None and generation == self._run.generation:
            self.delayed_until_s = min(self.delayed_until_s, now_s + self._run.limits.report_s)

    # -- how it ends -------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[Effect]:
        """Once all who live have reported, or time is up, decide."""
        run, making = self._run, self._view_change
        if self._is_delayed(now_s):
            return []
        if self.delayed_until_s is not None:
            self._has_delayed = True
            note = self._begin(now_s)
            return [
                note,
                *(told for peer in run.present_members for told in self._view_installer.resend_view(peer)),
            ]
        absent = self._silent_members()
        nobody = not any(report.is_synced for report in making.reports.values())
        all_of_them = self._is_journal_behind or (
            self._is_awaiting_members and (nobody or not self._has_delayed)
        )
        awaited = absent if all_of_them else absent & set(run.workers)
        if awaited and run.is_pipeline and making.deadline_s == math.inf:
            making.deadline_s = now_s + self._run.limits.report_s  # back while the run was paused
        if awaited and now_s < making.deadline_s:
            return []
        if self._has_unaddressed_worker():
            # `CalledBack` always comes, and without it there is no way to plan; who is admitted only after
            # the View would begin to measure its lines, and never be READY.
            making.deadline_s = max(making.deadline_s, now_s + self._run.limits.settle_s)
            return []
        if (
            self._is_awaiting_members
            and nobody
            and awaited
            and run.has_started
            and self._keeps_waiting(absent, now_s)
        ):
            return []
        effects: list[Effect] = []
        for peer in sorted(awaited & set(run.workers)):
            effects += self._departures.remove_lost(
                peer, f"did not report within {self._run.limits.report_s:.1f} s"
            )
        return effects + self._decide(now_s)

    def _is_delayed(self, now_s: float) -> bool:
        """Members that come back train on until all are there: one FREEZE then stops all, and for a moment.

        Who does not come is not waited for long: by rule 6 those who report can decide without it.
        """
        if self.delayed_until_s is None:
            return False
        here = set(self._run.workers)
        awaited = self._run.members - self._run.departed_members
        if self._generation_reports.is_journal_behind:
            awaited |= self._generation_reports.journaled_members  # they may tell another tale
        elif self.delayed_until_s == math.inf and awaited & here:
            self.delayed_until_s = now_s + self._run.limits.report_s + self._run.limits.regreet_s
        return not awaited <= here and now_s < min(self.delayed_until_s, self._view_change.deadline_s)

    def _silent_members(self) -> frozenset[m.PeerId]:
        """Who has not told yet what it knows."""
        run = self._run
        absent = run.members - set(self._view_change.reports) - run.departed_members
        if self._is_journal_behind:
            arrived = {w.peer for w in run.workers.values() if w.setup is not None}
            absent |= self._generation_reports.journaled_members - arrived  # they may tell another tale
        return absent

    def _has_unaddressed_worker(self) -> bool:
        """Of somebody who is to be seated it is not known yet how others reach it."""
        # Beside those who have reported: a member whose process is another one now.
        workers, seated = self._run.workers, {*self._view_change.reports, *self._run.eligible_workers()}
        return any(not workers[peer].is_addressable for peer in seated if peer in workers)

    def _keeps_waiting(self, absent: frozenset[m.PeerId], now_s: float) -> bool:
        """All who hold the model are away.  Without anybody who could begin anew there is no reason to give
        up what they hold."""
        self._has_delayed = False
        if now_s < self._return_deadline_s:
            self._view_change.deadline_s = self._return_deadline_s
            return True
        if any(w.is_admitted and w.peer not in absent for w in self._run.workers.values()):
            return False
        self._view_change.deadline_s = self._return_deadline_s = now_s + self._run.limits.regather_s
        return True

    def _decide(self, now_s: float) -> list[Effect]:
        run, making = self._run, self._view_change
        holders = {p: r for p, r in making.reports.items() if r.is_synced and p in run.workers}
        given_up = self._is_awaiting_members
        if run.is_pipeline:
            patience_s = self._return_deadline_s if self._is_awaiting_members else -math.inf
            effects = self._pipeline_recovery.decide(holders, patience_s, now_s)
            self._is_awaiting_members = self._is_awaiting_members and making.is_freezing
            return effects
        self._is_awaiting_members = False
        making.reset()
        if holders:
            return self._view_installer.install_next(holders, now_s)
        return self._start_over() if given_up else self.await_members(now_s)
