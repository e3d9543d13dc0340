"""Checks a batch, the number of micro-batches, and values from another stage; finds out who is at fault.

    pipe.step(inputs, targets) --> check_batch              the same samples in every tensor, on every stage
    grid.pipeline(micro_batches=M) --> check_in_flight      what a neighbour must hold before it has begun
    Stage.forward(received) raises --> find_fault_origin    whether it raises with other values, too

The script of this worker is at fault with a `ConfigError` before anything is sent, a stage that sent
something with a `LineBroken` that names it.  An exception alone says nothing of the sender, because a bug of
the script raises with any values.  So the layers are tried again with numbers that cannot be the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gridtrain.core.commit.attempts import MAX_EARLY_MESSAGES
from gridtrain.core.stages.schedule import Schedule
from gridtrain.errors import ConfigError, GridtrainError, LineBroken
from gridtrain.pipeline.tensor_tree import Leaf, TensorTreeSpec, map_tree

_REMEDY = "all workers must run the same model on the same data; drop that worker if it does"


def check_batch(name: str, tree: Any, samples: int) -> None:
    """Check that every tensor of a tree has `samples` rows, and that everything else in it can be divided.

    Raises:
        ConfigError: it is not so.  Nothing was sent: `pipe.step` may be called again.
    """

    def check(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.dim() == 0 or value.shape[0] != samples:
                raise ConfigError(
                    f"{name} has a tensor of shape {tuple(value.shape)}; the batch of this step has "
                    f"{samples} samples",
                    remedy="give pipe.step the whole batch that grid.batches(...) yielded, samples in the "
                    "first dimension",
                )
        elif not isinstance(value, bool | int | float | str | None):
            raise ConfigError(
                f"{name} has a {type(value).__name__}, which cannot be divided into micro-batches",
                remedy="use tensors, numbers, strings, None in tuples, lists, dicts: torch.as_tensor(...)",
            )

    map_tree(tree, check)


def check_in_flight(schedule: Schedule, buffers: int = 1) -> None:
    """Check the number of messages that a neighbour holds before it has begun.

    Args:
        buffers: of one payload; each is at least one message, and their table another one.

    Raises:
        ConfigError: a stage could send more than a neighbour holds, and would be dropped for it.
    """
    most = MAX_EARLY_MESSAGES // 2 // (1 + buffers)  # half of them are for everything else
    kept = max((schedule.max_in_flight(stage) for stage in range(schedule.stages - 1)), default=0)
    if kept > most:
        raise ConfigError(
            f"with {schedule.micro_batches} micro-batches and the schedule {schedule.name} {kept} of them "
            f"are on their way at once; with {buffers} tensors each a worker holds {most} for a neighbour",
            remedy=f'micro_batches={most} at most, or schedule="1f1b" with a small ahead',
        )


class FaultOrigin(Enum):
    """Whether the values from the previous stage are the reason of an exception."""

    OWN = "the received values are not the reason"
    NOT_FINITE = "floats that are not finite were received; the step may have overflowed"
    SENDER = "integers were received that no sample of this step's batch has"


def find_fault_origin(
    error: Exception,
    agreed: TensorTreeSpec | None,
    received: Any,
    samples: int,
    own: Any,
    fails: Callable[[Any], bool],
) -> tuple[FaultOrigin, str]:
    """Who is at fault for an exception of a layer or the loss, and which of the values caused it.

    Args:
        agreed: describes `received`; None: this is the first stage.
        own: this worker's copy of the same micro-batch's inputs.
        fails: whether computing with other values instead of `received` raises an exception, too.
    """
    if agreed is None or not isinstance(error, LookupError | ValueError | ArithmeticError | RuntimeError):
        return FaultOrigin.OWN, ""
    no_value = isinstance(error, GridtrainError | NotImplementedError | RecursionError)
    if no_value or "memory" in str(error):  # received values cannot cause these; allocators: RuntimeError
        return FaultOrigin.OWN, ""
    try:
        strange = _SuspectValues(agreed, received, samples, own)
        if strange.floats and not fails(strange.with_replacements(None)):
            return FaultOrigin.NOT_FINITE, strange.floats
        # 0 is a valid index of every table, and 1 a valid length where 0 is not.
        if strange.integers and not all(fails(strange.with_replacements(number)) for number in (0, 1)):
            return FaultOrigin.SENDER, strange.integers
    except RuntimeError:  # a device that has failed
        pass
    return FaultOrigin.OWN, ""


def sender_fault(source: int, found: str, error: Exception) -> LineBroken:
    """The error that the others are sent for `FaultOrigin.SENDER`."""
    text = f"{type(error).__name__}: {str(error)[:200]}"
    return LineBroken(
        f"what stage {source} sent cannot be computed with: {found} -> {text}", source, remedy=_REMEDY
    )


class _SuspectValues:
    """Which of the received values may have caused an exception, in words; empty: none."""

    def __init__(self, agreed: TensorTreeSpec, received: Any, samples: int, own: Any) -> None:
        self._spec, self._received, self._foreign_leaves = agreed, received, set[int]()
        self.floats = self.integers = ""
        mine: list[Tensor] = []
        map_tree(own, lambda value: mine.append(value) if isinstance(value, Tensor) else None)
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
        """The received values with 0 for floats that are not finite and `number`, if given, for odd
        integers."""

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
