"""`partition(model, stages)`: divides a model into stages, and explains the choice in words and in a chart.

The costs are measured by `profiler` or given by the caller; `gridtrain.core.stages` computes the partition
and the number of micro-batches.

    model --profile--> layers --+
    devices, network, schedule -+--> cuts --> Partition: cuts, seconds and bytes of each stage, reason
    batch size -----------------+
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.stages import partition_chart
from gridtrain.core.stages.stage_cost import (
    OPTIMIZER_STATE_COPIES,
    TIME_TOLERANCE,
    Device,
    ExecutionSettings,
    Layer,
    PartitionCost,
    ScheduleKind,
)
from gridtrain.core.stages.step_time import StepEstimate, propose_micro_batches
from gridtrain.errors import ConfigError
from gridtrain.pipeline.blueprint import Blueprint, Model, TiedParameterName, find_tied_parameters
from gridtrain.pipeline.micro_batch_count import parse_micro_batches
from gridtrain.pipeline.model_blocks import blocks_of
from gridtrain.pipeline.profiler import Profile
from gridtrain.pipeline.profiler import profile as profiled
from gridtrain.pipeline.tensor_tree import TensorTreeSpec
from gridtrain.training.checkpoint.joint_optimizer import JointOptimizer


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of a model into stages; `print` shows it as a chart.

    Attributes:
        outlook: the cuts, the number of micro-batches, and the estimated duration of a step.
        layers: the costs of each block.
        boundaries: the spec of the tensors between each stage and the next; () if the profile has none.
        tied: the parameters that several blocks share.
        reason: the reason for these cuts and this number of micro-batches.
    """

    outlook: StepEstimate
    layers: tuple[Layer, ...]
    boundaries: tuple[TensorTreeSpec, ...]
    tied: tuple[TiedParameterName, ...]
    reason: str

    @property
    def cut(self) -> PartitionCost:
        return self.outlook.cut

    @property
    def cuts(self) -> tuple[int, ...]:
        """The index of each stage's first block, followed by the total number of blocks."""
        return self.cut.cuts

    @property
    def micro_batches(self) -> int:
        return self.outlook.settings.micro_batches

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The tied parameters that more than one stage holds, each with its stages."""
        found = {str(tied): tied.stages(self.cuts) for tied in self.tied}
        return {name: stages for name, stages in found.items() if len(stages) > 1}

    def __str__(self) -> str:
        return f"{partition_chart.chart_text(self.layers, self.outlook)}\n{self.reason}"

    def svg(self) -> str:
        """Return a chart of the layers, times and bytes of each stage, as SVG."""
        return partition_chart.chart_svg(self.layers, self.outlook)


def partition(
    model: Model | Blueprint,
    stages: int | Sequence[Device],
    *,
    example: Any = None,
    profile: Profile | Sequence[Layer] | None = None,
    batch_size: int | None = None,
    micro_batches: int | str = "auto",
    schedule: str = "1f1b",
    rematerialise: bool = True,
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | float = "adam",
    extra_copies: float = 0.0,
    memory_bytes: float = math.inf,
    network: NetworkModel | tuple[float, float] | None = None,
    split_at: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> Partition:
    """Partition a model so that its pipeline is as fast as possible and no device's memory is exceeded.

    `gridtrain.core.stages.partition` describes the objective, and `gridtrain.core.stages.stage_cost` the
    memory that is counted.

    Args:
        model: an `nn.Sequential`, a list of blocks, a `Sequence`, a `Blueprint` or, with `split_at`, another
            module; see `model_blocks`.
        stages: the number of stages on equal devices, or the devices in the order of the stages.
        example: an input with which to measure the blocks; it should have as many samples as a micro-batch.
        profile: an existing measurement, or the costs of the layers, to use instead of `example`.
        batch_size: the number of samples in a step; by default, the number of samples in the example,
            multiplied by `micro_batches` unless that is "auto".
        micro_batches: the number of micro-batches in a step, or "auto" to choose it for `batch_size`.
        schedule: "fill-drain" (GPipe) or "1f1b".
        rematerialise: whether stages store only their inputs, and repeat the forward pass before the backward
            pass.
        optimizer: a name in `OPTIMIZER_STATE_COPIES`, a torch optimizer, or the size of the optimizer's state
            as a multiple of the parameters.
        extra_copies: additional memory as a multiple of the parameters, such as for a residual.
        memory_bytes: the memory of each device, if `stages` is a number.
        network: the network of the stages, or (alpha in seconds, bandwidth in bytes per second) for all
            links; if None, transfers are assumed to take no time.
        split_at: the parts of a model that is not a sequence; see `model_blocks`.
        device: the device to measure on; by default CUDA if it is available.

    Raises:
        ConfigError: an argument is not valid, there are too few blocks, there is neither an example nor a
            profile, or no partition fits into memory; in the last case, the message suggests changes.
    """
    if isinstance(model, Blueprint):
        blocks = model.blocks
    else:
        model = blocks = tuple(blocks_of(model, split_at=split_at, example=example).values())
    if profile is not None:
        measured = Profile.of(profile, len(blocks))
    elif example is not None:
        measured = profiled(model, example, device=device)
    else:
        raise ConfigError(
            "partition was given neither an example nor a profile",
            remedy="pass example= (an input with the size of a micro-batch) or profile=",
        )
    devices = [Device(memory_bytes=memory_bytes)] * stages if isinstance(stages, int) else list(stages)
    links = uniform_network(len(devices), *network) if isinstance(network, tuple) else network
    running = ExecutionSettings(
        order=_parse_schedule(schedule),
        rematerialise=rematerialise,
        copies=1.0 + optimizer_state_copies(optimizer) + extra_copies,
        input_bytes=measured.input_bytes,
    )
    asked = parse_micro_batches(micro_batches)
    batch = batch_size or measured.samples * (asked or 1)
    numbers = () if asked is None else (asked,)
    proposal = propose_micro_batches(
        measured.layers, devices, links, running, batch, numbers=numbers, slack=TIME_TOLERANCE
    )
    between = proposal.chosen.cut.cuts[1:-1]
    return Partition(
        proposal.chosen,
        measured.layers,
        tuple(measured.boundaries[at - 1] for at in between) if measured.boundaries else (),
        find_tied_parameters(blocks),
        partition_chart.partition_reason(measured.layers, proposal, asked=asked is not None),
    )


def _parse_schedule(schedule: str) -> ScheduleKind:
    try:
        return ScheduleKind(schedule.lower())
    except ValueError:
        raise ConfigError(
            f'schedule is "{schedule}", which is not a known schedule',
            remedy=f"use one of {', '.join(repr(str(each)) for each in ScheduleKind)}",
        ) from None


def optimizer_state_copies(
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | float,
) -> float:
    """Return the size of the optimizer's state as a multiple of the parameters.

    If several optimizers are used as one, the largest size is returned, because a stage may have the
    parameters of only one of them.

    Raises:
        ConfigError: the optimizer is unknown.
    """
    if isinstance(optimizer, int | float):
        return float(optimizer)
    if isinstance(optimizer, JointOptimizer):
        return max(map(optimizer_state_copies, optimizer.optimizers))
    if isinstance(optimizer, str):
        name = optimizer
    else:
        name = (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__.lower()
    if isinstance(optimizer, torch.optim.Optimizer) and _has_momentum(optimizer.param_groups):
        name += "-momentum"
    if name not in OPTIMIZER_STATE_COPIES:
        raise ConfigError(
            f"the size of the state of {name} is unknown",
            remedy=f"set optimizer= to one of {', '.join(OPTIMIZER_STATE_COPIES)}, or the size of its state "
            "as a multiple of the parameters",
        )
    return OPTIMIZER_STATE_COPIES[name]


def _has_momentum(groups: Iterable[dict[str, Any]]) -> bool:
    return any(group.get("momentum", 0) for group in groups) and any("nesterov" in group for group in groups)
