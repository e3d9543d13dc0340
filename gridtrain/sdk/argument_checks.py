"""Checks the arguments that a script passes to methods of `Grid`, and converts integers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from gridtrain.errors import ConfigError, describe_type


def to_ints(**named: Any) -> list[Any]:
    """Return the values as plain ints, because messages cannot contain numpy integers; None stays None.

    Raises `ConfigError` for values such as 1e3, 1.5 or "32", and for a seed or `accumulate` that is None.
    """
    plain = []
    for name, value in named.items():
        optional = name not in ("accumulate", "seed")
        try:
            plain.append(None if value is None and optional else operator.index(value))
        except TypeError:
            raise ConfigError(
                f"{name} is {value!r}; it must be an integer", remedy=f"pass an int: {name}=32"
            ) from None
    return plain


def check_kinds(optimizer: object, model: object) -> None:
    """Raise `ConfigError` unless the arguments are an optimizer and a model, in this order."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise ConfigError(
            f"grid.optimizer was given {describe_type(optimizer)} and {describe_type(model)}; it needs a "
            "torch.optim.Optimizer and a torch.nn.Module",
            remedy="call grid.optimizer(optimizer, model, ...)",
        )


def to_intervals(**named: Any) -> list[int]:
    """Return numbers of steps (0 stands for never) as plain ints; raise `ConfigError` for other values."""
    intervals = []
    for name, steps in zip(named, to_ints(**named), strict=True):
        if steps is None or steps < 0:
            raise ConfigError(
                f"{name} is {steps}; it must be a number of steps, or 0 for never", remedy=f"try {name}=500"
            )
        intervals.append(steps)
    return intervals
