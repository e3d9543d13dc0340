"""Determines the width of all commands' output, and wraps paragraphs."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

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
