"""Predicts a pipeline's step time by simulation and proposes a number of micro-batches.

    partition ---+
    schedule ----+--> actions and transfers, simulated in the order of events --> StepEstimate
    network -----+

More micro-batches make the bubble smaller: with M micro-batches and S equal stages, a stage is idle for
(S - 1)/(M + S - 1) of a step (GPipe, section 2.3).  However, each micro-batch adds the overhead of kernels
and messages, and also latency if the schedule waits for the micro-batch's payloads.
`propose_micro_batches` simulates a step with each number, and chooses the smallest number for which a step
is nearly as fast as the fastest step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gridtrain.core.planning.network_model import LinkOccupancy, NetworkModel, uniform_network
from gridtrain.core.stages import partition
from gridtrain.core.stages.schedule import Action, ActionKind, ahead_for, divide_samples
from gridtrain.core.stages.stage_cost import (
    Device,
    ExecutionSettings,
    Layer,
    PartitionCost,
    ScheduleKind,
    StageCostModel,
)
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_bytes, format_count, format_seconds

MAX_MICRO_BATCHES = 256
"""The maximum number of micro-batches to propose; with 8 stages, the bubble is then 3 %."""

STEP_TIME_TOLERANCE = 0.02
"""A step that is slower by at most this share is preferred if it has fewer micro-batches or keeps fewer of
them in memory."""

_AHEAD = (0.5, 1.0, 2.0, 4.0)
"""Values of `ahead` to try besides the one for the slowest hop, which may be too small for unequal stages."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The prediction of a step.

    Attributes:
        cut: the partition and its costs.
        settings: the settings, including the number of micro-batches and the size of the largest one.
        step_s: time from the start of the first forward pass to the end of the last backward pass, excluding
            exchange and optimizer; transfers overlap with computing.
        bubble: the share of `step_s` during which the busiest stage is idle.
        sent_bytes: bytes sent by each stage in a step.
    """

    cut: PartitionCost
    settings: ExecutionSettings
    step_s: float
    bubble: float
    sent_bytes: tuple[int, ...]

    @property
    def ideal_bubble(self) -> float:
        """The bubble of S equal stages without transfers and with M micro-batches: (S - 1)/(M + S - 1)."""
        stages, micro_batches = len(self.cut.stages), self.settings.micro_batches
        return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True, slots=True)
class MicroBatchProposal:
    """A proposed number of micro-batches.

    Attributes:
        chosen: the prediction for the proposed number.
        alternatives: the predictions for all numbers that fit into memory, including the proposed one, in
            ascending order.
        reason: the reason for the proposal, as text.
    """

    chosen: StepEstimate
    alternatives: tuple[StepEstimate, ...]
    reason: str

    @property
    def micro_batches(self) -> int:
        return self.chosen.settings.micro_batches


def estimate_step(
    layers: Sequence[Layer],
    devices: Sequence[Device],
    network: NetworkModel,
    running: ExecutionSettings,
    batch: int,
    cut: PartitionCost,
) -> StepEstimate:
    """Predict a step of `batch` samples in `running.micro_batches` micro-batches with this partition."""
    sizes = divide_samples(batch, running.micro_batches)
    simulation = _StepSimulation(layers, devices, network, running, sizes, cut)
    step_s = simulation.run()
    bubble = 1 - max(simulation.computed_s) / step_s
    return StepEstimate(cut, running, step_s, bubble, tuple(simulation.sent_bytes))


def propose_micro_batches(
    layers: Sequence[Layer],
    devices: Sequence[Device],
    network: NetworkModel | None,
    running: ExecutionSettings,
    batch: int,
    *,
    cuts: Sequence[int] | None = None,
    numbers: Sequence[int] = (),
    slack: float = 0.0,
    ahead: float | None = None,
) -> MicroBatchProposal:
    """Propose the number of micro-batches for a step of `batch` samples.

    Args:
        running: the settings; `samples`, `micro_batches` and the `ahead` of 1F1B are replaced.
        cuts: the partition if it is fixed; None to use the best partition for each number.
        numbers: the numbers of micro-batches to compare; by default `micro_batch_candidates`.
        slack: see `partition.best_partition`.
        ahead: the `ahead` of 1F1B if it is fixed; None to choose it.

    Raises:
        ConfigError: an argument is out of range, or the model does not fit into the devices' memory with any
            of the numbers.  In the latter case, the error is the one for the largest number.
    """
    network = network or uniform_network(len(devices), 0.0, math.inf)
    if batch < 1 or any(not 1 <= number <= batch for number in numbers):
        raise ConfigError(
            f"{format_count(batch, 'sample')} cannot be divided into "
            f"{list(numbers) or 'any number of'} micro-batches",
            remedy="use at least 1 micro-batch, and at least as many samples as micro-batches",
        )
    search = _Search(layers, devices, network, running, batch, cuts, slack, ahead)
    tried: list[StepEstimate] = []
    refused: list[ConfigError] = []
    for number in sorted(set(numbers)) or micro_batch_candidates(batch):
        try:
            tried.append(search.best_step(number))
        except ConfigError as error:
            refused.append(error)
    if not tried:
        raise refused[-1]
    fastest = min(tried, key=lambda each: each.step_s)
    chosen = next(each for each in tried if each.step_s <= fastest.step_s * (1 + STEP_TIME_TOLERANCE))
    return MicroBatchProposal(chosen, tuple(tried), _reason(chosen, tried, batch, refused))


def micro_batch_candidates(batch: int) -> list[int]:
    """Return the numbers of micro-batches to compare, at most `MAX_MICRO_BATCHES`, in ascending order.

    Each number makes the largest micro-batch smaller than the previous number does.
    """
    most = min(batch, MAX_MICRO_BATCHES)
    sizes = {math.ceil(batch / number) for number in range(1, most + 1)}
    return sorted(number for number in {math.ceil(batch / size) for size in sizes} if number <= most)


@dataclass(frozen=True, slots=True)
class _Search:
    """Tries numbers of micro-batches with the arguments of `propose_micro_batches`."""

    layers: Sequence[Layer]
    devices: Sequence[Device]
    network: NetworkModel
    running: ExecutionSettings
    batch: int
    cuts: Sequence[int] | None
    slack: float
    ahead: float | None

    def best_step(self, number: int) -> StepEstimate:
        """Return the best step with `number` micro-batches.

        For 1F1B without a fixed `ahead`, use the smallest `ahead` that makes the step nearly as fast as
        the best `ahead` does.
        """
        samples, stages = math.ceil(self.batch / number), len(self.devices)
        running = replace(self.running, samples=samples, micro_batches=number, ahead=self.ahead or 0.0)
        found = [self._estimate(running)]
        if self.ahead is None and running.order is ScheduleKind.ONE_F_ONE_B and stages > 2:
            for ahead in sorted({_ahead_for_slowest_hop(found[0].cut, self.network), *_AHEAD}):
                further = replace(running, ahead=ahead)
                if further.schedule(stages).actions == found[-1].settings.schedule(stages).actions:
                    continue  # with so few micro-batches the schedule is the same
                try:
                    found.append(self._estimate(further))
                except ConfigError:
                    break  # each larger `ahead` needs more memory
        fastest_s = min(each.step_s for each in found)
        return next(each for each in found if each.step_s <= fastest_s * (1 + STEP_TIME_TOLERANCE))

    def _estimate(self, running: ExecutionSettings) -> StepEstimate:
        """Predict a step with the fixed partition, or with the best one for these settings.

        Raises:
            ConfigError: the fixed partition or, without one, every partition exceeds the devices' memory.
        """
        layers, devices, network = self.layers, self.devices, self.network
        if self.cuts is None:
            cut = partition.best_partition(layers, devices, network, running, slack=self.slack)
        else:
            cut = partition.partition_at(StageCostModel(layers, devices, network, running), self.cuts)
            _check_memory(cut)
        return estimate_step(layers, devices, network, running, self.batch, cut)


def _check_memory(cut: PartitionCost) -> None:
    for index, stage in enumerate(cut.stages):
        if stage.memory.total > stage.device.memory_bytes:
            raise ConfigError(
                f"stage {index} needs {format_bytes(stage.memory.total)}, but its device has only "
                f"{format_bytes(stage.device.memory_bytes)}",
                remedy="use a different partition or more micro-batches",
            )


def _ahead_for_slowest_hop(cut: PartitionCost, network: NetworkModel) -> float:
    """Return the `ahead` for the slowest hop of activations, as if all stages were as slow as the slowest."""
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
        f"{running.micro_batches} micro-batch{'' if running.micro_batches == 1 else 'es'} of up to "
        f"{format_count(running.samples, 'sample')}, {batch} in total, over "
        f"{format_count(stages, 'stage')}: a step takes {format_seconds(chosen.step_s)} "
        f"and its bubble is {chosen.bubble:.0%} ({chosen.ideal_bubble:.0%} with balanced stages and no links)"
    )
    if running.ahead:
        ahead = f"{running.ahead:.3g}"
        text += f"; {running.order} runs {ahead} micro-batch{'' if ahead == '1' else 'es'} ahead for each "
        text += "later stage"
    fewer = [each for each in tried if each.settings.micro_batches < running.micro_batches]
    more = [each for each in tried if each.settings.micro_batches > running.micro_batches]
    if fewer:
        text += f"; {fewer[-1].settings.micro_batches} would take {format_seconds(fewer[-1].step_s)}"
    if more:
        best = min(more, key=lambda each: each.step_s)
        text += f"; {best.settings.micro_batches} would take {format_seconds(best.step_s)}"
        text += (
            ", only slightly less"
            if best.step_s < chosen.step_s
            else ", because each micro-batch adds overhead and latency"
        )
    if refused:
        text += f"; {format_count(len(refused), 'other number')} of micro-batches would need too much memory"
    return text


class _StepSimulation:
    """Simulates a step: stages execute their lists of actions, and payloads are queued for the links."""

    def __init__(
        self,
        layers: Sequence[Layer],
        devices: Sequence[Device],
        network: NetworkModel,
        running: ExecutionSettings,
        sizes: Sequence[int],
        cut: PartitionCost,
    ) -> None:
        self._sizes, self._network = sizes, network
        self._by_size = {
            size: partition.partition_at(
                StageCostModel(layers, devices, network, replace(running, samples=size)), cut.cuts
            ).stages
            for size in set(sizes)
        }
        self._lists = replace(running, micro_batches=len(sizes)).schedule(len(devices)).actions
        self._traffic = LinkOccupancy(network)
        self._next = [0] * len(devices)
        self._busy = [False] * len(devices)
        self._arrived: list[set[Action]] = [set() for _ in devices]
        self._arrived[0] = {Action(ActionKind.FORWARD, m) for m in range(len(sizes))}
        self._events: list[tuple[float, int, str, int, Action, float]] = []
        self._count = 0
        self.computed_s = [0.0] * len(devices)
        self.sent_bytes = [0] * len(devices)

    def run(self) -> float:
        """Simulate the step; return the time at which the last backward pass ends, in seconds."""
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
        """Return the size of the payload that stage `to` needs to start `action`, in bytes."""
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
