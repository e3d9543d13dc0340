"""Interface of a target.

`run(data)` runs one input.  It returns True if the product accepted it, False if it refused it in the one
allowed way; any exception is a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


class Broken(AssertionError):
    """An invariant is violated."""


def must(holds: bool, says: str) -> None:
    if not holds:
        raise Broken(says)


@dataclass(frozen=True)
class Target:
    """A part of the product to fuzz, and its bounds.

    Attributes:
        valid: makes an input as an honest peer would send it, or a schedule that advances.
        change: damages an input but keeps its structure; None: only bytes are damaged.
        watched: modules whose lines count as reached.
        cpu_s, memory_bytes: bounds for one input.
    """

    name: str
    what: str
    run: Callable[[bytes], bool]
    valid: Callable[[Random], bytes]
    watched: tuple[str, ...]
    change: Callable[[bytes, Random], bytes] | None = None
    tokens: tuple[bytes, ...] = field(default=())
    max_bytes: int = 4096
    cpu_s: float = 0.25
    memory_bytes: int = 32 << 20
