"""A rank's sparse gradient, and how published gTop-k merges two.  Only numpy.

Decides which entries: k random ones of n, of each rank others, chosen before any clock starts.

    2 k int32:  | k indices, ascending | k float32 values, bit for bit |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rivals.contract import Request

Array = np.ndarray[Any, Any]


def drawn(request: Request) -> tuple[Array, Array]:
    """This rank's k indices, ascending, shape (k,), int32, and values, shape (k,), float32."""
    rng = np.random.default_rng(request.rank)
    indices_K = np.sort(rng.choice(request.n, request.k, replace=False, shuffle=False)).astype(np.int32)
    return indices_K, rng.standard_normal(request.k).astype(np.float32)


def packed(request: Request) -> Array:
    """This rank's entries as they travel, shape (2 k,), int32."""
    indices_K, values_K = drawn(request)
    return np.concatenate([indices_K, values_K.view(np.int32)])


def merge(mine: Array, theirs: Array, k: int) -> Array:
    """The k largest of the sum by index of two times k entries, in the order of their indices."""
    indices = np.concatenate([mine[:k], theirs[:k]])
    values = np.concatenate([mine[k:], theirs[k:]]).view(np.float32)
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    first = np.flatnonzero(np.concatenate([[True], indices[1:] != indices[:-1]]))
    indices, sums = indices[first], np.add.reduceat(values, first)
    largest = np.sort(np.argpartition(np.abs(sums), len(sums) - k)[len(sums) - k :])
    return np.concatenate([indices[largest], sums[largest].view(np.int32)])


def scatter_add(update_N: Array, entries: Array) -> None:
    """Add packed entries, none of which comes twice, to the dense vector of shape (n,), float32."""
    half = len(entries) // 2
    update_N[entries[:half]] += entries[half:].view(np.float32)


# -- what must come out: every rank can draw the others' entries too --------------------------------


def gathered(request: Request) -> Array:
    """The sum by index of everybody's entries, packed: all of them, in the order of ranks."""
    update_N = np.zeros(request.n, np.float32)
    for rank in range(request.world):
        indices_K, values_K = drawn(replace(request, rank=rank))
        update_N[indices_K] += values_K
    indices = np.flatnonzero(update_N).astype(np.int32)
    return np.concatenate([indices, update_N[indices].view(np.int32)])


def merged_by_tree(request: Request) -> Array:
    """What published gTop-k's tree makes of everybody's entries, packed."""
    held = [packed(replace(request, rank=rank)) for rank in range(request.world)]
    while len(held) > 1:
        pairs = [held[i : i + 2] for i in range(0, len(held), 2)]
        held = [merge(pair[0], pair[1], request.k) if len(pair) == 2 else pair[0] for pair in pairs]
    return held[0]


def check(update_N: Array, expected: Array) -> None:
    """Raises `ArithmeticError` if it is another update, such as one that was never made."""
    indices = np.flatnonzero(update_N)
    half = len(expected) // 2
    values = expected[half:].view(np.float32)
    kept = values != 0
    right = np.array_equal(indices, expected[:half][kept])
    if not (right and np.array_equal(update_N[indices], values[kept])):
        raise ArithmeticError(f"the update of {len(indices)} entries is not the one of {half} expected")
