"""The bytes of a dense exchange's payload: all elements of a slice as fp32, bf16 or int8.

The number of elements and the kind of values are known to the receiver, so a payload has no header.
`value_encoding` encodes the values; each slice starts with a new block of int8 values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gridtrain.network.wire.value_encoding import (
    ByteArray,
    FloatArray,
    ValueKind,
    decode_values,
    encode_values,
    section_bytes,
)


def slice_bytes(elements: int, kind: ValueKind) -> int:
    """Return the size in bytes of the payload of a slice with this number of elements."""
    return section_bytes(elements, elements, kind)


def encode_slice(values_B: FloatArray, kind: ValueKind) -> tuple[bytes, FloatArray]:
    """Encode (B,) finite float32 values; return the payload and the values as `decode_slice` returns them.

    The difference between a value and its rounded value is exactly representable in float32.
    """
    made = encode_values(_indices(values_B.size), values_B, values_B.size, kind)
    return made.section, made.decoded_K


def decode_slice(payload: ByteArray, elements: int, kind: ValueKind) -> FloatArray:
    """Decode a payload of `slice_bytes(elements, kind)` bytes; return finite float32 values.

    Raises:
        RemoteProtocolError: `encode_slice` cannot produce this payload.
    """
    return decode_values(payload, _indices(elements), elements, 0, kind)


def _indices(elements: int) -> npt.NDArray[np.int64]:
    """Return placeholder indices, one per element, which take no memory; dense kinds do not read them."""
    return np.broadcast_to(np.int64(0), elements)
