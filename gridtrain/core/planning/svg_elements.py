"""The page, fonts and text of an SVG chart, for `core.stages.partition_chart` and `tools.demo.svg_chart`."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK, FAINT = "#222222", "#6B6B6B"
FONTS = "Helvetica, Arial, DejaVu Sans, sans-serif"
FONT_PX = 13.0


def svg_page(
    title: str, heading: str, subtitle: str, left: float, size: tuple[float, float], parts: Iterable[str]
) -> str:
    """Return a chart on a white background, as SVG.

    Args:
        left: the distance of the heading and the subtitle from the left edge, in pixels.
        size: the width and the height, in pixels.
        parts: the SVG elements below the subtitle.
    """
    width, height = size
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="{FONTS}" font-size="{FONT_PX:g}">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#FFFFFF"/>',
            svg_text(left, 28, heading, size=17, weight="bold"),
            svg_text(left, 49, subtitle, colour=FAINT),
            *parts,
            "</svg>",
            "",
        ]
    )


def svg_text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = INK,
    size: float = FONT_PX,
    weight: str = "normal",
    extra: str = "",
    halo: bool = False,
) -> str:
    """Return an SVG text element; a `halo` keeps it legible over lines, and `extra` adds SVG attributes."""
    around = ' stroke="#FFFFFF" stroke-width="3.5" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size:g}" '
        f'font-weight="{weight}"{around}{" " + extra if extra else ""}>{escape(text)}</text>'
    )
