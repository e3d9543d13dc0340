"""The optimizer that users hold of a model in stages: one object, whichever stage this worker holds.

Decides which settings (learning rate and the like) go with a worker that changes its stage.  Never steps by
itself, never holds a parameter longer than the worker holds its stage.

    scheduler --> pipe.optimizer --.-- before the group has formed: of the whole model, on the meta device
                  (one object)     |-- stage 2's, as it was built
                                   '-- stage 0's, with the settings that stage 2's had, until a replica's
                                       or a checkpoint's state of stage 0 brings its own
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridtrain.errors import ConfigError
from gridtrain.training.wrapping_optimizer import WrappingOptimizer

Settings = list[dict[str, Any]]
_EXCLUDED_SETTINGS = ("params", "param_names")
_SCHEDULER_KEY = "initial_lr"  # every scheduler of torch.optim leaves it in each group


class StageOptimizer(WrappingOptimizer):
    """Shows the groups and the state of the stage that this worker holds.

    Learning rate schedulers are made with it once, before or in the loop, and stepped after `pipe.step`.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._wrap(inner)
        self._applying = False
        self._initial_settings, self._changed = self.settings(), False

    def set_inner(self, inner: torch.optim.Optimizer) -> None:
        """Of another stage, with the settings that this one has now, if they are not what it was made with.

        Raises:
            ConfigError: a scheduler, or the script, has set another number of groups.
        """
        now, coming = self.inner.param_groups, inner.param_groups
        self._changed |= not all(map(_is_equal, self.settings(), self._initial_settings))
        if len(now) != len(coming) and self._changed:
            scheduled = any(_SCHEDULER_KEY in group for group in now)
            who = "a scheduler was made for" if scheduled else "the script has set"
            raise ConfigError(
                f"{who} {len(now)} groups of parameters; the stage that this worker holds now has "
                f"{len(coming)}",
                remedy="make the same groups for every stage, also those that are empty there",
            )
        settings, self.inner = self.settings(), inner
        self._initial_settings = self.settings()
        if self._changed:
            self.load_settings(settings)

    def settings(self) -> Settings:
        """A copy of all groups' settings."""
        return [
            {name: _own(value) for name, value in group.items() if name not in _EXCLUDED_SETTINGS}
            for group in self.inner.param_groups
        ]

    def load_settings(self, settings: Settings) -> None:
        """What `settings` has given."""
        _load(self.inner.param_groups, settings)

    def apply(self) -> None:
        """The gradients are the group's update."""
        self._applying = True
        try:
            self.step()  # through what a scheduler has put around it
        finally:
            self._applying = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """For `apply` alone."""
        if not self._applying:
            raise ConfigError(
                "pipe.optimizer.step() was called; pipe.step(...) does that, with the whole group's update",
                remedy="leave it out; a scheduler's step comes after pipe.step(...)",
            )
        self.inner.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "a parameter group was added to pipe.optimizer, whose parameters are a stage's",
            remedy="add all groups where the optimizer is made: grid.pipeline(model, make, ...)",
        )


def _load(groups: list[dict[str, Any]], settings: Settings) -> None:
    for group, mine in zip(groups, settings, strict=False):
        group.update({name: _own(value) for name, value in mine.items()})


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        bool((torch.as_tensor(value) == torch.as_tensor(other[name])).all())
        if isinstance(value, Tensor) or isinstance(other[name], Tensor)
        else bool(value == other[name])
        for name, value in one.items()
    )


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
