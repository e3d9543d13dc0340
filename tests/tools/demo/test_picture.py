"""The chart: readable ticks, and no text that leaves the picture or covers another."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridtrain.tools.demo.svg_chart import (
    COLOURS,
    LETTER_PX,
    ChartLine,
    ChartPanel,
    draw_chart,
    log_ticks,
    nice_ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_ticks_enclose_the_data() -> None:
    assert nice_ticks(2.1, 3.9) == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert nice_ticks(0.0, 81.3) == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    assert nice_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert log_ticks(0.35, 181.0) == [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
    assert log_ticks(0.004, 900.0) == [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_any_range_gets_a_few_ticks_around_it(low: float, length: float) -> None:
    ticks = nice_ticks(low, low + length)

    assert 2 <= len(ticks) <= 12, ticks
    assert ticks[0] <= low + 1e-6 * length and ticks[-1] >= low + length - 1e-6 * length, ticks
    assert ticks == sorted(set(ticks)), ticks


@given(st.floats(1e-6, 1e6), st.floats(1, 1e6))
def test_any_logarithmic_range_is_enclosed(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)

    assert 2 <= len(ticks) <= 12, ticks
    assert ticks[0] <= low * 1.001 and ticks[-1] >= low * factor * 0.999, ticks


def test_a_logarithmic_axis_refuses_zero() -> None:
    with pytest.raises(ValueError, match="cannot show 0"):
        log_ticks(0.0, 1.0)


def falling(label: str, colour: str, seconds: float, floor: float, note: str) -> ChartLine:
    points = tuple((seconds * i / 30, floor + 1.7 * math.exp(-i / 10)) for i in range(1, 31))
    return ChartLine(label, points, colour, ((25, note),))


def demo_picture() -> str:
    lines = (
        falling("dense ring", COLOURS[0], 80.0, 2.4, "80 s"),
        falling("gTop-k, density 0.05", COLOURS[1], 25.0, 2.1, "13 s"),
        falling("TopK, density 0.05", COLOURS[2], 30.0, 2.12, "15 s"),
    )
    mark = (2.5, "dense ring's final loss: 2.500")
    panels = [
        ChartPanel("Against wall time", "seconds", "loss", lines, mark),
        ChartPanel("Against bytes", "MB", "loss", lines, mark, log_x=True),
    ]
    return draw_chart("Title & more", "4 workers", panels)


def texts(svg: str) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom) of every upright text, widths estimated."""
    found = []
    for element in ET.fromstring(svg).iter(f"{SVG}text"):
        if element.get("transform"):
            continue
        size = float(element.get("font-size", "13"))
        width = len(element.text or "") * LETTER_PX * size / 13
        x, y = float(element.get("x", "0")), float(element.get("y", "0"))
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
        found.append((element.text or "", left, y - 0.75 * size, left + width, y + 2))
    return found


def test_no_text_leaves_the_picture_and_none_covers_another() -> None:
    svg = demo_picture()
    width, height = (float(ET.fromstring(svg).get(name, "0")) for name in ("width", "height"))
    boxes = texts(svg)

    for text, left, top, right, bottom in boxes:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, f"{text!r} is cut"
    for i, (text, left, top, right, bottom) in enumerate(boxes):
        for other, o_left, o_top, o_right, o_bottom in boxes[i + 1 :]:
            apart = right <= o_left or o_right <= left or bottom <= o_top or o_bottom <= top
            assert apart, f"{text!r} and {other!r} overlap"


def test_every_line_is_labelled_in_its_own_colour_on_both_panels() -> None:
    svg = demo_picture()

    for label, colour in zip(
        ("dense ring", "gTop-k, density 0.05", "TopK, density 0.05"), COLOURS, strict=False
    ):
        assert len(re.findall(f'fill="{colour}"[^>]*font-weight="bold"[^>]*>{label}<', svg)) == 2
        assert svg.count(f'stroke="{colour}"') == 2
    assert "Title &amp; more" in svg
