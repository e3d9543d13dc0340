"""The training thread's view of the run, published by the I/O thread as one immutable record."""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.runtime.mailbox.worker_task import WorkerTask

_NO_LEDGER = m.LedgerState()


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A view of the run, which the I/O thread builds (`snapshot_builder`) and the training thread reads.

    Attributes:
        open_round: the round to which the trainer can submit now; None if the trainer has to wait.
        spans: the data positions of this worker's samples in the open step, or in an earlier one (`is_late`).
        plan: the plan of the attempt at the open round; None if no round is open.  With a delay
            (`LedgerSpec.delay`), its `samples` may not match `spans`.
        shares: the key and the share, in samples, of each member of the generation, in rank order.
        applied: the last step that this worker has applied; -1 if it has applied none.
        is_ended_early: whether the owner ended the run before all of its steps were completed.
        tasks: the trainer's tasks for the group, in order of priority.
        is_synced: whether this worker holds the state that `applied` and `history` identify.
        is_modified: whether the model has changed since the script created it or loaded it from a checkpoint.
        is_residual_recipient: whether this worker accepts residuals, or has acknowledged a residual that is
            not confirmed yet.
        failing_round: the round to which the trainer has submitted but which cannot be committed, or None.
        state_source: the worker that sends the missing state to this worker, or None.
        name: the name of this worker in the run; "" if this worker does not belong to a generation yet.
        exchange: the exchange that the coordinator has chosen for this generation; "" if the coordinator
            does not choose one or has not chosen one yet.
        stage_bounds: the first layer of each stage, followed by the number of layers; empty for a model
            without stages.
        first_step: the first step of this generation.
        awaited_newcomers: the names of the other members that must receive the state before training begins.
        is_late: whether `spans` belong to an earlier step, from which this worker was absent.
    """

    is_welcomed: bool = False
    phase: ev.MemberPhase = ev.MemberPhase.APART
    generation: int = 0
    rank: int = 0
    world_size: int = 0
    open_round: m.RoundId | None = None
    spans: tuple[m.Span, ...] = ()
    plan: StepPlan | None = None
    shares: tuple[tuple[m.PeerId, int], ...] = ()
    applied: int = -1
    history: bytes = b""
    ledger: m.LedgerState = _NO_LEDGER
    is_finished: bool = False
    is_ended_early: bool = False
    run_state: tuple[str, str] = ("", "")
    tasks: tuple[WorkerTask, ...] = ()
    is_synced: bool = False
    is_modified: bool = False
    is_residual_recipient: bool = True
    failing_round: m.RoundId | None = None
    state_source: m.PeerId | None = None
    name: str = ""
    exchange: str = ""
    stage_bounds: tuple[int, ...] = ()
    first_step: int = 0
    awaited_newcomers: tuple[str, ...] = ()
    is_late: bool = False
