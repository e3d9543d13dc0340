"""The folders of a worker's checkpoints, and their permissions."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch

from gridtrain.core.messages import CheckpointInfo, Facts, LedgerState
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent, CheckpointStore
from gridtrain.training.checkpoint.nested_values import DTYPES


def test_only_the_owner_may_read_a_new_folder(tmp_path: Path) -> None:
    """For any umask: a residual is made of gradients of this machine's samples."""
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
    assert modes == [0o700, 0o755], "permissions of an existing folder do not change"


def test_only_the_owner_may_read_a_checkpoint_of_a_run_that_keeps_none(tmp_path: Path) -> None:
    """Such as the residual of a worker that has left; nothing has made the folder before."""
    before = os.umask(0o022)
    try:
        with checkpoint_store.replaced_folder(tmp_path / "run" / "state" / "left") as folder:
            (folder / "note").write_text("1")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "run", tmp_path / "run" / "state")]
    assert modes == [0o700, 0o700] and (tmp_path / "run" / "state" / "left" / "note").read_text() == "1"


def test_a_folder_that_cannot_be_made_is_named_with_a_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    CheckpointStore(tmp_path / "file" / "x", every=1, keep=1).claim()
    (record,) = caplog.records
    assert record.message.startswith(f"no checkpoints will be written: {tmp_path}/file/x is not writable")
    assert "another --state-dir" in record.message


@pytest.mark.parametrize(
    ("written", "facts", "fits"),
    [
        ("model", "model base adapter", True),  # by a version that recorded neither
        ("model base", "model base adapter", True),
        ("model base adapter", "model base", False),
        ("model", "model wait", False),
    ],
)
def test_facts_that_a_version_did_not_record_may_be_missing(written: str, facts: str, fits: bool) -> None:
    there, here = (tuple((name, "as it is") for name in names.split()) for names in (written, facts))
    assert checkpoint_store.matches_facts(there, here) is fits
    assert not checkpoint_store.matches_facts(there, (("model", "another"), *here[1:]))


def test_a_checkpoint_is_written_without_another_copy_of_its_tensors(tmp_path: Path) -> None:
    """Its files are those of `safetensors.torch.save`, which would make two copies."""
    kinds = (*DTYPES, torch.float32)
    tensors = {str(i): torch.arange(300_000).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"ö": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}
    residual = {"residual": torch.ones(500_000), "u": torch.zeros(500_000)}
    info = CheckpointInfo(4, b"h" * 32, LedgerState(step=5))
    peaks_bytes = []
    for name in ("1", "2", "3"):  # a thread of an earlier test may allocate memory during one of them
        path = checkpoint_store.step_folder(tmp_path / name, 5)
        tracemalloc.start()
        try:
            checkpoint_store.save(CheckpointContent(info, (), {}, tensors, residual), path)
            peaks_bytes.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks_bytes) < 0.05 * (path / "residual.safetensors").stat().st_size
    for name, written in (("tensors", tensors), ("residual", residual)):
        assert (path / f"{name}.safetensors").read_bytes() == safetensors.torch.save(written)
    digest = hashlib.blake2b((path / "residual.safetensors").read_bytes(), digest_size=32)
    assert json.loads((path / "state.json").read_text())["residual"] == digest.hexdigest()


@pytest.mark.parametrize("torn", [False, True], ids=["a flipped bit", "torn"])
def test_a_damaged_residual_does_not_affect_the_state(
    torn: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit turns 1.0 into infinity, which would get into the training."""
    info = CheckpointInfo(4, b"h" * 32, LedgerState(step=5))
    residual = {"residual": torch.ones(8)}
    path = checkpoint_store.step_folder(tmp_path, 5)
    checkpoint_store.save(CheckpointContent(info, (), {}, {"weight": torch.zeros(3)}, residual), path)
    whole = checkpoint_store.read(path)
    assert torch.equal(whole.residual["residual"], residual["residual"])
    file = path / "residual.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-9] if torn else data[:-1] + bytes([data[-1] ^ 0x40]))
    found = checkpoint_store.read(path)
    assert found.residual == {} and torch.equal(found.tensors["weight"], torch.zeros(3))
    assert "differs from what was written and is lost; the state is not affected" in caplog.text


def test_a_full_disk_is_logged_every_ten_minutes_until_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, is_full, figures = 0.0, True, []

    def save(content: CheckpointContent, path: Path) -> None:
        if is_full:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_store, "save", save)
    store = CheckpointStore(tmp_path, every=1, keep=1, report_figures=figures.append, clock=lambda: now_s)
    caplog.set_level(logging.INFO, "gridtrain")

    def write(step: int) -> list[str]:
        caplog.clear()
        info = CheckpointInfo(step - 1, b"h" * 32, LedgerState(step=step))
        store.write(CheckpointContent(info, (), {}, {}, {}))
        store.wait()
        return caplog.messages

    lines = []
    for step, at_s in enumerate((0.0, 60.0, 599.0, 600.0), start=1):
        now_s = at_s
        lines.append(write(step))
    problem = "No space left on device"

    def failed(step: int, in_a_row: int) -> str:
        return (
            f"the checkpoint of step {step} cannot be written to {tmp_path}: {problem} (failed checkpoints "
            f"in a row: {in_a_row}); training continues without it; free space on that disk, or start this "
            "worker with another --state-dir"
        )

    assert lines == [
        [failed(1, 1)],
        [],
        [],
        [failed(4, 4)],
    ]
    is_full = False
    assert write(5) == [f"checkpoints can be written again; the latest is of step 5: {tmp_path}"]
    assert write(6) == []
    assert figures == [{"failed_checkpoints": float(count)} for count in (1, 2, 3, 4, 0)]


def content(step: int, facts: Facts = ()) -> CheckpointContent:
    return CheckpointContent(CheckpointInfo(step - 1, b"h" * 32, LedgerState(step=step)), facts, {}, {}, {})


def test_of_an_earlier_process_only_the_latest_checkpoint_stays(tmp_path: Path) -> None:
    """It may belong to another history than the group's, as those of later steps do."""
    for step in (10, 20, 30, 70):
        checkpoint_store.save(content(step), checkpoint_store.step_folder(tmp_path, step))
    store = CheckpointStore(tmp_path, every=10, keep=2)
    for step in (40, 50, 60):
        store.write(content(step))
        store.wait()
    steps = [checkpoint_store.checkpoint_step(path) for path in checkpoint_store.list_checkpoints(tmp_path)]
    assert steps == [30, 50, 60, 70]


def test_checkpoints_of_other_settings_do_not_count_among_those_to_keep(tmp_path: Path) -> None:
    for step, facts in ((10, ()), (15, (("model", "another"),))):
        checkpoint_store.save(content(step, facts), checkpoint_store.step_folder(tmp_path, step))
    store = CheckpointStore(tmp_path, every=10, keep=2)
    store.mark_verified()
    store.write(content(20))
    store.wait()
    steps = [checkpoint_store.checkpoint_step(path) for path in checkpoint_store.list_checkpoints(tmp_path)]
    assert steps == [10, 20]
