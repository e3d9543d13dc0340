"""The sparse payload: exact bytes, no loss of mass, a canonical form, and nothing else accepted."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import MAX_N, decode, encode, encoded_bytes
from gridtrain.network.wire.value_encoding import ValueKind, float32_to_fp16_bits, fp16_bits_to_float32

FP32, FP16, BF16, INT8, INT4, INT2 = ValueKind
LEVELS = (INT4, INT2)  # the kinds that leave out what is too small for its block's scale
F32 = np.finfo(np.float32)
SMALLEST = float(F32.smallest_subnormal)
LARGEST = float(F32.max)
SMALLEST_MULTIPLE = 2.0**-24  # fp16's smallest step, as a part of 2**exponent


def entries(indices: list[int], values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(indices, np.int64), np.array(values, np.float32)


def there_and_back(
    indices: list[int], values: list[float], n: int, kind: ValueKind
) -> list[tuple[int, float]]:
    payload = encode(*entries(indices, values), n=n, kind=kind)
    back = decode(payload, n=n, max_entries=len(indices), kind=kind)
    assert len(payload) == encoded_bytes(back.indices.size, n, kind)
    return list(zip(back.indices.tolist(), back.values.tolist(), strict=True))


@st.composite
def vectors(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray]:
    """(n, indices, values): n from 1 to 2**32, any density, values over all of float32's range."""
    n = draw(st.one_of(st.integers(1, 40), st.integers(1, 2**20), st.integers(2**31, MAX_N)))
    indices = draw(st.sets(st.integers(0, n - 1), max_size=60))
    float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
    near = st.floats(-4, 4, width=32)
    values = draw(st.lists(st.one_of(float32, near), min_size=len(indices), max_size=len(indices)))
    return n, *entries(sorted(indices), values)


# -- what must hold for every payload ------------------------------------------------------------


@given(vectors(), st.sampled_from(ValueKind))
def test_indices_come_back_and_what_is_rounded_is_a_float32(
    vector: tuple[int, np.ndarray, np.ndarray], kind: ValueKind
) -> None:
    n, indices, values = vector
    payload = encode(indices, values, n=n, kind=kind)
    back = decode(payload, n=n, max_entries=len(indices), kind=kind)

    assert len(payload) == encoded_bytes(back.indices.size, n, kind)
    assert back.indices.dtype == np.int64 and back.values.dtype == np.float32
    if kind in LEVELS:
        assert set(back.indices.tolist()) <= set(indices.tolist())
        values = values[np.searchsorted(indices, back.indices)]
        assert (np.abs(values) <= 2 * np.abs(back.values.astype(np.float64))).all()
        assert (np.abs(back.values) <= 2 * np.abs(values.astype(np.float64))).all()
        assert (np.sign(values) == np.sign(back.values)).all()
        assert np.abs(back.values).max(initial=0.0) <= np.abs(values).max(initial=0.0)
    else:
        assert back.indices.tolist() == indices.tolist()
    assert np.isfinite(back.values).all()
    lost = values - back.values  # in float32, as the residual computes it ...
    exactly = values.astype(np.float64) - back.values.astype(np.float64)
    assert lost.astype(np.float64).tolist() == exactly.tolist()  # ... and nothing of it is lost
    if kind is FP32:
        assert back.values.tobytes() == values.tobytes()


@given(vectors(), st.sampled_from(ValueKind))
def test_a_payload_has_one_form_only(vector: tuple[int, np.ndarray, np.ndarray], kind: ValueKind) -> None:
    n, indices, values = vector
    payload = encode(indices, values, n=n, kind=kind)
    back = decode(payload, n=n, max_entries=len(indices), kind=kind)
    assert encode(back.indices, back.values, n=n, kind=kind) == payload


@given(vectors())
def test_fp16_rounds_to_nearest_of_eleven_bits(vector: tuple[int, np.ndarray, np.ndarray]) -> None:
    n, indices, values = vector
    back = decode(encode(indices, values, n=n, kind=FP16), n=n, max_entries=60, kind=FP16)
    top = float(np.abs(values).max(initial=0.0))
    # Half a step of an 11-bit float, or of the smallest steps; a whole one just below the top's binade.
    bound = np.maximum(np.abs(values.astype(np.float64)) * 2.0**-11, top * 2.0**-14 * SMALLEST_MULTIPLE)
    assert (np.abs(values.astype(np.float64) - back.values) <= bound).all()


