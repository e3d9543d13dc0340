"""Trains a byte GPT with Lightning's Trainer on several workers.

pip install -e '.[adapters]'
gridtrain coordinator                                                              # one terminal
gridtrain worker "$(gridtrain invite)" -- python examples/lightning_trainer.py     # one per worker
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

import gridtrain
from gridtrain.adapters.lightning import GridStrategy
from gridtrain.adapters.loader import GridLoader
from gridtrain.tools.demo.byte_gpt import ByteGPT, Windows
from gridtrain.tools.demo.text_corpus import load_corpus


class Model(L.LightningModule):
    def __init__(self, grid: gridtrain.Grid) -> None:
        super().__init__()
        self.gpt, self._grid = ByteGPT(), grid
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.gpt.loss(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(self.parameters(), lr=0.4)
        exchange = gridtrain.GTopK(density=0.05, momentum=0.9)
        return self._grid.optimizer(inner, self, exchange=exchange, clip_norm=1.0)


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the loss of each batch of this worker."""
    grid = gridtrain.join()
    model = Model(grid)
    dataset = Windows(load_corpus().train, model.gpt.size.context)
    loader = GridLoader(grid, dataset, batch_size=4, steps=steps)
    trainer = L.Trainer(
        max_epochs=1,
        strategy=GridStrategy(grid, loader),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return model, model.losses


if __name__ == "__main__":
    print("losses:", main()[1][::10])
