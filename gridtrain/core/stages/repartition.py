"""Divides a model again for fewer or more workers, and chooses the workers that supply each stage's state.

    3 stages, 6 layers           anna has [0 2) on its disk, and a copy of [4 6), the last stage
    bert, stage 1, has left      clara has [4 6) on its disk, and a copy of [2 4)

    2 stages: 0 3 6              anna assembles [0 3) from its own [0 2) and from clara's [2 4)
                                 clara has all of [3 6) on its own disk

Stored state is identified by its layers, not by stages, so the state of one partition can be used in another
partition.  If no worker has the exact state of a stage, the worker with the most of the stage's layers
becomes the stage's *assembler*.  The assembler requests whole checkpoints from other workers, one at a time
(`messages.CheckpointRequest`), and sends the assembled state to the stage's other replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, permutations
from typing import TypeVar

from gridtrain.core.messages import MAX_CHECKPOINT_SOURCES, PeerId, Setup, Span, StagedModel
from gridtrain.core.stages import partition
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain.core.stages.stage_cost import (
    TIME_TOLERANCE,
    Device,
    ExecutionSettings,
    Layer,
    PartitionCost,
    ScheduleKind,
)
from gridtrain.errors import ConfigError, LocalProtocolError
from gridtrain.quantities import format_count, shorten

T = TypeVar("T")

MAX_ORDERED_WORKERS = 4
"""The maximum number of workers for which all orders along the pipeline are tried (24 for 4 workers)."""

MAX_ORDERED_LAYERS = 64
"""The maximum number of layers for which all orders are tried.  The search blocks the coordinator, and each
partition takes about 5 ms."""

MIN_PIPELINE_SPEEDUP = 1.1
"""States are moved for a partition into more stages only if its slowest stage is at least this many times as
fast as that of the best partition into the current number of stages."""

MAX_GROUPED_WORKERS = 6
"""The maximum number of workers for which all groups are tried."""

MAX_ERROR_BYTES = 160

HeldSpans = Mapping[PeerId, Sequence[Span]]
"""The layers whose state each worker has."""

Pieces = tuple[tuple[Span, int], ...]
"""For each checkpoint from which a stage is assembled: its layers, and the rank that has it."""

PartitionCache = dict[tuple[Device, ...], PartitionCost | ConfigError]
"""The best partition for each sequence of devices along the pipeline, or the error if no partition fits.
Its purpose is to avoid searching for the same partition twice."""


def defined_cuts(setup: Setup) -> tuple[int, ...]:
    """Return the cuts that the run defines: the first layer of each stage, then the number of layers."""
    return setup.model.cuts if setup.model is not None else tuple(range(setup.stages + 1))


def stage_spans(cuts: Sequence[int]) -> list[Span]:
    """Return the layers of each stage."""
    return [Span(start, stop) for start, stop in pairwise(cuts)]


def uncovered_spans(spans: Iterable[Span], count: int) -> list[Span]:
    """Return the layers from 0 to `count` - 1 that are not in any of `spans`, as spans."""
    found, reached = [], 0
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if span.start > reached:
            found.append(Span(reached, min(span.start, count)))
        reached = max(reached, span.stop)
        if reached >= count:
            return found
    return [*found, Span(reached, count)]


def overlap_layers(a: Span, b: Span) -> int:
    """Return the number of layers that both spans contain."""
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))


@dataclass(frozen=True, slots=True)
class Repartition:
    """A partition, and the workers that train it.

    Attributes:
        cuts: stages + 1 numbers, the first layer of each stage and then the number of layers.
        members: the workers with a rank; together they hold the whole state.
        assemblers: the stage that each assembler assembles.
        reason: the reason for the choice, as text.
    """

    cuts: tuple[int, ...]
    members: tuple[PeerId, ...]
    assemblers: Mapping[PeerId, int] = field(default_factory=dict)
    reason: str = ""


def check_setup(setup: Setup) -> None:
    """Raise `ConfigError` if the setup's partition or costs are invalid, before the coordinator uses them."""
    model = setup.model
    if model is None:
        return
    if len(model.cuts) != setup.stages + 1:
        raise ConfigError(
            f"there are {format_count(len(model.cuts), 'cut')} for {format_count(setup.stages, 'stage')} "
            f"({list(model.cuts)[:8]})",
            remedy="specify one more cut than there are stages",
        )
    layers_of(model)
    execution_settings_of(model)
    for span in stage_spans(model.cuts) if model.blocks else ():
        if not any(block.trainable_bytes for block in model.blocks[span.start : span.stop]):
            raise ConfigError(
                f"the stage of layers {span.start} to {span.stop - 1} has no trainable parameters",
                remedy="use different boundaries or fewer stages",
            )


