"""The buffer of the direct (two-hop) dense exchange: the ring's segments and slices, summed by their
owners."""

from __future__ import annotations

from gridtrain.core.collectives.collective import AddSlice, BufferEffect, Collective
from gridtrain.core.collectives.direct import DirectAllReduce, count_slices
from gridtrain.runtime.buffers import collective_buffers
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer


class DirectBuffer(DenseRingBuffer):
    """A ring's segments and slices over one flat vector, each summed by its owner.

    A retry takes a new buffer with the same contribution: an owner's part cannot be told from the others' in
    its sum.

    Payloads are views of the vector, which the transport may still be sending while the collective continues.
    A member writes to a slice of another's segment only when its sum arrives, and that exists only after the
    owner has read the view; an owner writes to a slice of its own only before it sends it.
    """

    is_resumable = False
    slices_of = staticmethod(count_slices)

    def make_collective(self, rank: int, world_size: int, skip: bool) -> Collective:
        collective_buffers._check_world_size(world_size, self._world_size)
        if skip:
            self.update_N[:] = 0
        most_bytes = max(self._slice_view(rank, slice_).nbytes for slice_ in range(self.slices))
        return DirectAllReduce(rank, world_size, self.slices, skip, most_bytes)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case AddSlice(segment, slice_, payload, source):
                values = self._received_values(segment, slice_, payload, source)
                self._slice_view(segment, slice_)[:] += values
                last = (segment - 1) % self._world_size  # the rank whose part is added last, as in the ring
                self._mark_written(segment, slice_, final=source.rank == last, checked=False)
            case _:
                super().apply(effect)
