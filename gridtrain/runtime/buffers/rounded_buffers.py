"""Decides when dense exchanges in bf16 or int8 round values, and which buffer a dense exchange uses.

    RoundedRingBuffer    RingAllReduce    each partial sum is rounded by the member that sends it on
    RoundedDirectBuffer  DirectAllReduce  each part is rounded by its sender, each sum by the segment's owner
    RoundedStarBuffer    DenseStar        each vector is rounded by its sender, the sum by the root

                      own values               rounded partial sum           rounded sum
    rank 0  rounds  -------------> rank 1 adds its own, rounds -> .. rank P - 1 -> all store it
            keeps its errors               keeps its errors           keeps its errors

A member rounds each element exactly once, either in a payload that another member adds or in the final sum,
and keeps the difference, which is exactly representable in float32 (`value_encoding`), in `rest_N`.  Hence,
apart from the rounding of float32 additions, the sum of all members' contributions equals the update plus the
sum of all members' `rest_N`.  The member that rounds the final sum also uses the rounded sum, so all members
get the same bits.  Nothing is rounded in a group of one member.

Received payloads are decoded, and forwarded unchanged.  If a ring resumes, it sends the stored payload
again.
"""

from __future__ import annotations

import numpy as np

from gridtrain.core.collectives.collective import BufferEffect, Provenance, StoreSlice
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.dense_payload import decode_slice, encode_slice, slice_bytes
from gridtrain.network.wire.value_encoding import ROUNDING_FACTORS, ByteArray, ValueKind
from gridtrain.runtime.buffers import collective_buffers
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.buffers.direct_buffer import DirectBuffer
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer
from gridtrain.sparsify.merge import FloatArray, largest_summable


def largest_contribution(world_size: int, kind: ValueKind) -> float:
    """Return the largest magnitude allowed in a member's contribution to a dense exchange of this value kind.

    A sum in a ring is rounded at most `world_size` times; see `largest_summable`.
    """
    return largest_summable(world_size, _growth(world_size, kind))


def _growth(world_size: int, kind: ValueKind) -> float:
    return 1.0 if kind is ValueKind.FP32 else ROUNDING_FACTORS[kind] ** world_size


class RoundedRingBuffer(DenseRingBuffer):
    """A `DenseRingBuffer` whose payloads hold rounded values.

    Its contribution must be within `largest_contribution`.  `rest_N`, (n,) float32, holds this member's
    rounding errors; it is valid once the collective is complete, and belongs to the residual if the round
    commits.

    Args:
        contribution_N, world_size: see `DenseRingBuffer`.
        kind: the encoding of values; neither FP32 nor FP16.
        slice_bytes: see `DenseRingBuffer`.
    """

    rest_N: FloatArray

    def __init__(
        self, contribution_N: FloatArray, world_size: int, kind: ValueKind, slice_bytes: int | None = None
    ) -> None:
        self._kind = kind
        super().__init__(contribution_N, world_size, slice_bytes)
        self.rest_N = np.zeros_like(contribution_N)
        self._payloads: dict[tuple[int, int], bytes | memoryview] = {}

    def apply(self, effect: BufferEffect) -> None:
        super().apply(effect)
        if isinstance(effect, StoreSlice) and self.is_resumable:  # only a ring forwards sums
            self._payloads[effect.segment, effect.slice] = effect.payload

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        if slot.phase is CollectivePhase.RESUME:
            return super().payload(slot)
        key = self._key(slot)
        return self._payloads[key] if key in self._payloads else self._round(*key)

    def _mark_written(self, segment: int, slice_: int, *, final: bool, checked: bool) -> None:
        if final and not checked:  # a sum of this member, which is hashed and perhaps sent much later
            self._round(segment, slice_)
        super()._mark_written(segment, slice_, final=final, checked=checked)

    def _round(self, segment: int, slice_: int) -> bytes:
        """Round a slice, keep the rounding errors, and return the payload."""
        view, (start, stop) = self._slice_view(segment, slice_), self._slice_bounds(segment, slice_)
        payload, rounded = encode_slice(view, self._kind)
        np.subtract(view, rounded, out=self.rest_N[start:stop])
        view[:] = rounded
        self._payloads[segment, slice_] = payload
        return payload

    def _payload_bytes(self, elements: int) -> int:
        return slice_bytes(elements, self._kind)

    def _decode_slice(self, data: ByteArray, elements: int, source: Provenance, what: str) -> FloatArray:
        try:
            values = decode_slice(data, elements, self._kind)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{what}: {error.reason}", remedy=error.remedy) from None
        growth = _growth(self._world_size, self._kind)
        collective_buffers._check_magnitudes(values, source, ROUNDING_FACTORS[self._kind], what, growth)
        return values


class RoundedDirectBuffer(RoundedRingBuffer, DirectBuffer):
    """A `DirectBuffer` whose payloads hold rounded values; see `RoundedRingBuffer`."""


class RoundedStarBuffer(RoundedRingBuffer, DenseStarBuffer):
    """A `DenseStarBuffer` whose payloads hold rounded values; see `RoundedRingBuffer`."""


DENSE_BUFFERS: dict[str, tuple[type[DenseRingBuffer], type[RoundedRingBuffer]]] = {
    "ring": (DenseRingBuffer, RoundedRingBuffer),
    "direct": (DirectBuffer, RoundedDirectBuffer),
    "star": (DenseStarBuffer, RoundedStarBuffer),
}
"""For each topology of `Dense`, the buffer classes for float32 values and for rounded values."""


def make_dense_buffer(
    topology: str, contribution_N: FloatArray, world_size: int, kind: ValueKind = ValueKind.FP32
) -> DenseRingBuffer:
    """Return a buffer for a dense exchange with this topology and encoding of values."""
    exact, rounded = DENSE_BUFFERS[topology]
    if kind is ValueKind.FP32:
        return exact(contribution_N, world_size)
    return rounded(contribution_N, world_size, kind)
