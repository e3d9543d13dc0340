"""Divides a run's model into stages at given or computed cuts, builds the stages, and names their tensors.

    blocks   embed   body.0   body.1   head        state_dict of stage 1: "body.1.weight", "head.bias", ...
    cuts     0                2               4    (S + 1,) as in `partition(...).cuts`

If no cuts are given, the model is partitioned so that each stage has a trainable parameter, and the largest
stage has as few bytes of parameters as possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import Span
from gridtrain.core.stages.bottleneck_partition import bottleneck_cuts
from gridtrain.errors import ConfigError
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.random_seeds import borrowed_generators
from gridtrain.pipeline.stage import TiedParameter
from gridtrain.quantities import format_count
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.checkpoint.model_export import plain_state


class StageModule(nn.Module):
    """A module of consecutive blocks, under the names that they have in the whole model."""

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
        super().__init__()
        self.blocks = tuple(blocks)  # a tuple, because a ModuleList would be part of every name
        for name, block in zip(names, blocks, strict=True):
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.add_module(last, block)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class ModelStages:
    """A model and its stages, the same on all workers.

    Args:
        blueprint: the model.
        stages: S, the number of stages.
        cuts: (S + 1,) the index of each stage's first block, then the total number of blocks; None to choose
            cuts by the sizes of the parameters.
        device: the device on which this worker builds its stage.

    Attributes:
        whole: the model on the meta device, for names and shapes.
        has_explicit_cuts: whether the caller passed the cuts.

    Raises:
        ConfigError: the cuts do not divide the model into S stages, a stage has no trainable parameter, or no
            cuts were given and the model cannot be divided into S stages.
    """

    def __init__(
        self, blueprint: Blueprint, stages: int, *, cuts: Sequence[int] | None, device: torch.device
    ) -> None:
        self.blueprint, self.stages, self.device = blueprint, stages, device
        self.has_explicit_cuts = cuts is not None
        self.cuts = tuple(cuts) if cuts is not None else _even_cuts(blueprint, stages)
        self.whole = StageModule(blueprint.blocks, blueprint.names)
        ends = self.cuts[:1] + self.cuts[-1:]
        ascending = all(type(cut) is int for cut in self.cuts) and all(a < b for a, b in pairwise(self.cuts))
        if len(self.cuts) != stages + 1 or ends != (0, len(blueprint)) or not ascending:
            raise ConfigError(
                f"cuts {list(self.cuts)} do not divide {len(blueprint)} blocks into {stages} stages",
                remedy=f"pass {stages + 1} ascending integers from 0 to {len(blueprint)}, such as "
                "gridtrain.pipeline.partition(...).cuts",
            )
        for stage in range(stages):
            if not any(p.requires_grad for b in self._blocks(stage) for p in b.parameters()):
                raise ConfigError(
                    f"stage {stage} of cuts {list(self.cuts)} has no trainable parameter",
                    remedy="use different cuts or fewer stages",
                )

    def with_cuts(self, cuts: Sequence[int]) -> ModelStages:
        """Return the same model with different cuts; raise `ConfigError` as the constructor does."""
        if tuple(cuts) == self.cuts:
            return self
        return ModelStages(self.blueprint, len(cuts) - 1, cuts=cuts, device=self.device)

    @property
    def tied_names(self) -> list[frozenset[str]]:
        """The names of each tied parameter in the whole model."""
        names = self.blueprint.names
        return [frozenset(f"{names[b]}.{name}" for b, name in tied.places) for tied in self.blueprint.tied]

    def block_range(self, stage: int) -> tuple[int, int]:
        """Return the indices of the stage's first block and of the first block after the stage."""
        return self.cuts[stage], self.cuts[stage + 1]

    def describe(self) -> str:
        """Return a text that describes the cuts, for comparison between workers and for users."""
        return f"{self.stages} stages cut at {list(self.cuts)}"

    def tensor_names(self, stage: int) -> list[str]:
        """Return the names of all tensors in a stage's state_dict, excluding the model's base."""
        start, stop = self.block_range(stage)
        module = StageModule(self.blueprint.blocks[start:stop], self.blueprint.names[start:stop])
        return [name for name, value in plain_state(module).items() if isinstance(value, Tensor)]

    def gradient_elements(self, start: int, stop: int) -> int:
        """Return the number of elements in the flat gradient of blocks `start` to `stop` - 1."""
        module = StageModule(self.blueprint.blocks[start:stop], self.blueprint.names[start:stop])
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    def build(self, stage: int) -> tuple[StageModule, list[TiedParameter]]:
        """Build a stage with initial values.

        Return its module, and the trained parameters that it shares with other stages.
        """
        start, stop = self.block_range(stage)
        module = self._build(start, stop, self.device)
        return module, self.blueprint.tied_in(stage, self.cuts, module.blocks)

    def frozen_blocks(self) -> Iterator[StageModule]:
        """Build the blocks with frozen parameters on the CPU, and yield them one at a time."""
        for index, block in enumerate(self.blueprint.blocks):
            if not all(parameter.requires_grad for parameter in block.parameters()):
                yield self._build(index, index + 1, torch.device("cpu"))

    def _build(self, start: int, stop: int, device: torch.device) -> StageModule:
        with borrowed_generators(device):
            blocks = self.blueprint.build(start, stop, device)
        return StageModule(blocks, self.blueprint.names[start:stop])

    def stages_tied_to(self, stage: int) -> frozenset[int]:
        """Return the other stages that share a parameter with `stage`."""
        holders = (tied.stages(self.cuts) for tied in self.blueprint.tied)
        return frozenset(other for stages in holders if stage in stages for other in stages) - {stage}

    def _blocks(self, stage: int) -> Sequence[nn.Module]:
        start, stop = self.block_range(stage)
        return self.blueprint.blocks[start:stop]


