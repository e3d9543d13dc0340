"""The bytes of a sparse payload's values in 4 or 2 bits (int4, int2): multiples of a scale for each block.

    kind   bits                     magnitudes, as multiples of the scale    scales
    int4   sign and 3 of magnitude  1/2, 1, 2, 3, 4, 5, 6, 7                 2**e
    int2   sign and 1 of magnitude  3/8, 1                                   (1, 1.25, 1.5 or 1.75) * 2**e

    indices   | the first 2**(L + 6) | the next 2**(L + 6) | ...        L as in `elias_fano`
    blocks    | scale                | scale               | ...
    section   | scales of all blocks, 2 bytes each | codes of all entries, lowest bits of a byte first |

The entries whose indices lie in the same range of 2**(L + 6) indices form a block, which has 32 to 64 entries
on average.

An entry v is sent as q only if v / 2 <= q <= 2 v in magnitude.  The remainder v - q is then exactly
representable in float32 (Sterbenz' lemma).  Entries that are too small for their block's scale are left out
of the payload.  No q exceeds the largest magnitude of its block, so repeated rounding cannot increase the
bound on a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gridtrain.network.wire import elias_fano
from gridtrain.network.wire.elias_fano import invalid_payload

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

_BLOCK_SHIFT = 6  # a block has 2**6 times as many indices as the low bits of an index distinguish
_EXPONENT_MIN = -126  # of a scale; all rounded values are then multiples of float32's smallest subnormal
_NOT_SENT = 255  # in place of a level


@dataclass(frozen=True, slots=True)
class LevelCode:
    """A code that consists of a sign and a level.

    Attributes:
        name: the name of the kind.
        bits: the number of bits in a code, which holds the level's number and, above it, the sign.
        levels: the magnitudes, as multiples of the scale, ascending.
        limits: the smallest magnitude that is rounded to each level, as a multiple of the scale.
        top: the lower bound of a block's largest magnitude, as a multiple of the scale; the magnitude is less
            than twice this bound.
        steps: the number of scales between two successive powers of two.
        max_scale: the index of the largest scale.
    """

    name: str
    bits: int
    levels: tuple[float, ...]
    limits: tuple[float, ...]
    top: float
    steps: int
    max_scale: int

    @property
    def mask(self) -> int:
        """The mask of the bits of a code that hold the level's number."""
        return len(self.levels) - 1


INT4 = LevelCode("int4", 4, (0.5, *range(1, 8)), (0.25, 0.75, *(m + 0.5 for m in range(1, 7))), 4.0, 1, 125)
INT2 = LevelCode("int2", 2, (0.375, 1.0), (0.1875, 0.6875), 1.0, 4, 4 * 127 + 3)


