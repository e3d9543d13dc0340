"""Pipelines whose members change: a replica dies, a stage has no worker, a newcomer takes it.

2 stages x 2 replicas, one dies:   0 1   ->   0      one pipeline goes on, the fourth worker is a standby
                                   2 x        2      every sample counts once
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from brisk import WITHIN_S
from integration.scripts.pipeline import SAMPLES, Numbered
from pipeline_group import Seen, Workers, data, layers, pipeline_of
from torch import nn

import gridtrain
from gridtrain.sdk.local_group import local
from gridtrain.training.checkpoint.model_export import export_model


def counted(workers: Workers) -> Counter[int]:
    """How often each sample was in a committed step, as recorded by the first stages, once a replica."""
    batches = {
        (step, tuple(samples))
        for seen in workers.seen.values()
        for step, samples in seen.samples.items()
        if seen.stages[step] == 0
    }
    return Counter(sample for _, samples in batches for sample in samples)


@pytest.mark.parametrize("exchange", [gridtrain.Dense(), gridtrain.GTopK(density=0.5)])
def test_after_a_replica_dies_every_sample_counts_once(tmp_path: Path, exchange: Any) -> None:
    names = ("anna", "bert", "carl", "dora")
    victim: list[str] = []
    lock = threading.Lock()

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Any) -> None:
        with lock:
            if grid.step == 8 and pipe.stage == 1 and not victim:
                victim.append(seen.name)
                group.kill(seen.name)

    with Workers(tmp_path, 4, data=Numbered(), epochs=1, exchange=exchange) as group:
        group.before = before
        group.add(*names)
        group.join(*names)
        group.finish(*(name for name in names if name not in victim))
    assert len(victim) == 1
    assert counted(group) == Counter(range(SAMPLES))
    survivors = [worker for name, worker in group.seen.items() if name not in victim]
    steps = set().union(*(worker.losses for worker in survivors))
    for step in steps:
        assert len({worker.losses[step] for worker in survivors if step in worker.losses}) == 1


def test_a_stage_without_a_worker_waits_for_a_newcomer_and_goes_back_to_checkpoints(tmp_path: Path) -> None:
    dead = threading.Event()

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Any) -> None:
        if grid.step == 14 and pipe.stage == 1 and not dead.is_set():
            victim.append(seen.name)
            group.kill(seen.name)
            dead.set()

    victim: list[str] = []
    with Workers(tmp_path, 2, data=Numbered(), checkpoint_every=5, epochs=1) as group:
        group.before = before
        group.add("anna", "bert")
        assert dead.wait(WITHIN_S)
        survivor = next(name for name in ("anna", "bert") if name not in victim)
        group.threads[victim[0]].join(WITHIN_S)
        # It rejoins with another name and its old disk.
        (tmp_path / victim[0]).rename(tmp_path / "carl")
        group.add("carl")
        group.finish(survivor, "carl")
    assert group.seen["carl"].stage == 1
    # Steps 10 to 13 are lost; from step 10 on both agree, and every sample of the pass was committed.
    assert min(group.seen["carl"].losses) == 10
    both = group.seen[survivor].losses
    assert {step: both[step] for step in group.seen["carl"].losses} == group.seen["carl"].losses
    assert set(counted(group)) == set(range(SAMPLES))
    exported = export_model(tmp_path, tmp_path / "whole.safetensors")
    names = set(safetensors.torch.load_file(tmp_path / "whole.safetensors"))
    assert names == set(nn.Sequential(*layers()).state_dict()), "the assembled stages of a checkpoint"
    assert exported.step % 5 == 0 and exported.step >= 15


def test_a_stage_survives_a_lost_disk_by_the_neighbours_copy(tmp_path: Path) -> None:
    dead, copied = threading.Event(), threading.Event()
    victim: list[str] = []

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Any) -> None:
        if pipe.stage == 0:
            names = {path.parent.name for path in tmp_path.glob(f"{seen.name}/blocks-002-004/step-*")}
            if names and grid.step > 10:
                copied.set()
        elif copied.is_set() and not dead.is_set():
            victim.append(seen.name)
            group.kill(seen.name)
            dead.set()

    with Workers(tmp_path, 2, data=Numbered(), checkpoint_every=5, epochs=1, cuts=(0, 2, 4)) as group:
        group.before = before
        group.add("anna", "bert")
        assert dead.wait(WITHIN_S), "the first stage's disk has no copy"
        survivor = next(name for name in ("anna", "bert") if name not in victim)
        group.threads[victim[0]].join(WITHIN_S)
        group.add("carl")  # with an empty disk
        group.finish(survivor, "carl")
    first = min(group.seen["carl"].losses)
    assert first % 5 == 0 and first >= 5, "the run went back to a checkpoint, not to its start"
    assert group.seen[survivor].losses[first] == group.seen["carl"].losses[first]


def test_a_newcomer_completes_the_second_replica(tmp_path: Path) -> None:
    arrived = threading.Event()

    def before(seen: Seen, grid: gridtrain.Grid, pipe: Any) -> None:
        if grid.step == 5 and grid.world_size == 2 and not arrived.is_set():
            arrived.set()
            group.add("carl", "dora")

    with Workers(tmp_path, 2, data=Numbered(), epochs=8) as group:
        group.before = before
        group.add("anna", "bert")
        assert arrived.wait(WITHIN_S)
        group.finish("anna", "bert", "carl", "dora")
    assert sorted(worker.stage for worker in group.seen.values()) == [0, 0, 1, 1]
    assert counted(group) == Counter(dict.fromkeys(range(SAMPLES), 8))
    of_stage: dict[int, list[Seen]] = {}
    for worker in group.seen.values():
        of_stage.setdefault(worker.stage, []).append(worker)
    for one, other in of_stage.values():
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())


def test_replicas_that_have_drawn_other_initial_values_are_equal_after_the_first_step() -> None:
    """Other versions of a library may draw other values, and nobody has sent any yet."""
    numbers = itertools.count()

    def train(grid: gridtrain.Grid) -> tuple[int, dict[str, torch.Tensor]]:
        value = 0.1 + 0.01 * next(numbers)

        def init(block: nn.Module, number: int) -> None:
            for parameter in block.parameters():
                nn.init.constant_(parameter, value)

        pipe = pipeline_of(grid, layers, init=init)
        for x, y in grid.batches(data(24), batch_size=4, steps=3):
            pipe.step(x, y)
        return pipe.stage, {name: value.clone() for name, value in pipe.module.state_dict().items()}

    stages: dict[int, list[dict[str, torch.Tensor]]] = {}
    for stage, state in local(train, workers=4):
        stages.setdefault(stage, []).append(state)
    assert [len(states) for states in stages.values()] == [2, 2]
    for one, other in stages.values():
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_standby_is_not_the_first_worker_at_the_end() -> None:
    def train(grid: gridtrain.Grid) -> bool:
        pipe = pipeline_of(grid)
        for x, y in grid.batches(data(24), batch_size=4, steps=3):
            pipe.step(x, y)
        return grid.is_first

    assert sorted(local(train, workers=3)) == [False, False, True]
