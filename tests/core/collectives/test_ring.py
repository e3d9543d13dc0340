"""The ring: its schedule as a picture, and retries that send only what is missing."""

from functools import partial
from random import Random

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
    random_vectors,
    run_lockstep,
)

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveComplete,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreSlice,
)
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.buffers.rounded_buffers import RoundedRingBuffer


def test_the_schedule_of_three_ranks():
    """R2: a partial sum of segment 2; G2: its total."""
    ticks = run_lockstep([RingAllReduce(rank, 3, slices=1, flags=0) for rank in range(3)])
    picture = "\n".join(
        f"tick {tick}  "
        + "  ".join(
            f"{rank} -> {send.to_rank}: {send.slot.phase.name[0]}{send.slot.segment}"
            for rank, send in sorted(sends, key=lambda sent: sent[0])
        )
        for tick, sends in enumerate(ticks)
    )
    assert picture == (
        "tick 0  0 -> 1: R0  1 -> 2: R1  2 -> 0: R2\n"
        "tick 1  0 -> 1: R2  1 -> 2: R0  2 -> 0: R1\n"
        "tick 2  0 -> 1: G1  1 -> 2: G2  2 -> 0: G0\n"
        "tick 3  0 -> 1: G0  1 -> 2: G1  2 -> 0: G2"
    )


def test_a_transcript_of_rank_0_of_three():
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    whole = Provenance(2, contributors=3, world_size=3, roundings=3)

    def came(phase, hop, segment, skip=False):
        return ring.handle(
            PayloadReceived(2, PayloadSlot(phase, hop, segment), skip, f"{phase.name} {segment}"), 0.0
        )

    assert ring.start(0.0) == [SendTo(1, PayloadSlot(CollectivePhase.REDUCE, 0, 0), 0)]
    assert came(CollectivePhase.REDUCE, 0, 2, skip=True) == [  # rank 2 skips: its mark goes along
        AddSlice(2, 0, "REDUCE 2", Provenance(2, contributors=1, world_size=3, roundings=1)),
        SendTo(1, PayloadSlot(CollectivePhase.REDUCE, 1, 2), 1),
    ]
    assert came(CollectivePhase.REDUCE, 1, 1, skip=True) == [  # segment 1 is whole here
        AddSlice(1, 0, "REDUCE 1", Provenance(2, contributors=2, world_size=3, roundings=2)),
        SendTo(1, PayloadSlot(CollectivePhase.GATHER, 0, 1), 1),
    ]
    assert came(CollectivePhase.GATHER, 0, 0, skip=True) == [
        StoreSlice(0, 0, "GATHER 0", whole),
        SendTo(1, PayloadSlot(CollectivePhase.GATHER, 1, 0), 1),
    ]
    assert ring.waiting_for() == {2} and not ring.complete
    assert came(CollectivePhase.GATHER, 1, 2, skip=True) == [
        StoreSlice(2, 0, "GATHER 2", whole),
        CollectiveComplete(1),
    ]
    assert ring.waiting_for() == frozenset() and ring.complete


def test_slices_do_not_wait_for_each_other():
    ring = RingAllReduce(0, 2, slices=2, flags=0)
    ring.start(0.0)
    for phase, slice_ in [(CollectivePhase.REDUCE, 1), (CollectivePhase.REDUCE, 0)]:
        effects = ring.handle(PayloadReceived(1, PayloadSlot(phase, 0, 1, slice_), 0, "x"), 0.0)
        assert effects[1] == SendTo(1, PayloadSlot(CollectivePhase.GATHER, 0, 1, slice_), 0)


def test_a_skipping_rank_marks_all_that_it_sends_on():
    ring = RingAllReduce(0, 3, slices=1, flags=SKIP)
    assert ring.start(0.0) == [SendTo(1, PayloadSlot(CollectivePhase.REDUCE, 0, 0), 1)]
    effects = ring.handle(PayloadReceived(2, PayloadSlot(CollectivePhase.REDUCE, 0, 2), 0, "x"), 0.0)
    assert effects[1] == SendTo(1, PayloadSlot(CollectivePhase.REDUCE, 1, 2), 1)


def test_a_total_that_comes_before_its_partial_sum_is_refused():
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    ring.start(0.0)
    with pytest.raises(RemoteProtocolError, match="rank 2 sent"):
        ring.handle(PayloadReceived(2, PayloadSlot(CollectivePhase.GATHER, 0, 2), 0, "x"), 0.0)


def test_the_same_slot_twice_is_refused():
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    event = PayloadReceived(2, PayloadSlot(CollectivePhase.REDUCE, 0, 2), 0, "x")
    ring.start(0.0)
    ring.handle(event, 0.0)
    with pytest.raises(RemoteProtocolError, match=r"expected PayloadSlot.*GATHER.* from rank 2"):
        ring.handle(event, 0.0)


every_ring = pytest.mark.parametrize(
    "make",
    [DenseRingBuffer, *(partial(RoundedRingBuffer, kind=kind) for kind in (ValueKind.BF16, ValueKind.INT8))],
    ids=["fp32", "bf16", "int8"],
)


def rests(buffers):
    """What each rank's roundings have left, as bytes."""
    return [None if buffer.rest_N is None else buffer.rest_N.tobytes() for buffer in buffers]


def sent_bytes(sent, workspaces):
    """Bytes of all payloads that were sent, without RESUME."""
    resume = sum(
        len(workspaces[src].payload(place)) for src, _, place in sent if place.phase is CollectivePhase.RESUME
    )
    data = sum(
        len(workspaces[src].payload(place))
        for src, _, place in sent
        if place.phase is not CollectivePhase.RESUME
    )
    return data, resume


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
