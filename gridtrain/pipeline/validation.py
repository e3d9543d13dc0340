"""What can be wrong with a batch, with the number of micro-batches, and with what another stage sent.

Decides who answers for it: the script of this worker, with a `ConfigError` before anything is sent, or the
stage that sent something, with a `LineBroken` that names it.  Never computes, never sends.

    pipe.step(inputs, targets) --> check_batch        the same samples in every tensor, on every stage
    grid.pipeline(micro_batches=M) --> check_on_way   what a neighbour must hold that has not begun yet
    Stage.forward(received) raises --> judged         with other values in their place it would not have

An error alone says nothing of the sender: a bug of the user's raises too, with whatever came.  So the layers
are tried again with numbers that cannot be the cause.
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
    """Every tensor of a nest has so many rows; nothing else in it could be divided.

    Raises:
        ConfigError: it is not so.  Nothing has been sent then: `pipe.step` may be called again.
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
                remedy="tensors, numbers, texts and None, in tuples, lists and dicts: torch.as_tensor(...)",
            )

    map_tree(tree, check)


def check_in_flight(schedule: Schedule, buffers: int = 1) -> None:
    """What a stage sends before its neighbour has begun is held there: so many messages, and no more.

    Args:
        buffers: of one payload; each is a message at least, and their table another one.

    Raises:
        ConfigError: an honest stage could send more than a neighbour holds, and would be dropped for it.
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
    """Why a layer raised something, as far as what came from the stage before is concerned."""

    OWN = "not because of what came"
    NOT_FINITE = "floats that are not finite came, and nobody need be at fault: a step that overflowed"
    SENDER = "integers came that nobody can have from the batch of this step"


def find_fault_origin(
    error: Exception,
    agreed: TensorTreeSpec | None,
    received: Any,
    samples: int,
    own: Any,
    fails: Callable[[Any], bool],
) -> tuple[FaultOrigin, str]:
    """Who answers for what a layer or the loss has raised, and what of the values was the cause.

    Args:
        agreed: how `received` looks; None: nothing came, it is the first stage.
        own: this worker's copy of the same micro-batch's inputs.
        fails: whether computing with other values in the place of `received` raises something as well.
    """
    if agreed is None or not isinstance(error, LookupError | ValueError | ArithmeticError | RuntimeError):
        return FaultOrigin.OWN, ""
    no_value = isinstance(error, GridtrainError | NotImplementedError | RecursionError)
    if no_value or "memory" in str(error):  # no value that came does that; torch's allocators: RuntimeError
        return FaultOrigin.OWN, ""
    try:
        strange = _SuspectValues(agreed, received, samples, own)
        if strange.floats and not fails(strange.with_replacements(None)):
            return FaultOrigin.NOT_FINITE, strange.floats
        # 0 is an index of every table, and 1 a length where 0 is none.
        if strange.integers and not all(fails(strange.with_replacements(number)) for number in (0, 1)):
            return FaultOrigin.SENDER, strange.integers
    except RuntimeError:  # a device that has failed tells nothing any more
        pass
    return FaultOrigin.OWN, ""


def sender_fault(source: int, found: str, error: Exception) -> LineBroken:
    """For `Verdict.SENDER`: what the others are told."""
    text = f"{type(error).__name__}: {str(error)[:200]}"
    return LineBroken(
        f"what stage {source} sent cannot be computed with: {found} -> {text}", source, remedy=_REMEDY
    )


class _SuspectValues:
    """Of the values that came, what a layer may have stumbled over, in words; empty: nothing."""

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
        """What came with 0 for floats that are not finite and, if given, this number for strange integers."""
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
