"""Triton kernels for the selection on a GPU: accumulate, histogram and compact.

    accumulate   stores acc = residual + added (`AccumulationTerms`), and the keys of the elements that reach
                 the threshold.  For each element, it reads 4 bytes of the residual and 4 bytes of the
                 gradient, and writes 4 bytes; with momentum, it reads and writes 4 bytes more
    histogram    counts the magnitudes of `acc` by their leading 11 bits, from which a threshold is
                 computed if there is none from the last step
    compact      stores only the keys, for an `acc` that is already computed

A key is (bits of |acc|) << 32 | (2**32 - 1 - index), so a larger |acc| has a larger key, and on a tie a lower
index has a larger key.  Keys are stored in arbitrary order, because they are sorted afterwards.  `count`
counts all keys, including the keys beyond the capacity, which are not stored.

Launch the kernels with enable_fp_fusion=False, because a fused multiply-add rounds only once where other
devices round twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _append_keys(acc, offsets, inside, threshold, keys_C, count, capacity):
    """Append the keys of the elements that reach the threshold, with one atomic addition per block."""
    bits = acc.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    reached = (bits >= threshold) & inside
    ones = reached.to(tl.int32)
    here = tl.sum(ones)
    if here > 0:
        place = tl.atomic_add(count, here, sem="relaxed") + tl.cumsum(ones) - ones
        key = (bits.to(tl.int64) << 32) | (0xFFFFFFFF - offsets)
        tl.store(keys_C + place, key, mask=reached & (place >= 0) & (place < capacity))


@triton.jit
def accumulate(
    residual_N,
    gradient_N,
    u_N,
    acc_N,
    new_u_N,
    weight,
    momentum,
    threshold,
    keys_C,
    count,
    n,
    capacity,
    WEIGHTED: tl.constexpr,
    EMPTY: tl.constexpr,
    HAS_U: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store acc and the keys of the elements that reach the threshold; each program handles one block.

    `threshold` and `count` are int32 tensors of shape (1,) on the device.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    if EMPTY:
        added = tl.zeros(offsets.shape, tl.float32)
    else:
        added = tl.load(gradient_N + offsets, mask=inside, other=0.0)
    if WEIGHTED:
        added = added * weight
    if HAS_U:
        added = tl.load(u_N + offsets, mask=inside, other=0.0) * momentum + added
        tl.store(new_u_N + offsets, added, mask=inside)
    acc = tl.load(residual_N + offsets, mask=inside, other=0.0) + added
    tl.store(acc_N + offsets, acc, mask=inside)
    _append_keys(acc, offsets, inside, tl.load(threshold), keys_C, count, capacity)


@triton.jit
def compact(acc_N, threshold, keys_C, count, n, capacity, BLOCK: tl.constexpr):
    """Store the keys of the elements of `acc_N` that reach the threshold, one block per program."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    acc = tl.load(acc_N + offsets, mask=inside, other=0.0)
    _append_keys(acc, offsets, inside, tl.load(threshold), keys_C, count, capacity)


@triton.jit
def histogram(acc_N, counts_B, n, SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the elements of `acc_N` by the leading bits of their magnitudes.

    Each of a small number of programs adds its own histogram to `counts_B` at the end.  Elements beyond n are
    counted in bin 0.
    """
    counts = tl.zeros((BINS,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    while start < n:
        offsets = start + tl.arange(0, BLOCK)
        acc = tl.load(acc_N + offsets, mask=offsets < n, other=0.0)
        bits = acc.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        counts += tl.histogram(bits >> SHIFT, BINS)
        start += stride
    tl.atomic_add(counts_B + tl.arange(0, BINS), counts, sem="relaxed")
