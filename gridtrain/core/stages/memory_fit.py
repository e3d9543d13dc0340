"""Explains why no partition of a model fits into the devices' memory, and proposes changes that make one fit.

Each proposed change has been checked with the same costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gridtrain.core.stages.bottleneck_partition import bottleneck_cuts
from gridtrain.core.stages.stage_cost import Device, ExecutionSettings, Layer, ScheduleKind, StageCostModel
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_bytes, format_count

MAX_PROPOSED_STAGES = 64
"""The maximum number of stages to propose; a model that needs more stages needs larger devices."""


def smallest_shortfall(
    layers: Sequence[Layer], devices: Sequence[Device], running: ExecutionSettings
) -> tuple[tuple[int, ...], float]:
    """Return the cuts that minimize the largest memory shortfall, and this shortfall in bytes.

    If the shortfall is -n, each device has at least n bytes free.
    """
    costs = StageCostModel(layers, devices, None, running)

    def lack(stage: int, start: int, stop: int) -> float:
        limit = devices[stage].memory_bytes
        return costs.total_bytes(stage, start, stop) - limit if limit < math.inf else -1e300

    def least(stage: int, start: int, stop: int) -> float:
        limit = devices[stage].memory_bytes
        return costs.lower_bound_bytes(stage, start, stop) - limit if limit < math.inf else -1e300

    cuts, lacking = bottleneck_cuts(len(layers), len(devices), lack, least)
    assert cuts is not None  # every cost is finite
    return cuts, lacking


def find_fitting_partition(costs: StageCostModel) -> tuple[int, ...] | None:
    """Return the cuts of a partition that fits into the memory of all devices, or None if none fits."""
    limits = [device.memory_bytes for device in costs.devices]

    def room(stage: int, start: int, stop: int) -> float:
        fits = costs.can_be_stage(start, stop) and costs.total_bytes(stage, start, stop) <= limits[stage]
        return 0.0 if fits else math.inf

    def least(stage: int, start: int, stop: int) -> float:
        return 0.0 if costs.lower_bound_bytes(stage, start, stop) <= limits[stage] else math.inf

    return bottleneck_cuts(len(costs.layers), len(costs.devices), room, least, 0.0)[0]


def fits(layers: Sequence[Layer], devices: Sequence[Device], running: ExecutionSettings) -> bool:
    """Return whether a partition, with a stage for each device, fits into the devices' memory."""
    if len(devices) > len(layers):
        return False
    return find_fitting_partition(StageCostModel(layers, devices, None, running)) is not None


def shortage_text(
    layers: Sequence[Layer], devices: Sequence[Device], running: ExecutionSettings
) -> ConfigError:
    """Return an error that names the stage that lacks the most memory, and the changes that would suffice."""
    cuts, _ = smallest_shortfall(layers, devices, running)
    costs = StageCostModel(layers, devices, None, running)

    def lack(stage: int) -> float:
        return costs.memory(stage, cuts[stage], cuts[stage + 1]).total - devices[stage].memory_bytes

    worst = max(range(len(devices)), key=lack)
    start, stop = cuts[worst], cuts[worst + 1]
    needed = costs.memory(worst, start, stop)
    big = max(range(start, stop), key=lambda at: costs.memory(worst, at, at + 1).total)
    reason = (
        f"no partition of {format_count(len(layers), 'layer')} into {format_count(len(devices), 'stage')} "
        f"fits: in the best one, stage "
        f"{worst} ({format_layers(layers, start, stop)}) needs {format_bytes(needed.total)}, but its device "
        f"has only {format_bytes(devices[worst].memory_bytes)}; {format_bytes(lack(worst))} is missing "
        f"(the {format_bytes(needed.total)} consists of: "
        f"{format_memory_parts(needed.parameters, needed.copies, needed.activations, needed.transit)})"
    )
    if stop - start > 1:
        alone = costs.memory(worst, big, big + 1).total
        reason += f'; its largest layer, "{layers[big].name}", alone needs {format_bytes(alone)}'
    enough = list(_sufficient_remedies(layers, devices, running))
    if enough:
        remedy = f"{'use one of these' if len(enough) > 1 else 'use this'}: {'; '.join(enough)}"
    else:
        remedy = (
            f'divide "{layers[big].name}" into smaller layers, make the batch or the model smaller, or use '
            "larger devices; more stages, smaller micro-batches and re-materialization are not sufficient"
        )
    return ConfigError(reason, remedy=remedy)


def _sufficient_remedies(
    layers: Sequence[Layer], devices: Sequence[Device], running: ExecutionSettings
) -> Iterator[str]:
    if running.order is ScheduleKind.FILL_DRAIN and fits(
        layers, devices, replace(running, order=ScheduleKind.ONE_F_ONE_B)
    ):
        yield "the schedule 1f1b"
    if not running.rematerialise and fits(layers, devices, replace(running, rematerialise=True)):
        yield "re-materialization"
    samples, batch = running.samples, running.samples * running.micro_batches
    while samples > 1:
        samples //= 2
        smaller = replace(running, samples=samples, micro_batches=math.ceil(batch / samples))
        if fits(layers, devices, smaller):
            yield f"{smaller.micro_batches} micro-batches of {format_count(samples, 'sample')}"
            break
    smallest = min(devices, key=lambda device: device.memory_bytes)
    for stages in range(len(devices) + 1, min(len(layers), MAX_PROPOSED_STAGES) + 1):
        if fits(layers, [*devices, *(smallest,) * (stages - len(devices))], running):
            yield f"{stages} stages, the additional ones on devices of {format_bytes(smallest.memory_bytes)}"
            break


# -- text ------------------------------------------------------------------------------------------


def format_layers(layers: Sequence[Layer], start: int, stop: int) -> str:
    """Return a description of layers `start` to `stop` - 1, with the names of the first and the last
    layer."""
    if stop - start == 1:
        return f'layer {start}, "{layers[start].name}"'
    return f'layers {start} to {stop - 1}, "{layers[start].name}" to "{layers[stop - 1].name}"'


def format_memory_parts(parameters: int, copies: int, activations: int, transit: int) -> str:
    """Return a text that lists a stage's memory by purpose; arguments are in bytes."""
    return (
        f"parameters {format_bytes(parameters)}, gradients and optimizer {format_bytes(copies)}, "
        f"activations {format_bytes(activations)}, in transit {format_bytes(transit)}"
    )
