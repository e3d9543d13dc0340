"""The sparse gradient of a rank (k random entries of n), gTop-k's published merge, and checks of results.

2 k int32:  | k indices, ascending | k float32 values, bit for bit |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rivals.contract import Request

Array = np.ndarray[Any, Any]


def drawn(request: Request) -> tuple[Array, Array]:
    """Return this rank's indices, ascending, (k,) int32, and values, (k,) float32."""
    rng = np.random.default_rng(request.rank)
    indices_K = np.sort(rng.choice(request.n, request.k, replace=False, shuffle=False)).astype(np.int32)
    return indices_K, rng.standard_normal(request.k).astype(np.float32)


def packed(request: Request) -> Array:
    """Return this rank's entries as they are sent, (2 k,) int32."""
    indices_K, values_K = drawn(request)
    return np.concatenate([indices_K, values_K.view(np.int32)])


def merge(own: Array, other: Array, k: int) -> Array:
    """Sum two times k entries by index; return the k largest in the order of their indices."""
    indices = np.concatenate([own[:k], other[:k]])
    values = np.concatenate([own[k:], other[k:]]).view(np.float32)
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    first = np.flatnonzero(np.concatenate([[True], indices[1:] != indices[:-1]]))
    indices, sums = indices[first], np.add.reduceat(values, first)
    largest = np.sort(np.argpartition(np.abs(sums), len(sums) - k)[len(sums) - k :])
    return np.concatenate([indices[largest], sums[largest].view(np.int32)])


def scatter_add(update_N: Array, entries: Array) -> None:
    """Add packed entries, without repeated indices, to the dense vector (n,) float32."""
    half = len(entries) // 2
    update_N[entries[:half]] += entries[half:].view(np.float32)


def check_sum(gradient_N: Any, request: Request) -> None:
    """Raise `ArithmeticError` unless the ends of a vector, filled with rank + 1 on each rank, are the sum."""
    total = request.world * (request.world + 1) / 2
    if gradient_N[0] != total or gradient_N[-1] != total:
        raise ArithmeticError(f"the sum is {gradient_N[0]}, not {total}")


# -- expected results, as each rank can draw the others' entries ------------------------------------


def gathered(request: Request) -> Array:
    """Return the sum by index of all ranks' entries, packed."""
    update_N = np.zeros(request.n, np.float32)
    for rank in range(request.world):
        indices_K, values_K = drawn(replace(request, rank=rank))
        update_N[indices_K] += values_K
    indices = np.flatnonzero(update_N).astype(np.int32)
    return np.concatenate([indices, update_N[indices].view(np.int32)])


def merged_by_tree(request: Request) -> Array:
    """Return the result of the published gTop-k tree for all ranks' entries, packed."""
    merged = [packed(replace(request, rank=rank)) for rank in range(request.world)]
    while len(merged) > 1:
        pairs = [merged[i : i + 2] for i in range(0, len(merged), 2)]
        merged = [merge(pair[0], pair[1], request.k) if len(pair) == 2 else pair[0] for pair in pairs]
    return merged[0]


def check(update_N: Array, expected: Array) -> None:
    """Raise `ArithmeticError` if the update is not the expected one."""
    indices = np.flatnonzero(update_N)
    half = len(expected) // 2
    values = expected[half:].view(np.float32)
    nonzero = values != 0
    are_right = np.array_equal(indices, expected[:half][nonzero])
    if not (are_right and np.array_equal(update_N[indices], values[nonzero])):
        raise ArithmeticError(f"the update of {len(indices)} entries is not the one of {half} expected")
