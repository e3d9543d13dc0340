"""What one processor needs for selection, codec and merge, beside a plain copy of the vector.

Decides what one figure covers.  On the CPU it is the thread's own time, on a GPU the wall's; the least of
several runs counts, as everything else on the machine can only add.

    copy     float32 from one place to another: what the memory allows
    select   residual + contribution, the k largest, encode, residual after (`ErrorFeedback`)
    encode, decode, merge   of payloads of k entries, for each entry
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gridtrain.sparsify.feedback import ErrorFeedback
from gridtrain.sparsify.merge import merge
from gridtrain.wire.sparse import Sparse, ValueKind, decode, encode

KIND = ValueKind.FP16
CODEC_TIMES = 5  # as often: it is over in a millisecond
COPY_ELEMENTS = 16_000_000
"""A shorter copy would be the caches', not the memory's."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.  `seconds`: of one run; `each`: parameters or entries that it handled."""

    seconds: float
    each: int

    @property
    def ns(self) -> float:
        """For each parameter or entry."""
        return 1e9 * self.seconds / self.each


def local_figures(n: int, density: float, *, repeats: int = 7) -> dict[str, float]:
    """Nanoseconds: copy_ns and select_ns for each of n parameters; encode_ns, decode_ns and merge_ns for each
    of k = density * n entries; with CUDA also gpu_copy_ns and gpu_select_ns.

    Selection runs on one thread of the CPU, as members that share a machine do.
    """
    figures = processor_figures(n, density, repeats=repeats)
    if torch.cuda.is_available():
        figures |= gpu_figures(n, density, repeats=repeats)
    return {f"{name}_ns": figure.ns for name, figure in figures.items()}


def processor_figures(n: int, density: float, *, repeats: int) -> dict[str, Figure]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = {"copy": copy_figure(n, repeats)}
        figures["select"] = Figure(selection("cpu", n, density, repeats), n)
        return figures | codec_figures(n, density, CODEC_TIMES * repeats)
    finally:
        torch.set_num_threads(threads)


def copy_figure(n: int, repeats: int) -> Figure:
    """Of n parameters, or more where the caches would hold them."""
    long = max(n, COPY_ELEMENTS)
    source_N, target_N = np.ones(long, np.float32), np.zeros(long, np.float32)
    return Figure(least(lambda: np.copyto(target_N, source_N), repeats), long)


def gpu_figures(n: int, density: float, *, repeats: int) -> dict[str, Figure]:
    """The same on the current CUDA device; what crosses to the host is in it."""
    source_N = torch.ones(n, device="cuda")
    target_N = torch.zeros_like(source_N)

    def copy() -> None:
        target_N.copy_(source_N)
        torch.cuda.synchronize()

    copied = least(copy, repeats, time.perf_counter)
    return {
        "gpu_copy": Figure(copied, n),
        "gpu_select": Figure(selection("cuda", n, density, repeats), n),
    }


def selection(device: str, n: int, density: float, repeats: int) -> float:
    """Seconds of one step's selection with its residual, steps following each other as in training."""
    generator = torch.Generator().manual_seed(1)
    contribution_N = torch.randn(n, generator=generator).to(device)
    feedback = ErrorFeedback(n, device)
    k = max(1, round(density * n))

    def step() -> None:
        feedback.commit(feedback.prepare(contribution_N, k, KIND), ())
        if device == "cuda":
            torch.cuda.synchronize()

    return least(step, repeats, time.thread_time if device == "cpu" else time.perf_counter)


def codec_figures(n: int, density: float, repeats: int) -> dict[str, Figure]:
    rng = np.random.default_rng(1)
    k = max(1, round(density * n))
    mine, theirs = _entries(rng, n, k), _entries(rng, n, k)
    payload = encode(mine.indices, mine.values, n=n, kind=KIND)
    return {
        "encode": Figure(least(lambda: encode(mine.indices, mine.values, n=n, kind=KIND), repeats), k),
        "decode": Figure(least(lambda: decode(payload, n=n, max_entries=k, kind=KIND), repeats), k),
        "merge": Figure(least(lambda: merge(mine, theirs, n=n, k=k, kind=KIND), repeats), k),
    }


def _entries(rng: np.random.Generator, n: int, k: int) -> Sparse:
    """As they come out of a payload."""
    indices_K = np.sort(rng.choice(n, k, replace=False))
    values_K = rng.standard_normal(k).astype(np.float32)
    return decode(encode(indices_K, values_K, n=n, kind=KIND), n=n, max_entries=k, kind=KIND)


def least(action: Callable[[], object], repeats: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of the fastest run, after one that is not counted (memory is touched for the first time)."""
    action()
    taken_s = []
    for _ in range(repeats):
        began_s = clock()
        action()
        taken_s.append(clock() - began_s)
    return min(taken_s)
