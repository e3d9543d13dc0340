"""Divide a sequence of layers into stages so that the costliest stage costs least: dynamic programming.

What a stage costs is a function of (stage, start, stop).  The best partition of a prefix does not depend on
the rest, so all prefixes are divided, for one stage after the other.

    bound      5          no stage may cost more, as some partition is known where none does
    layers     1 4 2 2 3 1 4 1
    stage 0    |---|                 may stop after 1 .. 2    (1 + 4 <= 5, with 2 more it is 7)
    stage 1      |-------|           after 3 .. 4             (as the two after it reach back that far)
    stage 2          |-----|         after 6 .. 6
                               ---> few prefixes are left to examine

Only what cannot be part of a partition within the bound is left out, so the result is the same as without
one. `bottleneck_cuts_within` tries bounds from just above the smallest possible one: a narrow search is
short.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

StageCostFunction = Callable[[int, int, int], float]
"""Cost by (stage, start, stop): layers `start` to `stop` - 1 as that stage."""

FoundCuts = tuple[tuple[int, ...] | None, float]
"""(stages + 1,) where stages begin, and the number of layers; and the cost of the costliest stage."""

EdgeCosts = Sequence[Sequence[float]]
"""[stage][stop]: lower bound of the cost of the stage, and of the next one, if it ends there."""

BOUND_GROWTH = 1.25
"""From one bound to the next: the last search is little wider than necessary, and the others are cheap."""

BOUND_HALVINGS = 12


def bottleneck_cuts(
    count: int,
    stages: int,
    cost: StageCostFunction,
    least: StageCostFunction,
    within: float = math.inf,
    edges: EdgeCosts = (),
) -> FoundCuts:
    """The partition of `count` layers whose largest `cost(stage, start, stop)` is least, and that cost.

    Among equals the one whose later stages begin latest.

    Args:
        cost: infinite where a stage is not allowed.
        least: lower bound of `cost`, never less for a smaller `start` or a larger `stop`: where it reaches
            the
            best found, or exceeds the bound, no smaller start is examined.
        within: the bound; partitions that cost more do not count.
        edges: see `EdgeCosts`; (): unknown.

    Returns:
        None and infinity where no partition has a finite cost within the bound.
    """
    before, begins_at = {0: -math.inf}, range(1)
    froms: list[dict[int, int]] = []
    for stage, stops in enumerate(_stop_ranges(count, stages, least, within)):
        now: dict[int, float] = {}
        begins: dict[int, int] = {}
        for stop in stops:
            if edges and stage + 1 < stages and edges[stage][stop] > within:
                continue
            best = math.inf
            for start in range(min(stop, begins_at.stop) - 1, begins_at.start - 1, -1):
                reached = before.get(start, math.inf)
                if reached < best:
                    lowest = least(stage, start, stop)
                    if lowest >= best or lowest > within:
                        break
                    worst = max(reached, cost(stage, start, stop))
                    if worst < best and worst <= within:
                        best, now[stop], begins[stop] = worst, worst, start
        before, begins_at = now, stops
        froms.append(begins)
    if before.get(count, math.inf) == math.inf:
        return None, math.inf
    cuts = [count]
    for begins in reversed(froms):
        cuts.append(begins[cuts[-1]])
    return tuple(reversed(cuts)), before[count]


def bottleneck_cuts_within(
    count: int,
    stages: int,
    cost: StageCostFunction,
    least: StageCostFunction,
    known: float,
    edges: EdgeCosts = (),
) -> FoundCuts:
    """As `bottleneck_cuts`, for costs of at least 0, where some partition costs no more than `known`."""
    within = _infeasible_bound(count, stages, least, known)
    for stage in range(stages - 1):
        within = max(within, min(edges[stage][stage + 1 : count - (stages - stage - 1) + 1], default=0.0))
    while 0.0 < (within := within * BOUND_GROWTH) < known:
        found = bottleneck_cuts(count, stages, cost, least, within, edges)
        if found[0] is not None:
            return found
    return bottleneck_cuts(count, stages, cost, least, known, edges)


def _infeasible_bound(count: int, stages: int, least: StageCostFunction, known: float) -> float:
    """About the largest bound within which there is no partition, by `least` alone."""
    low, high = 0.0, known
    for _ in range(BOUND_HALVINGS if math.isfinite(known) else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if _stop_ranges(count, stages, least, middle) else (middle, high)
    return low


def _stop_ranges(count: int, stages: int, least: StageCostFunction, within: float) -> list[range]:
    """Where each stage may stop, by how far the stages up to it reach and those after it reach back.

    Somewhat too wide, as stages may be empty here.  Empty: there is no partition within the bound.
    """
    lasts, at = [], 0
    for stage in range(stages):
        most = count - (stages - stage - 1)
        here = at
        at += bisect_right(range(at + 1, most + 1), within, key=lambda stop: least(stage, here, stop))
        lasts.append(at)
    if at < count:
        return []
    firsts, at = [count], count
    for stage in range(stages - 1, 0, -1):
        here = at
        at -= bisect_right(range(at - stage), within, key=lambda less: least(stage, here - 1 - less, here))
        firsts.append(at)
    firsts.reverse()
    windows = [range(max(stage + 1, firsts[stage]), lasts[stage] + 1) for stage in range(stages)]
    return windows if all(windows) else []
