"""Pipelines whose members change: a replica dies, a stage has no worker, a newcomer takes it.

2 stages x 2 replicas, one dies:   0 1   ->   0      one pipeline goes on, the fourth worker is a standby
                                   2 x        2      every sample counts once
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from brisk import LOSING, WITHIN_S
from pipeline_group import SAMPLES, layers, loss_fn
from torch import nn

import gridtrain
from gridtrain.errors import GridtrainError
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.training.checkpoint.model_export import export_model


class Numbered:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.tensor([index / SAMPLES, 1.0])
        return x, x[:1] * 2, index


class Worker:
    """What one thread recorded: by step the committed samples, and its losses."""

    def __init__(self) -> None:
        self.committed: dict[int, tuple[int, list[int]]] = {}
        self.losses: dict[int, float] = {}
        self.in_vain = 0
        self.end: Any = None
        self.state: dict[str, torch.Tensor] = {}
        self.stage = -1


class Group:
    """Workers in threads, by name."""

    def __init__(self, folder: Path, min_workers: int, checkpoint_every: int = 0, epochs: int = 1) -> None:
        self.folder, self.every, self.epochs = folder, checkpoint_every, epochs
        self.local = LocalGroup(min_workers=min_workers, deadlines=LOSING)
        self.workers: dict[str, Worker] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.before: Callable[[str, gridtrain.Grid, Any], None] = lambda name, grid, pipe: None

    def __enter__(self) -> Group:
        self.local.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.local.__exit__(*exc_info)

    def add(self, name: str, **options: Any) -> None:
        self.workers[name] = Worker()
        self.threads[name] = threading.Thread(target=self._work, args=(name, options), daemon=True)
        self.threads[name].start()

    def kill(self, name: str) -> None:
        self.local.hub.kill(self.local.keys[name])

    def finish(self, *names: str) -> None:
        for name in names:
            self.threads[name].join(60.0)
            assert not self.threads[name].is_alive(), f"{name} hangs"

    def _work(self, name: str, options: dict[str, Any]) -> None:
        worker, state = self.workers[name], str(self.folder / name)
        try:
            with self.local.join(
                name, export_dir=str(self.folder), checkpoint_every=self.every, state_dir=state
            ) as grid:
                self._train(name, worker, grid, options)
                worker.end = "finished"
        except GridtrainError as error:
            worker.end = error

    def _train(self, name: str, worker: Worker, grid: gridtrain.Grid, options: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {
            "stages": 2,
            "loss_fn": loss_fn,
            "micro_batches": 2,
            "exchange": gridtrain.Dense(),
        }
        pipe = grid.pipeline(layers, lambda p: torch.optim.SGD(p, lr=0.05), **(defaults | options))
        for inputs, targets, ids in grid.batches(Numbered(), batch_size=4, epochs=self.epochs, seed=3):
            self.before(name, grid, pipe)
            step, spans = grid.step, grid._session.turn_spans
            loss = pipe.step(inputs, targets)
            worker.stage = -1 if pipe.stage is None else pipe.stage
            if loss is None:
                worker.in_vain += 1
            else:
                worker.losses[step] = loss
                worker.committed[step] = (worker.stage, ids.tolist() if spans else [])
                worker.state = {n: v.clone() for n, v in pipe.module.state_dict().items()}


def counted(workers: dict[str, Worker]) -> Counter[int]:
    """How often each sample was in a committed step, as recorded by the first stages, once a replica."""
    steps: dict[int, dict[tuple[int, ...], int]] = {}
    for worker in workers.values():
        for step, (stage, ids) in worker.committed.items():
            if stage == 0:
                steps.setdefault(step, {})[tuple(ids)] = 1
    return Counter(sample for batches in steps.values() for ids in batches for sample in ids)


@pytest.mark.parametrize("exchange", [gridtrain.Dense(), gridtrain.GTopK(density=0.5)])
def test_after_a_replica_dies_every_sample_counts_once(tmp_path: Path, exchange: Any) -> None:
    names = ("anna", "bert", "carl", "dora")
    victim: list[str] = []
    lock = threading.Lock()

    def before(name: str, grid: gridtrain.Grid, pipe: Any) -> None:
        with lock:
            if grid.step == 8 and pipe.stage == 1 and not victim:
                victim.append(name)
                group.kill(name)

    with Group(tmp_path, 4) as group:
        group.before = before
        for name in names:
            group.add(name, exchange=exchange)
        group.finish(*names)
    assert len(victim) == 1
    ends = {name: worker.end for name, worker in group.workers.items()}
    assert [end for name, end in ends.items() if name not in victim] == ["finished"] * 3, ends
    assert counted(group.workers) == Counter(range(SAMPLES))
    survivors = [worker for name, worker in group.workers.items() if name not in victim]
    steps = set().union(*(worker.losses for worker in survivors))
    for step in steps:
        assert len({worker.losses[step] for worker in survivors if step in worker.losses}) == 1


def test_a_stage_without_a_worker_waits_for_a_newcomer_and_goes_back_to_checkpoints(tmp_path: Path) -> None:
    dead = threading.Event()

    def before(name: str, grid: gridtrain.Grid, pipe: Any) -> None:
        if grid.step == 14 and pipe.stage == 1 and not dead.is_set():
            victim.append(name)
            group.kill(name)
            dead.set()

    victim: list[str] = []
    with Group(tmp_path, 2, checkpoint_every=5) as group:
        group.before = before
        for name in ("anna", "bert"):
            group.add(name)
        assert dead.wait(WITHIN_S)
        survivor = next(name for name in ("anna", "bert") if name not in victim)
        group.threads[victim[0]].join(WITHIN_S)
        # It rejoins with another name and its old disk.
        (tmp_path / victim[0]).rename(tmp_path / "carl")
        group.add("carl")
        group.finish(survivor, "carl")
    ends = {name: group.workers[name].end for name in (survivor, "carl")}
    assert ends == {survivor: "finished", "carl": "finished"}
    assert group.workers["carl"].stage == 1
    # Steps 10 to 13 are lost; from step 10 on both agree, and every sample of the pass was committed.
    assert min(group.workers["carl"].losses) == 10
    both = group.workers[survivor].losses
    assert {step: both[step] for step in group.workers["carl"].losses} == group.workers["carl"].losses
    assert set(counted(group.workers)) == set(range(SAMPLES))
    exported = export_model(tmp_path, tmp_path / "whole.safetensors")
    names = set(safetensors.torch.load_file(tmp_path / "whole.safetensors"))
    assert names == set(nn.Sequential(*layers()).state_dict()), "the assembled stages of a checkpoint"
    assert exported.step % 5 == 0 and exported.step >= 15


def test_a_stage_survives_a_lost_disk_by_the_neighbours_copy(tmp_path: Path) -> None:
    dead, copied = threading.Event(), threading.Event()
    victim: list[str] = []

    def before(name: str, grid: gridtrain.Grid, pipe: Any) -> None:
        if pipe.stage == 0:
            names = {path.parent.name for path in tmp_path.glob(f"{name}/blocks-002-004/step-*")}
            if names and grid.step > 10:
                copied.set()
        elif copied.is_set() and not dead.is_set():
            victim.append(name)
            group.kill(name)
            dead.set()

    with Group(tmp_path, 2, checkpoint_every=5) as group:
        group.before = before
        for name in ("anna", "bert"):
            group.add(name)
        assert dead.wait(WITHIN_S), "the first stage's disk has no copy"
        survivor = next(name for name in ("anna", "bert") if name not in victim)
        group.threads[victim[0]].join(WITHIN_S)
        group.add("carl")  # with an empty disk
        group.finish(survivor, "carl")
    ends = {name: group.workers[name].end for name in (survivor, "carl")}
    assert ends == {survivor: "finished", "carl": "finished"}
    first = min(group.workers["carl"].losses)
    assert first % 5 == 0 and first >= 5, "the run went back to a checkpoint, not to its start"
    assert group.workers[survivor].losses[first] == group.workers["carl"].losses[first]


def test_a_newcomer_completes_the_second_replica(tmp_path: Path) -> None:
    arrived = threading.Event()

    def before(name: str, grid: gridtrain.Grid, pipe: Any) -> None:
        if grid.step == 5 and grid.world_size == 2 and not arrived.is_set():
            arrived.set()
            for late in ("carl", "dora"):
                group.add(late)

    with Group(tmp_path, 2, epochs=8) as group:
        group.before = before
        for name in ("anna", "bert"):
            group.add(name)
        assert arrived.wait(WITHIN_S)
        group.finish("anna", "bert", "carl", "dora")
    assert {name: worker.end for name, worker in group.workers.items()} == dict.fromkeys(
        ("anna", "bert", "carl", "dora"), "finished"
    )
    assert sorted(worker.stage for worker in group.workers.values()) == [0, 0, 1, 1]
    assert counted(group.workers) == Counter(dict.fromkeys(range(SAMPLES), 8))
    of_stage: dict[int, list[Worker]] = {}
    for worker in group.workers.values():
        of_stage.setdefault(worker.stage, []).append(worker)
    for one, other in of_stage.values():
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
