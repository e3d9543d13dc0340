"""Runs that upload their checkpoints and continue from them on other workers."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_group import run, wait_for_uploads
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch import nn
from training_loop import sgd, train_batch, train_steps

import gridtrain
from gridtrain.cli.main import cli
from gridtrain.errors import ConfigError
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.training.checkpoint.remote_store import RemoteStore, _names

DATA = [(torch.tensor([float(i), 1.0]), torch.tensor([2.0 * i])) for i in range(24)]

torch.manual_seed(7)
NET = nn.Linear(2, 1)


def train(
    grid: gridtrain.Grid,
    until: int = -1,
    steps: int = 12,
    before: Callable[[gridtrain.Grid], object] = lambda grid: None,
) -> tuple[list[int], torch.Tensor]:
    """Train; return the worker's steps and its last weight."""
    model = copy.deepcopy(NET)
    optimizer = sgd(grid, model, lr=0.001, momentum=0.9)
    seen = []
    for batch in grid.batches(DATA, global_batch_size=6, steps=steps):
        seen.append(grid.step)
        before(grid)
        train_batch(model, optimizer, batch)
        if grid.step == until:
            break
    return seen, model.weight.detach().clone()


def wait_for_disk(grid: gridtrain.Grid) -> None:
    state: Any = grid._model_state
    state.checkpoints.wait()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return f"file://{tmp_path}/storage/run" if request.param == "file" else "memory://storage/run"


