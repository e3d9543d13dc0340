"""Selects the k largest entries with torch's operations on any device, and defines the `Selection` interface.

`gridtrain.sparsify.selection` describes the result, and chooses an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.sparsify.cpu_selection import BlockwiseSum, CpuSelection
from gridtrain.sparsify.threshold_hint import MAGNITUDE_MASK, ThresholdHint, check_k

_INDEX_MASK = 0xFFFF_FFFF  # n <= 2**32
_FEW = 1 << 20
"""The maximum number of candidates to sort at once; the limit is 4 k if that is larger.  If there are more
candidates, the exact threshold is computed instead."""


@dataclass(frozen=True, slots=True)
class AccumulationTerms:
    """The terms of the accumulated gradient, acc = residual + added, where added = weight * gradient.

    With DGC momentum (see `error_feedback`), added is the new u = m u + weight * gradient.

    All tensors are contiguous, (n,) float32, and on the same device.  Only `acc_N` and `new_u_N` are written.
    Each product and each sum is rounded separately, in this order, so that all devices compute the same bits.

    Attributes:
        weight: this worker's share of the step's samples; 1.0 if gradient_N is already the contribution, 0.0
            if gradient_N must not be read.
        u_N, new_u_N: the momentum vector before and after the step; either both are None or neither is None.
        momentum: the DGC momentum m.
    """

    residual_N: Tensor
    gradient_N: Tensor
    acc_N: Tensor
    weight: float = 1.0
    u_N: Tensor | None = None
    new_u_N: Tensor | None = None
    momentum: float = 0.0


@dataclass(frozen=True, slots=True)
class SelectedEntries:
    """The selected entries of the accumulated gradient.

    Attributes:
        indices_K: (K,) the indices on the host, ascending.
        values_K: (K,) the values on the host.
        where_K: (K,) the same indices on the device.
    """

    indices_K: npt.NDArray[np.int64]
    values_K: npt.NDArray[np.float32]
    where_K: Tensor


class Selection(Protocol):
    """Computes the accumulated gradient and selects entries of it.

    Use a separate object for each vector, because an object keeps the threshold of its last call as a hint.
    """

    def select(self, terms: AccumulationTerms, k: int) -> SelectedEntries:
        """Compute `terms.acc_N` and select its k largest magnitudes; ties go to the lowest index.

        Zeros are not selected.  Values that are not finite are treated as larger than all finite values, so
        they are among the selected entries.

        Raises:
            LocalProtocolError: k is not in 1 .. n.
        """
        ...


class HostSelection:
    """Selection in host memory with numpy, on the calling thread."""

    def __init__(self) -> None:
        self._blocked = CpuSelection()
        self.hint = self._blocked.hint

    def select(self, terms: AccumulationTerms, k: int) -> SelectedEntries:
        acc_N = terms.acc_N.numpy()
        fill = BlockwiseSum(
            terms.residual_N.numpy(),
            terms.gradient_N.detach().numpy(),
            acc_N,
            terms.weight,
            None if terms.u_N is None else terms.u_N.numpy(),
            None if terms.new_u_N is None else terms.new_u_N.numpy(),
            terms.momentum,
        )
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the selected values
            indices_K = self._blocked.select(acc_N, k, fill)
        return SelectedEntries(indices_K, acc_N[indices_K], torch.from_numpy(indices_K))


class TensorSelection:
    """Selection on any device with torch's operations.  A selection waits for the device two to six times."""

    def __init__(self) -> None:
        self.hint = ThresholdHint()

    def select(self, terms: AccumulationTerms, k: int) -> SelectedEntries:
        return entries_at(terms.acc_N, self.indices(sum_terms(terms), k))

    def indices(self, acc_N: Tensor, k: int) -> Tensor:
        """Return the indices of the selected entries: (K,) int64 on the device, ascending.

        See `Selection.select` for the meaning of k, the order of ties and the errors.
        """
        check_k(acc_N.numel(), k)
        bits_N = acc_N.view(torch.int32) & MAGNITUDE_MASK
        start_bits = self.hint.bits
        many = max(_FEW, 4 * k)
        candidates = None
        if start_bits > 1:
            candidates = self._reaching(bits_N, start_bits, k, many)
        if candidates is None:
            start_bits = max(1, _lower_bound(bits_N, k, many))
            candidates = self._reaching(bits_N, start_bits, 0, many)
        if candidates is None:  # too many candidates to sort; start_bits is then the k-th magnitude
            where_K = _select_by_threshold(bits_N, k, start_bits)
            seen = where_K.numel()
        else:
            seen = candidates.numel()
            keys = sort_keys(bits_N[candidates], candidates)
            where_K = key_indices(torch.topk(keys, min(k, seen), sorted=False).values).sort().values
        if where_K.numel() == k:
            self.hint.update(int(bits_N[where_K].min()), seen, k)
        return where_K

    def _reaching(self, bits_N: Tensor, threshold_bits: int, at_least: int, at_most: int) -> Tensor | None:
        """Return the indices of the elements that reach the threshold.

        Returns None if the number of these elements is not in at_least .. at_most.
        """
        reached = bits_N >= threshold_bits
        count = int(torch.count_nonzero(reached))
        if count < at_least:
            self.hint.mark_missed()
            return None
        return None if count > at_most else torch.nonzero(reached).squeeze(1)


