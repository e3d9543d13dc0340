"""Detects that our own loop stalled, so that peers are not timed out for messages that we did not read.

    called      deadline              called again
    --|------------|----------------------|-->       late by more than `STALL_THRESHOLD_S`: our loop stalled
                   <------- late --------->          (SIGSTOP, a closed laptop, a starved machine)

Messages that arrived meanwhile are still unread, so the caller extends its timeouts.  Compare Lifeguard's
local health (arXiv 1707.00788).
"""

from __future__ import annotations

import math

STALL_THRESHOLD_S = 0.5
"""A running loop waits for messages until its deadline and no longer, so it is never this late."""


class LoopStallDetector:
    """Compares the times of calls with the deadlines that stood before them."""

    __slots__ = ("_last_call_s",)

    def __init__(self) -> None:
        self._last_call_s = math.inf

    def may_have_stalled(self, now_s: float) -> bool:
        """A cheap test, False nearly always; only after True can `measure_stall` find a stall."""
        return now_s - self._last_call_s > STALL_THRESHOLD_S

    def measure_stall(self, deadline_s: float, now_s: float) -> float:
        """Seconds between the deadline and this call; 0.0 if below the threshold."""
        late_s = now_s - max(deadline_s, min(self._last_call_s, now_s))
        self._last_call_s = now_s
        return late_s if late_s > STALL_THRESHOLD_S else 0.0

    def record_call(self, now_s: float) -> None:
        self._last_call_s = now_s


def extend_start(start_s: float, timeout_s: float, until_s: float) -> float:
    """`start_s`, moved so that a timeout counted from it ends at `until_s` or later."""
    return max(start_s, until_s - timeout_s)
