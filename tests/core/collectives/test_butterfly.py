"""The butterfly: its schedule as a picture, and guarantees 1 and 2 of GTopK on a network that reorders."""

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
    assert_crash_is_blamed,
    random_inputs,
    run_lockstep,
    select_locally,
)

from gridtrain.core.collectives.butterfly import ButterflyExchange, neighbours, schedule
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    MergePayload,
    PayloadReceived,
    Provenance,
    ReplacePayload,
    SendTo,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import ValueKind
from gridtrain.runtime.buffers.collective_buffers import ButterflyBuffer

WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32]


def picture(world_size):
    arrows = {(True, False): "->", (False, True): "<-", (True, True): "<->"}
    return "\n".join(
        f"rank {rank}:  "
        + "   ".join(
            f"{hop.slot.phase.name.lower()} {arrows[hop.is_sender, hop.is_receiver]} {hop.partner}"
            for hop in schedule(rank, world_size)
        )
        for rank in range(world_size)
    )


def test_the_schedule_of_six_ranks():
    assert picture(6) == (
        "rank 0:  fold <- 4   swap <-> 1   swap <-> 2   unfold -> 4\n"
        "rank 1:  fold <- 5   swap <-> 0   swap <-> 3   unfold -> 5\n"
        "rank 2:  swap <-> 3   swap <-> 0\n"
        "rank 3:  swap <-> 2   swap <-> 1\n"
        "rank 4:  fold -> 0   unfold <- 0\n"
        "rank 5:  fold -> 1   unfold <- 1"
    )


def test_the_schedule_of_three_ranks():
    assert picture(3) == (
        "rank 0:  fold <- 2   swap <-> 1   unfold -> 2\nrank 1:  swap <-> 0\nrank 2:  fold -> 0   unfold <- 0"
    )


@pytest.mark.parametrize(
    ("world_size", "hops"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3), (31, 6), (32, 5)]
)
def test_the_time_is_at_most_that_of_the_design(world_size, hops):
    """floor(log2 P) hops, and two more if P is not a power of two (fewer where hops overlap: P = 3)."""
    ticks = run_lockstep([ButterflyExchange(rank, world_size, False) for rank in range(world_size)])
    assert len(ticks) <= hops


def test_a_transcript_of_rank_1_of_six_whose_partners_are_ahead():
    core = ButterflyExchange(1, 6, skip=False)

    def came(from_rank, phase, hop, payload, skip=False):
        return core.handle(PayloadReceived(from_rank, PayloadSlot(phase, hop), skip, payload), 0.0)

    assert came(0, CollectivePhase.SWAP, 0, "0's") == []  # before I began
    assert core.start(0.0) == []
    assert came(3, CollectivePhase.SWAP, 1, "2+3's", skip=True) == []  # two hops ahead
    assert core.waiting_for() == {5} and not core.complete
    assert came(5, CollectivePhase.FOLD, 0, "5's") == [
        MergePayload("5's", 1, 0, Provenance(5, contributors=1, world_size=6, roundings=1)),
        SendTo(0, PayloadSlot(CollectivePhase.SWAP, 0), False),
        MergePayload("0's", 2, 1, Provenance(0, contributors=2, world_size=6, roundings=2)),
        SendTo(3, PayloadSlot(CollectivePhase.SWAP, 1), False),
        MergePayload("2+3's", 4, 1, Provenance(3, contributors=2, world_size=6, roundings=3)),
        SendTo(5, PayloadSlot(CollectivePhase.UNFOLD), True),
        CollectiveComplete(True),
    ]
    assert core.waiting_for() == frozenset() and core.complete


def test_a_transcript_of_rank_5_of_six_which_is_folded():
    core = ButterflyExchange(5, 6, skip=False)
    assert core.start(0.0) == [SendTo(1, PayloadSlot(CollectivePhase.FOLD), False)]
    assert core.waiting_for() == {1}
    effects = core.handle(PayloadReceived(1, PayloadSlot(CollectivePhase.UNFOLD), True, "all"), 0.0)
    assert effects == [
        ReplacePayload("all", Provenance(1, contributors=6, world_size=6, roundings=4)),
        CollectiveComplete(True),
    ]


def test_one_rank_is_complete_at_once():
    core = ButterflyExchange(0, 1, skip=True)
    assert core.start(0.0) == [CollectiveComplete(True)]
    assert core.complete and neighbours(0, 1) == frozenset()


