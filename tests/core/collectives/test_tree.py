"""The paper's tree: its schedule as a picture, and guarantees 1 and 2 of GTopK on a network that reorders."""

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
    assert_crash_is_blamed,
    random_inputs,
    run_lockstep,
    select_locally,
)

from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    MergePayload,
    PayloadReceived,
    Provenance,
    ReplacePayload,
    SendTo,
)
from gridtrain.core.collectives.tree import TreeExchange, neighbours, schedule
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import ValueKind
from gridtrain.runtime.buffers.star_buffers import TreeBuffer

WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32]


def picture(world_size):
    return "\n".join(
        f"rank {rank}:  "
        + "   ".join(
            f"{hop.slot.phase.name.lower()} {'->' if hop.is_sender else '<-'} {hop.partner}"
            for hop in schedule(rank, world_size)
        )
        for rank in range(world_size)
    )


def test_the_schedule_of_six_ranks():
    assert picture(6) == (
        "rank 0:  to_root <- 1   to_root <- 2   to_root <- 4   from_root -> 4   "
        "from_root -> 2   from_root -> 1\n"
        "rank 1:  to_root -> 0   from_root <- 0\n"
        "rank 2:  to_root <- 3   to_root -> 0   from_root <- 0   from_root -> 3\n"
        "rank 3:  to_root -> 2   from_root <- 2\n"
        "rank 4:  to_root <- 5   to_root -> 0   from_root <- 0   from_root -> 5\n"
        "rank 5:  to_root -> 4   from_root <- 4"
    )


@pytest.mark.parametrize("world_size", range(1, 40))
def test_each_link_carries_one_payload_each_way_and_the_links_are_a_tree(world_size):
    sent = [
        (rank, hop.partner, hop.slot)
        for rank in range(world_size)
        for hop in schedule(rank, world_size)
        if hop.is_sender
    ]
    awaited = [
        (hop.partner, rank, hop.slot)
        for rank in range(world_size)
        for hop in schedule(rank, world_size)
        if hop.is_receiver
    ]
    assert sorted(sent, key=str) == sorted(awaited, key=str)
    assert len(sent) == 2 * (world_size - 1)
    ticks = run_lockstep([TreeExchange(rank, world_size, False) for rank in range(world_size)])
    assert len(ticks) <= 2 * (world_size - 1).bit_length()


def test_a_transcript_of_rank_2_of_six():
    core = TreeExchange(2, 6, skip=False)
    assert core.start(0.0) == [] and core.waiting_for() == {3}
    raised, lowered = PayloadSlot(CollectivePhase.TO_ROOT, 1), PayloadSlot(CollectivePhase.FROM_ROOT, 1)
    assert core.handle(PayloadReceived(3, PayloadSlot(CollectivePhase.TO_ROOT), True, "3's"), 0.0) == [
        MergePayload("3's", 1, 0, Provenance(3, contributors=1, world_size=6, roundings=1)),
        SendTo(0, raised, True),
    ]
    assert core.handle(PayloadReceived(0, lowered, True, "all"), 0.0) == [
        ReplacePayload("all", Provenance(0, contributors=6, world_size=6, roundings=4)),
        SendTo(3, PayloadSlot(CollectivePhase.FROM_ROOT), True),
        CollectiveComplete(True),
    ]
    assert core.complete and core.waiting_for() == frozenset()


def test_one_rank_is_complete_at_once():
    core = TreeExchange(0, 1, skip=True)
    assert core.start(0.0) == [CollectiveComplete(True)]
    assert core.complete and neighbours(0, 1) == frozenset()


@pytest.mark.parametrize(
    ("from_rank", "place"),
    [
        (3, PayloadSlot(CollectivePhase.TO_ROOT)),  # rank 3 raises to rank 2
        (2, PayloadSlot(CollectivePhase.TO_ROOT)),  # rank 2 raises at hop 1
        (1, PayloadSlot(CollectivePhase.TO_ROOT, 0, 1)),  # no segments here
        (1, PayloadSlot(CollectivePhase.FROM_ROOT)),  # nothing comes down to the root
        (1, PayloadSlot(CollectivePhase.SWAP)),  # another exchange
    ],
)
def test_impossible_payloads_are_refused(from_rank, place):
    core = TreeExchange(0, 6, skip=False)
    core.start(0.0)
    with pytest.raises(RemoteProtocolError, match=f"tree, rank 0 of 6: rank {from_rank} sent"):
        core.handle(PayloadReceived(from_rank, place, False, "x"), 0.0)


