"""Shares that follow the workers' measured speeds, and a result that does not depend on them.

worker-0   1 ms a sample   22 of 64 -> 37      worker-1   2 ms   21 -> 18      worker-2   4 ms   21 -> 9
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from group_status import status_of
from torch import nn
from training_loop import flat, linear, sgd

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.runtime.compute_rate import ComputeRate
from gridtrain.training.data import sampler

WHOLE, STEPS, SIZE = 64, 90, 640
SOON = Deadlines(beat_s=0.02, settle_s=0.02, probe_s=0.2, generation_gap_s=0.02, connect_s=5.0, reshare_s=0.5)


def data(integers: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(3)
    if integers:
        values = torch.randint(-2, 3, (SIZE, 3), generator=source).float()
    else:
        values = torch.randn(SIZE, 3, generator=source)
    return [(row[:2], row[2:]) for row in values]


def loss_of(model: nn.Module, batch: Any, exact: bool) -> torch.Tensor:
    """If `exact`, gradients are means of the data: integers over a power of two."""
    inputs, targets = batch
    error = model(inputs) - targets
    return (error * targets).mean() if exact else error.square().mean()


def alone(exact: bool) -> list[float]:
    samples, model = data(exact), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    spec = LedgerSpec(SIZE, 0, steps=STEPS)
    for step in range(STEPS):
        indices = sampler.sample_indices(spec, [Span(step * WHOLE, (step + 1) * WHOLE)])
        optimizer.zero_grad()
        loss_of(model, sampler.fetch_batch(samples, indices), exact).backward()
        optimizer.step()
    return flat(model).tolist()


def in_a_group(
    new_group: Any, exact: bool, delay_s: Any, *, workers: int = 3
) -> tuple[list[list[float]], list[dict[int, int]]]:
    """Return final parameters and shares by step of each worker; print the coordinator's reasons."""

    def train(grid: gridtrain.Grid, number: int) -> tuple[list[float], dict[int, int]]:
        model, taken = linear(), {}
        optimizer = sgd(grid, model, lr=2.0**-6)
        for batch in grid.batches(data(exact), global_batch_size=WHOLE, steps=STEPS):
            taken[grid.step] = len(batch[0])
            time.sleep(delay_s(number, len(batch[0])))  # the emulated computing itself
            optimizer.zero_grad()
            loss_of(model, batch, exact).backward()
            optimizer.step()
        return flat(model).tolist(), taken

    with new_group(workers=workers, deadlines=SOON) as group:
        group.start_all(train)
        results = group.finish()
        plans = [e["plan"] for e in status_of(group)["events"] if e["event"] == "generation"]
    print(*plans, sep="\n")
    assert "equal shares: too little computing was measured to compare speeds" in plans[0]
    assert f"{WHOLE} samples shared by measured speed: " in plans[1]
    return [result[0] for result in results], [result[1] for result in results]


def test_shares_follow_real_speeds_and_the_result_stays_that_of_one_process(new_group: Any) -> None:
    slowness_s = (0.001, 0.002, 0.004)
    parameters, taken = in_a_group(new_group, False, lambda number, count: slowness_s[number] * count)
    assert parameters[0] == parameters[1] == parameters[2]
    assert parameters[0] == pytest.approx(alone(False), abs=1e-5)
    assert {sum(shares[step] for shares in taken) for step in range(STEPS)} == {WHOLE}
    assert sorted(shares[0] for shares in taken) == [21, 21, 22]
    wanted = [WHOLE * 4 / 7, WHOLE * 2 / 7, WHOLE * 1 / 7]
    last = [shares[STEPS - 1] for shares in taken]
    assert last == pytest.approx(wanted, rel=0.5), "roughly proportional: a busy machine delays sleeps, too"


def test_the_result_is_exact_where_the_shares_are_powers_of_two(
    new_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 each, then 32, 16, 8 and 8, from given speeds; means over them do not round."""
    speeds = {"worker-0": 4.0, "worker-1": 2.0, "worker-2": 1.0, "worker-3": 1.0}

    def figures(pace: ComputeRate) -> dict[str, float]:
        samples = float(pace._samples)
        return {SAMPLES_FIGURE: samples, SECONDS_FIGURE: samples / speeds[threading.current_thread().name]}

    monkeypatch.setattr(ComputeRate, "figures", figures)
    parameters, taken = in_a_group(new_group, True, lambda number, count: 0.02, workers=4)
    shares_of = [tuple(shares[step] for shares in taken) for step in range(STEPS)]
    assert set(shares_of) == {(16, 16, 16, 16), (32, 16, 8, 8)}
    assert shares_of == sorted(shares_of), "shared again once"
    assert all(values == alone(True) for values in parameters), "to the last bit"
