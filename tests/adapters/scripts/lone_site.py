"""The grid of a site without a run, for scripts of one process of a site of two."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from gridtrain.training.checkpoint.frozen_base import FrozenBase


class Grid:
    """Takes the place of the leader's grid: leaves the optimizer as it is, and has the same batch in each
    step."""

    is_first = True

    def optimizer(self, optimizer: Any, model: nn.Module, **options: Any) -> Any:
        optimizer.base = FrozenBase(model)
        return optimizer

    def sampler(self, dataset: Any, *, steps: int, **options: Any) -> Iterator[list[int]]:
        return iter([[0, 1]] * steps)

    def close(self, reason: str) -> None:
        print(f"closed: {reason}", flush=True)
