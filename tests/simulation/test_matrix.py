"""Each exchange with a worker that joins, leaves or crashes while the group trains, one event a history.

Guarantees 1 to 5 are checked as in `test_world`, whose histories mix exchanges and events at random.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.test_world import ALL_KINDS, build, check, exempt
from simulation.world import SimWorker, World

WORKERS, FROM_STEP = 4, 2
RANKS = (0, 2)
"""Ranks that leave or crash: the root, which counts the votes, and another.  Also the seeds."""
Event = Callable[[World, SimWorker], SimWorker]
"""Lets something happen, to the given member or with a new one; returns the worker concerned."""


def join(world: World, member: SimWorker) -> SimWorker:
    return world.join()


def leave(world: World, member: SimWorker) -> SimWorker:
    world.leave(member.peer)
    return member


def leave_gracefully(world: World, member: SimWorker) -> SimWorker:
    world.leave_gracefully(member.peer)
    return member


def crash(world: World, member: SimWorker) -> SimWorker:
    world.crash(member.peer)
    return member


def is_training(world: World) -> bool:
    return len(world.alive) == WORKERS and all(
        worker.core.is_synced and worker.core.step >= FROM_STEP for worker in world.alive
    )


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("event", [join, leave, leave_gracefully, crash], ids=lambda event: event.__name__)
def test_guarantees_hold(kind: str, event: Event) -> None:
    samples = 150 if event is join else 60  # a newcomer is admitted after a second or two
    for seed in RANKS:
        world, book = build(seed, kind, workers=WORKERS, samples=samples, compute_s=(0.1, 0.2))
        while not is_training(world):
            assert not world.finished and world.now_s < 30.0, f"seed {seed}: the group does not train"
            world.run(world.now_s + 0.001)
        member = next(w for w in world.alive if w.core.rank_assignment.rank == seed)  # type: ignore[union-attr]
        generations, happened_at = world.log.generations, max(w.core.step for w in world.alive)
        concerned = event(world, member)
        world.run(90.0)

        check(world, book, samples)
        assert not exempt(world), f"seed {seed}: the run started over"
        assert world.log.generations > generations, f"seed {seed}: no new generation"
        steps = {round_id.step for peer, round_id, _ in world.log.commits if peer == concerned.peer}
        last = max(round_id.step for _, round_id, _ in world.log.commits)
        if event is join:
            assert world.log.joins == WORKERS + 1 and concerned.core.is_finished
            assert steps and min(steps) > happened_at, f"seed {seed}: it took no part"
        else:
            assert concerned.left == (event is not crash) and not concerned.alive
            assert FROM_STEP - 1 <= max(steps) < last, f"seed {seed}: it took part to the end"
            assert event is not leave_gracefully or world.log.acknowledged, f"seed {seed}: no transfer"
