"""Times selection, codec and merge on one processor or GPU, and a plain copy of the vector.

This module defines what each figure covers.  Times on the CPU are CPU times of the thread; times on a GPU are
wall-clock times.  The shortest of several runs is used, because other programs on the machine can only add to
the time.  A payload has k = density * n entries of a vector of n elements.

    copy                    copy n float32 values to another buffer; limited by memory bandwidth
    select                  add the contribution to the residual, select the k largest entries, encode them,
                            and update the residual (`ErrorFeedback`)
    encode, decode, merge   encode or decode a payload, or merge two; the time is given for each entry
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gridtrain.network.wire.sparse_payload import SparseVector, decode, encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.sparsify.merge import merge

VALUE_KIND = ValueKind.FP16
CODEC_REPEATS = 5  # the codec is repeated this many times as often, because a run takes only a millisecond
COPY_ELEMENTS = 16_000_000
"""The minimum number of elements to copy; a shorter copy would measure the caches, not the memory."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement: the `seconds` of one run, and the `items` (parameters or entries) that it
    processed."""

    seconds: float
    items: int

    @property
    def ns_per_item(self) -> float:
        """The nanoseconds for each parameter or entry."""
        return 1e9 * self.seconds / self.items


def measure_processor(n: int, density: float, *, repeats: int = 7) -> dict[str, float]:
    """Measure copy, selection, codec and merge; return the times in nanoseconds by name.

    copy_ns and select_ns are for each of n parameters; encode_ns, decode_ns and merge_ns for each of
    k = density * n entries.  If CUDA is available, gpu_copy_ns and gpu_select_ns are included, for each
    parameter.  The CPU's figures are those of one thread, because members that share a machine also use one.
    """
    figures = measure_cpu(n, density, repeats=repeats)
    if torch.cuda.is_available():
        figures |= measure_gpu(n, density, repeats=repeats)
    return {f"{name}_ns": figure.ns_per_item for name, figure in figures.items()}


def measure_cpu(n: int, density: float, *, repeats: int) -> dict[str, Timing]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = {"copy": time_copy(n, repeats)}
        figures["select"] = Timing(time_selection("cpu", n, density, repeats), n)
        return figures | time_codec(n, density, CODEC_REPEATS * repeats)
    finally:
        torch.set_num_threads(threads)


def time_copy(n: int, repeats: int) -> Timing:
    """Measure the time to copy n parameters, but at least `COPY_ELEMENTS`."""
    long = max(n, COPY_ELEMENTS)
    source_N, target_N = np.ones(long, np.float32), np.zeros(long, np.float32)
    return Timing(fastest_s(lambda: np.copyto(target_N, source_N), repeats), long)


def measure_gpu(n: int, density: float, *, repeats: int) -> dict[str, Timing]:
    """Measure copy and selection on the current CUDA device; selection includes transfers to the host."""
    source_N = torch.ones(n, device="cuda")
    target_N = torch.zeros_like(source_N)

    def copy() -> None:
        target_N.copy_(source_N)
        torch.cuda.synchronize()

    copied = fastest_s(copy, repeats, time.perf_counter)
    return {
        "gpu_copy": Timing(copied, n),
        "gpu_select": Timing(time_selection("cuda", n, density, repeats), n),
    }


def time_selection(device: str, n: int, density: float, repeats: int) -> float:
    """Return how many seconds a step's selection and residual update take.

    Consecutive steps use the same residual, as in training.
    """
    generator = torch.Generator().manual_seed(1)
    contribution_N = torch.randn(n, generator=generator).to(device)
    feedback = ErrorFeedback(n, device)
    k = max(1, round(density * n))

    def step() -> None:
        feedback.commit(feedback.prepare(contribution_N, k, VALUE_KIND), ())
        if device == "cuda":
            torch.cuda.synchronize()

    return fastest_s(step, repeats, time.thread_time if device == "cpu" else time.perf_counter)


def time_codec(n: int, density: float, repeats: int) -> dict[str, Timing]:
    rng = np.random.default_rng(1)
    k = max(1, round(density * n))
    mine, theirs = _entries(rng, n, k), _entries(rng, n, k)
    payload = encode(mine.indices, mine.values, n=n, kind=VALUE_KIND)
    return {
        "encode": Timing(
            fastest_s(lambda: encode(mine.indices, mine.values, n=n, kind=VALUE_KIND), repeats), k
        ),
        "decode": Timing(fastest_s(lambda: decode(payload, n=n, max_entries=k, kind=VALUE_KIND), repeats), k),
        "merge": Timing(
            fastest_s(lambda: merge(mine, theirs, n=n, k=k, kind=VALUE_KIND).payload, repeats), k
        ),
    }


def _entries(rng: np.random.Generator, n: int, k: int) -> SparseVector:
    """Return k random entries of a vector of n elements, as decoded from a payload."""
    indices_K = np.sort(rng.choice(n, k, replace=False))
    values_K = rng.standard_normal(k).astype(np.float32)
    return decode(encode(indices_K, values_K, n=n, kind=VALUE_KIND), n=n, max_entries=k, kind=VALUE_KIND)


def fastest_s(
    action: Callable[[], object], repeats: int, clock: Callable[[], float] = time.thread_time
) -> float:
    """Return how many seconds the fastest of `repeats` runs takes.

    A warm-up run before them accesses the memory for the first time.
    """
    action()
    taken_s = []
    for _ in range(repeats):
        began_s = clock()
        action()
        taken_s.append(clock() - began_s)
    return min(taken_s)
