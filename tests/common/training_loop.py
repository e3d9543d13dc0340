"""An ordinary training loop in parts: a small model, its data, SGD, and a step.

model = linear()
optimizer = sgd(grid, model)
for batch in grid.batches(DATA, batch_size=2, steps=3):
    train_batch(model, optimizer, batch)

`train_steps` is this loop; it yields after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import gridtrain
from gridtrain.training.checkpoint import serialization

DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(-6, 6)]


def linear() -> nn.Linear:
    """The same on each worker."""
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    return model


def sgd(
    grid: gridtrain.Grid,
    model: nn.Module,
    exchange: Any = gridtrain.Dense(),  # noqa: B008  it is immutable
    *,
    lr: float = 0.01,
    momentum: float = 0.0,
    **options: Any,
) -> gridtrain.GridOptimizer:
    """SGD as the optimizer of a group."""
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return grid.optimizer(inner, model, exchange=exchange, **options)


def backward(model: nn.Module, batch: Any) -> None:
    """The loss is the mean square of the outputs or, with targets, of their errors."""
    inputs, targets = batch if isinstance(batch, tuple | list) else (batch, 0.0)
    (model(inputs) - targets).square().mean().backward()


def train_batch(model: nn.Module, optimizer: Any, batch: Any) -> None:
    backward(model, batch)
    optimizer.step()
    optimizer.zero_grad()


def train_steps(
    grid: gridtrain.Grid, model: nn.Module, optimizer: Any, data: Any = DATA, **batches: Any
) -> Iterator[int]:
    """Train on all batches of the worker, of two samples by default; yields `grid.step` after each."""
    for batch in grid.batches(data, **({"batch_size": 2} | batches)):
        train_batch(model, optimizer, batch)
        yield grid.step


def digest(model: nn.Module, optimizer: gridtrain.GridOptimizer) -> str:
    """Of the state that all workers have: parameters, buffers and the optimizer's state."""
    return serialization.replica_digest(model, optimizer.replicated).hex()


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()
