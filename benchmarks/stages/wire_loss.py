"""What narrower activations and gradients between stages do to the loss: the demo's GPT on four stages.

Decides nothing.  Every way sees the same samples, starts from the same weights and has the same settings.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridtrain.core.stages.schedule import divide_samples
from gridtrain.pipeline.boundary_specs import infer_boundary_specs
from gridtrain.pipeline.executor import StageExecutor, StepResult
from gridtrain.pipeline.memory_stage_link import memory_stage_links, run_in_threads
from gridtrain.pipeline.stage import Stage
from gridtrain.pipeline.wire_precision import WirePrecision
from gridtrain.tools.demo.byte_gpt import ByteGPT, Windows
from gridtrain.tools.demo.recipe import BATCH_SIZE, HELD_OUT_WINDOWS, ModelSize
from gridtrain.tools.demo.text_corpus import load_corpus

SHAPE = ModelSize(width=64, layers=2, heads=4, context=64)
CUTS, MICRO_BATCHES, LEARNING_RATE = (0, 1, 2, 3, 4), 4, 3e-3


class _Head(nn.Module):
    def __init__(self, model: ByteGPT) -> None:
        super().__init__()
        self.norm, self.out = model.norm, nn.Linear(SHAPE.width, 256, bias=False)
        self.out.weight = nn.Parameter(model.token.weight.detach().clone())  # not tied: no Tied needed

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x_BTD))
        return out


class _Embed(nn.Module):
    def __init__(self, model: ByteGPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        out: Tensor = self.token(bytes_BT) + self.position(positions_T)
        return out


def layers_of(seed: int) -> list[nn.Module]:
    model = ByteGPT(SHAPE, seed=seed)
    return [_Embed(model), *model.blocks, _Head(model)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Learnt:
    """Held-out loss in nats a byte after so many steps for each seed; the bytes all stages sent in a step."""

    wire: str
    held_out: tuple[float, ...]
    sent_bytes: int


def learnt(wire: WirePrecision, steps: int, seeds: int) -> Learnt:
    """One run for each seed, of the weights and of the samples' order."""
    runs = [_train(wire, steps, seed) for seed in range(seeds)]
    return Learnt(wire.value, tuple(held_out for held_out, _ in runs), runs[0][1])


def _train(wire: WirePrecision, steps: int, seed: int) -> tuple[float, int]:
    layers, count = layers_of(seed), len(CUTS) - 1
    corpus = load_corpus()
    windows = Windows(corpus.train, SHAPE.context)
    specs = infer_boundary_specs(layers, windows[0][0][None], wire=wire)
    stages = [
        Stage(
            copy.deepcopy(layers[CUTS[s] : CUTS[s + 1]]),
            input=specs[CUTS[s] - 1] if s else None,
            output=specs[CUTS[s + 1] - 1] if s < count - 1 else None,
            loss=loss_of if s == count - 1 else None,
            first_layer=CUTS[s],
            deterministic=True,
        )
        for s in range(count)
    ]
    optimizers = [torch.optim.AdamW(stage.parameters, lr=LEARNING_RATE) for stage in stages]
    runners = [StageExecutor(stage, s, count) for s, stage in enumerate(stages)]
    generator, sent_bytes = torch.Generator().manual_seed(seed), 0
    for _ in range(steps):
        chosen = torch.randint(len(windows), (BATCH_SIZE,), generator=generator).tolist()
        batch = [torch.stack(column) for column in zip(*(windows[i] for i in chosen), strict=True)]
        lines, sizes = memory_stage_links(count), divide_samples(BATCH_SIZE, MICRO_BATCHES)

        def work(s: int, batch: list[Tensor] = batch, lines=lines, sizes=sizes) -> StepResult:  # type: ignore[no-untyped-def]
            return runners[s].run(lines[s], seed=0, sizes=sizes, inputs=batch[0], targets=batch[1])

        outcomes = run_in_threads([lambda s=s: work(s) for s in range(count)])  # type: ignore[misc]
        sent_bytes = sum(outcome.sent_bytes for outcome in outcomes)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _held_out(stages, corpus.held_out), sent_bytes


@torch.no_grad()
def _held_out(stages: list[Stage], text: bytes) -> float:
    x, y = Windows(text, SHAPE.context).evenly_spaced(HELD_OUT_WINDOWS)
    for stage in stages:
        for layer in stage.layers:
            x = layer(x)
    return float(loss_of(x, y))
