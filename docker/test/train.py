"""The demo's training loop for compose_test.py; prints a JSON line every 20 steps and at the end.

{"step": 40, "loss": 3.12}                       the first worker: loss on held-out text
{"step": 1500, "model": "9f3a...", "world": 4}   every worker, at the end: SHA-256 of its parameters
"""

from __future__ import annotations

import hashlib
import json
import os

import torch

import gridtrain
from gridtrain.tools.demo.demo_model import ByteGPT, Windows
from gridtrain.tools.demo.text_corpus import load_corpus

EVERY = 20


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    corpus = load_corpus()
    model = ByteGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    dataset = Windows(corpus.train, model.size.context)
    held_out = Windows(corpus.held_out, model.size.context).evenly_spaced(128)

    grid = gridtrain.join()
    exchange = gridtrain.GTopK(density=0.05, momentum=0.9)
    optimizer = grid.optimizer(optimizer, model, exchange=exchange, clip_norm=1.0)
    for x, y in grid.batches(dataset, batch_size=8, steps=int(os.environ["STEPS"])):
        model.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if grid.is_first and grid.step % EVERY == 0:
            with torch.no_grad(), grid.evaluation():
                say(step=grid.step, loss=round(model.loss(*held_out).item(), 4))

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    say(step=grid.step, model=digest.hexdigest(), world=grid.world_size)


if __name__ == "__main__":
    main()
