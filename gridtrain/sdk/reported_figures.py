"""Numbers and names that a script gives to the group, held to what can travel on the line that gives them.

Decides nothing about bounds: those are the messages' (`gridtrain.core.messages`).  Sends nothing.
"""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Mapping

import torch

from gridtrain._version import __version__
from gridtrain.config import JoinConfig
from gridtrain.core.messages import ADDRESS, NAME, FieldError, WorkerInfo
from gridtrain.core.messages.declaration import TextField
from gridtrain.errors import ConfigError

log = logging.getLogger("gridtrain")

MAX_FIGURES = 48
"""Names that one script may report; a beat has room for 64, the others are gridtrain's own."""


class ReportedFigures:
    """What `Grid.report` is given, made fit for a beat."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._warned = False

    def filter_valid(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Those that are finite; the first one that is not is logged.

        Raises `ConfigError` for a name that cannot travel, and for more than `MAX_FIGURES` different ones.
        """
        for name in figures:
            _check_text(NAME, "the name of a figure", name)
        if len(names := self._names.union(figures)) > MAX_FIGURES:
            raise ConfigError(
                f"{len(names)} different figures were reported, at most {MAX_FIGURES} are shown",
                remedy="report the few that people look at; names must not change from step to step",
            )
        self._names = names
        values = {name: float(value) for name, value in figures.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values) and not self._warned:
            self._warned = True
            name = next(name for name in values if name not in finite)
            log.warning(
                "%s=%s is left out of what others see, as every figure that is not finite", name, values[name]
            )
        return finite


def describe_machine(model: torch.nn.Module) -> WorkerInfo:
    """What this machine is, for the run's owner: device, its memory, versions."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    texts = {"device": f"CPU, {os.cpu_count() or 1} cores"}
    if device.type == "cuda":
        texts["device"] = torch.cuda.get_device_name(device)
        texts["memory"] = f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
    elif device.type != "cpu":
        texts["device"] = device.type
    texts |= {"torch": torch.__version__, "python": platform.python_version(), "gridtrain": __version__}
    return WorkerInfo(tuple((name, text[:128]) for name, text in texts.items()))


def check_names(config: JoinConfig) -> None:
    """Raise `ConfigError` for a name or an address with which nobody could join."""
    _check_text(NAME, "the name of the run", config.run)
    _check_text(NAME, "the name of this worker", config.name)
    _check_text(ADDRESS, "the advertised address", config.advertise)


def _check_text(kind: TextField, what: str, text: str) -> None:
    try:
        kind.pack(text)
    except FieldError as error:
        raise ConfigError(f"{what} is {error.problem}", remedy="choose a shorter, plain one") from None
