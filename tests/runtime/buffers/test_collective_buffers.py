"""Collective buffers: the result of each effect, and payloads that are refused."""

from hashlib import blake2b, sha256

import numpy as np
import pytest

from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.collectives.collective import (
    AddSlice,
    MergePayload,
    Provenance,
    ReplacePayload,
    StoreFromRank,
    StoreSlice,
)
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.core.planning.workload import ExchangeKind, Workload, slice_count
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire import elias_fano
from gridtrain.network.wire.sparse_payload import encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer, DenseRingBuffer
from gridtrain.runtime.buffers.direct_buffer import DirectBuffer
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer, SparseStarBuffer
from gridtrain.sparsify.merge import largest_summable

KIND = ValueKind.FP32
N, K = 8, 2
FROM_1 = Provenance(rank=1, contributors=1, world_size=2, roundings=1)
every_dense_buffer = pytest.mark.parametrize("dense", [DenseRingBuffer, DirectBuffer, DenseStarBuffer])


def floats(*values):
    return np.array(values, np.float32)


def payload(entries):
    indices = np.array(list(entries), np.int64)
    return encode(indices, floats(*entries.values()), n=N, kind=KIND)


def shown(update):
    return dict(zip(update.indices.tolist(), update.values.tolist(), strict=True))


def butterfly(entries):
    return ButterflyBuffer(payload(entries), n=N, k=K, kind=KIND)


def gather(rank, world_size, entries):
    return AllGatherBuffer(rank, world_size, payload(entries), n=N, k=K, kind=KIND)


# -- dense -------------------------------------------------------------------------------------


def test_elements_are_divided_into_segments_and_slices():
    """Segments 0 1 | 2 3 | 4 5 6, each in two slices (the longest has 12 bytes): 0, 1, 2, 3, 4, 5 6."""
    buffer = DenseRingBuffer(floats(0, 1, 2, 3, 4, 5, 6), 3, slice_bytes=8)
    assert buffer.slices == 2
    sent = [
        np.frombuffer(buffer.payload(PayloadSlot(CollectivePhase.REDUCE, 0, s, c)), np.float32).tolist()
        for s in range(3)
        for c in range(2)
    ]
    assert sent == [[0], [1], [2], [3], [4], [5, 6]]


def test_slices_are_added_and_stored_in_place():
    contribution = floats(1, 2, 3, 4)
    buffer = DenseRingBuffer(contribution, 2)
    buffer.apply(AddSlice(0, 0, floats(10, 20).tobytes(), FROM_1))
    buffer.apply(StoreSlice(1, 0, memoryview(floats(7, 8).tobytes()), FROM_1))
    assert buffer.update is contribution
    assert contribution.tolist() == [11, 22, 7, 8]


def test_payloads_are_read_only_views():
    buffer = DenseRingBuffer(floats(1, 2), 1)
    view = buffer.payload(PayloadSlot(CollectivePhase.REDUCE))
    buffer.update[0] = 5
    assert np.frombuffer(view, np.float32).tolist() == [5, 2] and view.readonly


def test_more_ranks_than_elements_leave_empty_segments():
    buffer = DenseRingBuffer(floats(1, 2), 5)
    lengths = [len(buffer.payload(PayloadSlot(CollectivePhase.REDUCE, 0, s))) for s in range(5)]
    assert sorted(lengths) == [0, 0, 0, 4, 4]
    buffer.apply(AddSlice(lengths.index(0), 0, b"", FROM_1))
    assert buffer.update.tolist() == [1, 2]


@pytest.mark.parametrize("nbytes", [0, 4, 7, 12])
def test_a_slice_of_another_length_is_refused(nbytes):
    buffer = DenseRingBuffer(floats(1, 2, 3, 4), 2)
    with pytest.raises(RemoteProtocolError, match=f"is {nbytes} bytes long; it must be 8"):
        buffer.apply(AddSlice(0, 0, bytes(nbytes), FROM_1))


