"""A residual is given away as its worker's last round has left it, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gridtrain.config import Auto, Dense, GTopK
from gridtrain.core.collectives.collective import CollectiveComplete
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage_state import PipelineOptions
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.step_plan import RoundOutcome, StepPlan
from gridtrain.training.auto_exchanger import AutoExchanger
from gridtrain.training.exchangers import ExchangeAttempt, Exchanger, make_exchanger
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.worker_residual import WorkerResidual

GRADIENT_N = torch.tensor([3.0, 1.0, -2.0, 0.5])
SENT_N = np.array([3.0, 0, 0, 0], np.float32)  # k == 1
INHERITED = SparseVector(np.array([1]), np.array([2.5], np.float32))


def outcome(*, committed: bool, skip: bool = False) -> RoundOutcome:
    return RoundOutcome(committed, skip)


def a_round() -> tuple[Exchanger, ExchangeAttempt]:
    sparse = make_exchanger(GTopK(density=0.25, momentum=0.0), (0, 4), torch.device("cpu"))
    plan = StepPlan(step=0, attempt=0, rank=0, world_size=1, samples=1, total_samples=1)
    attempt = sparse.prepare_bucket(0, GRADIENT_N, plan, usable=True)
    for effect in attempt.buffer.make_collective(0, 1, int(attempt.skip)).start(0.0):
        if not isinstance(effect, CollectiveComplete):
            attempt.buffer.apply(effect)
    return sparse, attempt


@pytest.mark.parametrize(
    "settled, left_N",
    [
        (outcome(committed=True), GRADIENT_N.numpy() - SENT_N),
        (outcome(committed=False), np.zeros(4)),
        (outcome(committed=True, skip=True), np.zeros(4)),
        (None, None),
    ],
    ids=["committed", "aborted", "skipped", "nobody knows"],
)
def test_the_round_that_is_under_way_is_settled_first(settled: RoundOutcome | None, left_N: object) -> None:
    sparse, attempt = a_round()
    residual = WorkerResidual(sparse, 4)
    residual.mark_sent(attempt)
    given_N = residual.take(lambda: settled)
    assert given_N is None if left_N is None else np.array_equal(given_N, left_N)


def test_what_is_half_applied_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, attempt = a_round()
    residual = WorkerResidual(sparse, 4)
    residual.mark_sent(attempt)

    def interrupted(attempt: ExchangeAttempt) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sparse, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        residual.commit(attempt)
    assert residual.take(lambda: pytest.fail("there is no round to settle")) is None


def wrapped_whole() -> GridOptimizer:
    """With a session that nothing here asks."""
    model = nn.Linear(2, 2, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    session: Any = SimpleNamespace()
    return GridOptimizer(inner, model, GTopK(density=0.25, momentum=0.0), session)


def stage_of_two() -> Pipeline:
    options = PipelineOptions(
        stages=2, micro_batches=1, exchange=GTopK(density=0.25, momentum=0.0), loss=nn.MSELoss()
    )
    session: Any = SimpleNamespace(
        snapshot=WorkerSnapshot(rank=0, world_size=2),
        tasks=SimpleNamespace(resize_residual=lambda n: None),
        report_figures=lambda figures: None,
    )
    blocks = Blueprint(lambda: [nn.Linear(2, 2, bias=False) for _ in range(2)])
    staging = ModelStages(blocks, 2, cuts=None, device=torch.device("cpu"))
    pipe = Pipeline(staging, lambda p: torch.optim.SGD(p, lr=0.1), options, session)
    pipe.held.capture_state(session.snapshot)
    assert pipe.held.stage == 0
    return pipe


def residual_of(trains: GridOptimizer | Pipeline) -> WorkerResidual:
    if isinstance(trains, GridOptimizer):
        return trains.residual
    assert trains.held.residual is not None
    return trains.held.residual


def give_up(trains: GridOptimizer | Pipeline) -> None:
    """As after a pause, when what was kept back has been handed over or is lost."""
    residual_of(trains).clear()


def get_another_seat(trains: GridOptimizer | Pipeline) -> None:
    assert isinstance(trains, Pipeline)
    trains._session.snapshot = WorkerSnapshot(rank=1, world_size=2)  # type: ignore[misc]
    trains.held.pack(trains._session.snapshot)
    assert trains.held.stage == 1


BEGINNINGS = pytest.mark.parametrize(
    "made, begin_anew",
    [(wrapped_whole, give_up), (stage_of_two, give_up), (stage_of_two, get_another_seat)],
    ids=["whole model", "stage", "another stage"],
)


@BEGINNINGS
def test_a_residual_that_begins_anew_is_given_away_again(
    made: Callable[[], Any], begin_anew: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have left to this worker is in it, and was lost if this one left before a step."""
    trains = made()

    def interrupted(attempt: ExchangeAttempt) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(residual_of(trains)._exchanger, "commit", interrupted)
        residual_of(trains).commit(a_round()[1])
    assert residual_of(trains).take(lambda: pytest.fail("there is no round to settle")) is None
    begin_anew(trains)
    assert residual_of(trains).add(INHERITED, 2)
    given_N = residual_of(trains).take(lambda: pytest.fail("there is no round to settle"))
    assert given_N is not None and given_N.tolist() == [0, 2.5, 0, 0]


