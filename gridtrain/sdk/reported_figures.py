"""Checks the figures that a script reports (`grid.report`): their number, names and values."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from gridtrain.config import JoinConfig
from gridtrain.core.messages import ADDRESS, NAME, FieldError
from gridtrain.core.messages.declaration import TextField
from gridtrain.errors import ConfigError

log = logging.getLogger("gridtrain")

MAX_FIGURES = 48
"""The maximum number of figures that a script may report; a heartbeat has room for 64, and gridtrain uses the
rest."""


class ReportedFigures:
    """Checks the figures of `Grid.report` before they are sent in heartbeats."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._warned = False

    def filter_valid(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the finite figures; log a warning the first time that a figure is not finite.

        Raises `ConfigError` if a name cannot be sent, if a value is not a number, or if more than
        `MAX_FIGURES` distinct names have been reported.
        """
        for name in figures:
            check_text(NAME, "the name of a figure", name)
        if len(names := self._names.union(figures)) > MAX_FIGURES:
            raise ConfigError(
                f"{len(names)} distinct figures were reported; the maximum is {MAX_FIGURES}",
                remedy="report fewer figures, under names that do not change from step to step",
            )
        self._names = names
        values = {name: _to_float(name, value) for name, value in figures.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values) and not self._warned:
            self._warned = True
            name = next(name for name in values if name not in finite)
            log.warning("%s=%s is not reported to the group, because it is not finite", name, values[name])
        return finite


def check_names(config: JoinConfig) -> None:
    """Raise `ConfigError` if the run's name, this worker's name or its advertised address cannot be sent."""
    check_text(NAME, "the name of the run", config.run)
    check_text(NAME, "the name of this worker", config.name)
    check_text(ADDRESS, "the advertised address", config.advertise)


def _to_float(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor with several elements
        raise ConfigError(
            f"the figure {name} is {value!r:.80}; it must be a number", remedy=f"call grid.report({name}=0.5)"
        ) from None


def check_text(kind: TextField, what: str, text: str) -> None:
    """Raise `ConfigError` if `text`, which the error calls `what`, cannot be sent in a field of this kind."""
    try:
        kind.pack(text)
    except FieldError as error:
        raise ConfigError(f"{what} is {error.problem}", remedy="choose a shorter, plain string") from None
