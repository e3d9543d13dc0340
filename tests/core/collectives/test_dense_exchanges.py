"""Ring, direct exchange and dense star: schedules, transcripts, and properties of one of them.

What all of them guarantee is in test_conformance.py, retries of the ring in test_ring_retries.py.
"""

from random import Random

import numpy as np
import pytest
import torch
from collective_group import CollectiveGroup, random_vectors, run_lockstep

from gridtrain.config import Dense
from gridtrain.core.collectives import direct, star
from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveComplete,
    Provenance,
    SendTo,
    StoreSlice,
)
from gridtrain.core.collectives.direct import DirectAllReduce
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.collectives.star import DenseStar
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.buffers.direct_buffer import DirectBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.exchangers import make_exchanger

WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16]


def reduce(segment, slice_=0, *, hop=0):
    return PayloadSlot(CollectivePhase.REDUCE, hop, segment, slice_)


def gather(segment, slice_=0, *, hop=0):
    return PayloadSlot(CollectivePhase.GATHER, hop, segment, slice_)


@pytest.mark.parametrize(
    ("collective", "schedule"),
    [
        (
            RingAllReduce,
            "tick 0  0 -> 1: R0  1 -> 2: R1  2 -> 0: R2\n"
            "tick 1  0 -> 1: R2  1 -> 2: R0  2 -> 0: R1\n"
            "tick 2  0 -> 1: G1  1 -> 2: G2  2 -> 0: G0\n"
            "tick 3  0 -> 1: G0  1 -> 2: G1  2 -> 0: G2",
        ),
        (
            DirectAllReduce,
            "tick 0  0 -> 1: R1  0 -> 2: R2  1 -> 2: R2  1 -> 0: R0  2 -> 0: R0  2 -> 1: R1\n"
            "tick 1  0 -> 1: G0  0 -> 2: G0  1 -> 2: G1  1 -> 0: G1  2 -> 0: G2  2 -> 1: G2",
        ),
    ],
)
def test_the_schedule_of_three_ranks(collective, schedule):
    """R2: a part, or a partial sum, of segment 2; G2: its total."""
    ticks = run_lockstep([collective(rank, 3, slices=1, flags=0) for rank in range(3)])
    found = "\n".join(
        f"tick {tick}  "
        + "  ".join(
            f"{rank} -> {send.to_rank}: {send.slot.phase.name[0]}{send.slot.segment}"
            for rank, send in sorted(sends, key=lambda sent: sent[0])
        )
        for tick, sends in enumerate(ticks)
    )
    assert found == schedule


@pytest.mark.parametrize(("collective", "owned"), [(RingAllReduce, 1), (DirectAllReduce, 0)])
def test_slices_do_not_wait_for_each_other(collective, owned):
    core = collective(0, 2, slices=2, flags=0)
    core.start()
    for slice_ in (1, 0):
        effects = core.handle(1, reduce(owned, slice_), 0, "x")
        assert effects[1] == SendTo(1, gather(owned, slice_), 0)


def test_only_the_root_of_a_star_has_more_than_one_neighbour():
    assert [set(direct.neighbours(rank, 3)) for rank in range(3)] == [{1, 2}, {0, 2}, {0, 1}]
    assert [set(star.neighbours(rank, 4)) for rank in range(4)] == [{1, 2, 3}, {0}, {0}, {0}]


# -- ring ------------------------------------------------------------------------------------------