def entries_at(acc_N: Tensor, where_K: Tensor) -> SelectedEntries:
    """Copy the entries at the indices `where_K`, which are on the device of acc_N, to the host."""
    return SelectedEntries(where_K.cpu().numpy(), acc_N[where_K].cpu().numpy(), where_K)


def sort_keys(bits_C: Tensor, indices_C: Tensor) -> Tensor:
    """Return the sort keys of candidates, (C,) int64.

    A larger magnitude has a larger key; on a tie, the lower index has the larger key.  The key of a magnitude
    above 0 is never 0.
    """
    return (bits_C.to(torch.int64) << 32) | (_INDEX_MASK - indices_C)


def key_indices(keys_C: Tensor) -> Tensor:
    """Return the indices that `sort_keys` has encoded in the keys; 2**32 - 1 for a key of 0."""
    return _INDEX_MASK - (keys_C & _INDEX_MASK)


def sum_terms(terms: AccumulationTerms) -> Tensor:
    """Compute and return acc_N, with one pass per operation.

    `alpha=` is not used, because it would fuse the multiplication and the addition, and the result would be
    rounded only once.
    """
    added = terms.gradient_N
    if terms.weight == 0.0:
        added = terms.acc_N.zero_()
    elif terms.weight != 1.0:
        added = torch.mul(terms.gradient_N, terms.weight, out=terms.acc_N)
    if terms.u_N is not None and terms.new_u_N is not None:
        added = torch.mul(terms.u_N, terms.momentum, out=terms.new_u_N).add_(added)
    return torch.add(terms.residual_N, added, out=terms.acc_N)


_DIGITS = ((20, 11), (9, 11), (0, 9))
"""(shift, width) of each level's digit in bits.  The digits are the exponent with 3 bits of the mantissa, the
next 11 bits, and the remaining 9 bits."""


def _lower_bound(bits_N: Tensor, k: int, many: int) -> int:
    """Return the bits of a threshold that at least k and at most `many` elements reach.

    If there is no such threshold, return the bits of the k-th largest magnitude.  The method is a radix
    selection with histograms (Alabi et al. 2012, "Fast k-selection algorithms for graphics processing
    units"): the elements are counted by their leading bits, and the search continues within the bin that
    contains the k-th largest element.  The result is 0 if there are fewer than k non-zero elements.
    """
    prefix, wanted, within = 0, k, bits_N
    for level, (shift, width) in enumerate(_DIGITS):
        if level:
            within = within[(within >> (shift + width)) == prefix]
        digits = (within >> shift) & ((1 << width) - 1)
        counts = torch.bincount(digits, minlength=1 << width).cpu()
        reach = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(reach, wanted))
        prefix = (prefix << width) | ((1 << width) - 1 - place)
        total = k - wanted + int(reach[place])
        if total <= many:
            return prefix << shift
        wanted -= int(reach[place - 1]) if place else 0
    return prefix


def _select_by_threshold(bits_N: Tensor, k: int, kth_bits: int) -> Tensor:
    above = torch.nonzero(bits_N > kth_bits).squeeze(1)
    ties = torch.nonzero(bits_N == kth_bits).squeeze(1)[: k - above.numel()]
    return torch.cat((above, ties)).sort().values
