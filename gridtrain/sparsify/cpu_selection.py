"""Selects the k largest entries on the CPU (numpy), usually in one pass with a guessed threshold.

The vector, called acc (accumulated gradient), can be computed in the same pass, so that each block is
computed and compared while it is in the second-level cache.

    block b     fill(start, stop)              acc = residual + contribution, into the second buffer
                |acc| >= threshold ?  -------> candidates (ascending index)
                too many candidates: keep exactly the k largest; set the threshold just above the k-th largest
    end         at least k candidates: the k largest candidates are the k largest elements of the vector
                fewer than k candidates: the threshold was too high; make a second pass over acc with a
                threshold from a sample of acc and, if that is also too high, a third pass without a threshold

The result is exact.  An element that is not among the k largest of the blocks so far (ties go to the lower
index) is not among the k largest of the vector, and a later element that equals the k-th largest has a higher
index, so it is not selected.  A threshold only saves time.  If many entries are selected, it comes from a
sample that is computed first, because the threshold of the last step would be too low while a residual is
growing; otherwise it comes from the last step.

Magnitudes are compared as integers, because the bits of float32 numbers without the sign have the same order
as their magnitudes; infinity comes after every finite number, and NaN comes after infinity.  Values that are
not finite are therefore among the selected entries, so the caller can detect them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gridtrain.sparsify.threshold_hint import (
    MAGNITUDE_MASK,
    ThresholdHint,
    check_k,
)

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]
BitsArray = npt.NDArray[np.uint32]

BLOCK = 1 << 16
"""Number of elements in a block.  A block takes 256 KiB of each vector, which fits into the second-level
cache."""

_LOWEST_BITS = 1  # the bits of the smallest subnormal number, so that exact zeros are never selected
_PRUNE_AT = 4  # candidates are pruned when there are more than this many times k
_SAMPLE_STRIDE = 64
_SAMPLED_ENTRIES = 400  # expected number of selected entries in a sample that is computed first


class Fill(Protocol):
    """A function that computes acc_N[start:stop:step]."""

    def __call__(self, start: int, stop: int, step: int = 1) -> None: ...


class CpuSelection:
    """Selects entries from vectors with similar distributions, one after another.  Not thread-safe."""

    def __init__(self) -> None:
        self.hint = ThresholdHint()
        self._magnitudes = np.empty(0, np.uint32)
        self._reached = np.empty(0, np.bool_)

    def select(self, acc_N: FloatArray, k: int, fill: Fill | None = None) -> IndexArray:
        """Select the k largest magnitudes; ties go to the lowest index, and zeros are not selected.

        Args:
            acc_N: the vector, (n,) float32, contiguous.
            k: the number of entries to select, 1 <= k <= n.
            fill: computes acc_N; called once for each block in ascending order, and first for a sample if k
                is large.  None if acc_N has already been computed.

        Returns:
            The indices, (K,) int64, ascending.  K is k, or less if acc_N has fewer than k non-zero elements.

        Raises:
            LocalProtocolError: k is out of range.
        """
        n = acc_N.size
        check_k(n, k)
        if self._reached.size < min(n, BLOCK):  # at most n, because a vector may have many small parts
            self._magnitudes = np.empty(min(n, BLOCK), np.uint32)
            self._reached = np.empty(min(n, BLOCK), np.bool_)
        found = self._candidates(acc_N.view(np.uint32), k, fill)
        seen = found.seen_count
        indices_K, bits_K = found.prune()
        if bits_K.size == k:
            self.hint.update(int(bits_K.min()), seen, k)
        return indices_K

    def _candidates(self, bits_N: BitsArray, k: int, fill: Fill | None) -> _Candidates:
        start_bits = self.hint.bits
        stride = k // _SAMPLED_ENTRIES | 1  # odd, so that the sample covers all columns of most matrices
        if fill is not None and stride > _SAMPLE_STRIDE:
            fill(0, bits_N.size, stride)
            start_bits = _sampled_threshold(bits_N, k, stride)
        if start_bits > _LOWEST_BITS:
            found = self._visit(bits_N, k, start_bits, fill)
            if found.seen_count >= k:
                return found
            self.hint.mark_missed()
        elif fill is not None:  # compute acc first, because the threshold comes from a sample of acc
            for start in range(0, bits_N.size, BLOCK):
                fill(start, min(start + BLOCK, bits_N.size))
        sampled_bits = max(_LOWEST_BITS, _sampled_threshold(bits_N, k, _SAMPLE_STRIDE))
        found = self._visit(bits_N, k, sampled_bits, None)
        if found.seen_count >= k or sampled_bits == _LOWEST_BITS:
            return found
        return self._visit(bits_N, k, _LOWEST_BITS, None)

    def _visit(self, bits_N: BitsArray, k: int, threshold_bits: int, fill: Fill | None) -> _Candidates:
        found = _Candidates(k)
        threshold, sign_off = np.uint32(threshold_bits), np.uint32(MAGNITUDE_MASK)
        prune_at = max(_PRUNE_AT * k, BLOCK)
        for start in range(0, bits_N.size, BLOCK):
            stop = min(start + BLOCK, bits_N.size)
            if fill is not None:
                fill(start, stop)
            magnitudes, reached = self._magnitudes[: stop - start], self._reached[: stop - start]
            np.bitwise_and(bits_N[start:stop], sign_off, out=magnitudes)
            np.greater_equal(magnitudes, threshold, out=reached)
            hits = reached.nonzero()[0]
            if not hits.size:
                continue
            found.add(start, hits, magnitudes)
            if found.count > prune_at:
                threshold = found.prune()[1].min() + np.uint32(1)
        return found


class _Candidates:
    """Elements that may be among the k largest, in ascending order of their indices.

    Attributes:
        seen_count: the number of elements that were added, including the elements that were pruned.
        count: the number of elements that have not been pruned.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._indices: list[IndexArray] = []
        self._bits: list[BitsArray] = []
        self.seen_count = 0
        self.count = 0

    def add(self, start: int, hits: IndexArray, magnitudes: BitsArray) -> None:
        self._bits.append(magnitudes[hits])
        self._indices.append(hits + start)
        self.seen_count += hits.size
        self.count += hits.size

    def prune(self) -> tuple[IndexArray, BitsArray]:
        """Keep only the k largest elements; return their indices, ascending, and their magnitudes' bits."""
        if not self._indices:
            return np.empty(0, np.int64), np.empty(0, np.uint32)
        indices, bits = np.concatenate(self._indices), np.concatenate(self._bits)
        if bits.size > self._k:
            keep = np.flatnonzero(largest_first_ties(bits, self._k))  # a mask takes four times as long
            indices, bits = indices.take(keep), bits.take(keep)
        self._indices, self._bits, self.count = [indices], [bits], bits.size
        return indices, bits