@given(st.lists(st.floats(-65000, 65000, width=32), max_size=40), st.integers(-30, 0))
def test_fp16_by_shifts_is_numpys(drawn: list[float], exponent: int) -> None:
    """For values that are normal in fp16, some of them ties, and for the smallest ones."""
    exact = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 2 - 2.0**-12, 2.0**-14], np.float32)
    with np.errstate(under="ignore"):
        scaled = np.ldexp(np.array(drawn, np.float32), exponent).astype(np.float32)
        for values in (scaled, np.concatenate([exact, -exact, scaled[np.abs(scaled) >= 2.0**-14]])):
            bits = float32_to_fp16_bits(values)
            assert bits.tobytes() == values.astype("<f2").tobytes()
            assert fp16_bits_to_float32(bits).tobytes() == bits.view("<f2").astype(np.float32).tobytes()


# -- by eye --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ValueKind)
@pytest.mark.parametrize(
    ("n", "indices"),
    [
        pytest.param(64, [], id="nothing"),
        pytest.param(1, [0], id="all of one"),
        pytest.param(5, [0, 1, 2, 3, 4], id="k = n"),
        pytest.param(1000, [0], id="first"),
        pytest.param(1000, [999], id="last"),
        pytest.param(1000, [0, 999], id="both ends"),
        pytest.param(MAX_N, [0, 2**31, MAX_N - 1], id="the largest n"),
        pytest.param(MAX_N, [MAX_N - 1], id="32 low bits"),
        pytest.param(2**16, list(range(2**16)), id="dense"),
    ],
)
def test_indices(kind: ValueKind, n: int, indices: list[int]) -> None:
    assert there_and_back(indices, [1.0] * len(indices), n, kind) == [(i, 1.0) for i in indices]


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        pytest.param([0.0, 0.0], [0.0, 0.0], id="zeros"),
        pytest.param([1.0, 2.0**-40], [1.0, 0.0], id="far below the largest: kept by the residual"),
        pytest.param([SMALLEST, -3 * SMALLEST], [SMALLEST, -3 * SMALLEST], id="float32's subnormals"),
        pytest.param([LARGEST], [2.0**128 - 2.0**117], id="float32's largest does not become infinite"),
        pytest.param([LARGEST, SMALLEST], [2.0**128 - 2.0**117, 0.0], id="the whole range"),
        pytest.param([1 + 2.0**-11, 1.5], [1.0, 1.5], id="tie to even, down"),
        pytest.param([1 + 3 * 2.0**-11, 1.5], [1 + 2.0**-9, 1.5], id="tie to even, up"),
        pytest.param([2 - 2.0**-12], [2 - 2.0**-10], id="never up into the next binade"),
    ],
)
def test_fp16_values(values: list[float], decoded: list[float]) -> None:
    indices = list(range(len(values)))
    assert [value for _, value in there_and_back(indices, values, 8, FP16)] == decoded


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        pytest.param([0.0, 1.0, 2.0**-40], [0.0, 1.0, 2.0**-40], id="no scale"),
        pytest.param([SMALLEST], [0.0], id="float32's smallest"),
        pytest.param([2.0**-133, 3 * 2.0**-133], [2.0**-133, 3 * 2.0**-133], id="bf16's subnormals"),
        pytest.param([LARGEST, -LARGEST], [2.0**128 - 2.0**120, -(2.0**128) + 2.0**120], id="not infinite"),
        pytest.param([1 + 2.0**-8, -1 - 2.0**-8], [1.0, -1.0], id="tie to even, down"),
        pytest.param([1 + 3 * 2.0**-8], [1 + 2.0**-6], id="tie to even, up"),
    ],
)
def test_bf16_values(values: list[float], decoded: list[float]) -> None:
    indices = list(range(len(values)))
    assert [value for _, value in there_and_back(indices, values, 8, BF16)] == decoded


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        pytest.param([0.0, -0.0], [0.0, 0.0], id="zeros"),
        pytest.param([100.0, -3.0, 0.75], [100.0, -3.0, 1.0], id="the largest is in 64 .. 127"),
        pytest.param([1.0, 2.0**-40], [1.0, 0.0], id="far below the largest: kept by the residual"),
        pytest.param([64.0, 0.5, 1.5], [64.0, 0.0, 2.0], id="ties to even"),
        pytest.param([127.75, -127.75], [127.0, -127.0], id="never up into the next binade"),
        pytest.param([SMALLEST, -3 * SMALLEST], [SMALLEST, -3 * SMALLEST], id="float32's subnormals"),
        pytest.param([LARGEST, SMALLEST], [127 * 2.0**121, 0.0], id="the whole range"),
    ],
)
def test_int8_values(values: list[float], decoded: list[float]) -> None:
    indices = list(range(len(values)))
    assert [value for _, value in there_and_back(indices, values, 8, INT8)] == decoded


