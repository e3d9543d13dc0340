"""What can be wrong with a batch, with the number of micro-batches, and with what another stage sent.

Decides who answers for it: the script of this worker, with a `ConfigError` before anything is sent, or the
stage that sent something, with a `LineBroken` that names it.  Never computes, never sends.

    pipe.step(inputs, targets) --> check_batch        the same samples in every tensor, on every stage
    grid.pipeline(micro_batches=M) --> check_on_way   what a neighbour must hold that has not begun yet
    Stage.forward(received) raises --> answered_for   floats not finite, integers that are not the batch's
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridtrain.errors import ConfigError, GridtrainError, LineBroken
from gridtrain.pipeline.trees import Spec, rebuilt
from gridtrain.protocol.attempts import MAX_HELD_MESSAGES
from gridtrain.protocol.schedule import Schedule

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

    rebuilt(tree, check)


def check_on_way(schedule: Schedule, buffers: int = 1) -> None:
    """What a stage sends before its neighbour has begun is held there: so many messages, and no more.

    Args:
        buffers: of one payload; each is a message at least, and their table another one.

    Raises:
        ConfigError: an honest stage could send more than a neighbour holds, and would be dropped for it.
    """
    most = MAX_HELD_MESSAGES // 2 // (1 + buffers)  # half of them are for everything else
    kept = max((schedule.kept(stage) for stage in range(schedule.stages - 1)), default=0)
    if kept > most:
        raise ConfigError(
            f"with {schedule.micro_batches} micro-batches and the schedule {schedule.name} {kept} of them "
            f"are on their way at once; with {buffers} tensors each a worker holds {most} for a neighbour",
            remedy=f'micro_batches={most} at most, or schedule="1f1b" with a small ahead',
        )


class answered_for:
    """Around computing with what stage `source` sent: who answers for what a layer raises.

    Floats that are not finite, and integers that nobody can have from the batch of this step, are the
    sender's affair: on an honest one the step would have failed just so.  Without such values, for an error
    that no value causes (memory), and where `gridtrain` itself says what is wrong, it is this worker's own
    error and goes on as it is.

    Args:
        agreed: how `received` looks; None: nothing came, it is the first stage.
        own: gives this worker's copy of the same micro-batch's inputs.

    Raises:
        LineBroken: `source` answers for it.
    """

    __slots__ = ("_agreed", "_own", "_received", "_samples", "_source")

    def __init__(
        self, source: int, agreed: Spec | None, received: Any, samples: int, own: Callable[[], Any]
    ) -> None:
        self._source, self._agreed, self._received = source, agreed, received
        self._samples, self._own = samples, own

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, LookupError | ValueError | ArithmeticError | RuntimeError):
            return
        no_value = isinstance(error, GridtrainError | NotImplementedError | RecursionError)
        if self._agreed is None or no_value or "memory" in str(error):
            return  # no value that came does that, and torch's allocators raise RuntimeError
        if found := _suspicious(self._agreed, self._received, self._samples, self._own()):
            text = f"{type(error).__name__}: {str(error)[:200]}"
            raise LineBroken(
                f"what stage {self._source} sent cannot be computed with: {found} -> {text}",
                self._source,
                remedy=_REMEDY,
            ) from error


def _suspicious(agreed: Spec, received: Any, samples: int, own: Any) -> str:
    """Of the values that came, what a layer may have stumbled over; empty: nothing."""
    mine: list[Tensor] = []
    rebuilt(own, lambda value: mine.append(value) if isinstance(value, Tensor) else None)
    try:
        for leaf, value in agreed.values(received, samples):
            tensor = torch.as_tensor(value).detach().cpu()
            if tensor.is_floating_point() or tensor.is_complex():
                if not bool(torch.isfinite(tensor).all()):
                    return f"values that are not finite in {leaf}"
            elif tensor.numel() and not any(_same(tensor, other) for other in mine):
                return f"integers from {int(tensor.min())} to {int(tensor.max())} in {leaf}"
    except RuntimeError:  # a device that has failed tells nothing any more
        return ""
    return ""


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other.detach().cpu())
