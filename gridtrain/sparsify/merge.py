"""Sums sparse payloads for TopK and GTopK, and truncates sums to k entries; residuals keep the other entries.

    mine    . 3 . -1 . 5 .           sum by index in float32, on the union of the index sets
    theirs  2 . .  1 . 1 .
    sum     2 3 .  0 . 6 .           sums that are exactly zero are dropped
            | |        |
            | +--------+--> payload    the k = 2 largest magnitudes, encoded once
            +-------------> truncated  dropped values and the encoding's rounding errors, for the residual

Both sides of an exchange compute the same bits, because floating-point addition is commutative, and because
the payload is encoded only once and then decoded by all members, including its sender.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import EncodedSparse, SparseVector, encode_with_decoded
from gridtrain.network.wire.value_encoding import ValueKind

IndexArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
TruncatedEntries = tuple[IndexArray, FloatArray]
"""Entries to add to a residual: strictly increasing indices (K,), and non-zero values (K,)."""

_LARGEST = float(np.finfo(np.float32).max)
_SAMPLED_FROM = 1 << 13  # the smallest number of magnitudes for which sampling saves time
_STRIDE = 32
_MARGIN = 3
"""The margin on each side, divided by the square root of the sample's size: six standard deviations at the
median."""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge.

    Attributes:
        encoded: the encoded entries; added to the truncated entries, they equal the whole sum in float32.
        truncated_indices, truncated_values: the indices and the values, each (K,), of the dropped entries and
            of the encoding's rounding errors.
    """

    encoded: EncodedSparse
    truncated_indices: IndexArray
    truncated_values: FloatArray

    @property
    def payload(self) -> bytes:
        """The encoded result."""
        return self.encoded.payload

    @property
    def sparse(self) -> SparseVector:
        """The entries to which the payload decodes."""
        return self.encoded.sparse

    def truncated_of_owner(self, modulus: int, residue: int) -> TruncatedEntries:
        """Return the truncated entries with index % modulus == residue.

        Of the members that computed the same merge, this member adds these entries to its residual, and the
        others add the rest.
        """
        if modulus == 1:
            return self.truncated_indices, self.truncated_values
        # Moduli are powers of two, for which a mask takes a tenth of the time of a division.
        is_power = modulus & (modulus - 1) == 0
        remainders = self.truncated_indices & (modulus - 1) if is_power else self.truncated_indices % modulus
        owned = np.flatnonzero(remainders == residue)
        return self.truncated_indices.take(owned), self.truncated_values.take(owned)


def largest_summable(world_size: int, growth: float = 1.0) -> float:
    """Return the largest magnitude that each of `world_size` members may contribute to one element.

    With this limit, no sum can overflow float32, regardless of order and rounding.  A member whose
    contribution is larger or not finite must skip the step.

    Args:
        growth: an upper bound on the factor by which the rounding of partial sums increases a sum.
    """
    return _LARGEST / (2 * world_size * growth)


def merge(mine: SparseVector, theirs: SparseVector, *, n: int, k: int, kind: ValueKind) -> MergeResult:
    """Sum the entries of two payloads by index, and truncate the sum to its k largest entries.

    The largest magnitudes are selected before encoding; ties go to the lowest index.  An entry whose sum is
    exactly 0 is dropped.

    Args:
        mine, theirs: the decoded entries of the two payloads.
        n: the number of elements of the vector.
        k: the maximum number of entries in the result.
        kind: the encoding of the values.

    Raises:
        RemoteProtocolError: a sum overflows float32, which cannot happen if all members stay within
            `largest_summable`.
    """
    return truncate(sum_of_two(mine, theirs), n=n, k=k, kind=kind)


def truncate(summed: SparseVector, *, n: int, k: int, kind: ValueKind) -> MergeResult:
    """Encode those k entries of a sum that have the largest magnitudes; ties go to the lowest index.

    The other entries, and the rounding errors of the encoding, are the truncated entries of the result.

    Args:
        summed: the entries of a vector of n elements.  Entries of value 0 are ignored; each may have the
            same index as the entry before it.
        n: the number of elements of the vector.
        k: the maximum number of entries in the result.
        kind: the encoding of the values.
    """
    chosen: slice | IndexArray = slice(None)
    if summed.values.size > k or not summed.values.all():
        chosen = np.flatnonzero(_largest(np.abs(summed.values), k))
    indices = summed.indices[chosen]
    made = encode_with_decoded(indices, summed.values[chosen], n=n, kind=kind)
    if made.sparse.indices.size < indices.size:  # some values are not sent
        chosen = np.searchsorted(summed.indices, made.sparse.indices)
    rest_values = summed.values.copy()
    rest_values[chosen] -= made.sparse.values  # exact: see `sparse_payload.encode_with_decoded`
    rest = np.flatnonzero(rest_values != 0)
    return MergeResult(made, summed.indices.take(rest), rest_values.take(rest))