def test_each_256_entries_of_int8_have_their_own_scale() -> None:
    values = [1.0] * 256 + [2.0**-40] * 256 + [2.0**40]
    assert [v for _, v in there_and_back(list(range(513)), values, 600, INT8)] == values


@given(vectors())
def test_int8_rounds_to_nearest_of_the_blocks_steps(vector: tuple[int, np.ndarray, np.ndarray]) -> None:
    n, indices, values = vector
    back = decode(encode(indices, values, n=n, kind=INT8), n=n, max_entries=60, kind=INT8)
    top = float(np.abs(values).max(initial=0.0))
    # Half a step of at most top / 64; a whole one for what would round to 128.
    exact, step = values.astype(np.float64), top / 64
    bound = np.where(np.abs(exact) * 128 > 255 * (top / 2), step, step / 2)
    assert (np.abs(exact - back.values) <= bound).all()


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        pytest.param([0.0, -0.0], {}, id="zeros are not sent"),
        pytest.param(
            [7.0, -3.0, 1.25], {0: 7.0, 1: -3.0, 2: 1.0}, id="the largest is 4 to 8 times the scale"
        ),
        pytest.param([4.0, 0.7, -0.25, 0.24], {0: 4.0, 1: 0.5, 2: -0.5}, id="down to a quarter"),
        pytest.param([4.0, 0.75, 1.5], {0: 4.0, 1: 1.0, 2: 2.0}, id="ties up"),
        pytest.param([5.75, 5.5, 4.6], {0: 5.0, 1: 5.0, 2: 5.0}, id="never above the largest"),
        pytest.param([7.99, -1e-9], {0: 7.0}, id="never up into the next binade"),
        pytest.param([2.0**-124, 2.0**-127], {0: 2.0**-124, 1: 2.0**-127}, id="the smallest scale"),
        pytest.param([SMALLEST, -3 * 2.0**-126], {}, id="below the smallest scale: kept by the residual"),
        pytest.param([LARGEST, SMALLEST], {0: 7 * 2.0**125}, id="the whole range"),
    ],
)
def test_int4_values(values: list[float], decoded: dict[int, float]) -> None:
    assert dict(there_and_back(list(range(len(values))), values, 8, INT4)) == decoded


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        pytest.param([0.0, -0.0], {}, id="zeros are not sent"),
        pytest.param([1.75, -0.65625], {0: 1.75, 1: -0.65625}, id="the largest and three eighths of it"),
        pytest.param([4.0, 1.0], {0: 4.0, 1: 1.5}, id="to the nearest"),
        pytest.param([4.0, 1.0, 1.0, 1.0], {0: 3.5, 1: 1.3125, 2: 1.3125, 3: 1.3125}, id="least squares"),
        pytest.param([5.0, -5.0, 5.0], {0: 5.0, 1: -5.0, 2: 5.0}, id="quarters of an octave"),
        pytest.param([1.0, 1.0, 1.0, 0.19, 0.18], {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.375}, id="down to 3/16"),
        pytest.param([2.0**-126, 3 * 2.0**-129], {0: 2.0**-126, 1: 3 * 2.0**-129}, id="the smallest scale"),
        pytest.param([SMALLEST, -(2.0**-127)], {}, id="below the smallest scale: kept by the residual"),
        pytest.param([LARGEST, SMALLEST], {0: 1.75 * 2.0**127}, id="the whole range"),
    ],
)
def test_int2_values(values: list[float], decoded: dict[int, float]) -> None:
    assert dict(there_and_back(list(range(len(values))), values, 8, INT2)) == decoded


