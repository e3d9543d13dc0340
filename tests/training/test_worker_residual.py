"""A residual is taken for a transfer as its worker's last round has left it, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gridtrain.config import Auto, Dense, GTopK
from gridtrain.core.collectives.collective import CollectiveComplete
from gridtrain.core.messages import CheckpointInfo, LedgerState, Span
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.stage_state import PipelineOptions
from gridtrain.runtime.mailbox.step_plan import RoundOutcome, StepPlan
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.auto_exchanger import AutoExchanger
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint
from gridtrain.training.exchangers import ExchangePart, Exchanger, make_exchanger
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.worker_residual import WorkerResidual

GRADIENT_N = torch.tensor([3.0, 1.0, -2.0, 0.5])
SENT_N = np.array([3.0, 0, 0, 0], np.float32)  # k == 1
INHERITED = SparseVector(np.array([1]), np.array([2.5], np.float32))


def outcome(*, committed: bool, skip: bool = False) -> RoundOutcome:
    return RoundOutcome(committed, skip)


def unreported(name: str, amount: float) -> None:
    """As the figures that the session reports."""


def a_round() -> tuple[Exchanger, ExchangePart]:
    sparse = make_exchanger(GTopK(density=0.25, momentum=0.0), (0, 4), torch.device("cpu"))
    plan = StepPlan(step=0, attempt=0, rank=0, world_size=1, samples=1, total_samples=1)
    part = sparse.prepare_bucket(0, GRADIENT_N, plan, usable=True)
    for effect in part.buffer.make_collective(0, 1, int(part.skip)).start():
        if not isinstance(effect, CollectiveComplete):
            part.buffer.apply(effect)
    return sparse, part


@pytest.mark.parametrize(
    "settled, left_N",
    [
        (outcome(committed=True), GRADIENT_N.numpy() - SENT_N),
        (outcome(committed=False), np.zeros(4)),
        (outcome(committed=True, skip=True), np.zeros(4)),
        (None, None),
        (RoundOutcome(False, False, is_unknown=True), None),
    ],
    ids=["committed", "aborted", "skipped", "no answer", "unknown"],
)
def test_a_round_in_progress_is_settled_first(settled: RoundOutcome | None, left_N: object) -> None:
    sparse, part = a_round()
    residual = WorkerResidual(sparse, 4, unreported)
    residual.mark_sent(part)
    taken_N = residual.take(lambda: settled)
    assert taken_N is None if left_N is None else np.array_equal(taken_N, left_N)


def test_an_aborted_round_keeps_the_residual_and_another_state_loses_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sparse, part = a_round()
    lost: list[tuple[str, float]] = []
    residual = WorkerResidual(sparse, 4, lambda name, amount: lost.append((name, amount)))
    residual.drop("it is")
    assert lost == [] and not caplog.text, "there is none"
    assert residual.add(INHERITED, 1)
    residual.mark_sent(part)
    residual.mark_ended()
    assert residual.magnitude == 2.5 and lost == []
    residual.drop("it is")
    assert residual.magnitude == 0.0 and lost == [("lost_mass", 2.5)]
    assert "of magnitude 2.5, is lost, because it is" in caplog.text


def test_a_partly_applied_residual_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, part = a_round()
    residual = WorkerResidual(sparse, 4, unreported)
    residual.mark_sent(part)

    def interrupted(part: ExchangePart) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sparse, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        residual.commit(part)
    assert residual.take(lambda: pytest.fail("there is no round to settle")) is None


def wrapped_whole() -> GridOptimizer:
    """With a session that these tests do not use."""
    model = nn.Linear(2, 2, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    session: Any = SimpleNamespace(increase_figure=unreported)
    return GridOptimizer(inner, model, GTopK(density=0.25, momentum=0.0), session)


def stage_of_two(increase_figure: Any = None) -> Pipeline:
    options = PipelineOptions(
        stages=2, micro_batches=1, exchange=GTopK(density=0.25, momentum=0.0), loss=nn.MSELoss()
    )
    session: Any = SimpleNamespace(
        snapshot=WorkerSnapshot(rank=0, world_size=2),
        tasks=SimpleNamespace(resize_residual=lambda n: None),
        report_figures=lambda figures: None,
        increase_figure=increase_figure,
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


def reset_residual(trains: GridOptimizer | Pipeline) -> None:
    """As after a pause, when the residual was transferred or is lost."""
    residual_of(trains).clear()


def change_stage(trains: GridOptimizer | Pipeline) -> None:
    assert isinstance(trains, Pipeline)
    trains._session.snapshot = WorkerSnapshot(rank=1, world_size=2)  # type: ignore[misc]
    trains.held.pack(trains._session.snapshot)
    assert trains.held.stage == 1


@pytest.mark.parametrize("way", ["restart", "state", "checkpoint"])
def test_a_residual_is_lost_with_its_stage_unless_it_is_saved_or_restored(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost: dict[str, float] = {}
    for residual, is_saved in (({}, False), ({}, True), ({"residual": torch.ones(4)}, False)):
        pipe = stage_of_two(lost.__setitem__)
        held, place = pipe.held, pipe._session.snapshot
        state = held.capture_state(place)
        position = CheckpointInfo(3, b"h", LedgerState(), layers := Span(0, 1))
        content = held.pack_replaced(position, ()) if is_saved else None
        assert state is not None and (content is not None) == is_saved
        assert residual_of(pipe).add(INHERITED, 1)
        caplog.clear()
        lost.clear()
        if way == "restart":
            held.restart()
        elif way == "state":
            held.restore_state(state)
        else:
            found = Checkpoint(position, (), *held.pack(place), residual, path=Path())
            held.load_checkpoints([found], layers)
        is_lost = not is_saved and not (way == "checkpoint" and residual)
        assert lost == ({"lost_mass": 2.5} if is_lost else {}) and "another stage" not in caplog.text
        if way == "checkpoint":
            assert residual_of(pipe).magnitude == 4.0 * len(residual)
        held.at(place)
        assert residual_of(pipe).add(INHERITED, 1)
        held.restore_state(state)
        assert lost["lost_mass"] >= 2.5, "what was saved once is not saved for ever"


BEGINNINGS = pytest.mark.parametrize(
    "made, reset",
    [(wrapped_whole, reset_residual), (stage_of_two, reset_residual), (stage_of_two, change_stage)],
    ids=["whole model", "stage", "another stage"],
)


@BEGINNINGS
def test_a_residual_can_be_taken_again_after_a_reset(
    made: Callable[[], Any], reset: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It contains residuals received from others, which were lost if this worker left before a step."""
    trains = made()

    def interrupted(part: ExchangePart) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(residual_of(trains)._exchanger, "commit", interrupted)
        residual_of(trains).commit(a_round()[1])
    assert residual_of(trains).take(lambda: pytest.fail("there is no round to settle")) is None
    reset(trains)
    assert residual_of(trains).add(INHERITED, 2)
    taken_N = residual_of(trains).take(lambda: pytest.fail("there is no round to settle"))
    assert taken_N is not None and taken_N.tolist() == [0, 2.5, 0, 0]


