"""Batch-norm statistics: averaged every N steps, integers from rank 0, in the same round as the update."""

import math

import pytest
import torch
from small_classifier import sgd
from torch import nn

from gridtrain.config import Dense, GTopK
from gridtrain.training.checkpoint import model_buffers, serialization
from gridtrain.training.optimizer import GridOptimizer


class Counted(nn.Module):
    """One parameter, and buffers that each worker sets by hand."""

    def __init__(self, mean, count, flag=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("count", torch.tensor(count))
        self.register_buffer("flag", torch.tensor(flag))
        self.register_buffer("scratch", torch.tensor(mean[0]), persistent=False)


def run(network, models, steps, every, exchange, aborts=(), bad=()):
    def worker(session):
        model = models[session.rank]
        optimizer = GridOptimizer(sgd(model), model, exchange, session, average_buffers_every=every)
        for step in range(steps):
            model.weight.grad = torch.full((3,), math.nan if (step, session.rank) in bad else 1.0)
            optimizer.step()
        return [model.mean.tolist(), model.count.item(), model.flag.item(), model.scratch.item()]

    return network(len(models), aborts=aborts).train(worker)


def models():
    big = 2**40 + 3  # more digits than float32 has
    return [Counted([1.0, 2.0], big, True), Counted([3.0, 2.0], 5), Counted([5.0, -1.0], -7)]


@pytest.mark.parametrize("exchange", [Dense(), GTopK(density=0.5)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("aborts", [(), {(1, 0), (1, 1)}])
def test_averages_are_those_computed_by_hand(network, exchange, aborts):
    assert run(network, models(), 1, 2, exchange) == [
        [[1.0, 2.0], 2**40 + 3, True, 1.0],
        [[3.0, 2.0], 5, False, 3.0],
        [[5.0, -1.0], -7, False, 5.0],
    ]
    assert run(network, models(), 2, 2, exchange, aborts) == [
        [[3.0, 1.0], 2**40 + 3, True, 1.0],
        [[3.0, 1.0], 2**40 + 3, True, 3.0],
        [[3.0, 1.0], 2**40 + 3, True, 5.0],
    ]


def test_the_last_step_averages_them_unless_averaging_is_disabled(network):
    def until_step_1(*args, **options):
        made = network(*args, **options)
        made.last_step = 1
        return made

    means = [[row[0] for row in run(until_step_1, models(), 2, every, Dense())] for every in (0, 7)]
    assert means == [[[1.0, 2.0], [3.0, 2.0], [5.0, -1.0]], [[3.0, 1.0]] * 3]


def test_statistics_that_are_not_finite_are_replaced_by_the_average(network):
    broken = models()
    broken[1].mean[0] = math.nan
    assert [row[0] for row in run(network, broken, 1, 1, Dense())] == [[3.0, 0.5]] * 3


class Masked(nn.Module):
    """Statistics, and constants that no training changes."""

    def __init__(self, mean):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("mean", torch.tensor([mean]))
        self.register_buffer("thirds", torch.arange(1, 100, dtype=torch.float64) / 3)
        self.register_buffer("angles", 10000 ** -(torch.arange(64) / 64))


def test_constants_do_not_change_and_statistics_beside_them_are_averaged(network):
    """The mean of seven equal float32 numbers differs by rounding; float64 ones lose half of their digits."""

    def worker(session):
        model = Masked(float(session.rank))
        optimizer = GridOptimizer(sgd(model), model, Dense(), session, average_buffers_every=1)
        model.weight.grad = torch.ones(3)
        optimizer.step()
        return model

    for model in network(7).train(worker):
        fresh = Masked(3.0)
        for name, buffer in fresh.named_buffers():
            assert torch.equal(buffer, model.get_buffer(name)), name


def test_a_skipped_step_averages_no_buffers(network):
    after = run(network, models(), 1, 1, GTopK(), bad={(0, 2)})
    assert [row[0] for row in after] == [[1.0, 2.0], [3.0, 2.0], [5.0, -1.0]]


def test_batch_norm_statistics_are_averaged_in_a_loop(network):
    def worker(session):
        generator = torch.Generator().manual_seed(session.rank)
        model = nn.BatchNorm1d(4)
        optimizer = GridOptimizer(sgd(model), model, Dense(), session, average_buffers_every=3)
        seen = []
        for _ in range(6):
            model(torch.randn(8, 4, generator=generator) + session.rank).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(str([buffer.tolist() for buffer in model_buffers.float_buffers(model)]))
        return seen

    equal = [len(set(step)) == 1 for step in zip(*network(3).train(worker), strict=True)]
    assert equal == [False, False, True, False, False, True]


def test_only_persistent_buffers_are_averaged():
    model = Counted([1.0, 2.0], 9)
    assert [buffer.tolist() for buffer in model_buffers.float_buffers(model)] == [[1.0, 2.0]]
    assert model_buffers.integer_buffers_vector(model).tolist() == [9, 0]


def test_a_shared_buffer_is_averaged_under_its_persistent_name():
    model = nn.Module()
    shared = torch.tensor([4.0])
    model.register_buffer("cache", shared, persistent=False)
    model.register_buffer("mean", shared)
    model.register_buffer("again", shared)
    assert [name for name, _ in model_buffers.buffers_of(model)] == ["mean"]


def test_buffers_with_elements_that_share_memory_are_averaged_and_received(network):
    def expanded(mean, count):
        model = Counted([0.0], 0)
        model.register_buffer("mean", torch.tensor([[mean, 1.0]]).expand(3, 2))
        model.register_buffer("count", torch.tensor([count, 7]).expand(2, 2))
        return model

    def worker(session):
        model = (one, other)[session.rank]
        optimizer = GridOptimizer(sgd(model), model, Dense(), session, average_buffers_every=1)
        model.weight.grad = torch.ones(3)
        optimizer.step()
        return optimizer

    one, other = expanded(2.0, 5), expanded(4.0, 6)
    source, _ = network(2).train(worker)
    newcomer = expanded(9.0, 9)
    serialization.restore_state(source.capture_state(), newcomer, sgd(newcomer), {})
    for model in (one, other, newcomer):
        assert model.mean.tolist() == [[3.0, 1.0]] * 3 and model.count.tolist() == [[5, 7]] * 2
