"""Counts the bytes of a stage (parameters, optimizer, activations) tensor by tensor, on any device.

    parameters   the parameters and buffers
    gradients    the gradients of the trainable parameters
    optimizer    the state of the optimizer
    exchange     the flat gradient, the residual and the momentum
    kept         the peak size of the tensors and inputs that are stored for backward passes

Each storage is counted once, regardless of its number of views.  Memory that a layer needs only while it
computes is not counted, nor are messages in flight.  (The size of the process is not a useful measure,
because torch itself takes hundreds of MB.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

USABLE_MEMORY_SHARE = 0.9
"""The share of a GPU's memory, or of the free memory of the host, that training may use; the framework needs
the rest."""


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The bytes that a stage uses, by purpose; see the module's docstring."""

    parameters: int
    gradients: int
    optimizer: int
    exchange: int
    kept: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.exchange + self.kept

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "exchange", "kept")
        listed = ", ".join(f"{name} {getattr(self, name) / 2**20:.1f}" for name in parts)
        return f"{self.total / 2**20:.1f} MiB ({listed})"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


class SavedTensorMeter:
    """Counts the bytes of the tensors that autograd stores while the context manager `counting` is active.

    Args:
        without: tensors not to count, such as parameters, because they exist in any case.

    Attributes:
        now_bytes, peak_bytes: the current number of stored bytes, and the largest so far.
    """

    def __init__(self, without: Iterable[Tensor]) -> None:
        self._excluded = {t.untyped_storage().data_ptr() for t in without}
        self._saved_counts: Counter[int] = Counter()
        self.now_bytes = self.peak_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, attrgetter("tensor")):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        key, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if key in self._excluded:
            return _SavedTensor(tensor, None, 0, 0)
        if not self._saved_counts[key]:
            self.now_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._saved_counts[key] += 1
        return _SavedTensor(tensor, self, key, nbytes)

    def release(self, key: int, nbytes: int) -> None:
        self._saved_counts[key] -= 1
        if not self._saved_counts[key]:
            self.now_bytes -= nbytes


class _SavedTensor:
    """A tensor that autograd stores; notifies the meter when autograd releases it."""

    __slots__ = ("_key", "_meter", "_nbytes", "tensor")

    def __init__(self, tensor: Tensor, meter: SavedTensorMeter | None, key: int, nbytes: int) -> None:
        # A tensor that belongs to the graph would keep the graph, and with it this object, alive forever.
        self.tensor = tensor.detach() if tensor.is_leaf is False else tensor
        self._meter, self._key, self._nbytes = meter, key, nbytes

    def __del__(self) -> None:
        if self._meter is not None:
            self._meter.release(self._key, self._nbytes)
