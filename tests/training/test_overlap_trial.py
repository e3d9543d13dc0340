"""Trials of overlap: all members make the same decision whether it saves time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import gridtrain
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.overlap_trial import (
    PERIOD_STEPS,
    SECOND_PHASE,
    TRIAL_STEPS,
    WARM_UP_STEPS,
    OverlapTrial,
)


def plan(step: int, rank: int = 0, world_size: int = 1, generation: int = 1, first_step: int = 0) -> StepPlan:
    return StepPlan(
        step,
        0,
        rank,
        world_size,
        samples=1,
        total_samples=world_size,
        generation=generation,
        first_step=first_step,
    )


class Members:
    """A group's trials, and a letter for each step: E for early, w for whole, W for whole with the table."""

    def __init__(self, size: int, adaptive: bool = True) -> None:
        self.trials = [OverlapTrial(adaptive) for _ in range(size)]
        self.history = ""
        self.decided: list[str] = []

    def step(self, step, took_s, *, skip=False, generation=1, first_step=0):
        """`took_s(rank, early)`: seconds; None: this member had no backward."""
        size = len(self.trials)
        plans = [plan(step, rank, size, generation, first_step) for rank in range(size)]
        (early,) = {trial.is_overlapped(each) for trial, each in zip(self.trials, plans, strict=True)}
        tables = [trial.make_table(each) for trial, each in zip(self.trials, plans, strict=True)]
        assert len({table is None for table in tables}) == 1
        self.history += "E" if early else "w" if tables[0] is None else "W"
        if tables[0] is not None and not skip:
            sums = np.sum([table.update for table in tables], axis=0, dtype=np.float32)
            decided = [trial.apply_table(each, sums) for trial, each in zip(self.trials, plans, strict=True)]
            self.decided += [text for text in decided[:1] if text]
            assert len(set(decided)) == 1
        for rank, (trial, each) in enumerate(zip(self.trials, plans, strict=True)):
            seconds = took_s(rank, early)
            if seconds is not None:
                trial.record_duration(each, seconds)

    def run(self, steps, took_s, **options):
        for step in range(steps):
            self.step(step, took_s, **options)
        return self


TRIAL = "EEEwwwEEEwww"
THEN = SECOND_PHASE - WARM_UP_STEPS - TRIAL_STEPS - 1


def test_overlap_that_saves_no_time_is_turned_off():
    members = Members(3).run(120, lambda rank, early: 1.1 if early else 1.0)
    assert members.history == "ww" + TRIAL + "W" + "w" * THEN + TRIAL + "W" + "w" * 7
    assert members.decided == [
        "overlap is off from step 16, because it does not save at least 2%: the backward pass and the "
        "exchange take 1.1 s with overlap, 1 s without; overlap will be tried again in step 101"
    ]


def test_overlap_that_saves_time_stays_on():
    members = Members(3).run(120, lambda rank, early: 0.9 if early else 1.0)
    # The table is sent in a step of the previous mode, whole at first.
    assert members.history == "ww" + TRIAL + "W" + "E" * THEN + TRIAL + "E" + "E" * 7
    assert members.decided == [
        "overlap is on from step 16: the backward pass and the exchange take 900 ms with overlap, 1 s without"
    ]


def test_a_later_trial_can_turn_overlap_on_again():
    members = Members(2)
    for step in range(PERIOD_STEPS + 20):
        faster = 0.8 if SECOND_PHASE <= step < PERIOD_STEPS else 1.2
        members.step(step, lambda rank, early, faster=faster: faster if early else 1.0)
    assert members.history[15:100] == "w" * 85
    assert members.history[113:600] == "E" * 487
    assert members.history[613:] == "w" * 7
    assert [text.split(":")[0] for text in members.decided] == [
        "overlap is off from step 16, because it does not save at least 2%",
        "overlap is on from step 114",
        "overlap is off from step 614, because it does not save at least 2%",
    ]


@pytest.mark.parametrize(("early_s", "pays"), [(0.97, True), (0.99, False), (1.0, False), (1.03, False)])
def test_overlap_must_save_more_than_the_variation_of_steps(early_s, pays):
    members = Members(1).run(16, lambda rank, early: early_s if early else 1.0)
    assert members.trials[0].is_worthwhile is pays


