"""Groups that lease shards of their data, under the checks of `test_world`, with all its faults."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.core.commit.shard_leases import locate
from simulation import test_world as group
from simulation.world import World

SHARDS = (9, 3, 14, 5, 1, 17, 11)  # 60 samples, as `group.SAMPLES`
Seeds = Any
Book = dict[m.RoundId, list[group.ToyTrainer.Attempt]]


def shards_read(world: World) -> dict[tuple[int, int], set[m.PeerId]]:
    """The workers that read each shard, by pass and shard."""
    spec = m.LedgerSpec(sum(SHARDS), 1, epochs=2, shards=SHARDS)
    readers: dict[tuple[int, int], set[m.PeerId]] = defaultdict(set)
    for submission in world.log.submissions:
        for span in submission.spans:
            for position in range(span.start, span.stop):
                readers[position // spec.size, locate(spec, position)[0]].add(submission.peer)
    return readers


@pytest.mark.parametrize("kind", group.KINDS)
def test_a_group_without_faults_reads_most_shards_on_one_worker(kind: str) -> None:
    world, book = group.build(1, kind, workers=3, shards=SHARDS)
    world.run(60.0)
    group.check(world, book)
    assert world.log.generations == 1
    assert len(world.log.commits) == 3 * 14, "60 samples in steps of 3 x 3, twice: as without shards"
    readers = shards_read(world)
    assert len(readers) == 2 * len(SHARDS)
    assert sum(len(peers) > 1 for peers in readers.values()) <= 2 * 2, "shards that are divided at the end"


def history(seed: int) -> tuple[World, Book]:
    random = Random(seed)
    kind = group.KINDS[seed % len(group.KINDS)]
    delay = seed % 4 == 3
    stalls = seed % 4 == 1
    world, book = group.build(
        seed,
        kind,
        workers=random.randint(1, 5),
        delay=int(delay),
        shards=SHARDS * 6 if stalls else SHARDS,  # stragglers are known after some steps
        skips=random.choice((0.0, 0.0, 0.02)),
        slow_restore=random.choice((0.0, 0.0, 0.2)),
        may_be_absent=stalls,
        **({"compute_s": (0.02, 0.03)} if stalls else {}),
    )
    trouble = group.Trouble(world, random)
    trouble.plan(events=random.randint(1, 8))
    if stalls:
        for _ in range(8):
            world.at(random.uniform(0.2, 5.0), lambda: stall_one(trouble))
    world.run(900.0)
    for worker in world.alive:
        worker.wake()
    return world, book


def stall_one(trouble: group.Trouble) -> None:
    for worker in trouble.some():
        worker.stall(trouble.random.choice((0.3, 1.0, 3.0)))


COVERING = (1, 77)
"""Seeds with absences."""


def test_guarantees_hold_with_shards(seeds: Seeds) -> None:
    totals: Counter[str] = Counter()
    for seed in seeds(400, always=COVERING, drawn=20):
        world, book = history(seed)
        if not world.alive or world.log.start_overs or world.log.blank_backups:
            continue  # as in `test_delay`
        group.check(world, book, 60 * (6 if seed % 4 == 1 else 1))
        totals.update({name: getattr(world.log, name) for name in group.WHAT_HAPPENS})
        totals["absences"] += len(world.log.absences)
    print(dict(totals))
    if not seeds.is_replay:
        assert totals["generations"] and totals["aborts"] and totals["absences"], dict(totals)