def test_a_transcript_of_rank_0_of_a_ring_of_three():
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    whole = Provenance(2, contributors=3, world_size=3, roundings=3)

    def receive(slot, skip=False):
        return ring.handle(2, slot, skip, f"{slot.phase.name} {slot.segment}")

    assert ring.start() == [SendTo(1, reduce(0), 0)]
    assert receive(reduce(2), skip=True) == [  # rank 2 skips: its flag is forwarded
        AddSlice(2, 0, "REDUCE 2", Provenance(2, contributors=1, world_size=3, roundings=1)),
        SendTo(1, reduce(2, hop=1), 1),
    ]
    assert receive(reduce(1, hop=1), skip=True) == [  # segment 1 is complete here
        AddSlice(1, 0, "REDUCE 1", Provenance(2, contributors=2, world_size=3, roundings=2)),
        SendTo(1, gather(1), 1),
    ]
    assert receive(gather(0), skip=True) == [
        StoreSlice(0, 0, "GATHER 0", whole),
        SendTo(1, gather(0, hop=1), 1),
    ]
    assert ring.waiting_for() == {2} and not ring.complete
    assert receive(gather(2, hop=1), skip=True) == [
        StoreSlice(2, 0, "GATHER 2", whole),
        CollectiveComplete(1),
    ]
    assert ring.waiting_for() == frozenset() and ring.complete


def test_a_skipping_rank_of_a_ring_flags_all_that_it_forwards():
    ring = RingAllReduce(0, 3, slices=1, flags=SKIP)
    assert ring.start() == [SendTo(1, reduce(0), 1)]
    effects = ring.handle(2, reduce(2), 0, "x")
    assert effects[1] == SendTo(1, reduce(2, hop=1), 1)


def test_a_repeated_slot_is_refused_with_the_expected_one():
    ring = RingAllReduce(0, 3, slices=1, flags=0)
    event = (2, reduce(2), 0, "x")
    ring.start()
    ring.handle(*event)
    with pytest.raises(RemoteProtocolError, match=r"expected PayloadSlot.*GATHER.* from rank 2"):
        ring.handle(*event)


# -- direct ----------------------------------------------------------------------------------------


def test_a_transcript_of_rank_1_of_a_direct_exchange_of_four():
    """A part that arrives early is stored: parts are added in the order own, 2, 3, 0."""
    core = DirectAllReduce(1, 4, slices=1, flags=0)
    whole = {rank: Provenance(rank, contributors=4, world_size=4, roundings=4) for rank in range(4)}

    def receive(from_rank, slot, skip=False):
        return core.handle(from_rank, slot, skip, f"{slot.phase.name} {from_rank}")

    def added(rank):
        return AddSlice(1, 0, f"REDUCE {rank}", Provenance(rank, contributors=1, world_size=4, roundings=1))

    assert core.start() == [SendTo(rank, reduce(rank), 0) for rank in (2, 3, 0)]
    assert receive(3, reduce(1), skip=True) == []
    assert receive(2, reduce(1)) == [added(2), added(3)]
    assert receive(2, gather(2)) == [StoreSlice(2, 0, "GATHER 2", whole[2])]
    assert core.waiting_for() == {0, 3}
    assert receive(0, reduce(1)) == [added(0), *(SendTo(rank, gather(1), 1) for rank in (2, 3, 0))]
    assert receive(0, gather(0), skip=True) == [StoreSlice(0, 0, "GATHER 0", whole[0])]
    assert core.waiting_for() == {3} and not core.complete
    assert receive(3, gather(3), skip=True) == [StoreSlice(3, 0, "GATHER 3", whole[3]), CollectiveComplete(1)]
    assert core.waiting_for() == frozenset() and core.complete


def test_an_early_payload_is_no_longer_than_its_slice():
    """Early payloads are stored undecoded, so many of 64 MiB could fill the memory."""
    core = DirectBuffer(np.ones(8, np.float32), 3).make_collective(0, 3, flags=0)
    core.start()
    with pytest.raises(RemoteProtocolError, match=r"rank 2 sent 12 bytes .* at most 8"):
        core.handle(2, reduce(0), 0, bytes(12))
    assert core.handle(2, reduce(0), 0, bytes(8)) == []


