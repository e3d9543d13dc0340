"""Checks figures and names that a script gives to the group, against the bounds of the messages that have
them."""

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
"""Names that one script may report; a heartbeat has room for 64, the others are gridtrain's own."""


class ReportedFigures:
    """The figures of `Grid.report`, checked for a heartbeat."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._warned = False

    def filter_valid(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The figures that are finite; the first one that is not is logged.

        Raises `ConfigError` for a name that cannot be sent, and for more than `MAX_FIGURES` different ones.
        """
        for name in figures:
            _check_text(NAME, "the name of a figure", name)
        if len(names := self._names.union(figures)) > MAX_FIGURES:
            raise ConfigError(
                f"{len(names)} different figures were reported; at most {MAX_FIGURES} are shown",
                remedy="report the few that people need; names must not change from step to step",
            )
        self._names = names
        values = {name: float(value) for name, value in figures.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values) and not self._warned:
            self._warned = True
            name = next(name for name in values if name not in finite)
            log.warning("%s=%s is not reported to the group, because it is not finite", name, values[name])
        return finite


def check_names(config: JoinConfig) -> None:
    """Raise `ConfigError` for a name or an address that cannot be sent."""
    _check_text(NAME, "the name of the run", config.run)
    _check_text(NAME, "the name of this worker", config.name)
    _check_text(ADDRESS, "the advertised address", config.advertise)


def _check_text(kind: TextField, what: str, text: str) -> None:
    try:
        kind.pack(text)
    except FieldError as error:
        raise ConfigError(f"{what} is {error.problem}", remedy="choose a shorter, plain one") from None
