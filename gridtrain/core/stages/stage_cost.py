"""The cost of a stage on a device: compute time, transfer time and memory (optimizer state, activations).

    bytes of stage s with k micro-batches of b samples between their forward and backward passes:

    parameters      parameters and buffers
    copies          gradients, optimizer state and residual: `copies` x the trainable parameters
    activations     b (k input + kept + output)   with re-materialization: one micro-batch is recomputed
                    b k (input + kept + output)   without re-materialization
                    + b work + fixed work         each for the layer in which it is largest
    transit         2 b (all payloads received or sent): one micro-batch in use, one in transfer

Here input, kept, output and work are the bytes per sample in `Layer`.  With S stages and M micro-batches, k
is M in fill-drain, and at most S - s in 1F1B if `ahead` is 0 (`schedule`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.stages.schedule import Schedule, fill_drain, one_forward_one_backward
from gridtrain.errors import ConfigError

_PICOSECONDS_PER_S = 10**12  # times are summed as whole picoseconds, so that equal stages are exactly equal


OPTIMIZER_STATE_COPIES = {
    "sgd": 0.0,
    "sgd-momentum": 1.0,
    "rmsprop": 1.0,
    "adagrad": 1.0,
    "adam": 2.0,
    "adamw": 2.0,
}
"""The size of each optimizer's state, as a multiple of the parameters' size."""

TIME_TOLERANCE = 0.02
"""Relative accuracy of measured times.  Partitions whose times differ by at most this share are considered
equally fast, so that another criterion, such as memory, decides between them."""


class ScheduleKind(StrEnum):
    """The order in which a stage computes its micro-batches."""

    FILL_DRAIN = "fill-drain"
    ONE_F_ONE_B = "1f1b"


@dataclass(frozen=True, slots=True)
class Layer:
    """The costs of one layer at relative speed 1.

    Attributes:
        forward_s, backward_s: time per sample; `backward_s` does not include a second forward pass.
        overhead_s: additional time of each forward and each backward pass of a micro-batch, regardless of its
            size.
        parameter_bytes: size of parameters and buffers.
        trainable_bytes: size of the parameters that have a gradient; None if all parameters have a gradient.
        output_bytes: size of the output that is sent to the next layer, per sample.
        gradient_bytes: size of the gradient received from the next layer, per sample; None if it is the same
            as `output_bytes`.
        kept_bytes: size of the tensors that autograd keeps for the backward pass, excluding parameters, per
            sample.
        work_bytes: the largest amount of memory in use during the forward or backward pass, per sample.  It
            includes the input and the gradient of the output, but not the kept bytes.  None if unknown; the
            sum of input and output is then used.
        fixed_work_bytes: the part of the memory in use that does not depend on the number of samples, such as
            a parameter's gradient before it is accumulated.
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
                f'the costs of layer "{self.name}" are {values}; each must be finite and at least 0',
                remedy="measure the layer again, or specify times and sizes that are at least 0",
            )

    @property
    def trainable(self) -> int:
        return self.parameter_bytes if self.trainable_bytes is None else self.trainable_bytes

    @property
    def gradient(self) -> int:
        return self.output_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """A device, with its relative speed and the bytes of memory that training may use."""

    speed: float = 1.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0 and self.memory_bytes > 0):
            raise ConfigError(
                f"a device has speed {self.speed:g} and {self.memory_bytes:g} bytes; both must be above 0, "
                "and the speed must be finite",
                remedy="specify a finite speed above 0 and the free memory of each device",
            )


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """The settings with which the stages are executed.

    Attributes:
        samples: the number of samples in the largest micro-batch.
        micro_batches: the number of micro-batches in a step.
        order: the schedule.
        copies: the number of copies of `trainable_bytes` in addition to the parameters: the gradient, the
            optimizer's state and the residual of an exchange.  3 stands for the gradient and Adam's two
            moments.
        rematerialise: whether a stage keeps only the inputs of its micro-batches and repeats the forward pass
            before the backward pass (GPipe, section 2.3); otherwise the stage keeps all tensors that autograd
            keeps.
        input_bytes: size of the first layer's input, per sample.
        overlap: whether transfers overlap with computation.
        message_s: a stage's CPU time for each message that it sends or receives.
        ahead: the `ahead` of 1F1B; see `schedule.one_forward_one_backward`.
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
                f"settings are out of range: {self.micro_batches} micro-batches of {self.samples} samples, "
                f"{self.copies:g} copies of trainable parameters, inputs of {self.input_bytes} bytes, "
                f"{self.message_s:g} s for a message and {self.ahead:g} micro-batches ahead",
                remedy="use at least 1 micro-batch of at least 1 sample, and no setting below 0",
            )

    def in_flight(self, stage: int, stages: int) -> int:
        """Return the maximum number of micro-batches between their forward and backward passes in this
        stage."""
        if self.order is ScheduleKind.FILL_DRAIN:
            return self.micro_batches
        behind = stages - stage - 1
        return min(self.micro_batches, math.ceil(behind * (1 + self.ahead)) + 1)

    def recomputes_forward(self, stage: int, stages: int) -> bool:
        """Return whether the forward pass is repeated before the backward pass.

        In the last stage of 1F1B, the backward pass immediately follows the forward pass, so the forward pass
        need not be repeated.
        """
        at_once = self.order is ScheduleKind.ONE_F_ONE_B and stage + 1 == stages
        return self.rematerialise and not at_once

    def schedule(self, stages: int) -> Schedule:
        if self.order is ScheduleKind.FILL_DRAIN:
            return fill_drain(stages, self.micro_batches)
        return one_forward_one_backward(stages, self.micro_batches, ahead=self.ahead)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The peak memory of a stage in bytes.

    Attributes:
        parameters: parameters and buffers.
        copies: gradients, the optimizer's state and the residual.
        activations: activations kept for the backward pass or in use.
        transit: payloads just received or being sent.
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
    """The cost of layers `start` to `stop` - 1 as a stage on one device, for one micro-batch.

    Attributes:
        compute_s: the time of the forward and backward passes on this device.
        transfer_s: how long the stage's link is busy in the busier direction.
        out_bytes, back_bytes: bytes sent to the next stage, and bytes sent to the previous stage.
    """

    start: int
    stop: int
    forward_s: float
    backward_s: float
    transfer_s: float
    out_bytes: int
    back_bytes: int
    memory: StageMemory
    device: Device

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class PartitionCost:
    """The cost of a model in stages.

    Attributes:
        period_s: the time that the slowest stage takes for a micro-batch (see `partition`).
    """

    stages: tuple[StageCost, ...]
    period_s: float

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of each stage, then the number of layers."""
        return (0, *(stage.stop for stage in self.stages))


