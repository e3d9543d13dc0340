"""Links, make targets, commands and decisions in documents exist."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = ROOT / "docs" / "decisions"
OURS = ("docs", "docker", "gridtrain", "coordinator", "worker", "tests", "benchmarks", "examples")
DOCUMENTS = sorted(
    path for pattern in ("*.md", *(f"{folder}/**/*.md" for folder in OURS)) for path in ROOT.glob(pattern)
)
PACKAGES_WITH_A_GUIDE = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for package in ("gridtrain", "coordinator/gridtrain_coordinator", "worker/gridtrain_worker")
    for path in (ROOT / package).rglob("__init__.py")
    # `cli` has one file for each command.
    if path.parent.name not in ("cli", "tools", "templates", "gridtrain", "gridtrain_coordinator")
)


def in_code(text: str) -> str:
    """Code blocks and `inline code` only."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_are_not_broken(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    broken = [link for link in links if not (document.parent / link.split("#")[0]).exists()]
    assert not broken, f"{document.relative_to(ROOT)}: {broken}"


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        (document.name, target)
        for document in DOCUMENTS
        for target in re.findall(r"\bmake ([a-z-]+)\b", in_code(document.read_text(encoding="utf-8")))
    }
    assert named, "no document names a make target: is the pattern right?"
    assert not {pair for pair in named if pair[1] not in targets}


def first_column(heading: str) -> set[str]:
    """Words in code in the first column of the table below a heading of docs/cli.md."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    table = text.split(f"## {heading}\n")[1].split("\n|---|---|\n")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def test_the_columns_and_events_in_the_documents_are_those_of_the_code() -> None:
    from gridtrain.cli.status import COLUMNS, DROP_ORDER
    from gridtrain_coordinator.dashboard import board

    before_figures = {"rank", "stage", "name", "state", "reach", "violations"}
    assert first_column("Columns") == before_figures | {*COLUMNS, *DROP_ORDER}
    sources = (ROOT / "coordinator").rglob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    logged = re.findall(r'(?:LogEvent|log|tell)\(\s*"(?:info|warning|error)",\s*"(\w+)"', text)
    events = first_column("Events")
    assert {*logged, *board.FAULTS, *board.CHANGES, *board.ARRIVAL_EVENTS} - {"error"} <= events
    assert not {event for event in events if f'"{event}"' not in text}


def test_commands_in_documents_exist() -> None:
    """Every `gridtrain <command>` in documents, docker/ and the Makefile is one of the command line."""
    from gridtrain.cli.main import cli

    texts = [in_code(path.read_text(encoding="utf-8")) for path in DOCUMENTS]
    folders = [path for folder in ("docker", "packaging") for path in sorted((ROOT / folder).rglob("*"))]
    files = [
        ROOT / "Makefile",
        *(path for path in folders if path.is_file() and path.suffix not in (".whl", ".pyc")),
    ]
    texts += [path.read_text(encoding="utf-8") for path in files]
    named = {command for text in texts for command in re.findall(r"\bgridtrain ([a-z]+)\b", text)}
    known = set(cli.list_commands(click.Context(cli)))
    assert {"coordinator", "worker", "status", "demo"} <= named
    assert not named - known, "documents name commands that do not exist"


def test_decisions_are_numbered_without_gaps_and_all_in_the_index() -> None:
    records = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    assert [name[:5] for name in records] == [f"{number:04d}-" for number in range(1, len(records) + 1)]
    index = (DECISIONS / "README.md").read_text()
    assert [name for name in records if index.count(f"]({name})") != 1] == []


@pytest.mark.parametrize("heading", ["Status", "Context", "Decision", "Consequences"])
def test_decisions_follow_the_format(heading: str) -> None:
    for path in DECISIONS.glob("[0-9]*.md"):
        assert f"\n## {heading}\n" in path.read_text(), f"{path.name} has no section {heading!r}"


def test_decisions_are_short() -> None:
    words = {path.name: len(path.read_text().split()) for path in DECISIONS.glob("[0-9]*.md")}
    assert {name: count for name, count in words.items() if count > 300} == {}


def test_the_index_says_which_decision_supersedes_another() -> None:
    index = {
        row[0]: row[2]
        for line in (DECISIONS / "README.md").read_text().splitlines()
        if re.match(r"\| \d{4} \|", line) and (row := [cell.strip() for cell in line.strip("|").split(" | ")])
    }
    for path in DECISIONS.glob("[0-9]*.md"):
        status = path.read_text().split("## Status")[1].split("##")[0]
        found = re.search(r"(partly )?superseded by \[?(\d{4})", status)
        expected = f"{found[1] or ''}superseded by {found[2]}" if found else "accepted"
        assert index[path.name[:4]].removesuffix(" |") == expected, path.name


def test_files_and_classes_in_the_table_of_old_names_exist() -> None:
    with open(ROOT / "docs" / "old-names.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    moved = [row["now"] for row in rows if row["kind"] == "file"]
    assert moved and not [path for path in moved if not (ROOT / path).exists()]
    sources = [
        p
        for package in ("gridtrain", "coordinator", "worker", "tests")
        for p in (ROOT / package).rglob("*.py")
    ]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    renamed = [row["now"].rpartition(".")[2] for row in rows if row["kind"] == "class"]
    assert renamed and not [name for name in renamed if name not in words]


def test_each_file_says_in_one_line_what_it_decides() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "docs" / "files.py"], capture_output=True, text=True, check=True, timeout=60
    )
    lines = dict(line.split("  ", 1) for line in printed.stdout.splitlines())
    assert "running mean" in lines["gridtrain/pipeline/batch_norm.py"]
    assert "list of workers" in lines["coordinator/gridtrain_coordinator/dashboard/static/table.js"]
    templates = "gridtrain/tools/templates/"  # files of users, who read them from the beginning
    whole = {name for name, line in lines.items() if line.endswith(".")}
    assert not [name for name in lines.keys() - whole if name.endswith(".py") and templates not in name]


@pytest.mark.parametrize("package", PACKAGES_WITH_A_GUIDE)
def test_a_package_names_its_modules(package: str) -> None:
    """A package's docstring helps a reader to find the right file."""
    folder = ROOT / package
    guide = (folder / "__init__.py").read_text(encoding="utf-8")
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert sorted(name for name in modules if not re.search(rf"\b{name}\b", guide)) == []
