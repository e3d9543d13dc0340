"""The training script of the recorded run of a model in stages.

    python pipeline.py 400

While the file that PAUSE_FILE in the environment names exists, every step waits for as many seconds as stand
in it.  The script uses the public interface of gridtrain alone, so it runs under any version.
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
STAGES = 2


class Points:
    """Samples whose coordinates are exact in binary, so that their digest is the same on every machine."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([(index % 7 - 3) / 4, (index * 3 % 5 - 2) / 8])
        return x, 2 * x[:1] - x[1:]


def layers() -> list[nn.Module]:
    return [nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1)]


Look = Callable[[int, Any], None]


def train(grid: gridtrain.Grid, steps: int, *, look: Look = lambda *_: None, until: int | None = None) -> Any:
    """Train to the end of the run, or until so many steps are committed; returns the pipeline.

    Args:
        look: called before each batch with the committed steps and the pipeline.
    """
    pipe = grid.pipeline(
        layers,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0625, momentum=0.0),
        stages=STAGES,
        loss_fn=nn.functional.mse_loss,
        micro_batches=2,
        exchange=gridtrain.GTopK(density=0.25, momentum=0.5),
        seed=3,
    )
    for x, y in grid.batches(Points(), batch_size=BATCH, steps=steps, seed=5):
        look(grid.step, pipe)
        pipe.step(x, y)
        if until is not None and grid.step >= until:
            break
    return pipe


def main() -> None:
    steps, pause = int(sys.argv[1]), os.environ.get("PAUSE_FILE", "")
    torch.set_num_threads(1)

    def look(step: int, pipe: Any) -> None:
        print(f"STEP {step} STAGE {pipe.stage}", flush=True)
        if os.path.exists(pause):
            with open(pause) as file:
                time.sleep(float(file.read()))

    with gridtrain.join() as grid:
        train(grid, steps, look=look)
        print(f"END {grid.step}", flush=True)


if __name__ == "__main__":
    main()
