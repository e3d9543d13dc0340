"""One worker of a model in two stages, for some steps.  Prints, as JSON, the loss of each, and its stage.

    python pipeline_paused.py '{"steps": 200, "gated_step": 12, "step_gate": "/tmp/gate"}'

It waits before step `gated_step`, until there is a byte in the FIFO `step_gate`.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

import gridtrain

DATA = [(x, x.sum(-1, keepdim=True)) for x in torch.randn(64, 4, generator=torch.Generator().manual_seed(2))]


def main(steps: int, gated_step: int, step_gate: str) -> None:
    torch.set_num_threads(1)
    grid = gridtrain.join()
    pipe = grid.pipeline(
        lambda: [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)],
        lambda p: torch.optim.SGD(p, lr=0.05),
        stages=2,
        loss_fn=nn.functional.mse_loss,
        micro_batches=2,
        exchange=gridtrain.GTopK(density=0.3),
    )
    for x, y in grid.batches(DATA, batch_size=4, steps=steps):
        step = grid.step
        if step == gated_step:
            with grid.evaluation(), open(step_gate, "rb", buffering=0) as gate:
                print(json.dumps({"mark": "at gate", "step": step}), flush=True)
                gate.read(1)
            gated_step = -1
        loss = pipe.step(x, y)
        print(json.dumps({"mark": "step", "step": step, "stage": pipe.stage, "loss": loss}), flush=True)
        time.sleep(0.01)  # a step of 10 ms of "computing"


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
