"""Selection: exactly k, ties by the lowest index, zeros never.  Checked against a sort in plain Python."""

import random

import pytest
import torch

from gridtrain.errors import LocalProtocolError
from gridtrain.sparsify.cpu_selection import CpuSelection
from gridtrain.sparsify.selection import TensorSelection, _lower_bound


def select_topk(acc_N, k):
    """By the implementation for the vector's device."""
    if acc_N.device.type == "cpu":
        return torch.from_numpy(CpuSelection().select(acc_N.numpy(), k))
    return TensorSelection().indices(acc_N, k)


def by_sorting(values, k):
    order = sorted((i for i, v in enumerate(values) if v != 0), key=lambda i: (-abs(values[i]), i))
    return sorted(order[:k])


@pytest.mark.parametrize(
    ("acc", "k", "selected"),
    [
        ([3, -7, 0, 5, 5, -5], 3, [1, 3, 4]),
        ([3, -7, 0, 5, 5, -5], 2, [1, 3]),
        ([3, -7, 0, 5, 5, -5], 6, [0, 1, 3, 4, 5]),  # k = n, and still no zero
        ([1, 1, 1, 1], 2, [0, 1]),
        ([0, 0, -0.0], 1, []),
        ([0, 0, 2], 2, [2]),
        ([9], 1, [0]),
        ([1e-45, 3e38, -3e38], 1, [1]),
        ([float("-inf"), 1, 2], 1, [0]),
    ],
)
def test_the_picture(acc, k, selected):
    indices = select_topk(torch.tensor(acc, dtype=torch.float32), k)
    assert indices.dtype == torch.int64
    assert indices.tolist() == selected


@pytest.mark.parametrize("seed", range(200))
def test_agrees_with_a_sort(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 60)
    distinct = rng.choice([1, 2, 5, 10**6])  # few distinct values: many ties
    values = [float(rng.randint(-distinct, distinct)) for _ in range(n)]
    k = rng.randint(1, n)
    assert select_topk(torch.tensor(values), k).tolist() == by_sorting(values, k), f"{seed=} {n=} {k=}"


@pytest.mark.parametrize("seed", range(40))
def test_a_bound_by_histograms_is_reached_by_k_and_not_by_many(seed):
    """Values that differ in their last bits only, so that all three histograms are needed."""
    rng = random.Random(seed)
    n, spread = rng.randint(100, 5000), rng.choice([3, 600, 300_000])
    tens = [rng.choice([0.001, 1.0, 1.0, 64.0]) for _ in range(n)]
    bits_N = torch.tensor(tens).view(torch.int32) + torch.tensor([rng.randrange(spread) for _ in range(n)])
    k = rng.randint(1, n)
    many = rng.randint(k, 2 * k)
    bound = _lower_bound(bits_N, k, many)
    kth = int(bits_N.sort(descending=True).values[k - 1])
    reached = int((bits_N >= bound).sum())
    assert bound <= kth and reached >= k
    assert reached <= many or bound == kth


def test_a_bound_is_zero_where_fewer_than_k_are_not():
    bits_N = torch.tensor([0.0, 5.0, 0.0, 7.0]).view(torch.int32)
    assert _lower_bound(bits_N, 3, 3) == 0 and _lower_bound(bits_N, 2, 2) > 0


@pytest.mark.parametrize("k", [0, 4, -1])
def test_k_out_of_range_is_our_own_bug(k):
    with pytest.raises(LocalProtocolError, match="must be between 1 and 3"):
        select_topk(torch.ones(3), k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_selects_what_the_cpu_selects():
    acc = torch.randint(-50, 50, (100_000,)).float()
    assert torch.equal(select_topk(acc.cuda(), 1000).cpu(), select_topk(acc, 1000))