def layers_of(model: StagedModel) -> list[Layer]:
    """Return the model's layers; if no times are known, assume times proportional to parameter bytes."""
    timed = _is_timed(model)
    return [
        Layer(
            f"block {index}",
            block.forward_s if timed else block.parameter_bytes * 1e-9,
            block.backward_s if timed else block.parameter_bytes * 2e-9,
            block.parameter_bytes,
            block.output_bytes,
            block.kept_bytes,
            block.overhead_s,
            block.trainable_bytes,
            block.gradient_bytes,
            block.work_bytes or None,
        )
        for index, block in enumerate(model.blocks)
    ]


def _is_timed(model: StagedModel) -> bool:
    return any(block.forward_s + block.backward_s > 0 for block in model.blocks)


def execution_settings_of(model: StagedModel) -> ExecutionSettings:
    """Return the model's settings; if no times of layers are known, assume that messages take no time."""
    running = ExecutionSettings() if _is_timed(model) else ExecutionSettings(message_s=0.0)
    return replace(
        running,
        samples=model.samples,
        micro_batches=model.micro_batches,
        order=ScheduleKind.FILL_DRAIN if model.fill_drain else ScheduleKind.ONE_F_ONE_B,
        rematerialise=model.rematerialise,
        copies=model.copies,
        input_bytes=model.input_bytes,
        ahead=model.ahead,
    )


# -- number of stages, and their order ----------------------------------------------------------------


def partition_over_fewer(
    setup: Setup,
    peers: Sequence[PeerId],
    devices: Mapping[PeerId, Device],
    holds: HeldSpans,
) -> Repartition:
    """Choose a partition for fewer workers than the run has stages, with as many stages as possible.

    Args:
        peers: the connected workers, longest-serving first.
        devices: the device of each worker.
        holds: the layers whose state each worker has.

    Raises:
        ConfigError: no partition fits, or the workers do not have all layers.  The error's reason is empty if
            the costs of the model's layers are unknown.
    """
    model = setup.model
    if model is None or not model.blocks:
        raise ConfigError("", remedy="wait for workers")
    refused: ConfigError | None = None
    known: PartitionCache = {}
    for count in range(min(len(peers), len(model.blocks), setup.stages), 0, -1):
        for members in _groups(peers, devices, count, holds, model.cuts[-1]):
            if uncovered_spans(_all_spans(holds, members), model.cuts[-1]):
                continue
            try:
                cuts, order = _best_stage_order(model, members, devices, holds, known)
            except ConfigError as error:
                refused = refused or error
                continue
            reason = f"repartitioned into {format_count(count, 'stage')} at {list(cuts)}"
            return Repartition(cuts, tuple(order), {peer: n for n, peer in enumerate(order)}, reason)
    raise refused or ConfigError(
        "the connected workers do not have all layers", remedy="wait for more workers"
    )