@BEGINNINGS
def test_a_round_is_not_settled_for_a_residual_that_came_after_it(
    made: Callable[[], Any], begin_anew: Callable[[Any], None]
) -> None:
    trains = made()
    plan = StepPlan(step=0, attempt=0, rank=0, world_size=1, samples=1, total_samples=1)
    residual = residual_of(trains)
    residual.mark_sent(residual._exchanger.prepare_bucket(0, GRADIENT_N, plan, usable=True))
    begin_anew(trains)
    assert residual_of(trains).add(INHERITED, 2)
    given_N = residual_of(trains).take(lambda: outcome(committed=True))
    assert given_N is not None and given_N.tolist() == [0, 2.5, 0, 0]


def test_without_a_residual_nothing_is_settled() -> None:
    dense = make_exchanger(Dense(), (0, 4), torch.device("cpu"))
    assert WorkerResidual(dense, 4).take(lambda: pytest.fail("there is nothing to give away")) is None


@pytest.mark.parametrize("committed", [True, False])
def test_what_a_dense_step_has_taken_along_is_not_given_away_again(committed: bool) -> None:
    auto = Auto(density=0.25)
    chosen = AutoExchanger(auto.exchanges(4), (0, 4), torch.device("cpu"))
    residual = WorkerResidual(chosen, 4)
    kept_N = np.array([0, 1.0, -2.0, 0.5], np.float32)
    assert residual.add(SparseVector(np.arange(4), kept_N), 1)
    plan = StepPlan(0, 0, rank=0, world_size=1, samples=1, total_samples=1, exchange=Dense().describe())
    residual.mark_sent(chosen.prepare_bucket(0, GRADIENT_N, plan, usable=True))
    given_N = residual.take(lambda: outcome(committed=committed))
    left_N = np.zeros(4) if committed else kept_N
    assert given_N is not None and np.array_equal(given_N, left_N), "the others have applied it"


def test_what_an_absent_worker_has_rounded_is_added() -> None:
    """A step was committed without its trainer: the I/O thread has rounded what it passed on."""
    one = make_exchanger(Dense(values="bf16"), (0, 3), torch.device("cpu"))
    residual = WorkerResidual(one, 3)
    residual.add_truncated((), np.array([0.5, 0.0, -0.25], np.float32))
    residual.add_truncated((), np.array([0.5, 1.0, 0.0], np.float32))
    assert residual.state()["residual"].tolist() == [1.0, 1.0, -0.25]
