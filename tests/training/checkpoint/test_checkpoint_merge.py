"""Stages that are assembled from checkpoints of another partition, without changing a bit.

whole [0 4)  ->  [0 1) [1 4)  ->  [0 2) [2 4)  ->  [0 4)     compared with the first
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gridtrain.core.messages import CheckpointInfo, LedgerState
from gridtrain.errors import RemoteProtocolError
from gridtrain.pipeline import Blueprint
from gridtrain.pipeline.model_stages import ModelStages, StageModule
from gridtrain.training.checkpoint import checkpoint_merge, model_buffers, serialization
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint
from gridtrain.training.checkpoint.flat_gradient import FlatGradient, canonical_parameters

BLOCKS = 4


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def layers() -> list[nn.Module]:
    """The head's weight is the embedding's: one parameter of the whole model, or a copy in each stage."""
    embed = nn.Embedding(7, 3)
    return [embed, nn.BatchNorm1d(3), nn.Linear(3, 3), Head(embed.weight)]


def staging(*cuts: int) -> ModelStages:
    return ModelStages(Blueprint(layers), len(cuts) - 1, cuts=cuts, device=torch.device("cpu"))


class Trained:
    """A stage with its optimizer, in two groups."""

    def __init__(self, partition: ModelStages, stage: int, lr: float = 0.1) -> None:
        self.module: StageModule = partition.build(stage)[0]
        matrices = [p for p in self.module.parameters() if p.dim() > 1]
        vectors = [p for p in self.module.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.inner = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr)

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.inner.step()
        for buffer in self.module.buffers():
            buffer.add_(torch.ones_like(buffer))

    def saved(self, residual: dict[str, Tensor] | None = None) -> Checkpoint:
        document, tensors = serialization.pack_state(self.module, self.inner, {})
        document[checkpoint_merge.PARAMETER_ORDER_KEY] = checkpoint_merge.parameter_order(
            self.module, self.inner
        )
        document[checkpoint_merge.FROZEN_KEY] = []
        info = CheckpointInfo(9, b"h", LedgerState(step=10))
        return Checkpoint(info, (), document, tensors, residual or {}, path=Path("nowhere"))

    def facts(self) -> dict[str, Tensor]:
        """All values of the stage, by name."""
        found = {f"buffer {name}": b.clone() for name, b in model_buffers.buffers_of(self.module)}
        for name, parameter in canonical_parameters(self.module):
            found[name] = parameter.detach().clone()
            for kind, value in self.inner.state[parameter].items():
                found[f"{name} {kind}"] = value.clone()
        return found


def repartition(checkpoints: list[Checkpoint], *cuts: int) -> list[Trained]:
    partition = staging(*cuts)
    made = [Trained(partition, stage) for stage in range(partition.stages)]
    for one in made:
        checkpoint_merge.load_merged(checkpoints, one.module, one.inner, {}, partition.tied_names)
    return made


def test_a_state_survives_repartitions_bit_for_bit() -> None:
    torch.manual_seed(3)
    whole = Trained(staging(0, BLOCKS), 0)
    for _ in range(3):
        whole.step()
    parts = repartition([whole.saved()], 0, 1, 4)
    parts = repartition([part.saved() for part in parts], 0, 2, 4)
    assert "3.weight" in parts[1].facts(), "the second stage has a copy of the tied parameter"
    (again,) = repartition([part.saved() for part in parts], 0, BLOCKS)
    before, after = whole.facts(), again.facts()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [g["weight_decay"] for g in again.inner.param_groups] == [0.1, 0.0]


def test_a_residual_moves_with_its_parameters() -> None:
    """Only the worker's own checkpoint contains it; a copy of a neighbour's does not."""
    partition = staging(0, 1, 4)
    parts = [Trained(partition, stage) for stage in range(2)]
    flats = [FlatGradient(part.module, part.inner) for part in parts]
    marks = [torch.arange(float(flat.n)) + 1 for flat in flats]
    mine, copy = parts[0].saved({"residual": marks[0]}), parts[1].saved()
    (whole,) = repartition([mine, copy], 0, BLOCKS)
    flat = FlatGradient(whole.module, whole.inner)
    with torch.device("meta"):  # the script's default device
        residual = checkpoint_merge.merged_residual([mine, copy], whole.module, flat)["residual"]
    assert torch.equal(residual[: flats[0].n], marks[0]) and not residual[flats[0].n :].any()


@pytest.mark.parametrize(
    ("missing", "text"),
    [(True, "no checkpoint contains '1.weight'"), (False, "different optimizer settings")],
)
def test_checkpoints_that_do_not_fit_together_are_refused(missing: bool, text: str) -> None:
    partition = staging(0, 1, 4)
    parts = [Trained(partition, 0), Trained(partition, 1, lr=0.1 if missing else 0.2)]
    for part in parts:
        part.step()
    checkpoints = [part.saved() for part in parts]
    with pytest.raises(RemoteProtocolError, match=text):
        repartition(checkpoints[:1] if missing else checkpoints, 0, BLOCKS)


def test_positions_of_parameters_are_those_of_the_partition() -> None:
    names = [Trained(staging(0, 1, 3, 4), stage).facts().keys() for stage in range(3)]
    assert not any(a & b for a, b in pairwise(names))