def test_the_first_steps_of_a_mode_do_not_count():
    members = Members(1)
    for step in range(16):
        first = step >= WARM_UP_STEPS and (step - WARM_UP_STEPS) % 3 == 0
        members.step(
            step, lambda rank, early, first=first: 60.0 if first and early else 0.9 if early else 1.0
        )
    assert members.trials[0].is_worthwhile


def test_a_new_generation_begins_a_new_trial():
    members = Members(2).run(20, lambda rank, early: 0.9 if early else 1.0)
    members.history = ""
    for step in range(20, 40):
        members.step(step, lambda rank, early: 1.1 if early else 1.0, generation=2, first_step=20)
    assert members.history == "ww" + TRIAL + "W" + "w" * 5
    assert len(members.decided) == 2


def test_the_table_is_sent_again_after_a_skipped_step():
    members = Members(2).run(14, lambda rank, early: 0.9 if early else 1.0)
    members.step(14, lambda rank, early: 1.0, skip=True)
    members.step(15, lambda rank, early: 1.0)
    members.step(16, lambda rank, early: 1.0)
    assert members.history == "ww" + TRIAL + "WWE"


@pytest.mark.parametrize("claimed_s", [1e-9, 1e9, float("inf"), None])
def test_a_single_member_cannot_decide(claimed_s):
    """A dishonest member, one whose clock jumps, and one without samples, whose row is empty."""
    members = Members(3).run(
        16, lambda rank, early: claimed_s if rank == 1 and early else 1.1 if early else 1.0
    )
    assert not members.trials[0].is_worthwhile
    members = Members(3).run(
        16, lambda rank, early: claimed_s if rank == 1 and not early else 0.9 if early else 1.0
    )
    assert members.trials[0].is_worthwhile


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -1.0])
def test_an_empty_table_changes_nothing(value):
    trial = OverlapTrial(adaptive=True)
    assert trial.apply_table(plan(14), np.full(2, value, np.float32)) == ""
    assert not trial.is_worthwhile
    assert trial.make_table(plan(15)) is None


def test_overlap_without_trials_is_always_on():
    members = Members(2, adaptive=False).run(700, lambda rank, early: 2.0 if early else 1.0)
    assert members.history == "E" * 700


@pytest.mark.parametrize("seed", range(20))
def test_members_always_agree(seed):
    """Members measure different times, steps are skipped, generations change; `Members.step` compares."""
    rng = random.Random(seed)
    members, generation, first_step = Members(rng.randint(2, 5)), 1, 0
    for step in range(300):
        if rng.random() < 0.01:
            generation, first_step = generation + 1, step
        members.step(
            step,
            lambda rank, early: None if rng.random() < 0.1 else rng.lognormvariate(0, 1),
            skip=rng.random() < 0.2,
            generation=generation,
            first_step=first_step,
        )
    assert {"E", "w"} <= set(members.history), f"seed {seed}"


# -- sizes that are worth overlapping --------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "least"),
    [
        (gridtrain.Dense(), 65_536),
        (gridtrain.GTopK(density=0.001), 6_000_000),
        (gridtrain.TopK(density=0.01), 600_000),
        (gridtrain.GTopK(density=0.5), 65_536),
    ],
)
def test_a_bucket_is_worth_its_messages(exchange, least):
    assert gridtrain.Overlap().least_of(exchange) == least
    assert gridtrain.Overlap(least=7).least_of(exchange) == 7


def test_a_model_too_small_for_buckets_is_not_overlapped_and_this_is_logged(network, caplog):
    model = torch.nn.Linear(400, 400)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange, session = gridtrain.GTopK(density=0.01), network().session()
    wrapped = GridOptimizer(sgd, model, exchange, session, overlap=gridtrain.Overlap())
    assert not wrapped.is_overlapping
    assert caplog.messages == [
        "overlap is off: 160400 elements in 2 parameters, from the last one on, do not fill two buckets of "
        "whole parameters with at least 600000 elements each"
    ]
