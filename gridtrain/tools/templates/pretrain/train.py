"""Trains a small Llama from scratch, jointly on all workers, on the bytes of a text.

The text comes with this script.  At the end, the first worker writes the model, which transformers loads:
`AutoModelForCausalLM.from_pretrained(FOLDER)`.

The lines marked `# grid` are the only changes to an ordinary PyTorch loop.
"""

from __future__ import annotations

from pathlib import Path

import gridtrain  # grid
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = Path(__file__).with_name("text.txt")
CONTEXT, BATCH = 64, 8  # bytes in a sample; samples in a batch on each worker
EXCHANGES, LOCAL_STEPS = 60, 10  # batches per exchange on each worker: docs/local-steps.md
WARM_UP = 50  # batches


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same model on all workers
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    torch.set_num_threads(1)  # workers on one machine share its cores; leave it out for a large model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    bytes_N = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    windows = list(bytes_N[: len(bytes_N) // CONTEXT * CONTEXT].view(-1, CONTEXT))
    dataset, held_out_BT = windows[:-32], torch.stack(windows[-32:]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    grid = gridtrain.join()  # grid
    exchange = gridtrain.LocalSteps(every=LOCAL_STEPS, exchange=gridtrain.GTopK(density=0.1))  # grid
    optimizer = grid.optimizer(optimizer, model, exchange=exchange)  # grid
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=WARM_UP)
    grid.track(warm_up=warm_up)  # grid: a worker that joins later receives it
    batches = grid.batches(dataset, batch_size=BATCH, steps=EXCHANGES)  # grid: was a DataLoader
    for number, bytes_BT in enumerate(batches, start=1):
        bytes_BT = bytes_BT.to(device)
        loss = model(input_ids=bytes_BT, labels=bytes_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()

        grid.report(loss=loss.item())  # grid: for `gridtrain status`
        if grid.is_first and number % LOCAL_STEPS == 0 and grid.step % 5 == 0:
            with torch.no_grad(), grid.evaluation():
                held_out = model(input_ids=held_out_BT, labels=held_out_BT).loss.item()
            print(f"exchange {grid.step}: held-out loss {held_out:.3f}", flush=True)


if __name__ == "__main__":
    main()
