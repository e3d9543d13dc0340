"""The shared state of the run, such as its workers, members, phase and latest step.

    workers       registered                      anna  bert  clara  dora
    member_list   the generation, by rank           0     1     2      -
    partition     the stage of each member          0     0     1      -

All parts of the coordinator's core share this state, and change it only through methods of `RunState`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import median_low
from typing import Any

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankLayout, group_by_stage
from gridtrain.quantities import format_count, list_first
from gridtrain_coordinator.run.events import JournalEntry, RunPhase, Send
from gridtrain_coordinator.run.journal_recovery import LeftWorker, RecoveredRun, left_entry
from gridtrain_coordinator.run.paused_workers import PausedWorkers
from gridtrain_coordinator.run.registry import Registry, Worker
from gridtrain_coordinator.run.stage_bounds import StageBounds
from gridtrain_coordinator.run.view_change import ViewChange
from gridtrain_coordinator.run.worker_problems import EXPORT_REMEDY, MAX_CAUSES_SHOWN, SkipAlert, SkippedSteps

END_REASON = "the run's owner has ended the run"

MAX_STEPS = 2**62
"""The highest step accepted from a worker; sums that include it still fit into a protocol field."""


class RunState:
    """The state of one run.

    Args:
        name: the run's name; requests to join another run are refused.
        term: the number of times that the coordinator has started; already written to the journal.
        limits: the time limits; see `gridtrain.config.Deadlines`.
        min_workers: the number of workers that the run needs to start.
        software: this program's version, which is sent to workers.

    Attributes:
        phase: the phase of the run, which the status shows together with `reason`.
        generation: the latest generation; 0 if none was installed.
        definition: the setup that every worker's setup must match; None until a worker has defined the run.
        workers: registered workers, in joining order.
        view: the view of the latest generation; None if no worker holds the model, or if only the members
            know the view.
        view_change: the view change in progress.
        partition: how the model is divided into stages.
        skip_alert: decides when the alert about skipped steps is announced.
        paused_workers: workers that have left because their owners paused them.
        highest_step: the number of committed steps, according to generations and members' reports.
        step_before: `highest_step` before the members' first generation, which may have a false checkpoint.
        latest_members: the members of the latest generation that trained or is in the journal, even if they
            no longer hold the model; empty for a new run.
        left_step: the highest step in a checkpoint that a former member keeps; 0 if there is none
            or if another generation has begun since.
        model_lost_s: the time at which it became known that no worker holds the model; -inf if that was
            before this coordinator started.
        has_committed: whether a step may have been committed; if not, the definition may be replaced.
        has_started: whether a worker holds, or held, a model worth waiting for.
        accepted_workers: workers whose setup this coordinator has accepted, including those that have left.
        departed_members: members that left or were dismissed, and are no longer awaited.
        left_workers: by key, the workers that have left or paused since the latest generation and have stage
            checkpoints on their disks.
        finished_members: members that have reached the end of the run.
        missing_model: why the final model was not written; "" if a worker has written it, or may still do so.
        is_ending: whether the owner has ended the run, which finishes once its members hold the same state.
    """

    def __init__(
        self, name: str, term: int, limits: Deadlines, *, min_workers: int = 1, software: str = ""
    ) -> None:
        self.name = name
        self.term = term
        self.limits = limits
        self.phase = RunPhase.WAITING
        self._reason = f"waiting for {format_count(min_workers, 'worker')}"
        self.generation = 0
        self.definition: m.Setup | None = None
        self.workers = Registry()
        self.view: m.MembershipView | None = None
        self.view_change = ViewChange()
        self.partition = StageBounds()
        self.paused_workers = PausedWorkers()
        self._last_skipped = SkippedSteps()
        self.skip_alert = SkipAlert()
        self.highest_step = self.step_before = 0
        self.has_committed = self.has_started = self.is_ending = False
        self.accepted_workers: set[m.PeerId] = set()
        self.departed_members: set[m.PeerId] = set()
        self.left_workers: dict[m.PeerId, LeftWorker] = {}
        self.left_step, self.model_lost_s = 0, -math.inf
        self.finished_members: set[m.PeerId] = set()
        self.missing_model = ""
        self.latest_members: frozenset[m.PeerId] = frozenset()
        self._min_workers, self._software = min_workers, software
        self._set_members(())

    def restore(self, recovered: RecoveredRun) -> None:
        """Continue the run that was recovered from the journal."""
        self.generation, self.definition = recovered.generation, recovered.definition
        self.has_committed, self.latest_members = recovered.has_committed, recovered.latest_members
        if recovered.definition is not None:
            self.partition.define(recovered.definition)
        view = recovered.view
        self.highest_step = max(view.applied + 1 if view is not None else 0, recovered.highest_step)
        self.step_before = self.highest_step  # an earlier generation may have reached it
        self.is_ending, self.left_step = recovered.is_ending, recovered.left_step
        self.left_workers = dict(recovered.left_workers)
        if recovered.end_reason is not None:
            self.phase, self._reason = RunPhase.FINISHED, recovered.end_reason
        elif view is not None:
            self._set_members(recovered.roster)
            self.departed_members = {*self.left_workers} & self.members
            self.has_started, self.view = recovered.has_started, replace(view, term=self.term)
            self.partition.adopt(view.stage_bounds)
            self.phase = RunPhase.PAUSED
            awaited = format_count(len(self.member_list), "member")
            self._reason = (
                f"the coordinator restarted; waiting for {awaited} to come back (a member that has finished "
                "the run does not)"
            )
        elif recovered.generation:  # the journal does not record which workers were paused
            self._reason = (
                f"no worker held the model when the coordinator restarted; {self._reason}; paused workers "
                "rejoin when they resume"
            )

    def _set_members(self, members: tuple[m.Member, ...]) -> None:
        self.member_list = members  # in rank order; () if no worker holds the model
        self.member_order = tuple(member.peer for member in members)  # their keys
        self.members = frozenset(self.member_order)
        self._reported_steps: dict[m.PeerId, int] = {}

    # -- queries -----------------------------------------------------------------------------------

    @property
    def present_members(self) -> list[m.PeerId]:
        """The members that are registered, in rank order."""
        return [peer for peer in self.member_order if peer in self.workers]

    def share_of(self, peer: m.PeerId) -> int:
        """Return a member's share of a step, in samples; 0 for other workers."""
        return next((member.share for member in self.member_list if member.peer == peer), 0)

    @property
    def connected_members(self) -> list[m.PeerId]:
        """The members that have joined over their current connection, in rank order."""
        return [peer for peer in self.present_members if self.workers[peer].liveness.disconnected_s is None]

    @property
    def skipped_steps(self) -> SkippedSteps:
        """The skipped steps that the registered members report; without such members, the last known ones."""
        workers = [self.workers[peer] for peer in self.present_members]
        reports = [(worker.step, worker.figures) for worker in workers]
        skipped = SkippedSteps.from_reports(reports) if reports else self._last_skipped
        if not (skipped.alert and reports):
            return skipped
        began = skipped.step - skipped.in_a_row
        names = [worker.name for worker in workers if worker.problems.caused_skips_after(began)]
        return replace(skipped, causes=tuple(names) if len(names) < len(workers) else ())

    @property
    def is_finished(self) -> bool:
        return self.phase is RunPhase.FINISHED

    @property
    def defined_setup(self) -> m.Setup:
        """The definition of a run that a worker has already defined."""
        assert self.definition is not None
        return self.definition

    def is_current(self, term: int, generation: int) -> bool:
        """Return whether a message with this term and generation belongs to the current generation."""
        return (term, generation) == (self.term, self.generation)

    def eligible_workers(self) -> list[m.PeerId]:
        """Return the workers that may be in the next generation, longest-serving first."""
        # A member whose process was restarted has no setup yet; it is eligible once it has sent its setup.
        workers = self.workers.values()
        ready = (w for w in workers if w.is_eligible or (w.peer in self.members and w.setup is not None))
        if self.is_ending and self.present_members:  # newcomers would only delay the end
            ready = (w for w in ready if w.peer in self.members)
        return self.workers.sort_by_seniority([w.peer for w in ready])

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the registered workers' latest checkpoint; None if there is none, or for a pipeline."""
        steps = [worker.checkpoint_step for worker in self.workers.values()]
        return max((step for step in steps if step is not None), default=None)

    def writes_model(self, peer: m.PeerId) -> bool:
        """Return whether a member writes the final model, or its stage's part of it."""
        stages = group_by_stage(self.member_order, self.partition.stage_count)
        return any(peer in replicas[:1] for replicas in stages)

    @property
    def _model_writers(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if self.writes_model(worker.peer)]

    @property
    def is_model_pending(self) -> bool:
        """Whether a member is writing the final model, or its part of it, or could not write its last
        checkpoint."""
        return any(worker.problems.is_writing for worker in self._model_writers)

    @property
    def pending_model(self) -> str:
        """A message that names the members that could not write the final model, or their parts of it, and
        are trying again; "" if there are no such members."""
        names = [worker.name for worker in self._model_writers if worker.problems.failed_exports]
        first = list_first(names, MAX_CAUSES_SHOWN)
        text = f"the final model is not written yet: {first} could not write it: {EXPORT_REMEDY}"
        return text if names else ""

    def stage_of(self, peer: m.PeerId) -> int:
        """Return a member's stage, determined by its rank.

        Returns 0 for other workers, and if the ranks do not fill all stages.
        """
        if len(self.member_order) % self.partition.stage_count or peer not in self.member_order:
            return 0
        layout = RankLayout.for_world_size(self.partition.stage_count, len(self.member_order))
        return layout.stage_of(self.member_order.index(peer))

    @property
    def required_workers(self) -> int:
        """The number of workers needed to start; after its start, a pipeline can run with fewer."""
        defined = self.definition.stages if self.definition is not None else 1
        has_begun = self.partition.is_pipeline and self.highest_step > 0
        return max(self._min_workers, 1 if has_begun else defined)

    @property
    def reason(self) -> str:
        """The reason for the phase, and what the run waits for: workers, or the state to reach newcomers."""
        here = len(self.workers)
        if self.phase is RunPhase.TRAINING and self.view_change.is_forming:
            ready = self.view_change.ready_histories
            late = [member.peer for member in self.member_list if member.joining and member.peer not in ready]
            names = list_first([self.workers.display_name(peer) for peer in late], MAX_CAUSES_SHOWN)
            return f"{self._reason}; waiting for the state to reach {names}" if late else self._reason
        if self.phase is not RunPhase.WAITING or not 0 < here < self.required_workers:
            return self._reason
        return f"{self._reason}; {here} of {self.required_workers} {'has' if here == 1 else 'have'} joined"

    def describe_phase(self, now_s: float) -> str:
        """Return the reason for the phase; while a run waits without workers, include its paused workers."""
        is_empty = self.phase is RunPhase.WAITING and not self.workers
        paused = self.paused_workers.describe(self.required_workers, now_s) if is_empty else ""
        return f"{self.reason}; {paused}" if paused else self.reason

    # -- transitions -------------------------------------------------------------------------------

    def define(self, setup: m.Setup) -> None:
        """Set the run's definition to a worker's setup: the first, or a later one before the first step."""
        stages = max(setup.stages, self.definition.stages if self.definition is not None else 1)
        self.definition = setup
        self.partition.define(setup)
        if stages > self._min_workers and self.phase is RunPhase.WAITING:
            self._reason = f"waiting for {format_count(self.required_workers, 'worker')}"
            self._reason += ", one for each stage of the model" if setup.stages > self._min_workers else ""

    def replace_facts(self, facts: m.Facts) -> None:
        """Replace the definition's facts; an earlier version of gridtrain may have recorded fewer."""
        self.definition = replace(self.defined_setup, facts=facts)

    def install(self, view: m.MembershipView, members: tuple[m.Member, ...]) -> None:
        """Make a generation the current one; the caller journals it before any worker receives it."""
        if not self.members:
            self.step_before = self.highest_step
        self._set_members(members)
        self.generation, self.view = view.generation, view
        self.roll_back(view.applied)  # members may have reported steps not committed, before they left
        self.has_committed |= view.applied >= 0
        if self.phase is RunPhase.PAUSED:  # the awaited workers have joined
            ready = f"{format_count(len(members), 'worker')} {'is' if len(members) == 1 else 'are'} ready"
            self._reason = f"the run continues from step {view.applied + 1} when {ready}"
        self.finished_members.clear()
        self.missing_model = ""  # the new first member writes the model
        self.departed_members.clear()
        self.left_workers.clear()
        self.left_step = 0

    @property
    def awaits_left_step(self) -> bool:
        """Whether no worker holds the model, and none has the checkpoint that a member kept when it left.

        False for a pipeline, and once the owner has ended the run.
        """
        if self.members or self.partition.is_pipeline or self.is_ending or self.is_finished:
            return False
        workers = list(self.workers.values())
        steps = [x.checkpoint_step or 0 for x in workers if self.is_checkpoint_credible(x, workers)]
        return max(steps, default=0) < self.left_step

    def is_checkpoint_credible(self, worker: Worker, others: Iterable[Worker]) -> bool:
        """Return whether the run may have reached the step of a worker's checkpoint; True if it has none.

        The members of the latest generation may have committed more steps than the journal and their reports
        show.  If the journal is too old to name them, the majority of the checkpoints decides.

        Args:
            others: the workers whose checkpoints are compared with `worker`'s; `worker` is one of them.
        """
        own = worker.checkpoint_step
        is_known = not self.latest_members or worker.peer in self.latest_members
        if own is None or own <= self.highest_step or is_known:
            return True
        steps = [step for other in others if (step := other.checkpoint_step) is not None]
        return 2 * sum(step >= own for step in steps) > len(steps)

    def adopt_reported(self, generation: int, members: tuple[m.Member, ...], bounds: tuple[int, ...]) -> None:
        """Adopt a generation that is not in the journal, as reported by its members."""
        self.generation, self.view, self.has_started = generation, None, True
        self.partition.adopt(bounds)
        self._set_members(members)
        self.departed_members.difference_update(self.left_workers)  # they left an earlier generation
        self.left_workers.clear()

    def lose_model(self, now_s: float) -> None:
        """Remove all members.  Call when no remaining worker holds the model."""
        if not self.has_started and self.view is not None and self.highest_step == self.view.applied + 1:
            self.highest_step = self.step_before  # no member has trained with the checkpoint of that step
        self._set_members(())
        self.model_lost_s = now_s
        self.view, self.has_started = None, False
        self.departed_members.clear()

    def raise_term(self, above: int) -> None:
        self.term = max(self.term, above) + 1
        if self.view is not None:
            self.view = replace(self.view, term=self.term)

    def unregister(self, worker: Worker) -> None:
        """Remove a worker from the registry, but keep its step and the skipped steps that it reported."""
        self._last_skipped = self.skipped_steps
        if worker.peer in self.members:
            # So that a rollback is measured from this step.
            self.record_reported_step(worker.peer, worker.step)
        del self.workers[worker.peer]

    def record_step(self, step: int) -> None:
        self.highest_step = max(self.highest_step, step)
        self.has_committed = self.has_committed or step > 0

    def record_reported_step(self, peer: m.PeerId, step: int) -> None:
        """Record a member's step, and raise the run's step to the lower median of the members' steps.

        Former members' last steps count, too, because no step could have been committed without these
        members.
        """
        self.has_committed = self.has_committed or step > 0
        self._reported_steps[peer] = min(step, MAX_STEPS + 1)
        others = {other: self.workers[other].step for other in self.present_members if other != peer}
        self.record_step(median_low((self._reported_steps | others).values()))

    def roll_back(self, applied: int) -> None:
        """Lower the highest step to `applied` + 1; the run continues after step `applied`."""
        self.highest_step = applied + 1

    def ending_entries(self) -> list[JournalEntry]:
        """Return the journal entries that `end_early` would return."""
        entry = self.phase_entry(self.phase, self._reason, reached=self.highest_step, ending=True)
        return [] if self.is_ending else [entry]

    def end_early(self) -> list[JournalEntry]:
        """Record that the owner has ended the run; return the journal entry, or none if already recorded.

        The members finish the run with the next generation, in which they all hold the same state.
        """
        entries, self.is_ending = self.ending_entries(), True
        self.view_change.replace_reason(END_REASON)
        return entries

    def record_leave(self, worker: Worker) -> list[JournalEntry]:
        """Record that a worker left on its own, because it may return with its checkpoints.

        Returns the journal entry about its stage checkpoints.  There is no entry if the worker has no
        checkpoints, if the run has members but the worker is not one of them, or if the run is finished.
        """
        if worker.peer in self.members:
            self.record_reported_step(worker.peer, worker.step)
            # A member that leaves before its first step keeps the checkpoint with which it joined.
            kept_step = max(worker.kept_step, worker.checkpoint_step or 0)
            self.left_step = max(self.left_step, min(kept_step, self.highest_step))
        is_other = bool(self.members) and worker.peer not in self.members
        if not worker.checkpoints or is_other or self.is_finished:
            return []
        left = self.left_workers[worker.peer] = LeftWorker(worker.name, worker.checkpoints)
        return [self._left_entry(worker.peer, left)]

    def forget_left(self, peer: m.PeerId) -> list[JournalEntry]:
        """Record that a worker that left is back, or can no longer come back; return the journal entry."""
        left = self.left_workers.pop(peer, None)
        return [self._left_entry(peer, replace(left, checkpoints=()))] if left else []

    def _left_entry(self, peer: m.PeerId, left: LeftWorker) -> JournalEntry:
        entry = left_entry(peer, left)
        return self.phase_entry(self.phase, self._reason, reached=self.highest_step, left=entry)

    def record_departure(self, peer: m.PeerId) -> None:
        """Record that a member left permanently."""
        self.departed_members.add(peer)

    def record_finish(self, peer: m.PeerId, applied: int) -> None:
        """Record that a worker has reached the end of the run, after step `applied`."""
        self.finished_members.add(peer)
        if peer in self.members:  # other workers have committed no steps
            self.record_reported_step(peer, applied + 1)
            if peer in self.workers:
                self.workers[peer].step = min(applied, MAX_STEPS) + 1

    def record_missing_model(self, reason: str) -> list[JournalEntry]:
        self.missing_model = f"the final model was not written: {reason}"
        return [self.phase_entry(self.phase, self._reason)] if self.is_finished else []

    # -- journal entries and messages --------------------------------------------------------------

    def phase_entry(self, phase: RunPhase, reason: str, **more: Any) -> JournalEntry:
        if phase is RunPhase.FINISHED and self.missing_model:
            more["missing_model"] = self.missing_model
        if self.left_step:
            more["left_step"] = self.left_step
        return JournalEntry("state", {"state": str(phase), "reason": reason, **more})

    def enter_phase(self, phase: RunPhase, reason: str, **more: Any) -> JournalEntry:
        """Change the phase; return the entry for the journal."""
        self.phase, self._reason = phase, reason
        if phase is RunPhase.TRAINING:
            self.has_started, self.latest_members = True, self.members
        return self.phase_entry(phase, reason, **more)

    def term_entry(self) -> JournalEntry:
        """Return the term's journal entry, which must be durable before the term is announced."""
        return JournalEntry("term", {"term": self.term, "run": self.name, "software": self._software})

    def welcome_message(self, peer: m.PeerId) -> Send:
        return Send(peer, m.Welcome(self.term, self.name, self._software))

    def phase_message(self, peer: m.PeerId) -> Send:
        alert = self.skip_alert.reason if self.phase is RunPhase.TRAINING else ""
        return Send(peer, m.RunStateUpdate(str(self.phase), alert or self.reason))

    def freeze_message(self) -> m.Freeze:
        departed = tuple(sorted(self.departed_members))
        return m.Freeze(self.term, self.generation, self.view_change.reason, departed)
