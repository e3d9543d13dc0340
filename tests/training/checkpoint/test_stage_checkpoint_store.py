"""Checkpoints of a worker's stages, in addition to tests/simulation and the tests with processes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from gridtrain.core.messages import CheckpointInfo, LedgerState, Span
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.training import residual_departure
from gridtrain.training.checkpoint import checkpoint_store, serialization
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent, read, save, step_folder
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore

BLOCKS = Span(1, 2)


def store_in(folder: Path) -> StageCheckpointStore:
    return StageCheckpointStore(
        folder, (), every=10, keep=3, report=lambda _: None, load_state=lambda *_: None
    )


def write(store: StageCheckpointStore, blocks: Span, step: int) -> None:
    info = CheckpointInfo(step - 1, bytes(32), LedgerState(step=step))
    store.write(blocks, CheckpointContent(info, (), {}, {"x": torch.zeros(1)}, {}))
    store.wait()


def test_a_step_after_a_rollback_is_written_again(tmp_path: Path) -> None:
    """10 and 20 are written; another stage loses its 20; the group goes back to 10, then reaches 20 again."""
    store = store_in(tmp_path)
    for step in (10, 20):
        assert store.is_due(BLOCKS, step)
        write(store, BLOCKS, step)
    store.discard_after(9)
    assert [info.applied + 1 for info in store.stored_checkpoints()] == [10]
    assert store.is_due(BLOCKS, 20), "the newcomer in the lost stage writes it, too"


@pytest.mark.parametrize("act", ["write", "write_now", "discard_after", "check"])
def test_checkpoints_of_other_settings_are_kept(act: str, tmp_path: Path) -> None:
    info = CheckpointInfo(19, bytes(32), LedgerState(step=20))
    other = CheckpointContent(info, (("exchange", "dense"),), {}, {"x": torch.ones(1)}, {})
    path = step_folder(tmp_path / "blocks-001-002", 20)
    save(other, path)
    store = store_in(tmp_path)
    if act == "check":
        text = r"different training settings \(exchange: dense, now missing\).*; to train its model "
        with pytest.raises(ConfigError, match=text + "with other settings, load it in a new run"):
            store.check_not_refused()
        assert path.is_dir()
        return
    if act == "write":
        write(store, BLOCKS, 20)
    elif act == "write_now":
        store.write_now(BLOCKS, CheckpointContent(info, (), {}, {}, {}))
    else:
        store.discard_after(9)
    assert torch.equal(
        read(tmp_path / "earlier-1" / "blocks-001-002" / path.name).tensors["x"], torch.ones(1)
    )
    assert path.is_dir() is (act != "discard_after")


def test_two_threads_do_not_move_checkpoints_of_other_settings_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread writes this worker's stage, while another stores the copy of another stage."""
    store, calls = store_in(tmp_path), []
    other = threading.Thread(target=store._can_keep_refused)

    def move(*_: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            other.start()
            other.join(0.2)  # until it waits, or has called this function as well

    monkeypatch.setattr(checkpoint_store, "keep_refused", move)
    assert store._can_keep_refused()
    other.join(60.0)
    assert len(calls) == 1


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).pow(2).sum().backward()
    optimizer.step()
    return model, optimizer


def snapshot(step: int) -> CheckpointContent:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    document, tensors = serialization.pack_state(model, optimizer, {"scheduler": scheduler})
    return CheckpointContent(
        CheckpointInfo(step - 1, bytes(32), LedgerState(step=step)), (), document, tensors, {}
    )


