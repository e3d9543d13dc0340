"""`exchange="auto"` in whole groups: one choice for all workers, with its reason; newcomers use it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from group_status import status_of
from training_loop import linear, sgd, train_steps

import gridtrain
from gridtrain.core.planning import topology_choice


@pytest.mark.parametrize("auto", ["auto", gridtrain.Auto(density=0.3)])
def test_all_train_with_the_chosen_exchange(new_group: Any, auto: Any) -> None:
    seen: dict[str, Any] = {}

    def train(grid: gridtrain.Grid, number: int) -> Any:
        model = linear()
        optimizer = sgd(grid, model, auto)
        for step in train_steps(grid, model, optimizer, steps=6):
            if step == 3 and number == 0:
                seen.update(status_of(group))
        return optimizer.current_exchange, model.weight.detach()

    with new_group(workers=3) as group:
        group.start_all(train)
        results = group.finish()
    (exchange, weight), *others = results
    # 12 bytes of gradient: a ring sends more messages, and their size does not matter.
    assert exchange is not None
    assert all(other == exchange and torch.equal(found, weight) for other, found in others)
    assert seen["facts"]["exchange"] == exchange.describe()
    assert seen["exchange_reason"].startswith(exchange.describe())


def test_a_newcomer_uses_the_exchange_of_the_others(new_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, the rates that are measured in memory differ, as those of unequal links.
    monkeypatch.setattr(topology_choice, "MIN_LINK_SHARE", 0.0)
    come = threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> Any:
        model, taken, exchange = linear(), 0, None
        optimizer = sgd(grid, model, gridtrain.Auto(sparse=False))
        for step in train_steps(grid, model, optimizer, steps=20):
            taken, exchange = taken + 1, optimizer.current_exchange  # before the others leave at the end
            if number == 0 and step == 5:
                come.set()
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 3, WITHIN_S)
        return exchange, model.weight.detach(), taken

    with new_group(workers=2) as group:
        group.start_all(train)
        assert come.wait(WITHIN_S)
        group.start(train)
        results = group.finish()
    (exchange, weight, _), *others = results
    assert exchange == gridtrain.Dense(topology="direct"), "the topology for a few bytes and three workers"
    assert all(other == exchange and torch.equal(found, weight) for other, found, _ in others)
    assert results[2][2] == 15


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_local_steps_use_the_chosen_exchange_for_their_changes(
    new_group: Any, workers: int, overlap: bool
) -> None:
    """With AdamW and a later worker, the choice is the same on all, and all count in steps of the run.

    A single worker's choice may be undecided again for two.
    """
    every, warm, entered = 4, threading.Event(), threading.Event()
    auto, stop_at, seen = gridtrain.Auto(density=0.3), [10**9], dict[str, Any]()
    local = gridtrain.LocalSteps(every, auto, overlap=overlap)

    def train(grid: gridtrain.Grid, number: int) -> Any:
        model, calls, weights = linear(), 0, dict[int, torch.Tensor]()
        optimizer = grid.optimizer(torch.optim.AdamW(model.parameters()), model, exchange=local)
        for step in train_steps(grid, model, optimizer, steps=100_000):
            calls += 1
            if optimizer.local_calls:
                continue
            weights[step] = model.weight.detach().clone()
            if step > 3:
                warm.set()
            if number == workers and not entered.is_set():
                stop_at[0] = step + 5
                seen.update(status_of(group))
                entered.set()
            if step >= stop_at[0]:
                break
        return optimizer.current_exchange, weights, calls

    with new_group(workers=workers) as group:
        group.start_all(train)
        assert warm.wait(WITHIN_S)
        group.start(train)
        assert entered.wait(WITHIN_S)
        results = group.finish()
    for result in results:
        assert result[2] == every * len(result[1])
    (exchange, weights, _), *others = results
    assert isinstance(exchange, gridtrain.LocalSteps) and exchange.every == every
    assert exchange.exchange in (*auto.exchanges(3), gridtrain.Dense("direct"))
    for other, found, _ in others:
        common = weights.keys() & found.keys()
        assert type(other.exchange) is type(exchange.exchange) and len(common) >= 4
        assert all(torch.equal(found[step], weights[step]) for step in common)
    shown = seen["facts"]["exchange"]
    assert shown.startswith("LocalSteps(every=4, exchange=") and "auto" not in shown
    assert seen["exchange_reason"]


def test_with_adam_only_dense_is_chosen(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> Any:
        model = linear()
        optimizer = grid.optimizer(torch.optim.AdamW(model.parameters()), model, exchange="auto")
        list(train_steps(grid, model, optimizer, steps=2))
        return optimizer.current_exchange, optimizer.describe_exchange()

    assert together(train) == [(gridtrain.Dense(), "auto(dense alone)")] * 2
