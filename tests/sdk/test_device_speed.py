"""The measurement of a device's speed, with the operations that torch runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gridtrain.device_speed import device_flops


class Operations(TorchDispatchMode):
    """Records the names of the operations, and the dtypes of what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.dtypes.add(args[0].dtype)
        if func in (torch.ops.aten.mm.default, torch.ops.aten._local_scalar_dense.default):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_each_product_is_waited_for_on_its_own_device() -> None:
    """By reading an element of it: torch's `synchronize` waits for the current device instead."""
    with Operations() as operations:
        assert device_flops(torch.device("cpu")) > 0.0
    assert operations.names[:4] == ["aten::mm", "aten::_local_scalar_dense"] * 2
    assert operations.names.count("aten::mm") == operations.names.count("aten::_local_scalar_dense")


def test_float32_is_measured_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with Operations() as operations:
            device_flops(torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert operations.dtypes == {torch.float32}
