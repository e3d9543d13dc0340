"""One worker of a model in stages: a small net on numbered samples.  Prints, as JSON, what it did.

    python pipeline.py '{"stages": 3, "batch_size": 4, "epochs": 1, "dies_at": 8, "stage": 1}'

`dies_at`: the worker of `stage` kills itself as it begins this step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import gridtrain
from gridtrain.training.checkpoint import serialization

SAMPLES = 240


class Numbered:
    """Samples with their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.tensor([index / SAMPLES, 1.0])
        return x, x[:1] * 2, index


def layers() -> list[nn.Module]:
    return [nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)]


def say(mark: str, **fields: Any) -> None:
    print(json.dumps({"mark": mark, "at_s": time.monotonic(), **fields}), flush=True)


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    grid = gridtrain.join()
    pipe = grid.pipeline(
        layers,
        lambda p: torch.optim.SGD(p, lr=0.05),
        stages=options["stages"],
        loss_fn=nn.functional.mse_loss,
        micro_batches=2,
        exchange=gridtrain.Dense(),
    )
    for x, y, ids in grid.batches(Numbered(), batch_size=options["batch_size"], epochs=options["epochs"]):
        step = grid.step
        if step == options["dies_at"] and pipe.stage == options["stage"] and grid.world_size > 2:
            say("dies", step=step)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = pipe.step(x, y)
        if loss is None:
            say("aborted", step=step)
        else:
            say("step", step=step, loss=loss, stage=pipe.stage, samples=ids.tolist())
    state = serialization.replica_digest(pipe.module, pipe.optimizer).hex() if pipe.stage is not None else ""
    say("end", stage=pipe.stage, digest=state)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
