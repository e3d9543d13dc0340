"""The direct exchange: its schedule, the ring's bits, and retries."""

from random import Random

import numpy as np
import pytest
import torch
from collective_group import (
    CollectiveGroup,
    random_vectors,
    run_lockstep,
)

from gridtrain.config import Dense
from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveComplete,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreSlice,
)
from gridtrain.core.collectives.direct import DirectAllReduce, neighbours
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.buffers.direct_buffer import DirectBuffer
from gridtrain.runtime.step_plan import StepPlan
from gridtrain.training.exchangers import make_exchanger

CPU = torch.device("cpu")
WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16]


def part(owner, slice_=0):
    return PayloadSlot(CollectivePhase.REDUCE, 0, owner, slice_)


def total(owner, slice_=0):
    return PayloadSlot(CollectivePhase.GATHER, 0, owner, slice_)


def test_the_schedule_of_three_ranks():
    """R2: a part of segment 2; G2: its sum."""
    ticks = run_lockstep([DirectAllReduce(rank, 3, slices=1, flags=0) for rank in range(3)])
    picture = "\n".join(
        f"tick {tick}  "
        + "  ".join(
            f"{rank} -> {send.to_rank}: {send.slot.phase.name[0]}{send.slot.segment}"
            for rank, send in sorted(sends, key=lambda sent: sent[0])
        )
        for tick, sends in enumerate(ticks)
    )
    assert picture == (
        "tick 0  0 -> 1: R1  0 -> 2: R2  1 -> 2: R2  1 -> 0: R0  2 -> 0: R0  2 -> 1: R1\n"
        "tick 1  0 -> 1: G0  0 -> 2: G0  1 -> 2: G1  1 -> 0: G1  2 -> 0: G2  2 -> 1: G2"
    )


def test_a_transcript_of_rank_1_of_four():
    """A part that arrives before its turn is held: after the own part come those of 2, 3 and 0."""
    core = DirectAllReduce(1, 4, slices=1, flags=0)
    whole = {rank: Provenance(rank, contributors=4, world_size=4, roundings=4) for rank in range(4)}

    def came(from_rank, place, skip=False):
        return core.handle(PayloadReceived(from_rank, place, skip, f"{place.phase.name} {from_rank}"), 0.0)

    def added(rank):
        return AddSlice(1, 0, f"REDUCE {rank}", Provenance(rank, contributors=1, world_size=4, roundings=1))

    assert core.start(0.0) == [SendTo(rank, part(rank), 0) for rank in (2, 3, 0)]
    assert came(3, part(1), skip=True) == []
    assert came(2, part(1)) == [added(2), added(3)]
    assert came(2, total(2)) == [StoreSlice(2, 0, "GATHER 2", whole[2])]
    assert core.waiting_for() == {0, 3}
    assert came(0, part(1)) == [added(0), *(SendTo(rank, total(1), 1) for rank in (2, 3, 0))]
    assert came(0, total(0), skip=True) == [StoreSlice(0, 0, "GATHER 0", whole[0])]
    assert core.waiting_for() == {3} and not core.complete
    assert came(3, total(3), skip=True) == [StoreSlice(3, 0, "GATHER 3", whole[3]), CollectiveComplete(1)]
    assert core.waiting_for() == frozenset() and core.complete


def test_slices_do_not_wait_for_each_other():
    core = DirectAllReduce(0, 2, slices=2, flags=0)
    core.start(0.0)
    for slice_ in (1, 0):
        effects = core.handle(PayloadReceived(1, part(0, slice_), 0, "x"), 0.0)
        assert effects[1] == SendTo(1, total(0, slice_), 0)


def test_each_rank_is_connected_to_all_others():
    assert [set(neighbours(rank, 3)) for rank in range(3)] == [{1, 2}, {0, 2}, {0, 1}]


def test_a_held_payload_is_no_longer_than_its_slice():
    """Early payloads are not decoded, so many of 64 MiB could be held."""
    core = DirectBuffer(np.ones(8, np.float32), 3).make_collective(0, 3, flags=0)
    core.start(0.0)
    with pytest.raises(RemoteProtocolError, match=r"rank 2 sent 12 bytes .* at most 8"):
        core.handle(PayloadReceived(2, part(0), 0, bytes(12)), 0.0)
    assert core.handle(PayloadReceived(2, part(0), 0, bytes(8)), 0.0) == []


