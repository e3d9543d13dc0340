"""Several optimizers of one model as one, whose state has the layout of a single optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch

from gridtrain.errors import ConfigError, describe_type
from gridtrain.quantities import format_count


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers of one model as one, with the groups and the state of all of them.

    In its `state_dict`, as in that of a single optimizer, parameters are numbered across all groups:

        SGD      groups [0, 1] [2]    state {0, 1, 2}     joint    groups [0, 1] [2] [3, 4]
        AdamW    groups [0, 1]        state {0, 1}                 state {0, 1, 2, 3, 4}

    Args:
        optimizers: optimizers that have no parameter in common; each of them is stepped, in this order.

    Raises:
        ConfigError: `optimizers` is empty or contains something else, or two optimizers have the same
            parameter; or, from `state_dict`, an optimizer has a state that belongs to no parameter.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if other := [each for each in optimizers if not isinstance(each, torch.optim.Optimizer)]:
            raise ConfigError(
                f"a list of optimizers contains {describe_type(other[0])}",
                remedy="list objects of torch.optim.Optimizer only",
            )
        if not optimizers:
            raise ConfigError("the list of optimizers is empty", remedy="list at least one optimizer")
        for one, other_one in combinations(optimizers, 2):
            if common := {*_parameter_ids(one)} & {*_parameter_ids(other_one)}:
                raise ConfigError(
                    f"{type(one).__name__} and {type(other_one).__name__} have "
                    f"{format_count(len(common), 'parameter')} in common",
                    remedy="give each parameter to one optimizer; tied parameters are the same parameter",
                )
        self.__setstate__({"optimizers": tuple(optimizers)})  # as in `WrappingOptimizer._wrap`

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of each parameter; read-only, because a change would not reach the optimizers."""
        return MappingProxyType(
            {key: values for each in self.optimizers for key, values in each.state.items()}
        )

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults that all of the optimizers have, with the values of the first."""
        first, *others = (each.defaults for each in self.optimizers)
        return {name: value for name, value in first.items() if all(name in each for each in others)}

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "a parameter group was added to a list of optimizers",
            remedy="add it to one of the optimizers before grid.optimizer(...)",
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        joint: dict[str, Any] = {"state": {}, "param_groups": []}
        first = 0
        for each in self.optimizers:
            own = _own_state(each)
            joint["state"] |= {first + number: values for number, values in own["state"].items()}
            joint["param_groups"] += _renumbered(own["param_groups"], first)
            first += len(_parameter_ids(each))
        return joint

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.  Raises `ValueError` if it has a different number of groups."""
        state, groups = state_dict["state"], state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} groups, the optimizers {len(self.param_groups)}")
        first = first_group = 0
        for each in self.optimizers:
            end, end_group = first + len(_parameter_ids(each)), first_group + len(each.param_groups)
            own = {number - first: values for number, values in state.items() if first <= number < end}
            own_groups = _renumbered(groups[first_group:end_group], -first)
            each.load_state_dict({"state": own, "param_groups": own_groups})
            first, first_group = end, end_group


def as_one(optimizer: Any) -> Any:
    """Return a list or tuple of optimizers as one optimizer, and anything else as it is.

    Adam and AdamW of torch before 2.7 get the field that later versions have, so that the settings of workers
    with different versions are equal.
    """
    is_list = isinstance(optimizer, list | tuple)
    for each in optimizer if is_list else (optimizer,):
        _add_recent_fields(each)
    if not is_list:
        return optimizer
    joint = JointOptimizer(optimizer)
    joint.state_dict()  # raises for a state that it cannot contain
    return joint if len(optimizer) > 1 else optimizer[0]


def _add_recent_fields(optimizer: Any) -> None:
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for fields in (optimizer.defaults, *optimizer.param_groups):
            fields.setdefault("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that a `JointOptimizer` consists of; for any other optimizer, only itself."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def _parameter_ids(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own = optimizer.state_dict()
    if other := [*(own.keys() - {"state", "param_groups"}), *(k for k in own["state"] if type(k) is not int)]:
        name = type(optimizer).__name__
        raise ConfigError(
            f"{name}'s state contains {other[0]!r}, which belongs to no parameter, so that a list of "
            "optimizers cannot contain it",
            remedy=f"use {name} alone, for all parameters",
        )
    return own


def _renumbered(groups: list[dict[str, Any]], offset: int) -> list[dict[str, Any]]:
    return [group | {"params": [number + offset for number in group["params"]]} for group in groups]
