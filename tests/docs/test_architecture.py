"""docs/architecture.md and CONTRIBUTING.md name no missing file or method."""

from __future__ import annotations

import re
from pathlib import Path

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


def missing_files(text: str) -> list[str]:
    files = {name for code in _CODE.findall(text) for name in _FILE.findall(code) if "<" not in code}
    return sorted(
        name for name in files if not any((folder / name).is_file() for folder in (*PACKAGES, ROOT / "docs"))
    )


def test_files_exist() -> None:
    assert missing_files(TEXT) == []
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert missing_files(contributing.split("\n## How to add\n")[1].split("\n## ")[0]) == []
    assert missing_files("`core/no_such_file.py` and `core/member/member.py`") == ["core/no_such_file.py"]


def wrong_methods(path: str) -> list[str]:
    """Return the methods (`Class.method`) in `path` that the file named before them does not define."""
    wrong, source = [], ""
    for code in _CODE.findall(path):
        if _FILE.fullmatch(code):
            file = next(folder / code for folder in PACKAGES if (folder / code).is_file())
            source = file.read_text(encoding="utf-8")
        elif _METHOD.fullmatch(code) and source:
            kind, method = code.split(".")
            found = re.split(rf"^class {kind}\b", source, flags=re.MULTILINE)[1:]
            body = re.split(r"^class ", found[0], flags=re.MULTILINE)[0] if found else ""
            wrong += [] if re.search(rf"^    (def )?{method}[(:]", body, flags=re.MULTILINE) else [code]
    return wrong


def test_the_path_of_a_gradient_names_methods_of_these_files() -> None:
    path = section("The path of a gradient").split("\n\nThe I/O thread")[0]
    steps = re.split(r"^\d+\. ", path, flags=re.MULTILINE)[1:]
    assert len(steps) > 20
    assert [wrong for step in steps for wrong in wrong_methods(step)] == []
    assert wrong_methods("`core/member/member.py`: `MemberCore.handle`, `MemberCore.no_such`") == [
        "MemberCore.no_such"
    ]
