"""Checks a pipeline's batch and number of micro-batches, and finds the stage in which a fault originated.

    check_batch         checks the inputs and targets that the script has passed to `pipe.step`
    check_same_dtypes   compares the inputs with those of an earlier step
    check_in_flight     checks that neighbours can store the messages of all micro-batches in flight
    find_fault_origin   finds out, after an exception in a layer, whether received values have caused it

A fault in this worker's script raises a `ConfigError` before anything is sent; a fault in another stage
raises a `LineBroken` that names the stage.  An exception in a layer does not prove that the sender is at
fault, because a bug in the script causes exceptions regardless of the values.  The layers are therefore run
again with values that are not expected to cause an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gridtrain.core.commit.attempts import MAX_EARLY_MESSAGES
from gridtrain.core.stages.schedule import Schedule
from gridtrain.errors import ConfigError, GridtrainError, LineBroken, describe_type
from gridtrain.pipeline.tensor_tree import Leaf, TensorTreeSpec, map_tree, tensors_in
from gridtrain.quantities import format_count

_REMEDY = "run the same model on the same data on all workers; if they do, remove the worker of that stage"


def check_batch(name: str, tree: Any, samples: int) -> Any:
    """Check that every tensor of a tree has `samples` rows, and that all other values can be copied.

    Args:
        name: "inputs" or "targets", for the message.

    Returns:
        The same tree with the dtypes of the tensors, and None in place of all other values.

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
        ConfigError: they differ.
    """
    if dtypes != earlier:
        raise ConfigError(
            f"the dtypes of the inputs are {dtypes}, but in earlier steps they were {earlier}",
            remedy="pass pipe.step inputs with the same structure and dtypes in each step",
        )


def check_in_flight(schedule: Schedule, buffers: int = 1) -> None:
    """Check that a stage cannot send too many messages before a neighbour begins the step and receives them.

    Args:
        buffers: the number of buffers in a payload.  A payload takes at least one message for each buffer,
            and one for the table of its buffers.

    Raises:
        ConfigError: a stage could send more messages than a neighbour stores, which would then disconnect it.
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


class FaultOrigin(Enum):
    """The origin of an exception in a forward pass: this worker, or values from the previous stage."""

    OWN = "the received values are not the cause"
    NOT_FINITE = "floats that are not finite were received; the step may have overflowed"
    SENDER = "integers were received that do not occur in this step's batch"


def find_fault_origin(
    error: Exception,
    agreed: TensorTreeSpec | None,
    received: Any,
    samples: int,
    own: Any,
    fails: Callable[[Any], bool],
) -> tuple[FaultOrigin, str]:
    """Return the origin of an exception in a forward pass, and a description of the values that caused it.

    The description is empty if this worker is the origin.

    Args:
        error: the exception.
        agreed: the spec of `received`; None on the first stage.
        received: the values from the previous stage.
        samples: the number of samples in the micro-batch.
        own: this worker's copy of the same micro-batch's inputs.
        fails: a function that returns whether the computation also raises an exception with other values
            instead of `received`.
    """
    if agreed is None or not isinstance(error, LookupError | ValueError | ArithmeticError | RuntimeError):
        return FaultOrigin.OWN, ""
    no_value = isinstance(error, GridtrainError | NotImplementedError | RecursionError)
    if no_value or "memory" in str(error):  # received values cannot cause these errors
        return FaultOrigin.OWN, ""
    try:
        strange = _SuspectValues(agreed, received, samples, own)
        if strange.floats and not fails(strange.with_replacements(None)):
            return FaultOrigin.NOT_FINITE, strange.floats
        # 0 is a valid index into every table, and 1 a valid length where 0 is not.
        if strange.integers and not all(fails(strange.with_replacements(number)) for number in (0, 1)):
            return FaultOrigin.SENDER, strange.integers
    except RuntimeError:  # the device has failed
        pass
    return FaultOrigin.OWN, ""


def sender_fault(source: int, found: str, error: Exception) -> LineBroken:
    """Return the error for `FaultOrigin.SENDER`, which the other stages also receive."""
    text = f"{type(error).__name__}: {str(error)[:200]}"
    return LineBroken(
        f"stage {source} sent values that the layers cannot process: {found} -> {text}",
        source,
        remedy=_REMEDY,
    )


class _SuspectValues:
    """Finds the received values that may have caused an exception.

    Attributes:
        floats: a description of the floats that are not finite; empty if all are finite.
        integers: a description of the first tensor or number that is not floating-point and does not occur
            among this worker's inputs; empty if there is none.
    """

    def __init__(self, agreed: TensorTreeSpec, received: Any, samples: int, own: Any) -> None:
        self._spec, self._received, self._foreign_leaves = agreed, received, set[int]()
        self.floats = self.integers = ""
        mine = tensors_in(own)
        for at, (leaf, value) in enumerate(agreed.values(received, samples)):
            tensor = torch.as_tensor(value).detach().cpu()
            if tensor.is_floating_point() or tensor.is_complex():
                if not bool(torch.isfinite(tensor).all()):
                    self.floats = self.floats or f"values that are not finite in {leaf}"
            elif tensor.numel() and not any(_is_equal(tensor, other) for other in mine):
                ends = f"integers from {int(tensor.min())} to {int(tensor.max())} in {leaf}"
                self.integers = self.integers or ends
                self._foreign_leaves.add(at)

    def with_replacements(self, number: int | None) -> Any:
        """Return the received values with 0 for non-finite floats and `number` for suspect integers.

        Integers stay unchanged if `number` is None.
        """

        places = iter(range(len(self._spec.leaves)))

        def change(leaf: Leaf, value: Any) -> Any:
            at, tensor = next(places), torch.as_tensor(value).detach()
            if tensor.is_floating_point() or tensor.is_complex():
                tensor = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
            elif number is not None and at in self._foreign_leaves:
                tensor = torch.full_like(tensor, number)
            return leaf.number(tensor.item()) if leaf.number is not None else tensor

        return self._spec.map_leaves(self._received, change)


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other.detach().cpu())
