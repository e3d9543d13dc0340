"""What the script itself changes in a turn, as it was before the turn began.

Decides what stands for settings and trackers in a state that is given away inside of a step.  Never gives
one.

    micro-batch or local step    1       2       3       4 = the step of the run
    scheduler, stepped by each   s+1     s+2     s+3      |  others may ask for this worker's state here
    given then                   s <----------------------+  whoever takes it makes all of the turn's calls,
                                                             and its scheduler with them
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gridtrain.training.checkpoint.serialization import Trackers


@dataclass(frozen=True, slots=True)
class TurnStartState:
    """See the module's text.

    Attributes:
        param_groups: as in a state_dict, where parameters are numbers.
        trackers: their state_dicts by name.
    """

    param_groups: list[dict[str, Any]]
    trackers: Mapping[str, Any]

    @classmethod
    def capture(cls, inner: torch.optim.Optimizer, trackers: Trackers, *, averages: bool) -> TurnStartState:
        """As it is now.

        `averages`: copy also what may be as large as the model.  Who changes it after the step of the run
        alone can do without.
        """
        groups = copy.deepcopy(inner.state_dict()["param_groups"])
        return cls(
            groups, {name: _copy_value(item.state_dict(), averages) for name, item in trackers.items()}
        )

    def apply_to(
        self, replicated: torch.optim.Optimizer, trackers: Trackers
    ) -> tuple[torch.optim.Optimizer, Trackers]:
        """What stands for these two in a state that is given away; for `state_sync`."""
        theirs = {
            name: _TrackerView(self.trackers[name]) if name in self.trackers else item
            for name, item in trackers.items()
        }
        return cast(torch.optim.Optimizer, _OptimizerView(replicated, self.param_groups)), theirs


@dataclass(frozen=True, slots=True)
class _OptimizerView:
    """An optimizer with the settings of before; its moments are of the last step as they are."""

    replicated: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.replicated.state_dict()["state"], "param_groups": self.param_groups}


@dataclass(frozen=True, slots=True)
class _TrackerView:
    """A tracker as it was."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("what was remembered is only given away")


def _copy_value(value: Any, averages: bool) -> Any:
    if averages:
        return copy.deepcopy(value)
    if isinstance(value, Tensor) and value.numel() > 1:
        return value
    if type(value) in (list, tuple):
        return type(value)(_copy_value(item, averages) for item in value)
    if isinstance(value, Mapping):
        return {name: _copy_value(item, averages) for name, item in value.items()}
    return copy.deepcopy(value)
