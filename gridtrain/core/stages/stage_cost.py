"""What a stage of a model costs on a card: seconds of computing and of transfers, bytes of memory.
    bytes of stage s with k micro-batches of b samples between their forward and their backward:

    parameters      parameters and buffers
    copies          gradients and the optimizer's state: `copies` x the trainable parameters
    activations     b (k input + kept + output)   with re-materialisation: one micro-batch is recomputed
                    b k (input + kept + output)   without
                    + b work + fixed work, of the layer with the largest, while it runs
    transit         2 b (all that is received or sent): one micro-batch in work, one in transfer

k is M in fill-drain, and up to S - s in 1F1B (`schedule`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.stages.schedule import Schedule, fill_drain, one_forward_one_backward
from gridtrain.errors import ConfigError

_PICOSECONDS_PER_s = 10**12  # times are summed as whole picoseconds, so that equal stages are exactly equal


OPTIMIZER_STATE_COPIES = {
    "sgd": 0.0,
    "sgd-momentum": 1.0,
    "rmsprop": 1.0,
    "adagrad": 1.0,
    "adam": 2.0,
    "adamw": 2.0,
}
"""Size of an optimizer's state, in copies of the parameters."""

TIME_TOLERANCE = 0.02
"""Measured times are no more exact than this: within it, a partition that leaves more memory is better."""


class ScheduleKind(StrEnum):
    """The order in which a stage computes its micro-batches."""

    FILL_DRAIN = "fill-drain"
    ONE_F_ONE_B = "1f1b"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer costs at relative speed 1.

    Attributes:
        forward_s, backward_s: per sample; backward without a second forward.
        overhead_s: per micro-batch of any size, of a forward and of a backward each.
        parameter_bytes: parameters and buffers.
        trainable_bytes: parameters with a gradient; None: all.
        output_bytes: per sample, sent to the next layer.
        gradient_bytes: per sample, received from it; None: as many.
        kept_bytes: per sample, kept by autograd for backward beside parameters.
        work_bytes: per sample, held beside that while its forward or backward runs, at most, its input and
            the
            gradient of its output included; None: unknown, then its input and its output count.
        fixed_work_bytes: the same for any number of samples: a parameter's gradient before it is added.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    output_bytes: int
    kept_bytes: int = 0
    overhead_s: float = 0.0
    trainable_bytes: int | None = None
    gradient_bytes: int | None = None
    work_bytes: int | None = None
    fixed_work_bytes: int = 0

    def __post_init__(self) -> None:
        values = [self.forward_s, self.backward_s, self.overhead_s, self.parameter_bytes, self.output_bytes]
        values += [
            self.kept_bytes,
            self.trainable,
            self.gradient,
            self.work_bytes or 0,
            self.fixed_work_bytes,
        ]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ConfigError(
                f'layer "{self.name}" costs {values}', remedy="give seconds and bytes of at least 0"
            )

    @property
    def trainable(self) -> int:
        return self.parameter_bytes if self.trainable_bytes is None else self.trainable_bytes

    @property
    def gradient(self) -> int:
        return self.output_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True)
class Card:
    """A device: its relative speed, and the bytes that training may fill."""

    speed: float = 1.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0 and self.memory_bytes > 0):
            raise ConfigError(
                f"a card of speed {self.speed:g} and {self.memory_bytes:g} bytes", remedy="both must be > 0"
            )


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """How the stages are run.

    Attributes:
        samples: of the largest micro-batch.
        micro_batches: of a step.
        copies: copies of `trainable_bytes` beside the parameters: the gradient, the optimizer's state, and
            the
            residual of an exchange.  3: gradient and Adam's two moments.
        rematerialise: a stage keeps only the inputs of its micro-batches, and backward runs the forward again
            (GPipe, section 2.3); else it keeps what autograd keeps.
        input_bytes: per sample, of the first layer.
        overlap: transfers overlap with computing.
        message_s: CPU time of a stage for each message that it sends or receives.
        ahead: of 1F1B, see `schedule.one_forward_one_backward`.
    """

    samples: int = 1
    micro_batches: int = 8
    order: ScheduleKind = ScheduleKind.FILL_DRAIN
    rematerialise: bool = True
    copies: float = 3.0
    input_bytes: int = 0
    overlap: bool = True
    message_s: float = 90e-6
    ahead: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.copies, self.input_bytes, self.message_s, self.ahead)
        if self.samples < 1 or self.micro_batches < 1 or min(numbers) < 0:
            raise ConfigError(
                f"{self.micro_batches} micro-batches of {self.samples} samples, {self.copies:g} copies of "
                f"trainable parameters, inputs of {self.input_bytes} bytes",
                remedy="give at least one micro-batch of one sample, and nothing below 0",
            )

    def in_flight(self, stage: int, stages: int) -> int:
        """The largest number of micro-batches of this stage whose forward is done and whose backward is
        not."""
        if self.order is ScheduleKind.FILL_DRAIN:
            return self.micro_batches
        behind = stages - stage - 1
        return min(self.micro_batches, math.ceil(behind * (1 + self.ahead)) + 1)

    def recomputes_forward(self, stage: int, stages: int) -> bool:
        """Whether backward begins with a second forward; not where it follows the first one immediately."""
        at_once = self.order is ScheduleKind.ONE_F_ONE_B and stage + 1 == stages
        return self.rematerialise and not at_once

    def schedule(self, stages: int) -> Schedule:
        if self.order is ScheduleKind.FILL_DRAIN:
            return fill_drain(stages, self.micro_batches)
        return one_forward_one_backward(stages, self.micro_batches, ahead=self.ahead)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak memory of a stage in bytes.

    Attributes:
        parameters: with buffers.
        copies: gradients and the optimizer's state.
        activations: kept for backward, and in use by it.
        transit: just received, or being sent.
    """

    parameters: int
    copies: int
    activations: int
    transit: int

    @property
    def total(self) -> int:
        return self.parameters + self.copies + self.activations + self.transit


@dataclass(frozen=True, slots=True)
class StageCost:
    """Layers `start` to `stop` - 1 on one card; times are of one micro-batch.

    Attributes:
        compute_s: forward and backward, on this card.
        transfer_s: how long its link is busy, in the busier direction.
        out_bytes, back_bytes: sent to the next stage, and back to the one before.
    """

    start: int
    stop: int
    forward_s: float
    backward_s: float
    transfer_s: float
    out_bytes: int
    back_bytes: int
    memory: StageMemory
    card: Card

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class PartitionCost:
    """A model in stages; `period_s` is the slowest stage's time (see `partition`)."""

    stages: tuple[StageCost, ...]
    period_s: float

    @property
    def cuts(self) -> tuple[int, ...]:
        """(S + 1,) where stages begin, and the number of layers."""
        return (0, *(stage.stop for stage in self.stages))


