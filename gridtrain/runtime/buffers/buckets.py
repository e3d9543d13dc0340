"""The buckets of the flat gradient (`Overlap`): their bounds, and a buffer that joins their updates into one.

Each bucket has its own channel and collective.

    flat vector    [ bucket 0 | bucket 1 |    bucket 2    ]
    channels       group 0      group 1     group 2            all with the same index
    update         the buckets' updates, concatenated; one digest covers the whole update
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import cast

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
from gridtrain.sparsify.merge import FloatArray, TruncatedEntries

BucketBuffer = DenseRingBuffer | AllGatherBuffer | ButterflyBuffer

Bounds = tuple[int, ...]
"""The positions at which the buckets of a vector begin, in ascending order from 0, followed by the vector's
length."""


class BucketedBuffer:
    """The buffers of all buckets of one vector, in order.  Either all are dense or all are sparse.

    Args:
        bounds: the bounds of the buckets.
        parts: the buffer of each bucket.
    """

    def __init__(self, bounds: Bounds, parts: Sequence[BucketBuffer]) -> None:
        self.parts = tuple(parts)
        self.n = bounds[-1]
        self._starts = bounds[:-1]
        self.is_sparse, self.is_resumable = parts[0].is_sparse, parts[0].is_resumable

    @property
    def update(self) -> FloatArray | SparseVector:
        """The update of a complete exchange: a new array of shape (n,) or, for a sparse exchange, the entries
        with ascending indices into the whole vector."""
        dense = [part.update for part in self.parts if isinstance(part, DenseRingBuffer)]
        if dense:
            return np.concatenate(dense)
        updates = [cast(SparseVector, part.update) for part in self.parts]
        moved = [update.indices + start for update, start in zip(updates, self._starts, strict=True)]
        return SparseVector(np.concatenate(moved), np.concatenate([update.values for update in updates]))

    @property
    def rest_N(self) -> FloatArray | None:
        """This member's rounding errors in a dense exchange: a new array of shape (n,); None if the exchange
        does not round."""
        known = [part.rest_N for part in self.parts if part.rest_N is not None]
        return np.concatenate(known) if known else None

    @property
    def truncated(self) -> Sequence[TruncatedEntries]:
        """The entries that this member's merges truncated, indexed by position in the whole vector."""
        return [
            (indices + start, values)
            for part, start in zip(self.parts, self._starts, strict=True)
            for indices, values in part.truncated
        ]

    def compute_digest(self) -> bytes:
        """Return the digest of the whole update.  See `CollectiveBuffer.compute_digest`."""
        digests = [part.compute_digest() for part in self.parts]
        if self.is_sparse:
            return sparse_digest(cast(SparseVector, self.update))
        return blake2b(b"".join(digests), digest_size=32).digest()


UpdateBuffer = BucketBuffer | BucketedBuffer
"""The buffer of a round's update."""


RoundBuffers = Sequence[CollectiveBuffer | BucketedBuffer]
"""The buffers with a member's contribution to a round: the update's buffer, followed by any others."""


def buffers_by_channel(buffers: RoundBuffers) -> dict[Channel, CollectiveBuffer]:
    """Map channels to buffers.  A channel's index is the buffer's position in `buffers`, and its group is the
    number of the bucket, or 0 for a buffer that is not divided into buckets."""
    channels: dict[Channel, CollectiveBuffer] = {}
    for index, buffer in enumerate(buffers):
        parts = buffer.parts if isinstance(buffer, BucketedBuffer) else (buffer,)
        channels |= {Channel(group=group, index=index): part for group, part in enumerate(parts)}
    return channels


def bucket_bounds(sizes: Sequence[int], most: int, least: int) -> Bounds:
    """Divide the vector into buckets of whole parameters; return the bounds of the buckets.

    The buckets are filled from the end of the vector, where the backward pass begins, so the bucket of the
    first layers holds the elements that are left over.  This bucket should be small, because the gradients
    of the first layers are computed last, and their exchange cannot overlap with computation.  A large
    parameter, such as an embedding, does not join the first bucket to be sent.

    Args:
        sizes: the number of elements in each parameter, in the vector's order.
        most: the maximum number of buckets.
        least: the minimum number of elements in a bucket; a vector with fewer elements is one bucket.
    """
    n, target = sum(sizes), max(least, -(-sum(sizes) // most))
    starts, filled, at = [n], 0, n
    for size in reversed(sizes):
        if size >= target and filled >= least and len(starts) == 1 < most:
            starts, filled = [n, at], 0
        at, filled = at - size, filled + size
        if filled >= target:
            starts, filled = [*starts, at], 0
    if starts[-1] != 0:  # the rest becomes a bucket if it is large enough, or else joins the last bucket
        if (filled < least or len(starts) > most) and len(starts) > 1:
            starts.pop()
        starts.append(0)
    bounds = tuple(reversed(starts))
    assert all(a < b for a, b in pairwise(bounds))
    return bounds
