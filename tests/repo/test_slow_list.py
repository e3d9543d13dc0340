"""Each line of tests/slow.txt names a test; otherwise `make test` would run a renamed one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def unknown(lines: list[str]) -> list[str]:
    """Lines that name neither a file of tests nor the beginning of a test in one, and those named twice."""
    wrong = [line for line in lines if lines.count(line) > 1]
    for line in lines:
        name, _, test = line.partition("::")
        path = ROOT / name
        function = re.escape(test.partition("[")[0])
        if not path.is_file() or not re.search(rf"^\s*def {function}", path.read_text(), re.MULTILINE):
            wrong.append(line)
    return wrong


def test_each_line_names_a_test() -> None:
    lines = (ROOT / "tests" / "slow.txt").read_text().splitlines()
    assert unknown([line for line in lines if line and not line.startswith("#")]) == []


def test_a_line_that_names_no_test_is_found() -> None:
    here = "tests/repo/test_slow_list.py"
    wrong = ["tests/repo/test_none.py", f"{here}::test_renamed[3", f"{here}::test_a_line"]
    assert unknown([here, *wrong, wrong[-1]]) == [wrong[-1], wrong[-1], *wrong[:2]]
