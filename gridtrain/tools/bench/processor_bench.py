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

import numpy as np
import torch

from gridtrain.network.wire.sparse_payload import SparseVector, decode, encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.sparsify.merge import merge

VALUE_KIND = ValueKind.FP16
REPEATS = 7
CODEC_REPEATS = 5 * REPEATS  # because a run of the codec takes only a millisecond
COPY_ELEMENTS = 16_000_000
"""The minimum number of elements to copy; a shorter copy would measure the caches, not the memory."""


def measure_processor(n: int, density: float) -> dict[str, float]:
    """Measure copy, selection, codec and merge; return the times in nanoseconds by name.

    copy_ns and select_ns are for each of n parameters; encode_ns, decode_ns and merge_ns for each of
    k = density * n entries.  If CUDA is available, gpu_copy_ns and gpu_select_ns are included, for each
    parameter.  The CPU's figures are those of one thread, because members that share a machine also use one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = {"copy_ns": time_copy(n), "select_ns": time_selection("cpu", n, density)}
        figures |= time_codec(n, density)
    finally:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        figures |= {"gpu_copy_ns": time_gpu_copy(n), "gpu_select_ns": time_selection("cuda", n, density)}
    return figures


def time_copy(n: int) -> float:
    """Copy n parameters, but at least `COPY_ELEMENTS`; return the time in nanoseconds per parameter."""
    long = max(n, COPY_ELEMENTS)
    source_N, target_N = np.ones(long, np.float32), np.zeros(long, np.float32)
    return fastest_ns(lambda: np.copyto(target_N, source_N), long)


def time_gpu_copy(n: int) -> float:
    source_N = torch.ones(n, device="cuda")
    target_N = torch.zeros_like(source_N)

    def copy() -> None:
        target_N.copy_(source_N)
        torch.cuda.synchronize()

    return fastest_ns(copy, n, clock=time.perf_counter)


def time_selection(device: str, n: int, density: float) -> float:
    """Measure a step's selection and residual update, with transfers from a GPU to the host; return the time
    in nanoseconds per parameter.

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

    return fastest_ns(step, n, clock=time.thread_time if device == "cpu" else time.perf_counter)


def time_codec(n: int, density: float) -> dict[str, float]:
    rng = np.random.default_rng(1)
    k = max(1, round(density * n))
    mine, theirs = _entries(rng, n, k), _entries(rng, n, k)
    payload = encode(mine.indices, mine.values, n=n, kind=VALUE_KIND)
    actions: dict[str, Callable[[], object]] = {
        "encode_ns": lambda: encode(mine.indices, mine.values, n=n, kind=VALUE_KIND),
        "decode_ns": lambda: decode(payload, n=n, max_entries=k, kind=VALUE_KIND),
        "merge_ns": lambda: merge(mine, theirs, n=n, k=k, kind=VALUE_KIND).payload,
    }
    return {name: fastest_ns(action, k, CODEC_REPEATS) for name, action in actions.items()}


def _entries(rng: np.random.Generator, n: int, k: int) -> SparseVector:
    """Return k random entries of a vector of n elements, as decoded from a payload."""
    indices_K = np.sort(rng.choice(n, k, replace=False))
    values_K = rng.standard_normal(k).astype(np.float32)
    return decode(encode(indices_K, values_K, n=n, kind=VALUE_KIND), n=n, max_entries=k, kind=VALUE_KIND)


def fastest_ns(
    action: Callable[[], object],
    items: int,
    repeats: int = REPEATS,
    *,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Return the time of the fastest of `repeats` runs, divided by `items`, in nanoseconds.

    A warm-up run before these runs accesses the memory for the first time.
    """
    action()
    taken_s = []
    for _ in range(repeats):
        began_s = clock()
        action()
        taken_s.append(clock() - began_s)
    return 1e9 * min(taken_s) / items
