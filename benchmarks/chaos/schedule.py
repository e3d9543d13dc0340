"""The schedule of faults: kind, target, time and duration, a pure function of a seed.

bag      kill kill kill kill stop stop stall stall cut cut hole coordinator disk-coordinator disk-worker
drawn    without replacement, then a new bag, so that each kind has its share of a long run
times    one in each interval of `every_s`, at a random time in its middle half
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

# Durations of each kind in seconds: shorter than the heartbeat timeout (5 s), about equal, and longer.
LASTS_S = {
    "kill": (0.0,),  # the agent restarts the script
    "stop": (0.3, 1.0, 2.0, 8.0),
    "stall": (0.3, 1.0, 3.0, 8.0),  # the training loop sleeps, the process answers
    "cut": (0.3, 1.0, 2.0, 10.0),
    "hole": (0.3, 1.0, 2.0, 10.0),
    "links": (12.0,),  # the other workers cannot be reached, the coordinator can; not in the bag
    "coordinator": (0.2, 1.0, 4.0),
    "disk-coordinator": (1.0, 4.0),
    "disk-worker": (4.0,),
}
BAG = (
    *("kill",) * 4,
    *("stop", "stall", "cut") * 2,
    *("hole", "coordinator", "disk-coordinator", "disk-worker"),
)
NETWORK = frozenset({"cut", "hole", "links"})
DISK = frozenset({"disk-coordinator", "disk-worker"})
OF_COORDINATOR = frozenset({"coordinator", "disk-coordinator"})


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault: `at_s` from the begin of the measured part; `worker`: the number of the target."""

    at_s: float
    kind: str
    worker: int
    lasts_s: float


def draw(
    seed: int, *, length_s: float, every_s: float, workers: int, kinds: Collection[str] = frozenset(LASTS_S)
) -> list[Fault]:
    """Return the faults of a run in order of time, of the `kinds` that can be injected on this machine."""
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
