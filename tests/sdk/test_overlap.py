"""Exchange during backward: the same bits as without overlap, through aborts, joins and crashes."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_loop import digest, sgd

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.runtime.buffers.buckets import bucket_bounds
from gridtrain.runtime.group_session import GroupSession

EAGER = gridtrain.Overlap(buckets=3, least=1, adaptive=False)
EXCHANGES = [
    gridtrain.Dense(),
    gridtrain.TopK(density=0.2),
    gridtrain.GTopK(density=0.2),
    gridtrain.GTopK(density=0.1, momentum=0.9),
    gridtrain.Dense(values="int8"),
]
DATA = [
    (torch.randn(6, generator=torch.Generator().manual_seed(i)), torch.tensor([i % 3])) for i in range(48)
]


torch.manual_seed(7)
NET = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def net() -> nn.Sequential:
    return copy.deepcopy(NET)


def backward(model: nn.Module, batch: Any) -> None:
    inputs, targets = batch
    nn.functional.cross_entropy(model(inputs), targets.squeeze(1)).backward()


def train_batch(model: nn.Module, optimizer: gridtrain.GridOptimizer, batch: Any) -> None:
    backward(model, batch)
    optimizer.step()
    optimizer.zero_grad()


def train(grid: gridtrain.Grid, exchange: Any, *, overlap: Any = EAGER, **batches: Any) -> tuple[str, Any]:
    model = net()
    optimizer = sgd(grid, model, exchange, lr=0.1, overlap=overlap)
    for batch in grid.batches(DATA, **{"batch_size": 2, "steps": 8, **batches}):
        train_batch(model, optimizer, batch)
    return digest(model, optimizer), optimizer.residual.state()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step, bucket) of all buckets that were sent during backward, on all workers."""
    seen: list[tuple[int, int]] = []
    true = GroupSession.begin_bucket

    def send_early(self: Any, plan: Any, bucket: int, *rest: Any) -> None:
        seen.append((plan.step, bucket))
        true(self, plan, bucket, *rest)

    monkeypatch.setattr(GroupSession, "begin_bucket", send_early)
    return seen


def late_on(monkeypatch: pytest.MonkeyPatch, numbers: set[int]) -> None:
    """Let these workers send nothing before `step()`."""
    true = GroupSession.predict_plan
    names = {f"worker-{number}" for number in numbers}
    monkeypatch.setattr(
        GroupSession,
        "predict_plan",
        lambda self: None if threading.current_thread().name in names else true(self),
    )


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_workers_that_send_early_and_late_exchange_the_same(
    together: Any, sent: list[Any], monkeypatch: pytest.MonkeyPatch, exchange: Any, workers: int
) -> None:
    late_on(monkeypatch, {1, 2})
    results = together(lambda grid, number: train(grid, exchange), workers)
    assert set(sent) == {(step, bucket) for step in range(8) for bucket in range(3)}
    assert len({digest for digest, _ in results}) == 1


@pytest.mark.parametrize("exchange", EXCHANGES[::2], ids=str)
def test_early_and_late_sending_give_the_same_bits(
    together: Any, monkeypatch: pytest.MonkeyPatch, exchange: Any
) -> None:
    """With one worker: in a group the ranks, and with them the order of sums, change from run to run."""
    (early,) = together(lambda grid, number: train(grid, exchange), 1)
    late_on(monkeypatch, {0})
    (late,) = together(lambda grid, number: train(grid, exchange), 1)
    assert early[0] == late[0]
    assert [v.tolist() for v in early[1].values()] == [v.tolist() for v in late[1].values()]


def test_one_bucket_is_the_exchange_without_overlap(together: Any) -> None:
    whole = gridtrain.Overlap(buckets=1, adaptive=False)
    ((with_it, _),) = together(lambda grid, n: train(grid, EXCHANGES[2], overlap=whole), 1)
    ((without, _),) = together(lambda grid, n: train(grid, EXCHANGES[2], overlap=None), 1)
    assert with_it == without


def test_last_layers_travel_first(together: Any, sent: list[tuple[int, int]]) -> None:
    together(lambda grid, number: train(grid, gridtrain.Dense(), steps=2), 1)
    assert sent == [(0, 2), (0, 1), (0, 0), (1, 2), (1, 1), (1, 0)]


