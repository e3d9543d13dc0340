"""Trains a GPT that exceeds the declared memory limit of one worker: four workers hold a quarter each.

    gridtrain coordinator --min-workers 4                                       # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/pipeline_gpt.py   # four times

The model is made on torch's meta device, where it has shapes but takes no memory; each worker then builds
only its stage.  The limit is checked twice: before training against the prediction of `partition`, and in the
second step against the measured bytes.  Eight workers make two replicas of each stage, which
exchange gradients with gTop-k.  Nothing is downloaded: the text is the source of Python's standard library.
"""

from __future__ import annotations

import torch

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.pipeline import Blueprint, partition
from gridtrain.tools.demo import pipeline_model
from gridtrain.tools.demo.demo_model import Windows
from gridtrain.tools.demo.text_corpus import load_corpus

STAGES, BATCH, MICRO_BATCHES = 4, 16, 8
LIMIT_BYTES = pipeline_model.MEMORY_LIMIT_BYTES


def main() -> None:
    dataset = Windows(load_corpus().train, pipeline_model.SIZE.context)
    x, _ = dataset.evenly_spaced(BATCH // MICRO_BATCHES)
    model = Blueprint(pipeline_model.make_model, seed=0, init=pipeline_model.init)
    limits = {
        "example": x,
        "optimizer": "adamw",
        "extra_copies": 1.0,  # the flat gradient
        "micro_batches": MICRO_BATCHES,
        "memory_bytes": LIMIT_BYTES,
    }
    try:
        partition(model, 1, **limits)
        raise SystemExit("the whole model fits into one worker's limit, so there is no need to cut it")
    except ConfigError as error:
        print(f"not partitioned: {error}", flush=True)
    print(partition(model, STAGES, **limits), flush=True)

    grid = gridtrain.join()
    pipe = grid.pipeline(
        model,
        pipeline_model.adam,
        stages=STAGES,
        loss_fn=pipeline_model.compute_loss,
        micro_batches=MICRO_BATCHES,
        cuts=pipeline_model.CUTS,  # the same for all workers; if left out, faster workers get more blocks
        exchange=gridtrain.Dense(),
    )
    for inputs, targets in grid.batches(dataset, batch_size=BATCH, steps=60):
        pipe.metered = grid.step == 1
        loss = pipe.step(inputs, targets)
        if pipe.metered:
            print(f"stage {pipe.stage} holds {pipe.holding}", flush=True)
            if pipe.holding.total > LIMIT_BYTES:
                raise SystemExit(f"that is more than the limit of {LIMIT_BYTES / 2**20:.1f} MiB")
        if loss is not None and grid.is_first and grid.step % 10 == 0:
            print(f"step {grid.step}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
