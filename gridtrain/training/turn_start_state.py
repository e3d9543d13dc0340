"""The optimizer settings and trackers from before a turn, for a state that is sent during the turn.

A state that is sent in the middle of a turn contains these values, because its receiver still makes all of
the turn's calls to `step`.  For example, a script may step a scheduler after each micro-batch or local step:

    micro-batch or local step            1     2     3     4, which ends the step of the run
    state of the scheduler, at first s   s+1   s+2   s+3
                                                      ^ a newcomer that requests the state here receives s
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
    """Optimizer settings and trackers at the start of a turn.

    Attributes:
        param_groups: the optimizer's groups as in a state_dict, where parameters are numbers.
        trackers: the trackers' state_dicts by name.
    """

    param_groups: list[dict[str, Any]]
    trackers: Mapping[str, Any]

    @classmethod
    def capture(cls, inner: torch.optim.Optimizer, trackers: Trackers, *, averages: bool) -> TurnStartState:
        """Copy the current settings and trackers.

        Args:
            averages: whether the trackers' tensors with more than one element, such as weight averages, are
                also copied.  This is not necessary if the script changes them only after the step of the run.
        """
        groups = copy.deepcopy(inner.state_dict()["param_groups"])
        return cls(
            groups, {name: _copy_value(item.state_dict(), averages) for name, item in trackers.items()}
        )

    def apply_to(
        self, replicated: torch.optim.Optimizer, trackers: Trackers
    ) -> tuple[torch.optim.Optimizer, Trackers]:
        """Return replacements for `replicated` and `trackers` whose state_dicts have the settings and
        trackers from the start of the turn.  They are used only to send a state during the turn."""
        theirs = {
            name: _TrackerView(self.trackers[name]) if name in self.trackers else item
            for name, item in trackers.items()
        }
        return cast(torch.optim.Optimizer, _OptimizerView(replicated, self.param_groups)), theirs


@dataclass(frozen=True, slots=True)
class _OptimizerView:
    """A stand-in for an optimizer, with the settings at the start of the turn.

    The rest of its state does not change during a turn, so the current values are used.
    """

    replicated: torch.optim.Optimizer
    param_groups: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.replicated.state_dict()["state"], "param_groups": self.param_groups}


@dataclass(frozen=True, slots=True)
class _TrackerView:
    """A tracker with its state at the start of the turn."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("the state at a turn's start is only sent, never loaded")


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