@pytest.mark.parametrize("kind", LEVELS)
def test_blocks_of_indices_have_their_own_scale(kind: ValueKind) -> None:
    """512 entries of 1024 elements are in blocks of 128 elements, 64 entries each."""
    values = [1.0] * 256 + [2.0**-40] * 64 + [2.0**40] * 192
    assert [v for _, v in there_and_back(list(range(0, 1024, 2)), values, 1024, kind)] == pytest.approx(
        values, rel=0.2
    )


@pytest.mark.parametrize("kind", LEVELS)
def test_blocks_are_those_of_the_entries_that_are_sent(kind: ValueKind) -> None:
    """All 64 entries share a block of 512 elements; so do the 8 that are sent, in wider blocks."""
    values = [3.0 if i % 8 == 0 else 2.0**-9 for i in range(64)]
    back = there_and_back(list(range(0, 512, 8)), values, 512, kind)
    assert back == [(i, 3.0) for i in range(0, 512, 64)]


@pytest.mark.parametrize("kind", [FP32, FP16, BF16])
def test_the_sign_of_zero_travels(kind: ValueKind) -> None:
    back = there_and_back([0, 1, 2], [-0.0, 0.0, -1.0], 8, kind)
    assert [str(value) for _, value in back] == ["-0.0", "0.0", "-1.0"]


def test_size_at_density_a_thousandth() -> None:
    n, k = 25_600_000, 25_600
    rng = np.random.default_rng(0)
    indices, values = np.sort(rng.choice(n, k, replace=False)), rng.standard_normal(k).astype(np.float32)
    fp32, fp16, bf16, int8, int4, int2 = (encoded_bytes(k, n, kind) / k for kind in ValueKind)
    assert [len(encode(indices, values, n=n, kind=kind)) / k for kind in (FP32, FP16, BF16, INT8)] == [
        fp32,
        fp16,
        bf16,
        int8,
    ]
    assert round(fp16, 2) == 3.49  # bytes an entry
    assert round(fp32, 2) == 5.49
    assert round(bf16, 2) == 3.49
    assert round(int8, 2) == 2.5
    assert round(int4, 2) == 2.06
    assert round(int2, 2) == 1.81
    assert round((fp16 - 2) * 8, 2) == 11.96  # bits an index, header included


def test_size_at_a_hundredth_and_at_three() -> None:
    n, rng = 25_600_000, np.random.default_rng(0)
    sizes = {}
    for density in (0.01, 0.03):
        k = round(density * n)
        indices = np.sort(rng.choice(n, k, replace=False))
        values = rng.choice([-1, 1], k) * rng.uniform(1, 2, k)
        for kind in LEVELS:
            payload = encode(indices, values.astype(np.float32), n=n, kind=kind)
            assert len(payload) == encoded_bytes(k, n, kind)  # no entry was left out
            sizes[density, kind] = round(len(payload) / k, 2)
    assert sizes == {(0.01, INT4): 1.62, (0.01, INT2): 1.37, (0.03, INT4): 1.41, (0.03, INT2): 1.16}
    assert [encoded_bytes(6029, 120_576, kind) for kind in LEVELS] == [7970, 6463]  # the demo's GPT, 0.05


# -- our own faults ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "values", "n"),
    [
        pytest.param([1, 1], [1, 1], 8, id="twice the same index"),
        pytest.param([2, 1], [1, 1], 8, id="not sorted"),
        pytest.param([8], [1], 8, id="index n"),
        pytest.param([-1], [1], 8, id="negative"),
        pytest.param([1], [np.nan], 8, id="NaN"),
        pytest.param([1], [-np.inf], 8, id="infinite"),
        pytest.param([1, 2], [1], 8, id="shapes differ"),
        pytest.param([1], [1], MAX_N + 1, id="n too large"),
        pytest.param([], [], 0, id="n = 0"),
    ],
)
def test_our_own_faults_are_loud(indices: list[int], values: list[float], n: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode(*entries(indices, values), n=n, kind=FP16)


def test_values_in_float64_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="float64"):
        encode(np.array([1]), np.array([1.0]), n=8, kind=FP16)  # type: ignore[arg-type]


# -- the peer's faults: [3, 10, 11, 40] of n = 64 is L = 4, H = 7, so 2 + 1 bytes of index bits ----

GOOD = encode(*entries([3, 10, 11, 40], [1, -2, 0.5, 3]), n=64, kind=FP16)
GOOD_FP32 = encode(*entries([3, 10, 11, 40], [1, -2, 0.5, 3]), n=64, kind=FP32)


