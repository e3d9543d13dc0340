"""An optimizer's hyperparameters (lr, weight_decay, ...), compared in every vote and sent to newcomers.

A worker that applies a step that it missed uses the hyperparameters of that step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gridtrain.training.checkpoint.joint_optimizer import parts_of

_OFTEN_CHANGED = ("lr", "momentum", "weight_decay")
_NAMES = ("params", "param_names")  # the model's parameters; torch.compile adds a prefix to their names


def hyperparameter_digest(optimizer: torch.optim.Optimizer) -> bytes:
    """Return a 32-byte digest of the optimizer's class and all plain fields of its groups (lr, weight_decay,
    ...)."""
    return hashlib.blake2b(hyperparameters_json(optimizer), digest_size=32).digest()


def hyperparameters_json(optimizer: torch.optim.Optimizer) -> bytes:
    """Return the optimizer's class and all plain fields of its groups, as JSON."""
    name = " + ".join(type(each).__name__ for each in parts_of(optimizer))
    return json.dumps([name, plain_groups(optimizer.param_groups)], sort_keys=True).encode()


def load_hyperparameters(optimizer: torch.optim.Optimizer, groups: Any) -> None:
    """Load each group's fields, as `hyperparameters_json` wrote them.  Raises `ValueError` if the number of
    groups, their fields or the types of the values do not match the optimizer's."""
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        raise ValueError(f"the number of groups is not {len(optimizer.param_groups)}")
    for group, fields in zip(optimizer.param_groups, groups, strict=True):
        if not isinstance(fields, dict) or not fields.keys() <= group.keys() - set(_NAMES):
            raise ValueError("the settings have fields that this optimizer does not have")
        for name, value in fields.items():
            group[name] = _convert_like(group[name], value, name)


def _convert_like(own: Any, value: Any, name: str) -> Any:
    """Convert `value`, which was decoded from JSON, to the type of `own`.  Raises `ValueError` if that is
    impossible."""
    if isinstance(own, Tensor) and isinstance(value, int | float):
        return own.fill_(value)
    if isinstance(own, tuple | list) and isinstance(value, tuple | list) and len(own) == len(value):
        return type(own)(_convert_like(mine, theirs, name) for mine, theirs in zip(own, value, strict=True))
    if isinstance(own, np.generic):
        own = own.item()
    numbers = (int, float)
    alike = isinstance(own, bool) == isinstance(value, bool)
    if type(own) is type(value) or (alike and isinstance(own, numbers) and isinstance(value, numbers)):
        return value
    raise ValueError(f"{name} is {value!r} in the state, but {own!r} on this worker")


def hyperparameter_lines(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the hyperparameters of all groups as "name=value" lines; those that schedulers usually change
    come first."""
    groups = plain_groups(optimizer.param_groups)
    pairs = [(name, number) for number, group in enumerate(groups) for name in group]
    pairs.sort(key=lambda pair: (pair[0] not in _OFTEN_CHANGED, pair))
    several = len(groups) > 1
    return [
        f"{name}{f' of group {number}' if several else ''}={groups[number][name]}" for name, number in pairs
    ]


def plain_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the plain fields of each group: numbers, strings, None and lists of these."""
    groups = []
    for group in param_groups:
        fields = {k: v.tolist() if isinstance(v, Tensor | np.generic) else v for k, v in group.items()}
        groups.append({k: v for k, v in fields.items() if k not in _NAMES and _is_plain(v)})
    return groups


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
