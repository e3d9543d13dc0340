"""A model in three stages on real processes: after SIGKILL of the middle one, two repartition the model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from integration.scripts import pipeline
from integration.scripts.pipeline import SAMPLES
from torch import nn

from gridtrain.pipeline import Blueprint

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "scripts" / "pipeline.py"
NAMES = ("anna", "bert", "clara")
FINE, KILLED = 0, 137


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
                name, script=SCRIPT, flags=flags, stages=3, batch_size=4, epochs=1,
                dies_at=25, stage=1,
            )
            for name in NAMES
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
