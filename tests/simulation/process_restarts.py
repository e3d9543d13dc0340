"""Processes that end and restart with their key, quickly: a fault for any simulated group.

When, which and after how long is drawn from a separate generator, so that histories without restarts are the
same as without this module.
    member dies --0 .. 1.5 s--> another process with the same key and disk, without its memory
                                --0 .. 2 s--> its model is built, and it sends its set-up

An agent restarts its script immediately, and so does a container.  While a broken connection may still be
restored, the key alone does not show that the member's state is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from simulation.world import SimWorker, World

RESTART_DELAYS_S = (0.0, 0.005, 0.05, 0.5, 1.5)
JOIN_DELAYS_S = (0.0, 0.0, 0.3, 2.0)


def schedule_restarts(
    world: World, seed: int, members: Callable[[], Sequence[SimWorker]], within_s: float
) -> None:
    """Schedule restarts, in half of all histories once or twice.

    Args:
        members: called at the time of the restart; one or all of them are restarted.
    """
    dice = Random(seed ^ 0xB0B0)
    for _ in range(dice.choice((0, 0, 1, 2))):
        world.at(dice.uniform(0.35, within_s), partial(restart_members, world, dice, members))


def restart_members(world: World, dice: Random, members: Callable[[], Sequence[SimWorker]]) -> None:
    """Restart one member or, as after a power failure, all; in some cases while the coordinator is frozen."""
    present = sorted(members(), key=lambda worker: worker.peer)
    if not present:
        return
    affected = present if dice.random() < 0.15 else [dice.choice(present)]
    if dice.random() < 0.3:
        world.freeze_coordinator(dice.choice((0.2, 1.0, 3.0)))
    for worker in affected:
        world.crash(worker.peer)
        again = partial(world.restart_process, worker.peer, dice.choice(JOIN_DELAYS_S))
        world.at(world.now_s + dice.choice(RESTART_DELAYS_S), again)
