"""A rank's sparse gradient, and how published gTop-k merges two.  Only numpy.

Decides which entries: k random ones of n, of each rank others, chosen before any clock starts.

    2 k int32:  | k indices, ascending | k float32 values, bit for bit |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rivals.contract import Request

Array = np.ndarray[Any, Any]


def drawn(request: Request) -> tuple[Array, Array]:
    """This rank's k indices, ascending, shape (k,), int32, and values, shape (k,), float32."""
    rng = np.random.default_rng(request.rank)
    indices_K = np.sort(rng.choice(request.n, request.k, replace=False, shuffle=False)).astype(np.int32)
    return indices_K, rng.standard_normal(request.k).astype(np.float32)


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
