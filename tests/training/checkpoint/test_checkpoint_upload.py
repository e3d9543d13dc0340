"""Uploads from a disk: complete checkpoints, retries, the choice of the uploading worker, and retention."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from gridtrain.core.messages import CheckpointInfo, Facts, LedgerState
from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent
from gridtrain.training.checkpoint.checkpoint_upload import MAX_FINAL_ATTEMPTS, CheckpointUploader
from gridtrain.training.checkpoint.pretrained import REPLACED_NAME
from gridtrain.training.checkpoint.remote_store import MODEL_PART, RemoteStore, shown_url, upload

WITHIN_S = 60.0


def save(folder: Path, step: int, history: bytes = b"h", blocks: int = 0, later: Facts = ()) -> Path:
    """Write a checkpoint to a disk, with a residual, which is not uploaded."""
    position = CheckpointInfo(step - 1, history * 32, LedgerState(step=step))
    tensors, residual = {"weight": torch.full((3,), float(step))}, {"residual": torch.ones(3)}
    facts = ((("blocks", str(blocks)),) if blocks else ()) + later
    path = checkpoint_store.step_folder(folder, step)
    checkpoint_store.save(CheckpointContent(position, facts, {}, tensors, residual), path)
    return path


class Uploads:
    """One worker's uploads; `add` waits for each."""

    def __init__(self, store: RemoteStore, folder: Path, start_step: int = 0, keep: int = 2) -> None:
        self.figures: list[float] = []
        self.folder = folder
        self.uploader = CheckpointUploader(
            store,
            folder,
            every=10,
            keep=keep,
            start_step=start_step,
            report_figures=lambda figures: self.figures.extend(figures.values()),
            retry_after_s=(0.0,),
            final_wait_s=0.0,
        )

    def add(self, step: int, part: str = MODEL_PART, **options: Any) -> None:
        parent = self.folder if part == MODEL_PART else self.folder / part
        self.uploader.add(save(parent, step, **options), part)
        self.wait()

    def wait(self) -> None:
        with self.uploader._changed:
            assert self.uploader._changed.wait_for(lambda: not self.uploader._waiting, WITHIN_S)


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"file://{tmp_path}/storage")


def test_a_residual_is_not_uploaded(store: RemoteStore, tmp_path: Path) -> None:
    Uploads(store, tmp_path / "anna").add(10)
    assert store.fetch_latest(tmp_path / "bert") == 10
    there, here = (checkpoint_store.read(tmp_path / name / "step-00000010") for name in ("anna", "bert"))
    assert torch.equal(there.tensors["weight"], here.tensors["weight"])
    assert there.residual and not here.residual


def test_a_worker_takes_over_from_one_that_has_missed_a_checkpoint(
    store: RemoteStore, tmp_path: Path
) -> None:
    anna, bert = Uploads(store, tmp_path / "anna", keep=9), Uploads(store, tmp_path / "bert", keep=9)
    anna.add(10)
    bert.add(20)
    assert store.steps() == [10], "anna uploads, as it has uploaded the previous one"
    bert.add(30)
    assert store.steps() == [30, 10]
    anna.add(40)
    assert store.steps() == [30, 10], "now bert uploads"
    late = Uploads(store, tmp_path / "cora", start_step=30, keep=9)
    late.add(40)
    assert store.steps() == [40, 30, 10], "a new group does not know that bert is gone"


def test_the_last_checkpoint_is_uploaded_although_the_worker_of_the_previous_one_is_gone(
    store: RemoteStore, tmp_path: Path
) -> None:
    anna, bert = Uploads(store, tmp_path / "anna"), Uploads(store, tmp_path / "bert")
    anna.add(10)
    bert.uploader.add(save(tmp_path / "bert", 15), MODEL_PART, is_final=True)
    bert.uploader.close(WITHIN_S, MAX_FINAL_ATTEMPTS)
    assert store.steps() == [15, 10]
    anna.uploader.add(save(tmp_path / "anna", 15), MODEL_PART, is_final=True)
    anna.uploader.close(WITHIN_S, MAX_FINAL_ATTEMPTS)
    assert [found.worker for found in store.manifests(15)] == [bert.uploader._worker], "it is there already"


def test_an_incomplete_checkpoint_of_stages_does_not_replace_a_complete_one(
    store: RemoteStore, tmp_path: Path
) -> None:
    first, second = Uploads(store, tmp_path / "anna", keep=1), Uploads(store, tmp_path / "bert", keep=1)
    for step in (10, 20):
        first.add(step, "blocks-000-002", blocks=3)
        assert [found[0].step for found in store.complete_checkpoints()] == [10] * (step == 20)
        second.add(step, "blocks-002-003", blocks=3)
        assert [found[0].step for found in store.complete_checkpoints()] == [step]
    for step in range(30, 100, 10):
        first.add(step, "blocks-000-002", blocks=3)
    second.add(90, "blocks-002-003", blocks=3, history=b"o")
    assert store.steps() == [90, 80, 70, 60, 20], "the number of incomplete ones is bounded"
    assert store.fetch_latest(tmp_path / "cora") == 20, "step 90 has two histories"
    assert sorted(path.parent.name for path in (tmp_path / "cora").glob("*/step-00000020")) == [
        "blocks-000-002",
        "blocks-002-003",
    ]


