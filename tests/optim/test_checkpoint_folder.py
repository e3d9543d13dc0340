"""Where a worker's checkpoints lie, and who may look."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gridtrain.optim.checkpoint import Checkpoints


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever others may usually read: a residual is made of gradients of this machine's samples."""
    before = os.umask(0o022)
    try:
        made, there = Checkpoints(tmp_path / "new", every=1, keep=1), Checkpoints(tmp_path, every=1, keep=1)
        tmp_path.chmod(0o755)
        for checkpoints in (made, there):
            checkpoints.claim()
            checkpoints.release()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path / "new", tmp_path)]
    assert modes == [0o700, 0o755], "a folder that was there is its owner's affair"
