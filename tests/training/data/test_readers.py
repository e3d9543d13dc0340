"""From positions to batches, for data sets with an index and for streams."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gridtrain.core.commit import data_ledger
from gridtrain.core.messages import LedgerSpec, LedgerState, Span
from gridtrain.errors import ConfigError
from gridtrain.training.data import sampler
from gridtrain.training.data.prefetch import Prefetcher
from gridtrain.training.data.readers import (
    IterableReader,
    MapReader,
    check_kind,
    is_iterable,
    measure_dataset,
    micro_batch_weights,
    split_micro_batches,
)

SPEC = LedgerSpec(10, 0, epochs=3)
A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


class Letters(IterableDataset[int]):
    """100, 101 .. 109 in pass 1; counts how often it was opened and read."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.epoch, self.seen = size, 0, Counter[str]()  # shared by the copies of a reader

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.seen["opened"] += 1
        for number in range(self.size):
            self.seen["read"] += 1
            yield 100 * self.epoch + number


def numbers(batches: list[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_a_stream_is_read_once_a_pass() -> None:
    data = Letters()
    reader = IterableReader(data, SPEC, 1, sampler.collate)
    taken = [numbers(reader.read((Span(start, start + 2),)))[0] for start in (0, 4, 8, 12)]
    assert taken == [[0, 1], [4, 5], [8, 9], [102, 103]]
    assert data.seen == {"opened": 2, "read": 10 + 4}, "two passes, one after the other"


def test_requeued_samples_are_read_from_the_front_and_the_position_is_kept() -> None:
    data = Letters()
    reader = IterableReader(data, SPEC, 2, sampler.collate)
    assert numbers(reader.read((Span(6, 8),))) == [[6], [7]]
    assert numbers(reader.read((Span(2, 4), Span(8, 10)))) == [[2, 3], [8, 9]]
    assert data.seen["opened"] == 2
    assert numbers(reader.read((Span(10, 12),))) == [[100], [101]]


def test_two_passes_read_alternately_do_not_mix() -> None:
    """A generator may read its data set's pass number at every sample."""
    reader = IterableReader(Letters(), SPEC, 1, sampler.collate)
    spans = (Span(2, 4), Span(12, 14)), (Span(5, 7), Span(15, 17))
    assert [numbers(reader.read(both))[0] for both in spans] == [[2, 3, 102, 103], [5, 6, 105, 106]]


def test_the_first_samples_of_the_batch_read_last_are_not_read_again() -> None:
    """A stand-in."""
    data = Letters()
    reader = IterableReader(data, SPEC, 1, sampler.collate)
    for _ in range(2):
        assert numbers(reader.read((Span(1, 2), Span(6, 9)))) == [[1, 6, 7, 8]]
        assert numbers(reader.read((Span(1, 2), Span(6, 7)))) == [[1, 6]]
    assert data.seen["opened"] == 1


def test_a_pass_that_ends_early_is_an_error_with_both_numbers() -> None:
    reader = IterableReader(Letters(7), SPEC, 1, sampler.collate)
    with pytest.raises(ConfigError, match="ended after 7 samples of pass 0, but a pass has 10"):
        reader.read((Span(6, 9),))


@pytest.mark.parametrize(
    ("items", "count", "expected"),
    [
        ([1, 2, 3, 4], 2, [[1, 2], [3, 4]]),
        ([1, 2, 3, 4, 5], 3, [[1, 2], [3, 4], [5]]),
        ([1], 3, [[1], [1], [1]]),
        ([1, 2], 3, [[1], [2], [2]]),
    ],
)
def test_a_batch_is_divided_into_parts(items: list[int], count: int, expected: list[list[int]]) -> None:
    assert split_micro_batches(items, count) == expected


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("samples", range(1, 20))
def test_each_sample_of_the_parts_counts_once(samples: int, count: int) -> None:
    """Each part's gradient is the mean over its samples."""
    counts: Counter[int] = Counter()
    weighed = micro_batch_weights(samples, count)
    for part, weight in zip(split_micro_batches(range(samples), count), weighed, strict=True):
        for sample in part:
            counts[sample] += Fraction(weight).limit_denominator(99) / len(part)  # type: ignore[assignment]
    assert counts == dict.fromkeys(range(samples), 1)
    assert weighed == sorted(weighed, reverse=True) and count * weighed[-1] <= samples


# -- digests of data sets --------------------------------------------------------------------------------


class Numbered(IterableDataset[torch.Tensor]):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(self.draw(number)) for number in range(20))


def test_the_description_distinguishes_data_sets() -> None:
    squares, again, cubes = (Numbered(draw) for draw in (lambda i: i * i, lambda i: i * i, lambda i: i**3))
    assert measure_dataset(squares, 20) == measure_dataset(again, 20) != measure_dataset(cubes, 20)
    size, text = measure_dataset(squares, 20)
    assert size == 20 and text.startswith("20 samples a pass in the data set's own order, digest ")
    assert measure_dataset(Numbered(lambda i: i), 5)[0] == 5


@pytest.mark.parametrize(
    ("dataset", "length", "words"),
    [
        (Numbered(lambda i: torch.rand(1).item()), 20, "16 samples differ"),
        (
            iter([1.0, 2.0, 3.0]),
            3,
            "yields different samples when it is read again: its first 3 samples differ",
        ),
        (Numbered(lambda i: i), None, "has no length, so the number of samples in a pass is unknown"),
        (Letters(), 0, "a pass over the Letters has 0 samples"),
        ([1, 2, 3], 3, "length=3 was given for a list, which has an index"),
    ],
)
def test_a_data_set_that_cannot_be_shared_is_refused(dataset: Any, length: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure_dataset(dataset, length)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (DataLoader([1, 2, 3]), "a DataLoader was passed instead of a data set"),  # type: ignore[arg-type]
        (
            {"x": torch.zeros(3)},
            "a dict was passed as the data set, but it has no sample 0: its first key is 'x'",
        ),
    ],
)
def test_an_object_that_is_no_data_set_is_refused(dataset: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_kind(dataset)


@pytest.mark.parametrize(
    ("dataset", "warns"),
    [
        ((torch.zeros(20, 3), torch.zeros(20)), True),
        ((torch.zeros(2), torch.zeros(2)), False),
        ((torch.zeros(20), torch.zeros(30)), False),
        ([torch.zeros(20), torch.zeros(20)], False),
        ({0: 1.0, 1: 2.0}, False),
    ],
    ids=str,
)
def test_a_tuple_of_inputs_and_targets_gets_a_hint(
    dataset: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_kind(dataset)
    assert ("pass torch.utils.data.TensorDataset(*tensors)" in caplog.text) == warns


def test_no_sample_after_a_pass_is_read() -> None:
    """The next one may never come: `length=` may bound a stream without an end."""
    requested: list[int] = []

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            for number in count():
                requested.append(number)
                yield number

    reader = IterableReader(Endless(), SPEC, 1, sampler.collate)
    assert numbers(reader.read((Span(5, 10),))) == [[5, 6, 7, 8, 9]]
    assert requested == list(range(10))


def test_contents_without_a_stable_form_are_not_compared() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert measure_dataset(Numbered(lambda i: torch.rand(1).item() * 0 + i), 20)[1].startswith(
        "20 samples a pass"
    )
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(1).item()])
@pytest.mark.parametrize("often", [0.01, 0.1])
def test_rare_augmentation_does_not_change_the_description(draw: Callable[[], float], often: float) -> None:
    """Otherwise a worker that drew some of it would refuse one that did not."""

    class Flipped(Dataset[int]):
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> int:
            return -index if draw() < often else index

    texts = set()
    for seed in range(20):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        texts.add(measure_dataset(Flipped(), None)[1])
    assert len(texts) == 1


