"""Batches with different numbers of tokens: the group's step is that of the mean over all tokens.

worker-0   3 + 1 tokens    mean loss a    weight 4 of 12 ---+
worker-1   5 + 0 tokens    mean loss b    weight 5 of 12 ---+--> the step of one process with 12 tokens
worker-2   2 + 1 tokens    mean loss c    weight 3 of 12 ---+
"""

from __future__ import annotations

import copy
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.config import Deadlines
from gridtrain.core.group.member_events import DeliverMean
from gridtrain.errors import ConfigError
from gridtrain.runtime.group_means import GroupMeans
from gridtrain.sdk.local_group import local

LENGTH, STEPS, RATE = 7, 12, 0.2
Batch = tuple[Tensor, Tensor, Tensor]


def _data() -> list[Batch]:
    """Sequences, their targets, and which tokens count: 0 to 7 of each."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for number in range(400):
        x_TD, y_T = torch.randn(LENGTH, 4, generator=draw), torch.randn(LENGTH, generator=draw)
        found.append((x_TD, y_T, torch.arange(LENGTH) < number * number % (LENGTH + 1)))
    return found


DATA = _data()


START = nn.Linear(4, 1)
START.load_state_dict({"weight": DATA[0][0][:1], "bias": DATA[0][1][:1]})


def _model() -> nn.Linear:
    return copy.deepcopy(START)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens that count, 0 if there are none."""
    x_BTD, y_BT, counts_BT = batch
    return ((model(x_BTD)[..., 0] - y_BT).square() * counts_BT).sum() / max(1, int(counts_BT.sum()))


class Group:
    """What each worker has contributed to the steps, and what it has at the end.

    contributions: by step and worker, its batches, and its mean gradient with its weight.
    """

    def __init__(self, *, accumulate: int = 1, dies_at: int = STEPS, **options: Any) -> None:
        self.options, self.accumulate, self.dies_at = options, accumulate, dies_at
        self.batches: dict[int, dict[str, list[Batch]]] = {}
        self.gradients: dict[int, dict[str, tuple[Tensor, int]]] = {}
        self.residuals: dict[str, Tensor] = {}
        self.models: dict[str, nn.Linear] = {}
        self.lock = threading.Lock()

    def train(self, grid: gridtrain.Grid) -> None:
        name, model = grid._config.name, _model()
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer = grid.optimizer(inner, model, weigh_by="tokens", **self.options)
        pieces: list[Batch] = []
        size = 3 if name == "worker-1" else 2
        for batch in grid.batches(DATA, batch_size=size, steps=STEPS, accumulate=self.accumulate):
            pieces.append(batch)
            grid.weigh(batch[2].sum())
            (_loss(model, batch) / self.accumulate).backward()
            if self.dies_at == STEPS and grid.step % 4 == 1:
                assert grid.mean(grid.rank) == 1.0, "an unrelated mean in between"
            if len(pieces) % self.accumulate:
                continue
            if optimizer.local_calls + 1 < optimizer.calls_per_turn:
                optimizer.step()
                optimizer.zero_grad()
                continue
            step, spans = grid.step, grid._session.turn_spans
            count = sum(int(each[2].sum()) for each in pieces) if spans else 0
            gradient_N = torch.cat([p.grad.flatten() for p in model.parameters()])
            if name == "worker-2" and step == self.dies_at:
                return
            optimizer.step()
            optimizer.zero_grad()
            with self.lock:
                self.batches.setdefault(step, {})[name] = pieces if spans else []
                self.gradients.setdefault(step, {})[name] = gradient_N, count
            pieces = []
        self.models[name] = model
        self.residuals[name] = optimizer.residual.state().get("residual", torch.zeros(5))

    def check_equals_one_process(self) -> None:
        """The models are those of one process with the same batches."""
        model = _model()
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(STEPS):
            pieces = [batch for each in self.batches[step].values() for batch in each]
            inner.zero_grad()
            _loss(model, tuple(map(torch.cat, zip(*pieces, strict=True)))).backward()
            inner.step()
        for each in self.models.values():
            torch.testing.assert_close(each.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "exchange", [gridtrain.Dense(), gridtrain.LocalSteps(every=1, exchange=gridtrain.Dense())]
)
def test_a_step_is_that_of_one_process_with_all_tokens(exchange: Any, accumulate: int) -> None:
    """A local step of each worker alone, weighted by its tokens, is a step with all of them."""
    group = Group(exchange=exchange, accumulate=accumulate)
    local(group.train, workers=3)
    counts = {count for each in group.gradients.values() for _, count in each.values()}
    assert len(counts) > 6 and (accumulate > 1 or 0 in counts), "batches have different numbers of tokens"
    group.check_equals_one_process()