@pytest.mark.parametrize("exchange", EXCHANGES[:3:2], ids=str)
def test_buckets_are_sent_with_the_last_micro_batch(together: Any, sent: list[Any], exchange: Any) -> None:
    def loop(grid: gridtrain.Grid, number: int) -> str:
        model = net()
        optimizer = sgd(grid, model, exchange, lr=0.1, overlap=EAGER)
        for count, batch in enumerate(grid.batches(DATA, batch_size=2, steps=4, accumulate=3), 1):
            backward(model, batch)
            if count % 3:
                assert len(sent) <= 3 * 2 * (count // 3 + 1)
            else:
                optimizer.step()
                optimizer.zero_grad()
        return digest(model, optimizer)

    assert len(set(together(loop, 2))) == 1
    assert len(sent) == 2 * 4 * 3


def test_unequal_micro_batches_count_as_without_overlap(together: Any, sent: list[Any]) -> None:
    """23 samples: the last step has 5, in micro-batches of 2, 2 and 1."""

    def loop(grid: gridtrain.Grid, overlap: Any) -> str:
        model = net()
        optimizer = sgd(grid, model, lr=0.1, overlap=overlap)
        for count, batch in enumerate(grid.batches(DATA[:23], batch_size=2, epochs=1, accumulate=3), 1):
            backward(model, batch)
            if count % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return digest(model, optimizer)

    without, with_it = (together(lambda grid, number, o=o: loop(grid, o), 1) for o in (None, EAGER))
    assert with_it == without and len(sent) == 4 * 3


@pytest.mark.parametrize("exchange", EXCHANGES[:3:2], ids=str)
def test_step_sends_a_parameter_without_gradient(together: Any, sent: list[Any], exchange: Any) -> None:
    def loop(grid: gridtrain.Grid, number: int) -> str:
        model = net()
        unused = nn.Linear(2, 2)
        whole = nn.ModuleList([model, unused])
        optimizer = sgd(grid, whole, exchange, lr=0.1, overlap=EAGER)
        for batch in grid.batches(DATA, batch_size=2, steps=4):
            train_batch(model, optimizer, batch)
        return digest(whole, optimizer)

    assert len(set(together(loop, 2))) == 1
    assert {bucket for _, bucket in sent} == {0, 1}  # the last bucket has the parameter without gradient


@pytest.mark.parametrize("exchange", EXCHANGES[:3:2], ids=str)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(together: Any, exchange: Any) -> None:
    def loop(grid: gridtrain.Grid, number: int) -> Any:
        model = net()
        optimizer = sgd(grid, model, exchange, lr=0.1, overlap=EAGER)
        spoil = False
        model[2].weight.register_hook(lambda g: g * float("nan") if spoil else g)
        skipped = []
        for step, batch in enumerate(grid.batches(DATA, batch_size=2, steps=5)):
            spoil = step == 2 and number == 1
            train_batch(model, optimizer, batch)
            skipped.append(optimizer.last_skipped)
        return digest(model, optimizer), skipped

    results = together(loop, 3)
    assert len({digest for digest, _ in results}) == 1
    assert all(skipped == [False, False, True, False, False] for _, skipped in results)


@pytest.mark.parametrize("exchange", EXCHANGES[:3:2], ids=str)
def test_an_aborted_round_is_tried_again_with_the_same_gradient(
    together: Any, monkeypatch: pytest.MonkeyPatch, exchange: Any
) -> None:
    """In every second step one worker's I/O loop fails the round, in the middle of backward."""
    from gridtrain.core.group import member_events as ev

    plain = together(lambda grid, number: train(grid, exchange, seed=3), 2)
    true = GroupSession.begin_bucket
    broken: set[int] = set()
    lock = threading.Lock()

    def send_early(self: Any, plan: Any, bucket: int, *rest: Any) -> None:
        true(self, plan, bucket, *rest)
        with lock:
            breaks = plan.step % 2 == 1 and plan.step not in broken and bucket == 1
            broken.update({plan.step} if breaks else ())
        if breaks:
            self.connection.submit(ev.RoundFailed("injected by the test"))

    monkeypatch.setattr(GroupSession, "begin_bucket", send_early)
    torn = together(lambda grid, number: train(grid, exchange, seed=3), 2)
    assert broken == {1, 3, 5, 7}
    assert {digest for digest, _ in torn} == {digest for digest, _ in plain}


@pytest.mark.parametrize("exchange", EXCHANGES[:3:2], ids=str)
def test_the_others_go_on_if_a_worker_leaves_during_backward(new_group: Any, exchange: Any) -> None:
    def stays(grid: gridtrain.Grid, number: int) -> str:
        return train(grid, exchange, epochs=2, steps=None)[0]

    def leaves(grid: gridtrain.Grid, number: int) -> None:
        model = net()
        optimizer = sgd(grid, model, exchange, lr=0.1, overlap=EAGER)
        calls = 0

        def stop(_: Any) -> None:  # after bucket 2 and 1 have gone out, before bucket 0
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt

        model[0].weight.register_hook(stop)
        for batch in grid.batches(DATA, batch_size=2, epochs=2):
            train_batch(model, optimizer, batch)

    with new_group(workers=3) as group:
        for worker in (stays, stays, leaves):
            group.start(worker)
        first, second, left = group.ends()
    assert isinstance(left, KeyboardInterrupt)
    assert isinstance(first, str), first
    assert first == second


# -- refused uses --------------------------------------------------------------------------------------


def failing(together: Any, body: Any) -> None:
    def loop(grid: gridtrain.Grid, number: int) -> None:
        model = net()
        optimizer = sgd(grid, model, lr=0.1, overlap=EAGER)
        for batch in grid.batches(DATA, batch_size=2, steps=3):
            optimizer.zero_grad()
            backward(model, batch)
            body(model, optimizer, batch)
            optimizer.step()

    together(loop, 1)


def test_changing_a_sent_gradient_is_refused(together: Any) -> None:
    with pytest.raises(ConfigError, match=r"gradients were changed .* clip_norm="):
        failing(together, lambda m, *_: nn.utils.clip_grad_norm_(m.parameters(), 1e-3))


def test_changing_a_sent_gradient_without_autograd_is_refused(together: Any) -> None:
    """As in old code, which autograd's version counters do not see."""
    with pytest.raises(ConfigError, match="gradients were changed"):
        failing(together, lambda m, *_: [p.grad.data.clamp_(-1e-6, 1e-6) for p in m.parameters()])


def test_two_unannounced_backward_passes_are_refused(together: Any) -> None:
    with pytest.raises(ConfigError, match="more than 1 backward pass ran before one step"):
        failing(together, lambda m, _, batch: backward(m, batch))


def test_a_second_call_of_a_reentrant_checkpoint_is_refused(together: Any) -> None:
    def train(grid: gridtrain.Grid, number: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        overlap = gridtrain.Overlap(adaptive=False, least=1)
        optimizer = grid.optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, exchange=gridtrain.Dense(), overlap=overlap
        )
        for (points,) in grid.batches([(torch.ones(2),)] * 4, batch_size=2, steps=1):
            hidden = model[0](points)
            for _ in range(2):
                hidden = checkpoint(model[1], hidden, use_reentrant=True)
            hidden.sum().backward()
            optimizer.step()

    with pytest.raises(ConfigError, match=r"added to a gradient twice, .* use_reentrant=True; .*None"):
        together(train, 1)


def test_a_grad_scaler_with_overlap_is_refused(together: Any) -> None:
    def scaled(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.grad_scale = torch.tensor(2.0)

    with pytest.raises(ConfigError, match="GradScaler"):
        failing(together, scaled)


def test_workers_with_different_buckets_are_refused(new_group: Any) -> None:
    def first(grid: gridtrain.Grid, number: int) -> None:
        model = net()
        optimizer = sgd(grid, model, lr=0.1)
        for step, batch in enumerate(grid.batches(DATA, batch_size=2, steps=3)):
            if step == 1:
                second = group.start(lambda grid, number: train(grid, gridtrain.Dense()))
                results.append(group.result(second))
            train_batch(model, optimizer, batch)

    results: list[Any] = []
    with new_group(workers=1) as group:
        assert group.result(group.start(first)) is None
    assert isinstance(results[0], gridtrain.JoinRefused), results
    assert "in at most 3 buckets of at least 1 elements here" in str(results[0])


# -- bounds of buckets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "most", "least", "bounds"),
    [
        ((10, 10, 10, 10), 4, 1, (0, 10, 20, 30, 40)),
        ((10, 10, 10, 10), 2, 1, (0, 20, 40)),
        ((10, 10, 10, 10), 4, 15, (0, 20, 40)),
        ((5, 10, 10, 10), 4, 10, (0, 15, 25, 35)),  # the first 5 are too few for a bucket of their own
        ((1000, 1, 1), 4, 1, (0, 1000, 1002)),  # as with an embedding, which is sent last
        ((1000, 1, 1), 4, 3, (0, 1002)),
        ((1, 10, 10, 10, 1), 4, 1, (0, 11, 21, 31, 32)),
        ((1, 1, 1000), 4, 1, (0, 2, 1002)),
        ((3,), 4, 100, (0, 3)),
    ],
)
def test_bucket_bounds(sizes: Any, most: int, least: int, bounds: Any) -> None:
    assert bucket_bounds(sizes, most, least) == bounds
