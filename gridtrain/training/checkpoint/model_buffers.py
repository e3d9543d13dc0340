"""The buffers of a model: floating-point ones are averaged, and integer ones are taken from rank 0."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gridtrain.errors import RemoteProtocolError
from gridtrain.training.checkpoint.flat_gradient import canonical_names


def buffers_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the persistent buffers (those in `state_dict`) by name, in the model's order; shared buffers
    occur once."""
    persistent = model.state_dict(keep_vars=True).keys()
    named: dict[int, tuple[str, Tensor]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:  # a shared buffer may have another name that is not persistent
            named.setdefault(id(buffer), (name, buffer))
    names = canonical_names([name for name, _ in named.values()])
    return list(zip(names, (buffer for _, buffer in named.values()), strict=True))


def _buffers_of_type(model: nn.Module, *, floating: bool) -> list[Tensor]:
    return [b for _, b in buffers_of(model) if b.is_floating_point() == floating and not b.is_complex()]


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers (batch-norm statistics, ...)."""
    return _buffers_of_type(model, floating=True)


def describe_buffers(model: nn.Module) -> str:
    """Return the number of buffers, and a digest of their names, shapes and dtypes, but not their values."""
    named = buffers_of(model)
    lines = [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in named]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=32).hexdigest()
    return f"{len(named)} tensor{'s' * (len(named) > 1)}, digest {digest[:12]}" if named else "none"


def integer_buffers_vector(model: nn.Module) -> npt.NDArray[np.int64]:
    """Return all integer and boolean buffers (batch counters, ...) as one (n,) int64 vector."""
    pieces = [t.detach().cpu().reshape(-1).to(torch.int64) for t in _buffers_of_type(model, floating=False)]
    return np.asarray(torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *pieces]).numpy())


def load_integer_buffers_vector(model: nn.Module, vector_N: npt.NDArray[np.int64]) -> None:
    """Load the `integer_buffers_vector` of rank 0.  Raises `RemoteProtocolError` if its length is wrong."""
    tensors = _buffers_of_type(model, floating=False)
    sizes = [tensor.numel() for tensor in tensors]
    if vector_N.shape != (sum(sizes),):
        raise RemoteProtocolError(f"the buffers have shape {vector_N.shape}; expected ({sum(sizes)},)")
    for tensor, piece in zip(tensors, torch.split(torch.from_numpy(vector_N), sizes), strict=True):
        assign(tensor, piece.view(tensor.shape))


@torch.no_grad()
def assign(buffer: Tensor, values: Tensor) -> None:
    """Set a buffer's values; of elements that share memory, as after `expand`, only the first is written,
    because torch refuses to write the same memory several times."""
    distinct = tuple(slice(None) if stride else slice(0, 1) for stride in buffer.stride())
    buffer[distinct].copy_(values[distinct])
