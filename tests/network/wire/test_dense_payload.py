"""Slices of dense exchanges: one form for each vector, and differences that float32 holds exactly."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.dense_payload import decode_slice, encode_slice, slice_bytes
from gridtrain.network.wire.value_encoding import ValueKind

KINDS = (ValueKind.BF16, ValueKind.INT8)
LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_has_one_form_and_exact_differences(kind: ValueKind, seeds: Any) -> None:
    for seed in seeds(100):
        rng = np.random.default_rng(seed)
        size, spread = int(rng.choice([0, 1, 255, 256, 257, 1000])), rng.choice([1, 20, 120])
        exponents = rng.integers(-spread, spread, size)
        values_B = np.asarray(rng.uniform(-2, 2, size) * 2.0**exponents, np.float32)
        values_B[rng.random(size) < 0.05] = rng.choice([0.0, -0.0, 1e-45, LARGEST, -LARGEST])
        payload, rounded_B = encode_slice(values_B, kind)
        assert len(payload) == slice_bytes(size, kind), f"seed {seed}"
        decoded_B = decode_slice(np.frombuffer(payload, np.uint8), size, kind)
        assert decoded_B.tobytes() == rounded_B.tobytes(), f"seed {seed}"
        assert encode_slice(rounded_B, kind)[0] == payload, f"seed {seed}"
        for value, rounded, rest in zip(values_B, rounded_B, values_B - rounded_B, strict=True):
            assert Fraction(float(value)) - Fraction(float(rounded)) == Fraction(float(rest)), f"seed {seed}"


def test_the_bytes_of_a_slice_are_those_of_the_protocol() -> None:
    """PROTOCOL.md, 5.1: the exponents of the blocks, then the values."""
    values_B = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    assert encode_slice(values_B, ValueKind.BF16)[0].hex(" ") == "80 3f 00 c0 00 3f 40 40"
    assert encode_slice(values_B, ValueKind.INT8)[0].hex(" ") == "fb ff 20 c0 10 60"
    assert [slice_bytes(257, kind) for kind in (ValueKind.FP32, *KINDS)] == [1028, 514, 261]


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(ValueKind.BF16, "80 7f"), (ValueKind.INT8, "00 00 20"), (ValueKind.INT8, "fb ff 80")],
)
def test_what_cannot_have_been_encoded_is_refused(kind: ValueKind, payload: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_slice(np.frombuffer(bytes.fromhex(payload), np.uint8), 1, kind)
