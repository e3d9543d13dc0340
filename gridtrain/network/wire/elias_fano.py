"""The bytes of a sparse payload's indices in Elias-Fano encoding: K strictly increasing integers below n.

    index i   | high part: bit (index_i >> L) + i of a section of H bits | low part: L bits at bit i L |
    L = floor(log2(n / K)), H = K + ((n - 1) >> L) < 3 K

(Elias 1974, Fano 1971; the quasi-succinct indices of Vigna 2013, section 4.)  K and n determine the lengths
of both sections, and a set of indices has only one encoding.

Low parts are packed in groups of eight.  Eight parts of L bits take exactly L bytes, so the i-th part has the
same position in each group, and the i-th parts of all groups are shifted in one operation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gridtrain.errors import RemoteProtocolError

IndexArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

_GROUP = 8


def section_bytes(k: int, n: int) -> tuple[int, int]:
    """Return the sizes, in bytes, of the low bits and of the high bits of k indices below n."""
    low_width, high_width = bit_widths(k, n)
    return (k * low_width + 7) // 8, (high_width + 7) // 8


def encode_indices(indices_K: IndexArray, n: int) -> tuple[bytes, bytes]:
    """Encode (K,) strictly increasing indices below n; return the sections of low bits and of high bits."""
    k = indices_K.size
    low_width, high_width = bit_widths(k, n)
    high_bits = np.zeros(high_width, np.uint8)
    high_bits[(indices_K >> low_width) + np.arange(k)] = 1
    return _pack(indices_K, low_width), np.packbits(high_bits, bitorder="little").tobytes()


def decode_indices(low: ByteArray, high: ByteArray, k: int, n: int) -> IndexArray:
    """Decode (K,) int64 indices from sections with the lengths that `section_bytes` returns.

    Raises:
        RemoteProtocolError: the sections do not contain K strictly increasing indices below n.
    """
    low_width, high_width = bit_widths(k, n)
    _check_padding("low", low, k * low_width)
    _check_padding("high", high, high_width)
    # Viewing the bits as booleans makes `flatnonzero` seven times as fast.
    ones = np.flatnonzero(np.unpackbits(high, count=high_width, bitorder="little").view(np.bool_))
    if ones.size != k:
        raise invalid_payload(
            f"the high bits of a sparse payload contain {ones.size} entries; its header specifies {k}"
        )
    ones -= np.arange(k)
    indices = ones << low_width
    if low_width:
        indices |= _unpack(low, k, low_width)
    if k and (indices[-1] >= n or not (indices[1:] > indices[:-1]).all()):
        raise invalid_payload(f"sparse indices must be strictly increasing and below {n}")
    return indices


def bit_widths(k: int, n: int) -> tuple[int, int]:
    """Return (L, H), the number of bits of one low part and of the whole high part."""
    if k == 0:
        return 0, 0
    low_width = (n // k).bit_length() - 1
    return low_width, k + ((n - 1) >> low_width)


def _pack(indices_K: IndexArray, width: int) -> bytes:
    k = indices_K.size
    if not width or not k:
        return b""
    groups = -(-k // _GROUP)
    fields = np.zeros((groups, _GROUP), np.uint64)
    fields.reshape(-1)[:k] = indices_K
    fields &= np.uint64((1 << width) - 1)
    words = np.zeros((groups, -(-width // 8)), "<u8")
    for i, field in enumerate(np.ascontiguousarray(fields.T)):
        word, shift = divmod(i * width, 64)
        words[:, word] |= field << np.uint64(shift)
        if shift + width > 64:
            words[:, word + 1] |= field >> np.uint64(64 - shift)
    return words.view(np.uint8)[:, :width].tobytes()[: (k * width + 7) // 8]


def _unpack(low: ByteArray, k: int, width: int) -> IndexArray:
    groups = -(-k // _GROUP)
    padded = np.zeros(groups * width, np.uint8)
    padded[: low.size] = low
    in_words = np.zeros((groups, -(-width // 8) * 8), np.uint8)
    in_words[:, :width] = padded.reshape(groups, width)
    words = np.ascontiguousarray(in_words.view("<u8").T)
    fields = np.empty((groups, _GROUP), np.uint64)
    for i in range(_GROUP):
        word, shift = divmod(i * width, 64)
        field = words[word] >> np.uint64(shift)
        if shift + width > 64:
            field |= words[word + 1] << np.uint64(64 - shift)
        fields[:, i] = field
    fields &= np.uint64((1 << width) - 1)
    return fields.view(np.int64).reshape(-1)[:k]


def invalid_payload(reason: str) -> RemoteProtocolError:
    """Return the error for a payload that no correct member of the run sends."""
    return RemoteProtocolError(
        reason,
        remedy="check that all members of the run use the same exchange and gridtrain version",
    )


def _check_padding(name: str, section: ByteArray, width: int) -> None:
    if width % 8 and section[-1] >> (width % 8):
        raise invalid_payload(f"the padding after the {name} bits of a sparse payload is not zero")
