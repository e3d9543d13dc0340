"""Recovers the run, with a higher term, from members that are ahead of the journal (commit rule 11).

    CurrentGeneration(term 3, generation 9)   already known ----------------> no effect
                                              not credible -----------------> a violation
                                              of a later coordinator -------> a warning: the later one decides
                                              ... and all members are back --> a higher term, after a while
                                              not in the journal -----------> a higher term, and Freeze

This module does not make generations: the members of the recovered generation are frozen and report, as after
any restart.
"""

from __future__ import annotations

import math

from gridtrain.core import messages as m
from gridtrain.quantities import format_count
from gridtrain_coordinator.membership.freeze_phase import FreezePhase
from gridtrain_coordinator.membership.generation_reports import GenerationReports, TermRaise, is_credible
from gridtrain_coordinator.run.events import Effect, LogEvent, RecordViolation, RunPhase, Send
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState


class MemberRecovery:
    """Handles reports of terms and generations that the journal does not contain."""

    def __init__(
        self, run: RunState, freeze_phase: FreezePhase, generation_reports: GenerationReports
    ) -> None:
        self._run, self._freeze_phase = run, freeze_phase
        self._generation_reports = generation_reports
        self._term_raise = TermRaise()
        self._later_term = 0  # of a later coordinator to which workers have moved
        self._later_members: frozenset[m.PeerId] = frozenset()
        self._take_over_s = math.inf  # when to take over from that coordinator if all members are back

    @property
    def deadline_s(self) -> float:
        """The time at which to call `raise_term`; infinite if no higher term is reported."""
        return min(self._term_raise.deadline_s, self._take_over_s)

    def handle_claim(self, worker: Worker, claim: m.CurrentGeneration, now_s: float) -> list[Effect]:
        """Handle a worker's report of its generation."""
        run, reports = self._run, self._generation_reports
        has_installed = run.view_change.has_installed  # its own generations take precedence
        latest = run.generation if has_installed else reports.journaled_generation
        if claim.term <= run.term and claim.generation <= latest:
            return []
        if not is_credible(claim, run.term, latest) or not run.partition.is_valid(claim.stage_bounds):
            reason = f"reported the impossible term {claim.term} or generation {claim.generation}"
            return [RecordViolation(worker.peer, reason)]
        followed_us = worker.peer in run.accepted_workers or (has_installed and not self._has_majority())
        if followed_us and claim.term > run.term:
            # Not started from a backup: earlier workers have moved to a later coordinator, which now decides.
            self._later_term = max(self._later_term, claim.term)
            self._later_members |= dict(claim.members).keys()
            self._take_over_s = min(self._take_over_s, now_s + run.limits.regather_s)
            return [LogEvent("warning", "superseded", {"name": worker.name, "term": claim.term})]
        effects: list[Effect] = []
        is_first = not reports.is_journal_behind
        if not reports.record(worker.peer, claim):
            return []
        if is_first or claim.term > run.term:
            is_known = worker.peer in reports.journaled_members
            self._term_raise.record(max(run.term, claim.term), is_known=is_known, now_s=now_s)
            effects = self.raise_term(now_s)
        return effects if has_installed else effects + self._adopt_reported_generation(now_s)

    def _adopt_reported_generation(self, now_s: float) -> list[Effect]:
        """Start waiting for the members of the most reported generation, unless already waiting for them."""
        run = self._run
        reported = self._generation_reports.most_reported(run.partition.is_valid)
        shares = tuple((x.peer, x.share) for x in run.member_list)
        if reported in (None, (run.generation, shares, run.partition.recorded_bounds)):
            return []
        assert reported is not None
        generation, members, bounds = reported
        listed = tuple(m.Member(p, run.workers.display_name(p), "", share, False) for p, share in members)
        run.adopt_reported(generation, listed, bounds)
        run.view_change.replace_reason("the coordinator was started from a backup")
        self._freeze_phase.freeze_on_return(now_s)
        size = len(members)
        awaited = f"that generation's {format_count(size, 'worker')}"
        journaled = self._generation_reports
        if others := len(journaled.journaled_members - dict(members).keys()):
            earlier = f"{format_count(others, 'other worker')} of generation {journaled.journaled_generation}"
            awaited += f" and for {earlier}, which may know a later one"
        reason = f"the journal is older than generation {generation}; waiting for {awaited}"
        fields = {"generation": generation, "workers": size, "term": run.term}
        freeze = m.Freeze(run.term, generation, run.view_change.reason, ())
        return [
            run.enter_phase(RunPhase.PAUSED, reason),
            LogEvent("warning", "recalled", fields),
            *(Send(peer, freeze) for peer in run.present_members),
        ]

    def raise_term(self, now_s: float) -> list[Effect]:
        """Raise the term above the reported terms if a reported term takes effect now."""
        run, view_change = self._run, self._run.view_change
        reported = self._term_raise.due_term(now_s)
        if now_s >= self._take_over_s:
            reported = self._take_over(now_s) or reported
        if reported is None:
            return []
        run.raise_term(reported)
        if view_change.has_installed and run.member_list:  # its members use the lower term
            view_change.request("the coordinator's term was raised")
            if view_change.is_forming:
                view_change.reset()
        return [run.term_entry(), *(run.welcome_message(peer) for peer in run.workers)]

    def _take_over(self, now_s: float) -> int | None:
        """Take over from a later coordinator that all workers have left, and continue as after a restart.

        Without this, workers that come back, for example because an address was changed back, would wait
        forever, because they obey only the later coordinator.

        Returns that coordinator's term, or None if some workers may still be connected to it; a takeover
        would then split the run.
        """
        run, self._take_over_s = self._run, math.inf
        if self._later_term <= run.term:
            return None
        here = {worker.peer for worker in run.workers.values() if worker.liveness.disconnected_s is None}
        if not here or not run.members | self._later_members <= here:
            self._take_over_s = now_s + run.limits.regather_s
            return None
        if run.member_list:
            self._generation_reports.begin(run.members, run.generation)
            run.view_change.replace_reason("workers came back from a later coordinator")
            self._freeze_phase.delay_freeze(now_s)
        run.view_change.forget_installation()
        self._later_members = frozenset()
        return self._later_term

    def _has_majority(self) -> bool:
        """Return whether more than half of the generation is connected to this coordinator."""
        return 2 * len(self._run.connected_members) > len(self._run.member_list)
