"""Buffers of the ring, all-gather and butterfly, which check, add, merge and digest received payloads.

A buffer applies the effects of a collective.  Before using a payload, it checks the payload against values
that this member knows: the vector's length n, the maximum number of entries k, the encoding and the world
size.  A buffer does not commit anything, and is dropped as a whole when its round aborts.

    loop --- apply(AddSlice | StoreSlice | StoreFromRank | ...) --> buffer --> update
         <-- payload(slot) --------------------------------------          --> digest

    DenseRingBuffer  RingAllReduce      a vector (n,) float32, summed in place (see also `rounded_buffers`)
    AllGatherBuffer  AllGather          one payload for each rank, summed in rank order at the end
    ButterflyBuffer  ButterflyExchange  one payload, replaced by each merge; truncated entries go to the
                                        residual

No value that a correct member contributes has a magnitude above `largest_summable`, so no sum over m members
has a magnitude above m times `largest_summable`.  A payload with a value above this bound, or with a value
that is not finite, is rejected on arrival, when its sender is known.  The values that a correct member
forwards are then within the bound that the next member checks, and no sum can overflow.

A member that sets a flag contributes zeros or a payload without entries; see `make_collective`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
from gridtrain.network.wire.sparse_payload import SparseVector, decode, encode
from gridtrain.network.wire.value_encoding import ROUNDING_FACTORS, ByteArray, ValueKind
from gridtrain.sparsify.merge import (
    FloatArray,
    MergeResult,
    TruncatedEntries,
    largest_summable,
    merge,
    sum_in_rank_order,
)

_FLOAT = np.dtype("<f4")  # as on the wire, and on every supported machine

_DENSE_ROUNDING = 1.0 + 2.0**-20
"""Factor by which one rounding can increase a value, with a margin for the addition before the rounding.  For
encoded values see `value_encoding.ROUNDING_FACTORS`."""


class PayloadBuffer(Protocol):
    """The interface of a collective's data for the I/O loop."""

    def apply(self, effect: BufferEffect) -> None:
        """Apply an effect of the collective.

        Raises `RemoteProtocolError` if the payload is invalid; the rank in the effect's `provenance` is at
        fault.  The buffer is then unchanged, and the caller abandons the round.
        """

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        """Return the payload to send for this slot.  The payload is read-only and is not a copy."""


class CollectiveBuffer(PayloadBuffer, Protocol):
    """The interface of an exchange's data, on whose update the members can vote."""

    def make_collective(self, rank: int, world_size: int, flags: int) -> Collective:
        """Return the collective whose effects this buffer applies.

        Args:
            rank: this member's rank.
            world_size: the number of members.
            flags: this member's flags (`core.group.round_flags`); if any is set, the contribution is empty.
        """

    def compute_digest(self) -> bytes:
        """Return the 32-byte digest of the update's bits, which is equal on all ranks.

        The collective must be complete.  Raises `RemoteProtocolError` if the update is not finite.
        """