def _groups(
    peers: Sequence[PeerId], devices: Mapping[PeerId, Device], count: int, holds: HeldSpans, blocks: int
) -> Iterable[list[PeerId]]:
    """Return groups of `count` workers to try, groups with the most memory first.

    With more than `MAX_GROUPED_WORKERS` workers only two groups are tried: the workers with the most memory,
    and a small group that has every layer, extended by the workers with the most memory.
    """
    largest = sorted(peers, key=lambda peer: -devices[peer].memory_bytes)
    groups: Iterable[Sequence[PeerId]] = combinations(largest, count)
    if len(peers) > MAX_GROUPED_WORKERS:
        groups = [largest[:count]]
        if not uncovered_spans(_all_spans(holds, peers), blocks):
            needed = _covering_workers(largest, holds, blocks)
            groups.append([*needed, *(peer for peer in largest if peer not in needed)][:count])
    return ([peer for peer in peers if peer in group] for group in groups)


def _best_stage_order(
    model: StagedModel,
    members: Sequence[PeerId],
    devices: Mapping[PeerId, Device],
    holds: HeldSpans,
    known: PartitionCache,
) -> tuple[tuple[int, ...], list[PeerId]]:
    """Return the cuts of the fastest partition, and its order of workers.

    Among partitions that are about equally fast, the partition that moves the fewest bytes is chosen.
    """
    sizes = [block.parameter_bytes + block.trainable_bytes for block in model.blocks]
    orders: Iterable[Sequence[PeerId]] = [_by_held_position(members, holds)]
    if len(members) <= MAX_ORDERED_WORKERS and len(sizes) <= MAX_ORDERED_LAYERS:
        orders = permutations(_by_held_position(members, holds))

    def moved_bytes(order: Sequence[PeerId], cuts: tuple[int, ...]) -> int:
        return sum(
            sum(sizes[gap.start + span.start : gap.stop + span.start])
            for peer, span in zip(order, stage_spans(cuts), strict=True)
            for gap in _missing_spans(holds.get(peer, ()), span)
        )

    cuts, order = fastest_order(model, orders, devices.__getitem__, moved_bytes, known)
    return cuts, list(order)


def fastest_order(
    model: StagedModel,
    orders: Iterable[Sequence[T]],
    device_of: Callable[[T], Device],
    cost: Callable[[Sequence[T], tuple[int, ...]], float],
    known: PartitionCache,
) -> tuple[tuple[int, ...], Sequence[T]]:
    """Return the cuts of the fastest partition, and its order of workers or groups.

    Args:
        device_of: returns the device of an item of an order.
        cost: returns the cost of an order with its cuts; this cost decides between partitions that are
            about equally fast.

    Raises:
        ConfigError: no partition fits.
    """
    found: list[tuple[float, float, tuple[int, ...], Sequence[T]]] = []
    refused: ConfigError | None = None
    for order in orders:
        cut = partition_for(model, [device_of(each) for each in order], known)
        if isinstance(cut, ConfigError):
            refused = refused or cut
        else:
            found.append((cut.period_s, cost(order, cut.cuts), cut.cuts, order))
    if not found:
        assert refused is not None
        raise refused
    fastest_s = min(period_s for period_s, *_ in found)
    good = [each for each in found if each[0] <= fastest_s * (1 + TIME_TOLERANCE)]
    return min(good, key=lambda each: each[1])[2:]


def partition_for(
    model: StagedModel, devices: Sequence[Device], known: PartitionCache
) -> PartitionCost | ConfigError:
    """Return the best partition for these devices in this order, or the error if no partition fits."""
    asked = tuple(devices)
    if asked not in known:
        layers, running = layers_of(model), execution_settings_of(model)
        try:
            known[asked] = partition.best_partition(layers, devices, None, running, slack=TIME_TOLERANCE)
        except ConfigError as error:
            known[asked] = error
    return known[asked]


def _by_held_position(members: Sequence[PeerId], holds: HeldSpans) -> list[PeerId]:
    """Sort workers by the middle of the layers that they hold; workers that hold no layers come last."""

    def middle(peer: PeerId) -> float:
        spans = holds.get(peer, ())
        return sum(s.start + s.stop for s in spans) / (2 * len(spans)) if spans else math.inf

    return sorted(members, key=middle)


