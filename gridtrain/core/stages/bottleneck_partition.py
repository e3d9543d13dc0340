"""Cuts a sequence of layers into stages by dynamic programming so that the highest stage cost is minimal.

The cost of a stage is a function of (stage, start, stop).  The best partition of a prefix does not depend on
the remaining layers, so the best partitions of all prefixes are computed, one stage at a time.

    costs of 8 layers                  1 4 2 2 3 1 4 1      bound: no stage may cost more than 6
    4 stages; stage 0 ends after       1 or 2 layers        with a third layer, it would cost 7
              stage 1 ends after       3 or 4 layers        stages 2 and 3 can hold at most the last 5 layers
              stage 2 ends after       5 or 6 layers        stage 3 can hold at most the last 3 layers

Only these few prefixes need to be examined.  The bound only excludes stages that no partition within the
bound contains, so if such a partition exists, the result is the same as without a bound.
`bottleneck_cuts_within` tries ascending bounds, beginning just above the smallest possible bound, because a
search with a small bound is fast.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

StageCostFunction = Callable[[int, int, int], float]
"""Returns the cost of (stage, start, stop): layers `start` to `stop` - 1 as stage number `stage`."""

FoundCuts = tuple[tuple[int, ...] | None, float]
"""The cuts (the first layer of each stage, then the number of layers), and the highest cost of a stage; None
and infinity if there is no partition."""

EdgeCosts = Sequence[Sequence[float]]
"""[stage][stop]: a lower bound on the costs of a stage and of the next stage if the boundary between them is
before layer `stop`."""

BOUND_GROWTH = 1.25
"""Factor between successive bounds.  With a small factor, the last search is only slightly wider than
necessary, and the earlier searches are fast."""

BOUND_HALVINGS = 12


def bottleneck_cuts(
    count: int,
    stages: int,
    cost: StageCostFunction,
    least: StageCostFunction,
    within: float = math.inf,
    edges: EdgeCosts = (),
) -> FoundCuts:
    """Find the partition of `count` layers that minimizes the largest `cost(stage, start, stop)`.

    If several partitions have the same largest cost, the one whose later stages begin latest is returned.

    Args:
        cost: the cost of a stage; infinite for a stage that is not allowed.
        least: a lower bound on `cost` that never decreases for a smaller `start` or a larger `stop`.  Once
            the lower bound reaches the best cost found or exceeds `within`, no smaller start is examined.
        within: the bound; partitions that cost more are excluded.
        edges: see `EdgeCosts`; empty if unknown.

    Returns:
        The cuts and the cost of the costliest stage; None and infinity if no partition has a finite cost
        within the bound.
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
    """Return the same result as `bottleneck_cuts`, but faster.

    Args:
        cost, least, edges: see `bottleneck_cuts`; all costs must be at least 0.
        known: the cost of a known partition; the best partition costs at most as much.
    """
    within = _infeasible_bound(count, stages, least, known)
    for stage in range(stages - 1):
        within = max(within, min(edges[stage][stage + 1 : count - (stages - stage - 1) + 1], default=0.0))
    while 0.0 < (within := within * BOUND_GROWTH) < known:
        found = bottleneck_cuts(count, stages, cost, least, within, edges)
        if found[0] is not None:
            return found
    return bottleneck_cuts(count, stages, cost, least, known, edges)


def _infeasible_bound(count: int, stages: int, least: StageCostFunction, known: float) -> float:
    """Return approximately the largest bound for which `least` alone proves that no partition exists."""
    low, high = 0.0, known
    for _ in range(BOUND_HALVINGS if math.isfinite(known) else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if _stop_ranges(count, stages, least, middle) else (middle, high)
    return low


def _stop_ranges(count: int, stages: int, least: StageCostFunction, within: float) -> list[range]:
    """Return the range of layers before which each stage may end; [] if no partition is within the bound.

    A stage's range is limited by how far the stages up to and including it can reach, and by how far back the
    later stages can reach.  The ranges are slightly too wide, because they allow empty stages.
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
