"""The interface of collective buffers, and those of ring, all-gather and butterfly.

A buffer applies the effects of a collective, and checks each payload against what is known locally (n, k,
kind, world size) before it is used.  It never commits: it is dropped whole when its round aborts.

    loop --- apply(AddSlice | StoreSlice | StoreFromRank | ...) --> buffer --> update
         <-- payload(slot) --------------------------------------          --> digest

    DenseRingBuffer  RingAllReduce      vector (n,) float32, in place
    AllGatherBuffer  AllGather          one payload for each rank, summed in rank order at the end
    ButterflyBuffer  ButterflyExchange  one payload, replaced by each merge; what it truncates goes to the
    residual

No honest member contributes more than `largest_summable` to a sum, so a sum over m members is at most m times
that.  A payload above it (or not finite) is rejected on arrival, when its sender is known: what an honest
member continues with is then within the next one's bound, and no sum can overflow.

A member that skips contributes zeros, or a payload without entries: see `make_collective(skip=True)`.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b, sha256
from typing import Protocol

import numpy as np

from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.collectives.collective import (
    AddSlice,
    BufferEffect,
    Collective,
    MergePayload,
    Provenance,
    ReplacePayload,
    StoreFromRank,
    StoreSlice,
)
from gridtrain.core.collectives.ring import RingAllReduce, count_slices
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector, ValueKind, decode, encode
from gridtrain.network.wire.value_encoding import ROUNDING_FACTORS
from gridtrain.sparsify.merge import FloatArray, TruncatedEntries, largest_summable, merge, sum_in_rank_order

_FLOAT = np.dtype("<f4")  # as on the wire, and on every supported machine

_DENSE_ROUNDING = 1.0 + 2.0**-20
"""By what factor rounding once may enlarge a value, with margin for the addition before it.  For encoded
values see `value_encoding.ROUNDING_FACTORS`."""


class CollectiveBuffer(Protocol):
    """The numbers of one collective, as the I/O loop needs them."""

    def make_collective(self, rank: int, world_size: int, skip: bool) -> Collective:
        """The core that decides about these numbers; `skip`: the local gradient is not finite."""
        ...

    def apply(self, effect: BufferEffect) -> None:
        """Raises `RemoteProtocolError` if the payload cannot be used, which is the fault of the rank in the
        effect's `source`.  Nothing was changed then; the caller gives up the round."""
        ...

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        """The payload that is sent for this slot now; not copied, read only."""
        ...

    def compute_digest(self) -> bytes:
        """32-byte digest of the update's bits, equal on all ranks; once the collective is complete.

        Raises `RemoteProtocolError` if the update is not finite."""
        ...


