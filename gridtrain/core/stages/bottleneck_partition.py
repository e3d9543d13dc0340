"""Cuts of a line of layers whose costliest stage costs least: dynamic programming over (stages, layers).

Decides nothing about what a stage costs: that is a function of (stage, start, stop).  A prefix is cut best
however the rest is cut, so all prefixes are, for one stage after the other.

    bound      5          no stage may cost more, as some cut is known that does not
    layers     1 4 2 2 3 1 4 1
    stage 0    |---|                 may stop after 1 .. 2    (1 + 4 <= 5, with 2 more it is 7)
    stage 1      |-------|           after 3 .. 4             (as the two behind it reach back so far)
    stage 2          |-----|         after 6 .. 6
                               ---> few prefixes are left to look at

What cannot be part of a cut within the bound is left out, so the cut is the same as without a bound.  Where
no bound is known, `narrowed` tries some, from just above what no cut can be below: a narrow search is short.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

StageCostFunction = Callable[[int, int, int], float]
"""Of (stage, start, stop): layers `start` to `stop` - 1 as that stage."""

FoundCuts = tuple[tuple[int, ...] | None, float]
"""(stages + 1,) where stages begin, and the number of layers; and the costliest stage's cost."""

EdgeCosts = Sequence[Sequence[float]]
"""[stage][stop]: what the stage, or the next one, costs at least for being cut there."""

BOUND_GROWTH = 1.25
"""From one bound to the next: the last search is little wider than it has to be, and the others are cheap."""

BOUND_HALVINGS = 12


def bottleneck_cuts(
    count: int,
    stages: int,
    cost: StageCostFunction,
    least: StageCostFunction,
    within: float = math.inf,
    edges: EdgeCosts = (),
) -> FoundCuts:
    """Cuts of `count` layers whose largest `cost(stage, start, stop)` is least, and that cost.

    Among equals the one whose later stages begin latest.

    Args:
        cost: infinite where a stage cannot be so.
        least: at most `cost`, and never less for a smaller `start` or a larger `stop`: where it reaches the
            best found, or is beyond the bound, no smaller start is looked at.
        within: cuts that cost more do not count.
        edges: see `Edges`; (): nothing is known.

    Returns:
        None and infinity where no cut has a finite cost within the bound.
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
    """As `bottleneck`, of costs of at least 0, where some cut is known that costs no more than `known`."""
    within = _infeasible_bound(count, stages, least, known)
    for stage in range(stages - 1):
        within = max(within, min(edges[stage][stage + 1 : count - (stages - stage - 1) + 1], default=0.0))
    while 0.0 < (within := within * BOUND_GROWTH) < known:
        found = bottleneck_cuts(count, stages, cost, least, within, edges)
        if found[0] is not None:
            return found
    return bottleneck_cuts(count, stages, cost, least, known, edges)


def _infeasible_bound(count: int, stages: int, least: StageCostFunction, known: float) -> float:
    """About the largest bound within which there is no cut, by `least` alone."""
    low, high = 0.0, known
    for _ in range(BOUND_HALVINGS if math.isfinite(known) else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if _stop_ranges(count, stages, least, middle) else (middle, high)
    return low


def _stop_ranges(count: int, stages: int, least: StageCostFunction, within: float) -> list[range]:
    """Where each stage may stop, by how far the stages up to it reach and those after it reach back.

    Somewhat too wide, as they may be empty here.  Empty: there is no cut within the bound.
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
