"""Checks and converts the arguments that methods of `Grid` share, and the settings for checkpoints."""

from __future__ import annotations

import logging
import operator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gridtrain.config import JoinConfig
from gridtrain.errors import ConfigError, describe_type
from gridtrain.runtime.client.worker_defaults import run_folder_name, state_directory
from gridtrain.training.data import readers
from gridtrain.training.data.fetch_meter import MAX_READERS
from gridtrain.training.model_state import ModelStateOptions

log = logging.getLogger("gridtrain")


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
                f"{name} is {value!r}; it must be an integer", remedy=f"pass an int: {name}=32"
            ) from None
    return plain


def check_kinds(optimizer: object, model: object) -> None:
    """Raise `ConfigError` unless the arguments are an optimizer and a model, in this order."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise ConfigError(
            f"grid.optimizer was given {describe_type(optimizer)} and {describe_type(model)}; it needs a "
            "torch.optim.Optimizer and a torch.nn.Module",
            remedy="call grid.optimizer(optimizer, model, ...)",
        )


def to_intervals(**named: Any) -> list[int]:
    """Return numbers of steps (0 stands for never) as plain ints; raise `ConfigError` for other values."""
    intervals = []
    for name, steps in zip(named, to_ints(**named), strict=True):
        if steps is None or steps < 0:
            raise ConfigError(
                f"{name} is {steps}; it must be a number of steps, or 0 for never", remedy=f"try {name}=500"
            )
        intervals.append(steps)
    return intervals


def check_readers(dataset: Any, num_workers: int, prefetch_factor: int) -> None:
    """Raise `ConfigError` if `num_workers` or `prefetch_factor` is not valid for the data set."""
    most = 1 if readers.is_iterable(dataset) else MAX_READERS
    if not 0 <= num_workers <= most:
        bound = "0 or 1 for an iterable data set" if most == 1 else f"from 0 to {most}"
        raise ConfigError(f"num_workers is {num_workers}; it must be {bound}", remedy="try num_workers=1")
    if prefetch_factor < 1:
        raise ConfigError(
            f"prefetch_factor is {prefetch_factor}; it must be >= 1", remedy="try prefetch_factor=2"
        )


def unsupported_scaler_error() -> ConfigError:
    return ConfigError(
        "grid.scaler() was called with a pipeline, whose pipe.step runs the backward pass without a scale",
        remedy="train in float32 or bfloat16, which need no scale; use wire='fp16' or 'bf16' for activations",
    )


def state_options(config: JoinConfig) -> ModelStateOptions:
    """Return the options for checkpoints and for the residual that a leaving worker sends.

    By default, each worker on a machine has its own folder, in a folder named after the coordinator's key.
    Raises `ConfigError` if a number in `config` is not an integer >= 0.
    """
    folder = Path(config.state_dir or "")
    if not config.state_dir:
        worker = run_folder_name(Path(config.identity).stem or config.name)
        folder = state_directory(config.run) / "checkpoints" / config.coordinator_key[:16] / worker
    return ModelStateOptions(
        folder,
        every=_parse_int("checkpoint_every", config.checkpoint_every),
        keep=_parse_int("checkpoint_keep", config.checkpoint_keep),
        url=config.checkpoints,
        max_transfer_bytes=_parse_int("handover_mib", config.handover_mib) << 20,
        is_chosen=bool(config.state_dir),
        saves_on_leave=config.state_dir is not None,
    )


def _parse_int(name: str, text: str) -> int:
    """Parse an integer >= 0; raise `ConfigError` for any other string."""
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; it must be an integer >= 0", remedy=f"try {name}=16")
    return int(text)