def test_all_ranks_end_with_the_rings_bits(seeds):
    for seed in seeds(300):
        rng = np.random.default_rng(seed)
        world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
        vectors = random_vectors(rng, world_size)
        skipping = {r for r in range(world_size) if rng.random() < 0.05}
        round_a_ring = [DenseRingBuffer(v.copy(), world_size, slice_bytes=16) for v in vectors.vectors]
        CollectiveGroup(round_a_ring, seed=seed, skipping=skipping).run()

        workspaces = [DirectBuffer(v.copy(), world_size, slice_bytes=16) for v in vectors.vectors]
        group = CollectiveGroup(workspaces, seed=seed, skipping=skipping)
        group.run()

        assert group.flags == [SKIP if skipping else 0] * world_size, f"seed {seed}"
        assert {w.update_N.tobytes() for w in workspaces} == {round_a_ring[0].update_N.tobytes()}, seed
        assert {w.compute_digest() for w in workspaces} == {round_a_ring[0].compute_digest()}, f"seed {seed}"
        vectors.assert_sum(workspaces, skipping, f"seed {seed}")
        for rank in range(world_size):
            sent = [to for src, to, _ in group.sent if src == rank]
            assert set(sent) <= neighbours(rank, world_size), f"seed {seed}"
            assert len(sent) == 2 * (world_size - 1) * workspaces[0].slices, f"seed {seed}"


def test_a_retry_starts_from_the_beginning_and_ends_with_the_same_bits(seeds):
    """With the same gradients, whenever the first attempt was interrupted."""
    for seed in seeds(100):
        rng, random = np.random.default_rng(seed), Random(seed)
        world_size = random.randint(2, 9)
        vectors = random_vectors(rng, world_size).vectors
        calm = CollectiveGroup([DirectBuffer(v.copy(), world_size) for v in vectors], seed=seed)
        calm.run()

        gradients = [torch.from_numpy(v.copy()) for v in vectors]
        exchangers = [make_exchanger(Dense(topology="direct"), (0, v.size), CPU) for v in vectors]
        for attempt in range(2):
            plans = [StepPlan(0, attempt, rank, world_size, 1, 1) for rank in range(world_size)]
            parts = [
                one.prepare_bucket(0, gradient, plan, usable=True)
                for one, gradient, plan in zip(exchangers, gradients, plans, strict=True)
            ]
            assert not any(part.skip or part.is_resumable for part in parts)
            group = CollectiveGroup([part.buffer for part in parts], seed=seed + attempt)
            for _ in range(random.randint(1, len(calm.sent)) if attempt == 0 else 0):
                group.network.step()
        group.run()
        assert {w.compute_digest() for w in group.buffers} == {calm.buffers[0].compute_digest()}, (
            f"seed {seed}"
        )


def test_a_slice_is_hashed_ahead_only_when_it_is_final():
    workspace = DirectBuffer(np.ones(6, np.float32), 3)
    workspace.make_collective(0, 3, flags=0)
    mine = np.ones(2, np.float32).tobytes()
    workspace.apply(AddSlice(0, 0, mine, Provenance(1, 1, 3, 1)))
    assert not workspace.hash_ahead() and not workspace._hashes, "rank 2's part is still to be added"
    workspace.apply(AddSlice(0, 0, mine, Provenance(2, 1, 3, 1)))
    workspace.hash_ahead()
    assert list(workspace._hashes) == [(0, 0)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, np.float32(1e38)])
def test_invalid_payloads_are_refused_on_arrival(bad):
    workspace = DirectBuffer(np.ones(6, np.float32), 3)
    workspace.make_collective(0, 3, flags=0)
    payload = np.array([bad, 0], np.float32).tobytes()
    with pytest.raises(RemoteProtocolError, match=r"slice 0 from rank 1 has values from .* at most"):
        workspace.apply(AddSlice(0, 0, payload, Provenance(1, 1, 3, 1)))
    assert workspace.update_N.tolist() == [1] * 6
