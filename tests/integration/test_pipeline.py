"""A model in two stages on real processes: two replicas, of which one loses a member by SIGKILL.

0 1      0        the complete replica goes on, the fourth worker's partner is a standby;
2 3  ->  2        every sample is in exactly one committed step
  x

And three stages with one replica, whose middle worker is lost: the other two repartition the model.

A volunteer pauses the only worker of a stage:

anna   stage 0   ... 11 | 12 |  waits, the reason is shown  | 13  14 ...     every step once, the same losses,
bert   stage 1   ... 11 | 12 |  paused by its owner         | 13  14 ...     no step goes back
                        both wait until bert's agent has the command, however long it takes to start
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.scripts import pipeline
from integration.scripts.pipeline import SAMPLES
from torch import nn

from gridtrain.pipeline import Blueprint

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "scripts" / "pipeline.py"
NAMES = ("anna", "bert", "clara", "dora")
FINE, KILLED = 0, 137


def committed(programs: list[Any]) -> dict[int, dict[tuple[int, ...], float]]:
    """For each step the batches of its replicas, with the loss that each member reported."""
    steps: dict[int, dict[tuple[int, ...], float]] = {}
    for program in programs:
        for line in program.marked("step"):
            steps.setdefault(line["step"], {})[tuple(line["samples"])] = line["loss"]
    return steps


@pytest.mark.parametrize("exchange", ["dense", "gtopk"])
def test_two_stages_of_two_replicas_train_as_one_model(new_group, exchange: str) -> None:
    with new_group(min_workers=4) as group:
        programs = [
            group.add(name, script=SCRIPT, exchange=exchange, batch_size=4, epochs=1) for name in NAMES
        ]
        ends = group.finish()
    steps = committed(programs)
    assert Counter(s for batches in steps.values() for ids in batches for s in ids) == Counter(range(SAMPLES))
    assert all(len(set(batches.values())) == 1 for batches in steps.values()), "one loss for all"
    assert sorted(end["stage"] for end in ends) == [0, 0, 1, 1]
    assert len({(end["stage"], end["digest"]) for end in ends}) == 2, "replicas are alike, bit for bit"


@pytest.mark.parametrize("stage", [0, 1])
def test_training_goes_on_after_a_stage_is_killed(new_group, stage: int) -> None:
    with new_group(min_workers=4, codes=frozenset({FINE, KILLED, -9, 1})) as group:
        programs = [
            group.add(name, script=SCRIPT, exchange="dense", batch_size=4, epochs=1, dies_at=8, stage=stage)
            for name in NAMES
        ]
        group.wait("a death", lambda: any(program.marked("dies") for program in programs))
        ends = group.finish()
        dead = [program for program in programs if program.marked("dies")]
    assert len(dead) == 1 and len(ends) == 3
    steps = committed(programs)
    assert Counter(s for batches in steps.values() for ids in batches for s in ids) == Counter(range(SAMPLES))
    assert all(len(set(batches.values())) == 1 for batches in steps.values())


def unpartitioned(batches: dict[int, tuple[int, ...]]) -> dict[int, float]:
    """Losses of the unpartitioned model, on the same batches and in the same micro-batches."""
    model = nn.Sequential(*Blueprint(pipeline.layers).build(0, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, losses = pipeline.Numbered(), {}
    for step, ids in sorted(batches.items()):
        optimizer.zero_grad()
        losses[step] = 0.0
        for piece in torch.tensor(ids).split([len(ids) - len(ids) // 2, len(ids) // 2]):
            x, y, _ = zip(*(data[int(i)] for i in piece), strict=True)
            loss = nn.functional.mse_loss(model(torch.stack(x)), torch.stack(y)) * (len(piece) / len(ids))
            loss.backward()
            losses[step] += loss.item()
        optimizer.step()
    return losses


def test_two_survivors_of_three_stages_repartition_the_model(new_group) -> None:
    flags = ("--checkpoint-every", "4")
    with new_group(
        min_workers=3, codes=frozenset({FINE, KILLED, -9, 1}), flags=("--recut-after", "1")
    ) as group:
        programs = [
            group.add(
                name, script=SCRIPT, flags=flags, stages=3, exchange="dense", batch_size=4, epochs=1,
                dies_at=25, stage=1,
            )
            for name in NAMES[:3]
        ]  # fmt: skip
        group.wait("a death", lambda: any(program.marked("dies") for program in programs))
        ends = group.finish()
        dead = [program for program in programs if program.marked("dies")]
    assert len(dead) == 1 and len(ends) == 2
    assert sorted(end["stage"] for end in ends) == [0, 1], "two stages have the whole model"
    last = {line["step"]: line for program in programs for line in program.marked("step")}  # after a rollback
    assert sorted(last) == list(range(SAMPLES // 4))
    batches = {step: tuple(line["samples"]) for step, line in last.items()}
    assert Counter(s for ids in batches.values() for s in ids) == Counter(range(SAMPLES))
    alone = unpartitioned(batches)
    assert {step: line["loss"] for step, line in last.items()} == pytest.approx(alone, rel=1e-6)


def command(group: Any, *words: str) -> None:
    """Run a `gridtrain worker` command as the owner of that machine."""
    done = subprocess.run(
        (sys.executable, "-m", "gridtrain", "worker", *words),
        capture_output=True,
        text=True,
        timeout=60.0,
        env=os.environ | {"XDG_STATE_HOME": str(group.folder)},
    )
    assert done.returncode == 0, done.stderr


def test_the_run_waits_for_a_paused_stage_and_loses_no_step(new_group: Any) -> None:
    steps, gated_step = 200, 12
    with new_group(min_workers=2) as group:
        gate = group.gate()
        job = {"exchange": "gtopk", "batch_size": 4, "steps": steps, "step_s": 0.01}
        job |= {"gated_step": gated_step, "step_gate": gate.path}
        anna, bert = (group.add(name, script=SCRIPT, **job) for name in ("anna", "bert"))
        group.wait("step 12", lambda: all(worker.marked("at gate") for worker in (anna, bert)))
        command(group, "pause", "--worker", "bert")
        for _ in (anna, bert):
            gate.open()
        group.wait("the pause", lambda: bool(group.events("paused")))
        paused_at = len(anna.marked("step"))
        assert "1 worker is present, but 2 are needed" in group.events("paused")[-1]["reason"]
        command(group, "resume", "--worker", "bert")
        group.finish()
        assert group.events("rollback") == []
        assert "is held only by this worker" in bert.said()
    assert gated_step <= paused_at < steps
    for worker in (anna, bert):
        assert [line["step"] for line in worker.marked("step")] == list(range(steps))
    assert [line["loss"] for line in anna.marked("step")] == [line["loss"] for line in bert.marked("step")]
