"""Chooses how the largest entries of the accumulated gradient (acc), or of each chunk, are selected.

    acc        3.  -7.   0.   5.   5.  -5.      k = 3
    threshold  5, the k-th largest magnitude
    above           -7.                         all are selected
    equal                     5.   5.  -5.      selected, lowest index first, up to k entries in total
    selected   the indices 1, 3, 4

`make_selection` chooses the implementation.  Without chunks, all implementations select the same
entries:

    HostSelection     vectors in host memory          one pass, block by block (`cpu_selection`)
    TensorSelection   any device, only torch          compare and nonzero; a histogram of the leading bits
    CudaSelection     CUDA with Triton                one fused kernel (`cuda_selection`)

`ChunkedSelection` selects the largest magnitudes of each chunk, on any device.

torch.topk alone is not sufficient, because it breaks ties differently on each device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gridtrain.sparsify.cuda_selection import CudaSelection, are_kernels_correct
from gridtrain.sparsify.tensor_selection import (
    AccumulationTerms,
    HostSelection,
    SelectedEntries,
    Selection,
    TensorSelection,
    entries_at,
    sum_terms,
)
from gridtrain.sparsify.threshold_hint import MAGNITUDE_MASK, check_k


def make_selection(device: torch.device, chunk: int = 0) -> Selection:
    """Return the fastest selection that works on `device`.

    Args:
        chunk: the length of the chunks in which entries are selected; 0 to select among all elements.
    """
    if chunk:
        return ChunkedSelection(chunk)
    if device.type == "cpu":
        return HostSelection()
    if device.type == "cuda" and are_kernels_correct(device):
        return CudaSelection()
    return TensorSelection()


class ChunkedSelection:
    """Selects the largest magnitudes of each chunk (SparseLoCo, arXiv 2508.15706) with torch's operations.

    The vector is divided into chunks of `chunk` elements; the last one has up to twice as many.  From
    the chunk start .. stop, floor(k stop / n) - floor(k start / n) entries are selected, so that the total is
    k; ties go to the lowest index.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def select(self, terms: AccumulationTerms, k: int) -> SelectedEntries:
        """Compute `terms.acc_N` and select the largest magnitudes of its chunks.  See `Selection.select`."""
        n = terms.acc_N.numel()
        check_k(n, k)
        bits_N = sum_terms(terms).view(torch.int32) & MAGNITUDE_MASK
        rows = max(1, n // self._chunk) - 1  # excluding the last chunk
        start = rows * self._chunk
        ends = torch.arange(rows + 1, device="cpu") * self._chunk * k // n
        selected_N = torch.empty(n, dtype=torch.bool, device=bits_N.device)
        for part, shape, quotas in (
            (slice(0, start), (rows, self._chunk), ends.diff()),
            (slice(start, n), (1, n - start), k - ends[-1:]),
        ):
            if shape[0]:
                part_RC = _largest_of_rows(bits_N[part].view(shape), quotas.to(bits_N.device))
                selected_N[part] = part_RC.view(-1)
        where_K = torch.nonzero(selected_N).squeeze(1)
        return entries_at(terms.acc_N, where_K)


def _largest_of_rows(bits_RC: Tensor, quotas_R: Tensor) -> Tensor:
    """Return a mask of the `quotas_R` largest non-zero elements of each row; ties go to the lowest column."""
    largest = torch.topk(bits_RC, max(1, int(quotas_R.max())), dim=1).values
    kth_R1 = largest.gather(1, (quotas_R - 1).clamp_(min=0).unsqueeze(1))
    kth_R1[quotas_R == 0] = MAGNITUDE_MASK
    selected_RC = bits_RC > kth_R1
    wanted_R = quotas_R - selected_RC.sum(1)
    ties_T2 = torch.nonzero((bits_RC == kth_R1) & (bits_RC > 0))  # in ascending order
    rows_T = ties_T2[:, 0].contiguous()
    before_T = torch.arange(rows_T.numel(), device=rows_T.device) - torch.searchsorted(rows_T, rows_T)
    ties_T2 = ties_T2[before_T < wanted_R[rows_T]]
    selected_RC[ties_T2[:, 0], ties_T2[:, 1]] = True
    return selected_RC