def test_a_run_that_began_at_an_earlier_step_overwrites_nothing(
    store: RemoteStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Uploads(store, tmp_path / "anna").add(50)
    other = Uploads(store, tmp_path / "bert", start_step=50)
    other.uploader.add(save(tmp_path / "bert", 10), MODEL_PART)
    other.uploader.close(WITHIN_S, MAX_FINAL_ATTEMPTS)
    assert "this URL has a checkpoint of step 50, from which the run has not continued" in caplog.text
    assert other.figures[-1] >= MAX_FINAL_ATTEMPTS and store.steps() == [50]


def test_training_does_not_wait_for_uploads_and_waiting_ones_are_superseded(
    store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, true_put = threading.Event(), threading.Event(), LocalFileSystem.put_file

    def slow_put(self: Any, *args: Any, **options: Any) -> None:
        began.set()
        assert goes_on.wait(WITHIN_S)
        true_put(self, *args, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", slow_put)
    slow = Uploads(store, tmp_path / "anna")
    for step in (10, 20, 30, 40):
        path = save(tmp_path / "anna", step)
        slow.uploader.add(path, MODEL_PART)
        shutil.rmtree(path)  # as the disk's own retention does
        assert began.wait(WITHIN_S)
    goes_on.set()
    slow.wait()
    assert store.steps() == [40, 10], "30 was superseded, 20 dropped; the begun upload was completed"
    assert not list((tmp_path / "anna").glob(".step-*"))


def test_a_damaged_checkpoint_is_not_used(
    store: RemoteStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploads = Uploads(store, tmp_path / "anna")
    uploads.add(10)
    uploads.add(20)
    (newest, older) = (
        next((tmp_path / f"storage/step-000000{step}").glob("*.safetensors")) for step in (20, 10)
    )
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x7f")
    assert store.fetch_latest(tmp_path / "bert") == 10
    assert "the checkpoint of step 20" in caplog.text and "will not be used" in caplog.text
    older.unlink()
    with pytest.raises(
        ConfigError, match=r"no checkpoint in file://.* can be used: .* SHA-256 .* were written"
    ):
        store.fetch_latest(tmp_path / "cora")
    assert not list(tmp_path.glob("cora/*")), "no incomplete checkpoint"


def test_a_storage_that_does_not_answer_is_an_error_after_its_deadline(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_answered = threading.Event()
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda *_, **__: never_answered.wait(WITHIN_S))
    with pytest.raises(ConfigError, match=r"TimeoutError: it has not answered within 0\.05 s"):
        store.check(0.05)
    never_answered.set()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nonsense://anna:secret@host/run", "nonsense://host/run"),
        ("s3://KEY:SEC/RET@bucket/run", "s3://bucket/run"),
        ("https://host/run?sig=SECRET", "https://host/run"),
        ("https://TOKEN@host/run", "https://host/run"),
        ("abfs://container@account.dfs.core.windows.net/run", None),
        ("s3://bucket/run", None),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, shown: str | None) -> None:
    assert shown_url(url) == (shown or url)


def test_an_unusable_url_is_named_without_secrets() -> None:
    with pytest.raises(ConfigError) as refused:
        RemoteStore("nonsense://anna:secret@host/run")
    assert "nonsense://host/run" in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_http_is_refused_because_it_stores_nothing(scheme: str) -> None:
    refusal = (
        rf"^{scheme}://host/run cannot be used: files can neither be written nor removed over HTTP -> .*s3://"
    )
    with pytest.raises(ConfigError, match=refusal):
        RemoteStore(f"{scheme}://anna:secret@host/run?sig=1")


def test_a_part_on_the_disk_is_not_replaced_because_of_its_residual(
    store: RemoteStore, tmp_path: Path
) -> None:
    first, second = Uploads(store, tmp_path / "anna"), Uploads(store, tmp_path / "bert")
    first.add(10, "blocks-000-002", blocks=3)
    second.add(10, "blocks-002-003", blocks=3)
    assert store.fetch_latest(tmp_path / "anna") == 10
    mine, copy = (
        checkpoint_store.read(tmp_path / "anna" / stage / "step-00000010")
        for stage in ("blocks-000-002", "blocks-002-003")
    )
    assert mine.residual and not copy.residual


@pytest.mark.parametrize("where", ["on the disk", "at the URL"])
def test_facts_that_a_version_did_not_record_do_not_make_a_checkpoint_another_run_s(
    where: str, store: RemoteStore, tmp_path: Path
) -> None:
    """A checkpoint on the disk is not replaced, which would lose its residual, and not moved away."""
    anna, stages = tmp_path / "anna", ["blocks-000-002", "blocks-002-003"]
    known: Facts = (("adapter", "none"),)
    for stage in stages:
        Uploads(store, tmp_path / stage).add(
            10, stage, blocks=3, later=() if where == "on the disk" else known
        )
    path = save(anna / stages[0], 10, blocks=3, later=known if where == "on the disk" else ())
    earlier = save(anna / stages[1], 5, blocks=3, later=known)
    assert store.fetch_latest(anna, (("blocks", "3"), *known)) == 10
    assert checkpoint_store.read(path).residual
    assert earlier.is_dir() and not (anna / "earlier-1").exists()


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, there = tmp_path / "new.safetensors", tmp_path / "there.safetensors"
    new.write_text("new")
    there.write_text("old")

    def put_half(self: Any, source: str, target: str) -> None:
        Path(target).write_text("n")
        raise OSError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(LocalFileSystem, "put_file", put_half)
        with pytest.raises(ConfigError, match="No space left"):
            upload(new, f"file://{there}", REPLACED_NAME)
    assert there.read_text() == "old"
    upload(new, f"file://{there}", REPLACED_NAME)
    assert there.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "there.safetensors"]


KILLED = """
import os, signal, sys
from pathlib import Path
from gridtrain.training.checkpoint import remote_store

folder, url, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
store = remote_store.RemoteStore(url)
true_put, true_pipe = store._files.put_file, store._files.pipe_file


def put_file(source, target):
    if target.endswith(names[0]):
        true_put(source, target)
        data = Path(source).read_bytes()
        Path(target).write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    true_put(source, target)


def pipe_file(target, data):
    if target.endswith(names[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    true_pipe(target, data)


store._files.put_file, store._files.pipe_file = put_file, pipe_file
store.put(folder, remote_store.MODEL_PART, "anna")
"""


@pytest.mark.integration
@pytest.mark.parametrize("at", [".safetensors", "model.json"])
def test_an_upload_that_was_killed_is_completed_by_the_next_attempt(
    at: str, store: RemoteStore, tmp_path: Path
) -> None:
    uploads = Uploads(store, tmp_path / "anna")
    uploads.add(10)
    path = save(tmp_path / "anna", 20)
    script = tmp_path / "upload.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(path), f"file://{tmp_path}/storage", at]
    done = subprocess.run(command, timeout=WITHIN_S)
    assert done.returncode == -signal.SIGKILL
    assert list((tmp_path / "storage" / "step-00000020").iterdir()), "it was killed in the middle"
    assert store.fetch_latest(tmp_path / "bert") == 10
    uploads.uploader.add(path, MODEL_PART)
    uploads.wait()
    assert store.fetch_latest(tmp_path / "cora") == 20
    assert float(checkpoint_store.read(tmp_path / "cora" / "step-00000020").tensors["weight"][0]) == 20.0


def test_failures_are_logged_when_they_change(
    store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gridtrain")
    errors = [ConnectionError("no route to a"), ConnectionError("no route to b"), PermissionError("expired")]
    true_put = RemoteStore.put

    def put(self: RemoteStore, *args: Any) -> None:
        if errors:
            raise errors.pop(0)
        true_put(self, *args)

    monkeypatch.setattr(RemoteStore, "put", put)
    uploads = Uploads(store, tmp_path / "anna")
    uploads.add(10)
    lines = [line for line in caplog.messages if "upload" in line]
    assert [line.split(": ")[2].split(" (")[0] for line in lines[:2]] == ["no route to a", "expired"]
    assert lines[2:] == ["checkpoints can be uploaded again; the latest is of step 10"]
    assert uploads.figures == [1.0, 2.0, 3.0, 0.0]


def test_a_folder_is_not_loadable_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, there, seen = tmp_path / "made", tmp_path / "there", []
    made.mkdir()
    there.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_text("new")
    for name in (
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "tok.model",
    ):
        (there / name).write_text("old")
    true_put = LocalFileSystem.put_file

    def put_file(self: Any, source: str, target: str) -> None:
        seen.append((Path(source).name, sorted(path.name for path in there.glob("*.json"))))
        true_put(self, source, target)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    upload(made, f"file://{there}", REPLACED_NAME)
    assert seen == [("model.safetensors", []), ("config.json", [])]
    left = {path.name: path.read_text() for path in there.iterdir()}
    assert left == {"config.json": "new", "model.safetensors": "new", "tok.model": "old"}
