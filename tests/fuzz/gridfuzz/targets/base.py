"""What a target is.

`run(data)` feeds one input.  It returns True if the product accepted it, False if it refused it in the
one way that is allowed, and raises for everything else: that is a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


class Broken(AssertionError):
    """Something that must always hold does not."""


def must(holds: bool, says: str) -> None:
    if not holds:
        raise Broken(says)


@dataclass(frozen=True)
class Target:
    """See the module's text.

    Attributes:
        valid: an input such as an honest peer causes, or a schedule that gets somewhere.
        change: damages an input in a way that keeps its structure; None: only bytes are damaged.
        watched: modules whose lines count as its reach.
        cpu_s, memory_bytes: the most that one input may take.
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
