"""What a step of a pipeline takes, and into how many micro-batches its batch is best divided.

    partition ---+
    schedule ----+--> actions and transfers, simulated in the order of events --> StepEstimate
    network -----+

More micro-batches make the bubble smaller: of a step in M micro-batches over S even stages
(S - 1)/(M + S - 1) is idle (GPipe, section 2.3).  But each micro-batch costs its overhead (of kernels, of
messages), and where a schedule waits for a payload, its latency.  `propose_micro_batches` simulates the step
for each number and takes the smallest one that is nearly as fast as the fastest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gridtrain.core.planning.exchange_comparison import format_seconds
from gridtrain.core.planning.network_model import LinkOccupancy, NetworkModel, uniform_network
from gridtrain.core.stages import partition
from gridtrain.core.stages.schedule import Action, ActionKind, ahead_for, divide_samples
from gridtrain.core.stages.stage_cost import (
    Card,
    ExecutionSettings,
    Layer,
    PartitionCost,
    ScheduleKind,
    StageCostModel,
)
from gridtrain.errors import ConfigError

MOST_MICRO_BATCHES = 256
"""The largest number that is proposed: a bubble of 3 % with 8 stages."""

STEP_TIME_TOLERANCE = 0.02
"""A step that is slower by at most this share is preferred if it has fewer micro-batches or keeps fewer."""

_AHEAD = (0.5, 1.0, 2.0, 4.0)
"""Values of `ahead` to try: that of the slowest hop alone is too small for uneven stages."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A predicted step.

    Attributes:
        settings: with the number of micro-batches, and the samples of the largest.
        step_s: from the first forward until the last backward has ended, transfers overlapping with work;
            without exchange and optimizer.
        bubble: the share of it in which the stage that computes most is idle.
        sent_bytes: (S,) by each stage in a step.
    """

    cut: PartitionCost
    settings: ExecutionSettings
    step_s: float
    bubble: float
    sent_bytes: tuple[int, ...]

    @property
    def ideal_bubble(self) -> float:
        """The bubble of as many even stages without transfers: (S - 1)/(M + S - 1)."""
        stages, micro_batches = len(self.cut.stages), self.settings.micro_batches
        return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True, slots=True)
class MicroBatchProposal:
    """The number of micro-batches to take, the alternatives (ascending), and why."""

    chosen: StepEstimate
    alternatives: tuple[StepEstimate, ...]
    reason: str

    @property
    def micro_batches(self) -> int:
        return self.chosen.settings.micro_batches


def estimate_step(
    layers: Sequence[Layer],
    cards: Sequence[Card],
    network: NetworkModel,
    running: ExecutionSettings,
    batch: int,
    cut: PartitionCost,
) -> StepEstimate:
    """A step of `batch` samples with this partition, in `running.micro_batches` micro-batches."""
    sizes = divide_samples(batch, running.micro_batches)
    simulation = _StepSimulation(layers, cards, network, running, sizes, cut)
    step_s = simulation.run()
    bubble = 1 - max(simulation.computed_s) / step_s
    return StepEstimate(cut, running, step_s, bubble, tuple(simulation.sent_bytes))


def propose_micro_batches(
    layers: Sequence[Layer],
    cards: Sequence[Card],
    network: NetworkModel | None,
    running: ExecutionSettings,
    batch: int,
    *,
    cuts: Sequence[int] | None = None,
    numbers: Sequence[int] = (),
    near: float = STEP_TIME_TOLERANCE,
    slack: float = 0.0,
    ahead: float | None = None,
) -> MicroBatchProposal:
    """Into how many micro-batches a step of `batch` samples is best divided.

    Args:
        running: its `samples`, `micro_batches` and (of 1F1B) `ahead` are chosen here.
        cuts: the partition, where it is fixed; None: each number gets its best one.
        numbers: to compare; empty: all that make the largest micro-batch smaller, up to `MOST_MICRO_BATCHES`.
        near: by which share a step with fewer micro-batches may be slower.
        slack: see `partition.best_partition`.
        ahead: of 1F1B, where that is fixed.

    Raises:
        ConfigError: none fits into the cards' memory, with the reason of the last one.
    """
    network = network or uniform_network(len(cards), 0.0, math.inf)
    if batch < 1 or any(not 1 <= number <= batch for number in numbers):
        raise ConfigError(
            f"{batch} samples in {list(numbers) or 'any number of'} micro-batches",
            remedy="give at least one sample, and one for each micro-batch",
        )
    tried: list[StepEstimate] = []
    refused: list[ConfigError] = []
    for number in sorted(set(numbers)) or micro_batch_candidates(batch):
        try:
            tried.append(
                _best_for_count(layers, cards, network, running, batch, number, cuts, near, slack, ahead)
            )
        except ConfigError as error:
            refused.append(error)
    if not tried:
        raise refused[-1]
    fastest = min(tried, key=lambda each: each.step_s)
    chosen = next(each for each in tried if each.step_s <= fastest.step_s * (1 + near))
    return MicroBatchProposal(chosen, tuple(tried), _reason(chosen, tried, batch, refused))


def micro_batch_candidates(batch: int) -> list[int]:
    """Ascending; each makes the largest micro-batch smaller than the one before."""
    most = min(batch, MOST_MICRO_BATCHES)
    sizes = {math.ceil(batch / number) for number in range(1, most + 1)}
    return sorted(number for number in {math.ceil(batch / size) for size in sizes} if number <= most)


def _best_for_count(
    layers: Sequence[Layer],
    cards: Sequence[Card],
    network: NetworkModel,
    running: ExecutionSettings,
    batch: int,
    number: int,
    cuts: Sequence[int] | None,
    near: float,
    slack: float,
    fixed: float | None,
) -> StepEstimate:
    """The best way to run a step in `number` micro-batches; of 1F1B, the least `ahead` that is as good."""
    running = replace(running, samples=math.ceil(batch / number), micro_batches=number, ahead=fixed or 0.0)
    cut = _partition_for(layers, cards, network, running, cuts, slack)
    found = [estimate_step(layers, cards, network, running, batch, cut)]
    if fixed is None and running.order is ScheduleKind.ONE_F_ONE_B and len(cards) > 2:
        for ahead in sorted({_ahead_for_slowest_hop(cut, network), *_AHEAD}):
            further = replace(running, ahead=ahead)
            if further.schedule(len(cards)).actions == found[-1].settings.schedule(len(cards)).actions:
                continue  # the same with so few micro-batches
            try:
                cut = _partition_for(layers, cards, network, further, cuts, slack)
            except ConfigError:
                break  # each one further needs more memory
            found.append(estimate_step(layers, cards, network, further, batch, cut))
    fastest_s = min(each.step_s for each in found)
    return next(each for each in found if each.step_s <= fastest_s * (1 + near))


def _partition_for(
    layers: Sequence[Layer],
    cards: Sequence[Card],
    network: NetworkModel,
    running: ExecutionSettings,
    cuts: Sequence[int] | None,
    slack: float,
) -> PartitionCost:
    if cuts is None:
        return partition.best_partition(
            layers, cards, network, running, slack=slack, may_be=_has_trainable_check(layers, len(cards))
        )
    cut = partition.partition_at(StageCostModel(layers, cards, network, running), cuts)
    for index, stage in enumerate(cut.stages):
        if stage.memory.total > stage.card.memory_bytes:
            raise ConfigError(
                f"stage {index} needs {stage.memory.total} bytes of its card's {stage.card.memory_bytes:g}",
                remedy="use another partition, or more micro-batches",
            )
    return cut


def _has_trainable_check(layers: Sequence[Layer], stages: int) -> Callable[[int, int], bool]:
    """A check that a stage has trainable layers; it allows any stage where none are known."""
    before = list(accumulate((layer.trainable > 0 for layer in layers), initial=0))
    if not before[-1]:
        return lambda start, stop: True
    if before[-1] < stages <= len(layers):
        raise ConfigError(
            f"{len(layers)} layers, of which {before[-1]} are trained, cannot be divided into {stages} "
            "stages: each must have something to train",
            remedy=f"at most {before[-1]} stages, or smaller layers",
        )
    return lambda start, stop: before[stop] > before[start]


def _ahead_for_slowest_hop(cut: PartitionCost, network: NetworkModel) -> float:
    """The `ahead` for the slowest hop, if all stages are even and none waits for another one's work."""
    forward_s = max(stage.forward_s for stage in cut.stages)
    backward_s = max(stage.backward_s for stage in cut.stages)
    hops_s = [
        network.link(s, s + 1).alpha_s + stage.out_bytes / network.path_Bps(s, s + 1)
        for s, stage in enumerate(cut.stages[:-1])
    ]
    return ahead_for(forward_s, backward_s, max(hops_s)) if forward_s + backward_s > 0 else 0.0


