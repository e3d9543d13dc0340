"""The training script of each worker of `gridtrain demo --pipeline`.

Like an ordinary training script, it makes the model, reads the data and records the results.

    --stages 4    one of four stages on each worker: grid.pipeline
    --stages 1    the same model, not partitioned, in an ordinary loop with grid.optimizer, for comparison
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gridtrain
from gridtrain.core.stages.schedule import divide_samples
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.memory_meters import (
    MemoryUsage,
    SavedTensorMeter,
    optimizer_state_tensors,
    storage_bytes,
)
from gridtrain.tools.demo import pipeline_model as recipe
from gridtrain.tools.demo.demo_model import Windows
from gridtrain.tools.demo.recipe import exchange_for
from gridtrain.tools.demo.step_records import STEPS_FILE, SentBytes, StepRecord, StepTimes
from gridtrain.tools.demo.text_corpus import load_corpus

MEMORY_MEASURED_STEP = 1  # the optimizer's state exists by then


class WholeModel:
    """The whole model on one worker, which computes one micro-batch after the other, as the stages do."""

    stage = 0

    def __init__(self, grid: gridtrain.Grid, options: argparse.Namespace) -> None:
        blueprint = Blueprint(lambda: recipe.make_model(model_size(options)), seed=0, init=recipe.init)
        self.model = nn.Sequential(*blueprint.build(0, len(blueprint)))
        self.optimizer = grid.optimizer(
            recipe.adam(self.model.parameters()), self.model, exchange=gridtrain.Dense()
        )
        self.metered, self._kept_bytes = False, 0

    def step(self, x_BT: torch.Tensor, y_BT: torch.Tensor) -> float:
        sizes = list(divide_samples(len(x_BT), recipe.MICRO_BATCHES))
        losses = []
        for x, y, n in zip(torch.split(x_BT, sizes), torch.split(y_BT, sizes), sizes, strict=True):
            meter = SavedTensorMeter(self.model.parameters())
            with meter.counting():
                loss = recipe.compute_loss(self.model(x), y) * (n / sum(sizes))
            losses.append(loss.detach())
            loss.backward()  # type: ignore[no-untyped-call]
            self._kept_bytes = max(self._kept_bytes, meter.peak_bytes)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).double().sum())

    @property
    def holding(self) -> MemoryUsage:
        parameters = storage_bytes(self.model.parameters())
        state = storage_bytes(optimizer_state_tensors(self.optimizer.inner))
        return MemoryUsage(parameters, parameters, state, parameters, self._kept_bytes)


def model_size(options: argparse.Namespace) -> Any:
    return recipe.QUICK_SIZE if options.quick else recipe.SIZE


def build(grid: gridtrain.Grid, options: argparse.Namespace) -> Any:
    if options.stages == 1:
        return WholeModel(grid, options)
    sparse = options.exchange == "gtopk"
    return grid.pipeline(
        lambda: recipe.make_model(model_size(options)),
        (lambda p: torch.optim.SGD(p, lr=0.4)) if sparse else recipe.adam,
        stages=options.stages,
        loss_fn=recipe.compute_loss,
        micro_batches=recipe.MICRO_BATCHES,
        exchange=exchange_for(options.exchange),
        cuts=recipe.CUTS if options.stages == 4 and not options.quick else None,
        clip_norm=1.0 if sparse else None,
        init=recipe.init,
    )


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # several workers share this machine's cores
    windows = Windows(load_corpus().train, model_size(options).context)
    grid = gridtrain.join()
    pipe = build(grid, options)
    losses: dict[int, float] = {}
    began_s = 0.0
    batches = grid.batches(windows, batch_size=recipe.BATCH_SIZE, steps=options.steps, seed=recipe.DATA_SEED)
    for x_BT, y_BT in batches:
        began_s = began_s or time.perf_counter()
        pipe.metered = grid.step == MEMORY_MEASURED_STEP
        loss = pipe.step(x_BT, y_BT)
        if loss is None:
            continue
        losses[grid.step] = loss
        grid.report(loss=loss)
        if grid.is_first:
            seconds = time.perf_counter() - began_s
            record = StepRecord(grid.step, seconds, loss, None, SentBytes(), StepTimes())
            with (options.metrics / STEPS_FILE).open("a", encoding="utf-8") as file:
                file.write(record.to_line())
        if grid.step == options.steps:
            write_results(options.metrics, grid, pipe, losses, time.perf_counter() - began_s)


def write_results(
    folder: Path, grid: gridtrain.Grid, pipe: Any, losses: dict[int, float], seconds: float
) -> None:
    """Write the losses, the memory, the traffic and the time of this worker to a JSON file."""
    holding = pipe.holding
    told = {
        "rank": grid.rank,
        "stage": pipe.stage,
        "losses": [losses[step] for step in sorted(losses)],
        "held_bytes": holding.total,
        "held": str(holding),
        "sent_bytes": grid.traffic.get("Data", (0, 0))[0],
        "seconds": seconds,
    }
    (folder / f"worker-{grid.rank}.json").write_text(json.dumps(told))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one worker of `gridtrain demo --pipeline`")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--exchange", choices=("dense", "gtopk"), default="dense")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--metrics", type=Path, required=True, metavar="FOLDER")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
