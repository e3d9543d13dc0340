"""Builds the `WorkerSnapshot`, with the tasks that are due, from the core and the parts of the I/O loop."""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.generation import Generation
from gridtrain.core.member.member import MemberCore
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import (
    AddResiduals,
    ApplyMissedSteps,
    DoCatchUpWork,
    LoadState,
    WorkerTask,
)
from gridtrain.runtime.state_transfer.catch_up_session import CatchUpSession
from gridtrain.runtime.state_transfer.catch_up_source import CatchUpSource
from gridtrain.runtime.state_transfer.checkpoint_requests import CheckpointRequests
from gridtrain.runtime.state_transfer.residual_mailbox import ResidualMailbox
from gridtrain.runtime.state_transfer.state_receiver import StateReceiver
from gridtrain.runtime.state_transfer.state_sender import StateSender
from gridtrain.runtime.step_rounds import StepRounds


@dataclass(slots=True, eq=False)
class SnapshotBuilder:
    """Builds snapshots.  Only the I/O thread uses it."""

    _state_sender: StateSender
    _state_receiver: StateReceiver
    _catch_up_source: CatchUpSource
    _catch_up: CatchUpSession
    _residuals: ResidualMailbox
    _checkpoint_requests: CheckpointRequests
    _step_rounds: StepRounds
    _open_step: tuple[m.RoundId, tuple[m.Span, ...], StepPlan] | None = None

    def build(self, core: MemberCore) -> WorkerSnapshot:
        """Return a snapshot of the current state."""
        assignment, generation, state = core.rank_assignment, core.current_generation, core.replica_state
        me = assignment.members[assignment.rank] if assignment is not None else None
        spans, plan = self._step_data(core)
        is_running = core.phase is ev.MemberPhase.RUNNING
        return WorkerSnapshot(
            is_welcomed=core.coordinator_link.is_welcomed,
            phase=core.phase,
            generation=core.generation,
            rank=assignment.rank if assignment is not None else 0,
            world_size=assignment.world_size if assignment is not None else 0,
            open_round=core.next_round,
            spans=spans,
            plan=plan,
            shares=assignment.shares if assignment is not None else (),
            applied=core.applied,
            history=core.history,
            ledger=state.ledger,
            is_finished=core.is_finished and is_running,
            is_ended_early=core.is_ended_early and is_running,
            run_state=core.coordinator_link.run_state,
            tasks=self._tasks(core, me.digest if me is not None else b""),
            is_synced=core.is_synced,
            is_modified=state.is_modified,
            is_residual_recipient=(
                not core.residual_transfer.is_refusing or self._residuals.incoming.has_unconfirmed
            ),
            failing_round=generation.doomed_round if generation is not None else None,
            state_source=generation.incoming_state.source if generation is not None else None,
            name=me.name if me is not None else "",
            exchange=assignment.exchange if assignment is not None else "",
            stage_bounds=assignment.stage_bounds if assignment is not None else (),
            first_step=generation.first_step if generation is not None else 0,
            awaited_newcomers=generation.awaited_newcomers if generation is not None else (),
            is_late=any(batch.peer == core.own_id for batch in state.ledger.late),
        )

    def _tasks(self, core: MemberCore, digest: bytes) -> tuple[WorkerTask, ...]:
        """Return the tasks that are due, in order of priority."""
        requests = self._checkpoint_requests
        due: tuple[WorkerTask | None, ...] = (
            ApplyMissedSteps(missed) if (missed := self._step_rounds.last_missed) is not None else None,
            DoCatchUpWork() if self._catch_up.has_work else None,
            AddResiduals() if self._residuals.incoming.confirmed else None,
            requests.task(ev.DiscardCheckpoints),
            requests.task(ev.SaveCheckpoint),
            self._state_sender.checkpoint_task,
            requests.load_task(core.term, core.generation, synced=core.is_synced)
            or self._load_state_task(core, digest),
            self._state_sender.state_task,
            self._catch_up_source.state_snapshot_task(core.applied),
        )
        return tuple(task for task in due if task is not None)

    def _load_state_task(self, core: MemberCore, digest: bytes) -> LoadState | None:
        is_complete = self._state_receiver.blobs.is_complete_for(core.generation) and not core.is_synced
        return LoadState(core.generation, digest) if is_complete and self._catch_up.can_load_state else None

    def _step_data(self, core: MemberCore) -> tuple[tuple[m.Span, ...], StepPlan | None]:
        """Return this worker's data positions in the open step and the step's plan; () and None if no round
        is open.

        Both are computed once for each round.
        """
        open_round, generation = core.next_round, core.current_generation
        if open_round is None or generation is None:
            return (), None
        if self._open_step is None or open_round != self._open_step[0]:
            spans, *samples = generation.data_positions()
            self._open_step = open_round, spans, make_step_plan(generation, open_round, *samples)
        return self._open_step[1:]


def make_step_plan(
    generation: Generation, round_id: m.RoundId, samples: int = 0, total_samples: int = 0
) -> StepPlan:
    """Return the plan of an attempt to which this worker contributes `samples` of `total_samples` samples."""
    assignment = generation.rank_assignment
    return StepPlan(
        step=round_id.step,
        attempt=round_id.attempt,
        rank=assignment.rank,
        world_size=assignment.world_size,
        samples=samples,
        total_samples=total_samples,
        compare_after=generation.is_comparison_due,
        is_last=generation.is_last_step,
        exchange=assignment.exchange,
        stage_bounds=assignment.stage_bounds,
        generation=round_id.generation,
        first_step=generation.first_step,
        entries_share=assignment.members[assignment.rank].entries_share / m.WHOLE_SHARE,
    )
