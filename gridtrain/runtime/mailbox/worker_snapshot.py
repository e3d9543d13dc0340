"""What the training thread may know of the run: one immutable record, replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.runtime.mailbox.worker_task import WorkerTask

_NO_LEDGER = m.LedgerState()


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Made by the I/O thread (`snapshot_builder`), read by the training thread.

    Attributes:
        open_round: the round that the trainer may submit to now; None: wait.
        spans: this worker's positions in the open step.
        total_samples: everybody's positions in the open step.
        shares: of the generation's members, in rank order.
        compare_after_step: after the open step all members compare their replicas.
        tasks: what the trainer is to do for the group, in order of priority.
        is_synced: this worker holds the state that `applied` and `history` name.
        is_modified: the model is no longer the one that the script made or a checkpoint held.
        is_residual_recipient: this worker accepts residuals, or has acknowledged some that do not count yet.
        failing_round: the round that the trainer has submitted to and that cannot be committed.
        state_source: who gives this worker the state that it lacks.
        name: what the run calls this worker; "": it is in no generation yet.
        exchange: what the coordinator has chosen for this generation, if the choice is the coordinator's.
        stage_bounds: of a model in stages, where the generation's stages begin, and the number of layers.
        first_step: of this generation.
    """

    is_welcomed: bool = False
    phase: io.MemberPhase = io.MemberPhase.APART
    generation: int = 0
    rank: int = 0
    world_size: int = 0
    open_round: m.RoundId | None = None
    spans: tuple[m.Span, ...] = ()
    total_samples: int = 0
    shares: tuple[tuple[m.PeerId, int], ...] = ()
    applied: int = -1
    history: bytes = b""
    ledger: m.LedgerState = _NO_LEDGER
    is_finished: bool = False
    run_state: tuple[str, str] = ("", "")
    compare_after_step: bool = False
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
