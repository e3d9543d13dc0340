"""`grid.batches(..., accumulate=a)`: a step of several micro-batches in a group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from torch import nn
from training_loop import sgd

import gridtrain

A = 4


def data(size: int) -> list[torch.Tensor]:
    return [torch.tensor([float(number)]) for number in range(size)]


@pytest.mark.parametrize(
    "exchange", [gridtrain.Dense(), gridtrain.GTopK(density=0.5)], ids=["dense", "sparse"]
)
def test_a_newcomer_receives_a_schedule_that_steps_for_each_micro_batch(
    new_group: Any, exchange: Any
) -> None:
    """It receives the state while they wait in a step, in which their scheduler has moved a - 1 times."""
    holding, frozen, entered = threading.Event(), threading.Event(), threading.Event()
    stop_at = [10**9]

    def train(grid: gridtrain.Grid, number: int) -> dict[int, float]:
        model = nn.Linear(1, 4, bias=False)
        optimizer = sgd(grid, model, exchange)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.inner, lambda step: 1.0 / (1.0 + step))
        grid.track(scheduler=scheduler)
        rates: dict[int, float] = {}
        batches = grid.batches(data(50_000), batch_size=2, steps=100_000, accumulate=A)
        for micro, inputs in enumerate(batches):
            if micro % A == 0:
                rates[grid.step] = optimizer.param_groups[0]["lr"]
                if number == 2 and not entered.is_set():
                    stop_at[0] = grid.step + 4
                    entered.set()
                if grid.step >= stop_at[0]:
                    break
            (model(inputs / 50_000).square().mean() / A).backward()
            if micro % A == A - 1:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            if number == 0 and micro == 3 * A + 1:
                holding.set()
                with grid.evaluation():
                    assert frozen.wait(WITHIN_S)
        return rates

    with new_group(workers=2) as group:
        group.start_all(train)
        assert holding.wait(WITHIN_S)
        group.start(train)
        group.wait_for("following" if exchange.sparse else "freeze")
        frozen.set()
        assert entered.wait(WITHIN_S)
        results = group.finish()
    common = set.intersection(*(set(seen) for seen in results))
    assert len(common) >= 4
    for step in common:
        assert {seen[step] for seen in results} == {0.01 * (1.0 / (1.0 + A * step))}, f"step {step}"


@pytest.mark.parametrize(
    "exchange",
    [gridtrain.Dense(), gridtrain.LocalSteps(every=1, exchange=gridtrain.Dense(), outer_learning_rate=1.0)],
    ids=["dense", "local"],
)
@pytest.mark.parametrize(
    ("samples", "sizes"),
    [(7, {"batch_size": 4}), (5, {"global_batch_size": 5}), (3, {"batch_size": 2}), (1, {"batch_size": 2})],
)
@pytest.mark.parametrize("count", [2, 4])
def test_each_sample_counts_equally_in_micro_batches_of_any_size(
    together: Any, exchange: Any, samples: int, sizes: Any, count: int
) -> None:
    """The loss is w times the mean of powers of ten, so that the result shows a sample which counts more."""
    powers = [torch.tensor([10.0**number]) for number in range(samples)]

    def train(grid: gridtrain.Grid, number: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = sgd(grid, model, exchange, lr=1.0, average_buffers_every=0)
        counted = 0.0
        for micro, inputs in enumerate(grid.batches(powers, epochs=1, accumulate=count, **sizes)):
            counted += inputs.sum().item() if grid.has_samples else 0.0
            (model(inputs).mean() / count).backward()
            if micro % count == count - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert grid.step == 1 and grid.has_samples, "a mean over the last micro-batch is a number"
        assert counted == sum(10.0**number for number in range(samples))
        return -model.weight.item() * samples

    assert together(train, 1) == [pytest.approx(sum(10.0**number for number in range(samples)), rel=1e-5)]
