"""Fuzzing without atheris: this package's mutator, guided by lines reached.

Inputs come from one seeded generator, so a seed is reproducible.  Every `TRACED_EVERY`-th input is traced,
which costs about five times as much as running it; one that takes a new step between two lines is added to
the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from gridfuzz.mutate import damage
from gridfuzz.reach import Reach
from gridfuzz.targets.base import Target
from gridfuzz.trial import Trial

TRACED_EVERY = 8
MAX_POOL = 2000
FRESH = 48
MAX_FINDINGS = 20


def mutated(target: Target, random: Random, pool: Sequence[bytes]) -> bytes:
    """The next input: sometimes a valid one as it is, mostly a damaged one."""
    if not pool or random.random() < 0.15:
        base = target.valid(random)
        if random.random() < 0.2:
            return base
    else:
        base = random.choice(pool)
    if target.change is not None and random.random() < 0.5:
        base = target.change(base, random)
        if random.random() < 0.6:
            return base[: target.max_bytes]
    return damage(base, random, target.tokens, pool, target.max_bytes)


def fuzz(
    trial: Trial, reach: Reach, corpus: Sequence[bytes], seed: int, over: Callable[[], bool]
) -> list[bytes]:
    """Fuzz until `over`; returns the pool: the corpus, and inputs that reached new lines."""
    target, random = trial.target, Random(f"{seed} {trial.target.name}")
    pool = list(corpus)
    for data in [*corpus, *(target.valid(random) for _ in range(FRESH))]:
        if _traced(trial, reach, data) and data not in pool:
            pool.append(data)
        if over():
            return pool
    while not over() and len(trial.findings) < MAX_FINDINGS:
        data = mutated(target, random, pool)
        if trial.inputs % TRACED_EVERY:
            trial.one(data)
        elif _traced(trial, reach, data):
            if len(pool) >= MAX_POOL:
                pool[random.randrange(len(corpus), MAX_POOL)] = data
            else:
                pool.append(data)
    return pool


def _traced(trial: Trial, reach: Reach, data: bytes) -> bool:
    return reach.add(reach.trace(lambda: trial.one(data)))
