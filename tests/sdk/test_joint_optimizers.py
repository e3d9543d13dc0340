"""A group whose script passes two optimizers: newcomers and checkpoints have the state of both."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from checkpointed_group import run
from local_training import Numbered, model_of
from training_loop import digest, flat, train_batch

import gridtrain

EXCHANGES = [
    gridtrain.Dense(),
    gridtrain.LocalSteps(2, gridtrain.Dense()),
    gridtrain.LocalSteps(2, gridtrain.Dense(), overlap=True),
]


def pair(parameters: Any) -> list[torch.optim.Optimizer]:
    """SGD for the matrices and AdamW for the rest, of a stage that may lack either."""
    listed = list(parameters)
    matrices, rest = ([p for p in listed if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [
        torch.optim.SGD([{"params": matrices}], lr=0.05, momentum=0.9),
        torch.optim.AdamW([{"params": rest}], lr=0.01),
    ]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.describe())
def test_a_newcomer_has_the_state_of_both(new_group: Any, exchange: Any) -> None:
    warm, entered = threading.Event(), threading.Event()
    stop_at = [10**9]

    def train(grid: gridtrain.Grid, number: int) -> dict[int, str]:
        model = model_of()
        optimizer = grid.optimizer(pair(model.parameters()), model, exchange=exchange, compare_every=1)
        digests = {}
        for inputs, _ in grid.batches(Numbered(50_000), batch_size=2, steps=100_000):
            step = grid.step
            if number == 2 and not entered.is_set():
                stop_at[0] = step + 8
                entered.set()
            if step >= stop_at[0]:
                break
            train_batch(model, optimizer, inputs)
            if optimizer.local_calls == 0:
                digests[step] = digest(model, optimizer)
            if step > 3:
                warm.set()
        return digests

    with new_group(workers=2) as group:
        group.start_all(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        assert entered.wait(WITHIN_S)
        results = group.finish()
    common = set.intersection(*(set(digests) for digests in results))
    assert len(common) >= 7
    assert all(len({digests[step] for digests in results}) == 1 for step in common)


@pytest.mark.parametrize("exchange", EXCHANGES[:2], ids=lambda e: e.describe())
def test_a_worker_continues_from_a_checkpoint_with_the_state_of_both(exchange: Any, tmp_path: Path) -> None:
    def train(grid: gridtrain.Grid, until: int = 12) -> torch.Tensor:
        model = model_of()
        optimizer = grid.optimizer(pair(model.parameters()), model, exchange=exchange)
        for inputs, _ in grid.batches(Numbered(100), batch_size=2, steps=12):
            grid._model_state.checkpoints.wait()  # type: ignore[union-attr]  # steps are faster than a disk
            train_batch(model, optimizer, inputs)
            if grid.step == until:
                break
        return flat(model)

    run(tmp_path / "ended", 1, lambda grid: train(grid, until=8))
    (continued,) = run(tmp_path / "ended", 1, train)
    (whole,) = run(tmp_path / "whole", 1, train)
    assert torch.equal(continued, whole)
