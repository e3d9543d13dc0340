"""The pictures in docs/images are what docs/pictures.py draws now, and stay inside their frames."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_SPEC = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
assert _SPEC is not None and _SPEC.loader is not None
pictures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pictures)

NAMES = sorted(pictures.PICTURES)
WIDEST_PX = 8.6
"""Of a character in 14 px Helvetica, in the mean of a word."""


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_up_to_date(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert (DOCS / "images" / name).read_text() == drawn, "run `python docs/pictures.py`"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaves_the_frame(name: str) -> None:
    root = ElementTree.fromstring(pictures.PICTURES[name]())
    width = float(root.attrib["width"])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, long = float(text.attrib["x"]), WIDEST_PX * len(text.text or "") * 0.85
        left = {"start": x, "middle": x - long / 2, "end": x - long}[text.attrib["text-anchor"]]
        assert left >= 0 and left + long <= width, text.text


@pytest.mark.parametrize("name", NAMES)
def test_every_class_has_a_dark_colour(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    light, dark = pictures.STYLE.split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r'class="(\w+)"', drawn)) - {"line", "order", "edge"}
    for kind in used:
        assert f".{kind} {{ fill" in light and f".{kind} {{ fill" in dark, kind
