"""Virtual time: nothing waits, and the same calls give the same history.

Decides the order in which things happen: by time, and at one moment by who asked first.

    call_at(3.0, a)   call_at(1.0, b)   call_at(1.0, c)       step: b (now 1.0)   step: c   step: a (now 3.0)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Seconds since the simulation began, and what is still to happen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def call_at(self, when_s: float, action: Callable[[], None]) -> None:
        """Run `action` at `when_s`; at once, but not before this call returns, if that is past."""
        heapq.heappush(self._agenda, (max(when_s, self.now_s), next(self._order), action))

    @property
    def idle(self) -> bool:
        """Nothing is left to happen."""
        return not self._agenda

    def step(self) -> None:
        """Go to the next thing that happens, and let it happen.  `idle` must be False."""
        self.now_s, _, action = heapq.heappop(self._agenda)
        action()
