"""Sums of sparse payloads: the numerical heart of TopK and GTopK.

Decides which entries of a sum go on and what stays behind, so that nothing is lost.  Never touches
the network, a tensor, or the residual itself: it hands out what has to be added to it.

    mine    . 3 . -1 . 5 .           sum by index in float32, on the union of both index sets
    theirs  2 . .  1 . 1 .
    sum     2 3 .  0 . 6 .           exact zeros are no entries
            | |        |
            | +--------+--> payload  the k = 2 largest by (-|s|, index), encoded once
            +-------------> kept     what was dropped, and what encoding rounded off

Both sides of an exchange compute the same bits, whichever of the two payloads is "mine": float
addition commutes, and the payload is made once and decoded again, also by the one who made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gridtrain.errors import RemoteProtocolError
from gridtrain.wire.sparse import Sparse, ValueKind, decode, encode

IndexArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Kept = tuple[IndexArray, FloatArray]
"""What must go back into a residual: indices (K,), strictly increasing, and values (K,), none zero."""


@dataclass(frozen=True, slots=True)
class Merged:
    """`sparse` is what `payload` decodes to.  sparse + kept == mine + theirs, summed in float32."""

    payload: bytes
    sparse: Sparse
    kept_indices: IndexArray
    kept_values: FloatArray

    def owned(self, modulus: int, residue: int) -> Kept:
        """The part of what is kept that falls to the owner of indices i % modulus == residue."""
        is_owned = self.kept_indices % modulus == residue
        return self.kept_indices[is_owned], self.kept_values[is_owned]


def largest_summable(world_size: int) -> float:
    """Magnitude up to which each of `world_size` members may contribute to one element.

    No sum can then overflow float32, in any order and however it is rounded on the way.  A larger
    contribution has to be treated as a non-finite one is: the member skips.
    """
    return float(np.finfo(np.float32).max) / (2 * world_size)


def merge(mine: Sparse, theirs: Sparse, *, n: int, k: int, kind: ValueKind) -> Merged:
    """Sum two payloads by index, truncate to the k largest, and keep the rest.

    Selection is by (-|s|, index), before encoding; an entry whose sum is exactly 0 is dropped.

    Args:
        mine, theirs: entries of a vector of n elements, as decoded.
        k: entries of the result, at most.

    Raises:
        RemoteProtocolError: a sum overflows float32 (honest members stay below `largest_summable`).
    """
    summed = sum_in_rank_order([mine, theirs])
    chosen = _largest(np.abs(summed.values), k)
    payload = encode(summed.indices[chosen], summed.values[chosen], n=n, kind=kind)
    sparse = decode(payload, n=n, max_entries=k, kind=kind)
    kept_values = summed.values.copy()
    kept_values[chosen] -= sparse.values  # exact: see `wire.sparse.encode`
    is_kept = kept_values != 0
    return Merged(payload, sparse, summed.indices[is_kept], kept_values[is_kept])


def sum_in_rank_order(parts: Sequence[Sparse]) -> Sparse:
    """Sum by index, element by element in the order of `parts`, in float32; exact zeros are no entries.

    Raises:
        RemoteProtocolError: a sum overflows float32.
    """
    union = _union([part.indices for part in parts])
    total = np.zeros(union.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        for part in parts:
            total[np.searchsorted(union, part.indices)] += part.values
    if not np.isfinite(total).all():
        raise RemoteProtocolError(
            f"a sum of sparse payloads overflows float32 at index {union[~np.isfinite(total)][0]}",
            remedy="drop the peer: a member whose values are that large has to skip the step",
        )
    is_entry = total != 0
    return Sparse(union[is_entry], total[is_entry])


def _union(sorted_runs: list[IndexArray]) -> IndexArray:
    """`numpy.unique` hashes, which takes five times as long as merging runs that are sorted already."""
    union = np.concatenate(sorted_runs)
    union.sort(kind="stable")
    is_first = np.ones(union.shape, np.bool_)
    np.not_equal(union[1:], union[:-1], out=is_first[1:])
    return union[is_first]


def _largest(magnitudes: FloatArray, k: int) -> npt.NDArray[np.bool_]:
    """Mask of the k largest, of equal ones the first."""
    if magnitudes.size <= k:
        return np.ones(magnitudes.shape, np.bool_)
    threshold = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    chosen: npt.NDArray[np.bool_] = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return chosen
