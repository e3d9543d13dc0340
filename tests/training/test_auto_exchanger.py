"""A worker with `exchange="auto"`: the residual of one exchange continues with the next, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gridtrain.config import Auto, GTopK, LocalSteps, Overlap
from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.auto_exchanger import AutoExchanger
from gridtrain.training.exchangers import make_exchanger
from gridtrain.training.local_sgd import LocalSGDOptimizer
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.worker_residual import WorkerResidual

N, DENSITY = 64, 0.1
AUTO = Auto(density=DENSITY, values="fp32")
DENSE, GTOPK, TOPK = (exchange.describe() for exchange in AUTO.exchanges(N))
RANKS = 4


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(N))


def gradient(rank: int, step: int) -> torch.Tensor:
    """Integers: every sum is exact, and a quarter of each is, too."""
    return torch.from_numpy(np.random.RandomState(100 * step + rank).randint(-64, 65, N).astype(np.float32))


class Chosen:
    """A session whose plan names an exchange for each step."""

    def __init__(self, session: Any, schedule: list[str]) -> None:
        self._session, self._schedule = session, schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def begin(self) -> Any:
        plan = self._session.begin()
        return replace(plan, exchange=self._schedule[plan.step])


def train(
    network: Any,
    schedule: list[str],
    between: Any = lambda rank, step, wrapped: None,
    local: LocalSteps | None = None,
) -> list[Any]:
    calls = local.every if local is not None else 1

    def worker(session: Any) -> Any:
        model = Vector()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        chosen: Any = Chosen(session, schedule)
        if local is not None:
            wrapped: GridOptimizer = LocalSGDOptimizer(inner, model, local, chosen)
        else:
            wrapped = GridOptimizer(inner, model, AUTO, chosen)
        for step in range(len(schedule)):
            for call in range(calls):
                model.values.grad = gradient(session.rank, step * calls + call)
                wrapped.step()
            between(session.rank, step, wrapped)
        residual = wrapped.residual.state().get("residual", torch.zeros(N))
        return -model.values.detach(), residual, wrapped

    return list(network.train(worker))


def test_an_empty_contribution_is_that_of_the_exchange_in_the_plan() -> None:
    """It is made without a residual, and without an exchange that has not been chosen yet."""
    auto = AutoExchanger(AUTO.exchanges(N), (0, N), torch.device("cpu"))
    plan = StepPlan(1, 0, rank=0, world_size=RANKS, samples=0, total_samples=4)
    assert auto.make_empty_buffer(plan) is None
    for name, exchange in auto.choices.items():
        named = replace(plan, exchange=name)
        made, fixed = auto.make_empty_buffer(named), make_exchanger(exchange, (0, N), torch.device("cpu"))
        assert made is not None
        assert type(made) is type(fixed.make_empty_buffer(named))
    WorkerResidual(auto, N, lambda name, by: None).add_truncated(())
    assert auto.feedback is None and auto.current_exchange is None


@pytest.mark.parametrize(
    "schedule",
    [
        [DENSE, DENSE, GTOPK, GTOPK, DENSE, DENSE],
        [GTOPK, TOPK, GTOPK, DENSE, TOPK, DENSE],
        [TOPK, TOPK, DENSE, GTOPK, GTOPK],
    ],
)
@pytest.mark.parametrize("aborts", [(), ((2, 0), (3, 0), (4, 0), (4, 1))])
def test_no_gradient_is_lost_when_the_exchange_changes(
    network: Any, schedule: list[str], aborts: Any
) -> None:
    results = train(network(RANKS, aborts=aborts), schedule)
    updates = [update for update, _, _ in results]
    assert all(torch.equal(update, updates[0]) for update in updates)
    brought = sum(gradient(rank, step) / RANKS for rank in range(RANKS) for step in range(len(schedule)))
    left = sum(residual for _, residual, _ in results)
    assert torch.equal(updates[0] + left, brought)
    if schedule[-1] == DENSE:
        assert all(not wrapped.residual.state() for _, _, wrapped in results), "no residual is left"


@pytest.mark.parametrize("aborts", [(), ((1, 0), (2, 0), (2, 1))])
def test_no_change_of_local_steps_is_lost_when_the_exchange_changes(network: Any, aborts: Any) -> None:
    local, schedule = LocalSteps(3, AUTO), [DENSE, GTOPK, TOPK, DENSE, GTOPK]
    results = train(network(RANKS, aborts=aborts), schedule, local=local)
    updates = [update for update, _, _ in results]
    assert all(torch.equal(update, updates[0]) for update in updates)
    brought = sum(gradient(rank, step) / RANKS for rank in range(RANKS) for step in range(3 * len(schedule)))
    left = sum(residual for _, residual, _ in results)
    assert left.any() and torch.equal(updates[0] + left, brought)
    assert results[0][2].current_exchange == LocalSteps(3, GTopK(DENSITY, values="fp32"))


def test_a_dense_step_sends_received_residuals(network: Any) -> None:
    """A residual that is transferred during dense steps is in the next one."""

    def absorb(rank: int, step: int, wrapped: GridOptimizer) -> None:
        if (rank, step) == (1, 1):
            assert wrapped.residual.add(
                SparseVector(np.array([3, 7]), np.array([5.0, -2.0], np.float32)), RANKS
            )

    results = train(network(RANKS), [DENSE] * 3, absorb)
    brought = sum(gradient(rank, step) / RANKS for rank in range(RANKS) for step in range(3))
    brought[3] += 5.0
    brought[7] -= 2.0
    assert all(torch.equal(update, brought) for update, _, _ in results)


def test_a_checkpoints_residual_is_sent_by_any_chosen_exchange(network: Any) -> None:
    saved = {"residual": torch.arange(N, dtype=torch.float32)}

    def worker(session: Any) -> Any:
        model = Vector()
        wrapped = GridOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, AUTO, Chosen(session, [DENSE])
        )
        assert wrapped.residual.size == N
        wrapped.residual.load(saved)
        model.values.grad = torch.zeros(N)
        wrapped.step()
        return -model.values.detach()

    (update,) = network(1).train(worker)
    assert torch.equal(update, saved["residual"])


def test_a_worker_without_a_residual_loses_nothing_when_it_leaves(network: Any) -> None:
    """None would mean a lost residual, which a transfer would report."""
    for _, _, wrapped in train(network(RANKS), [GTOPK, DENSE]):
        taken_N = wrapped.residual.take(lambda: None)
        assert taken_N is not None and taken_N.shape == (wrapped.residual.size,) and not taken_N.any()


def test_the_description_names_the_options(network: Any) -> None:
    (_, _, wrapped), *_ = train(network(RANKS), [DENSE, GTOPK])
    assert wrapped.current_exchange == GTopK(DENSITY, values="fp32")
    assert wrapped.describe_exchange() == "auto(density=0.1, values=fp32)"


def test_an_exchange_that_is_no_choice_is_refused(network: Any) -> None:
    with pytest.raises(LocalProtocolError, match="not one of the choices"):
        train(network(1), ["GTopK(density=0.5)"])


def test_an_invalid_description_is_refused() -> None:
    from gridtrain.config import exchange_of

    with pytest.raises(ConfigError, match='exchange="auto"'):
        exchange_of("automatic")
    assert exchange_of("auto") == Auto()
    assert exchange_of(None) == GTopK()


def test_the_largest_density_that_learns() -> None:
    assert [Auto.density_of(n) for n in (1000, 120_576, 1_000_000, 25_600_000, 10**9)] == [
        0.05,
        0.05,
        0.011,
        0.001,
        0.001,
    ]


@pytest.mark.parametrize(
    "auto",
    [
        Auto(),
        Auto(density=0.02, values="int8"),
        Auto(computing=0.75),
        Auto(density=0.02, computing=0.5),
        Auto(sparse=False),
    ],
)
def test_a_description_is_parsed_back(auto: Auto) -> None:
    assert Auto.parse(auto.describe()) == auto
    assert Auto.parse("GTopK(density=0.01)") is None


def test_densities_of_changes_are_those_of_local_steps() -> None:
    large = 25_600_000
    assert {each.density for each in Auto().exchanges(large)[1:]} == {0.001}
    assert [each.density for each in Auto().exchanges(large, local_steps=True)[1::2]] == [0.1, 0.03, 0.01]
    assert {each.density for each in Auto(density=0.5).exchanges(large, local_steps=True)[1:]} == {0.5}
    assert len(Auto(sparse=False).exchanges(large, local_steps=True)) == 1


@pytest.mark.parametrize("computing", [0.0, 1.0, -1.0, float("nan")])
def test_an_invalid_share_of_computing_is_refused(computing: float) -> None:
    with pytest.raises(ConfigError, match="computing is"):
        Auto(computing=computing)


def test_overlap_requires_a_given_exchange() -> None:
    from gridtrain.sdk.grid import _fit_auto

    inner = torch.optim.SGD(Vector().parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="overlap"):
        _fit_auto(AUTO, inner, Overlap())
    assert _fit_auto(AUTO, inner, None) == AUTO
    assert not _fit_auto(AUTO, torch.optim.AdamW(Vector().parameters()), None).sparse
