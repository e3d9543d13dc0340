"""Keeps the points of the web page's curves in bounded memory by merging neighbouring points.

recent   the last 600 points
whole    at most 1,440 points, each the mean of `stride` points; when this number is reached, neighbouring
         points are merged and the stride doubles, so that a run of any length fits
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

RECENT_POINTS = 600
WHOLE_POINTS = 1440  # even, because neighbours are merged in pairs


@dataclass(frozen=True, slots=True)
class Point:
    """The values at one time; a value is None if it is not known.

    Attributes:
        at_s: the wall-clock time in seconds.
        bytes: bytes that all workers have sent in exchanges since this coordinator started.
        dense_bytes: bytes that a dense ring of float32 would have sent for the same steps.
    """

    at_s: float
    step: float | None
    bytes: float | None
    dense_bytes: float | None
    loss: float | None
    steps_per_s: float | None
    samples_per_s: float | None
    sent_Bps: float | None

    def row(self) -> list[float | None]:
        """Return the values in the order of `COLUMNS`, rounded to plotting precision."""
        return [shortened(getattr(self, name)) for name in COLUMNS]


COLUMNS = tuple(field.name for field in fields(Point))
_AVERAGED = ("loss", "steps_per_s", "samples_per_s", "sent_Bps")


class History:
    """The points of one run.

    Attributes:
        stride: the number of added points that are merged into one point of the whole run.
    """

    def __init__(self) -> None:
        self.recent: deque[Point] = deque(maxlen=RECENT_POINTS)
        self._thinned: list[Point] = []
        self._open: list[Point] = []  # fewer than `stride` points, not yet merged
        self.stride = 1

    def add(self, point: Point) -> None:
        self.recent.append(point)
        self._open.append(point)
        if len(self._open) < self.stride:
            return
        self._thinned.append(mean(self._open))
        self._open.clear()
        if len(self._thinned) >= WHOLE_POINTS:
            self._thinned = [mean(self._thinned[i : i + 2]) for i in range(0, len(self._thinned), 2)]
            self.stride *= 2

    def all_points(self) -> list[Point]:
        """Return the points of the whole run, from the first to the latest."""
        return [*self._thinned, *([mean(self._open)] if self._open else [])]


def mean(points: Sequence[Point]) -> Point:
    """Merge points: take the time, step and totals from the last point, and average the other values."""

    def of(name: str) -> float | None:
        known = [value for point in points if (value := getattr(point, name)) is not None]
        return sum(known) / len(known) if known else None

    averages: dict[str, Any] = {name: of(name) for name in _AVERAGED}
    return replace(points[-1], **averages)


def shortened(value: float | None) -> float | None:
    """Round a value, to send fewer bytes.

    Whole numbers become integers; other numbers keep three decimal places from 1000 upwards, and six
    significant digits below 1000.
    """
    if value is None or isinstance(value, int):
        return value
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return round(value, 3) if abs(value) >= 1000 else float(f"{value:.6g}")