def section_bytes(k: int, n: int, code: LevelCode) -> int:
    """Return the size in bytes of the encoded values of k out of n elements."""
    return 2 * _block_count(k, n) + -(-k * code.bits // 8)


def write_levels(
    indices_K: IndexArray, values_K: FloatArray, n: int, code: LevelCode
) -> tuple[IndexArray, bytes, FloatArray]:
    """Encode K finite float32 values of a vector of n elements.

    Returns the positions in `indices_K` of the entries that are sent, the encoded section, and the values of
    these entries as `read_levels` returns them.
    """
    sent_K, shift = np.flatnonzero(values_K), -1
    while shift != (shift := _block_shift(sent_K.size, n)):  # ends, because fewer entries make wider blocks
        blocks_K = indices_K.take(sent_K) >> shift
        starts_B, counts_B = _runs(blocks_K)
        scales_B, levels_K = _choose(values_K.take(sent_K), starts_B, counts_B, code)
        kept = np.flatnonzero(levels_K != _NOT_SENT)
        sent_K, blocks_K, levels_K = sent_K.take(kept), blocks_K.take(kept), levels_K.take(kept)
        scales_K = np.repeat(scales_B, counts_B).take(kept)
    words_B = np.zeros(_block_count(sent_K.size, n), "<i2")
    words_B[blocks_K] = scales_K
    signs_K = np.signbit(values_K.take(sent_K)).view(np.uint8)
    codes_K = levels_K | (signs_K << np.uint8(code.bits - 1))
    decoded_K = _decode(codes_K, words_B, blocks_K, code)
    return sent_K, words_B.tobytes() + _pack(codes_K, code.bits), decoded_K


def read_levels(section: ByteArray, indices_K: IndexArray, n: int, code: LevelCode) -> FloatArray:
    """Decode a section of `section_bytes(K, n, code)` bytes; return (K,) finite float32 values.

    Raises:
        RemoteProtocolError: `write_levels` cannot produce this section for these indices.
    """
    k, blocks = indices_K.size, _block_count(indices_K.size, n)
    words_B = section[: 2 * blocks].view("<i2")
    codes_K = _unpack(section[2 * blocks :], k, code)
    blocks_K = indices_K >> _block_shift(k, n)
    starts_B, _ = _runs(blocks_K)
    tops_B = np.full(blocks, -1)
    if k:
        tops_B[blocks_K.take(starts_B)] = np.maximum.reduceat(codes_K & code.mask, starts_B)
    _check_levels(tops_B, words_B, code)
    return _decode(codes_K, words_B, blocks_K, code)


def _check_levels(tops_B: IndexArray, words_B: npt.NDArray[np.int16], code: LevelCode) -> None:
    """Raise `RemoteProtocolError` unless each block's largest level and scale are in range.

    A block without entries must have the level -1 in `tops_B`, and the scale 0.
    """
    least, most, top = _EXPONENT_MIN * code.steps, code.max_scale, code.levels.index(code.top)
    good = np.where(tops_B < 0, words_B == 0, (words_B >= least) & (words_B <= most) & (tops_B >= top))
    if not good.all():
        first = int(np.argmin(good))
        raise invalid_payload(
            f"{code.name} values have the largest level {tops_B[first]} and scale {words_B[first]} in block "
            f"{first}; the level must be {top} to {len(code.levels) - 1} and the scale {least} to {most}, "
            "or -1 and 0 if the block is empty"
        )


def _block_shift(k: int, n: int) -> int:
    return elias_fano.bit_widths(k, n)[0] + _BLOCK_SHIFT


def _block_count(k: int, n: int) -> int:
    return ((n - 1) >> _block_shift(k, n)) + 1 if k else 0


def _runs(blocks_K: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return the first position and the length of each run of entries in the same block."""
    is_first_K = np.ones(blocks_K.size, np.bool_)
    np.not_equal(blocks_K[1:], blocks_K[:-1], out=is_first_K[1:])
    starts_B = np.flatnonzero(is_first_K)
    return starts_B, np.diff(starts_B, append=blocks_K.size)


def _scale_values(words_B: npt.NDArray[np.integer], code: LevelCode) -> DoubleArray:
    """Return the scales with these numbers; the number steps * e + m stands for (1 + m / steps) * 2**e."""
    exponents, rest = np.divmod(words_B.astype(np.int64), code.steps)
    return np.ldexp(1.0 + rest / code.steps, exponents)


def _choose(
    values_K: FloatArray, starts_B: IndexArray, counts_B: IndexArray, code: LevelCode
) -> tuple[IndexArray, ByteArray]:
    """Return the index of each block's scale and of each entry's level.

    The largest magnitude of a block is between top and 2 top times the scale.  Of the scales with this
    property, the one with the least squared error is chosen; ties go to the largest.
    """
    magnitudes_K = np.abs(values_K.astype(np.float64))
    tops_B = np.maximum.reduceat(magnitudes_K, starts_B) if starts_B.size else np.zeros(0)
    fractions_B, exponents_B = np.frexp(tops_B / code.top)
    largest_B = code.steps * (exponents_B.astype(np.int64) - 1)
    largest_B += ((2.0 * fractions_B - 1.0) * code.steps).astype(np.int64)
    scales_B, levels_K = largest_B, _levels(magnitudes_K, tops_B, counts_B, largest_B, code)
    if code.steps == 1 or not starts_B.size:
        return scales_B, levels_K
    least_B = _errors(magnitudes_K, levels_K, scales_B, starts_B, counts_B, code)
    for step in range(1, code.steps):
        others_B = largest_B - step
        others_K = _levels(magnitudes_K, tops_B, counts_B, others_B, code)
        errors_B = _errors(magnitudes_K, others_K, others_B, starts_B, counts_B, code)
        is_less_B = errors_B < least_B
        least_B, scales_B = np.where(is_less_B, (errors_B, others_B), (least_B, scales_B))
        levels_K = np.where(np.repeat(is_less_B, counts_B), others_K, levels_K)
    return scales_B.astype(np.int64), levels_K


def _levels(
    magnitudes_K: DoubleArray,
    tops_B: DoubleArray,
    counts_B: IndexArray,
    scales_B: IndexArray,
    code: LevelCode,
) -> ByteArray:
    """Return the index of the level to which each magnitude is rounded, in blocks with these scales."""
    units_B = _scale_values(scales_B, code)
    multiples_K = magnitudes_K / np.repeat(units_B, counts_B)
    # Never round up beyond the block's largest magnitude.
    np.minimum(multiples_K, np.repeat(np.floor(tops_B / units_B), counts_B), out=multiples_K)
    levels_K = np.zeros(magnitudes_K.size, np.uint8)
    for limit in code.limits[1:]:
        levels_K += multiples_K >= limit
    multiples_K[np.repeat(scales_B < _EXPONENT_MIN * code.steps, counts_B)] = 0.0
    levels_K[multiples_K < code.limits[0]] = _NOT_SENT
    return levels_K


def _errors(
    magnitudes_K: DoubleArray,
    levels_K: ByteArray,
    scales_B: IndexArray,
    starts_B: IndexArray,
    counts_B: IndexArray,
    code: LevelCode,
) -> DoubleArray:
    """Return the sum of the squared rounding errors of each block."""
    table = np.zeros(_NOT_SENT + 1)
    table[: len(code.levels)] = code.levels
    rounded_K = table.take(levels_K) * np.repeat(_scale_values(scales_B, code), counts_B)
    return np.add.reduceat((magnitudes_K - rounded_K) ** 2, starts_B)


def _decode(
    codes_K: ByteArray, words_B: npt.NDArray[np.integer], blocks_K: IndexArray, code: LevelCode
) -> FloatArray:
    table = np.array([*code.levels, *(-level for level in code.levels)], np.float32)
    return table.take(codes_K) * _scale_values(words_B, code).astype(np.float32).take(blocks_K)


def _pack(codes_K: ByteArray, bits: int) -> bytes:
    each = 8 // bits
    packed = np.zeros(-(-codes_K.size // each), np.uint8)
    for place in range(each):
        part = codes_K[place::each]
        packed[: part.size] |= part << (place * bits)
    return packed.tobytes()


def _unpack(packed: ByteArray, k: int, code: LevelCode) -> ByteArray:
    each = 8 // code.bits
    codes = np.empty((packed.size, each), np.uint8)
    for place in range(each):
        codes[:, place] = (packed >> (place * code.bits)) & ((1 << code.bits) - 1)
    flat = codes.reshape(-1)
    if flat[k:].any():
        raise invalid_payload(f"the padding after the {code.name} values of a sparse payload is not zero")
    return flat[:k]
