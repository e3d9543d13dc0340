"""A new cut over the workers that are left: how many stages, cut where, and who gets which from whom.

Decides that, from the costs in the run's definition, the workers' memory, and what they hold.  Never decides
which step the run goes on from (`protocol.copies`), never moves a byte.

    3 stages, 6 blocks           anna [0 2) on its disk, and [4 6): the copy that it keeps for the last stage
    bert, stage 1, is gone       clara [4 6) on its disk, and [2 4)

    cut over two: 0 3 6          anna puts [0 3) together from its own [0 2) and from clara's [2 4)
                                 clara has all of [3 6) on its own disk

What is held is said by blocks, not by stages: a state of any cut serves any other.  A stage that nobody has
as it is gets an *assembler*, who has most of it; it asks the others for their checkpoints, whole, one after
the other (`messages.PieceAsk`), and the stage's other replicas are sent the state by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise, permutations

from gridtrain.core.messages import MAX_CHECKPOINT_SOURCES, PeerId, Setup, Span, StagedModel
from gridtrain.core.stages import partition
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain.core.stages.stage_cost import (
    TIME_TOLERANCE,
    Card,
    ExecutionSettings,
    Layer,
    PartitionCost,
    ScheduleKind,
)
from gridtrain.errors import ConfigError, LocalProtocolError

MAX_ORDERED_WORKERS = 4
"""Workers whose orders along the pipeline are all tried: 24 cuts."""

MAX_ORDERED_LAYERS = 64
"""Of a model that is cut for all of these orders: the coordinator does nothing else meanwhile, and one cut
takes some 5 ms."""

MIN_SPEEDUP = 1.1
"""More stages are worth a move when the slowest stage becomes faster by this factor."""

MAX_GROUPED_WORKERS = 6
"""Workers of which all groups are tried."""

MAX_ERROR_CHARS = 160

HeldSpans = Mapping[PeerId, Sequence[Span]]
"""Blocks whose state somebody has."""

Pieces = tuple[tuple[Span, int], ...]

PartitionCache = dict[tuple[Card, ...], PartitionCost | ConfigError]
"""Cuts for cards along the pipeline, so that none is looked for twice."""


def defined_cuts(setup: Setup) -> tuple[int, ...]:
    """As the run is defined: (stages + 1,)."""
    return setup.model.cuts if setup.model is not None else tuple(range(setup.stages + 1))


def stage_spans(cuts: Sequence[int]) -> list[Span]:
    """Of the stages."""
    return [Span(start, stop) for start, stop in pairwise(cuts)]


def uncovered_spans(spans: Iterable[Span], count: int) -> list[Span]:
    """Blocks 0 to `count` - 1 that are in none of these."""
    found, reached = [], 0
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if span.start > reached:
            found.append(Span(reached, min(span.start, count)))
        reached = max(reached, span.stop)
        if reached >= count:
            return found
    return [*found, Span(reached, count)]


def overlap_layers(a: Span, b: Span) -> int:
    """Blocks in both."""
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))


@dataclass(frozen=True, slots=True)
class Repartition:
    """Attributes:
    cuts: where the stages begin, and the number of blocks.
    members: who is seated; all that the state is taken from are among them.
    assemblers: who puts a stage together that nobody has as it is.
    reason: in words.
    """

    cuts: tuple[int, ...]
    members: tuple[PeerId, ...]
    assemblers: Mapping[PeerId, int] = field(default_factory=dict)
    reason: str = ""


def check_setup(setup: Setup) -> None:
    """Raises `ConfigError` for cuts and costs that cannot be, before the coordinator computes with them."""
    model = setup.model
    if model is None:
        return
    if len(model.cuts) != setup.stages + 1:
        raise ConfigError(
            f"cuts {list(model.cuts)[:8]} for {setup.stages} stages", remedy="one more cut than stages"
        )
    layers_of(model)
    execution_settings_of(model)
    for span in stage_spans(model.cuts) if model.blocks else ():
        if not has_trainable_check(model)(span.start, span.stop):
            raise ConfigError(
                f"blocks {span.start} to {span.stop - 1} are a stage, and there is nothing to train in it",
                remedy="cut elsewhere, or into fewer stages",
            )


def layers_of(model: StagedModel) -> list[Layer]:
    """Without times a block takes as long as it has bytes."""
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
    """Without times messages take none either: there is nothing to compare theirs with."""
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


# -- how many stages, and where -----------------------------------------------------------------------


def partition_over_fewer(
    setup: Setup,
    peers: Sequence[PeerId],
    cards: Mapping[PeerId, Card],
    holds: HeldSpans,
) -> Repartition:
    """Over fewer workers than the run has stages: into as many stages as fit.

    Args:
        peers: who is here, the longest-serving first; `cards`: theirs.
        holds: blocks whose state they have, all of them together.

    Raises:
        ConfigError: the model does not fit; without a reason: its blocks' costs are not known.
    """
    model = setup.model
    if model is None or not model.blocks:
        raise ConfigError("", remedy="wait for workers")
    refused: ConfigError | None = None
    known: PartitionCache = {}
    for count in range(min(len(peers), len(model.blocks), setup.stages), 0, -1):
        for members in _groups(peers, cards, count, holds, model.cuts[-1]):
            if uncovered_spans(_all_spans(holds, members), model.cuts[-1]):
                continue
            try:
                cuts, line = _best_stage_order(model, members, cards, holds, known)
            except ConfigError as error:
                refused = refused or error
                continue
            reason = f"cut anew into {_format_stage_count(count)} at {list(cuts)}"
            return Repartition(cuts, tuple(line), {peer: n for n, peer in enumerate(line)}, reason)
    raise refused or ConfigError("nobody has enough of it", remedy="wait for workers")


def _groups(
    peers: Sequence[PeerId], cards: Mapping[PeerId, Card], count: int, holds: HeldSpans, blocks: int
) -> Iterable[list[PeerId]]:
    """Of so many workers, those with the most memory first; of many workers these alone, and some who have
    every block with the largest beside them."""
    largest = sorted(peers, key=lambda peer: -cards[peer].memory_bytes)
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
    cards: Mapping[PeerId, Card],
    holds: HeldSpans,
    known: PartitionCache,
) -> tuple[tuple[int, ...], list[PeerId]]:
    """The order along the pipeline whose cut is fastest; of those about as fast, what moves fewest bytes."""
    sizes = [block.parameter_bytes + block.trainable_bytes for block in model.blocks]
    lines: Iterable[Sequence[PeerId]] = [_by_held_position(members, holds)]
    if len(members) <= MAX_ORDERED_WORKERS and len(sizes) <= MAX_ORDERED_LAYERS:
        lines = permutations(_by_held_position(members, holds))
    found: list[tuple[float, int, tuple[int, ...], list[PeerId]]] = []
    refused: ConfigError | None = None
    for line in lines:
        cut = partition_for(model, [cards[peer] for peer in line], known)
        if isinstance(cut, ConfigError):
            refused = refused or cut
            continue
        moved = sum(
            sum(sizes[gap.start + span.start : gap.stop + span.start])
            for peer, span in zip(line, stage_spans(cut.cuts), strict=True)
            for gap in _missing_spans(holds.get(peer, ()), span)
        )
        found.append((cut.period_s, moved, cut.cuts, list(line)))
    if not found:
        assert refused is not None
        raise refused
    fastest_s = min(period_s for period_s, *_ in found)
    good = [each for each in found if each[0] <= fastest_s * (1 + TIME_TOLERANCE)]
    _, _, cuts, order = min(good, key=lambda each: each[1])
    return cuts, order


def partition_for(
    model: StagedModel, cards: Sequence[Card], known: PartitionCache
) -> PartitionCost | ConfigError:
    """The best cut for these cards in this order; or why there is none."""
    asked = tuple(cards)
    if asked not in known:
        layers, running = layers_of(model), execution_settings_of(model)
        try:
            known[asked] = partition.best_partition(
                layers, cards, None, running, slack=TIME_TOLERANCE, may_be=has_trainable_check(model)
            )
        except ConfigError as error:
            known[asked] = error
    return known[asked]


def has_trainable_check(model: StagedModel) -> Callable[[int, int], bool]:
    """A stage must have something to train."""
    trained = list(accumulate((block.trainable_bytes for block in model.blocks), initial=0))
    return lambda start, stop: trained[stop] > trained[start]


def _by_held_position(members: Sequence[PeerId], holds: HeldSpans) -> list[PeerId]:
    """By the middle of what they hold; who holds nothing comes last."""

    def middle(peer: PeerId) -> float:
        spans = holds.get(peer, ())
        return sum(s.start + s.stop for s in spans) / (2 * len(spans)) if spans else math.inf

    return sorted(members, key=middle)


def _missing_spans(spans: Sequence[Span], wanted: Span) -> list[Span]:
    """Of the blocks wanted, counted from the first of them."""
    inside = [
        Span(max(0, s.start - wanted.start), s.stop - wanted.start)
        for s in spans
        if overlap_layers(s, wanted)
    ]
    return uncovered_spans(inside, wanted.stop - wanted.start)


def _all_spans(holds: HeldSpans, members: Collection[PeerId]) -> list[Span]:
    return [span for peer in members for span in holds.get(peer, ())]


def is_worth_more_stages(setup: Setup, cuts: tuple[int, ...], stages: int) -> bool:
    """Whether `stages` are noticeably faster than those of `cuts`, on equal cards without memory limits."""
    assert setup.model is not None
    layers, running = layers_of(setup.model), execution_settings_of(setup.model)
    stages = min(stages, len(layers))
    few, more = (
        partition.best_partition(
            layers, [Card()] * count, None, running, may_be=has_trainable_check(setup.model)
        ).period_s
        for count in (len(cuts) - 1, stages)
    )
    return more * MIN_SPEEDUP <= few


# -- enough workers, but what they hold is of another cut ------------------------------------------------


def repartition_at(cuts: tuple[int, ...], peers: Sequence[PeerId], hands: StateLocations) -> Repartition:
    """Seats for as many replicas as there are workers for; states of other cuts are put together.

    Args:
        peers: the longest-serving first, at least as many as stages.
        hands: what is had of `cuts`, by others too; every block is in somebody's, or the run begins.

    Raises:
        ConfigError: more workers have parts of the state than there are seats, or others alone have some.
    """
    stages, hands = len(cuts) - 1, restricted_to(hands, peers)
    if not _missing_stages(hands, stages):
        return Repartition(cuts, tuple(peers))
    needed = _covering_workers(peers, hands.held_spans, cuts[-1])
    size = stages * (len(peers) // stages)
    chosen = set([*needed, *(peer for peer in peers if peer not in needed)][:size])
    members = [peer for peer in peers if peer in chosen]
    hands = restricted_to(hands, members)
    missing = _missing_stages(hands, stages)
    spans = stage_spans(cuts)
    first = {stage: peer for peer, stage in reversed(list(hands.in_memory.items()))}.values()  # they stay
    assemblers: dict[PeerId, int] = {}
    offers = [
        (_largest_overlap(hands.held_spans.get(peer, ()), spans[n]), n, peer)
        for n in missing
        for peer in members
    ]
    for _, stage, peer in sorted(offers, key=lambda offer: -offer[0]):
        if stage not in assemblers.values() and peer not in assemblers and peer not in first:
            assemblers[peer] = stage
    if len(needed) > size or len(assemblers) < len(missing):
        raise ConfigError(
            f"{len(needed)} workers have parts of the state, and there are {size} seats", remedy="wait"
        )
    return Repartition(cuts, tuple(members), assemblers, f"put together anew, cut at {list(cuts)}")


def restricted_to(hands: StateLocations, members: Sequence[PeerId]) -> StateLocations:
    """What these have."""
    return replace(
        hands,
        in_memory={p: n for p, n in hands.in_memory.items() if p in members},
        on_disk={p: n for p, n in hands.on_disk.items() if p in members},
        held_spans={p: spans for p, spans in hands.held_spans.items() if p in members},
    )


def _missing_stages(hands: StateLocations, stages: int) -> list[int]:
    """Stages that nobody has as they are."""
    exact = (
        set(hands.in_memory.values())
        | {n for own in hands.on_disk.values() for n in own}
        | set(hands.initial_stages)
    )
    return [n for n in range(stages) if n not in exact]


def _largest_overlap(spans: Sequence[Span], wanted: Span) -> int:
    return max((overlap_layers(span, wanted) for span in spans), default=0)


def _covering_workers(peers: Sequence[PeerId], holds: HeldSpans, count: int) -> list[PeerId]:
    """Few workers who together have every block."""
    chosen: list[PeerId] = []
    while lacking := uncovered_spans(_all_spans(holds, chosen), count):

        def adds(peer: PeerId, lacking: Sequence[Span] = lacking) -> int:
            return sum(overlap_layers(span, gap) for span in holds.get(peer, ()) for gap in lacking)

        best = max(peers, key=adds)
        if not adds(best):
            # Who has it is here, but its memory is too small for this cut.
            raise ConfigError(
                f"none of those who fit has the state of block {lacking[0].start}", remedy="cut otherwise"
            )
        chosen.append(best)
    return chosen


def with_assemblers(hands: StateLocations, recut: Repartition) -> StateLocations:
    """As `hands`, with assemblers as holders of the stages that they put together."""
    return replace(hands, in_memory={**hands.in_memory, **recut.assemblers}) if recut.assemblers else hands


# -- from what a stage is put together -------------------------------------------------------------------


def assembler_pieces(
    recut: Repartition, order: Sequence[PeerId], hands: StateLocations
) -> dict[PeerId, Pieces]:
    """Of each assembler: the checkpoints that it takes, by their blocks and by whose rank has them.

    One that has a stage as it is on its disk, or in memory, needs none.  Few are taken: at each block its
    own, else the one that reaches furthest.
    """

    def order_of(offer: tuple[Span, int]) -> tuple[bool, int, int]:
        return offer[1] == mine, min(offer[0].stop, wanted.stop), -offer[1]

    spans = stage_spans(recut.cuts)
    found: dict[PeerId, Pieces] = {}
    for peer, stage in recut.assemblers.items():
        held = hands.in_memory.get(peer) == stage or stage in hands.on_disk.get(peer, ())
        if held or stage in hands.initial_stages:
            continue
        wanted, mine = spans[stage], order.index(peer)
        taken: list[tuple[Span, int]] = []
        reached = wanted.start
        while reached < wanted.stop:
            offers = [
                (span, rank)
                for rank, other in enumerate(order)
                for span in hands.held_spans.get(other, ())
                if span.start <= reached < span.stop
            ]
            if not offers:
                raise LocalProtocolError(f"block {reached} of stage {stage} is in nobody's hands")
            if len(taken) == MAX_CHECKPOINT_SOURCES:
                raise ConfigError(
                    f"stage {stage} would be put together from more than {MAX_CHECKPOINT_SOURCES} checkpoints",
                    remedy="wait for workers",
                )
            best = max(
                offers, key=lambda offer: (offer[1] == mine, min(offer[0].stop, wanted.stop), -offer[1])
            )
            taken.append(best)
            reached = best[0].stop
        found[peer] = tuple(taken)
    return found


def error_text(error: ConfigError) -> str:
    """For a reason that travels."""
    return (
        error.reason if len(error.reason) <= MAX_ERROR_CHARS else error.reason[: MAX_ERROR_CHARS - 3] + "..."
    )


def _format_stage_count(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"
