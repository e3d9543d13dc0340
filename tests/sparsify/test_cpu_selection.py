"""Selection by blocks and by torch's operations against a sort: any block size, any carried threshold."""

import numpy as np
import pytest
import torch

from gridtrain.errors import LocalProtocolError
from gridtrain.sparsify import cpu_selection, tensor_selection
from gridtrain.sparsify.cpu_selection import BlockwiseSum, CpuSelection
from gridtrain.sparsify.tensor_selection import AccumulationTerms, HostSelection, TensorSelection
from gridtrain.sparsify.threshold_hint import ThresholdHint, value_bits, value_from_bits

INFINITE_BITS = 0x7F80_0000


def by_sorting(acc, k):
    """What has to be selected: by (-|acc|, index), NaN first of all, no zeros."""
    magnitude = np.abs(acc)
    rank = np.where(np.isnan(magnitude), np.inf, magnitude).astype(np.float64)
    order = np.lexsort((np.arange(acc.size), -rank, ~np.isnan(magnitude)))
    return np.sort(order[rank[order] > 0][:k])


def by_blocks(acc, k, hint):
    selector = CpuSelection()
    selector.hint.bits = hint
    return selector.select(acc, k)


def by_tensors(acc, k, hint):
    selector = TensorSelection()
    selector.hint.bits = hint
    return selector.indices(torch.from_numpy(acc), k).numpy()