class DenseRingBuffer:
    """One flat vector, divided into the segments and slices of a ring.

    The buffer takes ownership of `contribution_N` ((n,) float32), and computes the sums in place.  `update`
    is the whole sum once the collective is complete.  A retry in the same generation uses the same buffer,
    and continues with the data that have already arrived.

    Payloads are views of the vector, which the transport may still be sending while the collective continues.
    No view is overwritten before it has been sent: a rank writes to a slice again only when the slice's final
    value arrives, and the final value exists only after every rank further down the ring has received the
    partial sum in the view and added its own values.  The final value is stored before it is forwarded, and
    the slice is not written to again.

    A slice can therefore be hashed as soon as it is final, while the network is busy with other slices
    (`hash_ahead`).  The digest is the hash of the slices' hashes, in the order of the slices.

    Args:
        contribution_N: this member's contribution.
        world_size: the number of members.
        slice_bytes: the maximum length of a slice in bytes; None to derive the number of slices from
            the vector's length and the world size, as all members do.
    """

    is_sparse = False

    is_one_segment = False
    """Whether the whole vector is one segment; otherwise each rank has a segment."""

    is_resumable = True
    """Whether a retry in the same generation reuses the buffer."""

    slices_of = staticmethod(count_slices)

    rest_N: FloatArray | None = None
    """This member's rounding errors, which it adds to its residual (`rounded_buffers`)."""

    truncated: Sequence[TruncatedEntries] = ()
    """See `ButterflyBuffer`; a dense exchange drops no values."""

    def __init__(self, contribution_N: FloatArray, world_size: int, slice_bytes: int | None = None) -> None:
        _check_contribution(contribution_N)
        self.update, self.n = contribution_N, contribution_N.size
        self._ring: RingAllReduce | None = None
        self._world_size = world_size
        self._segments = 1 if self.is_one_segment else world_size
        longest_segment_bytes = self._payload_bytes(-(-contribution_N.size // self._segments))
        if slice_bytes is None:
            self.slices = self.slices_of(longest_segment_bytes)
        else:
            self.slices = max(1, -(-longest_segment_bytes // slice_bytes))
        self._views: dict[tuple[int, int], FloatArray] = {}  # views of the slices, each made once
        self._final: deque[tuple[int, int]] = deque()  # slices that are final and not hashed yet
        self._checked: set[tuple[int, int]] = set()  # slices stored as received, whose values are finite
        self._hashes: dict[tuple[int, int], bytes] = {}

    def make_collective(self, rank: int, world_size: int, flags: int) -> Collective:
        _check_world_size(world_size, self._world_size)
        if self._ring is not None:
            self._ring = self._ring.next_attempt()
            return self._ring
        if flags:
            self.update[:] = 0
        return self._new_collective(rank, flags)

    def _new_collective(self, rank: int, flags: int) -> Collective:
        self._ring = RingAllReduce(rank, self._world_size, self.slices, flags)
        return self._ring

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case AddSlice(segment, slice_, payload, source):
                values = self._received_values(segment, slice_, payload, source)
                view = self._slice_view(segment, slice_)
                np.add(view, values, out=view)
                self._mark_written(segment, slice_, final=self._is_last(segment, source), checked=False)
            case StoreSlice(segment, slice_, payload, source):
                values = self._received_values(segment, slice_, payload, source)
                self._slice_view(segment, slice_)[:] = values
                self._mark_written(segment, slice_, final=True, checked=True)
            case _:
                raise unexpected_effect("a dense exchange", effect)

    def _is_last(self, segment: int, source: Provenance) -> bool:
        """Return whether a slice of the segment is final after the payload of `source` has been added."""
        return source.contributors + 1 == source.world_size

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        if slot.phase is CollectivePhase.RESUME:
            return self._ring.received if self._ring is not None else b""
        return self._slice_view(*self._key(slot)).view(np.uint8).data.toreadonly()

    def _key(self, slot: PayloadSlot) -> tuple[int, int]:
        return 0 if self.is_one_segment else slot.segment, slot.slice

    def hash_ahead(self) -> bool:
        """Hash one final slice, if there is one; return whether more final slices can be hashed."""
        if self._final:
            key = self._final.popleft()
            if key in self._checked or _is_finite(self._slice_view(*key)):
                self._hashes[key] = self._hash(*key)  # otherwise `compute_digest` raises
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
                "the dense sum is not finite although no member skips the step",
                remedy="abort the round; a member whose values are too large or not finite must skip the "
                "step",
            )
        return self._hash(segment, slice_)

    def _hash(self, segment: int, slice_: int) -> bytes:
        """Return a slice's SHA-256, which processors compute with special instructions (decision 0023)."""
        return sha256(self._slice_view(segment, slice_).data).digest()

    def _slice_view(self, segment: int, slice_: int) -> FloatArray:
        """Return the view of a slice.

        The vector is divided into segments of nearly equal length, and each segment into slices of nearly
        equal length.  Segments and slices may be empty.
        """
        view = self._views.get((segment, slice_))
        if view is None:
            start, stop = self._slice_bounds(segment, slice_)
            view = self._views[segment, slice_] = self.update[start:stop]
        return view

    def _slice_bounds(self, segment: int, slice_: int) -> tuple[int, int]:
        start, stop = _part_bounds(0, self.update.size, segment, self._segments)
        return _part_bounds(start, stop, slice_, self.slices)

    def _payload_bytes(self, elements: int) -> int:
        """Return the length in bytes of the payload of a slice with this many elements."""
        return elements * _FLOAT.itemsize

    def _received_values(
        self, segment: int, slice_: int, payload: bytes | memoryview, source: Provenance
    ) -> FloatArray:
        """Return the float32 values of a peer's payload, after checking their number and magnitudes."""
        what = f"segment {segment}, slice {slice_} from rank {source.rank}"
        data, elements = np.frombuffer(payload, np.uint8), self._slice_view(segment, slice_).size
        _check_length(data.size, self._payload_bytes(elements), what)
        return self._decode_slice(data, elements, source, what)

    def _decode_slice(self, data: ByteArray, elements: int, source: Provenance, what: str) -> FloatArray:
        values = data.view(_FLOAT)
        _check_magnitudes(values, source, _DENSE_ROUNDING, what)
        return values


class SparseBuffer:
    """The common base of the buffers of sparse exchanges.

    Args:
        n: the length of the vector.
        k: the maximum number of entries in a payload.
        kind: the encoding of the values.
    """

    is_sparse = True
    is_resumable = False
    rest_N: FloatArray | None = None
    truncated: Sequence[TruncatedEntries] = ()

    def __init__(self, *, n: int, k: int, kind: ValueKind) -> None:
        self.n, self._k, self._kind = n, k, kind

    def _decode(self, payload: bytes | memoryview) -> SparseVector:
        return decode(payload, n=self.n, max_entries=self._k, kind=self._kind)

    def _decode_from_peer(
        self, payload: bytes | memoryview, source: Provenance, n: int | None = None, most: int | None = None
    ) -> SparseVector:
        """Decode and check a received payload of at most `most` entries of a vector of `n` elements.

        By default, `most` is the buffer's k, and `n` is the length of the whole vector.  Raises
        `RemoteProtocolError` if the payload is invalid; the message names the rank that sent it.
        """
        n, most = self.n if n is None else n, self._k if most is None else most
        try:
            decoded = decode(payload, n=n, max_entries=most, kind=self._kind)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"rank {source.rank}: {error.reason}", remedy=error.remedy) from None
        what = f"sparse payload from rank {source.rank}"
        _check_magnitudes(decoded.values, source, ROUNDING_FACTORS[self._kind], what)
        return decoded

    def _empty_payload(self) -> tuple[bytes, SparseVector]:
        """Return the payload of a member whose contribution is empty, and the decoded entries."""
        payload = encode(np.empty(0, np.int64), np.empty(0, np.float32), n=self.n, kind=self._kind)
        return payload, self._decode(payload)


class AllGatherBuffer(SparseBuffer):
    """The payloads of all ranks.

    `update` is the sum of the decoded payloads in rank order.  This rank's own payload is decoded too, so
    that all ranks compute the same sum.

    Args:
        payload: this rank's payload.
        n, k, kind: see `SparseBuffer`.
        decoded: the entries to which `payload` decodes; None if the caller does not have them.
    """

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
                    f"the update was read when only {len(parts)} of {len(self._parts)} payloads had arrived"
                )
            self._update = sum_in_rank_order(parts)
        return self._update

    def make_collective(self, rank: int, world_size: int, flags: int) -> AllGather:
        _check_world_size(world_size, len(self._payloads))
        if flags:
            self._store(self._rank, *self._empty_payload())
        return AllGather(rank, world_size, flags)

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case StoreFromRank(rank, payload, source):
                self._store(rank, payload, self._decode_from_peer(payload, source))
            case _:
                raise unexpected_effect("AllGather", effect)

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
        payload: this rank's payload.
        n, k, kind: see `SparseBuffer`.
        decoded: the entries to which `payload` decodes; None if the caller does not have them.

    Attributes:
        update: the entries to which the current payload decodes.
        truncated: the dropped values and rounding errors that this rank owns and adds to its residual when
            the round commits.
    """

    def __init__(
        self, payload: bytes, *, n: int, k: int, kind: ValueKind, decoded: SparseVector | None = None
    ) -> None:
        super().__init__(n=n, k=k, kind=kind)
        self._payload: bytes | memoryview | MergeResult = payload  # a result is encoded when it is sent
        self.update = self._decode(payload) if decoded is None else decoded
        self.truncated: list[TruncatedEntries] = []

    def make_collective(self, rank: int, world_size: int, flags: int) -> Collective:
        self._clear_if_flagged(flags)
        return ButterflyExchange(rank, world_size, flags)

    def _clear_if_flagged(self, flags: int) -> None:
        if flags:
            self._payload, self.update = self._empty_payload()

    def apply(self, effect: BufferEffect) -> None:
        match effect:
            case MergePayload(payload, owner_modulus, owner_residue, source):
                theirs = self._decode_from_peer(payload, source)
                merged = merge(self.update, theirs, n=self.n, k=self._k, kind=self._kind)
                self._payload, self.update = merged, merged.sparse
                self.truncated.append(merged.truncated_of_owner(owner_modulus, owner_residue))
            case ReplacePayload(payload, source):
                self.update = self._decode_from_peer(payload, source)
                self._payload = payload
            case _:
                raise unexpected_effect("ButterflyExchange", effect)

    def payload(self, slot: PayloadSlot) -> bytes | memoryview:
        held = self._payload
        return held.payload if isinstance(held, MergeResult) else held

    def compute_digest(self) -> bytes:
        return sparse_digest(self.update)


def _part_bounds(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """Return the bounds of part `index` of start .. stop, divided into `parts` nearly equal parts."""
    length = stop - start
    return start + index * length // parts, start + (index + 1) * length // parts


def _is_finite(values: FloatArray) -> bool:
    # min and max need no temporary array: NaN propagates, and infinity is one of the two.
    return not values.size or bool(np.isfinite([values.min(), values.max()]).all())


def _check_length(payload_bytes: int, expected_bytes: int, what: str) -> None:
    if payload_bytes != expected_bytes:
        raise RemoteProtocolError(
            f"{what} is {payload_bytes} bytes long; it must be {expected_bytes} bytes long",
            remedy="check that all members of the run train the same model",
        )


def _check_magnitudes(
    values: FloatArray, source: Provenance, rounding: float, what: str, growth: float = 1.0
) -> None:
    """Raise `RemoteProtocolError` unless all values are finite and within the bound for correct members.

    Args:
        rounding: the factor by which one rounding can increase a value.
        growth: see `largest_summable`.
    """
    limit = source.contributors * largest_summable(source.world_size, growth) * rounding**source.roundings
    with np.errstate(invalid="ignore"):  # numpy may warn about NaN
        low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if not (-limit <= low and high <= limit):  # false for NaN
        raise RemoteProtocolError(
            f"{what} has values from {low:g} to {high:g}; in a sum over {source.contributors} of "
            f"{source.world_size} members, the magnitude of each value must be at most {limit:g}",
            remedy="a member whose values are too large or not finite must skip the step",
        )


def sparse_digest(update: SparseVector) -> bytes:
    """Return the 32-byte digest of a sparse update, computed from its indices as uint32 and its values."""
    digest = blake2b(digest_size=32)
    digest.update(update.indices.astype("<u4").data)
    digest.update(update.values.astype(_FLOAT, copy=False).data)
    return digest.digest()


def _check_contribution(contribution_N: FloatArray) -> None:
    if contribution_N.ndim != 1 or contribution_N.dtype != _FLOAT or not contribution_N.flags.c_contiguous:
        raise LocalProtocolError(
            "the contribution must be a contiguous float32 array of shape (n,); this one has type "
            f"{contribution_N.dtype}, shape {contribution_N.shape} and strides {contribution_N.strides}"
        )


def _check_world_size(asked: int, made_for: int) -> None:
    if asked != made_for:
        raise LocalProtocolError(
            f"a collective of {asked} ranks was requested from a buffer that was made for {made_for} ranks"
        )


def unexpected_effect(collective: str, effect: BufferEffect) -> LocalProtocolError:
    return LocalProtocolError(f"{collective} returned an unexpected effect: {type(effect).__name__}")