@dataclass(slots=True)
class StageCostModel:
    """Time and bytes of any stage, layers `start` to `stop` - 1 on card `stage`, from prefix sums."""

    layers: Sequence[Layer]
    cards: Sequence[Card]
    network: NetworkModel
    running: ExecutionSettings
    _forward: list[int] = field(init=False)
    _backward: list[int] = field(init=False)
    _parameters: list[int] = field(init=False)
    _trainable: list[int] = field(init=False)
    _kept: list[int] = field(init=False)
    _inputs: list[int] = field(init=False)
    _most_work: _RangeMaximum = field(init=False)
    _most_fixed: _RangeMaximum = field(init=False)
    _in_flight: list[int] = field(
        init=False
    )  # this and the following are looked up for each of many partitions
    _recomputes: list[bool] = field(init=False)
    _per_s: list[float] = field(init=False)
    _messages_s: list[float] = field(init=False)
    _forward_Bps: list[float] = field(init=False)
    _backward_Bps: list[float] = field(init=False)

    def __post_init__(self) -> None:
        layers, running = self.layers, self.running
        if len(self.cards) != self.network.size:
            raise ConfigError(
                f"{len(self.cards)} cards in a network of {self.network.size}", remedy="describe each stage"
            )
        forwards_s = [running.samples * each.forward_s + each.overhead_s for each in layers]
        backwards_s = [running.samples * each.backward_s + each.overhead_s for each in layers]
        self._forward = _sums([round(each_s * _PICOSECONDS_PER_s) for each_s in forwards_s])
        self._backward = _sums([round(each_s * _PICOSECONDS_PER_s) for each_s in backwards_s])
        self._parameters = _sums([each.parameter_bytes for each in layers])
        self._trainable = _sums([each.trainable for each in layers])
        self._kept = _sums([each.kept_bytes for each in layers])
        inputs = [running.input_bytes, *(each.output_bytes for each in layers)]
        self._inputs = _sums(inputs)
        works = [
            a + b if each.work_bytes is None else each.work_bytes
            for each, (a, b) in zip(layers, pairwise(inputs), strict=True)
        ]
        self._most_work = _RangeMaximum(works)
        self._most_fixed = _RangeMaximum([each.fixed_work_bytes for each in layers])
        stages, path_Bps = len(self.cards), self.network.path_Bps
        self._in_flight = [running.in_flight(stage, stages) for stage in range(stages)]
        self._recomputes = [running.recomputes_forward(stage, stages) for stage in range(stages)]
        self._per_s = [_PICOSECONDS_PER_s * card.speed for card in self.cards]
        sides = [(stage > 0) + (stage + 1 < stages) for stage in range(stages)]
        self._messages_s = [number * running.message_s for number in sides]
        self._forward_Bps = [path_Bps(stage, stage + 1) for stage in range(stages - 1)]
        self._backward_Bps = [path_Bps(stage + 1, stage) for stage in range(stages - 1)]

    def forward_s(self, stage: int, start: int, stop: int) -> float:
        return self._seconds(self._forward[stop] - self._forward[start], stage)

    def backward_s(self, stage: int, start: int, stop: int) -> float:
        """With the second forward where activations are re-materialised."""
        work = self._backward[stop] - self._backward[start]
        if self._recomputes[stage]:
            work += self._forward[stop] - self._forward[start]
        return self._seconds(work, stage)

    def compute_s(self, stage: int, start: int, stop: int) -> float:
        """Grows as `start` falls, so that the search can stop early."""
        return self.forward_s(stage, start, stop) + self.backward_s(stage, start, stop)

    def _seconds(self, work: int, stage: int) -> float:
        return work / self._per_s[stage] + self._messages_s[stage]

    def boundary_bytes(self, at: int) -> tuple[int, int]:
        """Bytes of one micro-batch over a boundary before layer `at`: (activations forth, gradients back)."""
        layer = self.layers[at - 1]
        return self.running.samples * layer.output_bytes, self.running.samples * layer.gradient

    def transfer_s(self, stage: int, start: int, stop: int) -> float:
        up_s = down_s = 0.0
        if stage > 0:
            on, back = self.boundary_bytes(start)
            up_s += back / self._backward_Bps[stage - 1]
            down_s += on / self._forward_Bps[stage - 1]
        if stage + 1 < len(self.cards):
            on, back = self.boundary_bytes(stop)
            up_s += on / self._forward_Bps[stage]
            down_s += back / self._backward_Bps[stage]
        return max(up_s, down_s)

    def edge_s(self, stage: int, stop: int) -> float:
        """Lower bound of the time of the stage and of the next one, if it ends before layer `stop`."""
        on, back = self.boundary_bytes(stop)
        return max(on / self._forward_Bps[stage], back / self._backward_Bps[stage])

    def time_s(self, stage: int, start: int, stop: int) -> float:
        """Seconds of a micro-batch: what the partition minimises for the slowest stage."""
        compute_s, transfer_s = self.compute_s(stage, start, stop), self.transfer_s(stage, start, stop)
        return max(compute_s, transfer_s) if self.running.overlap else compute_s + transfer_s

    def fixed_bytes(self, start: int, stop: int) -> int:
        """Parameters and their copies."""
        trainable = self._trainable[stop] - self._trainable[start]
        return self._parameters[stop] - self._parameters[start] + math.ceil(self.running.copies * trainable)

    def lower_bound_bytes(self, stage: int, start: int, stop: int) -> int:
        """Lower bound of `total_bytes` that grows as `start` falls or `stop` rises: without boundaries."""
        kept = self._kept[stop] - self._kept[start]
        if not self.running.rematerialise:
            kept *= self._in_flight[stage]
        work = self.running.samples * (kept + self._most_work(start, stop)) + self._most_fixed(start, stop)
        return self.fixed_bytes(start, stop) + work

    def memory(self, stage: int, start: int, stop: int) -> StageMemory:
        return StageMemory(*self._memory_parts(stage, start, stop))

    def total_bytes(self, stage: int, start: int, stop: int) -> int:
        return sum(self._memory_parts(stage, start, stop))

    def _memory_parts(self, stage: int, start: int, stop: int) -> tuple[int, int, int, int]:
        """The fields of `StageMemory`."""
        stages, running = len(self.cards), self.running
        samples, flying = running.samples, self._in_flight[stage]
        entering = self._inputs[start + 1] - self._inputs[start]
        leaving = self._inputs[stop + 1] - self._inputs[stop]
        kept = self._kept[stop] - self._kept[start]
        if running.rematerialise:
            activations = flying * entering + kept + leaving
        else:
            activations = flying * (entering + kept + leaving)
        activations = samples * (activations + self._most_work(start, stop)) + self._most_fixed(start, stop)
        transit = entering + (self.layers[start - 1].gradient if stage else 0)
        if stage + 1 < stages:
            transit += leaving + self.layers[stop - 1].gradient
        parameters = self._parameters[stop] - self._parameters[start]
        copies = self.fixed_bytes(start, stop) - parameters
        return parameters, copies, activations, 2 * samples * transit

    def stage_cost(self, stage: int, start: int, stop: int) -> StageCost:
        last = stage + 1 == len(self.cards)
        return StageCost(
            start,
            stop,
            self.forward_s(stage, start, stop),
            self.backward_s(stage, start, stop),
            self.transfer_s(stage, start, stop),
            0 if last else self.boundary_bytes(stop)[0],
            self.boundary_bytes(start)[1] if stage else 0,
            self.memory(stage, start, stop),
            self.cards[stage],
        )


def _sums(values: Sequence[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


class _RangeMaximum:
    """The largest of values[start:stop], from maxima of all ranges whose length is a power of two."""

    __slots__ = ("_rows",)

    def __init__(self, values: Sequence[int]) -> None:
        self._rows = [list(values)]
        while 2 ** len(self._rows) <= len(values):
            row, half = self._rows[-1], 2 ** (len(self._rows) - 1)
            self._rows.append([max(a, b) for a, b in zip(row, row[half:], strict=False)])

    def __call__(self, start: int, stop: int) -> int:
        level = (stop - start).bit_length() - 1
        row = self._rows[level]
        return max(row[start], row[stop - (1 << level)])