def test_a_list_has_an_index_and_a_generator_has_none() -> None:
    assert not is_iterable([1, 2]) and is_iterable(count()) and is_iterable(Letters())


# -- reading ahead -----------------------------------------------------------------------------------


def predicted(state: LedgerState, shares: list[tuple[bytes, int]], depth: int) -> Any:
    return [
        data_ledger.assign(SPEC, state, shares)[A],
        *data_ledger.predict_assignments(SPEC, state, shares, A, depth),
    ]


def test_predicted_spans_are_those_of_the_ledger() -> None:
    shares, state, seen = [(A, 2), (B, 3)], LedgerState(), []
    expected = predicted(state, shares, 20)
    while not data_ledger.is_finished(SPEC, state):
        taken = data_ledger.assign(SPEC, state, shares)
        seen.append(taken[A])
        state = data_ledger.commit(SPEC, state, taken, skipped=False)
    assert expected == seen and len(seen) == 6


@pytest.mark.parametrize("workers", [1, 2])
def test_reading_ahead_drops_batches_that_are_not_needed(workers: int) -> None:
    """3 steps of two workers, then a third one joins, and batches read ahead are dropped."""
    data = list(range(10))
    reader = MapReader(data, SPEC, 1, sampler.collate)
    ahead = Prefetcher(reader, workers, 2)
    two, three = [(A, 2), (B, 2)], [(A, 2), (B, 2), (C, 1)]
    state = LedgerState()
    try:
        while not data_ledger.is_finished(SPEC, state):
            shares = two if state.step < 3 else three
            spans, *later = predicted(state, shares, ahead.depth)
            assert numbers(ahead.read(spans, later)) == numbers(reader.read(spans)), f"step {state.step}"
            if state.step == 2:
                assert ahead.dropped_batches == 0
            state = data_ledger.commit(SPEC, state, data_ledger.assign(SPEC, state, shares), skipped=False)
        assert 0 < ahead.dropped_batches <= ahead.depth
    finally:
        ahead.close()


def test_an_error_in_a_reading_process_is_raised() -> None:
    ahead = Prefetcher(IterableReader(Letters(7), SPEC, 1, sampler.collate), 1, 1)
    with pytest.raises(ConfigError, match=r"^.*ended after 7 samples.*$") as caught:
        ahead.read((Span(6, 9),), [])
    assert "\n" not in str(caught.value), "without the traceback of the process"
    ahead.close()
