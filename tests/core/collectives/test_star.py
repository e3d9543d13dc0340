"""The star, sparse and dense: transcripts, and guarantees 1 and 2 on a network that reorders."""

from hashlib import blake2b, sha256
from random import Random

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
    assert_crash_is_blamed,
    random_inputs,
    select_locally,
)

from gridtrain.core.collectives.collective import (
    AddSlice,
    CollectiveComplete,
    MergePayload,
    PayloadReceived,
    Provenance,
    ReplacePayload,
    SendTo,
    StoreFromRank,
    StoreSlice,
)
from gridtrain.core.collectives.star import DenseStar, SparseStar, neighbours
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.core.planning.workload import ExchangeKind, Workload, slice_count
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import ValueKind
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer, SparseStarBuffer

WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32]


def raised(rank, slice_=0):
    return PayloadSlot(CollectivePhase.TO_ROOT, 0, rank, slice_)


def lowered(slice_=0):
    return PayloadSlot(CollectivePhase.FROM_ROOT, 0, 0, slice_)


def test_a_sparse_star_of_three_at_its_root():
    core = SparseStar(0, 3, skip=False)
    assert core.start(0.0) == [] and core.waiting_for() == {1, 2}
    assert core.handle(PayloadReceived(2, raised(2), True, "2's"), 0.0) == [
        StoreFromRank(2, "2's", Provenance(2, 1, 3, 1))
    ]
    assert core.handle(PayloadReceived(1, raised(1), False, "1's"), 0.0) == [
        StoreFromRank(1, "1's", Provenance(1, 1, 3, 1)),
        SendTo(1, lowered(), True),
        SendTo(2, lowered(), True),
        CollectiveComplete(True),
    ]
    assert core.complete and core.waiting_for() == frozenset()


def test_a_sparse_star_at_a_member():
    core = SparseStar(2, 3, skip=True)
    assert core.start(0.0) == [SendTo(0, raised(2), True)]
    assert core.handle(PayloadReceived(0, lowered(), True, "all"), 0.0) == [
        ReplacePayload("all", Provenance(0, contributors=3, world_size=3, roundings=2)),
        CollectiveComplete(True),
    ]


def test_a_dense_star_adds_parts_on_arrival_and_sends_complete_slices():
    core = DenseStar(0, 3, slices=2, skip=False)
    assert core.start(0.0) == []
    assert core.handle(PayloadReceived(2, raised(2, 0), False, "2a"), 0.0) == [
        AddSlice(0, 0, "2a", Provenance(2, 1, 3, 1))
    ]
    assert core.handle(PayloadReceived(1, raised(1, 1), False, "1b"), 0.0) == [
        AddSlice(0, 1, "1b", Provenance(1, 1, 3, 1))
    ]
    assert core.handle(PayloadReceived(1, raised(1, 0), False, "1a"), 0.0) == [
        AddSlice(0, 0, "1a", Provenance(1, 1, 3, 1)),
        SendTo(1, lowered(0), False),
        SendTo(2, lowered(0), False),
    ]
    assert core.waiting_for() == {2} and not core.complete
    assert core.handle(PayloadReceived(2, raised(2, 1), False, "2b"), 0.0)[-1] == CollectiveComplete(False)
    assert core.complete


def test_a_dense_star_at_a_member():
    core = DenseStar(1, 2, slices=2, skip=False)
    assert core.start(0.0) == [SendTo(0, raised(1, 0), False), SendTo(0, raised(1, 1), False)]
    whole = Provenance(0, contributors=2, world_size=2, roundings=2)
    assert core.handle(PayloadReceived(0, lowered(1), False, "b"), 0.0) == [StoreSlice(0, 1, "b", whole)]
    assert core.handle(PayloadReceived(0, lowered(0), False, "a"), 0.0) == [
        StoreSlice(0, 0, "a", whole),
        CollectiveComplete(False),
    ]


