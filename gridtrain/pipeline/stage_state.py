"""Keeps one stage in memory: its module, optimizer, gradient and executor; checks a pipeline's options.

The module, optimizer, flat gradient and exchanger of a stage are made as soon as this worker's rank is known,
and its `Stage` and `StageExecutor` as soon as the first batch shows the shapes of the inputs.  The shapes
between stages are determined again when a batch has inputs of other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gridtrain.config import Exchange
from gridtrain.core.messages import MAX_STAGES, Span
from gridtrain.core.stages import schedule
from gridtrain.core.stages.stage_cost import ScheduleKind
from gridtrain.errors import ConfigError, describe_type
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.pipeline.autocast import autocast_dtype
from gridtrain.pipeline.batch_checks import check_in_flight
from gridtrain.pipeline.boundary_specs import infer_boundary_specs, lone_sample_layer
from gridtrain.pipeline.executor import ScheduleFactory, StageExecutor
from gridtrain.pipeline.memory_meters import SavedTensorMeter
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.stage import LossFunction, Stage
from gridtrain.pipeline.tensor_tree import TensorTreeSpec, map_tensors, map_tree
from gridtrain.pipeline.wire_precision import WirePrecision
from gridtrain.training.buffer_averaging import BufferAveraging
from gridtrain.training.checkpoint.flat_gradient import FlatGradient
from gridtrain.training.checkpoint.joint_optimizer import as_one
from gridtrain.training.exchangers import make_exchanger
from gridtrain.training.worker_residual import WorkerResidual

MAX_SHAPES = 256
"""The maximum number of input shapes for which a stage remembers the specs of the boundaries."""

MAX_AHEAD = 1e6
"""The largest value of `ahead` that messages to the coordinator can contain."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The options of a pipeline, the same on all workers of the run; see `Grid.pipeline`.

    Raises:
        ConfigError: an option is not valid.
    """

    stages: int
    micro_batches: int | None  # None: chosen from the timings of the first steps
    exchange: Exchange
    loss: LossFunction
    schedule: ScheduleFactory = schedule.one_forward_one_backward
    schedule_name: str = "1F1B"
    ahead: float = 0.0
    clip_norm: float | None = None
    average_buffers_every: int = 100
    compare_every: int = 500
    rematerialise: bool = True
    wire: WirePrecision = WirePrecision.EXACT
    seed: int = 0

    @property
    def schedule_kind(self) -> ScheduleKind:
        return ScheduleKind.FILL_DRAIN if self.schedule is schedule.fill_drain else ScheduleKind.ONE_F_ONE_B

    def __post_init__(self) -> None:
        check_stages(self.stages)
        if not callable(self.loss):
            raise ConfigError(
                f"loss_fn is {self.loss!r}, which is not callable",
                remedy="pass a function of the last layer's output and the targets, such as "
                "torch.nn.functional.cross_entropy",
            )
        if isinstance(self.loss, nn.Module) and any(p.requires_grad for p in self.loss.parameters()):
            raise ConfigError(
                f"loss_fn is {describe_type(self.loss)} with parameters, which no stage's optimizer would "
                "update",
                remedy="move the parameters to the model's last block and keep the rest as loss_fn",
            )
        if not isinstance(self.exchange, Exchange):
            raise ConfigError(
                f"exchange is {self.exchange!r}, which the replicas of a stage cannot use",
                remedy="use Dense(), TopK(...) or GTopK(...)",
            )
        if self.micro_batches is not None:
            check_in_flight(self.schedule(self.stages, self.micro_batches))
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(
                f"seed is {self.seed!r}; it must be an integer from -2**63 to 2**63 - 1",
                remedy="use another seed, such as 0",
            )


def check_stages(stages: int) -> None:
    """Raise `ConfigError` unless `stages` is a valid number of stages."""
    whole = isinstance(stages, int) and not isinstance(stages, bool)
    if not whole or not 2 <= stages <= MAX_STAGES:
        raise ConfigError(
            f"stages is {stages!r}; it must be an integer from 2 to {MAX_STAGES}",
            remedy="use another number of stages, or grid.optimizer(...) for a model that is not partitioned",
        )


def make_optimizer(
    make: MakeOptimizer, parameters: Iterable[nn.Parameter], whose: str = "the model"
) -> torch.optim.Optimizer:
    """Call `make` with the parameters; raise `ConfigError` if it does not return an optimizer.

    Args:
        whose: the owner of the parameters, for the message.
    """
    given = list(parameters)  # a list, to be iterated more than once
    try:
        found = as_one(make(given)) if callable(make) else make
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ConfigError(
            f"the function passed as optimizer creates an optimizer without parameters for {whose}",
            remedy='give it a parameter group, which may be empty: torch.optim.SGD([{"params": parameters}])',
        ) from error
    if not callable(make) or not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is {'a function that returned ' if callable(make) else ''}{describe_type(found)}",
            remedy="pass a function that creates the optimizer for a stage's parameters: "
            "lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
        )
    return found


def schedule_for(name: str, ahead: float) -> tuple[ScheduleFactory, str]:
    """Return the schedule with this name, and a text that describes it.

    Raises:
        ConfigError: `name` or `ahead` is not valid.
    """
    if name == "fill-drain":
        return schedule.fill_drain, name
    if name != "1f1b" or not isinstance(ahead, int | float) or not 0 <= ahead <= MAX_AHEAD:
        raise ConfigError(
            f'schedule="{name}" with ahead={ahead!r} is not a valid combination',
            remedy=f'use schedule="1f1b" with ahead from 0 to {MAX_AHEAD:g}, or "fill-drain", which runs '
            "as far ahead as possible",
        )
    return partial(schedule.one_forward_one_backward, ahead=ahead), f"1F1B, {ahead:g} ahead"


def parse_wire(name: str) -> WirePrecision:
    """Return the wire precision with this name; raise `ConfigError` if the name is unknown."""
    try:
        return WirePrecision(name)
    except ValueError:
        known = ", ".join(f'"{wire.value}"' for wire in WirePrecision)
        raise ConfigError(
            f'wire is "{name}", which is not a known precision', remedy=f"use one of {known}"
        ) from None


_ByShapes = tuple[tuple[TensorTreeSpec, ...], Callable[[], tuple[str, bool]]]
"""For inputs of some shapes: the result of `infer_boundary_specs`, and a function that returns the result of
`lone_sample_layer`, which few batches need."""


class StageState:
    """One stage in memory, with its optimizer, flat gradient, exchanger and residual.

    Args:
        increase_figure: see `WorkerResidual`.

    Attributes:
        has_stepped: whether an update has been applied since the stage was built or restored.
        applied: the last committed step, whose update was applied or skipped; None if there is none, or while
            an update is being applied.
        lone_sample: a function that returns the result of `lone_sample_layer` for the latest batch.
    """

    def __init__(
        self,
        stage: int,
        staging: ModelStages,
        make: MakeOptimizer,
        options: PipelineOptions,
        increase_figure: Callable[[str, float], None],
    ) -> None:
        self.stage, self._options, self._cuts = stage, options, staging.cuts
        self.blocks = Span(*staging.block_range(stage))
        self.module, self.tied = staging.build(stage)
        self.inner = make_optimizer(make, self.module.parameters(), f"stage {stage}")
        self.flat = FlatGradient(self.module, self.inner)
        self.exchanger = make_exchanger(options.exchange, (0, self.flat.n), self.flat.flat_N.device)
        self.residual = WorkerResidual(self.exchanger, self.flat.n, increase_figure)
        self.buffer_averaging = BufferAveraging(self.module, options.average_buffers_every)
        self.executor: StageExecutor | None = None
        self._known_shapes: dict[str, _ByShapes] = {}  # the least recently used first
        self.lone_sample: Callable[[], tuple[str, bool]] = lambda: ("", True)
        self.has_stepped = False
        self.applied: int | None = None

    def set_position(self, staging: ModelStages, stage: int) -> None:
        """Use the layers in memory as stage `stage` of `staging`.

        If the stage's index or the cuts have changed, its executor is dropped and its tied parameters are
        determined again.
        """
        if (stage, staging.cuts) != (self.stage, self._cuts):
            self.stage, self._cuts, self.executor = stage, staging.cuts, None
            self.tied = staging.blueprint.tied_in(stage, staging.cuts, self.module.blocks)

    def prepare_executor(self, staging: ModelStages, example: Any) -> StageExecutor:
        """Return the executor for a batch; build it first if necessary.

        Args:
            example: the inputs of the batch; their shapes determine the shapes of the values between stages.
        """
        options, is_last = self._options, self.stage == staging.stages - 1
        start, stop = staging.block_range(self.stage)
        specs, self.lone_sample = self._by_shapes(staging, example)
        before, after = specs[start - 1] if start else None, None if is_last else specs[stop - 1]
        if self.executor is None:
            stage = Stage(
                self.module.blocks,
                input=before,
                output=after,
                loss=options.loss if is_last else None,
                first_layer=start,
                tied=self.tied,
                rematerialise=options.rematerialise,
            )
            self.executor = StageExecutor(stage, self.stage, staging.stages, schedule=options.schedule)
        self.executor.stage.input, self.executor.stage.output = before, after
        return self.executor

    def _by_shapes(self, staging: ModelStages, example: Any) -> _ByShapes:
        """Return the values that depend on the shapes of a batch; infer them if the shapes are new.

        All workers of a pipeline have the same batch, so the result is the same on all of them.
        """
        shapes = map_tree(example, lambda x: (x.dtype, x.shape[1:]) if isinstance(x, Tensor) else type(x))
        key = f"{shapes}, {autocast_dtype(staging.device)}"
        known = self._known_shapes.pop(key, None)
        if known is None:
            options, blocks = self._options, staging.blueprint.blocks
            found = infer_boundary_specs(blocks, example, wire=options.wire, device=staging.device)
            if options.micro_batches is not None:
                order = options.schedule(staging.stages, options.micro_batches)
                check_in_flight(order, max((len(each.leaves) for each in found[:-1]), default=1))
            while len(self._known_shapes) >= MAX_SHAPES:
                del self._known_shapes[next(iter(self._known_shapes))]
            sizes = map_tensors(example, lambda x: torch.empty_like(x, device="meta"))
            known = found, cache(partial(lone_sample_layer, blocks, sizes))
        self._known_shapes[key] = known
        return known

    def without_tied_copies(
        self, update: npt.NDArray[np.float32] | SparseVector
    ) -> npt.NDArray[np.float32] | SparseVector:
        """Return the update, with zeros for the tied parameters that an earlier stage also holds.

        In the norm, a tied parameter is counted by the first stage that holds it.
        """
        copies = {id(t.parameter) for t in self.tied if t.stages[0] != self.stage}
        stops = list(accumulate(self.flat.sizes))
        for parameter, size, stop in zip(self.flat.parameters, self.flat.sizes, stops, strict=True):
            if id(parameter) not in copies:
                continue
            if isinstance(update, SparseVector):
                inside_K = (update.indices >= stop - size) & (update.indices < stop)
                update = SparseVector(update.indices, np.where(inside_K, np.float32(0), update.values))
            else:
                update = np.concatenate([update[: stop - size], np.zeros(size, np.float32), update[stop:]])
        return update

    def micro_batch_sizes(self, samples: int, micro_batches: int) -> tuple[int, ...]:
        """Return the number of samples in each micro-batch.

        There may be fewer micro-batches than `micro_batches`, so that each has as many samples as the model
        needs for training, if possible.
        """
        count = min(micro_batches, max(1, samples))
        if 1 < samples < 2 * count and self.lone_sample()[0]:
            count = samples // 2
        return schedule.divide_samples(samples, count)

    def kept_input_bytes(self, samples: int, micro_batches: int) -> int:
        """Return the peak size in bytes of the inputs that are stored for backward passes.

        The input that is being processed is not counted.

        Args:
            samples: the number of samples in the largest micro-batch.
        """
        if self.executor is None or self.executor.stage.input is None:
            return 0
        order = self._options.schedule(len(self._cuts) - 1, micro_batches)
        return max(0, order.max_in_flight(self.stage) - 1) * self.executor.stage.input.payload_bytes(samples)

    def activation_meter(self) -> SavedTensorMeter:
        """Return a meter that counts the bytes of the tensors that autograd stores."""
        return SavedTensorMeter((*self.module.parameters(), *self.module.buffers()))

    def max_payload_bytes(self, samples: int) -> int:
        """Return the size limit of a payload in bytes: twice the largest expected size, plus 64 KiB."""
        assert self.executor is not None
        specs = [s for s in (self.executor.stage.input, self.executor.stage.output) if s is not None]
        tied = [t.parameter.numel() * t.parameter.element_size() for t in self.executor.stage.tied]
        return (1 << 16) + 2 * max([*(s.payload_bytes(samples) for s in specs), *tied, 0])
