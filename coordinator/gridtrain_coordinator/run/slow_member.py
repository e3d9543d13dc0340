"""Finds the member that delays the others noticeably, which the status and the web page then name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

SLOW = 1.25
"""A member delays the others if it is busy for at least `SLOW` times the median, and for at least
`NOTICEABLE_S` longer than the median."""

NOTICEABLE_S = 0.005
BUSY_METRICS = ("applying_s", "computing_s", "selecting_s")  # from a commit to the next submission


def busy_s(figures: Mapping[str, float]) -> float:
    """Return the seconds that a worker spent on its own work in its latest step; 0.0 if infinite or NaN."""
    seconds = sum(figures.get(name, 0.0) for name in BUSY_METRICS)
    return seconds if math.isfinite(seconds) else 0.0


def find_slow_member(members: Iterable[Mapping[str, Any]]) -> dict[str, str] | None:
    """Return the peer and the name of the member for which the others wait, and the reason.

    Returns None if no member stands out.

    Args:
        members: the active members, as in the status.
    """
    known = [(busy_s(member["figures"]), member) for member in members if "computing_s" in member["figures"]]
    if len(known) < 2:
        return None
    usual_s = median(seconds for seconds, _ in known)
    slowest_s, slowest = max(known, key=lambda each: each[0])
    if slowest_s < SLOW * usual_s or slowest_s - usual_s < NOTICEABLE_S:
        return None
    reason = f"is busy for {_seconds(slowest_s)} per step; the median is {_seconds(usual_s)}"
    return {"peer": slowest["peer"], "name": slowest["name"], "reason": reason}


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