def _missing_spans(spans: Sequence[Span], wanted: Span) -> list[Span]:
    """Return the layers of `wanted` that are not in any of `spans`, numbered from the first layer of
    `wanted`."""
    inside = [
        Span(max(0, s.start - wanted.start), s.stop - wanted.start)
        for s in spans
        if overlap_layers(s, wanted)
    ]
    return uncovered_spans(inside, wanted.stop - wanted.start)


def _all_spans(holds: HeldSpans, members: Collection[PeerId]) -> list[Span]:
    return [span for peer in members for span in holds.get(peer, ())]


def is_worth_more_stages(setup: Setup, cuts: tuple[int, ...], stages: int) -> bool:
    """Return whether `stages` stages are at least `MIN_PIPELINE_SPEEDUP` times as fast as those of `cuts`.

    For both numbers of stages, the best partitions on equal devices without memory limits are compared.
    """
    assert setup.model is not None
    layers, running = layers_of(setup.model), execution_settings_of(setup.model)
    stages = min(stages, len(layers))
    few, more = (
        partition.best_partition(layers, [Device()] * count, None, running).period_s
        for count in (len(cuts) - 1, stages)
    )
    return more * MIN_PIPELINE_SPEEDUP <= few


# -- enough workers, but state of another partition ----------------------------------------------------


