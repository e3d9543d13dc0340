"""A model, an optimizer and a tracker whose states are exact and do not depend on torch's version."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn


class ExactSGD(torch.optim.Optimizer):
    """SGD with momentum, with no settings but these two."""

    def __init__(self, parameters: Any, lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(group["lr"] * velocity)


class Tracker:
    """Its state has a value of each type that a state may contain."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "count": 3,
            "rate": 0.125,
            "on": True,
            "none": None,
            "text": "\u00e4",
            "tuple": (1, (2.5, "x")),
            "list": [1, [2]],
            "by number": {1: "one", 2: "two"},
            "counter": Counter({4: 2}),
            "tensor": torch.arange(4, dtype=torch.float32) / 4,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def tiny_model() -> nn.Module:
    """A model without random numbers; batch norm has float and integer buffers."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with torch.no_grad():
        for number, tensor in enumerate((*model.parameters(), *model.buffers())):
            flat = torch.arange(tensor.numel()) + 3 * number
            tensor.copy_(flat.view(tensor.shape) / (1 if tensor.dtype is torch.int64 else 8))
    return model


def tiny_training() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tracker]]:
    """After one step with gradients of 0.5."""
    model = tiny_model()
    optimizer = ExactSGD(model.parameters(), lr=0.25, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return model, optimizer, {"averages": Tracker()}


def tree() -> dict[str, Any]:
    """A nest of tensors as it may pass from a stage of a model to the next one, of 4 samples."""
    return {
        "x": torch.arange(12, dtype=torch.float32).view(4, 3) / 8 - 0.5,
        "ids": torch.arange(4),
        "pair": (torch.tensor([True, False, True, True]), None),
        "scale": 0.5,
        "note": "text",
    }


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