@pytest.mark.parametrize("core", [SparseStar(0, 1, True), DenseStar(0, 1, 3, True)])
def test_one_rank_is_complete_at_once(core):
    assert core.start(0.0) == [CollectiveComplete(True)] and core.complete
    assert neighbours(0, 1) == frozenset()


def test_only_the_root_has_more_than_one_neighbour():
    assert [set(neighbours(rank, 4)) for rank in range(4)] == [{1, 2, 3}, {0}, {0}, {0}]


@pytest.mark.parametrize(
    ("rank", "from_rank", "place"),
    [
        (0, 1, raised(2)),  # another's part
        (0, 1, lowered()),  # nothing comes down to the root
        (0, 4, raised(4)),  # no such rank
        (0, 1, raised(1, 9)),  # no such slice
        (0, 1, raised(1, -1)),
        (0, 1, PayloadSlot(CollectivePhase.TO_ROOT, 1, 1)),  # no hops here
        (1, 2, lowered()),  # only the root lowers
        (1, 0, raised(0)),
        (1, 0, PayloadSlot(CollectivePhase.GATHER)),  # another exchange
    ],
)
@pytest.mark.parametrize("dense", [False, True])
def test_impossible_payloads_are_refused(dense, rank, from_rank, place):
    core = DenseStar(rank, 3, 2, False) if dense else SparseStar(rank, 3, False)
    core.start(0.0)
    with pytest.raises(RemoteProtocolError, match=f"star, rank {rank} of 3: rank {from_rank} sent"):
        core.handle(PayloadReceived(from_rank, place, False, "x"), 0.0)


@pytest.mark.parametrize("core", [SparseStar(0, 3, False), DenseStar(0, 3, 2, False)])
def test_the_same_slot_twice_is_refused(core):
    event = PayloadReceived(2, raised(2), False, "x")
    core.start(0.0)
    core.handle(event, 0.0)
    with pytest.raises(RemoteProtocolError, match=r"due was nothing \(more\)"):
        core.handle(event, 0.0)


# -- sparse, with numbers --------------------------------------------------------------------------


def group_of(inputs, payloads, seed, skipping=()):
    workspaces = [SparseStarBuffer(p, n=inputs.n, k=inputs.k, kind=inputs.kind) for p in payloads]
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
            assert {(a, b) for a, b, _ in group.sent if a and b} == set(), says
            inputs = inputs.next_round(rng, residuals)


def test_the_update_is_the_k_largest_of_the_sum_of_all_that_was_selected(seeds):
    """A tree or butterfly may drop in an early merge what the whole sum would keep; a star does not."""
    for seed in seeds(50):
        rng = np.random.default_rng(seed)
        inputs = random_inputs(rng, int(rng.integers(2, 9)), integers=True)
        group = group_of(inputs, inputs.select()[0], seed)
        sums = np.zeros(inputs.n, np.float64)
        for workspace in group.buffers:
            np.add.at(sums, workspace.update.indices, workspace.update.values)
        group.run()
        order = sorted((i for i in range(inputs.n) if sums[i]), key=lambda i: (-abs(sums[i]), i))
        chosen = sorted(order[: inputs.k])
        assert group.buffers[0].update.indices.tolist() == chosen, f"seed {seed}"


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
    for seed in seeds(60):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(2, 17))
        inputs = random_inputs(rng, world_size)
        payloads, _ = inputs.select()
        assert_crash_is_blamed(group_of(inputs, payloads, seed), group_of(inputs, payloads, seed), seed)


def test_a_star_refuses_effects_of_other_collectives():
    payload = select_locally(np.zeros(4, np.float32), np.ones(4, np.float32), 2, ValueKind.FP16)[0]
    workspace = SparseStarBuffer(payload, n=4, k=2, kind=ValueKind.FP16)
    workspace.make_collective(0, 2, skip=False)
    with pytest.raises(LocalProtocolError, match="is no effect of"):
        workspace.apply(AddSlice(0, 0, b"", Provenance(1, 1, 2, 1)))
    assert not workspace.truncated
    with pytest.raises(RemoteProtocolError):
        workspace.apply(MergePayload(b"", 1, 0, Provenance(1, 1, 2, 1)))


