"""The table of decision 0021 rounds as the wire does."""

from __future__ import annotations

import numpy as np
import pytest

from gridtrain.network.wire.sparse_payload import ValueKind, decode, encode
from rounding import BLOCKS, loss, rounded


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_256_are_those_of_int8(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values_K = (rng.standard_normal(1000) * 2.0 ** rng.integers(-30, 30, 1000)).astype(np.float32)
    values_K[:3] = 127.9, -127.6, 0.25  # would round to 128
    payload = encode(np.arange(1000), values_K, n=1000, kind=ValueKind.INT8)
    sent = decode(payload, n=1000, max_entries=1000, kind=ValueKind.INT8)
    assert np.array_equal(rounded(values_K.astype(np.float64), 256).astype(np.float32), sent.values)


def test_a_scale_for_fewer_entries_loses_less() -> None:
    rng = np.random.default_rng(0)
    values_K = rng.standard_normal(9000) * np.repeat(2.0 ** np.arange(-9, 0), 1000)
    losses = [loss(values_K, block) for block in BLOCKS]
    assert losses == sorted(losses) and 0 < losses[0] < losses[-1] < 0.1
