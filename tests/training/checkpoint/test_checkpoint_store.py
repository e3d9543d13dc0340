"""Where a worker's checkpoints lie, and who may look."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from gridtrain.core.messages import CheckpointInfo, LedgerState
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent, CheckpointStore


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever others may usually read: a residual is made of gradients of this machine's samples."""
    before = os.umask(0o022)
    try:
        made, there = (
            CheckpointStore(tmp_path / "new", every=1, keep=1),
            CheckpointStore(tmp_path, every=1, keep=1),
        )
        tmp_path.chmod(0o755)
        for checkpoints in (made, there):
            checkpoints.claim()
            checkpoints.release()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path / "new", tmp_path)]
    assert modes == [0o700, 0o755], "a folder that was there is its owner's affair"


@pytest.mark.parametrize("torn", [False, True], ids=["a flipped bit", "torn"])
def test_a_damaged_residual_is_lost_and_the_state_is_not(
    torn: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit makes an infinity of 1.0, and that would go into the training."""
    held = CheckpointInfo(4, b"h" * 32, LedgerState(step=5))
    residual = {"residual": torch.ones(8)}
    path = checkpoint_store.step_folder(tmp_path, 5)
    checkpoint_store.save(CheckpointContent(held, (), {}, {"weight": torch.zeros(3)}, residual), path)
    whole = checkpoint_store.read(path)
    assert torch.equal(whole.residual["residual"], residual["residual"])
    file = path / "residual.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-9] if torn else data[:-1] + bytes([data[-1] ^ 0x40]))
    found = checkpoint_store.read(path)
    assert found.residual == {} and torch.equal(found.tensors["weight"], torch.zeros(3))
    assert "differs from what was written: it is lost, the state is not" in caplog.text
