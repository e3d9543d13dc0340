"""`pipe.optimizer`: the optimizer of the held stage, which keeps its settings when the stage changes.

Schedulers and scripts refer to one object, which calls an inner optimizer.  Before the group has formed, the
inner optimizer is that of the whole model on the meta device; afterwards, it is that of the stage in memory.
If the worker changes from stage 2 to stage 0, for example, and settings of the optimizer have been changed,
the optimizer of stage 0 gets the current settings, until the state of stage 0 from a replica or a checkpoint
replaces them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridtrain.errors import ConfigError
from gridtrain.quantities import format_count
from gridtrain.training.checkpoint.joint_optimizer import parts_of
from gridtrain.training.wrapping_optimizer import WrappingOptimizer

Settings = list[dict[str, Any]]
_EXCLUDED_SETTINGS = ("params", "param_names")
_SCHEDULER_KEY = "initial_lr"  # every scheduler of torch.optim sets it in each group


class StageOptimizer(WrappingOptimizer):
    """An optimizer with the parameter groups and the state of the stage that this worker holds.

    Create each learning rate scheduler once, before or in the training loop; step it after `pipe.step`.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._wrap(inner)
        self._applying = False
        self._initial_settings, self._changed = self.settings(), False

    def set_inner(self, inner: torch.optim.Optimizer) -> None:
        """Replace the inner optimizer; if settings have been changed, the new one gets the current ones.

        Raises:
            ConfigError: settings were changed, and the two optimizers differ in class or in number of groups.
        """
        now, other = _layout(self.inner), _layout(inner)
        self._changed |= not all(map(_is_equal, self.settings(), self._initial_settings))
        if now != other and self._changed:
            scheduled = any(_SCHEDULER_KEY in group for group in self.inner.param_groups)
            who = "a scheduler was made for" if scheduled else "the script has changed settings of"
            raise ConfigError(
                f"{who} {now}, but the stage that this worker now holds has {other}",
                remedy="create the same optimizers and groups for every stage, even if some groups are "
                'empty: torch.optim.SGD([{"params": parameters}], ...)',
            )
        settings, self.inner = self.settings(), inner
        self._initial_settings = self.settings()
        if self._changed:
            self.load_settings(settings)

    def settings(self) -> Settings:
        """Return a copy of the settings of all groups."""
        return [
            {name: _own(value) for name, value in group.items() if name not in _EXCLUDED_SETTINGS}
            for group in self.inner.param_groups
        ]

    def load_settings(self, settings: Settings) -> None:
        """Load settings that `settings` returned."""
        for group, mine in zip(self.inner.param_groups, settings, strict=False):
            group.update({name: _own(value) for name, value in mine.items()})

    def apply(self) -> None:
        """Take a step with the parameters' gradients, which must contain the group's update."""
        self._applying = True
        try:
            self.step()  # a scheduler may have replaced it with a wrapper
        finally:
            self._applying = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step; raise `ConfigError` if this method was not called by `apply`."""
        if not self._applying:
            raise ConfigError(
                "pipe.optimizer.step() was called, but pipe.step(...) already applies the group's update",
                remedy="remove the call; call a scheduler's step after pipe.step(...)",
            )
        self.inner.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "a parameter group was added to pipe.optimizer, which has the parameters of one stage only",
            remedy="add all groups in the function that makes the optimizer: grid.pipeline(model, make, ...)",
        )


def _layout(optimizer: torch.optim.Optimizer) -> str:
    return " and ".join(
        f"{type(part).__name__} with {format_count(len(part.param_groups), 'parameter group')}"
        for part in parts_of(optimizer)
    )


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        bool((torch.as_tensor(value) == torch.as_tensor(other[name])).all())
        if isinstance(value, Tensor) or isinstance(other[name], Tensor)
        else bool(value == other[name])
        for name, value in one.items()
    )


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
