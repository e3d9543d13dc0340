"""`micro_batches="auto"`: the best number from trials of two sizes, equal on all members."""

import math
from dataclasses import replace

import pytest
from timetable import timetable

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages.micro_batch_trials import (
    MAX_FIGURE,
    MEASURED_TRIALS,
    TRIALS,
    StepTimings,
    choose_micro_batches,
    is_complete,
    trial_micro_batches,
)
from gridtrain.core.stages.schedule import divide_samples, one_forward_one_backward
from gridtrain.core.stages.stage_cost import ScheduleKind

BATCH = 64


def trial_timings(layout, overhead_s, per_sample_s, hop_s=0.0, batch=BATCH, most=math.inf):
    """Timings of all members: a forward pass takes overhead + n x per sample, a backward pass twice that."""
    steps = []
    for number in range(len(TRIALS)):
        n = divide_samples(batch, trial_micro_batches(number, layout.stages))[0]
        warm = 1.0 if number in MEASURED_TRIALS else 7.0  # the first step of a size takes longer
        forward_s = warm * (overhead_s + n * per_sample_s)
        figures = StepTimings(forward_s, 2 * forward_s, 0.0, batch, most)
        turn_s = (layout.stages - 1) * (2 * hop_s + 3 * forward_s) if hop_s else 0.0
        firsts = layout.stage_ranks(0)
        steps.append(
            tuple(
                replace(figures, round_trip_s=turn_s if rank in firsts else 0.0)
                for rank in range(layout.world_size)
            )
        )
    return steps


def best_by_formula(stages, overhead_s, per_sample_s, batch=BATCH):
    """Times of (M + S - 1) micro-batches in sequence, for each number that divides the batch."""
    times = {
        m: (m + stages - 1) * 3 * (overhead_s + batch // m * per_sample_s)
        for m in range(1, batch + 1)
        if batch % m == 0
    }
    return min(times, key=times.get), times


@pytest.mark.parametrize(
    ("overhead_s", "per_sample_s"), [(0.0, 0.001), (0.001, 0.001), (0.005, 0.0003), (0.02, 0.0001)]
)
def test_the_chosen_number_is_within_a_tenth_of_the_best_by_formula(overhead_s, per_sample_s):
    layout = RankLayout(4, 1)
    chosen = choose_micro_batches(
        trial_timings(layout, overhead_s, per_sample_s), layout, ScheduleKind.FILL_DRAIN, 0.0
    ).micro_batches
    best, times = best_by_formula(4, overhead_s, per_sample_s)
    m = min(times, key=lambda each: abs(each - chosen))
    assert times[m] <= 1.1 * times[best], f"{chosen}, best {best}"


def test_the_number_of_micro_batches_falls_with_overhead():
    layout = RankLayout(4, 1)
    numbers = [
        choose_micro_batches(
            trial_timings(layout, overhead_s, 0.001), layout, ScheduleKind.ONE_F_ONE_B, 1.0
        ).micro_batches
        for overhead_s in (0.0, 0.001, 0.004, 0.05)
    ]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] >= 16 and numbers[-1] <= 4


def test_latency_leads_to_larger_micro_batches():
    """With 5 ms latency per payload and two payloads per round of a stage, plain 1F1B needs large ones."""
    layout = RankLayout(4, 1)
    near = choose_micro_batches(trial_timings(layout, 1e-5, 0.0005), layout, ScheduleKind.ONE_F_ONE_B, 0.0)
    far = choose_micro_batches(
        trial_timings(layout, 1e-5, 0.0005, hop_s=0.005), layout, ScheduleKind.ONE_F_ONE_B, 0.0
    )
    assert far.micro_batches < near.micro_batches

    def step_s(m):
        forward_s = 1e-5 + math.ceil(BATCH / m) * 0.0005
        schedule = one_forward_one_backward(4, m)
        return timetable(schedule, forward_s, 2 * forward_s, latency_s=0.005).makespan_s

    assert step_s(far.micro_batches) < step_s(near.micro_batches)


def test_no_micro_batch_is_larger_than_every_member_can_hold():
    layout = RankLayout(4, 2)
    steps = trial_timings(layout, 0.05, 0.0001)
    assert choose_micro_batches(steps, layout, ScheduleKind.FILL_DRAIN, 0.0).micro_batches < 8
    small = [
        tuple(replace(f, max_micro_batch_samples=8.0 if rank == 5 else math.inf) for rank, f in enumerate(t))
        for t in steps
    ]
    assert choose_micro_batches(small, layout, ScheduleKind.FILL_DRAIN, 0.0).micro_batches == 8
    tiny = [
        tuple(replace(f, max_micro_batch_samples=1.0) for f in t) for t in steps
    ]  # less than the tried sizes, which did fit
    assert choose_micro_batches(tiny, layout, ScheduleKind.FILL_DRAIN, 0.0).micro_batches == 16


def test_the_slowest_replica_counts():
    layout = RankLayout(2, 2)
    steps = trial_timings(layout, 0.0, 0.001)
    slow = [
        tuple(replace(f, forward_s=f.forward_s + 0.05 * (rank == 3)) for rank, f in enumerate(t))
        for t in steps
    ]
    plain, delayed = (
        choose_micro_batches(each, layout, ScheduleKind.FILL_DRAIN, 0.0).micro_batches
        for each in (steps, slow)
    )
    assert delayed < plain


def test_with_one_size_to_try_the_first_trial_is_chosen():
    layout = RankLayout(4, 1)
    chosen = choose_micro_batches(
        trial_timings(layout, 0.01, 0.001, batch=6), layout, ScheduleKind.FILL_DRAIN, 0.0
    )
    assert chosen.micro_batches == 16 and "two sizes could not be compared" in chosen.reason


def test_a_repartitioned_model_uses_the_trials_of_its_first_partition():
    """Two of three stages remain; batches were divided for three."""
    figures = trial_timings(RankLayout(3, 1), 0.01, 0.001, batch=48)
    two = [step[:2] for step in figures]
    chosen = choose_micro_batches(two, RankLayout(2, 1), ScheduleKind.FILL_DRAIN, 0.0, stages=3)
    as_two = choose_micro_batches(
        trial_timings(RankLayout(2, 1), 0.01, 0.001, batch=48), RankLayout(2, 1), ScheduleKind.FILL_DRAIN, 0.0
    )
    assert chosen.micro_batches == as_two.micro_batches, "the time of a micro-batch is the same"


def test_the_number_of_trials_is_fixed():
    steps = trial_timings(RankLayout(3, 1), 0.0, 0.001)
    assert [trial_micro_batches(n, 3) for n in range(4)] == [12, 12, 24, 24]
    assert [is_complete(steps[:n]) for n in range(5)] == [False, False, False, False, True]


@pytest.mark.parametrize(
    "bad",
    [
        {"forward_s": -1.0},
        {"round_trip_s": math.nan},
        {"max_micro_batch_samples": math.nan},
        {"samples": math.inf},
        {"samples": 0.3},
        {"backward_s": 1e300},
    ],
)
def test_impossible_timings_are_implausible(bad):
    assert StepTimings().is_plausible() and StepTimings(MAX_FIGURE, 0.0).is_plausible()
    assert not replace(StepTimings(), **bad).is_plausible()
