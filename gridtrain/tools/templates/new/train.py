"""Trains a small classifier on all workers together: on which of three spiral arms is a point?

The lines marked `# grid` are the only changes to an ordinary PyTorch loop.  Nothing is
downloaded; replace the model and the data with your own.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

import gridtrain  # grid

ARMS, POINTS = 3, 1000
STEPS = 20_000  # a few minutes with two workers on one machine


def spirals() -> TensorDataset:
    """Return ARMS * POINTS points: positions of shape (n, 2), and the arm of each."""
    positions, arms = [], []
    for arm in range(ARMS):
        for i in range(POINTS):
            radius = 0.1 + 0.9 * i / POINTS
            angle = 4.0 * radius + 2 * math.pi * arm / ARMS + 0.15 * math.sin(37.0 * i)
            positions.append([round(radius * math.cos(angle), 4), round(radius * math.sin(angle), 4)])
            arms.append(arm)
    return TensorDataset(torch.tensor(positions), torch.tensor(arms))


def main() -> None:
    torch.set_num_threads(1)  # workers on one machine share its cores; leave it out for a large model
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ARMS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = spirals()

    grid = gridtrain.join()  # grid
    exchange = gridtrain.GTopK(density=0.1, momentum=0.9)  # grid: see docs/exchanges.md
    optimizer = grid.optimizer(optimizer, model, exchange=exchange)  # grid
    for x, y in grid.batches(dataset, global_batch_size=128, steps=STEPS):  # grid: was a DataLoader
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        grid.report(loss=loss.item())  # grid: for `gridtrain status`
        if grid.is_first and grid.step % (STEPS // 10) == 0:
            x_all, y_all = dataset.tensors
            with torch.no_grad(), grid.evaluation():
                right = (model(x_all).argmax(1) == y_all).float().mean().item()
            print(f"step {grid.step}: {100 * right:.1f} % of all points are on the right arm", flush=True)


if __name__ == "__main__":
    main()
