"""Runs several processes of one machine as one worker; started alone, the script is an ordinary worker.

    gridtrain coordinator                                                     # one terminal
    gridtrain worker "$(gridtrain invite)" -- torchrun --nproc-per-node 2 examples/site.py
    gridtrain worker "$(gridtrain invite)" -- python examples/site.py

With GPUs, torchrun gives each process one (LOCAL_RANK), and the gradients are summed by NCCL.
"""

from __future__ import annotations

import os

import torch

import gridtrain
from gridtrain.adapters.site import Site
from gridtrain.tools.demo.demo_model import ByteGPT, Windows
from gridtrain.tools.demo.text_corpus import load_corpus


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the loss of each batch of this process."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    model = ByteGPT().to(device)
    dataset = Windows(load_corpus().train, model.size.context)
    losses = []
    with Site.enter() as site:
        inner = torch.optim.SGD(model.parameters(), lr=0.4)
        exchange = gridtrain.GTopK(density=0.05, momentum=0.9)
        optimizer = site.optimizer(inner, model, exchange=exchange, clip_norm=1.0)
        for x_BT, y_BT in site.batches(dataset, batch_size=4, steps=steps):
            loss = model.loss(x_BT.to(device), y_BT.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    print("losses:", main()[1][::10])
