"""Time to accuracy: the evaluation of a run's records, and the same model and data for all contenders."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from accuracy.__main__ import OURS, RIVALS, extrapolated, options_of, ours, steps_of, summary, table
from accuracy.train import read
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
    run = summary(read(path), "gpt", "20Mbit", "gtopk", Gpt.target)
    assert (run.seconds, run.step, run.megabytes) == (4.0, 4, 4.0)
    assert run.step_s == 1.0  # the median of the steps after the first two
    slow = summary(LINES[:3], "gpt", "20Mbit", "gloo", Gpt.target)
    assert slow.seconds is None and slow.last_loss == 2.6
    shown = table([slow, run], "gloo").splitlines()
    assert "not in 3 s: 2.60" in shown[2]
    assert "| 4.0 | 4 | 4.0 |  | 1000 |" in shown[3]  # no ratio to a run without a time


def test_the_ratio_compares_times_to_the_target() -> None:
    slow = summary(
        [dict(line, seconds=3 * line["seconds"]) for line in LINES], "gpt", "20Mbit", "gloo", Gpt.target
    )
    quick = summary(LINES, "gpt", "20Mbit", "gtopk", Gpt.target)
    assert "| gtopk | 4.0 | 4 | 4.0 | 3.0 |" in table([slow, quick], "gloo")


def test_the_time_of_a_whole_run_is_extrapolated_from_a_short_one(tmp_path: Path) -> None:
    records = [dict(LINES[0], step=i, seconds=2.0 + i, sent_bytes=1_000_000 * i) for i in range(1, 13)]
    short = summary(records, "gpt", "20Mbit", "gloo", Gpt.target)
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


@pytest.mark.parametrize("contender", OURS)
def test_each_contender_has_settings_and_an_exchange(contender: str) -> None:
    for workload in WORKLOADS.values():
        family = OURS[contender][0]
        if set(workload.settings) == {"adamw", "local"} and family not in workload.settings:
            continue  # language models have only settings for AdamW
        options = ours(options_of([]), workload, contender)
        assert options.family in workload.settings and options.until_loss == workload.target
        assert options.make_exchange().describe()
        assert (options.every > 0) is contender.startswith("local")


def test_local_steps_and_their_density_can_be_chosen() -> None:
    chosen = ours(options_of(["--gathered", "8/2", "density=0.03,values=int2"]), Gpt, "local-topk")
    assert (chosen.every, chosen.overlap, chosen.exchange) == (8, 2, "topk:density=0.03,values=int2")


def test_each_workload_has_settings_for_rivals() -> None:
    families = {family for _, family in RIVALS.values()}
    assert all(families & set(workload.settings) for workload in WORKLOADS.values())
    assert options_of([]).baseline == "gloo"
