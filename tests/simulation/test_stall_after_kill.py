"""How long the other workers stall when a worker's process is killed, in virtual time.

    kill | resets arrive | ended_s | Freeze, FreezeReport, MembershipView, Ready, StartGeneration | a step

A busy machine does not change these figures, so they show which part waits without need.
The same with real processes: `make chaos CHAOS="--kinds kill"` (docs/reliability.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random

import pytest
from exchange_buffers import NEIGHBOURS

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import MemberPhase
from gridtrain_coordinator.run.liveness import JOIN_WAIT_S
from simulation.test_world import ToyTrainer
from simulation.world import World

WORKERS = 6
MAX_STALL_S = 0.2
MAX_S = 30.0
LAN = {"delay_s": (0.0002, 0.002), "compute_s": (0.02, 0.03)}
Seeds = Callable[[int], Iterator[int]]


def train(seed: int, kind: str) -> World:
    """A world in which all workers train, at a random moment of a step."""
    book: dict[m.RoundId, list[ToyTrainer.Attempt]] = defaultdict(list)
    spec = m.LedgerSpec(10_000, 1, epochs=1)
    setup = m.Setup((("kind", kind),), spec, 3, None, initial_state_digest=b"as built")
    world = World(seed, lambda: ToyTrainer(kind, book), NEIGHBOURS[kind], setup, min_workers=WORKERS, **LAN)
    for _ in range(WORKERS):
        world.join()
    world.run(1.6 + 0.2 * Random(seed).random())
    assert len(trainers(world)) == WORKERS, "all train"
    return world


def trainers(world: World) -> list[m.PeerId]:
    return [x.peer for x in world.alive if x.core.phase is MemberPhase.RUNNING]


def stall_s(world: World) -> float:
    """Seconds from now to the first commit of a generation of the living workers."""
    began_s, before = world.now_s, world.coordinator.generation
    while world.now_s < began_s + MAX_S:
        world.network.step()
        if any(at.generation > before for _, at, _ in world.log.commits[-WORKERS:]):
            return world.now_s - began_s
    raise AssertionError(f"no step was committed for {MAX_S} s")


@pytest.mark.parametrize(
    "agent_asks_for_s", [None, 0.003, 1.0], ids=["no agent", "an agent", "an agent on a busy machine"]
)
@pytest.mark.parametrize("kind", ["dense", "gtopk", "gtopk-direct", "direct"])
def test_a_killed_worker_does_not_stall_the_others_for_long(
    seeds: Seeds, kind: str, agent_asks_for_s: float | None
) -> None:
    """Its agent asks for the run's status as soon as the script has ended, with the worker's key."""
    for seed in seeds(2, drawn=1):
        world = train(seed, kind)
        killed = Random(seed).choice(trainers(world))
        world.crash(killed)
        if agent_asks_for_s is not None:
            world.ask_status(killed, after_s=0.015, for_s=agent_asks_for_s)
        passed_s, allowed_s = stall_s(world), MAX_STALL_S
        if agent_asks_for_s is not None:
            allowed_s += min(agent_asks_for_s, JOIN_WAIT_S)
        assert passed_s < allowed_s, f"seed {seed}: {passed_s:.3f} s"


@pytest.mark.parametrize("change", ["a member leaves", "a worker joins"])
def test_a_worker_that_is_killed_during_a_view_change_is_detected_as_soon(seeds: Seeds, change: str) -> None:
    """The group is frozen, or the next generation forms: members report the loss in one or the other."""
    for seed in seeds(24, drawn=8):
        world = train(seed, "dense")
        world.restore_s = lambda: 0.01  # type: ignore[method-assign]
        random = Random(seed)
        leaver, killed = random.sample(trainers(world), 2)
        if change == "a worker joins":
            world.join()
            while not world.coordinator.run.view_change.is_freezing:
                world.network.step()
        else:
            world.leave(leaver)
        size = WORKERS - 2 if change == "a member leaves" else WORKERS
        world.run(world.now_s + random.uniform(0.0, 0.02))
        began_s = world.now_s
        world.crash(killed)
        world.ask_status(killed, after_s=0.015, for_s=0.003)
        while len(trainers(world)) < size or killed in world.coordinator.run.members:
            world.network.step()
            assert world.now_s < began_s + MAX_STALL_S, f"seed {seed}"
