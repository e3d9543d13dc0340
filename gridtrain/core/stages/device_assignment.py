"""Assigns stages to devices of different speeds and memory sizes at the start of a run.

A run that continues keeps its partition, because a new partition would require moving states.

    anna 24 GB, speed 2     bert, clara, dora 8 GB, speed 1   speeds are rounded to powers of sqrt(2), because
                                                              measurements of the same device differ
    2 stages x 2 replicas   [anna bert] [clara dora]          similar devices share a stage, which is limited
                                                              by its slowest device and smallest memory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, permutations
from statistics import median

from gridtrain.core.messages import PeerId, Setup
from gridtrain.core.stages.rank_placement import PairCost
from gridtrain.core.stages.repartition import (
    MAX_ORDERED_LAYERS,
    MAX_ORDERED_WORKERS,
    PartitionCache,
    Repartition,
    execution_settings_of,
    fastest_order,
    layers_of,
    stage_spans,
)
from gridtrain.core.stages.stage_cost import Device, StageCostModel
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_bytes

SPEED_STEP = math.sqrt(2.0)
"""Ratio between neighbouring speed classes; speeds in the same class are treated as equal."""

MAX_MEDIAN_RATIO = 2.0**10
"""Largest ratio between a device's speed and the median, in both directions, because workers report their own
speeds."""


def relative_speeds(measured: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Return speeds relative to the median, rounded to powers of `SPEED_STEP`.

    A speed of 0 means that the speed has not been measured; the median is then assumed.
    """
    known = [value for value in measured.values() if 0 < value < math.inf]
    usual = median(known) if known else 1.0

    def steps(value: float) -> int:
        times = min(max(value / usual, 1 / MAX_MEDIAN_RATIO), MAX_MEDIAN_RATIO)
        return round(math.log(times, SPEED_STEP))

    return {
        peer: SPEED_STEP ** steps(value) if 0 < value < math.inf else 1.0 for peer, value in measured.items()
    }


def stage_bytes(setup: Setup, cuts: Sequence[int]) -> list[int]:
    """Return the memory that each stage of this partition needs, in bytes."""
    assert setup.model is not None
    devices = [Device()] * (len(cuts) - 1)
    costs = StageCostModel(layers_of(setup.model), devices, None, execution_settings_of(setup.model))
    return [costs.memory(n, *ends).total for n, ends in enumerate(pairwise(cuts))]


def is_uniform(setup: Setup, cuts: Sequence[int], devices: Mapping[PeerId, Device]) -> bool:
    """Return whether all devices are equally fast and each can hold any stage of this partition.

    Returns True if the costs of the model's layers are unknown.
    """
    if setup.model is None or not setup.model.blocks:
        return True
    least = min(device.memory_bytes for device in devices.values())
    return len({device.speed for device in devices.values()}) == 1 and max(stage_bytes(setup, cuts)) <= least


def assign_devices(
    setup: Setup, peers: Sequence[PeerId], devices: Mapping[PeerId, Device], cost_s: PairCost | None = None
) -> Repartition:
    """Choose a partition and each worker's stage for a run that begins on unequal devices.

    Args:
        peers: the workers, longest-serving first, at least as many as stages.
        devices: each worker's device.
        cost_s: returns the round trip between two workers in seconds.  It decides between partitions that are
            about equally fast, so that neighbouring stages are near each other.  None if no link has been
            measured.

    Raises:
        ConfigError: no partition fits into the devices' memory.
    """
    known: PartitionCache = {}

    def tried(replicas: int) -> Repartition:
        return _assign_replicas(setup, peers, devices, replicas, cost_s, known)

    fewest, too_many = 1, len(peers) // setup.stages
    try:
        return tried(too_many)
    except ConfigError:  # with fewer replicas the workers with the smallest devices become standbys
        found = tried(fewest)  # uses only the largest devices; if these are too small, no partition fits
    while too_many - fewest > 1:  # bisection, because the search blocks the coordinator
        middle = (fewest + too_many) // 2
        try:
            found, fewest = tried(middle), middle
        except ConfigError:
            too_many = middle
    return found


def _assign_replicas(
    setup: Setup,
    peers: Sequence[PeerId],
    devices: Mapping[PeerId, Device],
    replicas: int,
    cost_s: PairCost | None,
    known: PartitionCache,
) -> Repartition:
    model = setup.model
    assert model is not None and model.blocks
    able = sorted(
        peers, key=lambda peer: (-devices[peer].memory_bytes, -devices[peer].speed, peers.index(peer))
    )
    able = sorted(able[: setup.stages * replicas], key=lambda peer: -devices[peer].speed)
    rows = [able[at : at + replicas] for at in range(0, len(able), replicas)]

    def weakest(row: Sequence[PeerId]) -> Device:
        return Device(
            min(devices[peer].speed for peer in row), min(devices[peer].memory_bytes for peer in row)
        )

    def distance_s(order: Sequence[list[PeerId]], cuts: tuple[int, ...]) -> float:
        return math.fsum(cost_s(a[0], b[0]) for a, b in pairwise(order)) if cost_s is not None else 0.0

    orders = _stage_orders(rows, devices, len(model.blocks))
    cuts, order = fastest_order(model, orders, weakest, distance_s, known)
    stage_of = {peer: stage for stage, row in enumerate(order) for peer in row}
    members = tuple(peer for peer in peers if peer in stage_of)
    shown = ", ".join(f"{span.stop - span.start}" for span in stage_spans(cuts))
    return Repartition(
        cuts, members, stage_of, f"stages of {shown} layers according to the devices' speed and memory"
    )


def _stage_orders(
    rows: list[list[PeerId]], devices: Mapping[PeerId, Device], blocks: int
) -> Iterable[Sequence[list[PeerId]]]:
    """Return the orders of stages to try.

    If there are few orders, all are returned.  Otherwise the given order, the order of decreasing memory
    (because 1F1B needs most in the first stages), and both orders reversed are returned.
    """
    if len(rows) <= MAX_ORDERED_WORKERS and blocks <= MAX_ORDERED_LAYERS:
        return permutations(rows)
    by_memory = sorted(rows, key=lambda row: -min(devices[peer].memory_bytes for peer in row))
    return [rows, by_memory, rows[::-1], by_memory[::-1]]


def able_workers(
    setup: Setup, cuts: Sequence[int], peers: Sequence[PeerId], devices: Mapping[PeerId, Device]
) -> list[PeerId]:
    """Return the workers that can hold at least one stage of this partition; all workers if the layers'
    costs are unknown."""
    if setup.model is None or not setup.model.blocks:
        return list(peers)
    least = min(stage_bytes(setup, cuts))
    return [peer for peer in peers if devices[peer].memory_bytes >= least]


def check_memory_fit(
    setup: Setup,
    cuts: Sequence[int],
    order: Sequence[PeerId],
    devices: Mapping[PeerId, Device],
    name: Callable[[PeerId], str],
) -> None:
    """Raise `ConfigError` if a worker's stage is known to need more memory than the worker's device has.

    Args:
        order: the members in rank order.
        name: returns a worker's name, for the text of the error.
    """
    if setup.model is None or not setup.model.blocks:
        return
    needs, replicas = stage_bytes(setup, cuts), len(order) // (len(cuts) - 1)
    for rank, peer in enumerate(order):
        stage = rank // replicas
        if needs[stage] > devices[peer].memory_bytes:
            raise ConfigError(
                f"stage {stage} needs {format_bytes(needs[stage])} of memory, but the device of {name(peer)} "
                f"has only {format_bytes(devices[peer].memory_bytes)}",
                remedy="wait for a worker with a larger device",
            )
