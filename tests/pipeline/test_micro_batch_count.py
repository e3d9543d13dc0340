"""`micro_batches="auto"` in a group: all members make the same choice, and a newcomer uses it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import gridtrain
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages.micro_batch_trials import TRIALS, StepTimings
from gridtrain.core.stages.stage_cost import ScheduleKind
from gridtrain.pipeline.executor import StepResult
from gridtrain.pipeline.micro_batch_count import MAX_MICRO_BATCHES, MicroBatchCount, free_bytes
from gridtrain.sdk.local_group import local

LAYOUT = RankLayout(2, 1)


def reported(seconds: float) -> list[StepTimings]:
    return [StepTimings(seconds, 2 * seconds, 0.0, 64.0) for _ in range(2)]


def division() -> MicroBatchCount:
    return MicroBatchCount(None, 2, ScheduleKind.ONE_F_ONE_B, 1.0)


def test_a_given_number_does_not_change() -> None:
    fixed = MicroBatchCount(5, 2, ScheduleKind.ONE_F_ONE_B, 1.0)
    for _ in TRIALS:
        assert fixed.record_step(reported(0.1), LAYOUT) is None and fixed.number == 5
    assert fixed.step_timings(StepResult(None, 1.0, 1.0, 0, 1.0, 1.0), 8) == StepTimings()


def test_the_state_contains_the_choice_and_half_of_the_trials() -> None:
    one = division()
    numbers, times = [], (0.9, 0.08, 0.5, 0.05)
    for step, seconds in enumerate(times):
        numbers.append(one.number)
        other = division()
        other.load_state_dict(one.state_dict())
        chosen = [each.record_step(reported(seconds), LAYOUT) for each in (one, other)]
        assert chosen[0] == chosen[1] and (chosen[0] is not None) is (step == 3)
        assert other.state_dict() == one.state_dict()
    assert numbers == [8, 8, 16, 16]
    assert chosen[0] is not None and one.number == chosen[0].micro_batches
    assert (
        one.record_step(reported(0.5), LAYOUT) is None
        and one.step_timings(StepResult(None, 1, 1, 0, 1, 1), 8) == StepTimings()
    )
    one.reset()
    assert one.number == 8


def test_a_replica_without_samples_and_another_group_do_not_count() -> None:
    one = division()
    one.record_step([StepTimings(0.1, 0.1, 0.0, 8.0), StepTimings()], LAYOUT)
    assert one.state_dict()["told"] == []
    one.record_step(reported(0.1), LAYOUT)
    one.record_step(reported(0.1) * 2, RankLayout(2, 2))
    assert [len(step) for step in one.state_dict()["told"]] == [4]


@pytest.mark.parametrize(
    "state",
    [
        {"chosen": -1, "told": []},
        {"chosen": 0, "told": [[[math.nan] * 5]]},
        {"chosen": 0, "told": [[]] * 4},
        {"chosen": 0, "told": [[[0.1, 0.1, 0.0, 8.0, 8.0]], []]},
    ],
)
def test_an_impossible_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="micro-batches after"):
        division().load_state_dict(state)


@pytest.mark.parametrize("chosen", [MAX_MICRO_BATCHES + 1, 10**30])
def test_a_state_source_cannot_choose_more_micro_batches_than_a_script(chosen: int) -> None:
    one = division()
    with pytest.raises(ValueError, match=f"{chosen} micro-batches were chosen; at most 16384 are supported"):
        one.load_state_dict({"chosen": chosen, "told": []})
    assert one.number == 8, "as before"


def test_the_largest_micro_batch_depends_on_the_free_memory() -> None:
    free = free_bytes(torch.device("cpu"))
    one = division()
    assert one.needs_memory_measurement
    one.record_memory(free or 0, 4, torch.device("cpu"))
    most = one.step_timings(StepResult(None, 1.0, 1.0, 0, 1.0, 1.0), 8).max_micro_batch_samples
    assert most == math.inf if free is None else 4 <= most <= 8


def layers() -> list[nn.Module]:
    return [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)]


def test_a_group_finds_one_number_and_trains_on_with_it(tmp_path: Path) -> None:
    data = [(torch.randn(4), i % 3) for i in range(64)]

    def train(grid: gridtrain.Grid) -> tuple[list[int], list[float | None]]:
        pipe = grid.pipeline(
            layers,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            stages=2,
            loss_fn=nn.functional.cross_entropy,
            exchange=gridtrain.Dense(),
        )
        numbers, losses = [], []
        for inputs, targets in grid.batches(data, batch_size=32, steps=8):
            numbers.append(pipe.micro_batches)
            losses.append(pipe.step(inputs, targets))
        return numbers, losses

    one, other = local(train, workers=2, export_dir=str(tmp_path))
    assert one == other
    numbers, losses = one
    assert numbers[:4] == [8, 8, 16, 16] and len(set(numbers[4:])) == 1 and 1 <= numbers[4] <= 32
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
