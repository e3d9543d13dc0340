"""Sums sparse payloads, as TopK and GTopK need it, without losing a value.

    mine    . 3 . -1 . 5 .           sum by index in float32, on the union of both index sets
    theirs  2 . .  1 . 1 .
    sum     2 3 .  0 . 6 .           exact zeros are no entries
            | |        |
            | +--------+--> payload    the k = 2 largest by (-|s|, index), encoded once
            +-------------> truncated  what was dropped, and the encoding's rounding errors; for the residual

Both sides of an exchange compute the same bits, whichever payload is "mine": float addition commutes, and the
payload is encoded once and decoded by all, also by its sender.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, ValueKind, encode_with_decoded

IndexArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
TruncatedEntries = tuple[IndexArray, FloatArray]
"""What is added to a residual: indices (K,), strictly increasing, and values (K,), none zero."""

_RESERVE_BYTES = 24 << 20  # below glibc's largest threshold, 32 MiB; glibc retains at most twice as much
_SAMPLED_FROM = 1 << 13  # magnitudes; for fewer a sample saves no time
_STRIDE = 32
_MARGIN = (
    3  # times the square root of the sample's size, on both sides: six standard deviations at the median
)


@dataclass(frozen=True, slots=True)
class MergeResult:
    """`sparse` is what `payload` decodes to; sparse + truncated == mine + theirs, summed in float32."""

    payload: bytes
    sparse: SparseVector
    truncated_indices: IndexArray
    truncated_values: FloatArray

    def truncated_of_owner(self, modulus: int, residue: int) -> TruncatedEntries:
        """The truncated entries of the owner of indices with i % modulus == residue."""
        if modulus == 1:
            return self.truncated_indices, self.truncated_values
        # Moduli are powers of two, for which a mask takes a tenth of the time of a division.
        is_power = modulus & (modulus - 1) == 0
        remainders = self.truncated_indices & (modulus - 1) if is_power else self.truncated_indices % modulus
        owned = np.flatnonzero(remainders == residue)
        return self.truncated_indices.take(owned), self.truncated_values.take(owned)


def keep_freed_memory() -> None:
    """Let the C library retain the memory of freed arrays for the next merge.

    glibc returns arrays above 128 KiB to the system when they are freed, and the page faults take longer
    than a merge of 25,600 entries.  Its threshold rises to the size of a freed array, so freeing one large
    array that is never written to is enough.  Elsewhere this has no effect.
    """
    np.empty(_RESERVE_BYTES, np.uint8)


def largest_summable(world_size: int) -> float:
    """Magnitude up to which each of `world_size` members may contribute to one element.

    No sum can then overflow float32, in any order and with any rounding.  A member with a larger contribution
    has to skip the step, as with one that is not finite.
    """
    return float(np.finfo(np.float32).max) / (2 * world_size)


def merge(mine: SparseVector, theirs: SparseVector, *, n: int, k: int, kind: ValueKind) -> MergeResult:
    """Sum two payloads by index, and truncate to the k largest.

    Entries are selected by (-|s|, index), before encoding; an entry whose sum is exactly 0 is dropped.

    Args:
        mine, theirs: decoded entries of a vector of n elements.
        k: most entries of the result.

    Raises:
        RemoteProtocolError: a sum overflows float32 (honest members stay below `largest_summable`).
    """
    return truncate(sum_of_two(mine, theirs), n=n, k=k, kind=kind)


def truncate(summed: SparseVector, *, n: int, k: int, kind: ValueKind) -> MergeResult:
    """The k largest of a sum by (-|s|, index), encoded once; the rest and the rounding errors are truncated.

    Args:
        summed: entries of a vector of n elements, none of them 0.
    """
    chosen = np.flatnonzero(_largest(np.abs(summed.values), k))
    sums = summed.values.take(chosen)
    made = encode_with_decoded(summed.indices.take(chosen), sums, n=n, kind=kind)
    rest_values = summed.values.copy()
    rest_values[chosen] = sums - made.sparse.values  # exact: see `sparse_payload.encode_with_decoded`
    rest = np.flatnonzero(rest_values != 0)
    return MergeResult(made.payload, made.sparse, summed.indices.take(rest), rest_values.take(rest))


def sum_of_two(mine: SparseVector, theirs: SparseVector) -> SparseVector:
    """Sum by index in float32, independent of their order; exact zeros are no entries.

    Raises:
        RemoteProtocolError: a sum overflows float32.
    """
    split = mine.indices.size
    pairs = np.empty((split + theirs.indices.size, 2), "<u4")  # one uint64 each: index, then the value's bits
    for at, part in ((slice(0, split), mine), (slice(split, None), theirs)):
        pairs[at, 0] = part.values.view("<u4")
        pairs[at, 1] = part.indices
    # Two sorted runs, which a stable sort of integers merges in one pass.
    pairs.view("<u8").sort(axis=0, kind="stable")
    indices = pairs[:, 1].astype(np.int64)
    total = pairs[:, 0].copy().view("<f4")
    twice = np.flatnonzero(indices[1:] == indices[:-1])
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        total[twice] += total[twice + 1]
    total[twice + 1] = 0.0  # the second of a pair is no entry
    return _entries(indices, total)


def sum_in_rank_order(parts: Sequence[SparseVector]) -> SparseVector:
    """Sum by index, element by element in the order of `parts`, in float32; exact zeros are no entries.

    Raises:
        RemoteProtocolError: a sum overflows float32.
    """
    runs = np.concatenate([part.indices for part in parts])
    order = np.argsort(runs, kind="stable")
    ordered = runs.take(order)
    is_first = np.ones(ordered.shape, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    slots = np.empty_like(order)  # where in the union each entry of each part belongs
    slots[order] = np.cumsum(is_first) - 1
    total = np.zeros(np.count_nonzero(is_first), np.float32)
    start = 0
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        for part in parts:
            stop = start + part.indices.size
            total[slots[start:stop]] += part.values
            start = stop
    return _entries(ordered.take(np.flatnonzero(is_first)), total)


def _entries(indices: IndexArray, total: FloatArray) -> SparseVector:
    """The entries whose sum is not 0.  Raises `RemoteProtocolError` if a sum is not finite."""
    if not np.isfinite(total).all():
        raise RemoteProtocolError(
            f"a sum of sparse payloads overflows float32 at index {indices[~np.isfinite(total)][0]}",
            remedy="drop the peer: a member with values that large has to skip the step",
        )
    is_entry = np.flatnonzero(total != 0)
    return SparseVector(indices.take(is_entry), total.take(is_entry))


def _largest(magnitudes: FloatArray, k: int) -> npt.NDArray[np.bool_]:
    """Mask of the k largest; ties go to the first."""
    if magnitudes.size <= k:
        return np.ones(magnitudes.shape, np.bool_)
    threshold = _kth_largest(magnitudes, k)
    chosen: npt.NDArray[np.bool_] = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return chosen


def _kth_largest(magnitudes: FloatArray, k: int) -> np.float32:
    """Exactly; with many magnitudes, a sample is used to exclude most before the rest is partitioned.

    The k-th largest nearly always lies between the sample's lower and upper bound, in a thin slice of all
    magnitudes.  If it does not (many ties, or an order that coincides with the stride), all are partitioned.
    """
    size = magnitudes.size
    if size >= _SAMPLED_FROM:
        sample = np.sort(magnitudes[::_STRIDE])
        at, margin = sample.size - k * sample.size // size, _MARGIN * math.isqrt(sample.size)
        low, high = sample[max(0, at - margin)], sample[min(sample.size - 1, at + margin)]
        above = int(np.count_nonzero(magnitudes > high))
        between = magnitudes.take(np.flatnonzero((magnitudes >= low) & (magnitudes <= high)))
        rest = k - above
        if 0 < rest <= between.size:
            return np.float32(np.partition(between, between.size - rest)[between.size - rest])
    return np.float32(np.partition(magnitudes, size - k)[size - k])