@BEGINNINGS
def test_a_round_is_not_settled_for_a_later_residual(
    made: Callable[[], Any], reset: Callable[[Any], None]
) -> None:
    trains = made()
    plan = StepPlan(step=0, attempt=0, rank=0, world_size=1, samples=1, total_samples=1)
    residual = residual_of(trains)
    residual.mark_sent(residual._exchanger.prepare_bucket(0, GRADIENT_N, plan, usable=True))
    reset(trains)
    assert residual_of(trains).add(INHERITED, 2)
    taken_N = residual_of(trains).take(lambda: outcome(committed=True))
    assert taken_N is not None and taken_N.tolist() == [0, 2.5, 0, 0]


def test_without_a_residual_nothing_is_settled() -> None:
    dense = make_exchanger(Dense(), (0, 4), torch.device("cpu"))
    assert (
        WorkerResidual(dense, 4, unreported).take(lambda: pytest.fail("there is no residual to take")) is None
    )


@pytest.mark.parametrize("committed", [True, False])
def test_a_residual_that_a_dense_step_has_sent_is_not_taken_again(committed: bool) -> None:
    auto = Auto(density=0.25)
    chosen = AutoExchanger(auto.exchanges(4), (0, 4), torch.device("cpu"))
    residual = WorkerResidual(chosen, 4, unreported)
    stored_N = np.array([0, 1.0, -2.0, 0.5], np.float32)
    assert residual.add(SparseVector(np.arange(4), stored_N), 1)
    plan = StepPlan(0, 0, rank=0, world_size=1, samples=1, total_samples=1, exchange=Dense().describe())
    residual.mark_sent(chosen.prepare_bucket(0, GRADIENT_N, plan, usable=True))
    taken_N = residual.take(lambda: outcome(committed=committed))
    left_N = np.zeros(4) if committed else stored_N
    assert taken_N is not None and np.array_equal(taken_N, left_N), "the others have applied it"


def test_rounding_errors_of_an_absent_worker_are_added() -> None:
    """A step was committed without its trainer: the I/O thread has rounded forwarded values."""
    one = make_exchanger(Dense(values="bf16"), (0, 3), torch.device("cpu"))
    residual = WorkerResidual(one, 3, unreported)
    residual.add_truncated((), np.array([0.5, 0.0, -0.25], np.float32))
    residual.add_truncated((), np.array([0.5, 1.0, 0.0], np.float32))
    assert residual.state()["residual"].tolist() == [1.0, 1.0, -0.25]
