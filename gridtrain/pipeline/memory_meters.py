"""Measures the memory of a stage (by purpose) and of a computation (peak) tensor by tensor, on any device.

    parameters   the parameters and buffers
    gradients    the gradients of the trainable parameters
    optimizer    the state of the optimizer
    exchange     the flat gradient, the residual and the momentum
    kept         the peak size of the tensors and inputs that are stored for backward passes

Each storage is counted once, regardless of its number of views.  In a stage, memory that a layer needs only
while it computes is not counted, nor are messages in flight.  (The size of the process is not a useful
measure, because torch itself takes hundreds of MB.)  `core.stages.stage_cost` predicts the memory of a stage;
`memory_limit` says how much a stage may use.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class TensorMemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that this thread creates while the mode is active.

    It counts each storage until the storage is freed, but not memory that kernels use internally, or that an
    allocator only reserves.

    Attributes:
        live: a weak reference to each created storage, and the storage's size in bytes.
        peak_bytes: the largest total size of these storages at any time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-untyped-call]
            for tensor in _tensors_with_memory((args, kwargs))
        }
        for tensor in _tensors_with_memory(result):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            if reference.cdata not in given:  # otherwise a view, or written in place
                self.live.setdefault(reference.cdata, (reference, storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        return sum(nbytes for _, nbytes in self.live.values())


def _tensors_with_memory(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.device.type != "meta"]
