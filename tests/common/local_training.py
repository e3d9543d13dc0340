"""A training loop with local steps that records what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from training_loop import digest, train_batch

import gridtrain

EVERY = 4
EXCHANGES = [
    gridtrain.Dense(),
    gridtrain.TopK(density=0.3),
    gridtrain.GTopK(density=0.3),
    gridtrain.Dense(values="int8"),
]
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


class Numbered:
    """Sample i is made of the number i, so that a batch says which samples it has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index % 7) / 7.0, 1.0]), index


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Loop:
    """A training loop that records, for each turn, the digest at its end and the samples of its batches."""

    def __init__(self, grid: gridtrain.Grid, exchange: Any, *, every: int = EVERY, **options: Any) -> None:
        self.grid, self.model = grid, model_of()
        local = gridtrain.LocalSteps(every, exchange, **options)
        self.optimizer = grid.optimizer(adamw(self.model), self.model, exchange=local)
        self.digests: dict[int, str] = {}
        self.samples: dict[int, list[list[int]]] = {}
        self.turn: list[int] = []  # samples of the turn that is computed, or was computed last

    def run(self, batches: Any, each: Callable[[Loop], object] = lambda loop: None) -> Loop:
        """Args: each: called before each batch is trained; a true value ends the loop."""
        for inputs, indices in batches:
            if each(self):
                break
            if self.optimizer.local_calls == 0:
                step, self.turn = self.grid.step, []
            self.turn += indices.tolist()
            self.samples.setdefault(step, []).append(indices.tolist())
            train_batch(self.model, self.optimizer, inputs)
            if self.optimizer.local_calls == 0:
                assert self.grid.step == step + 1
                self.digests[step] = self.digest
        self.last = self.digest
        return self

    @property
    def digest(self) -> str:
        return digest(self.model, self.optimizer)

    @property
    def taken(self) -> list[int]:
        return [index for turn in self.samples.values() for batch in turn for index in batch]
