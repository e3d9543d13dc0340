"""The buffer of the direct (two-hop) dense exchange, in which each segment is summed by its owner."""

from __future__ import annotations

from gridtrain.core.collectives.collective import Collective, Provenance
from gridtrain.core.collectives.direct import DirectAllReduce, count_slices
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer


class DirectBuffer(DenseRingBuffer):
    """One flat vector, divided as for a ring; each segment is summed by its owner.

    A retry uses a new buffer with the same contribution, because an owner's sum cannot be separated into the
    owner's part and the parts of the other members.

    Payloads are views of the vector, which the transport may still be sending while the collective continues.
    A member writes to a slice of another member's segment only when the slice's sum arrives, and the sum
    exists only after the owner has read the view.  An owner writes to a slice of its own segment only before
    sending the slice.
    """

    is_resumable = False
    slices_of = staticmethod(count_slices)

    def _new_collective(self, rank: int, flags: int) -> Collective:
        most = max(self._slice_view(rank, slice_).size for slice_ in range(self.slices))
        return DirectAllReduce(rank, self._world_size, self.slices, flags, self._payload_bytes(most))

    def _is_last(self, segment: int, source: Provenance) -> bool:
        return source.rank == (segment - 1) % self._world_size  # parts are added in the order of a ring
