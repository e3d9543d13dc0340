"""docs/figures.py: the figures in README.md and docs/ are those of benchmarks/results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
assert _SPEC is not None and _SPEC.loader is not None
figures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(figures)

MARKED = [page for page in figures.PAGES if figures.MARK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.stem)
def test_figures_are_those_of_the_result_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.filled(text) == text, "run `python docs/figures.py`"


def test_the_main_pages_have_figures() -> None:
    assert {"README", "benchmarks", "comparison"} <= {page.stem for page in MARKED}


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.stem)
def test_every_mark_is_well_formed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!--=") == text.count("<!--/-->") == len(figures.MARK.findall(text))


def test_every_figure_can_be_computed() -> None:
    for name, figure in figures.FIGURES.items():
        assert float(figure()) >= 0, name


def test_a_wrong_value_is_replaced_and_an_unknown_name_is_an_error() -> None:
    right = figures.filled("<!--=gtopk-p4-ms-->1<!--/--> ms")
    assert right == f"<!--=gtopk-p4-ms-->{figures.FIGURES['gtopk-p4-ms']()}<!--/--> ms"
    with pytest.raises(KeyError):
        figures.filled("<!--=no-such-figure--><!--/-->")