WAYS = {"blocks": by_blocks, "tensors": by_tensors}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Small enough blocks and bounds that 300 elements take every branch."""
    monkeypatch.setattr(cpu_selection, "BLOCK", 32)
    monkeypatch.setattr(tensor_selection, "_FEW", 20)
    return WAYS[request.param]


def distributions(n, rng):
    yield "zeros", np.zeros(n)
    yield "negative zeros", np.full(n, -0.0)
    yield "equal", np.full(n, -2.5)
    yield "one huge", np.where(np.arange(n) == n // 2, -3e38, 1e-3)
    yield "one non-zero", np.where(np.arange(n) == n - 1, 1e-45, 0.0)
    yield "ascending", np.arange(n) / 3
    yield "descending", np.arange(n, 0, -1) / 3
    yield "few distinct", rng.integers(-2, 3, n)
    yield "two levels", np.where(np.arange(n) % 7 == 3, 5.0, 4.9999995)
    yield "normal", rng.standard_normal(n)
    yield "heavy tails", rng.standard_cauchy(n)
    yield "all binades", rng.standard_normal(n) * 2.0 ** rng.integers(-149, 127, n)
    yield "subnormal", rng.integers(-9, 10, n) * 1e-45


def test_adversarial_vectors_with_any_hint(way):
    rng = np.random.default_rng(5)
    for n in (1, 2, 31, 32, 33, 300):
        for name, values in distributions(n, rng):
            acc = values.astype(np.float32)
            for k in sorted({1, min(n, 3), max(1, n // 10), max(1, n - 1), n}):
                expected = by_sorting(acc, k)
                kth = value_bits(float(np.abs(acc[expected]).min())) if expected.size else 1
                for hint in (0, 1, kth - 1, kth, kth + 1, value_bits(2.5), INFINITE_BITS - 1, INFINITE_BITS):
                    found = way(acc, k, hint)
                    assert found.tolist() == expected.tolist(), f"{name} {n=} {k=} {hint=:x}"


def test_random_vectors_and_hints(way, seeds):
    for seed in seeds(400):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 400))
        name, values = list(distributions(n, rng))[int(rng.integers(13))]
        acc = values.astype(np.float32)
        k, hint = int(rng.integers(1, n + 1)), int(rng.integers(0, INFINITE_BITS + 1))
        found = way(acc, k, hint)
        assert found.tolist() == by_sorting(acc, k).tolist(), f"{seed=} {name} {n=} {k=}"


def test_what_is_not_finite_is_selected(way):
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        acc = np.arange(1, 301, dtype=np.float32)
        acc[17] = value
        for hint in (0, value_bits(250.0), INFINITE_BITS):
            assert way(acc, 5, hint).tolist() == [17, 296, 297, 298, 299], f"{value} {hint=:x}"


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_out_of_range_is_our_own_bug(way, k):
    with pytest.raises(LocalProtocolError, match="must be between 1 and 3"):
        way(np.ones(3, np.float32), k, 0)


def test_large_vectors_with_blocks_as_they_are():
    rng = np.random.default_rng(2)
    acc = rng.standard_normal(3 * cpu_selection.BLOCK + 5, dtype=np.float32)
    for k in (200, acc.size // 2):
        assert by_blocks(acc, k, 0).tolist() == by_sorting(acc, k).tolist()
        assert by_tensors(acc, k, 0).tolist() == by_sorting(acc, k).tolist()


@pytest.mark.parametrize("hint", [0, value_bits(1.0), INFINITE_BITS])
def test_each_block_is_computed_once_and_in_order(monkeypatch, hint):
    monkeypatch.setattr(cpu_selection, "BLOCK", 32)
    filled, acc = [], np.zeros(100, np.float32)

    def fill(start, stop):
        filled.append((start, stop))
        acc[start:stop] = np.arange(start, stop)

    selection = CpuSelection()
    selection.hint.bits = hint
    assert selection.select(acc, 2, fill).tolist() == [98, 99]
    assert filled == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert selection.hint.misses == (hint == INFINITE_BITS)


def test_a_threshold_is_carried_over_and_found_again():
    rng = np.random.default_rng(4)
    selection = CpuSelection()
    for _ in range(5):
        selection.select(rng.standard_normal(100_000, dtype=np.float32), 1000)
    assert selection.hint.misses == 0
    assert 2.0 < value_from_bits(selection.hint.bits) < 2.576  # the 0.01 quantile of |x| is 2.576
    selection.select(rng.standard_normal(100_000, dtype=np.float32) * np.float32(0.1), 1000)
    assert selection.hint.misses == 1
    selection.select(rng.standard_normal(100_000, dtype=np.float32) * np.float32(0.1), 1000)
    assert selection.hint.misses == 1


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_with_many_entries_the_threshold_comes_from_a_sample(monkeypatch, weight):
    """A threshold that is far too low or too high has no effect: few more than k elements are candidates."""
    counts = []
    monkeypatch.setattr(ThresholdHint, "update", lambda self, kth_bits, seen, k: counts.append(seen))
    rng, n, k = np.random.default_rng(5), 900_000, 30_000
    residual, gradient = rng.standard_normal((2, n), dtype=np.float32)
    expected = residual + np.float32(weight) * gradient
    for hint in (0, 1, INFINITE_BITS):
        selection, acc = CpuSelection(), np.empty(n, np.float32)
        selection.hint.bits = hint
        found = selection.select(acc, k, BlockwiseSum(residual, gradient, acc, weight=weight))
        assert np.array_equal(acc, expected)
        assert found.tolist() == by_sorting(expected, k).tolist()
        assert selection.hint.misses == 0
    assert all(k <= count < 1.5 * k for count in counts), counts


# -- the sum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight", [1.0, 0.0, 0.25, 1 / 3])
def test_the_sum_has_the_bits_of_whole_vector_operations(momentum, weight):
    """Of those with which a contribution, u and the residual were computed one after the other."""
    n = 2 * cpu_selection.BLOCK + 77
    residual, gradient, u = torch.randn(3, n, generator=torch.Generator().manual_seed(6))
    contribution = gradient * weight if weight else torch.zeros_like(gradient)
    new_u = u * momentum + contribution
    expected = residual + (new_u if momentum else contribution)
    for selector in (HostSelection(), TensorSelection()):
        acc_N, new_u_N = torch.full((n,), torch.nan), torch.full((n,), torch.nan)
        terms = AccumulationTerms(residual, gradient, acc_N, weight)
        if momentum:
            terms = AccumulationTerms(residual, gradient, acc_N, weight, u, new_u_N, momentum)
        selected = selector.select(terms, 50)
        assert torch.equal(acc_N, expected)
        assert not momentum or torch.equal(new_u_N, new_u)
        assert selected.indices_K.tolist() == by_sorting(expected.numpy(), 50).tolist()
        assert np.array_equal(selected.values_K, expected.numpy()[selected.indices_K])
        assert selected.where_K.tolist() == selected.indices_K.tolist()


def test_without_samples_the_gradient_is_not_read():
    residual = np.array([1.0, -2.0], np.float32)
    acc = np.empty(2, np.float32)
    BlockwiseSum(residual, np.full(2, np.nan, np.float32), acc, weight=0.0)(0, 2)
    assert acc.tolist() == [1.0, -2.0]
