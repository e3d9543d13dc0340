"""Makes text from workers safe to display: bounded, without control characters or bidirectional overrides.

Markup needs no escaping, because the page writes text nodes only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gridtrain.quantities import make_printable

MAX_CHARACTERS = 400
MAX_ITEMS = 64


def text(value: object, most: int = MAX_CHARACTERS) -> str:
    """Return `value` as one line of at most `most` characters."""
    raw = str(value)
    return make_printable(raw if len(raw) <= most else raw[: most - 1] + "…")


def number(value: object) -> float | None:
    """Return `value` if it is a finite number, else None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type,return-value]


def tree(value: object, depth: int = 4) -> Any:
    """Return a JSON-serializable copy with sanitized strings and bounded lists and mappings.

    Lists and mappings at the depth `depth` are converted to text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, Mapping) and depth:
        some = list(value.items())[:MAX_ITEMS]
        return {text(name, 64): tree(each, depth - 1) for name, each in some}
    if isinstance(value, list | tuple) and depth:
        return [tree(each, depth - 1) for each in value[:MAX_ITEMS]]
    return text(value)
