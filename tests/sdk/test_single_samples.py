"""Models with batch norm in runs whose steps leave a worker a single sample.

17 samples, batch_size=4 of 2 workers      worker a   4  4  1
                                           worker b   4  4  -  (its latest batch once more, with weight 0)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training_loop import digest, sgd

import gridtrain
from gridtrain.errors import ConfigError

INPUTS = torch.randn(40, 2, generator=torch.Generator().manual_seed(7))
DATA = [(x, x.sum()[None]) for x in INPUTS]
MODEL = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def by_batches(grid: gridtrain.Grid, data: Any, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
    return grid.batches(data, **options)


def by_loader(grid: gridtrain.Grid, data: Any, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(DataLoader(data, batch_sampler=grid.sampler(data, **options)))


@pytest.mark.parametrize(
    ("samples", "feed", "exchange", "options"),
    [
        (17, by_batches, gridtrain.Dense(), {"batch_size": 4}),
        (17, by_batches, gridtrain.GTopK(density=0.5), {"global_batch_size": 8}),
        (17, by_batches, gridtrain.LocalSteps(every=2), {"batch_size": 2}),
        (17, by_loader, gridtrain.Dense(), {"batch_size": 4}),
        (19, by_batches, gridtrain.Dense(), {"batch_size": 2, "accumulate": 2}),  # 3 as 2 + 1
    ],
    ids=["dense", "global_batch_size", "local steps", "DataLoader", "accumulate"],
)
def test_the_tail_of_a_pass_does_not_fail_in_batch_norm(
    together: Any, caplog: pytest.LogCaptureFixture, samples: int, feed: Any, exchange: Any, options: Any
) -> None:
    micro_batches = options.get("accumulate", 1)

    def train(grid: gridtrain.Grid, number: int) -> tuple[list[int], str]:
        model = copy.deepcopy(MODEL)
        optimizer = sgd(grid, model, exchange, lr=0.1)
        sizes = []
        for x, y in feed(grid, DATA[:samples], epochs=2, **options):
            sizes.append(len(x))
            (nn.functional.mse_loss(model(x), y) / micro_batches).backward()
            if len(sizes) % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert all(p.isfinite().all() for p in model.parameters())
        return sizes, digest(model, optimizer)

    (sizes, state), (other_sizes, other_state) = together(train)
    assert 1 in sizes + other_sizes and len(sizes) == len(other_sizes)
    assert state == other_state
    with_single = sum(1 in each for each in (sizes, other_sizes))
    text = "a batch of this worker has only one sample: the layer '1', BatchNorm1d, normalizes"
    assert caplog.text.count(text) == with_single


@pytest.mark.parametrize("sizes", [{"batch_size": 1}, {"global_batch_size": 2, "accumulate": 2}])
def test_batches_that_always_have_one_sample_are_refused_before_the_first_step(
    together: Any, sizes: dict[str, int]
) -> None:
    are_refused = threading.Barrier(2)

    def train(grid: gridtrain.Grid, number: int) -> int:
        model = copy.deepcopy(MODEL)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(
            ConfigError,
            match=r"^the layer '1', BatchNorm1d, cannot train on a single sample, .* -> use batch_size=2",
        ):
            for x, y in grid.batches(DATA, steps=4, **sizes):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        are_refused.wait(WITHIN_S)
        return grid.step

    assert together(train) == [0, 0]


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 2}])
def test_a_small_share_of_global_batch_size_is_not_refused(
    together: Any, caplog: pytest.LogCaptureFixture, options: dict[str, int]
) -> None:
    def train(grid: gridtrain.Grid, number: int) -> list[int]:
        model = copy.deepcopy(MODEL)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        sizes = []
        for x, y in grid.batches(DATA, steps=4, global_batch_size=3, **options):
            sizes.append(len(x))
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return sizes

    sizes = together(train)
    assert sizes[0][0] + sizes[1][0] == 3 and [len(each) for each in sizes] == [4, 4]
    assert caplog.text.count("a batch of this worker has only one sample") == sum(1 in each for each in sizes)
