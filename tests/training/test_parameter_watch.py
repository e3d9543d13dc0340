"""A watch notices other values, but no move of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gridtrain.training.parameter_watch import ParameterWatch


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def reset_one(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("weight")[-1, -1] = 0.0


def copy_data(model: nn.Module) -> None:
    model.get_parameter("bias").data.add_(1.0)


def move(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    ("change", "notices"),
    [(load, True), (reset_one, True), (copy_data, True), (nn.Module.half, True), (move, False)],
)
def test_other_values_are_noticed(change: Callable[[nn.Module], object], notices: bool) -> None:
    model = nn.Linear(30, 20)
    nn.init.constant_(model.bias[:1], float("nan"))
    watch = ParameterWatch(model, [*model.parameters()])
    assert not watch.has_changed, "nothing is recorded yet"
    watch.record()
    assert not watch.has_changed
    change(model)
    assert watch.has_changed == notices
    watch.record()
    assert not watch.has_changed