def group_of(inputs, payloads, seed, skipping=()):
    workspaces = [TreeBuffer(p, n=inputs.n, k=inputs.k, kind=inputs.kind) for p in payloads]
    return CollectiveGroup(workspaces, seed=seed, skipping=skipping)


def test_all_ranks_end_with_the_same_bits_and_nothing_is_lost(seeds):
    for seed in seeds(150):
        rng = np.random.default_rng(seed)
        world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
        inputs = random_inputs(rng, world_size)
        for round_ in range(3):
            payloads, residuals = inputs.select()
            group = group_of(inputs, payloads, seed)
            group.run()
            says = f"seed {seed}, round {round_}"
            assert group.verdicts == [False] * world_size, says
            assert len({w.compute_digest() for w in group.buffers}) == 1, f"{says}: the ranks differ"
            for residual_N, workspace in zip(residuals, group.buffers, strict=True):
                for indices, values in workspace.truncated:
                    residual_N[indices] += values
            inputs.assert_conserved(residuals, group.buffers[0].update, says)
            for rank in range(world_size):
                partners = {to for src, to, _ in group.sent if src == rank}
                assert partners <= neighbours(rank, world_size), says
            inputs = inputs.next_round(rng, residuals)


def test_with_k_equal_n_the_update_is_the_whole_sum(seeds):
    for seed in seeds(30):
        rng = np.random.default_rng(seed)
        inputs = random_inputs(rng, WORLD_SIZES[seed % len(WORLD_SIZES)], integers=True, dense=True)
        group = group_of(inputs, inputs.select()[0], seed)
        group.run()
        whole = np.sum([r.astype(np.float64) + c for r, c in inputs.members], axis=0)
        update = np.zeros(inputs.n)
        update[group.buffers[0].update.indices] = group.buffers[0].update.values
        assert (update == whole).all(), f"seed {seed}"


def test_the_receiver_of_a_merge_adds_what_it_drops_to_its_residual():
    """Rank r of 6 sends the value r + 1 at index 9 + r; k = 1.  The largest, 6 at 14, comes through.

    raise 0   0: 1, 2 -> 2 (keeps 1 at 9)   2: 3, 4 -> 4 (keeps 3 at 11)   4: 5, 6 -> 6 (keeps 5 at 13)
    raise 1   0: 2, 4 -> 4 (keeps 2 at 10)
    raise 2   0: 4, 6 -> 6 (keeps 4 at 12)
    """
    vectors = [np.zeros(16, np.float32) for _ in range(6)]
    for rank, vector in enumerate(vectors):
        vector[9 + rank] = rank + 1
    payloads = [select_locally(v * 0, v, 1, ValueKind.FP16)[0] for v in vectors]
    workspaces = [TreeBuffer(p, n=16, k=1, kind=ValueKind.FP16) for p in payloads]
    CollectiveGroup(workspaces, seed=0).run()
    kept = [
        {int(i): float(v) for ix, vs in w.truncated for i, v in zip(ix, vs, strict=True)} for w in workspaces
    ]
    assert kept == [{9: 1.0, 10: 2.0, 12: 4.0}, {}, {11: 3.0}, {}, {13: 5.0}, {}]
    assert [w.update.indices.tolist() for w in workspaces] == [[14]] * 6


def test_a_skip_reaches_all_ranks(seeds):
    for seed in seeds(50):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(1, 17))
        inputs = random_inputs(rng, world_size)
        skipping = {int(rng.integers(world_size))}
        group = group_of(inputs, inputs.select()[0], seed, skipping=skipping)
        group.run()
        assert group.verdicts == [True] * world_size, f"seed {seed}"
        assert len({w.compute_digest() for w in group.buffers}) == 1, f"seed {seed}: the ranks differ"


def test_when_a_rank_dies_no_other_completes_and_all_wait_for_it(seeds):
    for seed in seeds(100):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(2, 17))
        inputs = random_inputs(rng, world_size)
        payloads, _ = inputs.select()
        assert_crash_is_blamed(group_of(inputs, payloads, seed), group_of(inputs, payloads, seed), seed)
