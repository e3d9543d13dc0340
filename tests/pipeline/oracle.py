"""Gradients as torch.distributed.pipelining computes them, with gloo on loopback; run as a program.

    python oracle.py FILE       writes {(stages, micro-batches, schedule): {name: gradient}}

Every stage is a process.  The model is the one of `pipeline_models`, with dropout and batch norm, without
the nest: torch hands tensors from stage to stage.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import bounds_of
from torch import Tensor, nn

from gridtrain.pipeline.random_seeds import derive_layer_seed

SEED, SAMPLES, WIDTH, LAYERS = 7, 24, 6, 9
CASES = [(stages, micro_batches) for stages in (1, 2, 3, 4, 8) for micro_batches in (1, 2, 3, 8)]
SCHEDULES = ("GPipe", "1F1B")


class Layer(nn.Module):
    """A residual layer over (n, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(torch.tanh(self.norm(self.linear(x))))
        return out


def layers_of() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Layer() for _ in range(LAYERS)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    both = torch.randn((2, SAMPLES, WIDTH), generator=generator)
    return both[0], both[1]


class Seeded(nn.Module):
    """Some layers, each with random numbers of its position and of the micro-batch: it counts forwards."""

    def __init__(self, layers: list[nn.Module], first: int) -> None:
        super().__init__()
        self.layers, self.first, self.micro_batch = nn.ModuleList(layers), first, 0

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            torch.manual_seed(derive_layer_seed(SEED, self.micro_batch, self.first + i))
            x = layer(x)
        self.micro_batch += 1
        return x


def gradients_of(stages: int, micro_batches: int, schedule: str, stage: int) -> dict[str, Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    start, stop = bounds_of(stages)[stage]
    module = Seeded(layers_of()[start:stop], start)
    rows = torch.zeros(SAMPLES // micro_batches, WIDTH)
    agreed = {
        "input_args": rows.clone().requires_grad_(stage > 0),
        "output_args": rows.clone().requires_grad_(),
    }
    stage_module = PipelineStage(module, stage, stages, torch.device("cpu"), **agreed)
    made = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[schedule]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(out, target) * (len(out) / SAMPLES)

    runner = made(stage_module, micro_batches, loss_fn=loss, scale_grads=False)
    inputs, targets = batch()
    runner.step(*([inputs] if stage == 0 else []), target=targets if stage == stages - 1 else None)
    names = {f"{start + int(i)}": layer for i, layer in enumerate(module.layers)}
    return {f"{i}.{n}": p.grad for i, layer in names.items() for n, p in layer.named_parameters()}


def work(stage: int, stages: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{stages}", stages)
    dist.init_process_group("gloo", store=store, rank=stage, world_size=stages)
    found: dict[Any, dict[str, Tensor]] = {}
    for count, micro_batches in CASES:
        for schedule in SCHEDULES:
            if count == stages and (schedule == "GPipe" or micro_batches >= stages):
                found[count, micro_batches, schedule] = gradients_of(count, micro_batches, schedule, stage)
    torch.save(found, f"{folder}/{stages}-{stage}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(path: str) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fork = multiprocessing.get_context("fork")
    merged: dict[Any, dict[str, Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for stages in sorted({count for count, _ in CASES}):
            group = [fork.Process(target=work, args=(s, stages, folder)) for s in range(stages)]
            for process in group:
                process.start()
            for process in group:
                process.join()
            if any(process.exitcode for process in group):
                return 1
            for piece in sorted(Path(folder).glob(f"{stages}-*.pt")):
                for case, gradients in torch.load(piece).items():
                    merged.setdefault(case, {}).update(gradients)
    torch.save(merged, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
