"""Virtual time: nothing waits, and the same calls give the same history.

Actions run in the order of time, and at the same time in the order of the calls.
    call_at(3.0, a)   call_at(1.0, b)   call_at(1.0, c)       step: b (now 1.0)   step: c   step: a (now 3.0)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Seconds since the simulation began, and the actions that are due later."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def call_at(self, when_s: float, action: Callable[[], None]) -> None:
        """Run `action` at `when_s`, or if that is past as the next step."""
        heapq.heappush(self._agenda, (max(when_s, self.now_s), next(self._order), action))

    @property
    def idle(self) -> bool:
        """Whether no action is due."""
        return not self._agenda

    def step(self) -> None:
        """Advance to the next action and run it; there must be one."""
        self.now_s, _, action = heapq.heappop(self._agenda)
        action()
