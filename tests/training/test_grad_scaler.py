"""GradScaler: unscaling and skipping belong to the wrapper, and the scale stays equal on all workers."""

import copy
import math

import pytest
import torch
from small_classifier import same, sgd
from torch import nn

from gridtrain.config import Dense, GTopK
from gridtrain.training.grad_scaler import GridScaler
from gridtrain.training.optimizer import GridOptimizer

SCALING = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 2}


def model_of():
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    return model


def backward(model, scaler, step, bad=False):
    inputs = torch.full((2, 3), 0.1 * (step + 1))
    scaler.scale(model(inputs).square().mean()).backward()
    if bad:
        model.weight.grad[0, 0] = math.inf


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_single_worker_trains_as_with_the_plain_scaler(network, unscale_first):
    model = model_of()
    twin = copy.deepcopy(model)
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session())
    plain = sgd(twin)
    loops = (model, wrapped, GridScaler(**SCALING)), (twin, plain, torch.amp.GradScaler(**SCALING))
    for step in range(8):
        for one, optimizer, scaler in loops:
            backward(one, scaler, step, bad=step == 3)
            if unscale_first:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert loops[0][2].get_scale() == loops[1][2].get_scale()
    assert same(model, twin)
    assert wrapped.skipped_steps == 1


def scales(network, make_scaler, explicit=False):
    """The scales of three workers after each step; at step 1 the gradient of rank 1 overflows."""

    def worker(session):
        model = model_of()
        optimizer = GridOptimizer(sgd(model), model, GTopK(density=0.5), session)
        scaler = make_scaler(**SCALING)
        seen = []
        for step in range(4):
            backward(model, scaler, step, bad=step == 1 and session.rank == 1)
            if explicit:
                scaler.unscale_(optimizer)
                optimizer.exchange()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        assert optimizer.skipped_steps == 1
        return seen, model.weight.detach().clone()

    (first, weight), *others = network(3).train(worker)
    assert all(torch.equal(weight, other) for _, other in others)
    return [first] + [seen for seen, _ in others]


@pytest.mark.parametrize("explicit", [False, True])
def test_one_overflow_halves_the_scale_of_all(network, explicit):
    #   good, bad: halved, good, good: doubled after two
    assert scales(network, GridScaler, explicit) == [[1024.0, 512.0, 512.0, 1024.0]] * 3


def test_with_the_plain_scaler_scales_diverge_but_not_parameters(network):
    assert scales(network, torch.amp.GradScaler) == [
        [1024.0, 2048.0, 2048.0, 4096.0],
        [1024.0, 512.0, 512.0, 1024.0],
        [1024.0, 2048.0, 2048.0, 4096.0],
    ]


def test_a_step_without_gradients_changes_no_scale(network):
    model = model_of()
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session())
    scaler = GridScaler(**SCALING)
    scaler.scale(torch.ones(()))
    scaler.step(wrapped)
    scaler.update()
    assert wrapped.skipped_steps == 0


def test_a_disabled_scaler_does_nothing(network):
    model = model_of()
    wrapped = GridOptimizer(sgd(model), model, Dense(), network().session())
    scaler = GridScaler("cpu", enabled=False)
    backward(model, scaler, 0)
    scaler.step(wrapped)
    scaler.update()
    assert wrapped.skipped_steps == 0


class PausedSession:
    """A session whose worker is paused: no attempt begins, and the group goes on."""

    def begin(self):
        return None

    def report_figures(self, figures):
        pass

    def increase_figure(self, name, amount):
        pass


def test_a_missed_step_does_not_change_the_scale():
    model, scaler = model_of(), GridScaler(**SCALING)
    optimizer = GridOptimizer(sgd(model), model, Dense(), PausedSession())
    backward(model, scaler, 0)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.last_skipped and scaler.get_scale() == 1024.0


def test_a_disabled_scaler_is_not_in_the_state():
    scaler = GridScaler(**SCALING)
    scaler.load_state_dict(GridScaler(enabled=False).state_dict())
    assert scaler.get_scale() == 1024.0


def test_a_step_without_gradients_works_with_another_default_dtype(network):
    model = model_of()
    optimizer, scaler = GridOptimizer(sgd(model), model, Dense(), network().session()), GridScaler(**SCALING)
    torch.set_default_dtype(torch.bfloat16)
    try:
        scaler.scale(torch.zeros((), dtype=torch.float32))
        scaler.step(optimizer)
        scaler.update()
    finally:
        torch.set_default_dtype(torch.float32)
    assert scaler.get_scale() == 1024.0
