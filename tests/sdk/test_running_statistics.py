"""Batch norm's statistics: finite in spite of values that are not, and equal on all workers at the end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from training_loop import sgd

import gridtrain

GTOPK = gridtrain.GTopK(density=0.5)
EXCHANGES = {
    "dense": gridtrain.Dense(),
    "gtopk": GTOPK,
    "local": gridtrain.LocalSteps(every=2, exchange=GTOPK),
    "overlap": gridtrain.LocalSteps(every=2, exchange=GTOPK, overlap=True),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_bad_sample_does_not_spoil_the_statistics_of_later_batches(together: Any, name: str) -> None:
    data = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(48)]
    data[13][2] = float("nan")

    def train(grid: gridtrain.Grid, number: int) -> tuple[int, list[int]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = sgd(grid, model, EXCHANGES[name], lr=0.1)
        bad: list[int] = []
        for batch in grid.batches(data, batch_size=4, epochs=3):
            output = model(batch)
            if not output.isfinite().all():
                assert batch.isnan().any() or name in ("local", "overlap"), "only the batch with that sample"
                bad.append(grid.step)
            optimizer.zero_grad()
            output.pow(2).mean().backward()
            optimizer.step()
        assert all(value.isfinite().all() for value in model.state_dict().values())
        return optimizer.skipped_steps, bad

    (skipped, _), (other_skipped, _) = results = together(train)
    assert skipped == other_skipped > 0 and any(bad for _, bad in results)


@pytest.mark.parametrize("end", [{"epochs": 2}, {"steps": 5}], ids=lambda end: str(*end))
@pytest.mark.parametrize("name", EXCHANGES)
def test_all_workers_end_with_the_same_statistics(together: Any, name: str, end: dict[str, int]) -> None:
    """The run ends before any multiple of the interval; the last step of each pass is a short one."""
    data = [torch.randn(4, generator=torch.Generator().manual_seed(i)) * (1 + i % 7) for i in range(44)]

    def train(grid: gridtrain.Grid, number: int, every: int) -> list[list[float]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = grid.optimizer(wrapped, model, exchange=EXCHANGES[name], average_buffers_every=every)
        for batch in grid.batches(data, batch_size=4, **end):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
        return [buffer.tolist() for buffer in model.buffers()]

    first, second = together(partial(train, every=1000))
    assert first == second and first[0] != [0.0, 0.0, 0.0]
    first, second = together(partial(train, every=0))
    assert first != second
