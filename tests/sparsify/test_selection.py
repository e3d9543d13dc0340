"""Selection: exactly k, ties by the lowest index, zeros never.  Checked against a sort in plain Python."""

import importlib.util
import math
import random

import pytest
import torch

from gridtrain.config import TopK
from gridtrain.errors import LocalProtocolError
from gridtrain.sparsify.cpu_selection import CpuSelection
from gridtrain.sparsify.cuda_selection import CudaSelection
from gridtrain.sparsify.selection import ChunkedSelection, make_selection
from gridtrain.sparsify.tensor_selection import (
    AccumulationTerms,
    HostSelection,
    TensorSelection,
    _lower_bound,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None


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


def test_host_memory_is_selected_from_by_numpy():
    assert isinstance(make_selection(torch.device("cpu")), HostSelection)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gets_kernels_or_torch():
    chosen = make_selection(torch.device("cuda"))
    assert isinstance(chosen, CudaSelection if HAS_TRITON else TensorSelection)


# -- chunks ------------------------------------------------------------------------------------------


def select_in_chunks(values, k, chunk):
    acc_N = torch.empty(len(values))
    terms = AccumulationTerms(torch.zeros(len(values)), torch.tensor(values, dtype=torch.float32), acc_N)
    selected = ChunkedSelection(chunk).select(terms, k)
    assert selected.where_K.tolist() == selected.indices_K.tolist()
    assert selected.values_K.tobytes() == acc_N[selected.where_K].numpy().tobytes()
    return selected.indices_K.tolist()


@pytest.mark.parametrize(
    ("acc", "k", "selected"),
    [
        pytest.param([9, 8, 7, 1, 2, 0], 2, [0, 4], id="the largest of each half"),
        pytest.param([9, 9, 9, 1, -1, 1], 4, [0, 1, 3, 4], id="ties go to the lowest index"),
        pytest.param([9, 8, 7, 0, 0, 0], 4, [0, 1], id="no zeros"),
        pytest.param([9, 8, 7, 1, 2, 3, 4], 4, [0, 4, 5, 6], id="the last chunk takes the rest"),
        pytest.param([9, 8, 7, 1, 2, 0], 1, [4], id="too few for each chunk: not with `TopK`"),
        pytest.param([5, 6], 1, [1], id="shorter than a chunk"),
        pytest.param([1, 2, float("nan"), 1, float("-inf"), 0], 2, [2, 4], id="what is not finite"),
    ],
)
def test_the_largest_of_each_chunk(acc, k, selected):
    assert select_in_chunks(acc, k, 3) == selected


def test_chunks_agree_with_a_sort_of_each(seeds):
    for seed in seeds(200):
        rng = random.Random(seed)
        n, chunk = rng.randint(1, 80), rng.randint(1, 30)
        k, distinct = rng.randint(1, n), rng.choice([1, 2, 5, 10**6])
        values = [float(rng.randint(-distinct, distinct)) for _ in range(n)]
        bounds = [*range(0, n - chunk + 1, chunk)][: max(1, n // chunk)] or [0]
        expected = []
        for start, stop in zip(bounds, [*bounds[1:], n], strict=True):
            quota = k * stop // n - k * start // n
            expected += [start + i for i in by_sorting(values[start:stop], quota)]
        assert select_in_chunks(values, k, chunk) == expected, f"{seed=} {n=} {chunk=} {k=}"


@pytest.mark.parametrize("density", [0.01, 0.0173, 0.5])
def test_each_chunk_of_topk_sends_something(density):
    """So that no element waits for ever: whatever n is, with the smallest chunk that is permitted."""
    chunk = math.ceil(2 / density)
    for n in range(1, 12 * chunk, 7):
        exchange = TopK(density=density, chunk=chunk)
        selected = torch.tensor(select_in_chunks([1.0] * n, exchange.k_at(0, n), chunk))
        assert selected.numel() == exchange.k_at(0, n)
        rows = (selected // chunk).clamp(max=max(1, n // chunk) - 1)
        assert rows.unique().numel() == max(1, n // chunk)
