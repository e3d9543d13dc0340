"""The stage that a worker of a pipeline sends on request, and writes before it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from gridtrain.config import Dense
from gridtrain.core.group.member_events import MemberPhase
from gridtrain.core.messages import CheckpointInfo, LedgerState, Span
from gridtrain.errors import ConfigError
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage_model_state import StageModelState
from gridtrain.pipeline.stage_state import PipelineOptions
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint
from gridtrain.training.model_state import ModelStateOptions

REQUESTED, OTHER, STANDBY = (
    WorkerSnapshot(rank=rank, world_size=size, applied=5) for rank, size in ((0, 2), (1, 2), (0, 0))
)


def worker_of_two_stages(**group: Any) -> tuple[Any, Pipeline]:
    session: Any = SimpleNamespace(
        snapshot=REQUESTED,
        tasks=SimpleNamespace(resize_residual=lambda n: None),
        report_figures=lambda figures: None,
        increase_figure=None,
    )
    blocks = Blueprint(lambda: [nn.Linear(2, 2, bias=False) for _ in range(2)])
    staging = ModelStages(blocks, 2, cuts=None, device=torch.device("cpu"))
    options = PipelineOptions(stages=2, micro_batches=1, exchange=Dense(), loss=nn.MSELoss())
    pipe = Pipeline(staging, lambda p: torch.optim.SGD([{"params": p, **group}], lr=0.1), options, session)
    return session, pipe


def test_an_optimizer_whose_state_cannot_be_sent_is_refused_at_the_beginning() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer\.param_groups\[0\]\.layers is a set, which cannot be s"
    ):
        worker_of_two_stages(layers={0, 1})


def test_the_stage_of_the_requested_rank_is_sent_or_none() -> None:
    """A MembershipView between the request and the copy drops nothing from memory."""
    session, pipe = worker_of_two_stages()
    before = pipe.held.capture_state(REQUESTED)
    module = pipe.module
    for session.snapshot in (OTHER, STANDBY):
        assert pipe.held.capture_state(REQUESTED) == before and before is not None
        assert pipe.held.capture_state(OTHER) is None, "that stage is not in memory"
        assert pipe.held.current is not None and pipe.held.current.module is module and pipe.held.stage == 0


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("is_from_disk", [False, True])
def test_a_loaded_stage_is_whole_until_its_next_step(is_scheduled: bool, is_from_disk: bool) -> None:
    """The script has requested a batch, then the state is loaded: without it nothing would be saved."""
    (_, source), (_, pipe) = worker_of_two_stages(), worker_of_two_stages()
    schedulers = [ExponentialLR(one.optimizer, gamma=0.5) for one in (source, pipe)]
    for one, scheduler in zip((source, pipe), schedulers, strict=True):
        one.track(**({"scheduler": scheduler} if is_scheduled else {}))
    state = source.held.capture_state(REQUESTED)
    assert state is not None
    assert pipe.module is not None
    pipe.optimizer.apply()  # type: ignore[attr-defined]
    schedulers[1].step()
    pipe.record_turn()
    if is_from_disk:
        position = CheckpointInfo(5, b"history", LedgerState(step=6))
        found = Checkpoint(position, (), *source.held.pack(REQUESTED), {}, path=Path())
        pipe.held.load_checkpoints([found], Span(0, 1))
    else:
        pipe.held.restore_state(state)
    assert pipe.held.is_whole_after(5) and not pipe.held.is_whole_after(6)
    schedulers[1].step()
    assert pipe.held.is_whole_after(5) is not is_scheduled


def test_before_the_first_step_the_requested_stage_is_built() -> None:
    """A stage built for another rank is not needed any more, and a newcomer waits for this one."""
    begun = replace(OTHER, applied=-1)
    session, pipe = worker_of_two_stages()
    pipe.held.capture_state(REQUESTED)
    session.snapshot = begun
    assert pipe.held.capture_state(begun) is not None and pipe.held.stage == 1


@pytest.mark.parametrize("stage", [MemberPhase.RUNNING, MemberPhase.FROZEN])
def test_a_paused_run_counts_on_no_replica(stage: MemberPhase) -> None:
    """2 x 2: the other stage's workers died, and the owners of both replicas of this stage pause them."""
    snapshot = WorkerSnapshot(phase=stage, rank=0, world_size=4, applied=6, is_synced=True)
    written: list[Span] = []
    held: Any = SimpleNamespace(
        layers=Span(0, 2),
        stage=0,
        residual=None,
        places=SimpleNamespace(is_alone=lambda place: False, layers=lambda place: Span(0, 2)),
        pack=lambda place: ({}, {}),
        release=lambda: None,
        capture_state=None,
        defined=SimpleNamespace(whole=nn.Linear(1, 1), blueprint=SimpleNamespace(pretrained=None)),
    )
    store: Any = SimpleNamespace(write_now=lambda blocks, snapshot: written.append(blocks) or True)
    tasks = SimpleNamespace(**dict.fromkeys(("attach_state", "attach_residual"), lambda *_: None))
    tasks.settle_absences = lambda timeout_s: None
    session: Any = SimpleNamespace(
        snapshot=snapshot, last_snapshot=snapshot, tasks=tasks, report_figures=lambda figures: None
    )
    state = StageModelState(session, held, ModelStateOptions(Path(), every=10, keep=2))
    state._store = store
    state.rest(0)
    assert written == ([] if stage is MemberPhase.RUNNING else [Span(0, 2)])
