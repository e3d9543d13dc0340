"""What only a run of a model in stages needs: every stage in somebody's hands, spares, whole steps.

Decides when such a run goes on, goes back or waits, once it is known who is here and what they hold.
Never decides where the model is cut and who sits where (`protocol.placing`), never judges a checkpoint.

    all REPORTs are here --> every stage in somebody's hands --------------> the next generation
                             no, but of an earlier step on disks ----------> ROLLBACK, the next generation
                             neither --------------------------------------> PAUSED, until somebody comes
    fewer workers than stages: PAUSED for `recut_s`, then a new cut over those who are here, if the model fits
    generation made -------> who has no seat is a spare, and is told why

See `protocol.copies` for which step, `protocol.on_disks` for what is told of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.verdict import Outcome, decide_outcome
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.membership.view_installer import ViewInstaller, initial_outcome
from gridtrain_coordinator.run.events import Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.registry import Worker, worker_count_text
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog
from gridtrain_coordinator.stages.placement import LiveStates, PlacementResult, StagePlacement
from gridtrain_coordinator.stages.whole_state import RestartPoint, find_restart_point


class PipelineRecovery:
    """See the module's text."""

    def __init__(
        self,
        run: RunState,
        making: ViewChange,
        partings: Departures,
        generations: ViewInstaller,
        placing: StagePlacement,
        disks: CheckpointCatalog,
    ) -> None:
        self._run, self._view_change, self._departures = run, making, partings
        self._view_installer, self._placement, self._checkpoints = generations, placing, disks

    # -- the next generation -----------------------------------------------------------------------

    def begin_first(self, now_s: float) -> list[Effect]:
        """Nobody is a member.  Where steps were committed only checkpoints of all stages bring them back."""
        run = self._run
        begin = self._find_restart_point(None, run.highest_step - 1, {}, known=run.highest_step > 0)
        if begin.outcome is None and not run.highest_step:
            begin = RestartPoint(initial_outcome(), StateLocations())
        found = self._placement.place(begin, {}, now_s)
        if isinstance(found, str) or begin.outcome is None:
            self._view_change.reason = ""
            return self._pause(str(found))
        back = self._roll_back(run.highest_step - 1, begin.outcome.applied, known=False)
        return back + self._make(begin.outcome, found, now_s)

    def decide(
        self, reports: Mapping[m.PeerId, m.FreezeReport], patience_s: float, now_s: float
    ) -> list[Effect]:
        """All who live have reported: go on where every stage is in somebody's hands, else pause.

        Args:
            reports: of those who hold a state.
            patience_s: so long members that are away are waited for where something is missing.
        """
        run = self._run
        assert run.definition is not None
        outcome: Outcome | None = None
        if reports:
            held = [(member.peer, member.share) for member in run.member_list]
            eldest_first = {peer: reports[peer] for peer in run.sort_by_seniority(reports.keys())}
            outcome = decide_outcome(eldest_first, run.definition.ledger, held, in_stages=True)
            if self._is_finished(outcome):
                return self._finish_run(outcome)
        elif not run.has_started:
            outcome = initial_outcome()
        live = {peer: report.layers for peer, report in reports.items()}
        last = outcome.applied if outcome is not None else run.highest_step - 1
        begin = self._find_restart_point(outcome, last, live)
        enough = len(run.eligible_workers()) >= run.stage_count
        certain = outcome is not None and begin.outcome is outcome and enough
        if not certain and now_s < patience_s:
            self._view_change.deadline_s = patience_s  # whoever has it may be on the way back
            return []
        begin, found = self._placed(outcome, begin, last, live, now_s)
        if isinstance(found, str) or begin.outcome is None:
            return self._pause(str(found))
        as_it_is = outcome is not None and begin.outcome is outcome
        back = [] if as_it_is else self._roll_back(last, begin.outcome.applied, known=outcome is not None)
        self._view_change.reset()
        return back + self._make(begin.outcome, found, now_s)

    def _placed(
        self, outcome: Outcome | None, begin: RestartPoint, last: int, live: LiveStates, now_s: float
    ) -> tuple[RestartPoint, PlacementResult | str]:
        """Seats for the state to begin with; without what is only in the memory of those whose disks are full
        and others would need, where that can be."""
        in_memory = live if outcome is not None and begin.outcome is outcome else {}
        found = self._placement.place(begin, in_memory, now_s)
        if not self._depends_on_full_disks(found, begin, in_memory):
            return begin, found
        before = self._placement.place_in_previous_partition(begin, in_memory, now_s)
        if before is not None and not self._depends_on_full_disks(before, begin, in_memory):
            return begin, before
        written = {p: span for p, span in in_memory.items() if not self._run.workers[p].is_disk_full}
        begin = self._find_restart_point(outcome, last, written)
        as_it_is = begin.outcome is outcome
        return begin, self._placement.place(begin, written if as_it_is else {}, now_s)

    def _depends_on_full_disks(
        self, found: PlacementResult | str, begin: RestartPoint, live: LiveStates
    ) -> bool:
        if isinstance(found, str) or begin.outcome is None:
            return False
        return self._checkpoints.depends_on_full_disks(found[0], begin.outcome, live)

    def _find_restart_point(
        self, outcome: Outcome | None, last: int, live: LiveStates, *, known: bool = True
    ) -> RestartPoint:
        """See `copies.where`.  `known`: there were steps that tales could undo."""
        run = self._run
        assert run.definition is not None
        witnesses = self._checkpoints.quorum if known else None
        disks = self._checkpoints.trusted_checkpoints()
        return find_restart_point(
            run.definition.ledger, outcome, last, live, disks, run.effective_partition, witnesses
        )

    def _make(self, outcome: Outcome, placed: PlacementResult, now_s: float) -> list[Effect]:
        seated, cuts = placed
        self._placement.adopt_partition(cuts)
        seated = self._checkpoints.add_digests(seated, outcome)
        made = self._view_installer.install(outcome, now_s, seated=seated)
        return made + self.mark_standby(seated.standbys)

    def _roll_back(self, last: int, applied: int, *, known: bool) -> list[Effect]:
        """Model and ledger together, journalled and shown; `known`: members have told what `last` is."""
        run, making = self._run, self._view_change
        run.highest_step = applied + 1
        self._checkpoints.roll_back(applied)
        if last <= applied:  # who could say how far it had come is gone, or it is the beginning
            return [LogEvent("warning", "restored", {"step": applied + 1})] if applied >= 0 else []
        lost = {"from": last + 1, "to": applied + 1, "at_least": not known}
        reason = f"a stage of step {last + 1} is in nobody's hands any more; back to step {applied + 1}"
        making.reason = f"{making.reason}; {reason}" if making.reason else reason
        return [run.phase_entry(run.phase, reason, rollback=lost), LogEvent("error", "rollback", lost)]

    def _pause(self, reason: str) -> list[Effect]:
        """The run is paused until somebody comes; each message asks anew whether it can go on."""
        run = self._run
        if (run.phase, run.reason) == (RunPhase.PAUSED, reason):
            return []
        run.enter_phase(RunPhase.PAUSED, reason)
        # Without members the journal says that it waits: then nobody is there who could come back to a seat.
        phase = RunPhase.PAUSED if run.member_list else RunPhase.WAITING
        return [
            run.phase_entry(phase, reason, reached=run.highest_step),
            LogEvent("error", "paused", {"reason": reason}),
            *(run.phase_message(peer) for peer in run.workers),
        ]

    # -- spares ------------------------------------------------------------------------------------

    def consider_newcomers(self, newcomers: Sequence[Worker]) -> list[Effect] | None:
        """While the run trains: they are told once why they have no seat yet; None: they bring a generation
        about."""
        if self._placement.adds_replica_or_stage(newcomers):
            return None
        return self.mark_standby([worker.peer for worker in newcomers if not worker.standby_reason])

    def mark_standby(self, peers: Sequence[m.PeerId]) -> list[Effect]:
        run, view = self._run, self._run.view
        if view is None:
            return []
        seats = RankLayout.for_world_size(run.stage_count, len(run.member_list))
        reason = (
            f"spare: {seats.stages} stages x {seats.replicas} are {worker_count_text(seats.world_size)}; it takes the "
            f"seat of whoever leaves, or one of a further replica when {seats.stages} are spare"
        )
        for peer in run.present_members:
            run.workers[peer].standby_reason = ""
        for peer in peers:
            run.workers[peer].standby_reason = reason
        told = m.StandbyNotice(run.term, run.generation, view.applied, view.history, view.ledger, reason)
        return [Send(peer, told) for peer in peers]

    # -- the end -----------------------------------------------------------------------------------

    def _is_finished(self, outcome: Outcome) -> bool:
        """The last step is committed, and of each stage somebody has it, or had it when it said so."""
        run = self._run
        assert run.definition is not None
        if not data_ledger.is_finished(run.definition.ledger, outcome.ledger):
            return False
        done = {run.stage_of(peer) for peer in outcome.holders | run.finished_members}
        return done >= set(range(run.stage_count))

    def _finish_run(self, outcome: Outcome) -> list[Effect]:
        """Some have left at the end already, and the others need no generation any more to hear of it."""
        run, reason = self._run, "the run is over"
        told = m.StandbyNotice(
            run.term, run.generation + 1, outcome.applied, outcome.history, outcome.ledger, reason
        )
        self._view_change.reset()
        here = [peer for peer in self._view_change.reports if peer in run.workers]
        return [*(Send(peer, told) for peer in here), *self._departures.finish_run()]
