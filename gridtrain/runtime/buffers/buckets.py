"""A flat vector's workspaces, one for each bucket, that together are one update of the round.

Decides where a bucket lies in the vector and what the whole update is.  Never decides when a bucket is
exchanged: each has a channel and a collective of its own.

    flat vector    [ bucket 0 | bucket 1 |    bucket 2    ]
    channels       group 0      group 1     group 2            of the same index
    update         concatenated; sealed once, as if it had been exchanged in one piece
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
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer
from gridtrain.sparsify.merge import FloatArray

BucketBuffer = DenseRingBuffer | DenseStarBuffer | AllGatherBuffer | ButterflyBuffer

Bounds = tuple[int, ...]
"""Where buckets begin, and at last where the vector ends: 0 = bounds[0] < bounds[1] < ... = n."""


class BucketedBuffer:
    """The workspaces of all buckets of one vector, in its order: all dense or all sparse.

    Args:
        bounds: of the buckets.
        parts: one workspace for each.
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
        return np.concatenate(
            [part.update_N for part in self.parts if isinstance(part, DenseRingBuffer | DenseStarBuffer)]
        )

    def compute_digest(self) -> bytes:
        """See `buffers.Workspace.seal`."""
        seals = [part.compute_digest() for part in self.parts]
        return (
            sparse_digest(self.update)
            if self.is_sparse
            else blake2b(b"".join(seals), digest_size=32).digest()
        )


def buffers_by_channel(
    workspaces: Sequence[CollectiveBuffer | BucketedBuffer],
) -> dict[Channel, CollectiveBuffer]:
    """What travels on which channel: the index is the workspace's place, the group is the bucket."""
    channels: dict[Channel, CollectiveBuffer] = {}
    for index, workspace in enumerate(workspaces):
        parts = workspace.parts if isinstance(workspace, BucketedBuffer) else (workspace,)
        channels |= {Channel(group=group, index=index): part for group, part in enumerate(parts)}
    return channels


def bucket_bounds(sizes: Sequence[int], most: int, least: int) -> Bounds:
    """Bounds of at most `most` buckets of whole parameters, each of at least `least` elements if possible.

    Cut from the end, as backward begins there: the first layers, whose gradients come last and find nothing
    to hide behind, are in a bucket that is no larger than the others.

    Args:
        sizes: elements of each parameter in the vector's order.
    """
    n, target = sum(sizes), max(least, -(-sum(sizes) // most))
    starts, filled, at = [n], 0, n
    for size in reversed(sizes):
        at, filled = at - size, filled + size
        if filled >= target:
            starts, filled = [*starts, at], 0
    if starts[-1] != 0:  # what remains: a bucket of its own if it is large enough, else the last one's
        if filled < least and len(starts) > 1:
            starts.pop()
        starts.append(0)
    bounds = tuple(reversed(starts))
    assert all(a < b for a, b in pairwise(bounds))
    return bounds
