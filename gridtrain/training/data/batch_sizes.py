"""Check and describe arguments of `Grid`: batch sizes, numbers, an optimizer.

batch_size=32, accumulate=2, H = 4 calls a step      --> batch_size: 256 samples of each step
global_batch_size=512, max_batch_size=64             --> global_batch_size, at most `batch_size` here
AdamW(lr=0.1, weight_decay=0.5), two groups          --> "AdamW(lr=0.1, ...) and 1 more group, ..."
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint import serialization
from gridtrain.training.data import readers

MAX_STEP_SAMPLES = 2**31 - 1
"""The largest number of samples of a worker, and of all workers, in a step: a count of the protocol."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The number of samples in a step, either per worker or of all workers together, from the arguments of
    `Grid.batches`."""

    per_worker: int | None
    per_step: int | None
    max_per_worker: int | None = None
    accumulate: int = 1
    calls_per_step: int = 1  # calls of `optimizer.step` in a step of the run

    @property
    def global_batch_size(self) -> int | None:
        """The value of `Setup.global_batch_size`."""
        return None if self.per_step is None else self.per_step * self.calls_per_step

    @property
    def batch_size(self) -> int:
        """The value of `Setup.batch_size`: the number of samples that this worker processes in a step, or an
        upper limit on it; 0 if there is no limit."""
        return (
            ((self.per_worker if self.per_step is None else self.max_per_worker) or 0)
            * self.accumulate
            * self.calls_per_step
        )

    def check(self) -> None:
        """Raise `ConfigError` for sizes that contradict each other or are not positive."""
        if (self.per_worker is None) == (self.per_step is None):
            raise ConfigError(
                f"batch_size={self.per_worker}, global_batch_size={self.per_step}; pass exactly one of them",
                remedy="pass batch_size=32 for 32 samples on each worker",
            )
        if self.max_per_worker is not None and self.per_step is None:
            raise ConfigError(
                f"max_batch_size={self.max_per_worker} was given without global_batch_size, "
                "so this worker's batch size is fixed",
                remedy="remove max_batch_size=",
            )
        named = {
            "batch_size": self.per_worker,
            "global_batch_size": self.per_step,
            "max_batch_size": self.max_per_worker,
        }
        for name, value in named.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be >= 1", remedy="try batch_size=32")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}; it must be >= 1", remedy="try accumulate=1")
        samples = max(self.batch_size, self.global_batch_size or 0)
        if samples > MAX_STEP_SAMPLES:
            raise ConfigError(
                f"a step would have {samples} samples; at most {MAX_STEP_SAMPLES} are possible",
                remedy="use smaller batches, or fewer of them in a step",
            )


def check_kinds(optimizer: object, model: object) -> None:
    """Raise `ConfigError` unless these are an optimizer and a model; they are easily swapped."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise ConfigError(
            f"grid.optimizer was given a {type(optimizer).__name__} and a {type(model).__name__}; it needs a "
            "torch.optim.Optimizer and a torch.nn.Module",
            remedy="call grid.optimizer(optimizer, model, ...)",
        )


def to_intervals(**named: Any) -> list[int]:
    """Return numbers of steps as plain ints; 0 stands for never.  Raises `ConfigError` for other values."""
    intervals = []
    for name, steps in zip(named, to_ints(**named), strict=True):
        if steps is None or steps < 0:
            raise ConfigError(
                f"{name} is {steps}; it must be a number of steps, or 0 for never", remedy=f"try {name}=500"
            )
        intervals.append(steps)
    return intervals


def unsupported_scaler_error() -> ConfigError:
    return ConfigError(
        "grid.scaler() was called with a pipeline, whose pipe.step runs backward without a scale",
        remedy="train in float32 or bfloat16, which need no scale; use wire='fp16' or 'bf16' for activations",
    )


def largest_state_bytes(model: nn.Module) -> int:
    """Return an upper bound for the bytes of a state: optimizers have two or three copies of the model, and
    each weight average has one more."""
    tensors = (*model.parameters(), *model.buffers())
    return (64 << 20) + 16 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_readers(dataset: Any, num_workers: int, prefetch_factor: int) -> None:
    """Raise `ConfigError` if `num_workers` or `prefetch_factor` is not valid for the data set."""
    most = 1 if readers.is_iterable(dataset) else None
    if num_workers < 0 or (most is not None and num_workers > most):
        bound = "0 or 1 for an iterable data set" if most else ">= 0"
        raise ConfigError(f"num_workers is {num_workers}; it must be {bound}", remedy="try num_workers=1")
    if prefetch_factor < 1:
        raise ConfigError(
            f"prefetch_factor is {prefetch_factor}; it must be >= 1", remedy="try prefetch_factor=2"
        )


def describe_optimizer(inner: torch.optim.Optimizer) -> str:
    """Return a description of the optimizer for comparison between workers: its class, and the options of the
    first group that are not defaults."""
    defaults = {name: p.default for name, p in inspect.signature(type(inner)).parameters.items()}
    first, *others = inner.param_groups
    options = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in first.items()}
    shown = ", ".join(
        f"{name}={value}"
        for name, value in sorted(options.items())
        if name == "lr" or (isinstance(value, int | float | str | tuple) and value != defaults.get(name))
    )
    text, settings = f"{type(inner).__name__}({shown})", serialization.hyperparameter_digest(inner).hex()[:12]
    if others:
        text += f" and {len(others)} more group{'s' * (len(others) > 1)}, settings {settings}"
    return text if len(text) <= 400 else f"{text[:360]}... {settings}"


def to_ints(**named: Any) -> list[Any]:
    """Return the values as plain ints, because messages cannot contain numpy integers; None stays None.

    Raises `ConfigError` for values such as 1e3, 1.5 or "32", and for a seed or `accumulate` that is None.
    """
    plain = []
    for name, value in named.items():
        optional = name not in ("accumulate", "seed")
        try:
            plain.append(None if value is None and optional else operator.index(value))
        except TypeError:
            raise ConfigError(
                f"{name} is {value!r}; it must be a whole number", remedy=f"pass an int: {name}=32"
            ) from None
    return plain


def parse_int(name: str, text: str) -> int:
    """Parse a whole number >= 0; raise `ConfigError` for any other string."""
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; it must be a whole number >= 0", remedy=f"try {name}=500")
    return int(text)
