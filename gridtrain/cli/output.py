"""Formats the output of all commands (width, paragraphs), and checks fields of a status before display."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 120
"""The width of a line in a file or a pipe."""

TEXT_WIDTH = 79
"""The width of paragraphs that the commands print, for a terminal of 80 columns."""


def make_console() -> Console:
    """Return a console as wide as the terminal; `PLAIN_WIDTH` wide in a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def wrap_text(text: str, indent: int = 0) -> str:
    """Wrap a paragraph to the terminal's width; in a file or a pipe it stays on one line.

    Args:
        indent: the column at which all lines but the first begin.
    """
    if not sys.stdout.isatty():
        return text
    columns = max(shutil.get_terminal_size().columns, indent + 20)
    return textwrap.fill(
        text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


# -- a status comes from workers over the network ----------------------------------------------------


def rows(place: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the objects of the list `place[name]`; [] if there is no such list."""
    found = mapping(place).get(name)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def by_rank(member: Mapping[str, Any]) -> tuple[bool, int]:
    """Return a sort key: members in rank order, then workers without a rank."""
    rank = member.get("rank")
    return (False, rank) if isinstance(rank, int) else (True, 0)


def count(value: Any) -> str:
    """Format an integer; return "-" if `value` is not an integer."""
    return str(value) if isinstance(value, int) else "-"
