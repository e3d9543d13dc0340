"""The training script of the recorded runs: a tiny model on exact numbers, with one variant per exchange.

    python train.py gtopk 1000

While the file that PAUSE_FILE in the environment names exists, every step waits for as many seconds as stand
in it.  The script uses the public interface of gridtrain alone, so it runs under any version.  It is part of
the bundle that was recorded with the worker's state folder, so not one byte of it may change.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gridtrain

SAMPLES = 48
BATCH = 6


class Points:
    """Samples whose coordinates are exact in binary, so that their digest is the same on every machine."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([(index % 7 - 3) / 4, (index * 3 % 5 - 2) / 8])
        return x, 2 * x[:1] - x[1:]


def build_model() -> nn.Module:
    """With batch norm, so that there are float and integer buffers."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.03125)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that the settings of several are recorded."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.125}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0078125)


VARIANTS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "gtopk": (sgd, {"exchange": gridtrain.GTopK(density=0.25, momentum=0.875), "average_buffers_every": 2}),
    "topk": (sgd, {"exchange": gridtrain.TopK(density=0.5, values="fp32"), "clip_norm": 1.0}),
    "dense": (adamw, {"exchange": gridtrain.Dense(), "average_buffers_every": 0}),
    "local": (
        adamw,
        {
            "exchange": gridtrain.LocalSteps(
                every=2,
                exchange=gridtrain.GTopK(density=0.5, values="int8"),
                outer_learning_rate=0.75,
                outer_momentum=0.5,
            )
        },
    ),
    "auto": (sgd, {"exchange": "auto"}),
    "overlap": (
        sgd,
        {
            "exchange": gridtrain.GTopK(density=0.25, values="bf16"),
            "overlap": gridtrain.Overlap(buckets=2, least=8, adaptive=False),
        },
    ),
}

Look = Callable[[int, nn.Module, Any], None]


def train(
    grid: gridtrain.Grid, variant: str, steps: int, *, look: Look = lambda *_: None, until: int | None = None
) -> nn.Module:
    """Train to the end of the run, or until so many steps are committed.

    Args:
        look: called before each batch with the committed steps, the model and the wrapped optimizer.
    """
    make, options = VARIANTS[variant]
    model = build_model()
    optimizer = grid.optimizer(make(model), model, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    if variant != "auto":
        grid.track(scheduler=scheduler)
    for x, y in grid.batches(Points(), batch_size=BATCH, steps=steps, seed=5):
        look(grid.step, model, optimizer)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if variant == "dense":
            scheduler.step()
        grid.report(loss=loss.item())
        if until is not None and grid.step >= until:
            break
    return model


def main() -> None:
    variant, steps, pause = sys.argv[1], int(sys.argv[2]), os.environ.get("PAUSE_FILE", "")
    torch.set_num_threads(1)

    def look(step: int, model: nn.Module, optimizer: Any) -> None:
        print(f"STEP {step}", flush=True)
        if os.path.exists(pause):
            with open(pause) as file:
                time.sleep(float(file.read()))

    with gridtrain.join() as grid:
        train(grid, variant, steps, look=look)
        print(f"END {grid.step}", flush=True)


if __name__ == "__main__":
    main()
