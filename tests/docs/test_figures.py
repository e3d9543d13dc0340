"""docs/figures.py: the figures in README.md and docs/ are those of benchmarks/results."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
assert _SPEC is not None and _SPEC.loader is not None
figures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(figures)

UNMEASURED = tomllib.loads((Path(__file__).parent / "unmeasured.toml").read_text(encoding="utf-8"))
_UNIT = (
    r"(?:%|ns|µs|us|ms|s|seconds?|minutes?|hours?|kB|KB|MB|GB|KiB|MiB|GiB|bytes|times|nats|inputs)(?![\w/])"
)
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_QUANTITY = re.compile(rf"(?<![\w.,/:-])(?:{_NUMBER}\s?{_UNIT}|\d+\.\d+(?!\w|\.\d))")
_CELL = re.compile(rf"\|\s*\**({_NUMBER})\**\s*(?=\|)")
_NOT_PROSE = re.compile(
    r"```.*?```|^    .*?$|`[^`\n]*`|(?<=\])\([^)]*\)|https?://\S+|(?:arXiv|section) \d+\.\d+",
    re.DOTALL | re.MULTILINE,
)

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
    starts = [line for line in text.splitlines() if line.lstrip().startswith("<!--=")]
    assert starts == [], "a comment at the start of a line ends the paragraph before it"


def unmarked(text: str) -> set[str]:
    """Numbers outside marks: with a unit, with a decimal point, or alone in a table's cell."""
    prose = _NOT_PROSE.sub("", figures.MARK.sub("#", text))
    found = {re.sub(r"\s+", " ", quantity) for quantity in _QUANTITY.findall(prose)}
    return found | {cell[1] for cell in _CELL.finditer(prose)}


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_measurement_has_a_mark(page: Path) -> None:
    kinds = UNMEASURED.get(page.relative_to(ROOT).as_posix(), {})
    known = {number for numbers in kinds.values() for number in numbers}
    found = unmarked(page.read_text(encoding="utf-8"))
    assert sorted(found - known) == [], (
        "a figure of a result file? mark it, see docs/figures.py; else name it in tests/docs/unmeasured.toml"
    )
    assert sorted(known - found) == [], "no longer on the page: remove it from tests/docs/unmeasured.toml"


def test_pages_with_unmeasured_numbers_exist() -> None:
    assert [page for page in UNMEASURED if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it takes 12.5 ms, at most 1,024\nbytes", {"12.5 ms", "1,024 bytes"}),
        ("it takes <!--=gtopk-p4-ms-->25.9<!--/--> ms", set()),
        ("| a | **3** | 4 | x 5 |", {"3", "4"}),
        ("kept 76.2%, ratio 0.95", {"76.2%", "0.95"}),
        ("100 Mbit/s, 4 workers, `--every 5 s`, [a](b-0.5 s), arXiv 1901.04359, 1.29.2", set()),
        ("```\n3 ms\n```\n    4 ms\n", set()),
    ],
)
def test_unmarked_numbers_are_found(text: str, found: set[str]) -> None:
    assert unmarked(text) == found


@pytest.mark.parametrize("path", sorted(figures.RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_names_its_command_date_and_machine(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record.keys() >= {"command", "date", "machine", "figures"}
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", record["date"])
    assert record["figures"] and all(float(value) >= 0 for value in record["figures"].values())
    assert figures.value_of(f"{path.stem}:{next(iter(record['figures']))}")


@pytest.mark.parametrize("path", sorted(figures.RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_is_used(path: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    keys = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert any(f"<!--={path.stem}:{key}-->" in pages for key in keys)


def test_every_figure_can_be_computed() -> None:
    for name, figure in figures.FIGURES.items():
        assert float(figure()) >= 0, name


def test_a_wrong_value_is_replaced_and_an_unknown_name_is_an_error() -> None:
    right = figures.filled("<!--=gtopk-p4-ms-->1<!--/--> ms")
    assert right == f"<!--=gtopk-p4-ms-->{figures.FIGURES['gtopk-p4-ms']()}<!--/--> ms"
    with pytest.raises(KeyError):
        figures.filled("<!--=no-such-figure--><!--/-->")
