"""Groups that exchange a step's gradients while the next step computes, under the checks of `test_world`."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from gridtrain.core import messages as m
from simulation import test_world as group
from simulation.world import World

Seeds = Any
Book = dict[m.RoundId, list[group.ToyTrainer.Attempt]]
KINDS = group.KINDS + group.OTHER_KINDS
RETURNS_PREPARED = 248_454
"""The root returns prepared for step 0, which the others have committed without it, with an equal update."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_without_faults_needs_one_step_more(kind: str) -> None:
    """120 samples in steps of 4 x 3: two passes of five steps, and the step that exchanges the last ones."""
    world, book = group.build(1, kind, workers=4, delay=1)
    world.run(60.0)
    group.check(world, book)
    assert world.log.generations == 1
    assert len(world.log.commits) == 4 * 11
    assert world.log.aborts == world.log.voided == 0


def history(seed: int, kind: str) -> tuple[World, Book]:
    random = Random(seed)
    world, book = group.build(
        seed,
        kind,
        workers=random.randint(1, 5),
        delay=1,
        skips=random.choice((0.0, 0.0, 0.02)),
        slow_restore=random.choice((0.0, 0.0, 0.2)),
    )
    group.Trouble(world, random).plan(events=random.randint(1, 8))
    world.run(900.0)
    return world, book


def test_guarantees_hold_with_a_delay(seeds: Seeds) -> None:
    totals: Counter[str] = Counter()
    for seed in seeds(400, always=(RETURNS_PREPARED,), drawn=60):
        world, book = history(seed, KINDS[seed % len(KINDS)])
        if world.log.start_overs or world.log.blank_backups:
            continue  # the run has started over: `check` cannot distinguish the rounds of both runs
        group.check(world, book)
        totals.update({name: getattr(world.log, name) for name in (*group.WHAT_HAPPENS, "repeated")})
    print(dict(totals))
    if not seeds.is_replay:
        assert totals["generations"] and totals["aborts"], dict(totals)