def changed(payload: bytes, offset: int, code: str, value: float) -> bytes:
    data = bytearray(payload)
    struct.pack_into(code, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(b"", "its header alone has 8 bytes", id="empty"),
        pytest.param(GOOD[:7], "its header alone has 8 bytes", id="half a header"),
        pytest.param(GOOD[:-1], "18 bytes; 4 FP16 entries of 64 take 19", id="truncated"),
        pytest.param(GOOD + b"\0", "20 bytes; 4 FP16 entries of 64 take 19", id="trailing byte"),
        pytest.param(GOOD_FP32, "value kind 0; this generation uses 1", id="the other kind of values"),
        pytest.param(changed(GOOD, 6, "<H", 9), "value kind 9", id="unknown kind of values"),
        pytest.param(changed(GOOD, 0, "<I", 3), "3 FP16 entries of 64 take", id="K less than sent"),
        pytest.param(changed(GOOD, 0, "<I", 5), "at most 4", id="K over the generation's k"),
        pytest.param(changed(GOOD, 0, "<I", 2**32 - 1), "at most 4", id="K = 2^32 - 1"),
        pytest.param(changed(GOOD, 8, "<H", 0x8AA3), "be strictly increasing", id="twice the same index"),
        pytest.param(changed(GOOD, 8, "<H", 0x89A3), "be strictly increasing", id="index out of order"),
        pytest.param(changed(GOOD, 10, "B", 0x2F), "5 entries; its header specifies 4", id="a bit too many"),
        pytest.param(changed(GOOD, 10, "B", 0x07), "3 entries; its header specifies 4", id="a bit too few"),
        pytest.param(changed(GOOD, 10, "B", 0xA7), "padding after the high bits", id="padding not zero"),
        pytest.param(changed(GOOD, 11, "<H", 0x7C00), "fp16 values", id="infinity"),
        pytest.param(changed(GOOD, 11, "<H", 0xFE00), "fp16 values", id="NaN"),
        pytest.param(changed(GOOD, 11, "<H", 0x7800), "fp16 values", id="magnitude 2^15"),
        pytest.param(changed(GOOD, 13, "<I", 0)[:-2] + b"\0\0", "fp16 values", id="scale too large"),
        pytest.param(changed(GOOD, 4, "<h", 114), "-163 to 113", id="decodes to infinity"),
        pytest.param(changed(GOOD, 4, "<h", -164), "-163 to 113", id="decodes to nothing"),
        pytest.param(changed(GOOD, 4, "<h", -163)[:-2] + b"\x01\x74", "not exact in float32", id="too fine"),
    ],
)
def test_fp16_payloads_that_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(payload, n=64, max_entries=4, kind=FP16)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(changed(GOOD_FP32, 4, "<h", 1), "must be 0", id="exponent"),
        pytest.param(changed(GOOD_FP32, 11, "<f", float("nan")), "infinite or NaN", id="NaN"),
        pytest.param(changed(GOOD_FP32, 23, "<f", float("-inf")), "infinite or NaN", id="infinity"),
    ],
)
def test_fp32_payloads_that_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(payload, n=64, max_entries=4, kind=FP32)


GOOD_BF16 = encode(*entries([3, 10, 11, 40], [1, -2, 0.5, 3]), n=64, kind=BF16)
GOOD_INT8 = encode(*entries([3, 10, 11, 40], [1, -2, 0.5, 3]), n=64, kind=INT8)  # f at 11, q at 13


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(changed(GOOD_BF16, 4, "<h", 1), "of bf16 values is 1; it must be 0", id="exponent"),
        pytest.param(changed(GOOD_BF16, 11, "<H", 0x7F80), "infinite or NaN", id="infinity"),
        pytest.param(changed(GOOD_BF16, 11, "<H", 0xFFC0), "infinite or NaN", id="NaN"),
        pytest.param(changed(GOOD_BF16, 6, "<H", 1), "value kind 1; this generation uses 2", id="as fp16"),
    ],
)
def test_bf16_payloads_that_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(payload, n=64, max_entries=4, kind=BF16)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(GOOD_INT8[:-1], "16 bytes; 4 INT8 entries of 64 take 17", id="truncated"),
        pytest.param(changed(GOOD_INT8, 4, "<h", -5), "of int8 values is -5; it must be 0", id="exponent"),
        pytest.param(changed(GOOD_INT8, 11, "<h", 122), "-149 to 121", id="decodes to infinity"),
        pytest.param(changed(GOOD_INT8, 11, "<h", -150), "-149 to 121", id="finer than float32"),
        pytest.param(changed(GOOD_INT8, 16, "b", -128), "magnitude 128 .* in block 0", id="-128"),
        pytest.param(changed(GOOD_INT8, 13, "<I", 0x3F), "magnitude 63 ", id="scale too large"),
        pytest.param(changed(GOOD_INT8, 13, "<I", 0), "magnitude 0 and scale exponent -5", id="zeros scaled"),
    ],
)
def test_int8_payloads_that_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(payload, n=64, max_entries=4, kind=INT8)


