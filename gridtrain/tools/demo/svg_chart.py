"""Draws line charts as SVG (colours, axes, ticks, labels), without a plotting library.

A `ChartPanel` has lines of (x, y) points, notes at points, and at most one horizontal reference line.

    +--------------------------------+   lines are labelled at their ends, not in a legend;
    |  panel 1        panel 2        |   each label is placed where it covers the least of the
    |  y |\\__ dense   y |\\__ dense   |   lines and of the other labels
    |    +-----x        +-----x      |
    +--------------------------------+
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gridtrain.core.planning.svg_elements import FAINT, FONT_PX, svg_page, svg_text

COLOURS = ("#0072B2", "#D55E00", "#007A5A", "#8A4F7D")
"""A palette after Okabe and Ito: distinguishable with any colour vision, and dark enough for text on
white."""

GRID = "#E4E4E4"
PANEL_WIDTH, PANEL_HEIGHT = 430.0, 300.0
LEFT, TOP, BETWEEN, RIGHT, BOTTOM = 66.0, 92.0, 84.0, 30.0, 62.0
LETTER_PX = 0.62 * FONT_PX  # mean advance of a character in a wide bold sans-serif

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A labelled polyline.

    Attributes:
        points: the connected points, in data units.
        notes: the labels beside points, as (index of the point, text).
        dots: further points, which are not connected.
    """

    label: str
    points: tuple[Point, ...]
    colour: str
    notes: tuple[tuple[int, str], ...] = ()
    dots: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class ChartPanel:
    """One pair of axes with its lines; `reference_line` is the (y, text) of a dashed horizontal line."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[ChartLine, ...]
    reference_line: tuple[float, str] | None = None
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps data units to pixels along one axis."""

    low: float
    high: float
    start_px: float
    stop_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start_px + (value - low) / (high - low) * (self.stop_px - self.start_px)


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about six multiples of 1, 2 or 5 times a power of ten that enclose [low, high].

    nice_ticks(2.1, 3.9) == [2.0, 2.5, 3.0, 3.5, 4.0]
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda candidate: abs(math.log(candidate / raw)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks at 1, 2 and 5 times powers of ten that enclose [low, high]; over more than 3 decades, at
    powers of ten only.  Raises `ValueError` unless `low` is above 0."""
    if low <= 0.0:
        raise ValueError(f"a logarithmic axis cannot show {low}; it must be > 0")
    high = max(high, low)
    mantissas = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [m * 10.0**d for d in decades for m in mantissas]
    below = [t for t in every if t <= low * (1 + 1e-9)]
    above = [t for t in every if t >= high * (1 - 1e-9)]
    first, last = below[-1] if below else every[0], above[0] if above else every[-1]
    if first == last:
        last = every[every.index(first) + 1]
    return [t for t in every if first <= t <= last]


def draw_chart(title: str, subtitle: str, panels: Sequence[ChartPanel]) -> str:
    """Return the whole chart as SVG text."""
    width = LEFT + len(panels) * PANEL_WIDTH + (len(panels) - 1) * BETWEEN + RIGHT
    height = TOP + PANEL_HEIGHT + BOTTOM
    parts: list[str] = []
    for position, panel in enumerate(panels):
        parts += _PanelRenderer(panel, LEFT + position * (PANEL_WIDTH + BETWEEN)).draw()
    return svg_page(title, title, subtitle, LEFT, (width, height), parts)


class _PanelRenderer:
    """Draws one panel, and records which space is occupied, so that labels overlap as little as possible."""

    def __init__(self, panel: ChartPanel, left: float) -> None:
        self.panel, self.left = panel, left
        self.occupied: list[Box] = []
        points = [point for line in panel.lines for point in (*line.points, *line.dots)]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        ys += [panel.reference_line[0]] if panel.reference_line else []
        low_x = min(xs) if panel.log_x else 0.0
        self.x_ticks = log_ticks(low_x, max(xs)) if panel.log_x else nice_ticks(0.0, max(xs))
        self.y_ticks = log_ticks(min(ys), max(ys)) if panel.log_y else nice_ticks(min(ys), max(ys))
        self.x = AxisScale(self.x_ticks[0], self.x_ticks[-1], left, left + PANEL_WIDTH, panel.log_x)
        self.y = AxisScale(self.y_ticks[0], self.y_ticks[-1], TOP + PANEL_HEIGHT, TOP, panel.log_y)

    def draw(self) -> list[str]:
        parts = self._axes()
        curves = [[(self.x(x), self.y(y)) for x, y in line.points] for line in self.panel.lines]
        if self.panel.reference_line:
            parts += self._draw_reference_line(curves)
        for line, curve in zip(self.panel.lines, curves, strict=True):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in curve)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.2" '
                'stroke-linejoin="round" stroke-linecap="round"/>'
            )
        parts += [_dot(self.x(x), self.y(y), line.colour) for line in self.panel.lines for x, y in line.dots]
        for line, curve in zip(self.panel.lines, curves, strict=True):
            for index, note in line.notes:
                x, y = curve[index]
                parts.append(_dot(x, y, line.colour))
                self.occupied.append((x - 6, y - 6, x + 6, y + 6))
                parts.append(self._place_label(_around((x, y), note), note, line.colour, "normal", curves))
        for line, curve in zip(self.panel.lines, curves, strict=True):
            parts.append(
                self._place_label(_along(curve, line.label), line.label, line.colour, "bold", curves)
            )
        return parts

    def _axes(self) -> list[str]:
        panel, right, bottom = self.panel, self.left + PANEL_WIDTH, TOP + PANEL_HEIGHT
        parts = [svg_text(self.left, TOP - 16, panel.title, weight="bold")]
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(_rule(self.left, y, right, y, GRID))
            parts.append(svg_text(self.left - 8, y + 4, _number(tick), anchor="end", colour=FAINT))
        for tick in self.x_ticks:
            x = self.x(tick)
            parts.append(_rule(x, bottom, x, bottom + 5, FAINT))
            parts.append(svg_text(x, bottom + 20, _number(tick), anchor="middle", colour=FAINT))
        parts.append(_rule(self.left, bottom, right, bottom, FAINT))
        parts.append(svg_text(self.left + PANEL_WIDTH / 2, bottom + 44, panel.x_label, anchor="middle"))
        middle_y = TOP + PANEL_HEIGHT / 2
        turn = f'transform="rotate(-90 {self.left - 46:g} {middle_y:g})"'
        parts.append(svg_text(self.left - 46, middle_y, panel.y_label, anchor="middle", extra=turn))
        return parts

    def _draw_reference_line(self, curves: list[list[Point]]) -> list[str]:
        assert self.panel.reference_line is not None
        value, text = self.panel.reference_line
        y, right = self.y(value), self.left + PANEL_WIDTH
        self.occupied.append((self.left, y - 2, right, y + 2))
        rule = _rule(self.left, y, right, y, FAINT, dash="5 4")
        spots = [(x, y + dy) for dy in (-7.0, 16.0) for x in (self.left + 6, self.left + PANEL_WIDTH * 0.35)]
        spots += [(right - 6 - _width(text), y + dy) for dy in (16.0, -7.0)]
        return [rule, self._place_label(spots, text, FAINT, "normal", curves)]

    def _place_label(
        self, spots: list[Point], text: str, colour: str, weight: str, curves: list[list[Point]]
    ) -> str:
        """Return the label's SVG element, placed where it covers the least.

        Args:
            spots: the possible left ends of the label's baseline, the preferred ones first.
        """

        def cost(spot: Point) -> int:
            return self._overlap_area(_box(spot, text), curves)

        best = min(spots, key=cost)  # the first position if several cost the same
        self.occupied.append(_box(best, text))
        return svg_text(*best, text, colour=colour, weight=weight, halo=True)

    def _overlap_area(self, box: Box, curves: list[list[Point]]) -> int:
        """Return the cost of covering other marks, and of leaving the panel; 0 for a free position."""
        left, top, right, bottom = box
        outside = left < self.left or right > self.left + PANEL_WIDTH + RIGHT - 4
        outside = outside or top < TOP - 12 or bottom > TOP + PANEL_HEIGHT
        hits = sum(
            left < b_right and b_left < right and top < b_bottom and b_top < bottom
            for b_left, b_top, b_right, b_bottom in self.occupied
        )
        on_lines = sum(left <= x <= right and top <= y <= bottom for c in curves for x, y in _dense(c))
        return 1000 * outside + 60 * hits + on_lines


def _dot(x: float, y: float, colour: str) -> str:
    edge = 'stroke="#FFFFFF" stroke-width="1.5"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" {edge}/>'


def _around(at: Point, text: str) -> list[Point]:
    """Return possible positions of a note: below the point, above it, beside it, then farther away."""
    (x, y), width = at, _width(text)
    close = [(x - width / 2, y + 21), (x - width / 2, y - 11), (x + 9, y + 18), (x + 9, y - 10)]
    return [
        *close,
        (x - width - 9, y + 20),
        (x - width - 9, y - 10),
        (x + 9, y + 34),
        (x - width - 9, y + 34),
    ]


def _along(curve: list[Point], text: str) -> list[Point]:
    """Return possible positions of a line's label: at the end of the line, then beside the line farther
    back."""
    (x, y), width = curve[-1], _width(text)
    spots = [(x + 9, y + 4.5), (x - width / 2, y - 11), (x - width / 2, y + 21), (x + 4, y + 21)]
    for share in (0.75, 0.6, 0.45, 0.3, 0.15):
        x, y = curve[int(share * (len(curve) - 1))]
        spots += [(x + 10, y), (x - width - 10, y + 4.5), (x + 10, y - 12)]
    return spots


def _dense(curve: list[Point]) -> list[Point]:
    """Return the curve's points, and enough points between them to leave gaps of about 5 px at most."""
    points = list(curve)
    for (x0, y0), (x1, y1) in pairwise(curve):
        pieces = int(math.hypot(x1 - x0, y1 - y0) / 5) + 1
        points += [(x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces) for i in range(1, pieces)]
    return points


def _width(text: str) -> float:
    return len(text) * LETTER_PX


def _box(spot: Point, text: str) -> Box:
    x, y = spot
    return (x - 2, y - FONT_PX, x + _width(text) + 2, y + 4)


def _number(value: float) -> str:
    return f"{value:,.6g}"


def _rule(x0: float, y0: float, x1: float, y1: float, colour: str, *, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}" '
        f'stroke-width="1.2"{dashes}/>'
    )
