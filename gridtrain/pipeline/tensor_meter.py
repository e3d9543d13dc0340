"""Measures the peak memory of tensors during a computation, on any device.

While the meter is active as a context manager, it counts each storage that torch creates, until the storage
is freed.  Memory that kernels use internally, or that an allocator only reserves, is not counted.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that this thread creates while the mode is active.

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