class StageCostModel:
    """Computes the time and memory of a stage from prefix sums, because a search evaluates many stages.

    A stage consists of layers `start` to `stop` - 1 on device `stage`.

    Args:
        network: the network in which device s has rank s; None if transfers take no time.

    Raises:
        ConfigError: the network does not have one rank for each device.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        devices: Sequence[Device],
        network: NetworkModel | None,
        running: ExecutionSettings,
    ) -> None:
        self.layers, self.devices, self.running = layers, devices, running
        network = network or uniform_network(len(devices), 0.0, math.inf)
        if len(devices) != network.size:
            raise ConfigError(
                f"there are {len(devices)} devices, but the network has {network.size} ranks",
                remedy="specify one device for each rank of the network",
            )
        forwards_s = [running.samples * each.forward_s + each.overhead_s for each in layers]
        backwards_s = [running.samples * each.backward_s + each.overhead_s for each in layers]
        self._forward = _sums(round(each_s * _PICOSECONDS_PER_S) for each_s in forwards_s)
        self._backward = _sums(round(each_s * _PICOSECONDS_PER_S) for each_s in backwards_s)
        self._parameters = _sums(each.parameter_bytes for each in layers)
        self._trainable = _sums(each.trainable for each in layers)
        self._kept = _sums(each.kept_bytes for each in layers)
        self._trained = _sums(each.trainable > 0 for each in layers)
        inputs = [running.input_bytes, *(each.output_bytes for each in layers)]
        self._inputs = _sums(inputs)
        works = [
            a + b if each.work_bytes is None else each.work_bytes
            for each, (a, b) in zip(layers, pairwise(inputs), strict=True)
        ]
        self._most_work = _RangeMaximum(works)
        self._most_fixed = _RangeMaximum([each.fixed_work_bytes for each in layers])
        stages, path_Bps = len(devices), network.path_Bps
        self._in_flight = [running.in_flight(stage, stages) for stage in range(stages)]
        self._recomputes = [running.recomputes_forward(stage, stages) for stage in range(stages)]
        self._per_s = [_PICOSECONDS_PER_S * device.speed for device in devices]
        sides = [(stage > 0) + (stage + 1 < stages) for stage in range(stages)]
        self._messages_s = [number * running.message_s for number in sides]
        self._forward_Bps = [path_Bps(stage, stage + 1) for stage in range(stages - 1)]
        self._backward_Bps = [path_Bps(stage + 1, stage) for stage in range(stages - 1)]

    def can_be_stage(self, start: int, stop: int) -> bool:
        """Return whether one of the layers is trained, as each stage requires; True if no layer of the model
        is known to be trained."""
        return not self._trained[-1] or self._trained[stop] > self._trained[start]

    def forward_s(self, stage: int, start: int, stop: int) -> float:
        return self._seconds(self._forward[stop] - self._forward[start], stage)

    def backward_s(self, stage: int, start: int, stop: int) -> float:
        """Return the time of the backward pass, with the second forward pass of re-materialization."""
        work = self._backward[stop] - self._backward[start]
        if self._recomputes[stage]:
            work += self._forward[stop] - self._forward[start]
        return self._seconds(work, stage)

    def compute_s(self, stage: int, start: int, stop: int) -> float:
        """Return the compute time; it never decreases when layers are added, so the search can stop early."""
        return self.forward_s(stage, start, stop) + self.backward_s(stage, start, stop)

    def _seconds(self, work: int, stage: int) -> float:
        return work / self._per_s[stage] + self._messages_s[stage]

    def boundary_bytes(self, at: int) -> tuple[int, int]:
        """Return the bytes of activations and of gradients that cross the boundary before layer `at`, per
        micro-batch."""
        layer = self.layers[at - 1]
        return self.running.samples * layer.output_bytes, self.running.samples * layer.gradient

    def transfer_s(self, stage: int, start: int, stop: int) -> float:
        up_s = down_s = 0.0
        if stage > 0:
            on, back = self.boundary_bytes(start)
            up_s += back / self._backward_Bps[stage - 1]
            down_s += on / self._forward_Bps[stage - 1]
        if stage + 1 < len(self.devices):
            on, back = self.boundary_bytes(stop)
            up_s += on / self._forward_Bps[stage]
            down_s += back / self._backward_Bps[stage]
        return max(up_s, down_s)

    def edge_s(self, stage: int, stop: int) -> float:
        """Return a lower bound on the times of a stage that ends before layer `stop` and of its successor."""
        on, back = self.boundary_bytes(stop)
        return max(on / self._forward_Bps[stage], back / self._backward_Bps[stage])

    def time_s(self, stage: int, start: int, stop: int) -> float:
        """Return the stage's time per micro-batch; a partition minimizes the largest of these times."""
        compute_s, transfer_s = self.compute_s(stage, start, stop), self.transfer_s(stage, start, stop)
        return max(compute_s, transfer_s) if self.running.overlap else compute_s + transfer_s

    def fixed_bytes(self, start: int, stop: int) -> int:
        """Return the size in bytes of the parameters and their copies."""
        trainable = self._trainable[stop] - self._trainable[start]
        return self._parameters[stop] - self._parameters[start] + math.ceil(self.running.copies * trainable)

    def lower_bound_bytes(self, stage: int, start: int, stop: int) -> int:
        """Return a lower bound on `total_bytes` that ignores the stage's boundaries.

        The bound never decreases when a layer is added to the stage.
        """
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
        """Return the fields of `StageMemory`."""
        stages, running = len(self.devices), self.running
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
        last = stage + 1 == len(self.devices)
        return StageCost(
            start,
            stop,
            self.forward_s(stage, start, stop),
            self.backward_s(stage, start, stop),
            self.transfer_s(stage, start, stop),
            0 if last else self.boundary_bytes(stop)[0],
            self.boundary_bytes(start)[1] if stage else 0,
            self.memory(stage, start, stop),
            self.devices[stage],
        )


def _sums(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


class _RangeMaximum:
    """Finds the maximum of values[start:stop] from the maxima of ranges whose lengths are powers of 2."""

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
