"""The buffers of all exchanges by name, for tests that run each of them in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from gridtrain.core.collectives import allgather, butterfly, direct, ring, star, tree
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer, DenseRingBuffer
from gridtrain.runtime.buffers.direct_buffer import DirectBuffer, SparseDirectBuffer
from gridtrain.runtime.buffers.rounded_buffers import (
    RoundedDirectBuffer,
    RoundedRingBuffer,
    RoundedStarBuffer,
)
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer, SparseStarBuffer, TreeBuffer

ROUNDED = MappingProxyType(
    {"dense-int8": ValueKind.INT8, "direct-bf16": ValueKind.BF16, "dense-star-int8": ValueKind.INT8}
)
DENSE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "dense": DenseRingBuffer,
        "direct": DirectBuffer,
        "dense-star": DenseStarBuffer,
        "dense-int8": partial(RoundedRingBuffer, kind=ROUNDED["dense-int8"]),
        "direct-bf16": partial(RoundedDirectBuffer, kind=ROUNDED["direct-bf16"]),
        "dense-star-int8": partial(RoundedStarBuffer, kind=ROUNDED["dense-star-int8"]),
    }
)
MERGING: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "gtopk": ButterflyBuffer,
        "gtopk-direct": SparseDirectBuffer,
        "tree": TreeBuffer,
        "star": SparseStarBuffer,
    }
)
NEIGHBOURS: Mapping[str, Callable[..., frozenset[int]]] = MappingProxyType(
    {
        "dense": ring.neighbours,
        "direct": direct.neighbours,
        "dense-star": star.neighbours,
        "topk": allgather.neighbours,
        "gtopk": butterfly.neighbours,
        "gtopk-direct": direct.neighbours,
        "tree": tree.neighbours,
        "star": star.neighbours,
        "dense-int8": ring.neighbours,
        "direct-bf16": direct.neighbours,
        "dense-star-int8": star.neighbours,
    }
)
SLICE_BYTES = 16


def make_buffer(
    exchange: str, rank: int, world_size: int, contribution: Any, *, n: int = 0, k: int = 0
) -> Any:
    """One rank's buffer, with slices of 16 bytes where it is dense.

    Args:
        contribution: a vector, which is copied; for a sparse exchange a payload of at most `k` entries of a
            vector of `n` elements in float16.
    """
    if exchange in DENSE:
        return DENSE[exchange](np.array(contribution, np.float32), world_size, slice_bytes=SLICE_BYTES)
    wire: dict[str, Any] = {"n": n, "k": k, "kind": ValueKind.FP16}
    if exchange in MERGING:
        return MERGING[exchange](contribution, **wire)
    return AllGatherBuffer(rank, world_size, contribution, **wire)


def update_of(buffer: Any, n: int) -> np.ndarray:
    """The sum that a complete exchange has computed, as a vector of `n` elements."""
    if isinstance(buffer, DenseRingBuffer | DenseStarBuffer):
        return buffer.update
    dense_N = np.zeros(n, np.float32)
    dense_N[buffer.update.indices] = buffer.update.values
    return dense_N
