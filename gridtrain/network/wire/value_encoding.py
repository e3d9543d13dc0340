"""The bytes and rounding of the values in a sparse or dense payload: fp32, fp16, bf16, int8, int4 or int2.

    kind   bytes of K values            scale
    fp32   4 K                          none
    fp16   2 K                          one exponent for the payload, in its header
    bf16   2 K                          none: the upper half of a float32
    int8   2 ceil(K / 256) + K          one exponent for each 256 entries, before the values
    int4   2 B + ceil(K / 2)            one for each of B blocks of indices: see `level_encoding`
    int2   2 B + ceil(K / 4)            the same

For each kind, `value - rounded value` is exactly representable in float32, so a residual can store it without
loss; encoding decoded values produces the same bytes; and rounding never makes a finite value infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from gridtrain.network.wire import level_encoding
from gridtrain.network.wire.elias_fano import invalid_payload

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

# fp16: values are sent as v / 2**exponent, with the largest magnitude in [2**14, 2**15).  This is the
# second-highest binade of fp16, so that rounding never yields infinity, and far above its subnormals.
_TOP_BITS_MIN = 0x7400  # 2**14 as fp16
_TOP_BITS_MAX = 0x77FF  # 2**15 - 16, the largest fp16 below 2**15
_EXPONENT_MIN = -149 - 14  # the largest magnitude is float32's smallest subnormal, 2**-149
_EXPONENT_MAX = 127 - 14  # the largest magnitude is in float32's last binade
_EXPONENT_LOSSLESS = -149 + 24  # with this exponent or a larger one, fp16 * 2**exponent is exact in float32

_FP16_NORMAL = 0x38800000  # 2**-14 as float32: fp16's smallest normal value
_FP16_BIAS = (127 - 15) << 10  # difference of the exponents' biases, at the position of fp16's exponent

_BF16_MAX = 0x7F7F  # the largest finite bf16
_MAGNITUDE = 0x7FFF  # all of the 16 bits except the sign

SCALE_BLOCK = 256
"""The number of int8 entries that share an exponent."""
_Q_MIN, _Q_MAX = 64, 127  # the largest |q| of a block
_BLOCK_EXPONENT_MIN = -149  # q = 1 is then float32's smallest subnormal, and all values are exact
_BLOCK_EXPONENT_MAX = 127 - 6  # q = 64 is then in float32's last binade


class ValueKind(IntEnum):
    """The encoding of values, which is the same for all members of a generation."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4
    INT2 = 5


VALUE_KINDS = {kind.name.lower(): kind for kind in ValueKind}
"""The kinds by the names that users specify, such as "fp16"."""

_ITEM_BYTES = {ValueKind.FP32: 4, ValueKind.FP16: 2, ValueKind.BF16: 2, ValueKind.INT8: 1}
_LEVELS = {ValueKind.INT4: level_encoding.INT4, ValueKind.INT2: level_encoding.INT2}

ROUNDING_FACTORS = {
    ValueKind.FP32: 1.0 + 2.0**-20,
    ValueKind.FP16: 1.0 + 2.0**-10,
    ValueKind.BF16: 1.0 + 2.0**-7,
    ValueKind.INT8: 1.0 + 2.0**-6,
    ValueKind.INT4: 1.0 + 2.0**-20,
    ValueKind.INT2: 1.0 + 2.0**-20,
}
"""For each kind, an upper bound on the factor by which one rounding may increase the largest magnitude.  A
rounding changes a value by at most half a step, which is 2**-11 (fp16), 2**-8 (bf16) or 0.5 / 64 (int8) of
the value; the bound is twice as large, so that it also covers the additions before the rounding.  int4 and
int2 never increase the largest magnitude."""


