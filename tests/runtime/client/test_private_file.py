"""A private file is replaced as a whole, and files of killed writers are removed."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from gridtrain.runtime.client.private_file import LEFTOVER_AGE_S, replace_private_file


def leftover(folder: Path, name: str, age_s: float = 2 * LEFTOVER_AGE_S) -> Path:
    path = folder / name
    path.write_text("half")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_the_next_write_removes_files_of_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    leftover(tmp_path, ".budget.json.partial-0123abcd")
    replace_private_file(path, "whole")
    assert [each.name for each in tmp_path.iterdir()] == ["budget.json"]
    assert path.read_text() == "whole" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_files_of_live_writers_and_of_others_stay(tmp_path: Path) -> None:
    written = leftover(tmp_path, ".budget.json.partial-0123abcd")
    remaining = {
        written,
        leftover(tmp_path, ".budget.json.partial-4567abcd", age_s=1.0),  # just created
        leftover(tmp_path, ".other.json.partial-0123abcd"),
        leftover(tmp_path, ".budget.json.20261101"),
    }
    with written.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        replace_private_file(tmp_path / "budget.json", "whole")
    assert {*tmp_path.iterdir()} == remaining | {tmp_path / "budget.json"}
