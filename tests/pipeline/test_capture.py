"""Which stage a worker of a pipeline gives to one that asks, and writes down before it goes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gridtrain.config import Dense
from gridtrain.core.group.member_events import MemberPhase
from gridtrain.core.messages import Span
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage_departure import StageDeparture
from gridtrain.pipeline.stage_state import PipelineOptions
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot

ASKED, ANOTHER, SPARE = (
    WorkerSnapshot(rank=rank, world_size=size, applied=5) for rank, size in ((0, 2), (1, 2), (0, 0))
)


def asked() -> tuple[Any, Pipeline]:
    session: Any = SimpleNamespace(snapshot=ASKED, resize_residual=lambda n: None, note=lambda figures: None)
    blocks = Blueprint(lambda: [nn.Linear(2, 2, bias=False) for _ in range(2)])
    staging = ModelStages(blocks, 2, cuts=None, device=torch.device("cpu"))
    options = PipelineOptions(stages=2, micro_batches=1, exchange=Dense(), loss=nn.MSELoss())
    pipe = Pipeline(staging, lambda p: torch.optim.SGD(p, lr=0.1), options, session)
    return session, pipe


def test_the_stage_of_the_seat_in_which_it_was_asked_for_or_none() -> None:
    """A VIEW that comes between the question and the copy drops nothing of what is in memory."""
    session, pipe = asked()
    before = pipe.capture_state(ASKED)
    module = pipe.module
    for session.picture in (ANOTHER, SPARE):
        assert pipe.capture_state(ASKED) == before and before is not None
        assert pipe.capture_state(ANOTHER) is None, "that one is not in memory"
        assert pipe._state is not None and pipe._state.module is module and pipe.held_stage == 0


def test_before_the_first_step_a_stage_is_built_for_who_asks() -> None:
    """What was built for another seat is of no use any more, and a newcomer waits for this one."""
    begun = replace(ANOTHER, applied=-1)
    session, pipe = asked()
    pipe.capture_state(ASKED)
    session.picture = begun
    assert pipe.capture_state(begun) is not None and pipe.held_stage == 1


@pytest.mark.parametrize("stage", [MemberPhase.RUNNING, MemberPhase.FROZEN])
def test_where_the_run_stands_a_replica_may_be_gone_as_well(stage: MemberPhase) -> None:
    """Two stages of two: the other stage's workers died, and the owners of both replicas pause them."""
    picture = WorkerSnapshot(phase=stage, rank=0, world_size=4, applied=6, is_synced=True)
    written: list[Span] = []
    pipe: Any = SimpleNamespace(
        held_blocks=Span(0, 2),
        held_stage=0,
        residual_size=0,
        is_alone=lambda place: False,
        blocks_at=lambda place: Span(0, 2),
        pack=lambda place: ({}, {}),
        forget=lambda: None,
    )
    store: Any = SimpleNamespace(write_now=lambda blocks, snapshot: written.append(blocks) or True)
    session: Any = SimpleNamespace(snapshot=picture)
    StageDeparture(session, pipe, store, (), True).rest(0)
    assert written == ([] if stage is MemberPhase.RUNNING else [Span(0, 2)])
