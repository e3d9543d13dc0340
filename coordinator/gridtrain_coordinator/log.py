"""Writes the coordinator's log, one line per event: coloured text on a terminal and JSON lines elsewhere.

    terminal    12:00:03  joined      name=worker-7f3a peer=0a1b2c3d4e5f
    elsewhere   {"ts": "2025-01-01T12:00:03.120+00:00", "level": "info", "event": "joined", "fields": {...}}

Some field values come from the network, so control characters are escaped; otherwise a worker's name could
move the cursor of the reader's terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, TextIO

from gridtrain.quantities import format_fields
from gridtrain.tools.log_output import LineWriter, json_line
from gridtrain_coordinator.run.events import Log as Log

_COLOURS = {"info": "36", "warning": "33", "error": "31;1"}


def silent(level: str, event: str, fields: Mapping[str, Any]) -> None:
    """Discard the event; used by a coordinator embedded in a program that writes its own output."""


def to_both(one: Log, other: Log) -> Log:
    """Return a log that passes each event to both logs."""

    def log(level: str, event: str, fields: Mapping[str, Any]) -> None:
        one(level, event, fields)
        other(level, event, fields)

    return log


def log_to(stream: TextIO, log_format: str = "") -> Log:
    """Return a log that writes to `stream`.

    Args:
        log_format: "text" or "json"; "" means text if `stream` is a terminal, otherwise JSON.
    """
    return log_of(LineWriter(stream, log_format))


def log_of(writer: LineWriter) -> Log:
    """Return a log that writes with `writer`, in its format."""
    format_event = json_line
    if not writer.is_json:
        coloured = writer.stream.isatty() and "NO_COLOR" not in os.environ
        format_event = partial(_as_text, coloured=coloured)

    def log(level: str, event: str, fields: Mapping[str, Any]) -> None:
        writer.write(format_event(level, event, fields) + "\n")

    return log


def _as_text(level: str, event: str, fields: Mapping[str, Any], *, coloured: bool) -> str:
    values = " ".join(f"{name}={_quote(text)}" for name, text in format_fields(fields).items())
    word = f"{event:<15}"
    if coloured:
        word = f"\x1b[{_COLOURS.get(level, '0')}m{word}\x1b[0m"
    return f"{datetime.now():%H:%M:%S}  {word} {values}".rstrip()


def _quote(text: str) -> str:
    """Quote and escape a value unless it is a single printable word."""
    plain = text.isprintable() and text and not any(letter in text for letter in ' "=')
    return text if plain else json.dumps(text)
