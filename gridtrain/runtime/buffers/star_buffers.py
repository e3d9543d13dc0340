"""Buffers of the tree and of the star.

TreeBuffer        TreeExchange  as the butterfly's; a merge has one owner, which keeps all that it drops
SparseStarBuffer  SparseStar    root: all payloads, summed in rank order, truncated once
DenseStarBuffer   DenseStar     vector (n,) float32, in place
"""

from __future__ import annotations

import numpy as np

from gridtrain.core.collectives.collective import (
    AddSlice,
    BufferEffect,
    Collective,
    StoreFromRank,
)
from gridtrain.core.collectives.ring import count_slices
from gridtrain.core.collectives.star import DenseStar, SparseStar
from gridtrain.core.collectives.tree import TreeExchange
from gridtrain.core.messages import PayloadSlot
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers import collective_buffers
from gridtrain.runtime.buffers.collective_buffers import ButterflyBuffer, DenseRingBuffer
from gridtrain.runtime.buffers.direct_buffer import DirectBuffer
from gridtrain.sparsify.merge import FloatArray, sum_in_rank_order, truncate


class TreeBuffer(ButterflyBuffer):
    """One payload, merged hop by hop up the tree.  `update` is what it decodes to."""

    def make_collective(self, rank: int, world_size: int, skip: bool) -> Collective:
        self._clear_if_skipped(skip)
        return TreeExchange(rank, world_size, skip)


class SparseStarBuffer(ButterflyBuffer):
    """Root: one payload of each rank until all are there, then the one that is sent to all.

    `truncated`: at the root, all that it dropped or rounded; elsewhere nothing.
    """

    _parts: dict[int, SparseVector]
    _world_size: int

    def make_collective(self, rank: int, world_size: int, skip: bool) -> Collective:
        self._clear_if_skipped(skip)
        self._world_size, self._parts = world_size, {rank: self.update}
        return SparseStar(rank, world_size, skip)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case StoreFromRank(rank, payload, source):
                theirs = self._decode_from_peer(payload, source)
                self._parts[rank] = theirs
                if len(self._parts) == self._world_size:
                    self._merge()
            case _:
                super().apply(effect)

    def _merge(self) -> None:
        """No sum can overflow: each part was checked against its own bound."""
        summed = sum_in_rank_order([self._parts[rank] for rank in range(self._world_size)])
        merged = truncate(summed, n=self.n, k=self._k, kind=self._kind)
        self._payload, self.update = merged.payload, merged.sparse
        self.truncated.append(merged.truncated_of_owner(1, 0))
        self._parts.clear()


class DenseStarBuffer(DenseRingBuffer):
    """The slices of one flat vector; the root adds to its own, the others store its sums.

    A retry takes a new buffer.

    Payloads are views of the vector, which the transport may still be sending while the collective continues.
    A member writes to a slice only when its sum arrives, and that exists only after the root has read the
    view; the root writes to a slice only before it sends it.
    """

    is_one_segment = True
    is_resumable = False
    slices_of = staticmethod(count_slices)

    def make_collective(self, rank: int, world_size: int, skip: bool) -> Collective:
        collective_buffers._check_world_size(world_size, self._world_size)
        if skip:
            self.update_N[:] = 0
        return DenseStar(rank, world_size, self.slices, skip)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case AddSlice(segment, slice_, payload, source):
                self._slice_view(segment, slice_)[:] += self._received_values(
                    segment, slice_, payload, source
                )
                self._mark_written(segment, slice_, final=False, checked=False)  # others may follow
            case _:
                super().apply(effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        return self._slice_view(0, slot.slice).view(np.uint8).data.toreadonly()


DENSE_BUFFERS: dict[str, type[DenseRingBuffer]] = {
    "ring": DenseRingBuffer,
    "direct": DirectBuffer,
    "star": DenseStarBuffer,
}


def make_dense_buffer(topology: str, contribution_N: FloatArray, world_size: int) -> DenseRingBuffer:
    """The buffer for `Dense(topology=...)`."""
    return DENSE_BUFFERS[topology](contribution_N, world_size)


SPARSE_BUFFERS: dict[str, type[ButterflyBuffer]] = {
    "butterfly": ButterflyBuffer,
    "tree": TreeBuffer,
    "star": SparseStarBuffer,
}
"""By the topology of `GTopK`."""
