"""Chooses the seeds that `make test` simulates each time: few and fast ones that reach each counted case.

    PYTHONPATH=tests:tests/common python tests/simulation/choose_seeds.py world    of test_world.churn
                                                            ... staged, starved    of test_staged_world

Copy what it prints to `COVERING` or `STARVED_COVERING` of the test's file.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

from simulation import test_staged_world, test_world

TIMES = 2  # seeds for each counted case, if there are as many
MIN_S = 0.05  # cost of a history besides its simulation


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("sweep", choices=("world", "staged", "starved"))
    arguments.add_argument("--of", type=int, default=800, help="seeds to choose from")
    options = arguments.parse_args()
    tests = test_world if options.sweep == "world" else test_staged_world
    costs_s: dict[int, float] = {}
    reached: dict[int, frozenset[str]] = {}
    for seed in range(options.of):
        before_s = time.process_time()
        world = simulate(tests, options.sweep, seed)
        costs_s[seed] = time.process_time() - before_s + MIN_S
        reached[seed] = frozenset(name for name, times in tests.reached_by(world).items() if times)
    seeds = choose(costs_s, reached)
    print(tuple(sorted(seeds)), f"take {sum(costs_s[seed] for seed in seeds):.1f} s of CPU")


def simulate(tests: Any, sweep: str, seed: int) -> Any:
    if sweep == "world":
        return tests.churn(seed)
    world, stages = (tests.history if sweep == "staged" else tests.starved)(seed)
    tests.check(world, stages)
    return world


def choose(costs_s: dict[int, float], reached: dict[int, frozenset[str]]) -> list[int]:
    """Take, again and again, the seed that adds most for its cost; then drop seeds that are not needed."""
    missing = {
        name: min(TIMES, of) for name, of in Counter(n for names in reached.values() for n in names).items()
    }
    wanted = dict(missing)
    chosen: list[int] = []
    while any(times > 0 for times in missing.values()):
        rest = reached.keys() - set(chosen)
        best = max(sorted(rest), key=lambda s: sum(missing[n] > 0 for n in reached[s]) / costs_s[s])
        chosen.append(best)
        for name in reached[best]:
            missing[name] -= 1
    for seed in sorted(chosen, key=costs_s.__getitem__, reverse=True):
        without = Counter(name for other in chosen if other != seed for name in reached[other])
        if all(without[name] >= times for name, times in wanted.items()):
            chosen.remove(seed)
    return chosen


if __name__ == "__main__":
    main()
