"""A coordinator whose journal is older than the run: it takes up the generation that its members tell of.

Decides whether what a worker tells is heeded, and which term and generation hold then (rule 11).  Never makes
a generation: the members of the one that is recalled are frozen and report, as after any restart.

    Seated(term 3, generation 9)  known here ------------------> nothing
                                  not credible ----------------> Strike
                                  of a later coordinator ------> nothing but a warning: that one decides
                                  of a journal that was lost --> a higher term, FREEZE of generation 9

`protocol.recall` weighs the tales.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain_coordinator.membership.freeze_phase import FreezePhase
from gridtrain_coordinator.membership.generation_reports import GenerationReports, TermRaise, is_credible
from gridtrain_coordinator.run.events import Effect, LogEvent, RecordViolation, RunPhase, Send
from gridtrain_coordinator.run.registry import Worker, worker_count_text
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange


class MemberRecovery:
    """See the module's text."""

    def __init__(
        self, run: RunState, making: ViewChange, freezing: FreezePhase, recall: GenerationReports
    ) -> None:
        self._run, self._view_change, self._freeze_phase, self._generation_reports = (
            run,
            making,
            freezing,
            recall,
        )
        self._term_raise = TermRaise()

    @property
    def deadline_s(self) -> float:
        """When a higher term is due; infinite: none is."""
        return self._term_raise.deadline_s

    @property
    def _has_installed(self) -> bool:
        """What this coordinator has made itself binds."""
        return self._view_change.last_installed_s > -math.inf

    def handle_report(self, worker: Worker, seated: m.CurrentGeneration, now_s: float) -> list[Effect]:
        """A term or a generation that this journal does not know: it is a backup's."""
        run, recall = self._run, self._generation_reports
        latest = run.generation if self._has_installed else recall.journaled_generation
        if seated.term <= run.term and seated.generation <= latest:
            return []
        if not is_credible(seated, run.term, latest) or not run.is_valid_partition(seated.stage_bounds):
            return [
                RecordViolation(worker.peer, f"tells of term {seated.term}, generation {seated.generation}")
            ]
        obeyed = worker.peer in run.accepted_workers or (self._has_installed and not self._has_majority())
        if obeyed and seated.term > run.term:
            # Not from a backup: workers that were here have gone to a later coordinator, which alone decides.
            return [LogEvent("warning", "superseded", {"name": worker.name, "term": seated.term})]
        effects: list[Effect] = []
        first = not recall.is_journal_behind
        if not recall.record(worker.peer, seated):
            return []
        if first or seated.term > run.term:
            known = worker.peer in recall.journaled_members
            self._term_raise.record(max(run.term, seated.term), known=known, now_s=now_s)
            effects = self.raise_term(now_s)
        return effects if self._has_installed else effects + self._adopt_reported_generation(now_s)

    def _adopt_reported_generation(self, now_s: float) -> list[Effect]:
        """The generation that most tell of, where that is another one than is waited for already."""
        run, making = self._run, self._view_change
        told = self._generation_reports.most_reported(run.is_valid_partition)
        if told in (None, (run.generation, tuple((x.peer, x.share) for x in run.member_list), run.partition)):
            return []
        assert told is not None
        run.generation, members, run.partition = told
        run.member_list = tuple(m.Member(p, run.display_name(p), "", share, False) for p, share in members)
        run.view, run.has_started = None, True
        making.reason = "the coordinator was started from a backup"
        self._freeze_phase.freeze_on_return(now_s)
        size = len(members)
        reason = f"the journal is older than generation {run.generation}; waiting for its {worker_count_text(size)}"
        fields = {"generation": run.generation, "workers": size, "term": run.term}
        freeze = m.Freeze(run.term, run.generation, making.reason, ())
        return [
            run.enter_phase(RunPhase.PAUSED, reason),
            LogEvent("warning", "recalled", fields),
            *(Send(peer, freeze) for peer in run.present_members),
        ]

    def raise_term(self, now_s: float) -> list[Effect]:
        """Above what was told, if its time has come."""
        run, making = self._run, self._view_change
        told = self._term_raise.due_term(now_s)
        if told is None:
            return []
        run.term = max(run.term, told) + 1
        if run.view is not None:
            run.view = replace(run.view, term=run.term)
        if self._has_installed and run.member_list:  # its members are in the lower one
            making.request("the coordinator's term was raised")
            if making.is_forming:
                making.reset()
        return [run.term_entry(), *(run.welcome_message(peer) for peer in run.workers)]

    def _has_majority(self) -> bool:
        """More than half of the generation is connected here."""
        run = self._run
        here = [peer for peer in run.present_members if run.workers[peer].disconnected_s is None]
        return 2 * len(here) > len(run.member_list)
