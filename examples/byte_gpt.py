"""A training loop for several workers.  The lines marked `# grid` are the only ones that gridtrain changes.

    gridtrain coordinator                                                       # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/byte_gpt.py       # one per worker

The model is a GPT over bytes, and the text is the source of Python's standard library, so nothing is
downloaded.  Start a second worker while the first one trains, or stop one with Ctrl-C: the others
continue.
"""

from __future__ import annotations

import torch

import gridtrain  # grid
from gridtrain.tools.demo.demo_model import ByteGPT, Windows
from gridtrain.tools.demo.text_corpus import load_corpus


def main() -> None:
    corpus = load_corpus()
    model = ByteGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    dataset = Windows(corpus.train, model.size.context)
    held_out = Windows(corpus.held_out, model.size.context).evenly_spaced(128)

    grid = gridtrain.join()  # grid
    exchange = gridtrain.GTopK(density=0.05, momentum=0.9)  # grid: the exchange carries the momentum
    optimizer = grid.optimizer(optimizer, model, exchange=exchange, clip_norm=1.0)  # grid
    for x, y in grid.batches(dataset, batch_size=8, steps=450):  # grid: was DataLoader(dataset, batch_size=8)
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        grid.report(loss=loss.item())  # grid: for the dashboard

        if grid.is_first and grid.step % 50 == 0:
            with torch.no_grad(), grid.evaluation():
                print(f"step {grid.step}: held-out loss {model.loss(*held_out).item():.3f}", flush=True)


if __name__ == "__main__":
    main()
