"""A training loop with local steps that records what it does, and groups in one process that run it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from brisk import WITHIN_S
from torch import nn

import gridtrain
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.training.checkpoint import serialization

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


def train_batch(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


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
        return serialization.replica_digest(self.model, self.optimizer.replicated).hex()[:12]

    @property
    def taken(self) -> list[int]:
        return [index for turn in self.samples.values() for batch in turn for index in batch]


def run_named(names: Sequence[str], work: Callable[[LocalGroup, str], Any], **options: Any) -> dict[str, Any]:
    """Run `work(group, name)` in a thread for each name; return each result or exception."""
    ends: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            ends[name] = work(group, name)
        except BaseException as error:
            ends[name] = error

    with LocalGroup(min_workers=len(names), **options) as group:
        threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
    assert set(ends) == set(names), f"only {set(ends)} have ended"
    return ends