@pytest.mark.parametrize("counts", [(500, 100), (5, 500), (500, 0), (0, 500), (0, 0)])
@pytest.mark.parametrize("clip", [1.0, 1e9])
def test_a_loop_clips_the_weighted_gradient(counts: tuple[int, int], clip: float) -> None:
    """The local step uses the clipped gradient; without tokens nothing counts, not even NaN."""
    model = _model()
    gradients = []
    for (x_TD, y_T, _), count in zip(DATA, counts, strict=False):
        loss = (model(x_TD)[..., 0] - y_T).square().mean()
        gradients.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])]) * count
        )
    mean_N = sum(gradients) / max(1, sum(counts))
    expected_N = mean_N * min(1.0, clip / max(float(mean_N.norm()), 1e-9))

    def train(grid: gridtrain.Grid) -> None:
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = gridtrain.LocalSteps(every=1, exchange=gridtrain.Dense())
        optimizer = grid.optimizer(inner, model, exchange=exchange, weigh_by="tokens")
        for number, _ in enumerate(grid.batches(DATA, batch_size=2, steps=1, accumulate=2)):
            x_TD, y_T, _ = DATA[number]
            grid.weigh(counts[number])
            squares_T = (model(x_TD)[..., 0] - y_T).square()
            (squares_T.mean() / 2 * (1.0 if counts[number] else math.nan)).backward()
            if number == 1:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()

    local(train, workers=1)
    change_N = torch.cat(
        [
            (old - new).detach().flatten()
            for old, new in zip(START.parameters(), model.parameters(), strict=True)
        ]
    )
    torch.testing.assert_close(change_N, expected_N, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("counts", [(500, 100), (500, 0)])
def test_a_gradient_within_a_loss_is_not_weighted(counts: tuple[int, int]) -> None:
    """The loss is that of the model after a step of its own, as in MAML."""

    def adapted_loss(model: nn.Linear, batch: Batch) -> Tensor:
        loss = _loss(model, batch)
        weight, bias = model.weight, model.bias
        weight_gradient, bias_gradient = torch.autograd.grad(loss, [weight, bias], create_graph=True)
        output = nn.functional.linear(batch[0], weight - weight_gradient, bias - bias_gradient)
        return (output[..., 0] - batch[1]).square().mean()

    expected = _model()
    for batch, count in zip(DATA[1:], counts, strict=False):
        (adapted_loss(expected, batch) * count / sum(counts)).backward()
    model = _model()

    def train(grid: gridtrain.Grid) -> None:
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense(), weigh_by="tokens")
        for number, _ in enumerate(grid.batches(DATA, batch_size=2, steps=1, accumulate=2)):
            grid.weigh(counts[number])
            (adapted_loss(model, DATA[1 + number]) / 2).backward()
            if number == 1:
                optimizer.step()

    local(train, workers=1)
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_local_steps_are_weighted_by_the_tokens_of_all_of_them() -> None:
    group = Group(exchange=gridtrain.LocalSteps(every=3, exchange=gridtrain.Dense()))
    local(group.train, workers=3)
    model = _model()
    for step in range(STEPS):
        start = copy.deepcopy(model.state_dict())
        total, change = 0, {name: torch.zeros_like(value) for name, value in start.items()}
        for pieces in group.batches[step].values():
            model.load_state_dict(start)
            inner = torch.optim.SGD(model.parameters(), lr=RATE)
            for batch in pieces:
                inner.zero_grad()
                _loss(model, batch).backward()
                inner.step()
            count = sum(int(batch[2].sum()) for batch in pieces)
            total += count
            change = {n: change[n] + count * (value - start[n]) for n, value in model.state_dict().items()}
        model.load_state_dict({name: start[name] + value / total for name, value in change.items()})
    for each in group.models.values():
        torch.testing.assert_close(each.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mean", "total"), [(4.0, 12), (float("nan"), None), (1e308, None), (1.5, None), (None, None)]
)
def test_an_impossible_total_is_not_used(mean: float | None, total: int | None) -> None:
    answer = DeliverMean(7, 0, mean)
    loop, config = SimpleNamespace(await_average=lambda *_: answer), SimpleNamespace(deadlines=Deadlines())
    connection: Any = SimpleNamespace(loop=loop, config=config)
    means = GroupMeans(connection, lambda step: None)
    means._announced = (1, 7, 5)
    plan: Any = SimpleNamespace(generation=1, step=7, world_size=3)
    assert means.total_weight(plan, 5) == total


