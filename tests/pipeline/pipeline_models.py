"""Small models of nine layers, partitioned in every way, and unpartitioned.

`unpartitioned` uses only the seeds of gridtrain: layer after layer, micro-batch after micro-batch, plain
autograd.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from memory_stage_link import memory_stage_links, run_in_threads
from torch import Tensor, nn

from gridtrain.core.stages.schedule import divide_samples, one_forward_one_backward
from gridtrain.pipeline.boundary_specs import infer_boundary_specs
from gridtrain.pipeline.executor import ScheduleFactory, StageExecutor, StepResult
from gridtrain.pipeline.random_seeds import derive_layer_seed
from gridtrain.pipeline.stage import Stage, TiedParameter
from gridtrain.pipeline.tensor_tree import TensorTreeSpec
from gridtrain.pipeline.wire_precision import WirePrecision

VOCABULARY, WIDTH, LENGTH, LAYERS, SEED = 11, 6, 5, 9, 20261121


class Embed(nn.Module):
    """Tokens to a nest with tensors of four dtypes, a number, a text and None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens_BT: Tensor) -> dict[str, Any]:
        x_BTD = F.embedding(tokens_BT, self.weight)
        half = x_BTD.mean(dim=-1).to(torch.bfloat16)
        return {
            "x": x_BTD,
            "side": (tokens_BT.flatten(), [tokens_BT > 3, None]),
            "half": half,
            "a": 0.5,
            "t": "v",
        }


class Block(nn.Module):
    """A residual layer that uses everything in the nest."""

    def __init__(self, *, dropout: bool, batch_norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.4 if dropout else 0.0)

    def forward(self, nest: dict[str, Any]) -> dict[str, Any]:
        x_BTD, (tokens, (mask_BT, nothing)) = nest["x"], nest["side"]
        assert nothing is None and nest["t"] == "v" and tokens.dtype == torch.int64
        y = self.norm(self.linear(x_BTD).flatten(0, 1)).view_as(x_BTD)
        y = self.dropout(torch.tanh(y)) * mask_BT[..., None] + nest["half"].float()[..., None] * nest["a"]
        return nest | {"x": x_BTD + y, "half": (nest["half"].float() * 0.9 + y.mean(-1)).to(torch.bfloat16)}


class Head(nn.Module):
    """Logits of each token."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, nest: dict[str, Any]) -> Tensor:
        return F.linear(nest["x"], self.weight).flatten(0, 1)


def loss_of(logits: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets_BT.flatten())


def layers_of(*, dropout: bool = False, batch_norm: bool = False, tied: bool = False) -> list[nn.Module]:
    torch.manual_seed(1)
    embed = Embed()
    blocks = [Block(dropout=dropout, batch_norm=batch_norm) for _ in range(LAYERS - 2)]
    head = Head(embed.weight if tied else nn.Parameter(torch.randn(VOCABULARY, WIDTH)))
    return [embed, *blocks, head]


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    both = torch.randint(0, VOCABULARY, (2, samples, LENGTH), generator=generator)
    return both[0], both[1]


def named(layers: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}


@dataclass
class Result:
    """Gradients by the parameters' names in the whole model, running statistics, the loss."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    loss: float


def unpartitioned(layers: Sequence[nn.Module], sizes: Sequence[int], seed: int = SEED) -> Result:
    layers = copy.deepcopy(list(layers))
    inputs, targets = tokens(sum(sizes))
    loss = 0.0
    for m, (x, y) in enumerate(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True)):
        for i, layer in enumerate(layers):
            torch.manual_seed(derive_layer_seed(seed, m, i))
            x = layer(x)
        part = loss_of(x, y) * (len(y) / sum(sizes))
        part.backward()
        loss += part.item()
    return Result({name: p.grad for name, p in named(layers).items() if p.grad is not None}, {}, loss)


def bounds_of(stages: int) -> list[tuple[int, int]]:
    """The layers of each stage: the larger stages first."""
    starts = [0]
    for size in divide_samples(LAYERS, stages):
        starts.append(starts[-1] + size)
    return list(itertools.pairwise(starts))


def stages_of(
    layers: Sequence[nn.Module],
    stages: int,
    *,
    rematerialise: bool = True,
    wire: WirePrecision = WirePrecision.EXACT,
    loss: Any = loss_of,
    specs: Sequence[TensorTreeSpec] | None = None,
    bounds: Sequence[tuple[int, int]] | None = None,
) -> list[Stage]:
    """All stages, each with its own parameters, as on separate machines."""
    specs = specs or infer_boundary_specs(layers, tokens(1)[0], wire=wire)
    tied = layers[0].weight is layers[-1].weight and stages > 1
    made = []
    for s, (start, stop) in enumerate(bounds or bounds_of(stages)):
        own = copy.deepcopy(list(layers[start:stop]))
        holds = tied and s in (0, stages - 1)
        made.append(
            Stage(
                own,
                input=specs[start - 1] if s else None,
                output=specs[stop - 1] if s < stages - 1 else None,
                loss=loss if s == stages - 1 else None,
                first_layer=start,
                tied=[TiedParameter(0, (0, stages - 1), own[0 if s == 0 else -1].weight)] if holds else (),
                rematerialise=rematerialise,
            )
        )
    return made


def run(
    stages: Sequence[Stage],
    sizes: Sequence[int],
    *,
    schedule: ScheduleFactory = one_forward_one_backward,
    links: Sequence[Any] | None = None,
    seed: int = SEED,
) -> list[StepResult]:
    count = len(stages)
    links = links or memory_stage_links(count)
    inputs, targets = tokens(sum(sizes))

    def work(s: int) -> StepResult:
        runner = StageExecutor(stages[s], s, count, schedule=schedule)
        return runner.run(
            links[s],
            seed=seed,
            sizes=sizes,
            inputs=inputs if s == 0 else None,
            targets=targets if s == count - 1 else None,
        )

    return run_in_threads([lambda s=s: work(s) for s in range(count)])  # type: ignore[misc]


def result_of(stages: Sequence[Stage], outcomes: Sequence[StepResult]) -> Result:
    layers = [layer for stage in stages for layer in stage.layers]
    gradients = {name: p.grad for name, p in named(layers).items() if p.grad is not None}
    buffers = {f"{i}.{name}": b for i, layer in enumerate(layers) for name, b in layer.named_buffers()}
    return Result(gradients, buffers, outcomes[-1].loss or 0.0)


def largest_difference(one: Result, two: Result) -> float:
    assert one.gradients.keys() >= two.gradients.keys()
    return max((one.gradients[n] - g).abs().max().item() for n, g in two.gradients.items())
