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
from typing import Any

import torch
from torch import Tensor

from gridtrain.training.checkpoint.serialization import Trackers, TurnStartState


def capture_turn_start(inner: torch.optim.Optimizer, trackers: Trackers, *, averages: bool) -> TurnStartState:
    """Copy the current settings and trackers.

    Args:
        averages: whether the trackers' tensors with more than one element, such as weight averages, are also
            copied.  This is not necessary if the script changes them only after the step of the run.
    """
    groups = copy.deepcopy(inner.state_dict()["param_groups"])
    return TurnStartState(
        groups, {name: _copy_value(item.state_dict(), averages) for name, item in trackers.items()}
    )


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
