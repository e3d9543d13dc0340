"""The precision (exact, bf16, fp16, int8) in which a pipeline sends activations and gradients.

The values of sparse and dense exchanges have their own encodings (`network/wire/value_encoding.py`).

    exact   the elements as they are in memory
    bf16    16 bits for each element: the range of float32, with 8 bits of precision
    fp16    16 bits for each element, with 11 bits of precision, after multiplication by a power of two; the
            exponent of this power is sent first, as an int32
    int8    8 bits for each element: a multiple, from -127 to 127, of a scale; the scales, one float32 for
            every 256 elements, are sent first

In fp16, all elements of a tensor share one power of two, so that small gradients do not become 0.
Non-finite values remain non-finite, so that an overflow of gradients is detected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from gridtrain.errors import RemoteProtocolError

_INT8_BLOCK_ENTRIES = 256
_MAX_EXPONENT = 15  # fp16's largest exponent is 16: one bit is left for rounding
_LARGEST_SHIFT = 120


class WirePrecision(Enum):
    """The precision in which floating-point tensors are sent."""

    EXACT = "exact"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"

    def is_narrower_than(self, dtype: torch.dtype) -> bool:
        """Return whether this precision needs fewer bytes per element than `dtype`."""
        return dtype.is_floating_point and dtype.itemsize > (1 if self is WirePrecision.INT8 else 2)


def encoded_bytes(elements: int, dtype: torch.dtype, wire: WirePrecision) -> int:
    """Return the number of bytes to which `encode_tensor` encodes a tensor with this many elements."""
    match wire:
        case WirePrecision.EXACT:
            return elements * dtype.itemsize
        case WirePrecision.FP16:
            return 4 + 2 * elements
        case WirePrecision.BF16:
            return 2 * elements
        case WirePrecision.INT8:
            return 4 * -(-elements // _INT8_BLOCK_ENTRIES) + elements


def encode_tensor(tensor: Tensor, wire: WirePrecision) -> Tensor:
    """Return the encoded tensor: a one-dimensional uint8 tensor of `encoded_bytes` elements.

    For EXACT, the result shares the memory of `tensor` if that is contiguous.
    """
    flat_N = tensor.detach().contiguous().view(-1)  # `reshape` does not copy a column of a matrix
    match wire:
        case WirePrecision.EXACT:
            return flat_N.view(torch.uint8)
        case WirePrecision.BF16:
            return flat_N.to(torch.bfloat16).view(torch.uint8)
        case WirePrecision.FP16:
            return _fp16_of(flat_N.float())
        case WirePrecision.INT8:
            return _int8_of(flat_N.float())


def decode_tensor(bytes_: Tensor, shape: Sequence[int], dtype: torch.dtype, wire: WirePrecision) -> Tensor:
    """Decode a result of `encode_tensor`; for EXACT, the decoded tensor shares the memory of `bytes_`.

    Raises:
        RemoteProtocolError: the fp16 exponent is one that `encode_tensor` never writes.
    """
    match wire:
        case WirePrecision.EXACT:
            flat_N = bytes_.view(dtype) if bytes_.numel() else bytes_.new_empty(0, dtype=dtype)
        case WirePrecision.BF16:
            flat_N = bytes_.view(torch.bfloat16)
        case WirePrecision.FP16:
            flat_N = _of_fp16(bytes_)
        case WirePrecision.INT8:
            flat_N = _of_int8(bytes_, math.prod(shape))
    return flat_N.to(dtype).view(tuple(shape))


def _fp16_of(flat_N: Tensor) -> Tensor:
    shift = torch.zeros((), dtype=torch.int32, device=flat_N.device)
    if flat_N.numel():
        largest = torch.where(flat_N.isfinite(), flat_N.abs(), 0.0).max()
        exponent = torch.frexp(largest).exponent
        shift = torch.where(largest > 0, _MAX_EXPONENT - exponent, 0).clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)
    halves_N = torch.ldexp(flat_N, shift).to(torch.float16)
    return torch.cat([shift.to(torch.int32).view(1).view(torch.uint8), halves_N.view(torch.uint8)])


def _of_fp16(bytes_: Tensor) -> Tensor:
    shift = int(bytes_[:4].view(torch.int32).item())
    if abs(shift) > _LARGEST_SHIFT:
        raise RemoteProtocolError(f"fp16 values are shifted by {shift} bits; the maximum is {_LARGEST_SHIFT}")
    return torch.ldexp(bytes_[4:].view(torch.float16).float(), torch.tensor(-shift, device=bytes_.device))


def _int8_of(flat_N: Tensor) -> Tensor:
    blocks = -(-flat_N.numel() // _INT8_BLOCK_ENTRIES)
    padded = torch.nn.functional.pad(flat_N, (0, blocks * _INT8_BLOCK_ENTRIES - flat_N.numel())).view(
        blocks, _INT8_BLOCK_ENTRIES
    )
    scales_B = padded.abs().amax(dim=1) / 127 if blocks else padded.new_zeros(0)
    steps = torch.where(scales_B > 0, scales_B, 1.0)[:, None]
    levels = torch.nan_to_num(padded / steps, nan=0.0).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scales_B.view(torch.uint8), levels.view(-1)[: flat_N.numel()].view(torch.uint8)])


def _of_int8(bytes_: Tensor, elements: int) -> Tensor:
    blocks = -(-elements // _INT8_BLOCK_ENTRIES)
    scales_B = bytes_[: 4 * blocks].view(torch.float32)
    levels_N = bytes_[4 * blocks :].view(torch.int8).float()
    return levels_N * scales_B.repeat_interleave(_INT8_BLOCK_ENTRIES)[:elements]
