"""The buffers of the direct (two-hop) exchanges, in which each member sums one part of the vector.

DirectBuffer        Dense(topology="direct")   segments of consecutive elements
SparseDirectBuffer  GTopK(topology="direct")   each rank owns one of every P (world size) consecutive elements
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gridtrain.core.collectives.collective import AddSlice, BufferEffect, Collective, Provenance, StoreSlice
from gridtrain.core.collectives.direct import DirectAllReduce, count_slices
from gridtrain.core.messages import PayloadSlot
from gridtrain.network.wire.elias_fano import invalid_payload
from gridtrain.network.wire.sparse_payload import SparseVector, encoded_bytes
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import ButterflyBuffer, DenseRingBuffer, unexpected_effect
from gridtrain.sparsify.merge import IndexArray, MergeResult, sort_by_index, sum_in_rank_order, truncate


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


class SparseDirectBuffer(ButterflyBuffer):
    """The entries of a sparse vector; each rank sums the entries of one part of the vector.

    In a group of P ranks, each rank owns one of the indices j * P .. j * P + P - 1 as element j of its part:

        P = 4      indices 0 .. 3     4 .. 7      8 .. 11      12 .. 15
        owners             0 1 2 3    3 0 1 2     2 3 0 1      2 3 0 1        rotated by `_rotation(j)`

    The rotations are scattered, so that the owners have nearly the same number of large values even if such
    values are concentrated in a few columns of a matrix.

        own entries  --by owner--> a part for each owner
        one part from each rank, with the elements that this rank owns
            --> sum --ceil(k / P) largest--> result --> all ranks
                 |
                 +--> truncated: the entries that the result leaves out

    Entries are rounded when they are selected.  In formats whose scale depends on the other entries, they are
    rounded again when they are divided among the owners.  The rounding errors also count as
    truncated entries.
    """

    _rank: int
    _world_size: int
    _payloads: dict[int, MergeResult]  # by owner: the parts for others, and this rank's result
    _addends: list[SparseVector]
    _results: dict[int, SparseVector]

    def make_collective(self, rank: int, world_size: int, flags: int) -> Collective:
        self._clear_if_flagged(flags)
        self._rank, self._world_size, self._results = rank, world_size, {}
        parts = self._divide() if world_size > 1 else []
        self._addends = [parts[rank]] if parts else []
        self._payloads = {
            owner: self._truncate(owner, part, most=part.indices.size)
            for owner, part in enumerate(parts)
            if owner != rank
        }
        longest = _longest_payload_bytes(self._k, self._elements, self._kind)
        return DirectAllReduce(rank, world_size, 1, flags, longest)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case AddSlice(_, _, payload, source):
                twice_rounded = replace(source, roundings=2)  # when it was selected, and when it was divided
                self._addends.append(self._decode_part(self._rank, payload, self._k, twice_rounded))
                if len(self._addends) == self._world_size:
                    result = self._truncate(self._rank, sum_in_rank_order(self._addends), self._result_k)
                    self._payloads[self._rank] = result
                    self._store(self._rank, result.sparse)
            case StoreSlice(owner, _, payload, source):
                self._store(owner, self._decode_part(owner, payload, self._result_k, source))
            case _:
                raise unexpected_effect("DirectAllReduce", effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        return self._payloads[slot.segment].payload

    @property
    def _result_k(self) -> int:
        """The maximum number of entries in an owner's result."""
        return -(-self._k // self._world_size)

    @property
    def _elements(self) -> int:
        """The number of elements in each rank's part; the last element may lie beyond the vector's end."""
        return -(-self.n // self._world_size)

    def _divide(self) -> list[SparseVector]:
        """Divide this rank's entries among their owners; return one part for each rank, in rank order.

        The indices in a part count the elements of the owner's part.
        """
        indices = self.update.indices.astype(np.uint32)
        elements = indices // np.uint32(self._world_size)
        owners = _remainder(indices - elements * self._world_size + _rotation(elements), self._world_size)
        order = np.argsort(owners.astype(np.uint16), kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=self._world_size))
        elements_by_owner, values = elements.take(order).astype(np.int64), self.update.values.take(order)
        bounds = pairwise([0, *ends.tolist()])
        return [SparseVector(elements_by_owner[start:stop], values[start:stop]) for start, stop in bounds]

    def _truncate(self, owner: int, entries: SparseVector, most: int) -> MergeResult:
        """Encode the largest entries, at most `most`; the other entries and the rounding errors are added to
        `truncated`."""
        made = truncate(entries, n=self._elements, k=most, kind=self._kind)
        if made.truncated_indices.size:
            self.truncated.append((self._indices(owner, made.truncated_indices), made.truncated_values))
        return made

    def _decode_part(
        self, owner: int, payload: bytes | memoryview, most: int, source: Provenance
    ) -> SparseVector:
        part = self._decode_from_peer(payload, source, n=self._elements, most=most)
        last = part.indices[-1:]
        if last.size and last[0] == self._elements - 1 and self._indices(owner, last)[0] >= self.n:
            raise invalid_payload(
                f"rank {source.rank}: a sparse payload has an entry beyond the {self.n} elements"
            )
        return part

    def _store(self, owner: int, result: SparseVector) -> None:
        """Store an owner's result; when it is the last, join all results into the update."""
        self._results[owner] = result
        if len(self._results) < self._world_size:
            return
        parts = [SparseVector(self._indices(each, part.indices), part.values)
                 for each, part in self._results.items()]  # fmt: skip
        self.update = SparseVector(*sort_by_index(parts))  # no index belongs to two owners

    def _indices(self, owner: int, elements: IndexArray) -> IndexArray:
        rotated = _remainder(_rotation(elements.astype(np.uint32)), self._world_size)
        offsets = _remainder(self._world_size + owner - rotated, self._world_size)
        return elements * self._world_size + offsets


def _rotation(elements: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return a number below 2**16 for each element of a part, computed by multiplicative hashing (Knuth), so
    that the numbers of neighbouring elements differ widely."""
    return elements * np.uint32(0x9E3779B1) >> np.uint32(16)


def _remainder(numbers: npt.NDArray[np.uint32], divisor: int) -> npt.NDArray[np.uint32]:
    """Return numbers % divisor.  The remainders are computed from quotients, because numpy vectorizes only
    divisions."""
    return numbers - numbers // np.uint32(divisor) * np.uint32(divisor)


def _longest_payload_bytes(k: int, n: int, kind: ValueKind) -> int:
    """Return an upper bound for the length of a payload with at most k entries of a vector of n elements.

    A payload with fewer entries uses more bits for each index.  The k bytes that are added to the
    length for k entries more than make up for this.
    """
    return encoded_bytes(min(k, n), n, kind) + k
