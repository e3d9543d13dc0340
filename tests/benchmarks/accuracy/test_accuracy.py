"""Time to accuracy: the evaluation of a run's records, and the same model and data for all contenders."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from accuracy.__main__ import RIVALS, extrapolated, options_of, read, steps_of, summary, table
from accuracy.train import EXCHANGES, exchange_of, parse
from accuracy.workloads import (
    WORKLOADS,
    ByteLSTM,
    Gpt,
    Gpt10M,
    Llama30M,
    Lora114M,
    Lstm,
    ResNet20,
    trained_of,
)

LINES = [
    {"step": 1, "seconds": 1.0, "loss": 5.0, "held_out": None, "sent_bytes": 1_000_000},
    {"step": 2, "seconds": 2.5, "loss": 4.0, "held_out": 2.6, "sent_bytes": 2_000_000},
    {"step": 3, "seconds": 3.0, "loss": 3.0, "held_out": None, "sent_bytes": 3_000_000},
    {"step": 4, "seconds": 4.0, "loss": 2.3, "held_out": 2.3, "sent_bytes": 4_000_000},
    {"step": 5, "seconds": 5.0, "loss": 2.2, "held_out": 2.2, "sent_bytes": 5_000_000},
]


def test_a_run_ends_where_its_held_out_loss_reaches_the_target(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES) + '\n{"step": 6, "sec')
    run = summary(read(path), Gpt(), "20Mbit", "gtopk")
    assert (run.seconds, run.step, run.megabytes) == (4.0, 4, 4.0)
    assert run.step_s == 1.0  # the median of the steps after the first two
    slow = summary(LINES[:3], Gpt(), "20Mbit", "gloo")
    assert slow.seconds is None and slow.last_loss == 2.6
    shown = table([slow, run], "gloo").splitlines()
    assert "not in 3 s: 2.60" in shown[2]
    assert "| 4.0 | 4 | 4.0 |  | 1000 |" in shown[3]  # no ratio to a run without a time


def test_the_ratio_compares_times_to_the_target() -> None:
    slow = summary([dict(line, seconds=3 * line["seconds"]) for line in LINES], Gpt(), "20Mbit", "gloo")
    quick = summary(LINES, Gpt(), "20Mbit", "gtopk")
    assert "| gtopk | 4.0 | 4 | 4.0 | 3.0 |" in table([slow, quick], "gloo")


def test_the_time_of_a_whole_run_is_extrapolated_from_a_short_one(tmp_path: Path) -> None:
    records = [dict(LINES[0], step=i, seconds=2.0 + i, sent_bytes=1_000_000 * i) for i in range(1, 13)]
    short = summary(records, Gpt(), "20Mbit", "gloo")
    whole = extrapolated(records, short, 400)
    assert (whole.seconds, whole.step, whole.megabytes, whole.timed_steps) == (402.0, 400, 400.0, 10)
    assert "| 402.0 (of 10 steps) | 400 | 400.0 |" in table([whole], "")
    assert extrapolated(records[:3], short, 400) is short  # no steps to average
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"runs": [asdict(whole), asdict(short)]}))
    assert steps_of(path) == {("gpt", "gloo"): 400}


@pytest.mark.parametrize("workload", [Gpt, Lstm])
def test_equal_seeds_give_equal_models(workload: type[Gpt]) -> None:
    one, other = workload().model(3), workload().model(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    x, y = workload().train[0]
    loss = workload().loss(one, x.unsqueeze(0), y.unsqueeze(0))
    assert 4.0 < loss.item() < 7.0  # about ln 256, as it is untrained


def test_models_have_the_documented_sizes() -> None:
    assert sum(p.numel() for p in Gpt10M().model(0).parameters()) == 10_770_432
    assert sum(p.numel() for p in Llama30M().model(0).parameters()) == 30_942_720
    lora = Lora114M().model(0)
    assert sum(p.numel() for p in lora.parameters()) - 3_391_488 == 113_658_624
    assert sum(p.numel() for p in trained_of(lora)) == 3_391_488
    assert sum(p.numel() for p in ByteLSTM(64, 128).parameters()) == 280_832
    assert sum(p.numel() for p in ResNet20().parameters()) == 269_434
    assert ResNet20()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("name", EXCHANGES)
def test_each_exchange_has_settings(name: str) -> None:
    options = parse(["--workload", "gpt", "--exchange", name, "--folder", "unused"])
    family, exchange = exchange_of(options)
    assert exchange is not None
    for workload in WORKLOADS.values():  # language models have only settings for AdamW
        assert family in workload.settings or set(workload.settings) == {"adamw", "local"}


def test_each_workload_has_settings_for_rivals() -> None:
    families = {family for _, family in RIVALS.values()}
    assert all(families & set(workload.settings) for workload in WORKLOADS.values())
    assert options_of([]).baseline == "gloo"