def test_other_workers_with_empty_disks_go_on_from_the_latest_checkpoint(url: str, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", 2, train)
    first = run(
        tmp_path / "a", 2, lambda grid: train(grid, until=8, before=wait_for_uploads), urls=[url, url]
    )
    assert [steps[-1] for steps, _ in first] == [7, 7]
    again = run(tmp_path / "b", 2, train, urls=[url])
    assert [steps for steps, _ in again] == [list(range(6, 12))] * 2, "the second has no URL"
    assert all(torch.equal(weight, calm[0][1]) for _, weight in again)
    (last, *older) = RemoteStore(url).complete_checkpoints()
    assert (last[0].step, len(older)) == (12, 1), "the last step was uploaded before the workers exited"
    assert not [path for path in tmp_path.rglob("*.partial") if path.is_dir()]


def test_the_storage_has_as_many_checkpoints_as_the_disk_and_one_worker_uploads_each(
    url: str, tmp_path: Path
) -> None:
    run(tmp_path, 3, lambda grid: train(grid, before=wait_for_uploads), every=2, urls=[url, url, url])
    store = RemoteStore(url)
    assert store.steps() == [12, 10]
    workers = {manifest.worker for step in (12, 10) for manifest in store.manifests(step)}
    assert len(workers) == 1, "the others leave it to the worker that has uploaded the previous one"
    for step in (12, 10):
        assert len(_names(store._files, store._folder(step))) >= 3


def test_a_storage_that_fails_costs_no_step_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, true_put, left = "memory://failing/run", MemoryFileSystem.put_file, [2]
    figures: list[float] = []

    def put_file(self: Any, *args: Any, **options: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise PermissionError("the credentials have expired")
        true_put(self, *args, **options)

    def watch(grid: gridtrain.Grid) -> None:
        uploader: Any = grid._model_state._uploader  # type: ignore[union-attr]
        uploader._retry_after_s = (0.0,)
        uploader._failures._report_figures = lambda found: figures.extend(found.values())
        if grid.step == 11:
            wait_for_uploads(grid)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    caplog.set_level(logging.INFO, "gridtrain")
    ((steps, _),) = run(tmp_path, 1, lambda grid: train(grid, before=watch), urls=[url])
    assert steps == list(range(12))
    assert figures == [1.0, 2.0, 0.0]
    assert caplog.text.count("cannot be uploaded to memory://failing/run: PermissionError") == 1
    assert "checkpoints can be uploaded again" in caplog.text
    assert RemoteStore(url).complete(12)


def test_a_checkpoint_that_a_lost_process_has_not_uploaded_is_uploaded_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/storage"
    with monkeypatch.context() as broken:
        broken.setattr(RemoteStore, "put", lambda *_: 1 / 0)
        run(tmp_path, 1, lambda grid: train(grid, until=8, before=wait_for_disk), urls=[url])
    assert RemoteStore(url).steps() == []
    run(tmp_path, 1, lambda grid: train(grid, until=8, before=wait_for_uploads), urls=[url])
    assert RemoteStore(url).complete(6)


def test_a_run_of_other_settings_is_refused(url: str, tmp_path: Path) -> None:
    run(tmp_path / "a", 1, train, urls=[url])
    with (
        LocalGroup(min_workers=1) as group,
        group.join("other", checkpoint_every=3, state_dir=str(tmp_path / "b"), checkpoints=url) as grid,
        pytest.raises(
            ConfigError, match=r"checkpoint of step 12 with different training settings \(exchange"
        ),
    ):
        sgd(grid, nn.Linear(2, 1), gridtrain.TopK(density=0.5))
        next(iter(grid.batches(DATA, global_batch_size=6, steps=12)))


def test_a_fetched_checkpoint_does_not_replace_one_of_other_settings(tmp_path: Path) -> None:
    url, disk = f"file://{tmp_path}/storage", tmp_path / "b" / "worker-0"
    run(tmp_path / "a", 1, train, urls=[url])

    def with_other_settings(grid: gridtrain.Grid) -> None:
        model = copy.deepcopy(NET)
        for _ in train_steps(grid, model, sgd(grid, model, lr=0.5), DATA, batch_size=6, steps=12):
            wait_for_disk(grid)

    run(tmp_path / "b", 1, with_other_settings)
    written = (disk / "step-00000012" / "tensors.safetensors").read_bytes()
    run(tmp_path / "b", 1, lambda grid: train(grid, steps=13), urls=[url])
    assert (disk / "earlier-1" / "step-00000012" / "tensors.safetensors").read_bytes() == written
    assert (disk / "step-00000012" / "tensors.safetensors").read_bytes() != written


@pytest.mark.parametrize(
    ("url", "every", "text"),
    [
        ("bucket/run", 3, "'bucket/run' is not a URL -> write a URL"),
        ("nonsense://bucket/run", 3, "nonsense://bucket/run cannot be used: ValueError: Protocol not known"),
        ("file:///proc/no-such/run", 3, "file:///proc/no-such/run cannot be used: FileNotFoundError"),
        ("s3://bucket/run", 3, "s3://bucket/run cannot be used: Install s3fs to access S3 -> pip install "),
        ("memory://run", 0, "checkpoints are to be uploaded to memory://run, but checkpoint_every is 0"),
    ],
)
def test_an_unusable_url_is_reported_before_the_first_step(
    url: str, every: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with (
        LocalGroup(min_workers=1) as group,
        group.join("anna", checkpoint_every=every, state_dir=str(tmp_path), checkpoints=url) as grid,
        pytest.raises(ConfigError) as refused,
    ):
        train(grid)
    assert text in str(refused.value)


def test_a_model_is_exported_from_one_url_to_another(url: str, tmp_path: Path) -> None:
    run(tmp_path, 1, train, urls=[url])
    out = tmp_path / "model.safetensors"
    place = f"file://{out}" if url.startswith("file") else "memory://exports/model.safetensors"
    result = CliRunner().invoke(cli, ["export", url, place])
    assert result.exit_code == 0 and f"from {url}, step 12" in result.output, result.output
    if place.startswith("memory"):
        MemoryFileSystem().get_file(place, str(out))
    final = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(value, final[name]) for name, value in load_file(out).items())
    result = CliRunner().invoke(cli, ["export", url, str(out), "--step", "99"])
    assert f"there is no complete checkpoint of step 99 at {url}" in str(result.exception)


def test_a_url_is_refused_as_folder_of_the_final_model() -> None:
    with (
        LocalGroup(min_workers=1) as group,
        group.join("anna", export_dir="s3://bucket/model") as grid,
        pytest.raises(ConfigError, match="export_dir is 's3://bucket/model'; it must be a folder"),
    ):
        train(grid)
