"""Buffers of one flat vector in buckets, which together make one update of the round.

Each bucket has its own channel and collective.

    flat vector    [ bucket 0 | bucket 1 |    bucket 2    ]
    channels       group 0      group 1     group 2            of the same index
    update         concatenated, with one digest, as if it had been exchanged in one piece
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from gridtrain.core.messages import Channel
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.collective_buffers import (
    AllGatherBuffer,
    ButterflyBuffer,
    CollectiveBuffer,
    DenseRingBuffer,
    sparse_digest,
)
from gridtrain.sparsify.merge import FloatArray

BucketBuffer = DenseRingBuffer | AllGatherBuffer | ButterflyBuffer

Bounds = tuple[int, ...]
"""Where buckets begin, and last where the vector ends: 0 = bounds[0] < bounds[1] < ... = n."""


class BucketedBuffer:
    """The buffers of all buckets of one vector, in order: all dense or all sparse.

    Args:
        bounds: of the buckets.
        parts: one buffer for each.
    """

    def __init__(self, bounds: Bounds, parts: Sequence[BucketBuffer]) -> None:
        self.parts = tuple(parts)
        self.n = bounds[-1]
        self._starts = bounds[:-1]

    @property
    def is_sparse(self) -> bool:
        return isinstance(self.parts[0], AllGatherBuffer | ButterflyBuffer)

    @property
    def update(self) -> SparseVector:
        """Of a sparse exchange that is complete: indices in the whole vector, ascending."""
        updates = [part.update for part in self.parts if isinstance(part, AllGatherBuffer | ButterflyBuffer)]
        moved = [update.indices + start for update, start in zip(updates, self._starts, strict=True)]
        return SparseVector(np.concatenate(moved), np.concatenate([update.values for update in updates]))

    @property
    def update_N(self) -> FloatArray:
        """Of a dense exchange that is complete: a new array of shape (n,)."""
        return np.concatenate([part.update_N for part in self.parts if isinstance(part, DenseRingBuffer)])

    def compute_digest(self) -> bytes:
        """See `CollectiveBuffer.compute_digest`."""
        digests = [part.compute_digest() for part in self.parts]
        if self.is_sparse:
            return sparse_digest(self.update)
        return blake2b(b"".join(digests), digest_size=32).digest()


def buffers_by_channel(
    buffers: Sequence[CollectiveBuffer | BucketedBuffer],
) -> dict[Channel, CollectiveBuffer]:
    """The buffer of each channel: the index is the place in `buffers`, the group is the bucket."""
    channels: dict[Channel, CollectiveBuffer] = {}
    for index, buffer in enumerate(buffers):
        parts = buffer.parts if isinstance(buffer, BucketedBuffer) else (buffer,)
        channels |= {Channel(group=group, index=index): part for group, part in enumerate(parts)}
    return channels


def bucket_bounds(sizes: Sequence[int], most: int, least: int) -> Bounds:
    """Bounds of buckets of whole parameters, divided from the end, where backward begins.

    The bucket of the first layers, whose gradients are computed last and cannot overlap with anything, is no
    larger than the others.

    Args:
        sizes: elements of each parameter in the vector's order.
        most: number of buckets.
        least: elements of a bucket, if possible.
    """
    n, target = sum(sizes), max(least, -(-sum(sizes) // most))
    starts, filled, at = [n], 0, n
    for size in reversed(sizes):
        at, filled = at - size, filled + size
        if filled >= target:
            starts, filled = [*starts, at], 0
    if starts[-1] != 0:  # the rest: a bucket if it is large enough, otherwise part of the last one
        if filled < least and len(starts) > 1:
            starts.pop()
        starts.append(0)
    bounds = tuple(reversed(starts))
    assert all(a < b for a, b in pairwise(bounds))
    return bounds
