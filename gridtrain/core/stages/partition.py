"""Partition a model into stages: which layers each stage gets, from seconds and bytes.

    layers     embed  block  block  block  block  head          seconds and bytes of each, per sample
    cards      [  8 GB, speed 1  ][ 24 GB, speed 2 ][ 8 GB ]    in the order of the stages
    network        stage 0 ---- link ---- stage 1 ---- link ---- stage 2

    partition  embed  block | block  block  block | head        cuts == (0, 2, 5, 6)

**Objective.**  While a pipeline is full, one micro-batch passes in the time of its slowest stage.  A stage's
time is the larger of its computing (forward, backward, and a second forward where activations are
re-materialised) and of its transfers in either direction: its upload carries activations forth and gradients
back, its download the others.  Without overlap it is their sum.  `best_partition` minimises the largest of
these times among all partitions in which no card's memory is exceeded.  Among partitions within `slack` of
that time it takes the one whose fullest card is emptiest, and among equals the one whose later stages begin
latest.  Latency does not count here: it lengthens filling and draining, not the period (`step_time` simulates
the whole step).

The search (`bottleneck_partition`) runs twice, for the time and then for memory within that time: for both
together the best partition of a prefix would depend on the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.stages.bottleneck_partition import bottleneck_cuts, bottleneck_cuts_within
from gridtrain.core.stages.stage_cost import Card, ExecutionSettings, Layer, PartitionCost, StageCostModel
from gridtrain.errors import ConfigError


def best_partition(
    layers: Sequence[Layer],
    cards: Sequence[Card],
    network: NetworkModel | None = None,
    running: ExecutionSettings | None = None,
    *,
    slack: float = 0.0,
    may_be: Callable[[int, int], bool] = lambda start, stop: True,
) -> PartitionCost:
    """The best partition of `layers` into one stage for each of `cards`, in their order.

    Args:
        network: of the cards, as ranks 0 to S - 1; None: transfers take no time.
        slack: stages may be slower than the best by this share where the fullest card gets emptier: measured
            times are not exact.
        may_be: whether a stage may have the layers from `start` to `stop` - 1.

    Raises:
        ConfigError: more cards than layers; or no partition fits, see `memory_fit`.
    """
    from gridtrain.core.stages import memory_fit

    running = running or ExecutionSettings()
    if not 1 <= len(cards) <= len(layers):
        raise ConfigError(
            f"{len(layers)} layers cannot be divided into {len(cards)} stages",
            remedy="use at most as many stages as layers, or divide the model into smaller layers",
        )
    costs = StageCostModel(layers, cards, network or uniform_network(len(cards), 0.0, math.inf), running)
    limits = [card.memory_bytes for card in cards]
    count, stages = len(layers), len(cards)

    def time_s(stage: int, start: int, stop: int) -> float:
        fits = may_be(start, stop) and costs.total_bytes(stage, start, stop) <= limits[stage]
        return costs.time_s(stage, start, stop) if fits else math.inf

    def least_s(stage: int, start: int, stop: int) -> float:
        fits = costs.lower_bound_bytes(stage, start, stop) <= limits[stage]
        return costs.compute_s(stage, start, stop) if fits else math.inf

    some = memory_fit.find_fitting_partition(costs, may_be)
    if some is None:
        raise memory_fit.shortage_text(layers, cards, running)
    known_s = max(time_s(s, *ends) for s, ends in enumerate(_spans(some)))
    edges = [[costs.edge_s(stage, stop) for stop in range(count + 1)] for stage in range(stages - 1)]
    fastest, fastest_s = bottleneck_cuts_within(count, stages, time_s, least_s, known_s, edges)
    assert fastest is not None  # `some` is one of the candidates
    bound_s = fastest_s * (1 + slack)
    scale = limits if all(math.isfinite(limit) for limit in limits) else [1.0] * len(limits)

    def fill(stage: int, start: int, stop: int) -> float:
        total = costs.total_bytes(stage, start, stop)
        slow = total > limits[stage] or costs.time_s(stage, start, stop) > bound_s or not may_be(start, stop)
        return math.inf if slow else total / scale[stage]

    def least_fill(stage: int, start: int, stop: int) -> float:
        slow = costs.compute_s(stage, start, stop) > bound_s
        return math.inf if slow else costs.lower_bound_bytes(stage, start, stop) / scale[stage]

    fill_known = max(fill(s, *ends) for s, ends in enumerate(_spans(fastest)))
    cuts, _ = bottleneck_cuts(count, stages, fill, least_fill, fill_known)
    assert cuts is not None  # `fastest` is one of the candidates
    return partition_at(costs, cuts)


def partition_at(costs: StageCostModel, cuts: Sequence[int]) -> PartitionCost:
    """The partition with given boundaries: (S + 1,) where stages begin, and the number of layers.

    Raises:
        ConfigError: they are not ascending, or not of these layers and cards.
    """
    spans = _spans(cuts)
    if len(spans) != len(costs.cards) or cuts[0] != 0 or cuts[-1] != len(costs.layers):
        raise ConfigError(
            f"cuts {tuple(cuts)} of {len(costs.layers)} layers for {len(costs.cards)} stages",
            remedy="begin with 0, end with the number of layers, and name each stage's first layer between",
        )
    if any(start >= stop for start, stop in spans):
        raise ConfigError(f"cuts {tuple(cuts)} leave a stage empty", remedy="let them grow")
    stages = tuple(costs.stage_cost(s, start, stop) for s, (start, stop) in enumerate(spans))
    return PartitionCost(stages, max(costs.time_s(s, *span) for s, span in enumerate(spans)))


def _spans(cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(cuts))
