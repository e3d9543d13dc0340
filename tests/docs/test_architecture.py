"""docs/architecture.md names every event and effect; it and CONTRIBUTING.md name no missing file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import ModuleType

import pytest

from gridtrain.core.group import member_events
from gridtrain_coordinator.run import events as coordinator_events

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = (
    ROOT,
    ROOT / "gridtrain",
    ROOT / "coordinator" / "gridtrain_coordinator",
    ROOT / "worker" / "gridtrain_worker",
)
"""Where the document's file names begin."""

_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w./-]+\.(?:py|sql|md)\b")
_METHOD = re.compile(r"[A-Z]\w+\.\w+")


def section(title: str) -> str:
    """The text below a heading, with its subsections."""
    heading = re.search(rf"^(#+) {re.escape(title)}$", TEXT, flags=re.MULTILINE)
    assert heading is not None, title
    rest = TEXT[heading.end() :]
    return re.split(rf"^#{{1,{len(heading[1])}}} ", rest, flags=re.MULTILINE)[0]


def classes(module: ModuleType) -> set[str]:
    """Event and effect classes that a module defines."""
    return {
        name
        for name, value in vars(module).items()
        if dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    }


def missing_files(text: str) -> list[str]:
    files = {name for code in _CODE.findall(text) for name in _FILE.findall(code) if "<" not in code}
    return sorted(
        name for name in files if not any((folder / name).is_file() for folder in (*PACKAGES, ROOT / "docs"))
    )


CATALOGUE = {
    "Events of a worker's core, Effects of a worker's core": classes(member_events),
    "The coordinator's core": classes(coordinator_events),
}


@pytest.mark.parametrize("titles", CATALOGUE)
def test_the_catalogue_has_every_class_and_no_other(titles: str) -> None:
    text = "".join(section(title) for title in titles.split(", "))
    named = {code for code in _CODE.findall(text) if re.fullmatch(r"[A-Z]\w*[a-z]\w*", code)}
    assert sorted(named - CATALOGUE[titles]) == [], "no such class"
    assert sorted(CATALOGUE[titles] - named) == [], "not in docs/architecture.md"


def test_files_exist() -> None:
    assert missing_files(TEXT) == []
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert missing_files(contributing.split("\n## How to add\n")[1].split("\n## ")[0]) == []
    assert missing_files("`core/no_such_file.py` and `core/member/member.py`") == ["core/no_such_file.py"]


def test_the_path_of_a_gradient_names_methods_of_these_files() -> None:
    rows = [row for row in section("The path of a gradient").splitlines() if re.match(r"\d+\. ", row)]
    assert len(rows) > 20
    wrong = []
    for row in rows:
        source = ""
        for code in reversed(_CODE.findall(row)):  # a method stands before its file
            if _FILE.fullmatch(code):
                path = next(folder / code for folder in PACKAGES if (folder / code).is_file())
                source = path.read_text(encoding="utf-8")
            elif _METHOD.fullmatch(code):
                kind, method = code.split(".")
                found = re.split(rf"^class {kind}\b", source, flags=re.MULTILINE)[1:]
                body = re.split(r"^class ", found[0], flags=re.MULTILINE)[0] if found else ""
                wrong += [] if f"def {method}(" in body else [code]
    assert wrong == []
