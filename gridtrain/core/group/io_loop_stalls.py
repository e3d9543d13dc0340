"""Detects that this process's own I/O loop has stalled, so that its peers are not reported as silent.

    called      deadline              called again
    --|------------|----------------------|-->       late by more than `STALL_THRESHOLD_S`: our loop stalled
                   <------- late --------->          (SIGSTOP, a closed laptop, an overloaded machine)

Messages that arrived in the meantime are still unread, so the caller extends its timeouts.  Lifeguard's local
health is a similar mechanism (arXiv 1707.00788).
"""

from __future__ import annotations

import math

STALL_THRESHOLD_S = 0.5
"""Delay above which a late call is treated as a stall.

A running loop is never this late, because it waits only until its deadline.
"""


class LoopStallDetector:
    """Compares the time of each call by the loop with the deadline for which the loop was waiting."""

    __slots__ = ("_last_call_s",)

    def __init__(self) -> None:
        self._last_call_s = math.inf

    def may_have_stalled(self, now_s: float) -> bool:
        """Return whether so much time has passed since the last call that the loop may have stalled.

        This check is cheaper than `measure_stall`, because it does not need the deadline.
        """
        return now_s - self._last_call_s > STALL_THRESHOLD_S

    def measure_stall(self, deadline_s: float, now_s: float) -> float:
        """Record this call, and return by how many seconds it is late.

        The result is the time since the deadline, or since the last call if the deadline was earlier; it is
        0.0 if that time is at most `STALL_THRESHOLD_S`.
        """
        late_s = now_s - max(deadline_s, min(self._last_call_s, now_s))
        self._last_call_s = now_s
        return late_s if late_s > STALL_THRESHOLD_S else 0.0

    def record_call(self, now_s: float) -> None:
        self._last_call_s = now_s


def extend_start(start_s: float, timeout_s: float, until_s: float) -> float:
    """Return `start_s`, postponed if a timeout of `timeout_s` would otherwise end before `until_s`."""
    return max(start_s, until_s - timeout_s)