@pytest.mark.parametrize(
    ("from_rank", "place"),
    [
        (2, PayloadSlot(CollectivePhase.SWAP, 0)),  # hop 0 is with rank 1
        (1, PayloadSlot(CollectivePhase.SWAP, 1)),  # hop 1 is with rank 2
        (4, PayloadSlot(CollectivePhase.SWAP, 2)),  # there is no hop 2 below rank 4
        (1, PayloadSlot(CollectivePhase.SWAP, 0, 1)),  # no segments here
        (1, PayloadSlot(CollectivePhase.FOLD)),  # rank 4 folds into me
        (4, PayloadSlot(CollectivePhase.UNFOLD)),  # I send that one
        (1, PayloadSlot(CollectivePhase.ALL_GATHER)),  # another exchange
    ],
)
def test_impossible_payloads_are_refused(from_rank, place):
    core = ButterflyExchange(0, 6, skip=False)
    core.start(0.0)
    with pytest.raises(RemoteProtocolError, match=f"rank {from_rank} sent"):
        core.handle(PayloadReceived(from_rank, place, False, "x"), 0.0)


@pytest.mark.parametrize("hop", [0, 1])
def test_the_same_slot_twice_is_refused_used_or_held(hop):
    core = ButterflyExchange(0, 4, skip=False)
    event = PayloadReceived(1 << hop, PayloadSlot(CollectivePhase.SWAP, hop), False, "x")
    core.start(0.0)
    core.handle(event, 0.0)
    with pytest.raises(RemoteProtocolError, match="due was nothing"):
        core.handle(event, 0.0)


def group_of(inputs, payloads, seed, skipping=()):
    workspaces = [ButterflyBuffer(p, n=inputs.n, k=inputs.k, kind=inputs.kind) for p in payloads]
    return CollectiveGroup(workspaces, seed=seed, skipping=skipping)


def test_all_ranks_end_with_the_same_bits_and_nothing_is_lost(seeds):
    """Three rounds each: the residuals of a round are inputs of the next."""
    for seed in seeds(300):
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
    for seed in seeds(50):
        rng = np.random.default_rng(seed)
        world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
        inputs = random_inputs(rng, world_size, integers=True, dense=True)
        payloads, _ = inputs.select()
        group = group_of(inputs, payloads, seed)
        group.run()
        whole = np.sum([r.astype(np.float64) + c for r, c in inputs.members], axis=0)
        update = np.zeros(inputs.n)
        update[group.buffers[0].update.indices] = group.buffers[0].update.values
        assert (update == whole).all(), f"seed {seed}"


def test_dropped_values_are_spread_over_the_ranks_and_the_fold_drops_none():
    """Rank r of 6 sends the value r + 1 at index 9 + r; k = 1.  The largest, 6 at 14, comes through.

    fold     0: 1, 5 -> 5 at 13 (rank 0 alone keeps 1 at 9)  1: 2, 6 -> 6 at 14 (rank 1 alone keeps 2 at 10)
    swap 1   0, 1: 5, 6 -> 6 at 14 (13 is odd: rank 1)       2, 3: 3, 4 -> 4 at 12 (11 is odd: rank 3)
    swap 2   all: 6, 4 -> 6 at 14 (12 mod 4 = 0: rank 0)
    """
    vectors = [np.zeros(16, np.float32) for _ in range(6)]
    for rank, vector in enumerate(vectors):
        vector[9 + rank] = rank + 1
    payloads = [select_locally(v * 0, v, 1, ValueKind.FP16)[0] for v in vectors]
    workspaces = [ButterflyBuffer(p, n=16, k=1, kind=ValueKind.FP16) for p in payloads]
    CollectiveGroup(workspaces, seed=0).run()
    kept = [
        {int(i): float(v) for ix, vs in w.truncated for i, v in zip(ix, vs, strict=True)} for w in workspaces
    ]
    assert kept == [{9: 1.0, 12: 4.0}, {10: 2.0, 13: 5.0}, {}, {11: 3.0}, {}, {}]
    assert [w.update.indices.tolist() for w in workspaces] == [[14]] * 6


def test_a_skip_reaches_all_ranks(seeds):
    for seed in seeds(100):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(1, 17))
        inputs = random_inputs(rng, world_size)
        payloads, _ = inputs.select()
        group = group_of(inputs, payloads, seed, skipping={int(rng.integers(world_size))})
        group.run()
        assert group.verdicts == [True] * world_size, f"seed {seed}"
        assert len({w.compute_digest() for w in group.buffers}) == 1, f"seed {seed}: the ranks differ"


def test_when_a_rank_dies_no_other_completes_and_all_wait_for_it(seeds):
    for seed in seeds(200):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(2, 17))
        inputs = random_inputs(rng, world_size)
        payloads, _ = inputs.select()
        assert_crash_is_blamed(group_of(inputs, payloads, seed), group_of(inputs, payloads, seed), seed)
