"""Dense buffers of rounded values.  Guarantees of all collectives are tested in tests/core/collectives."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from collective_group import CollectiveGroup

from gridtrain.core.collectives.collective import AddSlice, Provenance, StoreSlice
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.dense_payload import encode_slice, slice_bytes
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.rounded_buffers import (
    DENSE_BUFFERS,
    RoundedRingBuffer,
    largest_contribution,
    make_dense_buffer,
)
from gridtrain.runtime.missed_step import MissedStep
from gridtrain.sparsify.merge import largest_summable

KINDS = (ValueKind.BF16, ValueKind.INT8)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
every_topology = pytest.mark.parametrize("topology", DENSE_BUFFERS)
FROM_1 = Provenance(1, 1, 2, 1)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def encoded(values: np.ndarray, kind: ValueKind) -> bytes:
    return encode_slice(values, kind)[0]


def exact_sum(vectors: list[np.ndarray]) -> list[Fraction]:
    return [sum(map(Fraction, map(float, column)), Fraction()) for column in zip(*vectors, strict=True)]


@every_kind
@every_topology
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_contributions_equal_the_update_plus_the_remainders_exactly(topology, kind, world_size, seeds):
    """Computed in rational numbers.  Float32 adds integers below 2**24 without rounding."""
    for seed in seeds(10, drawn=3):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 700))  # fewer elements than members, and more than one block of int8
        scale = 2.0 ** rng.integers(-60, 60)
        drawn = [rng.integers(-(2**20), 2**20, n) for _ in range(world_size)]
        vectors = [np.asarray(integers_N * scale, np.float32) for integers_N in drawn]
        buffers = [make_dense_buffer(topology, v.copy(), world_size, kind) for v in vectors]
        group = CollectiveGroup(buffers, seed=seed)
        group.run()
        assert len({buffer.update.tobytes() for buffer in buffers}) == 1, f"seed {seed}"
        after = exact_sum([buffers[0].update, *(buffer.rest_N for buffer in buffers)])
        assert after == exact_sum(vectors), f"seed {seed}"
        if world_size == 1:
            assert buffers[0].update.tobytes() == vectors[0].tobytes() and not buffers[0].rest_N.any()


@every_kind
def test_each_member_of_a_ring_rounds_each_element_once(kind):
    """Rank 0 rounds the values that it sends, rank 1 the sum of these and its own."""
    own = [floats(1.0, 1.001, -3.0001), floats(0.5, 0.25001, 100.003)]
    buffers = [RoundedRingBuffer(vector.copy(), 2, kind) for vector in own]
    group = CollectiveGroup(buffers, seed=1)
    group.run()
    _, sent = encode_slice(own[0][:1], kind)  # segment 0 has one element
    _, update = encode_slice(sent + own[1][:1], kind)
    assert buffers[0].update[:1] == update
    assert buffers[0].rest_N[:1] == own[0][:1] - sent
    assert buffers[1].rest_N[:1] == sent + own[1][:1] - update


@every_kind
def test_the_payload_of_a_slice_has_the_bytes_of_its_elements(kind):
    buffer = RoundedRingBuffer(np.ones(1001, np.float32), 2, kind)
    lengths = [len(buffer.payload(PayloadSlot(CollectivePhase.REDUCE, 0, s))) for s in range(2)]
    assert lengths == [slice_bytes(500, kind), slice_bytes(501, kind)]


@every_kind
@pytest.mark.parametrize("effect", [AddSlice, StoreSlice])
@pytest.mark.parametrize("extra", [-1, 1, 300])
@every_topology
def test_a_slice_of_another_length_is_refused(topology, kind, effect, extra):
    buffer = make_dense_buffer(topology, np.ones(600, np.float32), 2, kind)
    elements = 600 if topology == "star" else 300
    nbytes = slice_bytes(elements, kind)
    with pytest.raises(RemoteProtocolError, match=f"is {nbytes + extra} bytes long; it must be {nbytes}"):
        buffer.apply(effect(0, 0, bytes(nbytes + extra), FROM_1))
    assert (buffer.update == 1).all() and not buffer.rest_N.any()


@pytest.mark.parametrize("effect", [AddSlice, StoreSlice])
@pytest.mark.parametrize(
    ("kind", "payload", "match"),
    [
        (ValueKind.BF16, b"\xc0\x7f", "infinite or NaN"),
        (ValueKind.BF16, b"\x80\x7f", "infinite or NaN"),
        (ValueKind.BF16, b"\x7f\x7f", "has values from 0 to 3.3"),
        (ValueKind.INT8, b"\x00\x00\x80", "largest magnitude 128"),
        (ValueKind.INT8, b"\x00\x00\x01", "largest magnitude 1 "),  # not the scale that its values have
        (ValueKind.INT8, b"\x7a\x00\x7f", "scale exponent 122"),
        (ValueKind.INT8, b"\x79\x00\x7f", "has values from 0 to 3.3"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_values_that_no_honest_member_sends_are_refused_on_arrival(kind, payload, match, effect):
    buffer = RoundedRingBuffer(floats(1, 2), 2, kind)
    with pytest.raises(RemoteProtocolError, match=match):
        buffer.apply(effect(0, 0, payload, FROM_1))
    assert buffer.update.tolist() == [1, 2] and not buffer.rest_N.any()


@every_kind
@pytest.mark.parametrize("world_size", [2, 3, 16, 1000])
@pytest.mark.filterwarnings("error")
def test_the_largest_honest_sum_passes_each_hop_of_a_ring(kind, world_size):
    """All members contribute the largest allowed value, and each rounding increases it as far as possible."""
    largest = np.float32(largest_contribution(world_size, kind))
    partial_sum = floats(largest)
    for members in range(1, world_size):
        buffer = RoundedRingBuffer(floats(largest), world_size, kind)
        at = 0 if buffer._slice_view(0, 0).size else world_size - 1  # the segment of the only element
        source = Provenance(0, members, world_size, members)
        buffer.apply(AddSlice(at, 0, encoded(partial_sum, kind), source))
        partial_sum = buffer.update.copy()
    whole = Provenance(0, world_size, world_size, world_size)
    buffer.apply(StoreSlice(at, 0, encoded(partial_sum, kind), whole))
    assert np.isfinite(buffer.update).all() and np.isfinite(buffer.rest_N).all()
    assert largest < largest_summable(world_size)


@every_kind
def test_a_forwarded_payload_is_the_received_one(kind):
    buffer = RoundedRingBuffer(floats(1, 2, 3, 4), 2, kind)
    payload = encoded(floats(5.003, -7), kind)
    buffer.apply(StoreSlice(0, 0, payload, Provenance(1, 2, 2, 2)))
    assert buffer.payload(PayloadSlot(CollectivePhase.GATHER, 0, 0)) is payload
    assert not buffer.rest_N.any(), "storing a sum does not round it"


@every_kind
def test_a_sum_is_rounded_before_it_is_hashed(kind):
    """In a retry a sum may be sent long after it was completed."""
    ahead, late = (RoundedRingBuffer(floats(1.003, 2, 3, 4), 2, kind) for _ in range(2))
    for buffer in (ahead, late):
        buffer.apply(AddSlice(0, 0, encoded(floats(0.1, 0.2), kind), FROM_1))
    ahead.hash_ahead()
    for buffer in (ahead, late):
        buffer.payload(PayloadSlot(CollectivePhase.GATHER, 0, 0))
        buffer.apply(StoreSlice(1, 0, encoded(floats(6, 7), kind), Provenance(1, 2, 2, 2)))
    assert ahead.compute_digest() == late.compute_digest()


@every_kind
@every_topology
def test_an_absent_member_keeps_its_rounding_remainders(topology, kind, seeds):
    """It contributes zeros, and still rounds what it forwards: its I/O thread takes part for its trainer."""
    for seed in seeds(10):
        rng = np.random.default_rng(seed)
        vectors = [rng.integers(-5000, 5000, 300).astype(np.float32) for _ in range(4)]
        absent = int(rng.integers(4))
        vectors[absent][:] = 0
        buffers = [make_dense_buffer(topology, v.copy(), 4, kind) for v in vectors]
        CollectiveGroup(buffers, seed=seed).run()
        missed = MissedStep.of(7, b"", buffers[absent])
        others = [buffer.rest_N for rank, buffer in enumerate(buffers) if rank != absent]
        after = exact_sum([missed.update, missed.rest_N, *others])
        assert after == exact_sum(vectors), f"seed {seed}"
        assert missed.truncated == () and missed.nbytes == 2 * 4 * 300
