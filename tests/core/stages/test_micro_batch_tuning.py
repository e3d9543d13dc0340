"""`micro_batches="auto"`: from two sizes of micro-batches to the best number, the same for all who ask."""

import math
from dataclasses import replace

import pytest

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages.micro_batch_tuning import (
    MEASURED_TRIALS,
    TRIALS,
    StepTimings,
    choose_micro_batches,
    is_complete,
    trial_micro_batches,
)
from gridtrain.core.stages.schedule import divide_samples, one_forward_one_backward
from gridtrain.core.stages.stage_cost import ScheduleKind
from stages.timetable import timetable

BATCH = 64


def told(seats, overhead_s, per_sample_s, hop_s=0.0, batch=BATCH, most=math.inf):
    """What all members tell of the trials: forward takes overhead + n x per sample, backward twice that."""
    steps = []
    for number in range(len(TRIALS)):
        n = divide_samples(batch, trial_micro_batches(number, seats.stages))[0]
        warm = 1.0 if number in MEASURED_TRIALS else 7.0  # a first step of a size takes long
        forward_s = warm * (overhead_s + n * per_sample_s)
        figures = StepTimings(forward_s, 2 * forward_s, 0.0, batch, most)
        turn_s = (seats.stages - 1) * (2 * hop_s + 3 * forward_s) if hop_s else 0.0
        firsts = seats.stage_ranks(0)
        steps.append(
            tuple(
                replace(figures, round_trip_s=turn_s if rank in firsts else 0.0)
                for rank in range(seats.world_size)
            )
        )
    return steps


def best_by_hand(stages, overhead_s, per_sample_s, batch=BATCH):
    """(M + S - 1) micro-batches one after the other, for each number that divides the batch."""
    times = {
        m: (m + stages - 1) * 3 * (overhead_s + batch // m * per_sample_s)
        for m in range(1, batch + 1)
        if batch % m == 0
    }
    return min(times, key=times.get), times


@pytest.mark.parametrize(
    ("overhead_s", "per_sample_s"), [(0.0, 0.001), (0.001, 0.001), (0.005, 0.0003), (0.02, 0.0001)]
)
def test_the_number_is_within_a_few_percent_of_the_best_by_hand(overhead_s, per_sample_s):
    seats = RankLayout(4, 1)
    chosen = choose_micro_batches(
        told(seats, overhead_s, per_sample_s), seats, ScheduleKind.FILL_DRAIN, 0.0
    ).micro_batches
    best, times = best_by_hand(4, overhead_s, per_sample_s)
    m = min(times, key=lambda each: abs(each - chosen))
    assert times[m] <= 1.1 * times[best], f"{chosen}, best {best}"


def test_much_overhead_means_few_micro_batches_and_none_means_many():
    seats = RankLayout(4, 1)
    numbers = [
        choose_micro_batches(
            told(seats, overhead_s, 0.001), seats, ScheduleKind.ONE_F_ONE_B, 1.0
        ).micro_batches
        for overhead_s in (0.0, 0.001, 0.004, 0.05)
    ]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] >= 16 and numbers[-1] <= 4


def test_links_count():
    """Where each payload is 5 ms late, two in each round of a stage, plain 1F1B wants large micro-batches."""
    seats = RankLayout(4, 1)
    near = choose_micro_batches(told(seats, 1e-5, 0.0005), seats, ScheduleKind.ONE_F_ONE_B, 0.0)
    far = choose_micro_batches(told(seats, 1e-5, 0.0005, hop_s=0.005), seats, ScheduleKind.ONE_F_ONE_B, 0.0)
    assert far.micro_batches < near.micro_batches

    def step_s(m):
        forward_s = 1e-5 + math.ceil(BATCH / m) * 0.0005
        schedule = one_forward_one_backward(4, m)
        return timetable(schedule, forward_s, 2 * forward_s, latency_s=0.005).makespan_s

    assert step_s(far.micro_batches) < step_s(near.micro_batches)


def test_no_micro_batch_is_larger_than_every_member_can_hold():
    seats = RankLayout(4, 2)
    steps = told(seats, 0.05, 0.0001)
    assert choose_micro_batches(steps, seats, ScheduleKind.FILL_DRAIN, 0.0).micro_batches < 8
    small = [
        tuple(replace(f, max_micro_batch_samples=8.0 if rank == 5 else math.inf) for rank, f in enumerate(t))
        for t in steps
    ]
    assert choose_micro_batches(small, seats, ScheduleKind.FILL_DRAIN, 0.0).micro_batches == 8
    tiny = [
        tuple(replace(f, max_micro_batch_samples=1.0) for f in t) for t in steps
    ]  # less than what was tried: that did fit
    assert choose_micro_batches(tiny, seats, ScheduleKind.FILL_DRAIN, 0.0).micro_batches == 16


def test_the_slowest_replica_counts():
    seats = RankLayout(2, 2)
    steps = told(seats, 0.0, 0.001)
    slow = [
        tuple(replace(f, forward_s=f.forward_s + 0.05 * (rank == 3)) for rank, f in enumerate(t))
        for t in steps
    ]
    plain, held_up = (
        choose_micro_batches(each, seats, ScheduleKind.FILL_DRAIN, 0.0).micro_batches
        for each in (steps, slow)
    )
    assert held_up < plain


def test_one_size_to_try_leaves_the_first_trial():
    seats = RankLayout(4, 1)
    chosen = choose_micro_batches(told(seats, 0.01, 0.001, batch=6), seats, ScheduleKind.FILL_DRAIN, 0.0)
    assert chosen.micro_batches == 16 and "one size" in chosen.reason


def test_a_model_that_was_cut_anew_has_trials_of_the_stages_that_it_began_with():
    """Two stages are left of three; batches were divided as for three."""
    figures = told(RankLayout(3, 1), 0.01, 0.001, batch=48)
    two = [step[:2] for step in figures]
    chosen = choose_micro_batches(two, RankLayout(2, 1), ScheduleKind.FILL_DRAIN, 0.0, stages=3)
    as_two = choose_micro_batches(
        told(RankLayout(2, 1), 0.01, 0.001, batch=48), RankLayout(2, 1), ScheduleKind.FILL_DRAIN, 0.0
    )
    assert chosen.micro_batches == as_two.micro_batches, "what a micro-batch takes is the same"


def test_trials_end():
    steps = told(RankLayout(3, 1), 0.0, 0.001)
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
def test_what_no_clock_shows_does_not_fit(bad):
    assert StepTimings().is_plausible()
    assert not replace(StepTimings(), **bad).is_plausible()
