"""Trains a small convolutional network jointly on all workers to recognize the shape in a noisy image.

The lines marked `# grid` are the only changes to an ordinary PyTorch loop.  Nothing is
downloaded; replace the model and the data with your own.
"""

from __future__ import annotations

import gridtrain  # grid
import torch
from torch import nn
from torch.utils.data import TensorDataset

SHAPES, SIZE, IMAGES = ("circle", "square", "triangle"), 16, 6000
STEPS = 10_000  # a few minutes with two workers on one machine
SHOWN = {10, 30, 100, 300, *range(STEPS // 10, STEPS + 1, STEPS // 10)}  # it learns most at the beginning


def draw_images(seed: int) -> TensorDataset:
    """Return IMAGES noisy images of shape (1, SIZE, SIZE), and the index of the shape in each.

    Only integers are drawn, so the images are the same on all kinds of processors.
    """
    generator = torch.Generator().manual_seed(seed)
    shape_N = torch.arange(IMAGES) % len(SHAPES)
    row_N, column_N = torch.randint(6, SIZE - 6, (2, IMAGES, 1, 1), generator=generator)
    radius_N = torch.randint(4, 7, (IMAGES, 1, 1), generator=generator)
    down, right = torch.arange(SIZE).view(-1, 1) - row_N, (torch.arange(SIZE) - column_N).abs()
    masks = torch.stack(
        (
            down.square() + right.square() <= radius_N.square(),
            torch.maximum(down.abs(), right) < radius_N,
            (2 * right <= down + radius_N) & (down <= radius_N),
        )
    )
    noise = torch.randint(0, 256, (IMAGES, SIZE, SIZE), generator=generator)
    images = 128 * masks[shape_N, torch.arange(IMAGES)] + noise
    return TensorDataset(images.unsqueeze(1) / 256 - 1, shape_N)


def main() -> None:
    torch.set_num_threads(1)  # workers on one machine share its cores; leave it out for a large model
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * (SIZE // 4) ** 2, len(SHAPES))),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset, held_out = draw_images(seed=0), draw_images(seed=1)

    grid = gridtrain.join()  # grid
    exchange = gridtrain.GTopK(density=0.1, momentum=0.9)  # grid: see docs/exchanges.md
    optimizer = grid.optimizer(optimizer, model, exchange=exchange)  # grid
    for images, shapes in grid.batches(dataset, global_batch_size=128, steps=STEPS):  # grid: was a DataLoader
        loss = nn.functional.cross_entropy(model(images), shapes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        grid.report(loss=loss.item())  # grid: for `gridtrain status`
        if grid.is_first and grid.step in SHOWN:
            images, shapes = held_out[:1000]
            with torch.no_grad(), grid.evaluation():
                right = (model(images).argmax(1) == shapes).float().mean().item()
            print(f"step {grid.step}: {100 * right:.1f} % of new images are recognized", flush=True)


if __name__ == "__main__":
    main()
