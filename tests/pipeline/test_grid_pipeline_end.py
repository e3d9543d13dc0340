"""The last step of a pipeline is on the disks and in the storage before its workers exit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_group import LOSING, Seen, Workers, undisturbed
from safetensors.torch import load_file

import gridtrain
from gridtrain.core.messages import EndRun, OperatorReply, Refused
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.training.checkpoint.checkpoint_store import checkpoint_step, list_checkpoints, step_folder
from gridtrain.training.checkpoint.model_export import export_model
from gridtrain.training.checkpoint.remote_store import RemoteStore


def test_other_workers_go_on_from_the_last_step_of_a_finished_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/storage"
    _, calm = undisturbed(tmp_path / "calm", steps=17)
    parts = [tmp_path / "a" / name / f"blocks-{a:03}-{a + 2:03}" for name in ("anna", "bert") for a in (0, 2)]

    def await_copies(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        """Wait before the last step for the checkpoints of step 10, which are copied in the background."""
        if grid.step == 11:
            workers.wait(lambda: all(step_folder(part, 10).is_dir() for part in parts))

    with Workers(tmp_path / "a", 2, steps=12, checkpoint_every=5, cuts=(0, 2, 4)) as workers:
        workers.before = await_copies
        workers.add("anna", "bert", url=url)
        workers.finish("anna", "bert")
        whole = workers.assembled()
    assert not list((tmp_path / "a").glob("*/*/.*")), "a copy is stored or discarded before its worker ends"
    for name in ("anna", "bert"):
        assert (
            "a run with more steps can continue from the state folders of workers with all of the model's "
            "stages (see docs/operations.md), and gridtrain export FOLDER OUT.safetensors writes the whole "
            f"model from copies of them in FOLDER; this worker's folder is {tmp_path / 'a' / name}"
        ) in caplog.messages
    done = export_model(tmp_path / "a", tmp_path / "exported.safetensors")
    exported = load_file(tmp_path / "exported.safetensors")
    assert done.step == 12 and all(torch.equal(exported[name], value) for name, value in whole.items())
    shutil.copytree(tmp_path / "a" / "anna", tmp_path / "anna")
    for copied in sorted((tmp_path / "anna").glob("blocks-*/step-00000012"))[1:]:
        shutil.rmtree(copied)  # the stages of step 12 are on two disks, unless one was copied before the end
    assert export_model(tmp_path / "anna", tmp_path / "exported.safetensors").step == 10
    assert "a later checkpoint is ignored: the checkpoints of step 12 do not contain all" in caplog.text
    assert sorted(part.part for part in RemoteStore(url).complete(12)) == ["blocks-000-002", "blocks-002-004"]
    with Workers(tmp_path / "b", 2, steps=17, checkpoint_every=5, cuts=(0, 2, 4)) as workers:
        workers.add("carl", url=url)
        workers.add("dora")  # it receives its stage from carl
        workers.finish("carl", "dora")
        assert [min(workers.seen[name].losses) for name in ("carl", "dora")] == [12, 12]
        assert all(torch.equal(calm[name], value) for name, value in workers.assembled().items())


def test_missing_parts_of_a_checkpoint_are_downloaded(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage"
    with Workers(tmp_path / "a", 2, steps=12, checkpoint_every=5) as workers:
        workers.add("anna", "bert", url=url)
        workers.finish("anna", "bert")
    path, *_ = sorted((tmp_path / "a" / "anna").glob("blocks-*/step-00000012"))
    shutil.copytree(path, tmp_path / "b" / "anna" / path.parent.name / path.name)
    with Workers(tmp_path / "b", 2, steps=17, checkpoint_every=5) as workers:
        workers.add("anna", url=url)
        workers.add("dora")
        workers.finish("anna", "dora")
        assert [min(workers.seen[name].losses) for name in ("anna", "dora")] == [12, 12]


def test_checkpoints_that_lost_processes_have_not_uploaded_are_uploaded_later(tmp_path: Path) -> None:
    url, names = f"file://{tmp_path}/storage", ("anna", "bert")
    with Workers(tmp_path / "a", 2, steps=12, checkpoint_every=5) as workers:
        workers.add(*names)
        workers.finish(*names)
    with Workers(tmp_path / "a", 2, steps=13, checkpoint_every=5) as workers:
        workers.before = lambda *_: workers.wait(lambda: bool(RemoteStore(url).complete(12)))
        workers.add(*names, url=url)
        workers.finish(*names)
    assert RemoteStore(url).complete(13)


class Killed(Exception):
    """A worker ends as if by SIGKILL."""


def test_a_run_whose_only_holder_of_a_stage_was_killed_is_ended_by_its_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The waiting worker writes its own stage, whose last step is on no disk."""

    def after(seen: Seen, grid: gridtrain.Grid, pipe: Pipeline) -> None:
        if seen.step == 6 and pipe.stage == 1:
            workers.kill(seen.name)
            raise Killed

    answer = Future[OperatorReply | Refused]()

    def take_orders() -> Iterator[Any]:
        if coordinator.status()["phase"] == "paused" and not answer.running() and not answer.done():
            yield EndRun(), answer

    with Workers(tmp_path, 2, checkpoint_every=100, deadlines=replace(LOSING, regather_s=0.5)) as workers:
        coordinator = workers.group.coordinator
        workers.after = after
        workers.add("anna", "bert")
        workers.wait(lambda: any(seen.end for seen in workers.seen.values()), ("anna", "bert"))
        coordinator._dashboard = SimpleNamespace(publish=lambda status: None, take_orders=take_orders)
        (name,) = (seen.name for seen in workers.seen.values() if not isinstance(seen.end, Killed))
        workers.finish(name)
    missing = (
        "no connected worker holds stage 1 of 2 after step 7, nor do the connected workers have all stages"
    )
    assert missing in answer.result().text and "gridtrain export, given" in answer.result().text
    (said,) = (each for each in caplog.messages if "the final model was not written" in each)
    assert missing in said and "held neither" not in said
    (folder,) = (tmp_path / name).glob("blocks-000-*")
    assert [checkpoint_step(path) for path in list_checkpoints(folder)] == [7]