@pytest.mark.parametrize("effect", [AddSlice, StoreSlice])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.float32(1e38)])
@pytest.mark.filterwarnings("error")
@every_dense_buffer
def test_values_that_no_honest_member_sends_are_refused_on_arrival(dense, bad, effect):
    buffer = dense(floats(1, 2, 3, 4), 2)
    buffer.make_collective(0, 2, flags=0)
    payload = np.resize(floats(bad, 0), len(buffer.payload(PayloadSlot(CollectivePhase.REDUCE))) // 4)
    with pytest.raises(RemoteProtocolError, match=r"slice 0 from rank 1 has values from .* at most 8\.5"):
        buffer.apply(effect(0, 0, payload.tobytes(), FROM_1))
    assert buffer.update.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("world_size", [2, 3, 16, 1000])
@pytest.mark.filterwarnings("error")
def test_the_largest_honest_sum_passes_each_hop_of_a_ring(world_size):
    """All members contribute the largest allowed value, rounded up; every partial sum is within its bound."""
    largest = np.nextafter(np.float32(largest_summable(world_size)), np.float32(np.inf))
    partial = floats(largest)
    for members in range(1, world_size):
        buffer = DenseRingBuffer(floats(largest), 1)
        buffer.apply(AddSlice(0, 0, partial.tobytes(), Provenance(0, members, world_size, members)))
        partial = buffer.update.copy()
    whole = Provenance(0, world_size, world_size, world_size)
    buffer.apply(StoreSlice(0, 0, partial.tobytes(), whole))
    assert len(buffer.compute_digest()) == 32


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@every_dense_buffer
def test_no_digest_is_computed_of_values_that_are_not_finite(dense, bad):
    """The own contribution is checked before; this is the last check."""
    buffer = dense(floats(bad, 2), 1)
    with pytest.raises(RemoteProtocolError, match="not finite although no member skips"):
        buffer.compute_digest()


def test_hashing_ahead_gives_the_same_digest():
    ahead, late = (DenseRingBuffer(floats(1, 2, 3, 4, 5, 6), 3, slice_bytes=4) for _ in range(2))
    assert not ahead.hash_ahead(), "no slice is final yet"
    for buffer in (ahead, late):
        buffer.apply(AddSlice(0, 0, floats(10).tobytes(), Provenance(1, 1, 3, 1)))
        assert not buffer.hash_ahead(), "a partial sum will change"
        buffer.apply(AddSlice(1, 0, floats(10).tobytes(), Provenance(1, 2, 3, 2)))
        buffer.apply(StoreSlice(0, 0, floats(20).tobytes(), Provenance(1, 3, 3, 3)))
    before = ahead.compute_digest()
    assert ahead.hash_ahead() and not ahead.hash_ahead()
    assert ahead.compute_digest() == before == late.compute_digest()
    for buffer in (ahead, late):
        buffer.apply(StoreSlice(1, 0, floats(30).tobytes(), Provenance(1, 3, 3, 3)))
    assert before != ahead.compute_digest() == late.compute_digest(), "an old hash must not outlive its slice"


@pytest.mark.parametrize("sums", [1, 2])
def test_a_slice_of_a_direct_exchange_is_hashed_ahead_only_when_it_is_final(sums):
    """Rank 0 of 3 adds the parts of ranks 1 and 2."""
    buffer = DirectBuffer(floats(1, 1, 1, 1, 1, 1), 3)
    buffer.make_collective(0, 3, flags=0)
    for rank in range(1, 1 + sums):
        buffer.apply(AddSlice(0, 0, floats(1, 1).tobytes(), Provenance(rank, 1, 3, 1)))
    buffer.hash_ahead()
    assert list(buffer._hashes) == ([(0, 0)] if sums == 2 else [])


@pytest.mark.parametrize("n", [1, 17_000, 100_001, 1_000_000, 5_000_000])
def test_slices_and_digest_of_a_star_are_as_in_the_protocol(n):
    """PROTOCOL.md 5.1: one segment of b = 4 n bytes."""
    buffer = DenseStarBuffer(np.arange(n, dtype=np.float32), 4)
    longest = min(2**20, max(2**17, -(-4 * n // 8)))
    slices = max(1, -(-4 * n // longest))
    digest = blake2b(digest_size=32)
    for i in range(slices):
        part = buffer.update[i * n // slices : (i + 1) * n // slices]
        assert bytes(buffer.payload(PayloadSlot(CollectivePhase.TO_ROOT, 0, 1, i))) == part.tobytes()
        digest.update(sha256(part.tobytes()).digest())
    assert buffer.slices == slices == slice_count(Workload(ExchangeKind.STAR, n), 4)
    assert buffer.compute_digest() == digest.digest()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_are_reported_by_the_digest(bad):
    buffer = DenseRingBuffer(floats(bad, 1), 2)
    buffer.apply(AddSlice(0, 0, floats(1).tobytes(), FROM_1))
    buffer.hash_ahead()
    with pytest.raises(RemoteProtocolError, match="not finite although no member skips"):
        buffer.compute_digest()


@pytest.mark.parametrize(
    ("n", "world_size", "slices"),
    [(1, 4, 1), (120_576, 4, 1), (128 * 1024, 2, 2), (2**20, 4, 8), (8 * 2**20, 4, 8), (25_600_000, 4, 25)],
)
def test_slices_have_128_KiB_to_1_MiB(n, world_size, slices):
    """A segment has eight slices where that is possible.  This is part of the protocol, like the hashes."""
    assert DenseRingBuffer(np.zeros(n, np.float32), world_size).slices == slices


def test_the_digest_is_that_of_the_slices_in_their_order():
    parts = floats(1), floats(2), floats(3), floats(4)
    expected = blake2b(b"".join(sha256(part.data).digest() for part in parts), digest_size=32).digest()
    assert DenseRingBuffer(floats(1, 2, 3, 4), 2, slice_bytes=4).compute_digest() == expected


def test_a_skipping_rank_contributes_zeros():
    buffer = DenseRingBuffer(floats(np.nan, 1), 2)
    assert isinstance(buffer.make_collective(0, 2, flags=SKIP), RingAllReduce)
    assert buffer.update.tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
@every_dense_buffer
def test_a_contribution_of_another_form_is_a_local_error(dense, wrong):
    with pytest.raises(LocalProtocolError, match="must be a contiguous float32 array"):
        dense(wrong, 2)


# -- gather ------------------------------------------------------------------------------------


def test_the_update_is_the_sum_over_all_ranks():
    buffer = gather(1, 3, {0: 1.0, 5: 2.0})
    buffer.apply(StoreFromRank(2, payload({5: 3.0}), FROM_1))
    with pytest.raises(LocalProtocolError, match="only 2 of 3 payloads"):
        buffer.compute_digest()
    buffer.apply(StoreFromRank(0, payload({0: -1.0, 7: 4.0}), FROM_1))
    assert shown(buffer.update) == {5: 5.0, 7: 4.0}
    assert isinstance(buffer.make_collective(1, 3, flags=0), AllGather)


def test_more_entries_than_k_are_refused():
    with pytest.raises(RemoteProtocolError, match="3 of 8 entries"):
        gather(1, 3, {}).apply(StoreFromRank(0, payload({0: 1.0, 1: 1.0, 2: 1.0}), FROM_1))


# -- butterfly ---------------------------------------------------------------------------------


def test_a_merge_keeps_the_largest_entries_and_its_part_of_the_truncated_ones():
    buffer = butterfly({0: 1.0, 5: 2.0})
    buffer.apply(MergePayload(payload({1: 9.0, 5: 3.0}), owner_modulus=2, owner_residue=0, provenance=FROM_1))
    assert shown(buffer.update) == {1: 9.0, 5: 5.0}
    assert [(i.tolist(), v.tolist()) for i, v in buffer.truncated] == [([0], [1.0])]
    assert buffer.payload(PayloadSlot(CollectivePhase.SWAP, 1)) == payload({1: 9.0, 5: 5.0})


def test_a_merge_that_is_not_forwarded_encodes_no_indices(monkeypatch):
    """The merge of the last hop is not forwarded; a payload is encoded once."""
    calls = []
    encoded, encode_indices = payload({1: 9.0, 5: 3.0}), elias_fano.encode_indices
    buffer = butterfly({0: 1.0, 5: 2.0})
    monkeypatch.setattr(elias_fano, "encode_indices", lambda *args: calls.append(1) or encode_indices(*args))
    buffer.apply(MergePayload(encoded, 1, 0, FROM_1))
    digest = buffer.compute_digest()
    assert not calls
    assert buffer.payload(PayloadSlot(CollectivePhase.SWAP, 1)) == buffer.payload(
        PayloadSlot(CollectivePhase.UNFOLD)
    )
    assert len(calls) == 1 and buffer.compute_digest() == digest


def test_the_partner_keeps_the_other_part_of_the_truncated_entries():
    buffer = butterfly({1: 9.0, 5: 3.0})
    buffer.apply(MergePayload(payload({0: 1.0, 5: 2.0}), owner_modulus=2, owner_residue=1, provenance=FROM_1))
    assert shown(buffer.update) == {1: 9.0, 5: 5.0}
    assert [(i.tolist(), v.tolist()) for i, v in buffer.truncated] == [([], [])]


def test_a_replaced_payload_is_used_bit_for_bit():
    buffer = butterfly({0: 1.0})
    buffer.apply(ReplacePayload(payload({3: 4.0}), FROM_1))
    assert shown(buffer.update) == {3: 4.0}
    assert buffer.payload(PayloadSlot(CollectivePhase.UNFOLD)) == payload({3: 4.0})
    assert buffer.truncated == []


def test_a_skipping_rank_sends_no_entries():
    buffer = butterfly({0: 1.0})
    assert isinstance(buffer.make_collective(0, 4, flags=SKIP), ButterflyExchange)
    assert buffer.payload(PayloadSlot(CollectivePhase.SWAP)) == payload({})


# -- all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "other"),
    [
        (DenseRingBuffer(floats(1, 2), 1), DenseRingBuffer(floats(1, -2), 1)),
        (gather(0, 1, {0: 1.0}), gather(0, 1, {1: 1.0})),
        (butterfly({0: 1.0}), butterfly({0: 1.0 + 2**-23})),
    ],
    ids=["dense", "gather", "butterfly"],
)
def test_another_update_has_another_digest(buffer, other):
    assert len(buffer.compute_digest()) == 32
    assert buffer.compute_digest() == buffer.compute_digest() != other.compute_digest()


@pytest.mark.parametrize("damaged", [b"", b"\xff" * 20, payload({0: 1.0})[:-1], payload({0: 1.0}) + b"\x00"])
def test_a_damaged_payload_is_a_remote_error_and_changes_nothing(damaged):
    buffer = butterfly({2: 1.0})
    with pytest.raises(RemoteProtocolError):
        buffer.apply(MergePayload(damaged, 1, 0, FROM_1))
    assert shown(buffer.update) == {2: 1.0} and buffer.truncated == []
    for other in (gather(1, 3, {}), SparseStarBuffer(payload({}), n=N, k=K, kind=KIND)):
        with pytest.raises(RemoteProtocolError):
            other.apply(StoreFromRank(0, damaged, FROM_1))


@pytest.mark.parametrize(
    ("buffer", "foreign"),
    [
        (DenseRingBuffer(floats(1, 2), 1), ReplacePayload(b"", FROM_1)),
        (gather(0, 1, {}), AddSlice(0, 0, b"", FROM_1)),
        (butterfly({}), StoreFromRank(0, b"", FROM_1)),
        (SparseStarBuffer(payload({}), n=N, k=K, kind=KIND), AddSlice(0, 0, b"", FROM_1)),
    ],
    ids=["dense", "gather", "butterfly", "star"],
)
def test_an_effect_of_another_collective_is_a_local_error(buffer, foreign):
    with pytest.raises(LocalProtocolError, match="returned an unexpected effect"):
        buffer.apply(foreign)


@pytest.mark.parametrize("buffer", [DenseRingBuffer(floats(1, 2), 3), gather(0, 3, {})])
def test_a_buffer_made_for_other_ranks_is_a_local_error(buffer):
    with pytest.raises(LocalProtocolError, match="a collective of 4 ranks was requested from a buffer"):
        buffer.make_collective(0, 4, flags=0)
