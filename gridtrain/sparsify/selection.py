"""Selects the entries that are sent: exactly the k largest magnitudes, on the device of the vector.

    acc        3.  -7.   0.   5.   5.  -5.      k = 3
    threshold  the k-th largest magnitude: 5
    above      -7                               all of them are selected
    equal               5.   5.  -5.            as many as there is room for, lowest index first
    selected   1, 3, 4

All implementations select the same set for the same bits:

    HostSelection     vectors in host memory          one pass, block by block (`cpu_selection`)
    TensorSelection   any device, torch alone         compare and nonzero; a histogram of the leading bits
    CudaSelection     CUDA with Triton                one fused kernel (`cuda_selection`)

torch.topk alone is not enough, because it resolves ties differently on each device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.errors import LocalProtocolError
from gridtrain.sparsify.cpu_selection import (
    MAGNITUDE_MASK,
    BlockwiseSum,
    CpuSelection,
    ThresholdHint,
    value_bits,
)

_INDEX_MASK = 0xFFFF_FFFF  # n <= 2**32
_FEW = 1 << 20
"""Up to this many candidates are sorted at once; with more, the exact threshold is computed first."""


@dataclass(frozen=True, slots=True)
class AccumulationTerms:
    """acc = residual + added, added = weight * gradient, or u with u = m u + weight * gradient.

    All tensors are (n,) float32 on one device, contiguous.  Only `acc_N` and `new_u_N` are written.  Each
    product and sum is rounded separately, in this order, so that all devices compute the same bits.

    Attributes:
        weight: n_i / N; 1.0: gradient_N is the contribution already; 0.0: it does not count.
        u_N, new_u_N: momentum before and after; both or none.
        momentum: m.
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
    """`indices_K`, ascending, and `values_K` of acc, on the host; `where_K`: the indices on the device."""

    indices_K: npt.NDArray[np.int64]
    values_K: npt.NDArray[np.float32]
    where_K: Tensor


class Selection(Protocol):
    """Computes acc and selects from it.  It has a threshold from the last call: one object per vector."""

    def select(self, terms: AccumulationTerms, k: int, floor: float = 0.0) -> SelectedEntries:
        """The k largest |acc|; ties go to the lowest index; zeros and entries below `floor` are not selected.

        Values that are not finite count as larger than all others, so they are among the selected.

        Raises:
            LocalProtocolError: k is not in 1 .. n.
        """
        ...


def select_topk(acc_N: Tensor, k: int) -> Tensor:
    """Indices of the k largest |acc_N|; ties go to the lowest index; zeros are not selected.

    Args:
        acc_N: (n,) float32 without NaN, on any device.
        k: 1 <= k <= n.

    Returns:
        (K,) int64 on the same device, ascending.  K = k, or fewer when acc_N has fewer non-zeros.

    Raises:
        LocalProtocolError: k is out of range.
    """
    if acc_N.device.type == "cpu":
        return torch.from_numpy(CpuSelection().select(acc_N.detach().contiguous().numpy(), k))
    return TensorSelection().indices(acc_N, k)


class HostSelection:
    """Vectors in host memory, by numpy, on the calling thread."""

    def __init__(self) -> None:
        self._blocked = CpuSelection()

    @property
    def hint(self) -> ThresholdHint:
        return self._blocked.hint

    def select(self, terms: AccumulationTerms, k: int, floor: float = 0.0) -> SelectedEntries:
        acc_N = terms.acc_N.numpy()
        fill = BlockwiseSum(
            terms.residual_N.numpy(),
            terms.gradient_N.detach().numpy(),
            acc_N,
            weight=terms.weight,
            u_N=None if terms.u_N is None else terms.u_N.numpy(),
            new_u_N=None if terms.new_u_N is None else terms.new_u_N.numpy(),
            momentum=terms.momentum,
        )
        with np.errstate(over="ignore", invalid="ignore"):  # checked among the selected values
            indices_K = self._blocked.select(acc_N, k, fill, floor)
        return SelectedEntries(indices_K, acc_N[indices_K], torch.from_numpy(indices_K))


class TensorSelection:
    """Any device, with torch's operations alone.  Waits for the device two to six times."""

    def __init__(self) -> None:
        self.hint = ThresholdHint()

    def select(self, terms: AccumulationTerms, k: int, floor: float = 0.0) -> SelectedEntries:
        where_K = self.indices(_sum(terms), k, floor)
        return SelectedEntries(where_K.cpu().numpy(), terms.acc_N[where_K].cpu().numpy(), where_K)

    def indices(self, acc_N: Tensor, k: int, floor: float = 0.0) -> Tensor:
        """(K,) int64, ascending, on the device; see `Selection.select`."""
        check_k(acc_N.numel(), k)
        floor_bits = max(1, value_bits(floor))
        bits_N = acc_N.view(torch.int32) & MAGNITUDE_MASK
        start_bits = self.hint.start(floor_bits)
        many = max(_FEW, 4 * k)
        candidates = None
        if start_bits > 1:
            candidates = self._reaching(bits_N, start_bits, k if start_bits > floor_bits else 0, many)
        if candidates is None:
            start_bits = max(floor_bits, _lower_bound(bits_N, k, many))
            candidates = self._reaching(bits_N, start_bits, 0, many)
        if candidates is None:  # too many to sort have at least the k-th magnitude
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
        """Indices of what reaches the threshold; None if there are not at_least .. at_most of them."""
        reached = bits_N >= threshold_bits
        count = int(torch.count_nonzero(reached))
        if count < at_least:
            self.hint.mark_missed()
            return None
        return None if count > at_most else torch.nonzero(reached).squeeze(1)


def check_k(n: int, k: int) -> None:
    """Raises `LocalProtocolError` unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise LocalProtocolError(f"select {k} of {n} entries, must be 1 .. {n}")


def sort_keys(bits_C: Tensor, indices_C: Tensor) -> Tensor:
    """(C,) int64 that order as (-|acc|, index) does, the first one the largest; never 0 for |acc| > 0."""
    return (bits_C.to(torch.int64) << 32) | (_INDEX_MASK - indices_C)


def key_indices(keys_C: Tensor) -> Tensor:
    """The indices again; 2**32 - 1 for a key of 0."""
    return _INDEX_MASK - (keys_C & _INDEX_MASK)


def _sum(terms: AccumulationTerms) -> Tensor:
    """acc_N, in as many passes as there are operations.  Never `alpha=`: it would fuse, and round once."""
    added = terms.gradient_N
    if terms.weight == 0.0:
        added = terms.acc_N.zero_()
    elif terms.weight != 1.0:
        added = torch.mul(terms.gradient_N, terms.weight, out=terms.acc_N)
    if terms.u_N is not None and terms.new_u_N is not None:
        added = torch.mul(terms.u_N, terms.momentum, out=terms.new_u_N).add_(added)
    return torch.add(terms.residual_N, added, out=terms.acc_N)


_DIGITS = ((20, 11), (9, 11), (0, 9))
"""(shift, width) in bits: exponent and the first 3 of the mantissa, then the next 11, then the rest."""


def _lower_bound(bits_N: Tensor, k: int, many: int) -> int:
    """Bits that k to `many` elements reach, or else those of the k-th magnitude itself.

    A radix selection by histograms (Alabi et al. 2012, "Fast k-selection algorithms for graphics processing
    units"): count by the leading bits, go on within the bin that holds the k-th.  0: fewer than k non-zeros.
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
