"""The cost model's assumptions about optimizers."""

from __future__ import annotations

import pytest
import torch

from gridtrain.core.stages.stage_cost import OPTIMIZER_STATE_COPIES

MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("name", OPTIMIZER_STATE_COPIES)
def test_an_optimizers_state_is_as_large_as_torchs(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = MAKE[name]([parameter])
    parameter.grad = torch.ones(1000)
    optimizer.step()
    values = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
    assert sum(value.numel() for value in values) // 1000 == OPTIMIZER_STATE_COPIES[name]
