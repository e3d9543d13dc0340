"""The payload of a sparse exchange: K (index, value) entries of a flat vector of n elements.

n, the kind of values and the largest K are fixed by the generation, and never taken from a peer.

    offset  0        8                     8 + ceil(K L / 8)       + ceil(H / 8)            end
            | header | low bits, K x L     | high bits, unary, H   | values                 |
              K u32, exponent i16, kind u16    (little-endian; in a byte, the lowest bit first)

`elias_fano` has the two bit fields, `value_encoding` the values.  K, n and the kind fix the length.  The
encoding is canonical: `encode` turns what `decode` accepts into the same bytes again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire import elias_fano, value_encoding
from gridtrain.network.wire.value_encoding import ValueKind

__all__ = [
    "MAX_N",
    "EncodedSparse",
    "SparseVector",
    "ValueKind",
    "decode",
    "encode",
    "encode_with_decoded",
    "encoded_bytes",
]

_HEADER = struct.Struct("<IhH")  # K, exponent, kind

MAX_N = 2**32
"""Largest n, so that the low bits of an index fit 32 bits."""


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Decoded entries: `indices` (K,) int64, strictly increasing; `values` (K,) float32, finite."""

    indices: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodedSparse:
    """A payload, and what it decodes to."""

    payload: bytes
    sparse: SparseVector


def encoded_bytes(k: int, n: int, kind: ValueKind) -> int:
    """Exact size in bytes of a payload with k of n entries, 0 <= k <= n."""
    return _HEADER.size + sum(elias_fano.section_bytes(k, n)) + value_encoding.section_bytes(k, kind)


def encode_with_decoded(
    indices: npt.NDArray[np.integer], values_K: npt.NDArray[np.float32], *, n: int, kind: ValueKind
) -> EncodedSparse:
    """Encode entries of a flat vector of n elements; returns the payload and what it decodes to.

    Values are rounded here, once; the sender continues with the decoded values, as the receiver does.
    `value - decoded value` is exactly representable in float32, so a residual can store it without loss.

    Args:
        indices: (K,) integers, strictly increasing, 0 <= index < n.
        values_K: (K,) float32, finite.
        n: elements of the vector, at most 2**32.

    Raises:
        LocalProtocolError: the arguments are not as described.
    """
    k = _check_local(indices, values_K, n)
    indices_K = indices.astype(np.int64, copy=False)
    value_section, exponent, decoded_K = value_encoding.encode_values(values_K, kind)
    low, high = elias_fano.encode_indices(indices_K, n)
    payload = b"".join((_HEADER.pack(k, exponent, kind), low, high, value_section))
    return EncodedSparse(payload, SparseVector(indices_K, decoded_K))


def encode(
    indices: npt.NDArray[np.integer], values_K: npt.NDArray[np.float32], *, n: int, kind: ValueKind
) -> bytes:
    """The payload of `encode_with_decoded`."""
    return encode_with_decoded(indices, values_K, n=n, kind=kind).payload


def decode(buffer: bytes | memoryview, *, n: int, max_entries: int, kind: ValueKind) -> SparseVector:
    """Decode and check a peer's payload.

    Args:
        n, kind: of the generation.
        max_entries: the largest K to accept.

    Raises:
        RemoteProtocolError: not a canonical payload of at most max_entries finite entries below n.
            Nothing larger than a small multiple of the buffer is allocated before that is known.
    """
    k, exponent = _read_header(memoryview(buffer), n, max_entries, kind)
    body = np.frombuffer(buffer, np.uint8, offset=_HEADER.size)
    low_bytes, high_bytes = elias_fano.section_bytes(k, n)
    low, high, section = np.split(body, (low_bytes, low_bytes + high_bytes))
    return SparseVector(
        elias_fano.decode_indices(low, high, k, n), value_encoding.decode_values(section, k, exponent, kind)
    )


# -- encode ------------------------------------------------------------------------------------


def _check_local(indices: npt.NDArray[np.integer], values_K: npt.NDArray[np.float32], n: int) -> int:
    if not 1 <= n <= MAX_N:
        raise LocalProtocolError(f"sparse vector of {n} elements, must be 1 .. {MAX_N}")
    if indices.shape != values_K.shape or indices.ndim != 1 or values_K.dtype != np.float32:
        raise LocalProtocolError(
            f"sparse entries of shapes {indices.shape} and {values_K.shape}, {values_K.dtype}: "
            "must be (K,) and (K,) float32"
        )
    if indices.size and (indices[0] < 0 or indices[-1] >= n or not (indices[1:] > indices[:-1]).all()):
        raise LocalProtocolError(f"sparse indices must be strictly increasing and in 0 .. {n - 1}")
    if not np.isfinite(values_K).all():
        raise LocalProtocolError(
            "a sparse payload cannot carry infinite or NaN values", remedy="vote to skip the step instead"
        )
    return indices.size


# -- decode -----------------------------------------------------------------------------------


def _invalid(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        reason, remedy="drop the peer; all members of a run use the same exchange and version of gridtrain"
    )


def _read_header(data: memoryview, n: int, max_entries: int, kind: ValueKind) -> tuple[int, int]:
    """K and exponent, checked against the generation and the length, before anything is allocated."""
    if data.nbytes < _HEADER.size:
        raise _invalid(f"sparse payload of {data.nbytes} bytes, shorter than its {_HEADER.size}-byte header")
    k, exponent, sent_kind = _HEADER.unpack_from(data)
    _check_kind(sent_kind, kind)
    _check_entries(k, max_entries, n)
    _check_length(data.nbytes, k, n, kind)
    return k, exponent


def _check_kind(sent_kind: int, kind: ValueKind) -> None:
    if sent_kind != kind:
        raise _invalid(f"sparse payload of value kind {sent_kind}, this generation's is {kind} ({kind.name})")


def _check_entries(k: int, max_entries: int, n: int) -> None:
    if k > min(max_entries, n):
        raise _invalid(f"sparse payload of {k} entries, at most {min(max_entries, n)} of {n} are allowed")


def _check_length(payload_bytes: int, k: int, n: int, kind: ValueKind) -> None:
    expected = encoded_bytes(k, n, kind)
    if payload_bytes != expected:
        raise _invalid(
            f"sparse payload of {payload_bytes} bytes, {k} {kind.name} entries of {n} take {expected}"
        )
