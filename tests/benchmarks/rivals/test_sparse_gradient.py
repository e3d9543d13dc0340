"""The merge of published gTop-k, which is a rival of gridtrain's own."""

from __future__ import annotations

import numpy as np
import pytest

from rivals.contract import Request
from rivals.sparse_gradient import check, drawn, gathered, merge, merged_by_tree, scatter_add


def entries(entries: dict[int, float]) -> np.ndarray:
    indices = np.array(sorted(entries), np.int32)
    values = np.array([entries[i] for i in sorted(entries)], np.float32)
    return np.concatenate([indices, values.view(np.int32)])


def unpacked(both: np.ndarray) -> dict[int, float]:
    k = len(both) // 2
    return dict(zip(both[:k].tolist(), both[k:].view(np.float32).tolist(), strict=True))


def test_a_merge_selects_the_largest_sums() -> None:
    own = {1: 3.0, 5: -4.0, 9: 1.0}
    other = {1: -2.5, 5: -0.5, 7: 2.0}
    #   sums: 1: 0.5, 5: -4.5, 7: 2.0, 9: 1.0; the three largest:
    assert unpacked(merge(entries(own), entries(other), 3)) == {5: -4.5, 7: 2.0, 9: 1.0}


def test_a_merge_of_the_same_indices_is_their_sum() -> None:
    own = {0: 1.0, 2: 2.0}
    assert unpacked(merge(entries(own), entries(own), 2)) == {0: 2.0, 2: 4.0}


def test_a_merge_agrees_with_a_dense_sum() -> None:
    requests = [Request(rank=rank, world=2, op="gtopk", n=5000, density=0.1) for rank in range(2)]
    dense, both = np.zeros(5000, np.float32), []
    for request in requests:
        indices_K, values_K = drawn(request)
        assert len(np.unique(indices_K)) == request.k == 500
        dense[indices_K] += values_K
        both.append(np.concatenate([indices_K, values_K.view(np.int32)]))
    largest = np.sort(np.argsort(-np.abs(dense), kind="stable")[:500])
    assert unpacked(merge(*both, 500)) == dict(zip(largest.tolist(), dense[largest].tolist(), strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_a_wrong_update_is_detected(world: int) -> None:
    request = Request(world=world, op="gtopk", n=300, density=0.1)
    for expected in (gathered(request), merged_by_tree(request)):
        update_N, correct = np.zeros(300, np.float32), unpacked(expected)
        with pytest.raises(ArithmeticError, match="the update of 0 entries"):
            check(update_N, expected)  # nothing was added
        scatter_add(update_N, expected)
        check(update_N, expected)
        update_N[next(iter(correct))] *= 2
        with pytest.raises(ArithmeticError, match=f"is not the one of {len(correct)} expected"):
            check(update_N, expected)


def test_the_tree_selects_k_entries() -> None:
    request = Request(world=5, op="gtopk", n=300, density=0.1)
    assert len(unpacked(merged_by_tree(request))) == request.k == 30
    assert len(unpacked(gathered(request))) > 100