def test_weights_are_computed_again_if_a_worker_leaves_in_a_step() -> None:
    """They had its count, but its gradient is in no step."""
    group = Group(exchange=gridtrain.Dense(), dies_at=5)
    local(group.train, workers=3)
    assert [len(group.batches[step]) for step in (4, 5, 6)] == [3, 2, 2]
    group.check_equals_one_process()


@pytest.mark.parametrize(
    "exchange", [gridtrain.GTopK(density=0.4, values="fp32"), gridtrain.TopK(density=0.2)]
)
def test_a_sparse_exchange_loses_nothing_of_the_weighted_gradients(exchange: Any) -> None:
    """Applied updates and residuals add up to the sum of all contributions."""
    group = Group(exchange=exchange)
    local(group.train, workers=3)
    contributed_N = torch.zeros(5)
    for each in group.gradients.values():
        total = sum(count for _, count in each.values())
        for gradient_N, count in each.values():
            contributed_N += gradient_N * (count / total)
    before_N, after_N = (
        torch.cat([p.detach().flatten() for p in m.parameters()])
        for m in (_model(), group.models["worker-0"])
    )
    unsent_N = sum(group.residuals.values())
    assert unsent_N.abs().sum() > 0.01
    torch.testing.assert_close((before_N - after_N) / RATE + unsent_N, contributed_N, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exchange": gridtrain.LocalSteps(every=4, overlap=True)}, r"LocalSteps\(overlap=\.\.\.\)"),
        ({"overlap": gridtrain.Overlap()}, "overlap="),
        ({"wait": "auto"}, 'wait="auto"'),
        ({"weigh_by": "words"}, "must be 'samples' or 'tokens'"),
    ],
)
def test_options_that_do_not_allow_weights_by_tokens_are_refused(options: dict[str, Any], says: str) -> None:
    def train(grid: gridtrain.Grid) -> None:
        inner = torch.optim.SGD((model := _model()).parameters(), lr=RATE)
        with pytest.raises(ConfigError, match=says):
            grid.optimizer(inner, model, **({"weigh_by": "tokens"} | options))

    local(train, workers=1)


@pytest.mark.parametrize(
    ("weigh_by", "count", "says"),
    [
        ("tokens", None, "a batch without a weight -> .*, as GridTrainer and GridSFTTrainer do"),
        ("tokens", -1, "is -1"),
        ("tokens", 0.5, r"is 0\.5; it must be a number of tokens"),
        ("samples", 1, "weighted by samples"),
    ],
)
def test_a_missing_or_invalid_count_is_reported(weigh_by: str, count: Any, says: str) -> None:
    def train(grid: gridtrain.Grid) -> None:
        inner = torch.optim.SGD((model := _model()).parameters(), lr=RATE)
        optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense(), weigh_by=weigh_by)
        for batch in grid.batches(DATA, batch_size=2, steps=2):
            if count is not None:
                grid.weigh(count)
            _loss(model, batch).backward()
            optimizer.step()

    with pytest.raises(ConfigError, match=says):
        local(train, workers=1)
