"""The star, sparse and dense: transcripts, what a root chooses, slices and digests."""

from hashlib import blake2b, sha256

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
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
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.core.planning.workload import ExchangeKind, Workload, slice_count
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import ValueKind, decode, encode
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer, SparseStarBuffer


def raised(rank, slice_=0):
    return PayloadSlot(CollectivePhase.TO_ROOT, 0, rank, slice_)


def lowered(slice_=0):
    return PayloadSlot(CollectivePhase.FROM_ROOT, 0, 0, slice_)


def test_a_sparse_star_of_three_at_its_root():
    core = SparseStar(0, 3, flags=0)
    assert core.start(0.0) == [] and core.waiting_for() == {1, 2}
    assert core.handle(PayloadReceived(2, raised(2), 1, "2's"), 0.0) == [
        StoreFromRank(2, "2's", Provenance(2, 1, 3, 1))
    ]
    assert core.handle(PayloadReceived(1, raised(1), 0, "1's"), 0.0) == [
        StoreFromRank(1, "1's", Provenance(1, 1, 3, 1)),
        SendTo(1, lowered(), 1),
        SendTo(2, lowered(), 1),
        CollectiveComplete(1),
    ]
    assert core.complete and core.waiting_for() == frozenset()


def test_a_sparse_star_at_a_member():
    core = SparseStar(2, 3, flags=SKIP)
    assert core.start(0.0) == [SendTo(0, raised(2), 1)]
    assert core.handle(PayloadReceived(0, lowered(), 1, "all"), 0.0) == [
        ReplacePayload("all", Provenance(0, contributors=3, world_size=3, roundings=2)),
        CollectiveComplete(1),
    ]


def test_a_dense_star_adds_parts_on_arrival_and_sends_complete_slices():
    core = DenseStar(0, 3, slices=2, flags=0)
    assert core.start(0.0) == []
    assert core.handle(PayloadReceived(2, raised(2, 0), 0, "2a"), 0.0) == [
        AddSlice(0, 0, "2a", Provenance(2, 1, 3, 1))
    ]
    assert core.handle(PayloadReceived(1, raised(1, 1), 0, "1b"), 0.0) == [
        AddSlice(0, 1, "1b", Provenance(1, 1, 3, 1))
    ]
    assert core.handle(PayloadReceived(1, raised(1, 0), 0, "1a"), 0.0) == [
        AddSlice(0, 0, "1a", Provenance(1, 1, 3, 1)),
        SendTo(1, lowered(0), 0),
        SendTo(2, lowered(0), 0),
    ]
    assert core.waiting_for() == {2} and not core.complete
    assert core.handle(PayloadReceived(2, raised(2, 1), 0, "2b"), 0.0)[-1] == CollectiveComplete(0)
    assert core.complete


def test_a_dense_star_at_a_member():
    core = DenseStar(1, 2, slices=2, flags=0)
    assert core.start(0.0) == [SendTo(0, raised(1, 0), 0), SendTo(0, raised(1, 1), 0)]
    whole = Provenance(0, contributors=2, world_size=2, roundings=2)
    assert core.handle(PayloadReceived(0, lowered(1), 0, "b"), 0.0) == [StoreSlice(0, 1, "b", whole)]
    assert core.handle(PayloadReceived(0, lowered(0), 0, "a"), 0.0) == [
        StoreSlice(0, 0, "a", whole),
        CollectiveComplete(0),
    ]


def test_only_the_root_has_more_than_one_neighbour():
    assert [set(neighbours(rank, 4)) for rank in range(4)] == [{1, 2, 3}, {0}, {0}, {0}]


# -- sparse, with numbers --------------------------------------------------------------------------


def test_the_update_is_the_k_largest_of_the_sum_of_all_that_was_selected(seeds):
    """A tree or butterfly may drop in an early merge what the whole sum would keep; a star does not."""
    for seed in seeds(50):
        rng = np.random.default_rng(seed)
        inputs = random_inputs(rng, int(rng.integers(2, 9)), integers=True)
        buffers = [SparseStarBuffer(p, n=inputs.n, k=inputs.k, kind=inputs.kind) for p in inputs.select()[0]]
        group = CollectiveGroup(buffers, seed=seed)
        sums = np.zeros(inputs.n, np.float64)
        for workspace in group.buffers:
            np.add.at(sums, workspace.update.indices, workspace.update.values)
        group.run()
        order = sorted((i for i in range(inputs.n) if sums[i]), key=lambda i: (-abs(sums[i]), i))
        chosen = np.array(sorted(order[: inputs.k]), np.int64)
        numbers = {"n": inputs.n, "kind": inputs.kind}
        sent = decode(
            encode(chosen, sums[chosen].astype(np.float32), **numbers), max_entries=inputs.k, **numbers
        )
        assert group.buffers[0].update.indices.tolist() == sent.indices.tolist(), f"seed {seed}"


def test_a_star_refuses_effects_of_other_collectives():
    payload = select_locally(np.zeros(4, np.float32), np.ones(4, np.float32), 2, ValueKind.FP16)[0]
    workspace = SparseStarBuffer(payload, n=4, k=2, kind=ValueKind.FP16)
    workspace.make_collective(0, 2, flags=0)
    with pytest.raises(LocalProtocolError, match="is not an effect of"):
        workspace.apply(AddSlice(0, 0, b"", Provenance(1, 1, 2, 1)))
    assert not workspace.truncated
    with pytest.raises(RemoteProtocolError):
        workspace.apply(MergePayload(b"", 1, 0, Provenance(1, 1, 2, 1)))


# -- dense, with numbers ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2]])
def test_a_contribution_of_another_shape_is_a_local_error(wrong):
    with pytest.raises(LocalProtocolError, match="must be float32"):
        DenseStarBuffer(wrong, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, np.float32(1e38)])
def test_invalid_payloads_are_refused_on_arrival(bad):
    workspace = DenseStarBuffer(np.ones(2, np.float32), 3)
    workspace.make_collective(0, 3, flags=0)
    with pytest.raises(RemoteProtocolError, match=r"slice 0 from rank 1 has values from .* at most"):
        workspace.apply(AddSlice(0, 0, np.array([bad, 0], np.float32).tobytes(), Provenance(1, 1, 3, 1)))
    assert workspace.update_N.tolist() == [1, 1]