def _sampled_threshold(bits_N: BitsArray, k: int, stride: int) -> int:
    """Return the bits of a threshold that very probably at least k elements reach, but not many more.

    The threshold's rank in the sample is the expected number of sampled elements among the k largest
    elements, plus four standard deviations.  The result is 0 if the sample is too small.
    """
    sample = bits_N[::stride] & np.uint32(MAGNITUDE_MASK)
    expected = k / stride
    rank = int(expected + 4 * expected**0.5) + 4
    return int(np.partition(sample, sample.size - rank)[sample.size - rank]) if rank <= sample.size else 0


def largest_first_ties(bits: BitsArray, k: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the k largest elements, where k < size; ties go to the lowest index."""
    kth = np.partition(bits, bits.size - k)[bits.size - k]
    keep: npt.NDArray[np.bool_] = bits > kth
    ties = np.flatnonzero(bits == kth)
    keep[ties[: k - np.count_nonzero(keep)]] = True
    return keep


@dataclass(frozen=True, slots=True)
class BlockwiseSum:
    """A `Fill` for `CpuSelection.select` that computes the accumulated gradient residual + weight * gradient.

    With DGC momentum (see `error_feedback`), it computes u = m u + weight * gradient and acc = residual + u.
    Each product and each sum is rounded to float32 separately, in this order, so that the result has the same
    bits as if these operations were applied to whole vectors, on the CPU or on a GPU.

    Attributes:
        residual_N, gradient_N: the residual and the gradient, (n,) float32, which are only read.
        acc_N: the result, (n,) float32.
        weight: this worker's share of the step's samples; 1.0 if gradient_N is already the contribution, 0.0
            if gradient_N must not be read.
        u_N, new_u_N: the momentum vector before and after the step, (n,) float32; u_N is only read.  Either
            both are None or neither is None.
        momentum: the DGC momentum m.
    """

    residual_N: FloatArray
    gradient_N: FloatArray
    acc_N: FloatArray
    weight: float = 1.0
    u_N: FloatArray | None = None
    new_u_N: FloatArray | None = None
    momentum: float = 0.0

    def __call__(self, start: int, stop: int, step: int = 1) -> None:
        part = slice(start, stop, step)
        acc, added = self.acc_N[part], self._contribution(part)
        if self.u_N is not None and self.new_u_N is not None:
            u = np.multiply(self.u_N[part], np.float32(self.momentum), out=self.new_u_N[part])
            added = np.add(u, added, out=u)
        np.add(self.residual_N[part], added, out=acc)

    def _contribution(self, part: slice) -> FloatArray | np.float32:
        if self.weight == 0.0:
            return np.float32(0.0)
        gradient, weight = self.gradient_N[part], np.float32(self.weight)
        return gradient if weight == 1.0 else np.multiply(gradient, weight, out=self.acc_N[part])
