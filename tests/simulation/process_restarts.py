"""Processes that end and come back with their key, quickly: trouble that any simulated group may have.

Decides when, which, and after how long, from a generator of its own: a history that has none of it is what it
would be without this module.  Never decides what comes of it.

    member dies --0 .. 1.5 s--> another process, the same key, the disk of the dead one, nothing else
                                --0 .. 2 s--> its model is built, and it says what it trains

An agent starts its script again at once, a container its command: while a broken connection
may still come back, the key alone does not tell that nothing is left of the member that had it.
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
    """In half of all histories, once or twice; `members`: who may be hit, when the time has come."""
    dice = Random(seed ^ 0xB0B0)
    for _ in range(dice.choice((0, 0, 1, 2))):
        world.at(dice.uniform(0.35, within_s), partial(restart_members, world, dice, members))


def restart_members(world: World, dice: Random, members: Callable[[], Sequence[SimWorker]]) -> None:
    """To one member or, as after a power cut, to all; perhaps while the coordinator stands still."""
    here = sorted(members(), key=lambda worker: worker.peer)
    if not here:
        return
    hit = here if dice.random() < 0.15 else [dice.choice(here)]
    if dice.random() < 0.3:
        world.freeze_coordinator(dice.choice((0.2, 1.0, 3.0)))
    for worker in hit:
        world.crash(worker.peer)
        again = partial(world.restart_process, worker.peer, dice.choice(JOIN_DELAYS_S))
        world.at(world.now_s + dice.choice(RESTART_DELAYS_S), again)
