"""Checks, before anything is sent, that a pipeline can process a batch and a number of micro-batches.

check_batch         checks the inputs and targets that the script has passed to `pipe.step`
check_same_dtypes   compares the dtypes and structure of the inputs with those in an earlier step
check_in_flight     checks that neighbours can store the messages of all micro-batches in flight
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridtrain.core.commit.attempts import MAX_EARLY_MESSAGES
from gridtrain.core.stages.schedule import Schedule
from gridtrain.errors import ConfigError, describe_type
from gridtrain.pipeline.tensor_tree import map_tree
from gridtrain.quantities import format_count


def check_batch(name: str, tree: Any, samples: int) -> Any:
    """Check that a tree can be divided into micro-batches.

    Every tensor must have `samples` rows, and all other values must be of a kind that can be copied.

    Args:
        name: "inputs" or "targets", for the message.

    Returns:
        The same tree, with each tensor replaced by its dtype and every other value by None.

    Raises:
        ConfigError: the batch fails the check.
    """

    def check(value: Any) -> torch.dtype | None:
        if isinstance(value, Tensor):
            if value.dim() == 0 or value.shape[0] != samples:
                raise ConfigError(
                    f"the {name} contain a tensor of shape {tuple(value.shape)}, but the batch of this "
                    f"step has {format_count(samples, 'sample')}",
                    remedy="pass pipe.step the whole batch that grid.batches(...) yielded, with the "
                    "samples in the first dimension",
                )
            if name == "inputs" and value.is_inference():  # targets are copied
                raise ConfigError(
                    "the inputs contain a tensor made under torch.inference_mode, which has no backward pass",
                    remedy="use torch.no_grad where it is made, or pass a copy (.clone())",
                )
            return value.dtype
        if not isinstance(value, bool | int | float | str | None):
            raise ConfigError(
                f"the {name} contain {describe_type(value)}, which cannot be divided into micro-batches",
                remedy="use tensors (torch.as_tensor(...)), numbers, strings and None, in tuples, lists "
                "and dicts",
            )
        return None

    return map_tree(tree, check)


def check_same_dtypes(dtypes: Any, earlier: Any) -> None:
    """Check that the inputs have the same dtypes and structure as in an earlier step.

    Args:
        dtypes, earlier: the results of `check_batch`.

    Raises:
        ConfigError: the dtypes or the structure differ.
    """
    if dtypes != earlier:
        raise ConfigError(
            f"the dtypes of the inputs are {dtypes}, but in earlier steps they were {earlier}",
            remedy="pass pipe.step inputs with the same structure and dtypes in each step",
        )


def check_in_flight(schedule: Schedule, buffers: int = 1) -> None:
    """Check that a neighbour can store all messages that a stage sends before the neighbour begins the step.

    Args:
        buffers: the number of buffers in a payload.  A payload takes at least one message for each buffer,
            and one for the table of the buffers.

    Raises:
        ConfigError: a stage could send more messages than a neighbour stores, and would be disconnected.
    """
    most = MAX_EARLY_MESSAGES // 2 // (1 + buffers)  # the other half is for all other messages
    kept = max((schedule.max_in_flight(stage) for stage in range(schedule.stages - 1)), default=0)
    if kept > most:
        raise ConfigError(
            f"with {schedule.micro_batches} micro-batches and the schedule {schedule.name}, {kept} of them "
            f"are in flight at once; with {format_count(buffers, 'tensor')} each, a worker stores at most "
            f"{most} for a neighbour",
            remedy=f'use at most micro_batches={most}, or schedule="1f1b" with a small ahead',
        )