GOOD_INT4 = encode(*entries([3, 10, 11, 40], [1, -2, 0.5, 3]), n=64, kind=INT4)  # scale at 11, codes at 13
GOOD_INT2 = encode(*entries([3, 10, 11, 40, 41], [3, -3, 1, 3, 1]), n=64, kind=INT2)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(GOOD_INT4[:-1], "14 bytes; 4 INT4 entries of 64 take 15", id="truncated"),
        pytest.param(changed(GOOD_INT4, 4, "<h", -1), "of int4 values is -1; it must be 0", id="exponent"),
        pytest.param(changed(GOOD_INT4, 11, "<h", 126), "scale -126 to 125", id="decodes to infinity"),
        pytest.param(changed(GOOD_INT4, 11, "<h", -127), "scale -126 to 125", id="too fine a scale"),
        pytest.param(
            changed(GOOD_INT4, 13, "<H", 0x3333), "largest level 3 .* must be 4 to 7", id="too large"
        ),
    ],
)
def test_int4_payloads_that_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(payload, n=64, max_entries=4, kind=INT4)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(GOOD_INT2[:-1], "15 bytes; 5 INT2 entries of 64 take 16", id="truncated"),
        pytest.param(changed(GOOD_INT2, 4, "<h", 1), "of int2 values is 1; it must be 0", id="exponent"),
        pytest.param(changed(GOOD_INT2, 12, "<h", 512), "scale -504 to 511", id="decodes to infinity"),
        pytest.param(changed(GOOD_INT2, 12, "<h", -505), "scale -504 to 511", id="too fine a scale"),
        pytest.param(changed(GOOD_INT2, 14, "<H", 0), "largest level 0 .* must be 1 to 1", id="too large"),
        pytest.param(changed(GOOD_INT2, 15, "B", 0x04), "padding after the int2 values", id="padding"),
    ],
)
def test_int2_payloads_that_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(payload, n=64, max_entries=5, kind=INT2)


def test_a_scale_of_a_block_without_entries_is_refused() -> None:
    """128 of 1024 elements: two blocks of 512, the second without entries."""
    payload = encode(*entries(list(range(128)), [1.0] * 128), n=1024, kind=INT2)
    with pytest.raises(RemoteProtocolError, match="level -1 and scale 7 in block 1"):
        decode(changed(payload, 8 + 48 + 32 + 2, "<h", 7), n=1024, max_entries=128, kind=INT2)


def test_an_index_of_n_or_more_is_refused() -> None:
    last = encode(*entries([1, 6], [1, 1]), n=7, kind=FP32)
    assert decode(last, n=7, max_entries=2, kind=FP32).indices.tolist() == [1, 6]
    beyond = changed(last, 8, "B", last[8] | 0b10)  # low bits: 7 instead of 6
    with pytest.raises(RemoteProtocolError, match="below 7"):
        decode(beyond, n=7, max_entries=2, kind=FP32)


def test_padding_of_the_low_bits_is_refused() -> None:
    payload = encode(*entries([1], [1]), n=8, kind=FP32)  # L = 3: five bits of padding
    with pytest.raises(RemoteProtocolError, match="padding after the low bits"):
        decode(changed(payload, 8, "B", payload[8] | 0x80), n=8, max_entries=1, kind=FP32)


def test_a_lying_k_allocates_nothing() -> None:
    """The header says 4 billion entries, and the generation would allow them; the length does not."""
    lie = struct.pack("<IhH", 2**32 - 1, 0, FP16) + bytes(1000)
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="1008 bytes"):
        decode(lie, n=MAX_N, max_entries=MAX_N, kind=FP16)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 * 1024
