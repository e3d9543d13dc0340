"""Which fault strikes whom, when and for how long: a pure function of a seed.

Decides nothing while a run goes on, and touches no process.

    bag      kill kill kill kill stop stop stall stall cut cut hole coordinator disk-coordinator disk-worker
    drawn    without putting back, then a new bag: in a long run each kind comes as often as its share
    times    one in each interval of `every_s`, at a random moment of its middle half
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

# How long each kind lasts, in seconds: shorter than the group's patience (5 s), about so, and longer.
LASTS_S = {
    "kill": (0.0,),  # the agent starts the script again
    "stop": (0.3, 1.0, 2.0, 8.0),
    "stall": (0.3, 1.0, 3.0, 8.0),  # the training loop sleeps, the process answers
    "cut": (0.3, 1.0, 2.0, 10.0),
    "hole": (0.3, 1.0, 2.0, 10.0),
    "coordinator": (0.2, 1.0, 4.0),
    "disk-coordinator": (1.0, 4.0),
    "disk-worker": (4.0,),
}
BAG = (
    *("kill",) * 4,
    *("stop", "stall", "cut") * 2,
    *("hole", "coordinator", "disk-coordinator", "disk-worker"),
)
NETWORK = frozenset({"cut", "hole"})
DISK = frozenset({"disk-coordinator", "disk-worker"})
OF_COORDINATOR = frozenset({"coordinator", "disk-coordinator"})


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s` counts from the beginning; `worker` is a number, for kinds that hit one."""

    at_s: float
    kind: str
    worker: int
    lasts_s: float


def draw(
    seed: int, *, length_s: float, every_s: float, workers: int, kinds: Collection[str] = frozenset(LASTS_S)
) -> list[Fault]:
    """The faults of a run in order of time; `kinds` that this machine can do."""
    random = Random(seed)
    bag: list[str] = []
    faults = []
    for number in range(int(length_s / every_s)):
        if not bag:
            bag = [kind for kind in BAG if kind in kinds]
            random.shuffle(bag)
        at_s = every_s * (number + random.uniform(0.25, 0.75))
        kind = bag.pop()
        faults.append(Fault(at_s, kind, random.randrange(workers), random.choice(LASTS_S[kind])))
    return faults
