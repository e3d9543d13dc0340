"""A loop with Hugging Face Accelerate on several workers.  gridtrain needs only the lines marked `# grid`.

    pip install -e '.[adapters]'
    gridtrain coordinator                                                           # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/accelerate_loop.py    # one per worker

Accelerate prepares the model and the optimizer, but not the loader, which would prefetch a batch and divide
samples among Accelerate's own processes.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import gridtrain  # grid
from gridtrain.tools.demo.byte_gpt import ByteGPT, Windows
from gridtrain.tools.demo.text_corpus import load_corpus


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the loss of each batch of this worker."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = ByteGPT()
    dataset = Windows(load_corpus().train, model.size.context)
    grid = gridtrain.join()  # grid
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    exchange = gridtrain.GTopK(density=0.05, momentum=0.9)  # grid
    optimizer = grid.optimizer(optimizer, model, exchange=exchange, clip_norm=1.0)  # grid
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(dataset, batch_sampler=grid.sampler(dataset, batch_size=4, steps=steps))  # grid

    losses = []
    for x_BT, y_BT in loader:
        loss = model.loss(x_BT.to(accelerator.device), y_BT.to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.unwrap_model(model), losses


if __name__ == "__main__":
    print("losses:", main()[1][::10])