def _reason(
    chosen: StepEstimate, tried: Sequence[StepEstimate], batch: int, refused: Sequence[ConfigError]
) -> str:
    running, stages = chosen.settings, len(chosen.cut.stages)
    text = (
        f"{running.micro_batches} micro-batches of {running.samples} of {batch} samples over {stages} "
        f"stages: a step takes {format_seconds(chosen.step_s)}, {chosen.bubble:.0%} of it bubble "
        f"({chosen.ideal_bubble:.0%} with even stages and no links)"
    )
    if running.ahead:
        text += f", {running.order} running {running.ahead:.3g} ahead for each stage that follows"
    fewer = [each for each in tried if each.settings.micro_batches < running.micro_batches]
    more = [each for each in tried if each.settings.micro_batches > running.micro_batches]
    if fewer:
        text += f"; {fewer[-1].settings.micro_batches} would take {format_seconds(fewer[-1].step_s)}"
    if more:
        best = min(more, key=lambda each: each.step_s)
        text += f"; {best.settings.micro_batches} would take {format_seconds(best.step_s)}"
        text += ", hardly less" if best.step_s < chosen.step_s else ", as each costs its overhead and latency"
    if refused:
        text += f"; {len(refused)} other numbers do not fit into memory"
    return text


class _StepSimulation:
    """Simulates a step: the stages work through their lists, and payloads queue for the links."""

    def __init__(
        self,
        layers: Sequence[Layer],
        cards: Sequence[Card],
        network: NetworkModel,
        running: ExecutionSettings,
        sizes: Sequence[int],
        cut: PartitionCost,
    ) -> None:
        self._sizes, self._network = sizes, network
        self._by_size = {
            size: partition.partition_at(
                StageCostModel(layers, cards, network, replace(running, samples=size)), cut.cuts
            ).stages
            for size in set(sizes)
        }
        self._lists = replace(running, micro_batches=len(sizes)).schedule(len(cards)).actions
        self._traffic = LinkOccupancy(network)
        self._next = [0] * len(cards)
        self._busy = [False] * len(cards)
        self._arrived: list[set[Action]] = [set() for _ in cards]
        self._arrived[0] = {Action(ActionKind.FORWARD, m) for m in range(len(sizes))}
        self._events: list[tuple[float, int, str, int, Action, float]] = []
        self._count = 0
        self.computed_s = [0.0] * len(cards)
        self.sent_bytes = [0] * len(cards)

    def run(self) -> float:
        """Seconds until the last backward has ended."""
        now_s = 0.0
        for stage in range(len(self._lists)):
            self._start_next(stage, now_s)
        while self._events:
            now_s, _, what, stage, action, not_before_s = heapq.heappop(self._events)
            match what:
                case "computed":
                    self._busy[stage] = False
                    self._send_payload(stage, action, now_s)
                case "reached":
                    end_s = self._traffic.arrive(stage, self._nbytes(stage, action), now_s, not_before_s)
                    self._schedule_event(end_s, "there", stage, action)
                case _:
                    self._arrived[stage].add(action)
            self._start_next(stage, now_s)
        return now_s

    def _schedule_event(
        self, when_s: float, what: str, stage: int, action: Action, not_before_s: float = 0.0
    ) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, what, stage, action, not_before_s))

    def _start_next(self, stage: int, now_s: float) -> None:
        """Start the next action if the stage is idle and the payload has arrived."""
        position = self._next[stage]
        if self._busy[stage] or position == len(self._lists[stage]):
            return
        action = self._lists[stage][position]
        if action not in self._arrived[stage]:
            return
        of = self._by_size[self._sizes[action.micro_batch]][stage]
        lasts_s = of.forward_s if action.kind is ActionKind.FORWARD else of.backward_s
        self._next[stage], self._busy[stage] = position + 1, True
        self.computed_s[stage] += lasts_s
        self._schedule_event(now_s + lasts_s, "computed", stage, action)

    def _nbytes(self, to: int, action: Action) -> int:
        """Bytes of the payload with which stage `to` can start `action`."""
        stages = self._by_size[self._sizes[action.micro_batch]]
        return stages[to - 1].out_bytes if action.kind is ActionKind.FORWARD else stages[to + 1].back_bytes

    def _send_payload(self, stage: int, action: Action, now_s: float) -> None:
        last = len(self._lists) - 1
        if action.kind is ActionKind.FORWARD and stage == last:
            self._arrived[stage].add(Action(ActionKind.BACKWARD, action.micro_batch))
            return
        to = stage + 1 if action.kind is ActionKind.FORWARD else stage - 1
        if to < 0:
            return
        nbytes = self._nbytes(to, action)
        self.sent_bytes[stage] += nbytes
        first_s, last_s = self._traffic.depart(stage, to, nbytes, now_s)
        self._schedule_event(first_s, "reached", to, action, last_s)
