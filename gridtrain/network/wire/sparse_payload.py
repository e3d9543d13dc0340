"""The bytes of a sparse exchange's payload: K entries (index and value) of a flat vector of n elements.

n, the kind of values and the largest K are fixed for a generation; they are never taken from a peer's
payload.

    offset  0        8                     8 + ceil(K L / 8)       + ceil(H / 8)            end
            | header | low bits, K x L     | high bits, unary, H   | values                 |
              K u32, exponent i16, kind u16    (little-endian; in a byte, the lowest bit first)

`elias_fano` defines L and H and encodes the low and high bits of the indices; `value_encoding` encodes the
values.  K, n and the kind determine the length.  The encoding is canonical: encoding a decoded payload
produces the same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gridtrain.errors import LocalProtocolError
from gridtrain.network.wire import elias_fano, value_encoding
from gridtrain.network.wire.elias_fano import invalid_payload
from gridtrain.network.wire.value_encoding import EncodedValues, FloatArray, ValueKind

_HEADER = struct.Struct("<IhH")  # K, exponent, kind

MAX_N = 2**32
"""The largest n; the low bits of an index then fit into 32 bits."""


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The entries of a sparse vector.

    Attributes:
        indices: (K,) int64, strictly increasing.
        values: (K,) float32, finite.
    """

    indices: npt.NDArray[np.int64]
    values: FloatArray


@dataclass(frozen=True)
class EncodedSparse:
    """A payload, and the entries that `decode` returns for it.

    The indices are encoded when the payload is first read, because some results are never sent.

    Attributes:
        sparse: the decoded entries.
        values: the encoded values.
        n, kind: the length of the vector and the kind of values.
    """

    sparse: SparseVector
    values: EncodedValues
    n: int
    kind: ValueKind

    @cached_property
    def payload(self) -> bytes:
        low, high = elias_fano.encode_indices(self.sparse.indices, self.n)
        header = _HEADER.pack(self.sparse.indices.size, self.values.exponent, self.kind)
        return b"".join((header, low, high, self.values.section))


def encoded_bytes(k: int, n: int, kind: ValueKind) -> int:
    """Return the exact size in bytes of a payload with k of n entries, 0 <= k <= n."""
    return _HEADER.size + sum(elias_fano.section_bytes(k, n)) + value_encoding.section_bytes(k, n, kind)


def encode_with_decoded(
    indices: npt.NDArray[np.integer], values_K: FloatArray, *, n: int, kind: ValueKind
) -> EncodedSparse:
    """Encode entries of a flat vector of n elements; return the payload and the decoded entries.

    The encoding rounds the values once; the sender continues with the decoded values, as the receivers do.
    With int4 and int2, entries that are zero or too small for their block's scale are left out.
    `value - decoded value` is exactly representable in float32, so a residual can store the difference
    without loss.

    Args:
        indices: (K,) integers, strictly increasing, 0 <= index < n.
        values_K: (K,) float32, finite.
        n: the number of elements of the vector, at most 2**32.
        kind: the encoding of the values.

    Raises:
        LocalProtocolError: an argument is invalid.
    """
    _check_local(indices, values_K, n)
    made = value_encoding.encode_values(indices.astype(np.int64, copy=False), values_K, n, kind)
    return EncodedSparse(SparseVector(made.indices_K, made.decoded_K), made, n, kind)


def encode(indices: npt.NDArray[np.integer], values_K: FloatArray, *, n: int, kind: ValueKind) -> bytes:
    """Return the payload of `encode_with_decoded`."""
    return encode_with_decoded(indices, values_K, n=n, kind=kind).payload


def decode(buffer: bytes | memoryview, *, n: int, max_entries: int, kind: ValueKind) -> SparseVector:
    """Decode and check a peer's payload.

    Args:
        buffer: the payload.
        n, kind: the length of the vector and the kind of values, as fixed by the generation.
        max_entries: the largest K to accept.

    Raises:
        RemoteProtocolError: the buffer is not a canonical payload of at most `max_entries` finite entries
            with indices below n.  Before this is known, no more than a small multiple of the buffer's size is
            allocated.
    """
    k, exponent = _read_header(memoryview(buffer), n, max_entries, kind)
    body = np.frombuffer(buffer, np.uint8, offset=_HEADER.size)
    low_bytes, high_bytes = elias_fano.section_bytes(k, n)
    low, high = body[:low_bytes], body[low_bytes : low_bytes + high_bytes]
    indices_K = elias_fano.decode_indices(low, high, k, n)
    section = body[low_bytes + high_bytes :]
    return SparseVector(indices_K, value_encoding.decode_values(section, indices_K, n, exponent, kind))


# -- encode ------------------------------------------------------------------------------------


def _check_local(indices: npt.NDArray[np.integer], values_K: FloatArray, n: int) -> None:
    if not 1 <= n <= MAX_N:
        raise LocalProtocolError(f"a sparse vector has {n} elements; it must have between 1 and {MAX_N}")
    if indices.shape != values_K.shape or indices.ndim != 1 or values_K.dtype != np.float32:
        raise LocalProtocolError(
            f"indices have shape {indices.shape}, and values have shape {values_K.shape} and type "
            f"{values_K.dtype}; both shapes must be (K,), and values must be float32"
        )
    if indices.size and (indices[0] < 0 or indices[-1] >= n or not (indices[1:] > indices[:-1]).all()):
        raise LocalProtocolError(f"sparse indices must be strictly increasing and in 0 .. {n - 1}")
    if not np.isfinite(values_K).all():
        raise LocalProtocolError(
            "a sparse payload cannot contain infinite or NaN values", remedy="vote to skip the step instead"
        )


# -- decode -----------------------------------------------------------------------------------


def _read_header(data: memoryview, n: int, max_entries: int, kind: ValueKind) -> tuple[int, int]:
    """Return (K, exponent) after checking the header against the generation's settings and the length.

    Nothing is allocated before this check.
    """
    if data.nbytes < _HEADER.size:
        raise invalid_payload(
            f"a sparse payload has {data.nbytes} bytes; its header alone has {_HEADER.size} bytes"
        )
    k, exponent, sent_kind = _HEADER.unpack_from(data)
    if sent_kind != kind:
        raise invalid_payload(
            f"a sparse payload has value kind {sent_kind}; this generation uses {kind} ({kind.name})"
        )
    if k > min(max_entries, n):
        raise invalid_payload(
            f"a sparse payload has {k} of {n} entries; at most {min(max_entries, n)} are allowed"
        )
    expected = encoded_bytes(k, n, kind)
    if data.nbytes != expected:
        raise invalid_payload(
            f"a sparse payload has {data.nbytes} bytes; {k} {kind.name} entries of {n} take {expected}"
        )
    return k, exponent