class DenseRingBuffer:
    """A ring's segments and slices over one flat vector.

    Takes ownership of `contribution_N` ((n,) float32): sums are computed in place.  `update_N` is the whole
    sum once the collective is complete.  A retry in the same generation takes the same buffer, and continues
    from what has arrived.

    Payloads are views of the vector, which the transport may still be sending while the collective continues.
    They are never overwritten too early: a rank writes to a slice again only when its final value arrives,
    and that exists only after every rank further down the ring has received and added the partial sum in the
    view. The final value is sent on after it was stored, and is not written to again.

    So a slice can be hashed as soon as it is final, while the network is busy with others (`hash_ahead`); the
    digest is the hash of the slices' hashes, in their order.

    Args:
        slice_bytes: the largest slice; None: what all members choose for this length and world size.
    """

    is_one_segment = False
    """The vector has one segment, and not one for each rank."""

    is_resumable = True
    """A retry in the same generation takes the same buffer."""

    slices_of = staticmethod(count_slices)

    def __init__(self, contribution_N: FloatArray, world_size: int, slice_bytes: int | None = None) -> None:
        _check_contribution(contribution_N)
        self.update_N = contribution_N
        self._ring: RingAllReduce | None = None
        self._world_size = world_size
        self._segments = 1 if self.is_one_segment else world_size
        longest_segment_bytes = -(-contribution_N.size // self._segments) * _FLOAT.itemsize
        if slice_bytes is None:
            self.slices = self.slices_of(longest_segment_bytes)
        else:
            self.slices = max(1, -(-longest_segment_bytes // slice_bytes))
        self._final: deque[tuple[int, int]] = deque()  # slices that are final and not hashed yet
        self._checked: set[tuple[int, int]] = set()  # stored as received, so they are finite
        self._hashes: dict[tuple[int, int], bytes] = {}

    def make_collective(self, rank: int, world_size: int, skip: bool) -> Collective:
        _check_world_size(world_size, self._world_size)
        if self._ring is not None:
            self._ring = self._ring.next_attempt()
            return self._ring
        if skip:
            self.update_N[:] = 0
        self._ring = RingAllReduce(rank, world_size, self.slices, skip)
        return self._ring

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case AddSlice(segment, slice_, payload, source):
                values = self._received_values(segment, slice_, payload, source)
                self._slice_view(segment, slice_)[:] += values
                self._mark_written(
                    segment, slice_, final=source.contributors + 1 == source.world_size, checked=False
                )
            case StoreSlice(segment, slice_, payload, source):
                values = self._received_values(segment, slice_, payload, source)
                self._slice_view(segment, slice_)[:] = values
                self._mark_written(segment, slice_, final=True, checked=True)
            case _:
                raise _unexpected_effect("RingAllReduce", effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        if slot.phase is CollectivePhase.RESUME:
            return self._ring.received if self._ring is not None else b""
        return self._slice_view(slot.segment, slot.slice).view(np.uint8).data.toreadonly()

    def hash_ahead(self) -> bool:
        """Hash one slice that is final, if there is one; returns whether there are more."""
        if self._final:
            key = self._final.popleft()
            if key in self._checked or _is_finite(
                self._slice_view(*key)
            ):  # otherwise `compute_digest` raises
                self._hashes[key] = self._hash(*key)
        return bool(self._final)

    def compute_digest(self) -> bytes:
        whole = blake2b(digest_size=32)
        for segment in range(self._segments):
            for slice_ in range(self.slices):
                whole.update(self._hashes.get((segment, slice_)) or self._checked_hash(segment, slice_))
        return whole.digest()

    def _mark_written(self, segment: int, slice_: int, *, final: bool, checked: bool) -> None:
        key = segment, slice_
        self._hashes.pop(key, None)
        self._checked.discard(key)
        if checked:
            self._checked.add(key)
        if final:
            self._final.append(key)

    def _checked_hash(self, segment: int, slice_: int) -> bytes:
        if (segment, slice_) not in self._checked and not _is_finite(self._slice_view(segment, slice_)):
            raise RemoteProtocolError(
                "the dense sum is not finite although no member skips",
                remedy="abort: a member whose values are that large, or not finite, has to skip the step",
            )
        return self._hash(segment, slice_)

    def _hash(self, segment: int, slice_: int) -> bytes:
        """SHA-256, for which processors have instructions (decision 0023)."""
        return sha256(self._slice_view(segment, slice_).data).digest()

    def _slice_view(self, segment: int, slice_: int) -> FloatArray:
        """Segments are near-equal parts of the vector, and slices of a segment; any may be empty."""
        start, stop = _part_bounds(0, self.update_N.size, segment, self._segments)
        start, stop = _part_bounds(start, stop, slice_, self.slices)
        return self.update_N[start:stop]

    def _received_values(
        self, segment: int, slice_: int, payload: bytes | memoryview, source: Provenance
    ) -> FloatArray:
        what = f"segment {segment}, slice {slice_} from rank {source.rank}"
        return _dense_values(payload, self._slice_view(segment, slice_).nbytes, source, what)


class SparseBuffer:
    """What the buffers of sparse exchanges have in common.

    Args:
        n: length of the vector.
        k: most entries of a payload.
        kind: of the values.
    """

    def __init__(self, *, n: int, k: int, kind: ValueKind) -> None:
        self.n, self._k, self._kind = n, k, kind

    def _decode(self, payload: bytes | memoryview) -> SparseVector:
        return decode(payload, n=self.n, max_entries=self._k, kind=self._kind)

    def _decode_from_peer(self, payload: bytes | memoryview, source: Provenance) -> SparseVector:
        """Raises `RemoteProtocolError`, which names the rank that sent the payload."""
        try:
            decoded = self._decode(payload)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"rank {source.rank}: {error.reason}", remedy=error.remedy) from None
        what = f"sparse payload from rank {source.rank}"
        _check_magnitudes(decoded.values, source, ROUNDING_FACTORS[self._kind], what)
        return decoded

    def _empty_payload(self) -> tuple[bytes, SparseVector]:
        """The payload of a member that skips the step, and what it decodes to."""
        payload = encode(np.empty(0, np.int64), np.empty(0, np.float32), n=self.n, kind=self._kind)
        return payload, self._decode(payload)


class AllGatherBuffer(SparseBuffer):
    """The payloads of all ranks.  `update` is their sum in rank order, its own payload decoded like the
    others."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        payload: bytes,
        *,
        n: int,
        k: int,
        kind: ValueKind,
        decoded: SparseVector | None = None,
    ) -> None:
        super().__init__(n=n, k=k, kind=kind)
        self._rank = rank
        self._payloads: list[bytes | memoryview | None] = [None] * world_size
        self._parts: list[SparseVector | None] = [None] * world_size
        self._store(rank, payload, self._decode(payload) if decoded is None else decoded)
        self._update: SparseVector | None = None

    @property
    def update(self) -> SparseVector:
        if self._update is None:
            parts = [part for part in self._parts if part is not None]
            if len(parts) < len(self._parts):
                raise LocalProtocolError(
                    f"the update was read with payloads of {len(parts)} of {len(self._parts)} ranks"
                )
            self._update = sum_in_rank_order(parts)
        return self._update

    def make_collective(self, rank: int, world_size: int, skip: bool) -> AllGather:
        _check_world_size(world_size, len(self._payloads))
        if skip:
            self._store(self._rank, *self._empty_payload())
        return AllGather(rank, world_size, skip)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case StoreFromRank(rank, payload, source):
                self._store(rank, payload, self._decode_from_peer(payload, source))
            case _:
                raise _unexpected_effect("AllGather", effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        stored = self._payloads[slot.segment]
        if stored is None:
            raise LocalProtocolError(f"the payload of rank {slot.segment} was read before it arrived")
        return stored

    def compute_digest(self) -> bytes:
        return sparse_digest(self.update)

    def _store(self, rank: int, payload: bytes | memoryview, decoded: SparseVector) -> None:
        self._parts[rank], self._payloads[rank] = decoded, payload


class ButterflyBuffer(SparseBuffer):
    """One payload, merged hop by hop.

    Args:
        decoded: what `payload` decodes to, where the caller has it already.

    Attributes:
        update: what the present payload decodes to.
        truncated: dropped or rounded values that this rank owns, to be added to the residual at the commit.
    """

    def __init__(
        self, payload: bytes, *, n: int, k: int, kind: ValueKind, decoded: SparseVector | None = None
    ) -> None:
        super().__init__(n=n, k=k, kind=kind)
        self._payload: bytes | memoryview = payload
        self.update = self._decode(payload) if decoded is None else decoded
        self.truncated: list[TruncatedEntries] = []

    def make_collective(self, rank: int, world_size: int, skip: bool) -> Collective:
        self._clear_if_skipped(skip)
        return ButterflyExchange(rank, world_size, skip)

    def _clear_if_skipped(self, skip: bool) -> None:
        if skip:
            self._payload, self.update = self._empty_payload()

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case MergePayload(payload, owner_modulus, owner_residue, source):
                theirs = self._decode_from_peer(payload, source)
                merged = merge(self.update, theirs, n=self.n, k=self._k, kind=self._kind)
                self._payload, self.update = merged.payload, merged.sparse
                self.truncated.append(merged.truncated_of_owner(owner_modulus, owner_residue))
            case ReplacePayload(payload, source):
                self.update = self._decode_from_peer(payload, source)
                self._payload = payload
            case _:
                raise _unexpected_effect("ButterflyExchange", effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        return self._payload

    def compute_digest(self) -> bytes:
        return sparse_digest(self.update)


def _part_bounds(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """Bounds of the index-th of near-equal parts of start .. stop."""
    length = stop - start
    return start + index * length // parts, start + (index + 1) * length // parts


def _is_finite(values: FloatArray) -> bool:
    # min and max need no temporary array: NaN propagates, and infinity is one of the two.
    return not values.size or bool(np.isfinite([values.min(), values.max()]).all())


def _check_length(payload_bytes: int, expected_bytes: int, what: str) -> None:
    if payload_bytes != expected_bytes:
        raise RemoteProtocolError(
            f"{what} has {payload_bytes} bytes, must have {expected_bytes}",
            remedy="drop the peer; all members of a run train the same model",
        )


def _dense_values(
    payload: bytes | memoryview, expected_bytes: int, source: Provenance, what: str
) -> FloatArray:
    """A peer's float32 values, of the length that they must have."""
    data = np.frombuffer(payload, np.uint8)
    _check_length(data.size, expected_bytes, what)
    values = data.view(_FLOAT)
    _check_magnitudes(values, source, _DENSE_ROUNDING, what)
    return values


def _check_magnitudes(values: FloatArray, source: Provenance, rounding: float, what: str) -> None:
    """Check that the values are finite, and no larger than honest members can make them."""
    limit = source.contributors * largest_summable(source.world_size) * rounding**source.roundings
    with np.errstate(invalid="ignore"):  # numpy may warn about NaN
        low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if not (-limit <= low and high <= limit):  # false for NaN
        raise RemoteProtocolError(
            f"{what} has values from {low:g} to {high:g}, at most {limit:g} are possible for "
            f"{source.contributors} of {source.world_size} members",
            remedy="drop the peer: a member with values that large, or not finite, has to skip the step",
        )


def sparse_digest(update: SparseVector) -> bytes:
    """32-byte digest of a sparse update's bits: its indices as 32-bit numbers, then its values."""
    digest = blake2b(digest_size=32)
    digest.update(update.indices.astype("<u4").data)
    digest.update(update.values.astype(_FLOAT, copy=False).data)
    return digest.digest()


def _check_contribution(contribution_N: FloatArray) -> None:
    if contribution_N.ndim != 1 or contribution_N.dtype != _FLOAT or not contribution_N.flags.c_contiguous:
        raise LocalProtocolError(
            f"contribution is {contribution_N.dtype} of shape {contribution_N.shape}: "
            "must be float32 of shape (n,), contiguous"
        )


def _check_world_size(asked: int, made_for: int) -> None:
    if asked != made_for:
        raise LocalProtocolError(f"collective of {asked} ranks over a buffer made for {made_for}")


def _unexpected_effect(collective: str, effect: BufferEffect) -> LocalProtocolError:
    return LocalProtocolError(f"{type(effect).__name__} is no effect of {collective}")
