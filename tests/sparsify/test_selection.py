"""Selection: exactly k, ties by the lowest index, zeros never.  Checked against a sort in plain Python."""

import random

import pytest
import torch

from gridtrain.errors import LocalProtocolError
from gridtrain.sparsify.selection import select_topk


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


@pytest.mark.parametrize("k", [0, 4, -1])
def test_k_out_of_range_is_our_own_bug(k):
    with pytest.raises(LocalProtocolError, match=r"must be 1 \.\. 3"):
        select_topk(torch.ones(3), k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_selects_what_the_cpu_selects():
    acc = torch.randint(-50, 50, (100_000,)).float()
    assert torch.equal(select_topk(acc.cuda(), 1000).cpu(), select_topk(acc, 1000))
