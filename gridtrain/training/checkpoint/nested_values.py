"""Converts nested values of state_dicts to JSON and tensors, and back.

{"lr": 0.1, 3: (tensor, None)}  -->  {"dict": [["lr", 0.1], [3, {"tuple": [{"tensor": "0"}, null]}]]}
                                     {"0": tensor}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from gridtrain.errors import ConfigError, describe_type

_MAX_DEPTH = 32

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}


def _is_supported(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"": torch.zeros(1, dtype=dtype)})
    except (KeyError, SafetensorError):
        return False
    return True


DTYPES = {dtype: name for dtype, name in _NAMES.items() if _is_supported(dtype)}
"""The names of dtypes in the installed version of safetensors; a file contains the tensors in the reverse of
this order."""


class Packer:
    """Converts plain data to JSON that preserves int keys and tuples; tensors are numbered.

    Args:
        tensors: the tensors packed so far; `pack` adds those in the value that it packs.
        copies: whether to copy the tensors to the CPU; otherwise they are the state's own.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None, *, copies: bool = True) -> None:
        self.tensors = {} if tensors is None else tensors
        self._copies = copies

    def pack(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            name = str(len(self.tensors))
            if value.dtype not in DTYPES:
                raise ConfigError(
                    f"{where} is a tensor of {value.dtype}, which cannot be saved or sent to a newcomer",
                    remedy="store it with a different dtype in state_dict()",
                )
            if self._copies:  # always, because safetensors rejects memory that two tensors share
                value = value.to("cpu", copy=True).contiguous()
            self.tensors[name] = value.detach()
            return {"tensor": name}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            items = [[self.pack(k, where), self.pack(v, f"{where}.{k}")] for k, v in value.items()]
            return {kind: items}
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.pack(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        raise ConfigError(
            f"{where} is {describe_type(value)}, which cannot be sent to a newcomer",
            remedy="store only tensors, numbers, strings, lists and dicts in state_dict()",
        )


def unpack(node: Any, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """Return the value that was packed as `node`; raise `ValueError`, `KeyError` or `TypeError` for anything
    that `Packer` does not write."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("it contains a bare list")
        return node
    ((kind, content),) = node.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "list" | "tuple":
            values = [unpack(item, tensors, depth + 1) for item in content]
            return tuple(values) if kind == "tuple" else values
        case "dict" | "counter":
            items = {unpack(k, tensors, depth + 1): unpack(v, tensors, depth + 1) for k, v in content}
            return Counter(items) if kind == "counter" else items
    raise ValueError(f"unknown kind {kind!r}")


def tensor_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return the tensor's bytes in logical order, (bytes,) uint8."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # the stride of a single element may be 0
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array
