"""Reads batches from a Dataset or IterableDataset, splits them into micro-batches, and resumes streams.

    spans of a step --MapReader-------> order of the pass, dataset[index] -----------+
                    --IterableReader--> resume where the last read stopped     -----+--> `accumulate` batches

An `IterableReader` skips the samples of the other workers, so every worker reads the whole data set.  For
re-queued samples, and in a run that resumes in the middle of a pass, the pass must be read again from its
start.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gridtrain.core.commit.data_ledger import count_samples
from gridtrain.core.commit.spans import take_first
from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.errors import ConfigError, describe_type
from gridtrain.quantities import format_count
from gridtrain.training.data import sampler
from gridtrain.training.data.shards import ShardedDataset

log = logging.getLogger("gridtrain")

MAX_OPEN_PASSES = 2
"""The maximum number of passes that are open at the same time: the current pass, and the next pass or a pass
with re-queued samples."""

Collate = Callable[[list[Any]], Any]
Item = TypeVar("Item")


class Reader(ABC):
    """Reads the batches of steps.  A reader can be copied to another process."""

    def __init__(self, dataset: Any, spec: LedgerSpec, accumulate: int, collate: Collate) -> None:
        self._dataset, self._spec, self._accumulate, self._collate = dataset, spec, accumulate, collate

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> list[Any]:
        """Return the batches of one step."""


def is_iterable(dataset: Any) -> bool:
    """Whether the data set can only be read from its start."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def check_kind(dataset: Any) -> None:
    """Raise `ConfigError` for an object that is not a data set: a DataLoader, whose batches would be mistaken
    for samples, or a mapping of names.  Warn about a tuple such as (inputs, targets)."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "a DataLoader was passed instead of a data set, but the run itself makes the batches",
            remedy="pass the data set itself: grid.batches(loader.dataset, batch_size=..., collate_fn=..., "
            "num_workers=...)",
        )
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        raise ConfigError(
            f"{describe_type(dataset)} was passed as the data set, but it has no sample 0: its first key is "
            f"{next(iter(dataset))!r:.80}",
            remedy="pass one of its splits, or torch.utils.data.TensorDataset(*tensors)",
        )
    if isinstance(dataset, tuple) and all(isinstance(each, Tensor | np.ndarray) for each in dataset):
        lengths = {len(each) if each.ndim else 0 for each in dataset}
        if len(lengths) == 1 and min(lengths) > len(dataset) > 1:
            log.warning(
                "the data set is a tuple of %d arrays of length %d, each of which counts as one sample -> if "
                "they are inputs and targets, pass torch.utils.data.TensorDataset(*tensors)",
                *(len(dataset), min(lengths)),
            )


def measure_dataset(dataset: Any, length: int | None) -> tuple[int, str]:
    """Return the number of samples in one pass, and a description that is equal on workers with the same
    data.

    Args:
        length: the number of samples in a pass over an iterable data set; None if the data set has a length.

    Raises:
        ConfigError: the data set is empty or cannot be divided among workers, yields different samples when
            it is read again, or has an index although `length` is given.
    """
    if not is_iterable(dataset):
        if length is not None:
            raise ConfigError(
                f"length={length} was given for {describe_type(dataset)}, which has an index and a length",
                remedy="remove length=",
            )
        if isinstance(dataset, ShardedDataset):  # comparing samples would open many shards
            return len(dataset), dataset.description
        return len(dataset) if hasattr(dataset, "__len__") else 0, sampler.describe_dataset(dataset)
    if length is None:
        length = _declared_length(dataset)
    if length < 1:
        raise ConfigError(
            f"a pass over the {type(dataset).__name__} has {length} samples", remedy="use at least 1 sample"
        )
    return length, _iterable_text(dataset, length)


def _declared_length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"the {type(dataset).__name__} has no length, so the number of samples in a pass is unknown",
            remedy="call grid.batches(..., length=...) with the same length on all workers",
        ) from None


def _iterable_text(dataset: Any, length: int) -> str:
    with sampler.preserve_random_state():
        first, again = (_leading_samples_digest(dataset, length, reading) for reading in range(2))
    text = f"{length} samples a pass in the data set's own order"
    if first != again:
        raise ConfigError(
            f"the {type(dataset).__name__} yields different samples when it is read again: its first "
            f"{min(length, sampler.DIGEST_SAMPLES)} samples differ, so positions have no meaning",
            remedy="seed its shuffling and augmentation (in set_epoch, if passes should differ), reopen "
            "its source in __iter__, or use a data set with an index",
        )
    return f"{text}, digest {first.hex()[:12]}" if first else f"{text} (contents not compared)"


def _leading_samples_digest(dataset: Any, length: int, reading: int) -> bytes:
    """Return a digest of the first samples of pass 0; b"" if a sample has no portable encoding."""
    total = hashlib.blake2b(digest_size=32)
    sampler.seed_random(reading)
    for value in islice(_open_pass(dataset, 0), min(length, sampler.DIGEST_SAMPLES)):
        digest = sampler.value_digest(value)
        if digest is None:
            return b""
        total.update(digest)
    return total.digest()


def _open_pass(dataset: Any, pass_number: int) -> Iterator[Any]:
    """Return an iterator over the samples of a pass.  The first sample is read immediately, because a
    generator does not read its pass number before its first sample is requested.

    Each pass has its own copy of the data set with its own pass number, because an open pass may read the
    number again later.
    """
    if hasattr(dataset, "set_epoch"):
        dataset = copy.copy(dataset)
        dataset.set_epoch(pass_number)
    samples = iter(dataset)
    return chain(list(islice(samples, 1)), samples)


def split_micro_batches(items: Sequence[Item], count: int) -> list[list[Item]]:
    """Split `items` into `count` micro-batches of nearly equal size, the larger first.

    If there are fewer items than micro-batches, some items are repeated.
    """
    samples = len(items)
    if samples >= count:
        cuts = pairwise(accumulate(_split_sizes(samples, count), initial=0))
        return [list(items[start:stop]) for start, stop in cuts]
    times = reversed(_split_sizes(count, samples))
    return [[item] for item, often in zip(items, times, strict=True) for _ in range(often)]


def micro_batch_weights(samples: int, count: int) -> list[float]:
    """Return weights for micro-batches, in descending order, so that each sample counts once in total.

    The weights are equal if there are no samples.

    Args:
        samples: the number of samples in all micro-batches, before some of them are repeated.
        count: the number of micro-batches.
    """
    if samples >= count:
        return [float(size) for size in _split_sizes(samples, count)]
    times = reversed(_split_sizes(count, samples)) if samples else (count,)
    return [1.0 / often for often in times for _ in range(often)]


def is_repeated_later(samples: int, count: int) -> list[bool]:
    """Return for each micro-batch whether a later one contains the same sample."""
    if not 0 < samples < count:
        return [False] * count
    return [left > 0 for often in reversed(_split_sizes(count, samples)) for left in reversed(range(often))]


def _split_sizes(whole: int, count: int) -> list[int]:
    """Split `whole` into `count` nearly equal numbers in descending order."""
    size, more = divmod(whole, count)
    return [size + (number < more) for number in range(count)]


class MapReader(Reader):
    """Reads a data set with an index, in a different order in every pass; a sharded one shard by shard."""

    def read(self, spans: Sequence[Span]) -> list[Any]:
        indices = sampler.sample_indices(self._spec, spans, self._dataset)
        return [
            sampler.fetch_batch(self._dataset, part, self._collate)
            for part in split_micro_batches(indices, self._accumulate)
        ]


class IterableReader(Reader):
    """Reads an iterable data set, in its own order.  Keeps up to `MAX_OPEN_PASSES` passes open."""

    def __init__(self, dataset: Any, spec: LedgerSpec, accumulate: int, collate: Collate) -> None:
        super().__init__(dataset, spec, accumulate, collate)
        self._open: list[_DatasetPass] = []  # most recently used last
        self._latest: tuple[Sequence[Span], list[Any]] = ((), [])

    def read(self, spans: Sequence[Span]) -> list[Any]:
        count = count_samples(spans)
        if tuple(spans) != take_first(deque(self._latest[0]), count):  # a stand-in repeats the first samples
            samples: list[Any] = []
            for span in spans:
                number, offset = divmod(span.start, self._spec.size)
                samples += self._pass(number, offset).take(offset, span.stop - span.start)
            self._latest = spans, samples
        taken = self._latest[1][:count]
        return [self._collate(part) for part in split_micro_batches(taken, self._accumulate)]

    def _pass(self, number: int, offset: int) -> _DatasetPass:
        found = [p for p in self._open if p.number == number and p.offset <= offset]
        fresh = None if found else _DatasetPass(self._dataset, self._spec.size, number)
        chosen = fresh or max(found, key=lambda p: p.offset)
        others = [p for p in self._open if p is not chosen]
        self._open = [*others[1 - MAX_OPEN_PASSES :], chosen]
        return chosen


class _DatasetPass:
    """One open pass; `offset` is the number of samples that have been read."""

    def __init__(self, dataset: Any, size: int, number: int) -> None:
        self.number, self.offset = number, 0
        self._size, self._samples = size, _open_pass(dataset, number)

    def take(self, offset: int, count: int) -> list[Any]:
        """Return the samples `offset` to `offset + count - 1` of the pass.

        Raises:
            ConfigError: the data set ends before the last of them.
        """
        skipped = sum(1 for _ in islice(self._samples, offset - self.offset))
        taken = list(islice(self._samples, count))
        got = self.offset + skipped + len(taken)
        if got < offset + count:
            raise ConfigError(
                f"the data set ended after {format_count(got, 'sample')} of pass {self.number}, but a pass "
                f"has {self._size}",
                remedy="pass the correct length= to grid.batches, with the same value on all workers",
            )
        self.offset = offset + count
        return taken
