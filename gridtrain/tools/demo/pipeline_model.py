"""The model of `gridtrain demo --pipeline`, a larger byte GPT made of blocks, and its training settings.

This module defines shapes, initial values, the memory limit, and the boundaries of the four stages.

    bytes (B, T) -> Embed -> Block x 8 -> Head -> logits (B, T, 256)       1.0 M parameters
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridtrain.tools.demo.demo_model import TransformerBlock, draw_matrix
from gridtrain.tools.demo.recipe import VOCABULARY, ModelSize

SIZE = ModelSize(width=96, layers=8, heads=4, context=64)
QUICK_SIZE = ModelSize(width=32, layers=4, heads=2, context=32)
BATCH_SIZE = 16
MICRO_BATCHES = 8
LEARNING_RATE = 1e-3
DATA_SEED = 4
MEMORY_LIMIT_BYTES = 8 << 20
"""The declared memory limit of each worker.

The whole model takes about three times as much, even if it is trained micro-batch by micro-batch.
"""

CUTS = (0, 3, 5, 7, 10)
"""The boundaries of four stages, each within the limit, of the model of `SIZE`.

They are fixed, because boundaries that are chosen from measured speeds may exceed the limit: if four workers
share a busy machine, a stage sometimes gets four blocks.
"""


class Embedding(nn.Module):
    """Token and position embedding."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD: Tensor = self.token(bytes_BT) + self.position(positions_T)
        return x_BTD


class OutputHead(nn.Module):
    """The last layer norm, and the projection to logits of the next byte."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.out = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x_BTD))
        return logits


def make_model(size: ModelSize = SIZE) -> nn.Sequential:
    """Make the model.  `Blueprint` calls this `with torch.device("meta")`, so the model takes no memory."""
    return nn.Sequential(
        Embedding(size), *(TransformerBlock(size) for _ in range(size.layers)), OutputHead(size)
    )


def init(block: nn.Module, number: int) -> None:
    """Draw the matrices of a block."""
    for name, parameter in block.named_parameters():
        if parameter.dim() >= 2:
            draw_matrix(name, parameter, SIZE.layers)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def compute_loss(logits_BTV: Tensor, y_BT: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