def test_the_digest_of_a_checkpoint_is_that_of_the_state_in_each_form(tmp_path: Path) -> None:
    """On the disk, framed for another worker, or captured from memory: one state has one digest."""
    store = store_in(tmp_path)
    store.write(BLOCKS, snapshot(10))
    store.wait()
    (info,) = store.stored_checkpoints()
    assert len(info.digest) == 32
    store.verify(store.read_for_peer(info), info.digest)
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    captured = serialization.capture_state(model, optimizer, {"scheduler": scheduler})
    store.verify(captured, info.digest)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    with pytest.raises(RemoteProtocolError, match=r"has the digest \w{12}; the group's state has"):
        store.verify(serialization.capture_state(model, optimizer, {"scheduler": scheduler}), info.digest)
    with pytest.raises(RemoteProtocolError, match="not a training state"):
        store.verify([b"short"], info.digest)


def changed(folder: Path) -> None:
    """Change one value of a tensor; the file remains complete."""
    tensors = safetensors.torch.load_file(folder / "tensors.safetensors")
    tensors["0"] = tensors["0"] + 1.0
    safetensors.torch.save_file(tensors, folder / "tensors.safetensors")


def test_a_checkpoint_with_changed_tensors_is_neither_loaded_nor_sent(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.write(BLOCKS, snapshot(10))
    store.wait()
    (info,) = store.stored_checkpoints()
    path = step_folder(store.folder_of(BLOCKS), 10)
    assert read(path).position.digest == info.digest
    changed(path)
    with pytest.raises(ConfigError, match="its tensors differ from those that were written"):
        store.read_for_peer(info)
    assert store.stored_checkpoints() == (), "it is not offered again"
    store.write_now(BLOCKS, snapshot(10))
    assert store.stored_checkpoints() == (info,) and store.is_intact(info)


def test_a_checkpoint_that_fails_is_not_reported_any_more(tmp_path: Path) -> None:
    reported: list[tuple[CheckpointInfo, ...]] = []
    store = StageCheckpointStore(
        tmp_path, (), every=10, keep=3, report=reported.append, load_state=does_not_fit
    )
    for step in (10, 20):
        store.write(BLOCKS, snapshot(step))
    store.wait()
    later, earlier = store.stored_checkpoints()
    with pytest.raises(RemoteProtocolError, match="another model"):
        store.reload([later], BLOCKS)
    assert store.stored_checkpoints() == (earlier,)
    changed(step_folder(store.folder_of(BLOCKS), 10))
    assert not store.is_intact(earlier)
    assert reported[-1] == ()


def does_not_fit(*_: object) -> None:
    raise RemoteProtocolError("it is of another model", remedy="")


@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_is_stored_only_if_its_tensors_have_the_stated_digest(tmp_path: Path, whole: bool) -> None:
    mine, theirs = store_in(tmp_path / "mine"), store_in(tmp_path / "theirs")
    theirs.write(BLOCKS, snapshot(10))
    theirs.wait()
    (info,) = theirs.stored_checkpoints()
    if not whole:
        changed(step_folder(theirs.folder_of(BLOCKS), 10))
    folder = mine.make_copy_folder(info)
    for file in theirs.files_to_copy(info):
        (folder / file.name).write_bytes(file.read_bytes())
    mine.adopt_copy(info, folder)
    assert mine.stored_checkpoints() == ((info,) if whole else ())
    assert whole or not folder.exists()


def test_a_copy_that_is_being_adopted_survives_the_next_one(tmp_path: Path) -> None:
    mine, theirs = store_in(tmp_path / "mine"), store_in(tmp_path / "theirs")
    theirs.write(BLOCKS, snapshot(10))
    theirs.wait()
    (info,) = theirs.stored_checkpoints()
    folder = mine.make_copy_folder(info)
    for file in theirs.files_to_copy(info):
        (folder / file.name).write_bytes(file.read_bytes())
    later = CheckpointInfo(19, info.history, LedgerState(step=20), layers=BLOCKS)
    assert {mine.make_copy_folder(info), mine.make_copy_folder(later)} != {folder}
    mine.adopt_copy(info, folder)
    assert mine.stored_checkpoints() == (info,)


class PowerCut:
    """Records whether the files of a renamed folder were synced before, as a power cut requires."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: set[str] = set()
        self.lost: list[str] = []
        fsync, rename = os.fsync, os.rename

        def seen_fsync(handle: int) -> None:
            self.synced.add(os.readlink(f"/proc/self/fd/{handle}"))
            fsync(handle)

        def seen_rename(source: Path, target: Path) -> None:
            inside = [str(source), *(str(path) for path in Path(source).iterdir())]
            self.lost += [path for path in inside if path not in self.synced]
            rename(source, target)

        monkeypatch.setattr(os, "fsync", seen_fsync)
        monkeypatch.setattr(os, "rename", seen_rename)


@pytest.mark.parametrize("what", ["a checkpoint", "a copy", "a residual left behind"])
def test_a_folder_is_synced_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    mine, theirs = store_in(tmp_path / "mine"), store_in(tmp_path / "theirs")
    theirs.write(BLOCKS, snapshot(10))
    theirs.wait()
    (info,) = theirs.stored_checkpoints()
    folder = mine.make_copy_folder(info)
    for file in theirs.files_to_copy(info):
        (folder / file.name).write_bytes(file.read_bytes())
    power_cut = PowerCut(monkeypatch)
    if what == "a checkpoint":
        theirs.write_now(BLOCKS, snapshot(20))
    elif what == "a copy":
        mine.adopt_copy(info, folder)
    else:
        residual_departure.save_left_residual(
            tmp_path, (), residual_departure.LeftResidual(9, bytes(32), np.ones(3, np.float32))
        )
    assert power_cut.synced and not power_cut.lost


def test_a_full_disk_is_named_without_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(residual_departure, "replaced_folder", fail)
    left = residual_departure.LeftResidual(9, bytes(32), np.ones(3, np.float32))
    residual_departure.save_left_residual(tmp_path, (), left)
    assert ": No space left on device; it is lost" in caplog.text


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    begun = [tmp_path / ".step-00000010.partial", tmp_path / "blocks-001-002" / ".step-00000010.partial"]
    for path in begun:
        path.mkdir(parents=True)
        (path / "tensors.safetensors").write_bytes(bytes(10))
    whole = tmp_path / "blocks-001-002" / "step-00000005"
    whole.mkdir()
    store = store_in(tmp_path)
    store.claim()
    store.release()
    assert not any(path.exists() for path in begun) and whole.exists()


@pytest.mark.parametrize("is_pruned", [True, False])
def test_a_checkpoint_that_is_pruned_while_checkpoints_are_listed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_pruned: bool
) -> None:
    store = store_in(tmp_path)
    for step in (10, 20):
        write(store, BLOCKS, step)
    first, read_header = step_folder(store.folder_of(BLOCKS), 10), checkpoint_store.read_header

    def read_late(path: Path) -> Any:
        if path == first and is_pruned:
            checkpoint_store.remove(path)
        elif path == first:
            (path / "state.json").unlink()
        return read_header(path)

    monkeypatch.setattr(checkpoint_store, "read_header", read_late)
    assert [info.applied for info in store.stored_checkpoints()] == [19]
    assert [text.partition(" cannot be read")[0] for text in caplog.messages] == (
        [] if is_pruned else [f"the checkpoint {first}"]
    )


def test_a_checkpoint_is_removed_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader must not find a folder in which some files are already missing."""
    store, listed = store_in(tmp_path), list[int]()
    rmtree = shutil.rmtree

    def list_and_remove(path: Path, **options: Any) -> None:
        if path.exists():
            listed.append(len(checkpoint_store.list_checkpoints(store.folder_of(BLOCKS))))
        rmtree(path, **options)

    for step in (10, 20, 30):
        write(store, BLOCKS, step)
    monkeypatch.setattr(shutil, "rmtree", list_and_remove)
    write(store, BLOCKS, 40)
    store.discard_after(29)
    assert listed == [3, 2] and len(list(store.folder_of(BLOCKS).iterdir())) == 2