def sum_of_two(mine: SparseVector, theirs: SparseVector) -> SparseVector:
    """Sum two sparse vectors by index in float32.

    An index that is in both vectors has two entries in the result: the sum, and then 0.  Entries of value 0
    are not removed, because `truncate` ignores them.  Swapping the two vectors does not change the result's
    bits.

    Raises:
        RemoteProtocolError: a sum overflows float32.
    """
    indices, total = sort_by_index([mine, theirs])
    twice = np.flatnonzero(indices[1:] == indices[:-1])
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        sums = total.take(twice) + total.take(twice + 1)
    _check_sums(indices.take(twice), sums)
    total[twice], total[twice + 1] = sums, 0.0
    return SparseVector(indices, total)


def sum_in_rank_order(parts: Sequence[SparseVector]) -> SparseVector:
    """Sum sparse vectors by index in float32; sums that are exactly 0 are dropped.

    The values of each element are added in the order of `parts`.

    Raises:
        RemoteProtocolError: a sum overflows float32.
    """
    values = np.concatenate([part.values for part in parts])
    ordered, positions = _sort_pairs(parts, np.arange(values.size, dtype=np.uint32))
    values = values.take(positions)
    is_repeated = np.zeros(ordered.shape, np.bool_)
    np.equal(ordered[1:], ordered[:-1], out=is_repeated[1:])
    firsts, repeats = np.flatnonzero(~is_repeated), np.flatnonzero(is_repeated)
    total = values.take(firsts)
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        np.add.at(total, repeats - np.arange(1, repeats.size + 1), values.take(repeats))  # one after another
    indices = ordered.take(firsts)
    _check_sums(indices, total)
    kept = np.flatnonzero(total)
    return SparseVector(indices.take(kept), total.take(kept))


def sort_by_index(parts: Sequence[SparseVector]) -> tuple[IndexArray, FloatArray]:
    """Return the entries of all parts, sorted by index, and for equal indices by the bits of the values."""
    values = np.concatenate([part.values for part in parts])
    indices, bits = _sort_pairs(parts, values.view(np.uint32))
    return indices, bits.view(np.float32)


def _sort_pairs(
    parts: Sequence[SparseVector], items: npt.NDArray[np.uint32]
) -> tuple[IndexArray, npt.NDArray[np.uint32]]:
    """Sort the pairs (index, item) by index, and for equal indices by item.

    Args:
        items: one item for each entry of the parts, in order.
    """
    pairs = np.empty((items.size, 2), "<u4")  # one uint64 each, with the index in its higher half
    pairs[:, 0] = items
    np.concatenate([part.indices for part in parts], out=pairs[:, 1], casting="unsafe")
    pairs.view("<u8").sort(axis=0, kind="stable")  # merges the parts, each of which is sorted
    return pairs[:, 1].astype(np.int64), pairs[:, 0].astype(np.uint32)


def _check_sums(indices: IndexArray, sums: FloatArray) -> None:
    """Raise `RemoteProtocolError` if a sum is not finite."""
    if not np.isfinite(sums).all():
        raise RemoteProtocolError(
            f"a sum of sparse payloads overflows float32 at index {indices[~np.isfinite(sums)][0]}",
            remedy="a member whose values are this large must skip the step",
        )


def _largest(magnitudes: FloatArray, k: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the k largest magnitudes above 0; ties go to the lowest position."""
    threshold = _kth_largest(magnitudes, k) if magnitudes.size > k else np.float32(0.0)
    chosen: npt.NDArray[np.bool_] = magnitudes > threshold
    if threshold == 0:
        return chosen
    ties = np.flatnonzero(magnitudes == threshold)
    chosen[ties[: k - np.count_nonzero(chosen)]] = True
    return chosen


def _kth_largest(magnitudes: FloatArray, k: int) -> np.float32:
    """Return exactly the k-th largest magnitude.

    If there are many magnitudes, a sample is used to exclude most of them before the rest is partitioned.
    The k-th largest magnitude nearly always lies between two bounds that are taken from the sample, and few
    other magnitudes lie between them.  If the k-th largest magnitude is outside the bounds (because of many
    ties, or an order that coincides with the stride), all magnitudes are partitioned.
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