def section_bytes(k: int, n: int, kind: ValueKind) -> int:
    """Return the size in bytes of the encoded values of k out of n elements."""
    if kind in _LEVELS:
        return level_encoding.section_bytes(k, n, _LEVELS[kind])
    return k * _ITEM_BYTES[kind] + (2 * -(-k // SCALE_BLOCK) if kind is ValueKind.INT8 else 0)


@dataclass(frozen=True, slots=True)
class EncodedValues:
    """The encoded values of a payload, and the values that `decode_values` returns for them.

    Attributes:
        indices_K: (K,) the indices of the entries that are sent; int4 and int2 may leave some entries out.
        section: the encoded values.
        exponent: the scale exponent for the header of the payload.
        decoded_K: (K,) float32, the rounded values.
    """

    indices_K: IndexArray
    section: bytes
    exponent: int
    decoded_K: FloatArray


def encode_values(indices_K: IndexArray, values_K: FloatArray, n: int, kind: ValueKind) -> EncodedValues:
    """Encode (K,) finite float32 values at (K,) strictly increasing indices below n."""
    match kind:
        case ValueKind.FP32:
            return EncodedValues(indices_K, values_K.astype("<f4").tobytes(), 0, values_K)
        case ValueKind.FP16:
            return EncodedValues(indices_K, *_write_fp16(values_K))
        case ValueKind.BF16:
            return EncodedValues(indices_K, *_write_bf16(values_K))
        case ValueKind.INT8:
            return EncodedValues(indices_K, *_write_int8(values_K))
        case ValueKind.INT4 | ValueKind.INT2:
            sent_K, section, decoded_K = level_encoding.write_levels(indices_K, values_K, n, _LEVELS[kind])
            return EncodedValues(indices_K.take(sent_K), section, 0, decoded_K)


def decode_values(
    section: ByteArray, indices_K: IndexArray, n: int, exponent: int, kind: ValueKind
) -> FloatArray:
    """Decode a section of `section_bytes(K, n, kind)` bytes; return K finite float32 values.

    Raises:
        RemoteProtocolError: `encode_values` cannot produce this section for these indices.
    """
    if kind is ValueKind.FP16:
        return _read_fp16(section.view("<u2"), exponent)
    if exponent != 0:
        raise invalid_payload(f"the scale exponent of {kind.name.lower()} values is {exponent}; it must be 0")
    if kind in _LEVELS:
        return level_encoding.read_levels(section, indices_K, n, _LEVELS[kind])
    if kind is ValueKind.INT8:
        return _read_int8(section, indices_K.size)
    if kind is ValueKind.BF16:
        return _read_bf16(section.view("<u2"))
    values_K = section.view("<f4").astype(np.float32)
    _check_finite(values_K)
    return values_K


def _check_finite(values_K: FloatArray) -> None:
    if not np.isfinite(values_K).all():
        raise invalid_payload("a payload contains infinite or NaN values")


def _times_power(values: FloatArray, exponent: int) -> FloatArray:
    """Return values * 2**exponent; only subnormal results and zeros are rounded, once."""
    with np.errstate(under="ignore"):
        if -126 <= exponent <= 127:  # a normal float32: multiplying takes a third of the time of ldexp
            return values * np.float32(2.0**exponent)
        return np.ldexp(values, exponent)


# -- fp16 --------------------------------------------------------------------------------------


def _write_fp16(values_K: FloatArray) -> tuple[bytes, int, FloatArray]:
    top = float(np.abs(values_K).max(initial=0.0))
    if top == 0.0:
        return values_K.astype("<f2").tobytes(), 0, values_K  # keeps the sign of -0.0
    exponent = math.frexp(top)[1] - 15
    # The scaling is exact, except far below fp16's smallest subnormal, where the result is zero anyway.
    bits = float32_to_fp16_bits(_times_power(values_K, -exponent))
    # A value that would be rounded up to 2**15 becomes the next smaller fp16, so that the decoded maximum is
    # in the same binade: the encoding is canonical, and float32's largest value does not become infinite.
    magnitudes = bits & _MAGNITUDE
    if int(magnitudes.max()) > _TOP_BITS_MAX:
        bits[magnitudes > _TOP_BITS_MAX] -= 1
    return bits.tobytes(), exponent, _times_power(fp16_bits_to_float32(bits), exponent)


def float32_to_fp16_bits(scaled_K: FloatArray) -> npt.NDArray[np.uint16]:
    """Round float32 values below 2**16 in magnitude to fp16, with ties to even; return the results' bits.

    numpy converts values one by one.  If no value is below fp16's normal range, which is the usual case,
    shifts produce the same result faster: 13 bits are rounded off, and the exponent's bias changes from 127
    to 15.
    """
    bits = scaled_K.view(np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    if int(magnitudes.min(initial=_FP16_NORMAL)) < _FP16_NORMAL:
        with np.errstate(under="ignore"):
            return scaled_K.astype("<f2").view("<u2")
    rounded = (magnitudes + (((magnitudes >> 13) & 1) + 0xFFF)) >> 13
    rounded -= _FP16_BIAS
    rounded |= (bits >> 16) & 0x8000
    return rounded.astype("<u2")


def fp16_bits_to_float32(bits_K: npt.NDArray[np.uint16]) -> FloatArray:
    """Convert finite fp16 values, given as bits, to float32 without rounding."""
    wide = bits_K.astype(np.uint32)
    magnitudes = wide & _MAGNITUDE
    if int(magnitudes.min(initial=0x400)) < 0x400:  # subnormal, or zero
        return bits_K.view("<f2").astype(np.float32)
    magnitudes += _FP16_BIAS
    magnitudes <<= 13
    magnitudes |= (wide & 0x8000) << 16
    return magnitudes.view(np.float32)


def _read_fp16(raw: npt.NDArray[np.uint16], exponent: int) -> FloatArray:
    _check_scale(int((raw & _MAGNITUDE).max(initial=0)), exponent)
    widened = fp16_bits_to_float32(raw)
    values = _times_power(widened, exponent)
    if exponent < _EXPONENT_LOSSLESS and not (np.ldexp(values, -exponent) == widened).all():
        raise invalid_payload(f"fp16 values with scale exponent {exponent} are not exact in float32")
    return values


def _check_scale(top_bits: int, exponent: int) -> None:
    """Raise `RemoteProtocolError` if the scale of fp16 values is invalid, or a value is NaN or infinite."""
    zeros_only = top_bits == 0 and exponent == 0
    if not zeros_only and not (
        _TOP_BITS_MIN <= top_bits <= _TOP_BITS_MAX and _EXPONENT_MIN <= exponent <= _EXPONENT_MAX
    ):
        raise invalid_payload(
            f"fp16 values have the largest magnitude {top_bits:#06x} and scale exponent {exponent}; the "
            f"magnitude must be {_TOP_BITS_MIN:#06x} to {_TOP_BITS_MAX:#06x} (2^14 <= |v| < 2^15) and the "
            f"exponent {_EXPONENT_MIN} to {_EXPONENT_MAX}"
        )


# -- bf16 --------------------------------------------------------------------------------------


def _write_bf16(values_K: FloatArray) -> tuple[bytes, int, FloatArray]:
    bits = values_K.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16  # to nearest, ties to even
    magnitudes = rounded & _MAGNITUDE
    if int(magnitudes.max(initial=0)) > _BF16_MAX:
        # A value that would be rounded up to infinity becomes the largest finite value.
        rounded[magnitudes > _BF16_MAX] -= 1
    return rounded.astype("<u2").tobytes(), 0, (rounded << 16).view(np.float32)


def _read_bf16(raw: npt.NDArray[np.uint16]) -> FloatArray:
    values_K = (raw.astype(np.uint32) << 16).view(np.float32)
    _check_finite(values_K)
    return values_K


# -- int8 --------------------------------------------------------------------------------------


def _write_int8(values_K: FloatArray) -> tuple[bytes, int, FloatArray]:
    k = values_K.size
    padded = np.zeros((-(-k // SCALE_BLOCK), SCALE_BLOCK), np.float32)
    padded.reshape(-1)[:k] = values_K
    tops = np.abs(padded).max(axis=1, initial=0.0)
    exponents = np.maximum(np.frexp(tops)[1] - 7, _BLOCK_EXPONENT_MIN)
    exponents[tops == 0.0] = 0
    # In float64 no scale overflows, and only `rint` rounds (ties to even).
    quotients = np.rint(padded * np.ldexp(1.0, -exponents)[:, None])
    q = np.clip(quotients, -_Q_MAX, _Q_MAX).astype(np.int8)
    section = exponents.astype("<i2").tobytes() + q.tobytes()[:k]
    return section, 0, _scaled_blocks(q, exponents)[:k]


def _scaled_blocks(q: npt.NDArray[np.int8], exponents: npt.NDArray[np.integer]) -> FloatArray:
    """Return each element of `q` times its block's scale.

    The products are exact, because float32 can represent any 7-bit magnitude times a power of two in its
    range.
    """
    scales = np.ldexp(np.float32(1.0), exponents.astype(np.int32))
    return (q.astype(np.float32) * scales[:, None]).reshape(-1)


def _read_int8(section: ByteArray, k: int) -> FloatArray:
    blocks = -(-k // SCALE_BLOCK)
    exponents = section[: 2 * blocks].view("<i2").astype(np.int32)
    q = np.zeros((blocks, SCALE_BLOCK), np.int8)
    q.reshape(-1)[:k] = section[2 * blocks :].view(np.int8)
    tops = np.abs(q.astype(np.int16)).max(axis=1, initial=0)
    _check_blocks(tops, exponents)
    return _scaled_blocks(q, exponents)[:k]


def _check_blocks(tops: npt.NDArray[np.int16], exponents: npt.NDArray[np.int32]) -> None:
    """Raise `RemoteProtocolError` unless each block has the scale that follows from its largest magnitude."""
    in_range = (exponents >= _BLOCK_EXPONENT_MIN) & (exponents <= _BLOCK_EXPONENT_MAX)
    canonical = (tops >= _Q_MIN) | ((tops > 0) & (exponents == _BLOCK_EXPONENT_MIN))
    good = ((tops == 0) & (exponents == 0)) | (in_range & canonical & (tops <= _Q_MAX))
    if not good.all():
        first = int(np.argmin(good))
        raise invalid_payload(
            f"int8 values have the largest magnitude {tops[first]} and scale exponent {exponents[first]} in "
            f"block {first}; the magnitude must be {_Q_MIN} to {_Q_MAX} and the exponent "
            f"{_BLOCK_EXPONENT_MIN} to {_BLOCK_EXPONENT_MAX}"
        )