def test_a_direct_exchange_has_the_bits_of_a_ring(seeds):
    for seed in seeds(150):
        rng = np.random.default_rng(seed)
        world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
        vectors = random_vectors(rng, world_size).vectors
        skipping = {r for r in range(world_size) if rng.random() < 0.05}
        groups = []
        for make in (DenseRingBuffer, DirectBuffer):
            buffers = [make(v.copy(), world_size, slice_bytes=16) for v in vectors]
            groups.append(CollectiveGroup(buffers, seed=seed, skipping=skipping))
            groups[-1].run()
        ring, direct_group = groups
        assert direct_group.flags == ring.flags == [SKIP if skipping else 0] * world_size, f"seed {seed}"
        assert len({b.update.tobytes() for b in (*ring.buffers, *direct_group.buffers)}) == 1, f"seed {seed}"
        assert len({b.compute_digest() for b in (*ring.buffers, *direct_group.buffers)}) == 1, f"seed {seed}"


def test_a_direct_retry_starts_from_the_beginning_and_ends_with_the_same_bits(seeds):
    """The gradients are the same; the first attempt is interrupted at any moment."""
    for seed in seeds(100):
        rng, random = np.random.default_rng(seed), Random(seed)
        world_size = random.randint(2, 9)
        vectors = random_vectors(rng, world_size).vectors
        complete = CollectiveGroup([DirectBuffer(v.copy(), world_size) for v in vectors], seed=seed)
        complete.run()

        gradients = [torch.from_numpy(v.copy()) for v in vectors]
        cpu = torch.device("cpu")
        exchangers = [make_exchanger(Dense(topology="direct"), (0, v.size), cpu) for v in vectors]
        for attempt in range(2):
            plans = [StepPlan(0, attempt, rank, world_size, 1, 1) for rank in range(world_size)]
            parts = [
                one.prepare_bucket(0, gradient, plan, usable=True)
                for one, gradient, plan in zip(exchangers, gradients, plans, strict=True)
            ]
            assert not any(part.skip or part.buffer.is_resumable for part in parts)
            group = CollectiveGroup([part.buffer for part in parts], seed=seed + attempt)
            for _ in range(random.randint(1, len(complete.sent)) if attempt == 0 else 0):
                group.network.step()
        group.run()
        digests = {w.compute_digest() for w in group.buffers}
        assert digests == {complete.buffers[0].compute_digest()}, f"seed {seed}"


# -- star ------------------------------------------------------------------------------------------


def to_root(rank, slice_=0):
    return PayloadSlot(CollectivePhase.TO_ROOT, 0, rank, slice_)


def from_root(slice_=0):
    return PayloadSlot(CollectivePhase.FROM_ROOT, 0, 0, slice_)


def test_a_star_adds_parts_on_arrival_and_sends_complete_slices():
    core = DenseStar(0, 3, slices=2, flags=0)

    def receive(from_rank, slice_, payload):
        return core.handle(from_rank, to_root(from_rank, slice_), 0, payload)

    assert core.start() == []
    assert receive(2, 0, "2a") == [AddSlice(0, 0, "2a", Provenance(2, 1, 3, 1))]
    assert receive(1, 1, "1b") == [AddSlice(0, 1, "1b", Provenance(1, 1, 3, 1))]
    assert receive(1, 0, "1a") == [
        AddSlice(0, 0, "1a", Provenance(1, 1, 3, 1)),
        SendTo(1, from_root(0), 0),
        SendTo(2, from_root(0), 0),
    ]
    assert core.waiting_for() == {2} and not core.complete
    assert receive(2, 1, "2b")[-1] == CollectiveComplete(0)
    assert core.complete


def test_a_transcript_of_a_member_of_a_dense_star():
    core = DenseStar(1, 2, slices=2, flags=0)
    assert core.start() == [SendTo(0, to_root(1, 0), 0), SendTo(0, to_root(1, 1), 0)]
    whole = Provenance(0, contributors=2, world_size=2, roundings=2)
    assert core.handle(0, from_root(1), 0, "b") == [StoreSlice(0, 1, "b", whole)]
    assert core.handle(0, from_root(0), 0, "a") == [
        StoreSlice(0, 0, "a", whole),
        CollectiveComplete(0),
    ]
