"""Trains a Llama whose decoder layers are divided among four workers; no worker builds the whole model.

    pip install -e '.[adapters]'
    gridtrain coordinator --min-workers 4                                         # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/pipeline_llama.py   # four times

With the folder of a pretrained model instead of a configuration, `decoder_blueprint("folder")`, each worker
reads the weights of its own layers.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig

import gridtrain
from gridtrain.adapters.decoder import decoder_blueprint, next_token_loss
from gridtrain.tools.demo.text_corpus import load_corpus

STAGES, CONTEXT, BATCH = 4, 64, 8


def main(steps: int = 200) -> tuple[torch.nn.Module, list[float]]:
    """Train; return this worker's layers, and the loss of each step."""
    config = LlamaConfig(
        vocab_size=256,  # bytes
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    ids_N = torch.frombuffer(bytearray(load_corpus().train[:400_000]), dtype=torch.uint8).long()
    windows = ids_N[: len(ids_N) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    dataset = [(window, window) for window in windows]  # the targets are the same tokens, shifted by the loss

    grid = gridtrain.join()
    pipe = grid.pipeline(
        decoder_blueprint(config, seed=0),
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        stages=STAGES,
        loss_fn=next_token_loss,
        micro_batches=4,
        exchange=gridtrain.Dense(),
    )
    losses = []
    for inputs, targets in grid.batches(dataset, batch_size=BATCH, steps=steps):
        loss = pipe.step(inputs, targets)
        if loss is not None:
            losses.append(loss)
            grid.report(loss=loss)
    return pipe.module, losses


if __name__ == "__main__":
    print("losses:", main()[1][::10])
