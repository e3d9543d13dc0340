"""Partitions a model into stages by the times and sizes of its layers: minimizes time, then memory.

    layers     embed  block  block  block  block  head          seconds and bytes of each, per sample
    devices      [  8 GB, speed 1  ][ 24 GB, speed 2 ][ 8 GB ]    in the order of the stages
    network        stage 0 ---- link ---- stage 1 ---- link ---- stage 2

    partition  embed  block | block  block  block | head        cuts == (0, 2, 5, 6)

**Objective.**  While a pipeline is full, it completes one micro-batch in each period, which is the time of
its slowest stage.  A stage's time is the larger of its compute time (forward and backward pass, and a
second forward pass if activations are re-materialized) and its transfer time in the busier direction: the
stage uploads activations and gradients to its neighbours and downloads theirs.  Without overlap, a stage's
time is the sum of its compute time and its transfer time.  `best_partition` minimizes the period among all
partitions that fit into the devices' memory.  Among partitions whose period is within `slack` of the minimum,
it chooses the partition whose fullest device has the most free memory and, if several tie, the one whose
later stages begin latest.
Latency is ignored, because it lengthens the filling and draining of the pipeline, not the period (`step_time`
simulates the whole step).

The search (`bottleneck_partition`) runs twice, first to minimize the period and then to minimize memory
within that period.  If one search did both, the best partition of a prefix would depend on the remaining
layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.stages.bottleneck_partition import bottleneck_cuts, bottleneck_cuts_within
from gridtrain.core.stages.stage_cost import Device, ExecutionSettings, Layer, PartitionCost, StageCostModel
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_count


def best_partition(
    layers: Sequence[Layer],
    devices: Sequence[Device],
    network: NetworkModel | None = None,
    running: ExecutionSettings | None = None,
    *,
    slack: float = 0.0,
) -> PartitionCost:
    """Find the best partition of `layers` into one stage for each of `devices`, in their order.

    Each stage has at least one trained layer, unless no layer is known to be trained.

    Args:
        network: the network in which device s has rank s; None if transfers take no time.
        slack: the share by which the period may exceed the shortest period if the fullest device then has
            more free memory.  Use a slack above 0 for measured times, which are not exact.

    Raises:
        ConfigError: there are no devices, more devices than layers or than trained layers, or not as many
            devices as ranks in `network`; or no partition fits (see `memory_fit`).
    """
    from gridtrain.core.stages import memory_fit

    running = running or ExecutionSettings()
    if not 1 <= len(devices) <= len(layers):
        raise ConfigError(
            f"{format_count(len(layers), 'layer')} cannot be divided into {len(devices)} stages",
            remedy="use from 1 stage to as many stages as layers, or divide the model into smaller layers",
        )
    trained = sum(each.trainable > 0 for each in layers)
    if 0 < trained < len(devices):
        raise ConfigError(
            f"{format_count(len(layers), 'layer')}, of which {trained} are trained, cannot be divided into "
            f"{len(devices)} stages: each stage must have a trainable layer",
            remedy=f"use at most {format_count(trained, 'stage')}, or divide the model into smaller layers",
        )
    costs = StageCostModel(layers, devices, network, running)
    some = memory_fit.find_fitting_partition(costs)
    if some is None:
        raise memory_fit.shortage_text(layers, devices, running)
    fastest, fastest_s = _fastest_cuts(costs, some)
    return partition_at(costs, _emptiest_cuts(costs, fastest, fastest_s * (1 + slack)))


def _fastest_cuts(costs: StageCostModel, known: Sequence[int]) -> tuple[Sequence[int], float]:
    """Return the cuts with the shortest period, and that period in seconds.

    Args:
        known: cuts that fit into the devices' memory.
    """
    limits = [device.memory_bytes for device in costs.devices]
    count, stages = len(costs.layers), len(costs.devices)

    def time_s(stage: int, start: int, stop: int) -> float:
        fits = costs.can_be_stage(start, stop) and costs.total_bytes(stage, start, stop) <= limits[stage]
        return costs.time_s(stage, start, stop) if fits else math.inf

    def least_s(stage: int, start: int, stop: int) -> float:
        fits = costs.lower_bound_bytes(stage, start, stop) <= limits[stage]
        return costs.compute_s(stage, start, stop) if fits else math.inf

    known_s = max(time_s(s, *ends) for s, ends in enumerate(pairwise(known)))
    edges = [[costs.edge_s(stage, stop) for stop in range(count + 1)] for stage in range(stages - 1)]
    fastest, fastest_s = bottleneck_cuts_within(count, stages, time_s, least_s, known_s, edges)
    assert fastest is not None  # `known` is one of the candidates
    return fastest, fastest_s


def _emptiest_cuts(costs: StageCostModel, known: Sequence[int], bound_s: float) -> Sequence[int]:
    """Return the cuts that leave the fullest device the most free memory, with a period of at most `bound_s`.

    The fullest device is the one whose memory is filled to the largest share.  If a device has no memory
    limit, it is instead the device that needs the most bytes.

    Args:
        known: cuts that fit into the devices' memory and have a period of at most `bound_s`.
    """
    limits = [device.memory_bytes for device in costs.devices]
    scale = limits if all(math.isfinite(limit) for limit in limits) else [1.0] * len(limits)

    def fill(stage: int, start: int, stop: int) -> float:
        total = costs.total_bytes(stage, start, stop)
        fits = costs.can_be_stage(start, stop) and total <= limits[stage]
        is_fast = costs.time_s(stage, start, stop) <= bound_s
        return total / scale[stage] if fits and is_fast else math.inf

    def least_fill(stage: int, start: int, stop: int) -> float:
        slow = costs.compute_s(stage, start, stop) > bound_s
        return math.inf if slow else costs.lower_bound_bytes(stage, start, stop) / scale[stage]

    known_fill = max(fill(s, *ends) for s, ends in enumerate(pairwise(known)))
    cuts, _ = bottleneck_cuts(len(costs.layers), len(costs.devices), fill, least_fill, known_fill)
    assert cuts is not None  # `known` is one of the candidates
    return cuts


def partition_at(costs: StageCostModel, cuts: Sequence[int]) -> PartitionCost:
    """Return the partition with the given boundaries.

    Args:
        cuts: stages + 1 numbers, the first layer of each stage and then the number of layers.

    Raises:
        ConfigError: `cuts` are not ascending, or do not match the layers and devices.
    """
    spans = list(pairwise(cuts))
    if len(spans) != len(costs.devices) or cuts[0] != 0 or cuts[-1] != len(costs.layers):
        raise ConfigError(
            f"cuts {tuple(cuts)} do not divide {format_count(len(costs.layers), 'layer')} into "
            f"{format_count(len(costs.devices), 'stage')}",
            remedy="begin the cuts with 0, add the first layer of each later stage, and end with the "
            "number of layers",
        )
    if any(start >= stop for start, stop in spans):
        raise ConfigError(f"cuts {tuple(cuts)} leave a stage empty", remedy="use strictly increasing cuts")
    stages = tuple(costs.stage_cost(s, start, stop) for s, (start, stop) in enumerate(spans))
    return PartitionCost(stages, max(costs.time_s(s, *span) for s, span in enumerate(spans)))
