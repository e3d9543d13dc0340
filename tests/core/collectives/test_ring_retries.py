"""Retries of a ring: a connection broke, and only what is missing is sent."""

from functools import partial
from random import Random

import numpy as np
import pytest
from collective_group import CollectiveGroup, random_vectors

from gridtrain.core.collectives.collective import PayloadReceived, SendTo
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


def rests(buffers):
    """What each rank's roundings have left, as bytes."""
    return [None if buffer.rest_N is None else buffer.rest_N.tobytes() for buffer in buffers]


def sent_bytes(sent, workspaces):
    """Bytes of all payloads that were sent, without RESUME, and of RESUME."""
    lengths = [(slot.phase, len(workspaces[src].payload(slot))) for src, _, slot in sent]
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

    calm = CollectiveGroup(fresh(), seed=1)
    calm.run()
    whole_bytes, _ = sent_bytes(calm.sent, calm.buffers)
    torn = CollectiveGroup(fresh(), seed=2)
    came_bytes = 0
    while came_bytes < part * whole_bytes and not torn.network.idle:
        delivery = torn.network.step()
        came_bytes += len(delivery.message.payload) if delivery is not None else 0
    retry = CollectiveGroup(torn.buffers, seed=3)
    retry.run()

    assert {w.compute_digest() for w in retry.buffers} == {calm.buffers[0].compute_digest()}, "the same bits"
    assert rests(retry.buffers) == rests(calm.buffers), "and the same rests"
    assert retry.flags == [0] * world_size
    again_bytes, resume_bytes = sent_bytes(retry.sent, retry.buffers)
    assert again_bytes == whole_bytes - came_bytes, "not one payload twice"
    slices = world_size * retry.buffers[0].slices
    assert resume_bytes == world_size * slices <= 0.02 * whole_bytes + slices * world_size


@every_ring
def test_interrupted_retries_hold_the_skip_and_end_with_the_same_bits(make, seeds):
    for seed in seeds(150):
        rng, random = np.random.default_rng(seed), Random(seed)
        world_size = random.randint(2, 9)
        vectors = random_vectors(rng, world_size).vectors
        skipping = {r for r in range(world_size) if random.random() < 0.1}

        def fresh(vectors=vectors, world_size=world_size):
            return [make(v.copy(), world_size, slice_bytes=16) for v in vectors]

        calm = CollectiveGroup(fresh(), seed=seed, skipping=skipping)
        calm.run()
        workspaces = fresh()
        for attempt in range(random.randint(1, 4)):
            torn = CollectiveGroup(workspaces, seed=seed + attempt, skipping=skipping)
            for _ in range(random.randint(0, len(calm.sent))):
                if not torn.network.idle:
                    torn.network.step()
        last = CollectiveGroup(workspaces, seed=seed, skipping=skipping)
        last.run()
        assert last.flags == calm.flags, f"seed {seed}"
        assert {w.compute_digest() for w in workspaces} == {calm.buffers[0].compute_digest()}, f"seed {seed}"
        assert rests(workspaces) == rests(calm.buffers), f"seed {seed}"


def test_a_resume_that_lacks_what_the_neighbour_must_have_is_refused():
    """Rank 0 of 3 has the total of segment 2, so rank 1 has had the partial sum of rank 0."""
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    ring.start(0.0)
    ring.handle(PayloadReceived(2, PayloadSlot(CollectivePhase.REDUCE, 0, 2), 0, "partial"), 0.0)
    ring.handle(PayloadReceived(2, PayloadSlot(CollectivePhase.GATHER, 1, 2), 0, "total"), 0.0)
    for lacks, words in (
        (bytes([2, 1, 0]), "although its total"),
        (bytes([2, 0, 2]), "never sent"),  # rank 1 starts segment 1 itself
        (bytes([2, 1, 1]), "never sent"),  # and completes segment 2
        (bytes([2, 1]), "2 bytes"),
        (bytes([2, 1, 3]), "up to 3"),
    ):
        again = ring.next_attempt()
        assert again.start(0.0) == [SendTo(2, PayloadSlot(CollectivePhase.RESUME), 0)]
        assert again.received == bytes([1, 0, 2])
        with pytest.raises(RemoteProtocolError, match=words):
            again.handle(PayloadReceived(1, PayloadSlot(CollectivePhase.RESUME), 0, lacks), 0.0)
    again = ring.next_attempt()
    resume = PayloadReceived(1, PayloadSlot(CollectivePhase.RESUME), 0, bytes([0, 1, 2]))
    assert again.handle(resume, 0.0) == [SendTo(1, PayloadSlot(CollectivePhase.REDUCE, 0, 0), 0)]
    came = again.handle(PayloadReceived(2, PayloadSlot(CollectivePhase.REDUCE, 1, 1), 0, "partial"), 0.0)
    assert came[1:] == [SendTo(1, PayloadSlot(CollectivePhase.GATHER, 0, 1), 0)], (
        "passed on when it comes, as ever"
    )
    with pytest.raises(RemoteProtocolError, match="expected no RESUME"):
        again.handle(resume, 0.0)
    with pytest.raises(RemoteProtocolError, match="expected no RESUME"):
        ring.handle(resume, 0.0)  # the first attempt has nothing to resume
