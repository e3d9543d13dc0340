"""The merge against a slow model, and its corners: ties, cancellation, overflow, rounding."""

import numpy as np
import pytest

from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import decode, encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.sparsify.merge import largest_summable, merge, sum_in_rank_order, sum_of_two

FP16, FP32 = ValueKind.FP16, ValueKind.FP32


def sparse(entries, *, n=16, kind=FP32):
    """{index: value} as a peer would see it: encoded and decoded."""
    indices = np.array(sorted(entries), np.int64)
    values = np.array([entries[i] for i in sorted(entries)], np.float32)
    return decode(encode(indices, values, n=n, kind=kind), n=n, max_entries=n, kind=kind)


def entries(part):
    return dict(zip(part.indices.tolist(), part.values.tolist(), strict=True))


def kept(merged):
    return dict(zip(merged.truncated_indices.tolist(), merged.truncated_values.tolist(), strict=True))


def test_the_picture_of_the_module():
    merged = merge(sparse({1: 3.0, 3: -1.0, 5: 5.0}), sparse({0: 2.0, 3: 1.0, 5: 1.0}), n=16, k=2, kind=FP32)
    assert entries(merged.sparse) == {1: 3.0, 5: 6.0}
    assert kept(merged) == {0: 2.0}


def test_of_equal_magnitudes_the_lower_index_goes_on():
    merged = merge(sparse({2: 1.0, 9: -1.0}), sparse({4: -1.0, 7: 3.0}), n=16, k=3, kind=FP32)
    assert entries(merged.sparse) == {2: 1.0, 4: -1.0, 7: 3.0}
    assert kept(merged) == {9: -1.0}


def test_what_cancels_is_no_entry_and_leaves_its_place_to_another():
    merged = merge(sparse({0: 7.0, 1: 0.5}), sparse({0: -7.0, 2: 0.25}), n=16, k=2, kind=FP32)
    assert entries(merged.sparse) == {1: 0.5, 2: 0.25}
    assert kept(merged) == {}


def test_selection_looks_at_the_sum_before_it_is_rounded():
    """Both sums are 2048 in fp16; 2049 is the larger although its index is the higher."""
    merged = merge(sparse({0: 2048.0, 1: 2000.0}), sparse({1: 49.0}), n=16, k=1, kind=FP16)
    assert entries(merged.sparse) == {1: 2048.0}
    assert kept(merged) == {0: 2048.0, 1: 1.0}


def test_what_fp16_flushes_to_zero_is_kept():
    merged = merge(sparse({0: 1.0}), sparse({1: 2.0**-60}), n=16, k=2, kind=FP16)
    assert entries(merged.sparse) == {0: 1.0, 1: 0.0}
    assert kept(merged) == {1: 2.0**-60}


def test_each_kept_value_has_one_owner():
    merged = merge(sparse({i: float(i + 1) for i in range(16)}), sparse({}), n=16, k=4, kind=FP32)
    owned = [merged.truncated_of_owner(4, residue)[0].tolist() for residue in range(4)]
    assert owned == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert merged.truncated_of_owner(1, 0)[0].tolist() == list(range(12))


def test_nothing_and_nothing_is_nothing():
    merged = merge(sparse({}), sparse({}), n=16, k=4, kind=FP16)
    assert entries(merged.sparse) == {} and kept(merged) == {}


def test_a_sum_beyond_float32_is_the_peers_fault():
    huge = sparse({3: 3e38})
    with pytest.raises(RemoteProtocolError, match="overflows float32 at index 3"):
        merge(huge, huge, n=16, k=1, kind=FP16)


@pytest.mark.parametrize("kind", ValueKind)
@pytest.mark.parametrize("world_size", [1, 2, 7, 32, 2000])
def test_the_largest_summable_contributions_never_overflow(world_size, kind):
    part = total = sparse({0: largest_summable(world_size)}, kind=kind)
    for _ in range(world_size - 1):
        total = merge(total, part, n=16, k=1, kind=kind).sparse
    assert np.isfinite(total.values).all()
    assert np.isfinite(sum_in_rank_order([part] * world_size).values).all()


def test_the_order_of_the_sum_is_the_order_of_the_parts():
    big, small = sparse({5: 2.0**24}), sparse({5: 1.0})
    assert entries(sum_in_rank_order([big, small, small])) == {5: 2.0**24}  # each 1 is rounded away
    assert entries(sum_in_rank_order([small, small, big])) == {5: 2.0**24 + 2}