def repartition_at(cuts: tuple[int, ...], peers: Sequence[PeerId], locations: StateLocations) -> Repartition:
    """Choose members for as many complete replicas as possible, and assemblers for missing stages.

    Args:
        peers: the workers, longest-serving first, at least as many as stages.
        locations: the holders of the state, with stages as in `cuts`; each layer has a holder, unless the run
            is just beginning.

    Raises:
        ConfigError: the state is spread over more workers than there are ranks, there are too few assemblers,
            or a layer is held by no worker in `peers`.
    """
    stages, locations = len(cuts) - 1, restricted_to(locations, peers)
    if not _missing_stages(locations, stages):
        return Repartition(cuts, tuple(peers))
    needed = _covering_workers(peers, locations.held_spans, cuts[-1])
    size = stages * (len(peers) // stages)
    chosen = set([*needed, *(peer for peer in peers if peer not in needed)][:size])
    members = [peer for peer in peers if peer in chosen]
    locations = restricted_to(locations, members)
    missing = _missing_stages(locations, stages)
    spans = stage_spans(cuts)
    # The longest-serving holder of each stage keeps this stage.
    first = {stage: peer for peer, stage in reversed(list(locations.in_memory.items()))}.values()
    assemblers: dict[PeerId, int] = {}
    offers = [
        (_largest_overlap(locations.held_spans.get(peer, ()), spans[n]), n, peer)
        for n in missing
        for peer in members
    ]
    for _, stage, peer in sorted(offers, key=lambda offer: -offer[0]):
        if stage not in assemblers.values() and peer not in assemblers and peer not in first:
            assemblers[peer] = stage
    if len(needed) > size or len(assemblers) < len(missing):
        raise ConfigError(
            "too few workers to assemble the state: it is spread over "
            f"{format_count(len(needed), 'worker')}, and {size} can be members; "
            f"{format_count(len(missing), 'stage')} must be assembled, and "
            f"{format_count(len(assemblers), 'worker')} can assemble one",
            remedy="wait for more workers",
        )
    return Repartition(cuts, tuple(members), assemblers, f"stages are assembled with cuts at {list(cuts)}")


def restricted_to(locations: StateLocations, members: Sequence[PeerId]) -> StateLocations:
    """Return `locations` restricted to these members.

    If no step has been committed, these members create the states that only other workers have.
    """
    mine = replace(
        locations,
        in_memory={p: n for p, n in locations.in_memory.items() if p in members},
        on_disk={p: n for p, n in locations.on_disk.items() if p in members},
        held_spans={p: spans for p, spans in locations.held_spans.items() if p in members},
    )
    created = locations.exact_stages - mine.exact_stages if locations.is_initial else ()
    return replace(mine, initial_stages={*locations.initial_stages, *created})


def _missing_stages(locations: StateLocations, stages: int) -> list[int]:
    """Return the stages whose exact state no worker has."""
    exact = locations.exact_stages | set(locations.initial_stages)
    return [n for n in range(stages) if n not in exact]


def _largest_overlap(spans: Sequence[Span], wanted: Span) -> int:
    return max((overlap_layers(span, wanted) for span in spans), default=0)


def _covering_workers(peers: Sequence[PeerId], holds: HeldSpans, count: int) -> list[PeerId]:
    """Return a small set of workers that together have every layer, found by a greedy search.

    Raises:
        ConfigError: a layer is held by no worker in `peers`.
    """
    chosen: list[PeerId] = []
    while lacking := uncovered_spans(_all_spans(holds, chosen), count):

        def adds(peer: PeerId, lacking: Sequence[Span] = lacking) -> int:
            return sum(overlap_layers(span, gap) for span in holds.get(peer, ()) for gap in lacking)

        best = max(peers, key=adds)
        if not adds(best):
            # A connected worker has the layer, but its memory is too small for this partition.
            raise ConfigError(
                f"no worker with enough memory has the state of layer {lacking[0].start}",
                remedy="use a different partition",
            )
        chosen.append(best)
    return chosen


def with_assemblers(locations: StateLocations, recut: Repartition) -> StateLocations:
    """Return `locations` with each assembler added as a holder of the stage that it assembles."""
    return replace(locations, in_memory={**locations.in_memory, **recut.assemblers})


# -- checkpoints from which a stage is assembled ------------------------------------------------------


def assembler_pieces(
    recut: Repartition, order: Sequence[PeerId], locations: StateLocations
) -> dict[PeerId, Pieces]:
    """Choose the checkpoints that each assembler uses, each as (layers, rank that has them).

    An assembler needs no checkpoints, and is left out, if it has the exact state of its stage in memory or on
    disk, or if the state of this stage is created.
    For each layer, an assembler uses its own checkpoint if it has one, else the checkpoint that extends
    furthest, so that few checkpoints are needed.

    Raises:
        LocalProtocolError: a layer is held by no member.
        ConfigError: a stage needs more than `MAX_CHECKPOINT_SOURCES` checkpoints.
    """
    spans = stage_spans(recut.cuts)
    found: dict[PeerId, Pieces] = {}
    for peer, stage in recut.assemblers.items():
        has_stage = locations.in_memory.get(peer) == stage or stage in locations.on_disk.get(peer, ())
        if has_stage or stage in locations.initial_stages:
            continue
        wanted, mine = spans[stage], order.index(peer)
        taken: list[tuple[Span, int]] = []
        reached = wanted.start
        while reached < wanted.stop:
            offers = [
                (span, rank)
                for rank, other in enumerate(order)
                for span in locations.held_spans.get(other, ())
                if span.start <= reached < span.stop
            ]
            if not offers:
                raise LocalProtocolError(f"no member has layer {reached} of stage {stage}")
            if len(taken) == MAX_CHECKPOINT_SOURCES:
                raise ConfigError(
                    f"stage {stage} would be assembled from more than {MAX_CHECKPOINT_SOURCES} checkpoints",
                    remedy="wait for more workers",
                )
            best = max(
                offers, key=lambda offer: (offer[1] == mine, min(offer[0].stop, wanted.stop), -offer[1])
            )
            taken.append(best)
            reached = best[0].stop
        found[peer] = tuple(taken)
    return found


def error_text(error: ConfigError) -> str:
    """Return an error's reason, shortened to fit into a message."""
    return shorten(error.reason, MAX_ERROR_BYTES)