class StagePlaces:
    """Determines the stage and the layers of this worker's rank from a snapshot or a step plan.

    Attributes:
        defined: the stages of the run's definition.
        latest: the stages of the latest generation, in which the model may be partitioned differently.
    """

    def __init__(self, defined: ModelStages) -> None:
        self.defined = self.latest = defined

    def stages(self, place: WorkerSnapshot | StepPlan) -> ModelStages:
        """Return the stages in the generation of `place`, or `defined` before the first generation."""
        bounds = place.stage_bounds or self.defined.cuts
        if bounds != self.latest.cuts:
            self.latest = self.defined.with_cuts(bounds)
        return self.latest

    def layout(self, place: WorkerSnapshot | StepPlan) -> RankLayout:
        """Return the division of the ranks into stages and replicas."""
        return RankLayout.for_world_size(self.stages(place).stages, place.world_size)

    def stage(self, place: WorkerSnapshot | StepPlan) -> int:
        """Return the index of the stage of this worker's rank."""
        return self.layout(place).stage_of(place.rank)

    def layers(self, place: WorkerSnapshot | StepPlan) -> Span:
        """Return the range of layers of this worker's rank."""
        return Span(*self.stages(place).block_range(self.stage(place)))

    def is_alone(self, place: WorkerSnapshot) -> bool:
        """Return whether this worker is the only one that holds the stage of its rank."""
        return place.world_size == self.stages(place).stages


def _even_cuts(blueprint: Blueprint, stages: int) -> tuple[int, ...]:
    nbytes = blueprint.parameter_bytes
    trains = [any(p.requires_grad for p in block.parameters()) for block in blueprint.blocks]

    def cost(stage: int, start: int, stop: int) -> float:
        return float(sum(nbytes[start:stop])) if any(trains[start:stop]) else math.inf

    def least(stage: int, start: int, stop: int) -> float:
        return float(sum(nbytes[start:stop]))

    cuts, _ = bottleneck_cuts(len(blueprint), stages, cost, least)
    if cuts is None:
        trained = f"{sum(trains)} {'is' if sum(trains) == 1 else 'are'} trained"
        raise ConfigError(
            f"{format_count(len(blueprint), 'block')}, of which {trained}, cannot be divided into {stages} "
            "stages",
            remedy="use fewer stages, or divide the model into smaller blocks",
        )
    return cuts