# -- dense, with numbers ---------------------------------------------------------------------------


def test_the_dense_sum_has_the_same_bits_on_all_ranks(seeds):
    for seed in seeds(100):
        rng = np.random.default_rng(seed)
        world_size, n = WORLD_SIZES[seed % len(WORLD_SIZES)], int(rng.integers(1, 200))
        vectors = [
            np.asarray(rng.standard_normal(n) * 2.0 ** rng.integers(-20, 20, n), np.float32)
            for _ in range(world_size)
        ]
        exact = np.sum(np.asarray(vectors, np.float64), axis=0)
        bound = world_size * 2.0**-23 * np.sum(np.abs(np.asarray(vectors, np.float64)), axis=0)
        workspaces = [DenseStarBuffer(v.copy(), world_size, slice_bytes=64) for v in vectors]
        group = CollectiveGroup(workspaces, seed=seed)
        group.run()
        assert group.verdicts == [False] * world_size, f"seed {seed}"
        assert (np.abs(workspaces[0].update_N - exact) <= bound).all(), f"seed {seed}"
        assert len({w.update_N.tobytes() for w in workspaces}) == 1, f"seed {seed}"
        assert len({w.compute_digest() for w in workspaces}) == 1


@pytest.mark.parametrize("n", [1, 17_000, 100_001, 1_000_000, 5_000_000])
def test_slices_and_digest_are_as_in_the_protocol(n):
    """As PROTOCOL.md 5.1 says: one segment of b = 4 n bytes."""
    workspace = DenseStarBuffer(np.arange(n, dtype=np.float32), 4)
    longest = min(2**20, max(2**17, -(-4 * n // 8)))
    slices = max(1, -(-4 * n // longest))
    digest = blake2b(digest_size=32)
    for i in range(slices):
        part = workspace.update_N[i * n // slices : (i + 1) * n // slices]
        assert bytes(workspace.payload(PayloadSlot(CollectivePhase.TO_ROOT, 0, 1, i))) == part.tobytes()
        digest.update(sha256(part.tobytes()).digest())
    assert workspace.slices == slices == slice_count(Workload(ExchangeKind.STAR, n), 4)
    assert workspace.compute_digest() == digest.digest()


def test_a_dense_sum_that_is_not_finite_has_no_digest():
    values = np.ones(100_000, np.float32)
    values[-1] = np.nan
    with pytest.raises(RemoteProtocolError, match="not finite although no member skips"):
        DenseStarBuffer(values, 2).compute_digest()


def test_a_skip_in_a_dense_star_reaches_all_ranks_and_adds_nothing(seeds):
    for seed in seeds(30):
        world_size = Random(seed).randint(1, 9)
        skipping = Random(seed).randrange(world_size)
        vectors = [np.full(40, np.nan if r == skipping else 1.0, np.float32) for r in range(world_size)]
        workspaces = [DenseStarBuffer(v, world_size, slice_bytes=64) for v in vectors]
        group = CollectiveGroup(workspaces, seed=seed, skipping={skipping})
        group.run()
        assert group.verdicts == [True] * world_size, f"seed {seed}"
        assert {w.update_N[7] for w in workspaces} == {np.float32(world_size - 1)}, f"seed {seed}"


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_a_contribution_of_another_shape_is_a_local_error(wrong):
    with pytest.raises(LocalProtocolError, match="must be float32"):
        DenseStarBuffer(wrong, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, np.float32(1e38)])
def test_invalid_payloads_are_refused_on_arrival(bad):
    workspace = DenseStarBuffer(np.ones(2, np.float32), 3)
    workspace.make_collective(0, 3, skip=False)
    with pytest.raises(RemoteProtocolError, match=r"slice 0 from rank 1 has values from .* at most"):
        workspace.apply(AddSlice(0, 0, np.array([bad, 0], np.float32).tobytes(), Provenance(1, 1, 3, 1)))
    assert workspace.update_N.tolist() == [1, 1]
