"""Retries of a ring after a broken connection: only missing payloads are sent."""

from functools import partial
from random import Random

import numpy as np
import pytest
from collective_group import CollectiveGroup, random_vectors

from gridtrain.core.collectives.collective import SendTo
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.buffers.rounded_buffers import RoundedRingBuffer

every_ring = pytest.mark.parametrize(
    "make",
    [DenseRingBuffer, *(partial(RoundedRingBuffer, kind=kind) for kind in (ValueKind.BF16, ValueKind.INT8))],
    ids=["fp32", "bf16", "int8"],
)


def remainders(buffers):
    """The rounding remainders of each rank, as bytes."""
    return [None if buffer.rest_N is None else buffer.rest_N.tobytes() for buffer in buffers]


def sent_bytes(sent, buffers):
    """Bytes of all sent payloads without RESUME, and of RESUME."""
    lengths = [(slot.phase, len(buffers[src].payload(slot))) for src, _, slot in sent]
    resume = sum(length for phase, length in lengths if phase is CollectivePhase.RESUME)
    return sum(length for _, length in lengths) - resume, resume


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 0.9, 1.0])
@every_ring
def test_a_retry_sends_only_what_is_missing(make, world_size, part):
    """A connection broke after `part` of all payloads had arrived; those in flight are lost."""
    vectors = np.random.default_rng(7).standard_normal((world_size, 1200)).astype(np.float32)

    def fresh():
        return [make(v.copy(), world_size, slice_bytes=64) for v in vectors]

    complete = CollectiveGroup(fresh(), seed=1)
    complete.run()
    whole_bytes, _ = sent_bytes(complete.sent, complete.buffers)
    interrupted = CollectiveGroup(fresh(), seed=2)
    arrived_bytes = 0
    while arrived_bytes < part * whole_bytes and not interrupted.network.idle:
        delivery = interrupted.network.step()
        arrived_bytes += len(delivery.message.payload) if delivery is not None else 0
    retry = CollectiveGroup(interrupted.buffers, seed=3)
    retry.run()

    assert {w.compute_digest() for w in retry.buffers} == {complete.buffers[0].compute_digest()}, (
        "the same bits"
    )
    assert remainders(retry.buffers) == remainders(complete.buffers), "the same remainders"
    assert retry.flags == [0] * world_size
    again_bytes, resume_bytes = sent_bytes(retry.sent, retry.buffers)
    assert again_bytes == whole_bytes - arrived_bytes, "no payload is sent twice"
    slices = world_size * retry.buffers[0].slices
    assert resume_bytes == world_size * slices <= 0.02 * whole_bytes + slices * world_size


@every_ring
def test_interrupted_retries_preserve_the_skip_and_end_with_the_same_bits(make, seeds):
    for seed in seeds(150):
        rng, random = np.random.default_rng(seed), Random(seed)
        world_size = random.randint(2, 9)
        vectors = random_vectors(rng, world_size).vectors
        skipping = {r for r in range(world_size) if random.random() < 0.1}

        def fresh(vectors=vectors, world_size=world_size):
            return [make(v.copy(), world_size, slice_bytes=16) for v in vectors]

        complete = CollectiveGroup(fresh(), seed=seed, skipping=skipping)
        complete.run()
        buffers = fresh()
        for attempt in range(random.randint(1, 4)):
            interrupted = CollectiveGroup(buffers, seed=seed + attempt, skipping=skipping)
            for _ in range(random.randint(0, len(complete.sent))):
                if not interrupted.network.idle:
                    interrupted.network.step()
        last = CollectiveGroup(buffers, seed=seed, skipping=skipping)
        last.run()
        assert last.flags == complete.flags, f"seed {seed}"
        assert {w.compute_digest() for w in buffers} == {complete.buffers[0].compute_digest()}, f"seed {seed}"
        assert remainders(buffers) == remainders(complete.buffers), f"seed {seed}"


def test_a_resume_without_a_payload_that_must_have_arrived_is_refused():
    """Rank 0 of 3 has the total of segment 2, so rank 1 must have received the partial sum of rank 0."""
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    ring.start()
    ring.handle(2, PayloadSlot(CollectivePhase.REDUCE, 0, 2), 0, "partial")
    ring.handle(2, PayloadSlot(CollectivePhase.GATHER, 1, 2), 0, "total")
    for resume_state, words in (
        (bytes([2, 1, 0]), "although its total"),
        (bytes([2, 0, 2]), "never sent"),  # rank 1 starts segment 1 itself
        (bytes([2, 1, 1]), "never sent"),  # and completes segment 2
        (bytes([2, 1]), "2 bytes"),
        (bytes([2, 1, 3]), "up to 3"),
    ):
        again = ring.next_attempt()
        assert again.start() == [SendTo(2, PayloadSlot(CollectivePhase.RESUME), 0)]
        assert again.received == bytes([1, 0, 2])
        with pytest.raises(RemoteProtocolError, match=words):
            again.handle(1, PayloadSlot(CollectivePhase.RESUME), 0, resume_state)
    again = ring.next_attempt()
    resume = (1, PayloadSlot(CollectivePhase.RESUME), 0, bytes([0, 1, 2]))
    assert again.handle(*resume) == [SendTo(1, PayloadSlot(CollectivePhase.REDUCE, 0, 0), 0)]
    effects = again.handle(2, PayloadSlot(CollectivePhase.REDUCE, 1, 1), 0, "partial")
    assert effects[1:] == [SendTo(1, PayloadSlot(CollectivePhase.GATHER, 0, 1), 0)], (
        "forwarded on arrival, as in the first attempt"
    )
    with pytest.raises(RemoteProtocolError, match="expected no RESUME"):
        again.handle(*resume)
    with pytest.raises(RemoteProtocolError, match="expected no RESUME"):
        ring.handle(*resume)  # the first attempt has nothing to resume
