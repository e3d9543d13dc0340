"""Selects the slow worker that delays the others long enough to be named by the status and the web page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

SLOW = 1.25
"""A worker delays the others if its compute time is at least this many times the median."""

NOTICEABLE_S = 0.005


def find_slow_member(busy_s: Mapping[str, float | None]) -> tuple[str, str] | None:
    """Return the worker for which the others wait, and why; None if no worker stands out.

    Args:
        busy_s: by worker, the time that it spent on its own work in its latest step, in seconds.
    """
    known = {
        who: seconds for who, seconds in busy_s.items() if seconds is not None and math.isfinite(seconds)
    }
    if len(known) < 2:
        return None
    usual_s = median(known.values())
    slowest = max(known, key=lambda who: known[who])
    if known[slowest] < SLOW * usual_s or known[slowest] - usual_s < NOTICEABLE_S:
        return None
    return slowest, f"computes {_seconds(known[slowest])} per step; the median is {_seconds(usual_s)}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
