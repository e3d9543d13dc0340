"""How a model is partitioned into stages: `partition(model, stages)`.

Costs are measured by `profiler` (or given); `gridtrain.core.stages` computes the partition and the number of
micro-batches.  The result has a reason and a chart.

    model --profile--> layers --+
    cards, network, schedule ---+--> cuts --> Partition: cuts, seconds and bytes of each stage, why
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
    Card,
    ExecutionSettings,
    Layer,
    PartitionCost,
    ScheduleKind,
)
from gridtrain.core.stages.step_time import StepEstimate, propose_micro_batches
from gridtrain.errors import ConfigError
from gridtrain.pipeline.blueprint import Blueprint, Model, TiedParameterName, find_tied_parameters
from gridtrain.pipeline.model_blocks import blocks_of
from gridtrain.pipeline.profiler import Profile
from gridtrain.pipeline.profiler import profile as profiled
from gridtrain.pipeline.tensor_tree import TensorTreeSpec


@dataclass(frozen=True, slots=True)
class Partition:
    """A model that is partitioned into stages.

    Attributes:
        outlook: the partition, and its predicted step.
        layers: what each block costs.
        boundaries: (S - 1,) what passes each boundary; () if the profile does not say.
        tied: parameters that blocks share.
        reason: why these cuts and this number of micro-batches.
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
        """(S + 1,) where stages begin, and the number of blocks."""
        return self.cut.cuts

    @property
    def micro_batches(self) -> int:
        return self.outlook.settings.micro_batches

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Tied parameters that more than one stage holds, and these stages."""
        found = {str(tied): tied.stages(self.cuts) for tied in self.tied}
        return {name: stages for name, stages in found.items() if len(stages) > 1}

    def __str__(self) -> str:
        return f"{partition_chart.chart_text(self.layers, self.outlook)}\n{self.reason}"

    def svg(self) -> str:
        """Layers, times and bytes of each stage as a chart."""
        return partition_chart.chart_svg(self.layers, self.outlook)


def partition(
    model: Model | Blueprint,
    stages: int | Sequence[Card],
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
    """Partition a model so that its pipeline is fastest and no card's memory is exceeded.

    The objective and the memory that is counted are described in `gridtrain.core.stages.partition` and
    `stage_cost`.

    Args:
        model: an `nn.Sequential`, a list of blocks, a `Sequence`, a `Blueprint`, or with `split_at` another
            module; see `model_blocks`.
        stages: their number on equal cards, or the cards, in order.
        example: an input to measure with, with as many samples as a micro-batch may have.
        profile: a measurement of elsewhere, instead of `example`; or layers.
        batch_size: samples of a step; None: the example's, in each of the micro-batches.
        micro_batches: of a step; "auto": proposed from `batch_size`.
        schedule: "fill-drain" (GPipe) or "1f1b".
        rematerialise: stages store only inputs, and compute forward again before backward.
        optimizer: of `OPTIMIZER_STATE_COPIES`, or a torch optimizer, or the size of its state as a multiple
            of the parameters'.
        extra_copies: further memory as a multiple of the parameters': a residual, a copy to send.
        memory_bytes: of each card, if `stages` is a number.
        network: of the stages, or (alpha in seconds, bandwidth in bytes per second) of all links between
            them; None: links that take no time.
        device: to measure on; None: CUDA if there is one.

    Raises:
        ConfigError: too few blocks, nothing to measure with, or nothing fits; the text says what would.
    """
    if not isinstance(model, Blueprint):
        model = list(blocks_of(model, split_at=split_at, example=example).values())
    measured = _profile_or_layers(model, example, profile, device)
    cards = [Card(memory_bytes=memory_bytes)] * stages if isinstance(stages, int) else list(stages)
    links = uniform_network(len(cards), *network) if isinstance(network, tuple) else network
    running = ExecutionSettings(
        order=_parse_schedule(schedule),
        rematerialise=rematerialise,
        copies=1.0 + optimizer_state_copies(optimizer) + extra_copies,
        input_bytes=measured.input_bytes,
    )
    numbers = _micro_batch_candidates(micro_batches)
    batch = batch_size or measured.samples * (numbers[0] if numbers else 1)
    proposal = propose_micro_batches(
        measured.layers, cards, links, running, batch, numbers=numbers, slack=TIME_TOLERANCE
    )
    between = proposal.chosen.cut.cuts[1:-1]
    return Partition(
        proposal.chosen,
        measured.layers,
        tuple(measured.boundaries[at - 1] for at in between) if measured.boundaries else (),
        find_tied_parameters(model.blocks if isinstance(model, Blueprint) else model),  # type: ignore[arg-type]
        partition_chart.partition_reason(measured.layers, proposal, asked=bool(numbers)),
    )


def _profile_or_layers(
    model: Model | Blueprint, example: Any, given: Profile | Sequence[Layer] | None, device: Any
) -> Profile:
    if given is None:
        if example is None:
            raise ConfigError(
                "partition has nothing to measure with",
                remedy="give example=, an input of a micro-batch's size, or profile=",
            )
        return profiled(model, example, device=device)
    found = given if isinstance(given, Profile) else Profile(tuple(given), (), 0, 1, "elsewhere")
    count = len(model.blocks if isinstance(model, Blueprint) else model)  # type: ignore[arg-type]
    if len(found.layers) != count:
        raise ConfigError(
            f"the profile has {len(found.layers)} layers, the model {count} blocks",
            remedy="measure this model again with gridtrain.pipeline.profile",
        )
    return found


def _parse_schedule(schedule: str) -> ScheduleKind:
    try:
        return ScheduleKind(schedule.lower())
    except ValueError:
        raise ConfigError(
            f'schedule="{schedule}"',
            remedy=f"use one of {', '.join(repr(str(each)) for each in ScheduleKind)}",
        ) from None


def _micro_batch_candidates(micro_batches: int | str) -> tuple[int, ...]:
    if micro_batches == "auto":
        return ()
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches={micro_batches!r}", remedy='give a number of at least 1, or "auto"')
    return (micro_batches,)


def optimizer_state_copies(
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | float,
) -> float:
    """The size of the optimizer's state as a multiple of the parameters'."""
    if isinstance(optimizer, int | float):
        return float(optimizer)
    name = (
        optimizer
        if isinstance(optimizer, str)
        else (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__.lower()
    )
    if isinstance(optimizer, torch.optim.Optimizer) and _has_momentum(optimizer.param_groups):
        name += "-momentum"
    if name not in OPTIMIZER_STATE_COPIES:
        raise ConfigError(
            f"how much state {name} has is unknown",
            remedy=f"give optimizer= one of {', '.join(OPTIMIZER_STATE_COPIES)}, or the size of its state "
            "as a multiple of the parameters'",
        )
    return OPTIMIZER_STATE_COPIES[name]


def _has_momentum(groups: Iterable[dict[str, Any]]) -> bool:
    return any(group.get("momentum", 0) for group in groups) and any("nesterov" in group for group in groups)
