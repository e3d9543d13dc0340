"""Checkpoints of a worker's stages, beside what `tests/sim` and the processes' tests show of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from gridtrain.core.messages import CheckpointInfo, LedgerState, Span
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.training import residual_departure
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent, read, step_folder
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore

BLOCKS = Span(1, 2)


def store_in(folder: Path) -> StageCheckpointStore:
    return StageCheckpointStore(
        folder, (), every=10, keep=3, report=lambda _: None, load_state=lambda *_: None
    )


def write(store: StageCheckpointStore, blocks: Span, step: int) -> None:
    held = CheckpointInfo(step - 1, bytes(32), LedgerState(step=step))
    store.write(blocks, CheckpointContent(held, (), {}, {"x": torch.zeros(1)}, {}))
    store.wait()


def test_a_step_that_was_rolled_back_is_written_when_it_comes_again(tmp_path: Path) -> None:
    """10 and 20 are written; 20 is lost with another stage's; the group goes back to 10, then to 20 again."""
    store = store_in(tmp_path)
    for step in (10, 20):
        assert store.is_due(BLOCKS, step)
        write(store, BLOCKS, step)
    store.discard_after(9)
    assert [held.applied + 1 for held in store.stored_checkpoints()] == [10]
    assert store.is_due(BLOCKS, 20), "as the newcomer in the lost stage writes it, too"


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


def test_the_digest_of_a_checkpoint_is_that_of_the_state_however_it_travels(tmp_path: Path) -> None:
    """From the disk, framed for another worker, or captured from memory: one state, one digest."""
    store = store_in(tmp_path)
    store.write(BLOCKS, snapshot(10))
    store.wait()
    (held,) = store.stored_checkpoints()
    assert len(held.digest) == 32
    store.verify(store.read_for_peer(held), held.digest)
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    captured = serialization.capture_state(model, optimizer, {"scheduler": scheduler})
    store.verify(captured, held.digest)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    with pytest.raises(RemoteProtocolError, match=r"has the digest \w{12}; the group's state has"):
        store.verify(serialization.capture_state(model, optimizer, {"scheduler": scheduler}), held.digest)
    with pytest.raises(RemoteProtocolError, match="not a training state"):
        store.verify([b"short"], held.digest)


def changed(folder: Path) -> None:
    """One value of one tensor is another one: the file is whole all the same."""
    tensors = safetensors.torch.load_file(folder / "tensors.safetensors")
    tensors["0"] = tensors["0"] + 1.0
    safetensors.torch.save_file(tensors, folder / "tensors.safetensors")


def test_a_checkpoint_whose_tensors_are_others_is_not_loaded_nor_given(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.write(BLOCKS, snapshot(10))
    store.wait()
    (held,) = store.stored_checkpoints()
    path = step_folder(store.folder_of(BLOCKS), 10)
    assert read(path).position.digest == held.digest
    changed(path)
    with pytest.raises(ConfigError, match="its tensors differ from those that were written"):
        store.read_for_peer(held)
    assert store.stored_checkpoints() == (), "nobody is sent here for it again"
    store.write_now(BLOCKS, snapshot(10))
    assert store.stored_checkpoints() == (held,) and store.is_intact(held)


def test_a_checkpoint_that_fails_is_not_told_of_any_more(tmp_path: Path) -> None:
    told: list[tuple[CheckpointInfo, ...]] = []
    store = StageCheckpointStore(tmp_path, (), every=10, keep=3, report=told.append, load_state=does_not_fit)
    for step in (10, 20):
        store.write(BLOCKS, snapshot(step))
    store.wait()
    later, earlier = store.stored_checkpoints()
    with pytest.raises(RemoteProtocolError, match="another model"):
        store.reload([later], BLOCKS)
    assert store.stored_checkpoints() == (earlier,)
    changed(step_folder(store.folder_of(BLOCKS), 10))
    assert not store.is_intact(earlier)
    assert told[-1] == ()


def does_not_fit(*_: object) -> None:
    raise RemoteProtocolError("it is of another model", remedy="")


@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_is_kept_only_if_its_tensors_are_what_it_says(tmp_path: Path, whole: bool) -> None:
    mine, theirs = store_in(tmp_path / "mine"), store_in(tmp_path / "theirs")
    theirs.write(BLOCKS, snapshot(10))
    theirs.wait()
    (held,) = theirs.stored_checkpoints()
    if not whole:
        changed(step_folder(theirs.folder_of(BLOCKS), 10))
    folder = mine.make_copy_folder(held)
    for file in theirs.files_to_copy(held):
        (folder / file.name).write_bytes(file.read_bytes())
    mine.adopt_copy(held, folder)
    assert mine.stored_checkpoints() == ((held,) if whole else ())
    assert whole or not folder.exists()


class Cut:
    """What a power cut would leave of a folder that is renamed: what was synced before."""

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


@pytest.mark.parametrize("what", ["a checkpoint", "a copy", "what was left"])
def test_what_is_renamed_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    mine, theirs = store_in(tmp_path / "mine"), store_in(tmp_path / "theirs")
    theirs.write(BLOCKS, snapshot(10))
    theirs.wait()
    (held,) = theirs.stored_checkpoints()
    folder = mine.make_copy_folder(held)
    for file in theirs.files_to_copy(held):
        (folder / file.name).write_bytes(file.read_bytes())
    cut = Cut(monkeypatch)
    if what == "a checkpoint":
        theirs.write_now(BLOCKS, snapshot(20))
    elif what == "a copy":
        mine.adopt_copy(held, folder)
    else:
        residual_departure.save_left_residual(
            tmp_path, (), residual_departure.LeftResidual(9, bytes(32), np.ones(3, np.float32))
        )
    assert cut.synced and not cut.lost


def test_what_a_killed_process_had_begun_is_swept_away(tmp_path: Path) -> None:
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
