"""The payload of a sparse exchange: K (index, value) entries of a flat vector of n elements.

Decides how sorted indices and float values become bytes, and whether bytes from a peer are such a
payload.  Never decides which entries travel, never merges, and never learns n, the kind of values
or the largest K from the peer: those come from the generation.

    offset  0        8                     8 + ceil(K L / 8)       + ceil(H / 8)            end
            | header | low bits, K x L     | high bits, unary, H   | values, K x 2 or 4 B  |
              K u32, exponent i16, kind u16    (little-endian; in a byte, the lowest bit first)

Indices are in Elias-Fano form (Elias 1974, Fano 1971; the quasi-succinct indices of Vigna 2013,
section 4): L = floor(log2(n / K)) low bits each, as they are; of the high part, entry i sets bit
(index_i >> L) + i in a field of H = K + ((n - 1) >> L) bits, H < 3 K.  So K and n alone fix the length of
the buffer, and the low and high bits of given indices can be written in one way only.

The encoding is canonical: whatever `decode` accepts, `encode` turns into the same bytes again.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from gridtrain.errors import LocalProtocolError, RemoteProtocolError

_HEADER = struct.Struct("<IhH")  # K, exponent, kind

MAX_N = 2**32
"""Largest n: the low bits of an index fit 32 bits."""

# fp16: values travel as v / 2**exponent with the largest magnitude in [2**14, 2**15).  That is one
# binade below fp16's last, so that no rounding reaches infinity, and far from its subnormals.
_TOP_BITS_MIN = 0x7400  # 2**14 as fp16
_TOP_BITS_MAX = 0x77FF  # 2**15 - 16, the largest fp16 below 2**15
_EXPONENT_MIN = -149 - 14  # the largest magnitude is float32's smallest subnormal, 2**-149
_EXPONENT_MAX = 127 - 14  # ... is in float32's last binade
_EXPONENT_LOSSLESS = -149 + 24  # from here up every fp16 times 2**exponent is a float32


class ValueKind(IntEnum):
    """How values travel.  Fixed by the generation.  (2 and 3 are kept for bf16 and int8.)"""

    FP32 = 0
    FP16 = 1


_VALUE_DTYPE: dict[ValueKind, np.dtype[np.floating]] = {
    ValueKind.FP32: np.dtype("<f4"),
    ValueKind.FP16: np.dtype("<f2"),
}


@dataclass(frozen=True, slots=True)
class Sparse:
    """Decoded entries: `indices` (K,) int64, strictly increasing; `values` (K,) float32, finite."""

    indices: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


def encoded_bytes(k: int, n: int, kind: ValueKind) -> int:
    """The exact size in bytes of a payload of k of n entries, 0 <= k <= n."""
    return _HEADER.size + sum(_section_bytes(k, n, kind))


def encode(
    indices: npt.NDArray[np.integer], values: npt.NDArray[np.float32], *, n: int, kind: ValueKind
) -> bytes:
    """Encode entries of a flat vector of n elements.

    Values are rounded here, once; the sender goes on with `decode` of these bytes, as the receiver
    does.  `value - decoded value` is exactly representable in float32, so it can be kept whole in
    a residual.

    Args:
        indices: (K,) integers, strictly increasing, 0 <= index < n.
        values: (K,) float32, finite.
        n: elements of the vector, at most 2**32.

    Raises:
        LocalProtocolError: the arguments are not as described.
    """
    k = _check_ours(indices, values, n)
    value_bits, exponent = _to_fp16(values) if kind is ValueKind.FP16 else (values.astype("<f4"), 0)
    low_width, high_width = _widths(k, n)
    indices_K = indices.astype(np.int64)
    high_bits = np.zeros(high_width, np.uint8)
    high_bits[(indices_K >> low_width) + np.arange(k)] = 1
    return b"".join(
        (
            _HEADER.pack(k, exponent, kind),
            _pack_low(indices_K, low_width),
            np.packbits(high_bits, bitorder="little").tobytes(),
            value_bits.tobytes(),
        )
    )


def decode(buffer: bytes | memoryview, *, n: int, max_entries: int, kind: ValueKind) -> Sparse:
    """Decode and check a peer's payload.

    Args:
        n, kind: of the generation.
        max_entries: the largest K to accept.

    Raises:
        RemoteProtocolError: not a canonical payload of at most max_entries finite entries below n.
            Nothing larger than a small multiple of the buffer was allocated before that was known.
    """
    k, exponent = _read_header(memoryview(buffer), n, max_entries, kind)
    body = np.frombuffer(buffer, np.uint8, offset=_HEADER.size)
    low_bytes, high_bytes, _ = _section_bytes(k, n, kind)
    low, high, value = np.split(body, (low_bytes, low_bytes + high_bytes))
    return Sparse(
        _read_indices(low, high, k, n), _read_values(value.view(_VALUE_DTYPE[kind]), exponent, kind)
    )


# -- sizes -------------------------------------------------------------------------------------


def _widths(k: int, n: int) -> tuple[int, int]:
    """(L low bits an index, H bits of the whole high part) of Elias-Fano."""
    if k == 0:
        return 0, 0
    low_width = (n // k).bit_length() - 1
    return low_width, k + ((n - 1) >> low_width)


def _section_bytes(k: int, n: int, kind: ValueKind) -> tuple[int, int, int]:
    low_width, high_width = _widths(k, n)
    return (k * low_width + 7) // 8, (high_width + 7) // 8, k * _VALUE_DTYPE[kind].itemsize


# -- ours --------------------------------------------------------------------------------------


def _check_ours(indices: npt.NDArray[np.integer], values: npt.NDArray[np.float32], n: int) -> int:
    if not 1 <= n <= MAX_N:
        raise LocalProtocolError(f"sparse vector of {n} elements, must be 1 .. {MAX_N}")
    if indices.shape != values.shape or indices.ndim != 1 or values.dtype != np.float32:
        raise LocalProtocolError(
            f"sparse entries of shapes {indices.shape} and {values.shape}, {values.dtype}: "
            "must be (K,) and (K,) float32"
        )
    if indices.size and (indices[0] < 0 or indices[-1] >= n or not (indices[1:] > indices[:-1]).all()):
        raise LocalProtocolError(f"sparse indices must be strictly increasing and in 0 .. {n - 1}")
    if not np.isfinite(values).all():
        raise LocalProtocolError(
            "a sparse payload cannot carry infinite or NaN values", remedy="vote to skip the step instead"
        )
    return indices.size


def _pack_low(indices_K: npt.NDArray[np.int64], low_width: int) -> bytes:
    if low_width == 0:
        return b""
    as_bytes = indices_K.astype("<u4").view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(as_bytes, axis=1, count=low_width, bitorder="little")
    return np.packbits(bits, bitorder="little").tobytes()


def _to_fp16(values_K: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float16], int]:
    top = float(np.abs(values_K).max(initial=0.0))
    if top == 0.0:
        return values_K.astype("<f2"), 0  # keeps the sign of -0.0
    exponent = math.frexp(top)[1] - 15
    # Exact, save for what is far below fp16's smallest subnormal: zero with or without this step.
    with np.errstate(under="ignore"):
        fp16 = np.ldexp(values_K, -exponent).astype("<f2")
    # What would round up to 2**15 stays one fp16 below it, so that the decoded maximum is in the
    # same binade: the encoding is canonical, and float32's largest value does not become infinite.
    bits = fp16.view("<u2")
    bits[(bits & 0x7FFF) > _TOP_BITS_MAX] -= 1
    return fp16, exponent


# -- the peer's --------------------------------------------------------------------------------


def _refused(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        reason, remedy="drop the peer; all members of a run use the same exchange and version of gridtrain"
    )


def _read_header(data: memoryview, n: int, max_entries: int, kind: ValueKind) -> tuple[int, int]:
    """K and exponent, checked against the generation and the length, before anything is allocated."""
    if data.nbytes < _HEADER.size:
        raise _refused(f"sparse payload of {data.nbytes} bytes, shorter than its {_HEADER.size}-byte header")
    k, exponent, sent_kind = _HEADER.unpack_from(data)
    _check_kind(sent_kind, kind)
    _check_entries(k, max_entries, n)
    _check_length(data.nbytes, k, n, kind)
    return k, exponent


def _check_kind(sent_kind: int, kind: ValueKind) -> None:
    if sent_kind != kind:
        raise _refused(f"sparse payload of value kind {sent_kind}, this generation's is {kind} ({kind.name})")


def _check_entries(k: int, max_entries: int, n: int) -> None:
    if k > min(max_entries, n):
        raise _refused(f"sparse payload of {k} entries, at most {min(max_entries, n)} of {n} are allowed")


def _check_length(payload_bytes: int, k: int, n: int, kind: ValueKind) -> None:
    expected = encoded_bytes(k, n, kind)
    if payload_bytes != expected:
        raise _refused(
            f"sparse payload of {payload_bytes} bytes, {k} {kind.name} entries of {n} take {expected}"
        )


def _read_indices(
    low: npt.NDArray[np.uint8], high: npt.NDArray[np.uint8], k: int, n: int
) -> npt.NDArray[np.int64]:
    low_width, high_width = _widths(k, n)
    _check_padding("low", low, k * low_width)
    _check_padding("high", high, high_width)
    ones = np.flatnonzero(np.unpackbits(high, count=high_width, bitorder="little"))
    _check_popcount(ones.size, k)
    indices = (ones - np.arange(k)) << low_width
    indices |= _unpack_low(low, k, low_width)
    _check_order(indices, n)
    return indices


def _check_padding(name: str, section: npt.NDArray[np.uint8], width: int) -> None:
    if width % 8 and section[-1] >> (width % 8):
        raise _refused(f"padding after the {name} bits of a sparse payload is not zero")


def _check_popcount(ones: int, k: int) -> None:
    if ones != k:
        raise _refused(f"high bits of a sparse payload hold {ones} entries, its header says {k}")


def _check_order(indices_K: npt.NDArray[np.int64], n: int) -> None:
    if indices_K.size and (indices_K[-1] >= n or not (indices_K[1:] > indices_K[:-1]).all()):
        raise _refused(f"sparse indices are not strictly increasing and below {n}")


def _unpack_low(low: npt.NDArray[np.uint8], k: int, low_width: int) -> npt.NDArray[np.int64]:
    """Read each field from the 64-bit word that starts at its first byte: 32 + 7 bits are enough."""
    padded = low.tobytes() + bytes(8)
    # One word at every byte offset; they overlap.
    words: npt.NDArray[np.uint64] = np.ndarray((low.size + 1,), "<u8", padded, strides=(1,))
    at = np.arange(k) * low_width
    fields: npt.NDArray[np.uint64] = words[at >> 3] >> (at & 7).astype(np.uint64)
    return (fields & np.uint64((1 << low_width) - 1)).astype(np.int64)


def _read_values(raw: npt.NDArray[np.floating], exponent: int, kind: ValueKind) -> npt.NDArray[np.float32]:
    if kind is ValueKind.FP32:
        if exponent != 0:
            raise _refused(f"scale exponent {exponent} of fp32 values, must be 0")
        _check_finite(raw)
        return raw.astype(np.float32)
    _check_scale(int((raw.view("<u2") & 0x7FFF).max(initial=0)), exponent)
    with np.errstate(under="ignore"):
        values = np.ldexp(raw.astype(np.float32), exponent)
    if exponent < _EXPONENT_LOSSLESS and not (np.ldexp(values, -exponent) == raw).all():
        raise _refused(f"fp16 values with scale exponent {exponent} are finer than float32 can hold")
    return values


def _check_finite(values_K: npt.NDArray[np.floating]) -> None:
    if not np.isfinite(values_K).all():
        raise _refused("sparse payload holds infinite or NaN values")


def _check_scale(top_bits: int, exponent: int) -> None:
    """Of fp16 values: one comparison covers NaN, infinity and a scale that is not the canonical one."""
    zeros_only = top_bits == 0 and exponent == 0
    if not zeros_only and not (
        _TOP_BITS_MIN <= top_bits <= _TOP_BITS_MAX and _EXPONENT_MIN <= exponent <= _EXPONENT_MAX
    ):
        raise _refused(
            f"fp16 values with largest magnitude {top_bits:#06x} and scale exponent {exponent}: must be "
            f"{_TOP_BITS_MIN:#06x} .. {_TOP_BITS_MAX:#06x} (2^14 <= |v| < 2^15) and "
            f"{_EXPONENT_MIN} .. {_EXPONENT_MAX}"
        )
