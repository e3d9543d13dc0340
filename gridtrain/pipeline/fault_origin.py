"""Finds the origin of an exception in a layer: this worker, or values received from another stage.

A fault in another stage raises a `LineBroken` that names the stage.  An exception in a layer does not prove
that the sender is at fault, because a bug in the script causes exceptions regardless of the values.  The
layers are therefore run again with values that are not expected to cause an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gridtrain.errors import GridtrainError, LineBroken
from gridtrain.pipeline.tensor_tree import Leaf, TensorTreeSpec, tensors_in


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
        remedy="run the same model on the same data on all workers; if they do, remove the worker of that "
        "stage",
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
