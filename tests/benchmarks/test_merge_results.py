"""Result files of a suite that was run in pieces are merged; later entries of the same case count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import merge_results

FIRST = {
    "command": "a",
    "date": "D",
    "runs": [{"workload": "gpt", "rate": "1", "contender": "x", "seconds": 1}],
}
SECOND = {
    "command": "b",
    "date": "D",
    "runs": [
        {"workload": "gpt", "rate": "1", "contender": "x", "seconds": 2},
        {"workload": "gpt", "rate": "2", "contender": "x", "seconds": 3},
    ],
}


def test_entries_are_merged_and_commands_are_recorded(tmp_path: Path) -> None:
    for name, piece in (("1.json", FIRST), ("2.json", SECOND)):
        (tmp_path / name).write_text(json.dumps(piece))
    paths = [str(tmp_path / name) for name in ("whole.json", "1.json", "2.json")]
    assert merge_results.main(paths) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [run["seconds"] for run in whole["runs"]] == [2, 3]
    assert whole["date"] == "D" and whole["pieces"] == [{"command": "a"}, {"command": "b"}]


def test_pieces_with_different_lists_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['rows', 'runs'\]"):
        merge_results.merged([FIRST, {"rows": []}])
