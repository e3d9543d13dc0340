"""Did we sleep?  Who did not look for a while must not blame others for the silence (as Lifeguard's
local health, arXiv 1707.00788).

Decides whether the caller's own loop ran late.  Never reads a clock, and never decides who is silent.

    called      deadline              called again
    --|------------|----------------------|-->       late by more than `OVERSLEPT_S`: our loop stood still
                   <------- late --------->          (SIGSTOP, a laptop's lid, a starved machine)

What came meanwhile lies unread, so everybody gets a little more time: see the callers' `_second_chance`.
"""

from __future__ import annotations

import math

STALL_THRESHOLD_S = 0.5
"""A loop that runs is never so late: it waits for messages until the deadline, and no longer."""


class LoopStallDetector:
    """To be told of each call with the deadline that stood before it."""

    __slots__ = ("_last_call_s",)

    def __init__(self) -> None:
        self._last_call_s = math.inf

    def may_have_stalled(self, now_s: float) -> bool:
        """Cheap, and False nearly always: only then `overslept` has anything to find."""
        return now_s - self._last_call_s > STALL_THRESHOLD_S

    def measure_stall(self, deadline_s: float, now_s: float) -> float:
        """For how long the deadline had passed when we came to look; 0.0: we were awake."""
        late_s = now_s - max(deadline_s, min(self._last_call_s, now_s))
        self._last_call_s = now_s
        return late_s if late_s > STALL_THRESHOLD_S else 0.0

    def record_call(self, now_s: float) -> None:
        self._last_call_s = now_s


def extend_start(since_s: float, patience_s: float, until_s: float) -> float:
    """`since_s`, moved so that patience with it lasts until `until_s` at least."""
    return max(since_s, until_s - patience_s)