def model_of_merge(mine, theirs, k, n, kind):
    """The same in plain Python, one entry at a time."""
    sums = {i: np.float32(v) for i, v in entries(mine).items()}
    for i, v in entries(theirs).items():
        sums[i] = sums.get(i, np.float32(0)) + np.float32(v)
    order = sorted((i for i in sums if sums[i] != 0), key=lambda i: (-abs(sums[i]), i))
    sent = entries(sparse({i: sums[i] for i in order[:k]}, n=n, kind=kind))
    rest = {i: float(sums[i]) - sent.get(i, 0.0) for i in sums}  # float64: exact
    return sent, {i: v for i, v in rest.items() if v != 0}


def random_part(rng, n, kind):
    indices = rng.choice(n, rng.integers(0, n + 1), replace=False)
    if rng.random() < 0.5:
        values = rng.integers(-4, 5, indices.size)
    else:
        values = rng.standard_normal(indices.size) * 2.0 ** rng.integers(-60, 60, indices.size)
    return sparse(dict(zip(indices.tolist(), values.tolist(), strict=True)), n=n, kind=kind)


def test_the_merge_is_that_of_the_model_and_symmetric(seeds):
    for seed in seeds(400):
        rng = np.random.default_rng(seed)
        n, kind = int(rng.integers(1, 60)), ValueKind(int(rng.integers(len(ValueKind))))
        k = int(rng.integers(1, n + 1))
        mine, theirs = random_part(rng, n, kind), random_part(rng, n, kind)

        merged = merge(mine, theirs, n=n, k=k, kind=kind)
        other_side = merge(theirs, mine, n=n, k=k, kind=kind)

        assert (entries(merged.sparse), kept(merged)) == model_of_merge(mine, theirs, k, n, kind), (
            f"seed {seed}"
        )
        assert merged.payload == other_side.payload, f"seed {seed}: the two sides differ"
        assert kept(merged) == kept(other_side), f"seed {seed}: the two sides differ"


@pytest.mark.parametrize("kind", ValueKind)
@pytest.mark.parametrize("values", ["floats", "few", "one"])
def test_a_large_merge_is_that_of_the_model(kind, values, seeds):
    """Large enough that the threshold is looked for in a sample, with ties and without."""
    for seed in seeds(3):
        rng = np.random.default_rng(seed)
        n, k = 100_000, int(rng.integers(1, 9000))

        def part(rng=rng, n=n, k=k):
            indices = np.sort(rng.choice(n, 8000, replace=False))
            drawn = {
                "floats": rng.standard_normal(8000) * 2.0 ** rng.integers(-6, 6, 8000),
                "few": rng.choice([-3, -2, -1, 1, 2], 8000),
                "one": np.ones(8000),
            }[values]
            payload = encode(indices, np.asarray(drawn, np.float32), n=n, kind=kind)
            return decode(payload, n=n, max_entries=n, kind=kind)

        mine, theirs = part(), part()
        merged = merge(mine, theirs, n=n, k=k, kind=kind)
        assert (entries(merged.sparse), kept(merged)) == model_of_merge(mine, theirs, k, n, kind), seed


def test_the_sum_of_two_is_the_sum_in_rank_order(seeds):
    for seed in seeds(200):
        rng = np.random.default_rng(seed)
        n, kind = int(rng.integers(1, 60)), ValueKind(int(rng.integers(len(ValueKind))))
        mine, theirs = random_part(rng, n, kind), random_part(rng, n, kind)
        pair, ordered = sum_of_two(mine, theirs), sum_in_rank_order([mine, theirs])
        is_entry = pair.values != 0
        assert pair.indices[is_entry].tobytes() == ordered.indices.tobytes(), f"seed {seed}"
        assert pair.values[is_entry].tobytes() == ordered.values.tobytes(), f"seed {seed}"


@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_zeros_are_ignored_even_if_there_are_fewer_entries_than_k(k):
    """The sum of two has a 0 after each common index, and where two values cancel."""
    mine = sparse({0: 1.0, 3: 2.0, 4: 5.0, 7: -1.0}, n=9, kind=FP32)
    theirs = sparse({3: 1.0, 4: -5.0, 8: 0.5}, n=9, kind=FP32)
    merged = merge(mine, theirs, n=9, k=k, kind=FP32)
    by_size = {3: 3.0, 0: 1.0, 7: -1.0, 8: 0.5}
    assert entries(merged.sparse) == dict(list(by_size.items())[:k])
    assert kept(merged) == dict(list(by_size.items())[k:])


def test_the_sum_in_rank_order_is_that_of_the_model(seeds):
    for seed in seeds(100):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 60))
        parts = [random_part(rng, n, FP32) for _ in range(int(rng.integers(1, 12)))]
        sums = np.zeros(n, np.float32)
        for part in parts:
            for index, value in entries(part).items():
                sums[index] += np.float32(value)
        expected = {i: float(sums[i]) for i in range(n) if sums[i] != 0}
        assert entries(sum_in_rank_order(parts)) == expected, f"seed {seed}"
