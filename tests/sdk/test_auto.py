"""`exchange="auto"` in whole groups: one choice for all workers, with its reason; newcomers use it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from brisk import WITHIN_S
from torch import nn

import gridtrain
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.in_memory import MemoryTransport
from gridtrain.runtime.client.coordinator_client import CoordinatorClient, allow_only
from gridtrain.sdk.local_group import LocalGroup

DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(-6, 6)]


def net() -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    return model


def steps(grid: gridtrain.Grid, optimizer: gridtrain.GridOptimizer, model: nn.Module, **until: Any) -> Any:
    for inputs, targets in grid.batches(DATA, batch_size=2, **until):
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield grid.step


def status(group: LocalGroup) -> dict[str, Any]:
    identity = Identity.generate()
    transport = MemoryTransport(identity.public, group.hub, gate=allow_only(group.key))
    with CoordinatorClient(group.ADDRESS, group.key, identity, transport=transport) as client:
        return client.status(5.0)


@pytest.mark.parametrize("auto", ["auto", gridtrain.Auto(density=0.3)])
def test_all_train_with_the_chosen_exchange(new_group: Any, auto: Any) -> None:
    seen: dict[str, Any] = {}

    def train(grid: gridtrain.Grid, number: int) -> Any:
        model = net()
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, exchange=auto)
        for step in steps(grid, optimizer, model, steps=6):
            if step == 3 and number == 0:
                seen.update(status(group))
        return optimizer.current_exchange, model.weight.detach()

    with new_group(workers=3) as group:
        results = [group.result(number) for number in [group.start(train) for _ in range(3)]]
    (exchange, weight), *others = results
    # 12 bytes of gradient: a ring sends more messages, and their size does not matter.
    assert exchange is not None
    assert all(other == exchange and torch.equal(found, weight) for other, found in others)
    assert seen["facts"]["exchange"] == exchange.describe()
    assert seen["exchange_reason"].startswith(exchange.describe())


def test_a_newcomer_uses_the_exchange_of_the_others(new_group: Any) -> None:
    come = threading.Event()

    def train(grid: gridtrain.Grid, number: int) -> Any:
        model, taken = net(), 0
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Auto(sparse=False))
        for step in steps(grid, optimizer, model, steps=20):
            taken += 1
            if number == 0 and step == 5:
                come.set()
                assert grid._session.connection.wait(lambda snapshot: snapshot.world_size == 3, WITHIN_S)
        return optimizer.current_exchange, model.weight.detach(), taken

    with new_group(workers=2) as group:
        numbers = [group.start(train) for _ in range(2)]
        assert come.wait(WITHIN_S)
        numbers.append(group.start(train))
        results = [group.result(number) for number in numbers]
    for result in results:
        assert not isinstance(result, BaseException), result
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
        model, calls, weights = net(), 0, dict[int, torch.Tensor]()
        optimizer = grid.optimizer(torch.optim.AdamW(model.parameters()), model, exchange=local)
        for step in steps(grid, optimizer, model, steps=100_000):
            calls += 1
            if optimizer.local_calls:
                continue
            weights[step] = model.weight.detach().clone()
            if step > 3:
                warm.set()
            if number == workers and not entered.is_set():
                stop_at[0] = step + 5
                seen.update(status(group))
                entered.set()
            if step >= stop_at[0]:
                break
        return optimizer.current_exchange, weights, calls

    with new_group(workers=workers) as group:
        numbers = [group.start(train) for _ in range(workers)]
        assert warm.wait(WITHIN_S)
        numbers.append(group.start(train))
        assert entered.wait(WITHIN_S)
        results = [group.result(number) for number in numbers]
    for result in results:
        assert not isinstance(result, BaseException), result
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
        model = net()
        optimizer = grid.optimizer(torch.optim.AdamW(model.parameters()), model, exchange="auto")
        for _ in steps(grid, optimizer, model, steps=2):
            pass
        return optimizer.current_exchange, optimizer.describe_exchange()

    assert together(train) == [(gridtrain.Dense(), "auto(dense alone)")] * 2
