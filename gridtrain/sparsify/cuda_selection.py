"""Selects the k largest entries on a CUDA GPU with Triton kernels, and checks that the kernels work.

A kernel computes acc, the sum of the residual and the contribution, and writes a key for each element whose
magnitude reaches a threshold.  A key is an int64 that combines the magnitude and the index of an element, so
that the k largest keys belong to the selected entries.

    threshold of the last selection    accumulate --> keys --topk--> entries --one copy--> host
    no threshold yet (torch computes   histogram --> threshold --> compact --> keys, and then the same; the
    acc), or fewer than k elements     threshold stays on the device
    reached it
    more keys than the buffer holds    TensorSelection on the same acc (after many ties, or a change of the
                                       distribution)

A selection usually waits for the device only once, for the copy of k entries and a count.  There are about k
to 3 k keys, and all operations after the kernels process only these keys.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gridtrain.sparsify.tensor_selection import (
    AccumulationTerms,
    SelectedEntries,
    TensorSelection,
    entries_at,
    key_indices,
    sum_terms,
)
from gridtrain.sparsify.threshold_hint import ThresholdHint, check_k

HISTOGRAM_SHIFT, HISTOGRAM_BINS = 20, 2048  # counts magnitudes by their leading 11 bits
_BLOCK = 2048  # elements per program, 8 per thread; with 48 registers per thread, an SM runs 5 programs
_LAUNCH = {"BLOCK": _BLOCK, "num_warps": 8, "enable_fp_fusion": False}  # of all kernels
_PROGRAMS_PER_SM = 4  # of the histogram, each with its own 2048 bins
_CAPACITY_FACTOR = 4  # capacity of the buffer of keys, as a multiple of k
_MIN_CAPACITY = 1 << 14


class CudaSelection:
    """Implements `Selection` on a CUDA device with Triton kernels.  Not thread-safe.

    Args:
        programs: the maximum number of programs of the histogram kernel; None to choose it by the device.
    """

    def __init__(self, programs: int | None = None) -> None:
        from gridtrain.sparsify import triton_kernels

        self.hint = ThresholdHint()
        self._kernels: Any = triton_kernels
        self._programs = programs
        self._wide = TensorSelection()
        self._keys_C: Tensor | None = None

    def select(self, terms: AccumulationTerms, k: int) -> SelectedEntries:
        """Compute `terms.acc_N` and select its k largest magnitudes.  See `Selection.select`."""
        check_k(terms.acc_N.numel(), k)
        start_bits = self.hint.bits
        with _current(terms.acc_N.device):
            keys_C, threshold, count = self._scratch(terms.acc_N.device, k)
            if start_bits > 1:
                self._accumulate(terms, keys_C, threshold.fill_(start_bits), count)
            else:
                self._find(sum_terms(terms), k, keys_C, threshold, count)
            seen, selected = _fetch(terms.acc_N, k, keys_C, count)
            if seen < k and start_bits > 1:
                self.hint.mark_missed()
                keys_C.zero_()
                self._find(terms.acc_N, k, keys_C, threshold, count.zero_())
                seen, selected = _fetch(terms.acc_N, k, keys_C, count)
        if seen > keys_C.numel():
            selected = entries_at(terms.acc_N, self._wide.indices(terms.acc_N, k))
        if selected.indices_K.size == k:
            self.hint.update(int((selected.values_K.view(np.uint32) & 0x7FFF_FFFF).min()), seen, k)
        return selected

    def _scratch(self, device: torch.device, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return buffers for the keys, the threshold and the count, filled with zeros."""
        room = max(_CAPACITY_FACTOR * k, _MIN_CAPACITY)
        if self._keys_C is None or self._keys_C.numel() != room or self._keys_C.device != device:
            self._keys_C = torch.empty(room, dtype=torch.int64, device=device)
        threshold = torch.zeros(1, dtype=torch.int32, device=device)
        return self._keys_C.zero_(), threshold, torch.zeros_like(threshold)

    def _accumulate(self, terms: AccumulationTerms, keys_C: Tensor, threshold: Tensor, count: Tensor) -> None:
        n, nothing = terms.acc_N.numel(), terms.acc_N  # `nothing`: without momentum, u is not accessed
        self._kernels.accumulate[(-(-n // _BLOCK),)](
            terms.residual_N,
            terms.gradient_N,
            nothing if terms.u_N is None else terms.u_N,
            terms.acc_N,
            nothing if terms.new_u_N is None else terms.new_u_N,
            float(terms.weight),
            float(terms.momentum),
            threshold,
            keys_C,
            count,
            n,
            keys_C.numel(),
            WEIGHTED=terms.weight not in (0.0, 1.0),
            EMPTY=terms.weight == 0.0,
            HAS_U=terms.u_N is not None,
            **_LAUNCH,
        )

    def _find(self, acc_N: Tensor, k: int, keys_C: Tensor, threshold: Tensor, count: Tensor) -> None:
        """Compute a threshold on the device from a histogram of the magnitudes' leading bits, and store the
        keys of the elements that reach it."""
        kernels = self._kernels
        n, blocks = acc_N.numel(), -(-acc_N.numel() // _BLOCK)
        counts = torch.zeros(HISTOGRAM_BINS, dtype=torch.int32, device=acc_N.device)
        kernels.histogram[(min(blocks, self._programs or _programs(acc_N.device)),)](
            acc_N, counts, n, SHIFT=HISTOGRAM_SHIFT, BINS=HISTOGRAM_BINS, **_LAUNCH
        )
        # The highest bin for which this bin and all higher bins together have at least k elements.
        lower = (counts.flip(0).cumsum(0) < k).sum()
        bits = (HISTOGRAM_BINS - 1 - lower).clamp_(min=0) << HISTOGRAM_SHIFT
        threshold.copy_(bits.clamp_(min=1).view(1))
        kernels.compact[(blocks,)](acc_N, threshold, keys_C, count, n, keys_C.numel(), **_LAUNCH)


def _fetch(acc_N: Tensor, k: int, keys_C: Tensor, count: Tensor) -> tuple[int, SelectedEntries]:
    """Copy the entries with the k largest keys to the host, in one copy; return the total number of keys,
    and these entries."""
    keys_K = torch.topk(keys_C, min(k, keys_C.numel()), sorted=False).values
    where_K = key_indices(keys_K).sort().values  # keys of 0 come last
    values_K = acc_N[where_K.clamp(max=acc_N.numel() - 1)]
    packed = torch.cat((count, where_K.to(torch.int32), values_K.view(torch.int32)))
    host = _copy_to_host(packed).numpy()
    seen, size = int(host[:1].view(np.uint32)[0]), where_K.numel()
    found = min(seen, size)
    indices_K = host[1 : 1 + size].view(np.uint32)[:found].astype(np.int64)
    values = host[1 + size :].view(np.float32)[:found].copy()
    return seen, SelectedEntries(indices_K, values, where_K[:found])


def _copy_to_host(packed: Tensor) -> Tensor:
    """Return the values in host memory, which is pinned if they come from a GPU, to make the copy faster.

    torch caches freed pinned memory, so only the first call has to pin any.
    """
    if packed.device.type != "cuda":
        return packed
    return torch.empty_like(packed, device="cpu", pin_memory=True).copy_(packed)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes a GPU the current device, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_PER_SM
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


_verdicts: dict[torch.device, bool] = {}
"""Whether the kernels are correct, by device, except devices on which the test could not be completed."""


def are_kernels_correct(device: torch.device) -> bool:
    """Return whether the Triton kernels work on `device` and select the same entries as torch's operations.

    All variants of the kernels are tested on small vectors before they are used, because Triton needs a C
    compiler, a suitable driver and a supported device, and reports problems only when a kernel is launched.
    If the test fails, a warning is issued.  A test that ended with an exception, for example for lack of
    memory, is repeated at the next call.
    """
    if device in _verdicts:
        return _verdicts[device]
    try:
        import gridtrain.sparsify.triton_kernels  # noqa: F401
    except ImportError:
        return False  # not worth a warning, because torch comes without Triton on many platforms
    try:
        agree = _verdicts[device] = all(
            _is_selection_correct(device, weight, momentum, programs)
            for weight in (1.0, 0.3, 0.0)
            for momentum in (0.0, 0.9)
            for programs in (None, 1)  # one program loops several times, as with large vectors
        )
        problem = "its results differ from torch's"
    except Exception as error:  # the compiler, the driver or the launch may raise any exception
        agree, problem = False, f"{type(error).__name__}: {error}"
    if not agree:
        warnings.warn(
            f"Triton cannot be used to select entries on {device} ({problem}); torch's operations are used "
            "instead; they select the same entries, but more slowly -> check that a C compiler is installed "
            "and that this version of Triton supports the driver",
            stacklevel=2,
        )
    return agree


def _is_selection_correct(device: torch.device, weight: float, momentum: float, programs: int | None) -> bool:
    generator = torch.Generator().manual_seed(1)
    n, k = 3 * _BLOCK + 17, 200
    one, other = CudaSelection(programs), TensorSelection()
    for scale in (1.0, 1.0, 1e-6):  # without a threshold, with one, with one that no element reaches
        drawn_3N = torch.randn(3, n, generator=generator, dtype=torch.float32, device="cpu")
        residual_N, gradient_N, u_N = (drawn_3N * scale).to(device).unbind()
        results = []
        for selection in (one, other):
            acc_N, new_u_N = torch.empty_like(residual_N), torch.empty_like(u_N)
            u = (u_N, new_u_N, momentum) if momentum else ()
            selected = selection.select(AccumulationTerms(residual_N, gradient_N, acc_N, weight, *u), k)
            results.append((selected, acc_N, new_u_N if momentum else acc_N))
        (mine, acc_N, new_u_N), (theirs, other_acc_N, other_new_u_N) = results
        same = np.array_equal(mine.indices_K, theirs.indices_K)
        if not (same and torch.equal(acc_N, other_acc_N) and torch.equal(new_u_N, other_new_u_N)):
            return False
    return True
