"""Buffers of the tree, which merges payloads hop by hop, and of the stars, whose root computes the sum.

TreeBuffer        TreeExchange  like the butterfly's buffer; one rank owns all values that a merge drops
SparseStarBuffer  SparseStar    on the root, all payloads, which are summed in rank order and truncated once
DenseStarBuffer   DenseStar     a vector (n,) float32, summed in place
"""

from __future__ import annotations

from gridtrain.core.collectives.collective import (
    BufferEffect,
    Collective,
    Provenance,
    StoreFromRank,
)
from gridtrain.core.collectives.star import DenseStar, SparseStar
from gridtrain.core.collectives.tree import TreeExchange
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.collective_buffers import ButterflyBuffer, DenseRingBuffer
from gridtrain.runtime.buffers.direct_buffer import SparseDirectBuffer
from gridtrain.sparsify.merge import sum_in_rank_order, truncate


class TreeBuffer(ButterflyBuffer):
    """One payload, merged hop by hop up the tree.  `update` is the decoded payload."""

    def make_collective(self, rank: int, world_size: int, flags: int) -> Collective:
        self._clear_if_flagged(flags)
        return TreeExchange(rank, world_size, flags)


class SparseStarBuffer(ButterflyBuffer):
    """The payloads of a sparse star.

    The root collects one payload from each rank, replaces them with the payload of their sum, and sends this
    payload to all members.  On the root, `truncated` holds all dropped values and rounding errors; on other
    members it is empty.
    """

    _parts: dict[int, SparseVector]
    _world_size: int

    def make_collective(self, rank: int, world_size: int, flags: int) -> Collective:
        self._clear_if_flagged(flags)
        self._world_size, self._parts = world_size, {rank: self.update}
        return SparseStar(rank, world_size, flags)

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
        """Sum the payloads of all ranks and truncate the sum.

        The sum cannot overflow, because each payload was checked against its bound.
        """
        summed = sum_in_rank_order([self._parts[rank] for rank in range(self._world_size)])
        merged = truncate(summed, n=self.n, k=self._k, kind=self._kind)
        self._payload, self.update = merged.payload, merged.sparse
        self.truncated.append(merged.truncated_of_owner(1, 0))
        self._parts.clear()


class DenseStarBuffer(DenseRingBuffer):
    """The slices of one flat vector.

    The root adds received payloads to its slices, and the other members store the root's sums.  A retry uses
    a new buffer.

    Payloads are views of the vector; the transport may still be sending them while the collective continues.
    A member other than the root writes to a slice only when the slice's sum arrives, and the sum exists only
    after the root has read that member's payload.  The root writes to a slice only before sending the slice.
    """

    is_one_segment = True
    is_resumable = False

    def _new_collective(self, rank: int, flags: int) -> Collective:
        return DenseStar(rank, self._world_size, self.slices, flags)

    def _is_last(self, segment: int, source: Provenance) -> bool:
        return False  # other payloads may follow


SPARSE_BUFFERS: dict[str, type[ButterflyBuffer]] = {
    "butterfly": ButterflyBuffer,
    "direct": SparseDirectBuffer,
    "tree": TreeBuffer,
    "star": SparseStarBuffer,
}
"""The buffer class for each topology of `GTopK`."""
