"""A state that diverges is found, replaced and counted, on any worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from brisk import BRISK
from group_status import status_of
from torch import nn
from training_loop import digest, linear, sgd, train_batch

import gridtrain
from gridtrain.runtime.mailbox.step_plan import is_comparison_due

DATA = [(torch.tensor([float(i % 7), 1.0]), torch.tensor([2.0 * (i % 5)])) for i in range(5000)]
STEPS, FLIP_AT = 60, 13


def flip_one_bit(model: nn.Module, bit: int) -> None:
    with torch.no_grad():
        next(model.parameters()).view(torch.int32)[0, 0] ^= 1 << bit


def train(grid: gridtrain.Grid, number: int, exchange: Any, flips: dict[int, int]) -> list[str]:
    """Return the digests after each step.  `flips`: by worker, the bit to flip before step `FLIP_AT`."""
    torch.manual_seed(7)
    model = nn.Linear(2, 1)
    optimizer = sgd(grid, model, exchange, lr=0.001, momentum=0.9, compare_every=10)
    digests = []
    for batch in grid.batches(DATA, batch_size=4, steps=STEPS):
        if grid.step == FLIP_AT and number in flips:
            flip_one_bit(model, flips.pop(number))
        train_batch(model, optimizer, batch)
        digests.append(digest(model, optimizer))
    return digests


@pytest.mark.parametrize("exchange", [gridtrain.Dense(), gridtrain.GTopK(density=0.5, momentum=0.0)])
@pytest.mark.parametrize(
    ("workers", "flips"),
    [(3, {1: 20}), (3, {0: 20}), (2, {1: 19}), (3, {1: 18, 2: 20})],
    ids=["one of three", "the first", "one of two", "a three-way tie"],
)
def test_a_flipped_bit_is_found_repaired_and_counted(
    new_group: Any, exchange: Any, workers: int, flips: dict[int, int]
) -> None:
    expected, flips = len(flips), dict(flips)
    with new_group(workers=workers) as group:
        for _ in range(workers):
            group.start(lambda grid, number: train(grid, number, exchange, flips))
        results = group.finish()
        snapshot = status_of(group)
    assert len({seen[-1] for seen in results}) == 1, "they end equal"
    assert len({seen[FLIP_AT] for seen in results}) > 1, "the flip was real"
    assert snapshot["drifts"] >= 1 and snapshot["drifts"] <= max(expected, workers - 1)
    assert any(event["event"] == "drifted" for event in snapshot["events"])


def test_a_state_that_differs_is_announced_once_and_replaced_by_the_end_of_the_run(
    new_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The next generation comes after all steps."""

    def run(grid: gridtrain.Grid, number: int) -> str:
        torch.manual_seed(7)
        model = nn.Linear(2, 1)
        optimizer = sgd(grid, model, gridtrain.Dense(), lr=0.001, compare_every=2)
        for batch in grid.batches(DATA, batch_size=4, steps=20):
            if grid.step == 1 and number == 1:
                flip_one_bit(model, 20)
            train_batch(model, optimizer, batch)
        return digest(model, optimizer)

    with new_group(workers=3, deadlines=replace(BRISK, generation_gap_s=2.0)) as group:
        group.start_all(run)
        results = group.finish()
        snapshot = status_of(group)
    assert len({*results}) == 1
    assert caplog.text.count("this worker's model differs from the other members' models at step 2") == 1
    assert caplog.text.count("this worker's model differs") == snapshot["drifts"] == 1


def test_a_short_run_is_compared_too(new_group: Any) -> None:
    """A script that resets a layer differently on each worker, in step 6 of 20, ends with equal models."""

    def run(grid: gridtrain.Grid, number: int) -> str:
        model = linear()
        optimizer = sgd(grid, model, lr=0.001)
        for batch in grid.batches(DATA, batch_size=4, steps=20):
            if grid.step == 5:
                nn.init.constant_(model.weight, float(number))
            train_batch(model, optimizer, batch)
        return digest(model, optimizer)

    with new_group(workers=2) as group:
        group.start_all(run)
        results = group.finish()
        (found,) = [event for event in status_of(group)["events"] if event["event"] == "drifted"]
    assert found["step"] == 8 and len({*results}) == 1


@pytest.mark.parametrize(
    ("every", "compared"), [(0, []), (1, [1, 2, 3, 4]), (8, [1, 2, 4, 8, 16]), (10, [1, 2, 4, 8, 10, 20])]
)
def test_comparisons_are_denser_at_the_beginning(every: int, compared: list[int]) -> None:
    last = compared[-1] if compared else 20
    assert [step + 1 for step in range(last) if is_comparison_due(step, every)] == compared
