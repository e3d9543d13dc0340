"""From positions to samples, equal on all workers; digests show that data differ."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.errors import ConfigError
from gridtrain.training.data.sampler import (
    GridSampler,
    describe_dataset,
    fetch_batch,
    permutation,
    sample_indices,
    split_spans,
)


def test_the_order_of_samples_is_fixed():
    """Do not change these values: a run that resumes with a newer version must have the same order."""
    assert permutation(8, 0, 0).tolist() == [7, 2, 4, 0, 5, 3, 1, 6]
    assert permutation(8, 0, 1).tolist() == [3, 4, 2, 1, 0, 6, 7, 5]
    assert permutation(8, 2**40 + 1, 0).tolist() == [0, 5, 7, 1, 2, 3, 6, 4]


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_pass_contains_every_sample_once(size):
    for pass_number in range(3):
        assert sorted(permutation(size, 5, pass_number)) == list(range(size))


def test_spans_across_passes_in_their_order():
    spec = LedgerSpec(size=5, seed=3, epochs=2)
    first, second = (permutation(5, 3, number).tolist() for number in (0, 1))
    assert sample_indices(spec, [Span(0, 3)]) == first[:3]
    assert sample_indices(spec, [Span(3, 7)]) == first[3:] + second[:2]
    assert sample_indices(spec, [Span(8, 10), Span(1, 2)]) == [*second[3:], first[1]]
    assert sample_indices(spec, [Span(2, 14)]) == first[2:] + second + permutation(5, 3, 2).tolist()[:4]
    assert sample_indices(spec, []) == []


@pytest.mark.parametrize(
    "spans, count, pieces",
    [
        ([(0, 6)], 1, [[(0, 6)]]),
        ([(0, 6)], 3, [[(0, 2)], [(2, 4)], [(4, 6)]]),
        ([(0, 7)], 3, [[(0, 2)], [(2, 4)], [(4, 7)]]),
        ([(10, 13), (2, 5)], 2, [[(10, 13)], [(2, 5)]]),
        ([(10, 13), (2, 5)], 3, [[(10, 12)], [(12, 13), (2, 3)], [(3, 5)]]),
        ([(4, 6)], 3, [[(4, 5)], [(4, 5)], [(5, 6)]]),  # fewer than pieces: one is used twice
    ],
)
def test_spans_are_split_in_their_order(spans, count, pieces):
    pieces_of_spans = split_spans([Span(*span) for span in spans], count)
    assert pieces_of_spans == [tuple(Span(*span) for span in piece) for piece in pieces]


def test_fetch_gives_the_batch_of_a_loader():
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    for dataset in (data, Subset(data, range(10))):  # the latter has __getitems__
        values, labels = fetch_batch(dataset, [3, 1])
        assert values.tolist() == [3.0, 1.0] and labels.tolist() == [3, 1]


def test_a_data_loader_uses_the_sampler():
    data = TensorDataset(torch.arange(6))
    spec = LedgerSpec(size=6, seed=1, epochs=1)
    steps = [[Span(0, 2)], [Span(4, 5), Span(2, 3)]]
    loader = DataLoader(data, batch_sampler=GridSampler(spec, lambda: iter(steps)))
    order = permutation(6, 1, 0).tolist()
    assert [batch[0].tolist() for batch in loader] == [order[:2], [order[4], order[2]]]


# -- digests -----------------------------------------------------------------------------------------


def test_equal_data_have_equal_digests():
    a = TensorDataset(torch.arange(100.0), torch.arange(100))
    b = TensorDataset(torch.arange(100.0), torch.arange(100))
    assert describe_dataset(a) == describe_dataset(b)
    assert describe_dataset(a).startswith("100 samples, digest ")


@pytest.mark.parametrize(
    "other",
    [
        [(0.0, 0)] * 99,
        [(0.0, 1)] * 100,
        [(0, 0)] * 100,
        [[0.0, 0, 0]] * 100,
        [{"x": 0.0}] * 100,
        [np.zeros(2)] * 100,
        [np.zeros(2, np.float32)] * 100,
        [torch.zeros(2)] * 100,
        [torch.zeros(2, 1)] * 100,
        ["0"] * 100,
        [b"0"] * 100,
    ],
    ids=lambda dataset: f"{len(dataset)} x {dataset[0]!r}",
)
def test_different_data_have_different_digests(other):
    assert describe_dataset(other) != describe_dataset([(0.0, 0)] * 100)


class Augmented:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return random.random() + np.random.rand() + torch.rand(3)


@pytest.mark.parametrize("dataset", [Augmented(), [object()] * 40, [(1, [object()])] * 40])
def test_a_data_set_that_cannot_be_compared_is_described_by_its_length(dataset):
    assert describe_dataset(dataset) == "40 samples (contents not compared)"


def test_describing_the_data_draws_no_random_numbers():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    seed()
    expected = draw()
    seed()
    describe_dataset(Augmented())
    assert draw() == expected


@pytest.mark.parametrize("dataset", [[], iter([1, 2]), 5])
def test_data_that_cannot_be_shared_are_refused(dataset):
    with pytest.raises(ConfigError, match=r"map-style|at least 1"):
        describe_dataset(dataset)
