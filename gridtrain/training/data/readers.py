"""From positions to batches, for data sets with an index and for those that can only be read from the front.

Decides how a sample is found, and whether a data set can be read again with the same outcome.  Never decides
who takes which position (`protocol.ledger`), nor when: `optim.prefetch` may ask long before.

    spans of a step --MapReader-------> permutation of the pass, dataset[index] -----+
                    --IterableReader--> read on from where the last one stopped -----+--> `accumulate` batches

An `IterableReader` has to read past all the samples of the others: every worker reads the whole data set.
What was re-queued, and a run that is resumed within a pass, costs reading from the pass's front again.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.errors import ConfigError
from gridtrain.training.data import sampler

MAX_OPEN_PASSES = 2
"""Passes that are read at a time: one, and one that begins or of which samples are re-queued."""

Collate = Callable[[list[Any]], Any]
Item = TypeVar("Item")


class Reader(Protocol):
    """Usable in another process, where it is a copy."""

    def read(self, spans: Sequence[Span]) -> list[Any]:
        """The batches of one step."""
        ...


def is_iterable(dataset: Any) -> bool:
    """It can only be read from the front."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def measure_dataset(dataset: Any, length: int | None) -> tuple[int, str]:
    """Samples of one pass, and a text that is equal on workers that have the same data.

    Raises `ConfigError` for a data set that cannot be shared out.
    """
    if isinstance(dataset, DataLoader):  # its batches would be taken for samples
        raise ConfigError(
            "a DataLoader was given in the place of a data set; the run makes the batches",
            remedy="give the data set itself: grid.batches(loader.dataset, batch_size=..., collate_fn=..., "
            "num_workers=...)",
        )
    if not is_iterable(dataset):
        if length is not None:
            raise ConfigError(
                f"length={length} was given for a {type(dataset).__name__}, which has an index and a length",
                remedy="leave length out",
            )
        return len(dataset) if hasattr(dataset, "__len__") else 0, sampler.dataset_digest(dataset)[0]
    if length is None:
        length = _declared_length(dataset)
    if length < 1:
        raise ConfigError(
            f"a pass over the {type(dataset).__name__} has {length} samples", remedy="it must have 1 at least"
        )
    return length, _iterable_text(dataset, length)


def _declared_length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"the {type(dataset).__name__} does not say how many samples a pass over it has",
            remedy="give grid.batches(..., length=...), the same on all workers",
        ) from None


def _iterable_text(dataset: Any, length: int) -> str:
    with sampler.preserve_random_state():
        first, again = (_leading_samples_digest(dataset, length, reading) for reading in range(2))
    text = f"{length} samples a pass in the data set's own order"
    if first != again:
        raise ConfigError(
            f"the {type(dataset).__name__} is not read twice alike: its first "
            f"{min(length, sampler.DIGEST_SAMPLES)} samples differ from one reading to the next, so "
            "positions mean nothing",
            remedy="seed its shuffling and augmentation (by set_epoch, if passes are to differ), open its "
            "source anew in __iter__, or use a data set with an index",
        )
    return f"{text}, digest {first.hex()[:12]}" if first else f"{text} (contents not compared)"


def _leading_samples_digest(dataset: Any, length: int, reading: int) -> bytes:
    """Of the first samples of pass 0; b"" where their bits mean nothing to another process."""
    total = hashlib.blake2b(digest_size=32)
    sampler.seed_random(reading)
    for value in islice(_open_pass(dataset, 0), min(length, sampler.DIGEST_SAMPLES)):
        digest = sampler.value_digest(value)
        if digest is None:
            return b""
        total.update(digest)
    return total.digest()


def _open_pass(dataset: Any, pass_number: int) -> Iterator[Any]:
    """Its samples in the pass; the first is read at once, as a generator looks at its pass only then.

    Each reading has a copy with a pass number of its own, which one that goes on may look at later, too.
    """
    if hasattr(dataset, "set_epoch"):
        dataset = copy.copy(dataset)
        dataset.set_epoch(pass_number)
    samples = iter(dataset)
    first = list(islice(samples, 1))

    def all_of_them() -> Iterator[Any]:
        yield from first
        yield from samples

    return all_of_them()


def split_micro_batches(items: Sequence[Item], count: int) -> list[list[Item]]:
    """`count` near-equal micro-batches, the heavier ones first; of fewer samples some come twice."""
    samples = len(items)
    if samples >= count:
        cuts = pairwise(accumulate(_split_sizes(samples, count), initial=0))
        return [list(items[start:stop]) for start, stop in cuts]
    times = reversed(_split_sizes(count, samples))
    return [[item] for item, often in zip(items, times, strict=True) for _ in range(often)]


def micro_batch_weights(samples: int, count: int) -> list[float]:
    """Of `parts` of so many samples, that each sample counts once; never rising.  All equal for none."""
    if samples >= count:
        return [float(size) for size in _split_sizes(samples, count)]
    times = reversed(_split_sizes(count, samples)) if samples else (count,)
    return [1.0 / often for often in times for _ in range(often)]


def _split_sizes(whole: int, count: int) -> list[int]:
    """`whole` in `count` near-equal numbers, falling."""
    size, more = divmod(whole, count)
    return [size + (number < more) for number in range(count)]


class MapReader:
    """Of a data set with an index: every pass in an order of its own."""

    def __init__(self, dataset: Any, spec: LedgerSpec, accumulate: int, collate: Collate) -> None:
        self._dataset, self._spec, self._accumulate, self._collate = dataset, spec, accumulate, collate

    def read(self, spans: Sequence[Span]) -> list[Any]:
        indices = sampler.sample_indices(self._spec, spans)
        return [
            sampler.fetch_batch(self._dataset, part, self._collate)
            for part in split_micro_batches(indices, self._accumulate)
        ]


class IterableReader:
    """Of a data set that is read from the front: in its own order."""

    def __init__(self, dataset: Any, spec: LedgerSpec, accumulate: int, collate: Collate) -> None:
        self._dataset, self._spec, self._accumulate, self._collate = dataset, spec, accumulate, collate
        self._open: list[_DatasetPass] = []  # the latest used last
        self._latest: tuple[Sequence[Span], list[Any]] = ((), [])

    def read(self, spans: Sequence[Span]) -> list[Any]:
        if spans != self._latest[0]:  # a stand-in is what was read last
            samples: list[Any] = []
            for span in spans:
                number, offset = divmod(span.start, self._spec.size)
                samples += self._pass(number, offset).take(offset, span.stop - span.start)
            self._latest = spans, samples
        return [self._collate(part) for part in split_micro_batches(self._latest[1], self._accumulate)]

    def _pass(self, number: int, offset: int) -> _DatasetPass:
        found = [p for p in self._open if p.number == number and p.offset <= offset]
        fresh = None if found else _DatasetPass(self._dataset, self._spec.size, number)
        chosen = fresh or max(found, key=lambda p: p.offset)
        others = [p for p in self._open if p is not chosen]
        self._open = [*others[1 - MAX_OPEN_PASSES :], chosen]
        return chosen


class _DatasetPass:
    """One reading of the data set; `offset` samples of it are gone."""

    def __init__(self, dataset: Any, size: int, number: int) -> None:
        self.number, self.offset = number, 0
        self._size, self._samples = size, _open_pass(dataset, number)

    def take(self, offset: int, count: int) -> list[Any]:
        """Samples offset .. offset + count of the pass."""
        skipped = sum(1 for _ in islice(self._samples, offset - self.offset))
        taken = list(islice(self._samples, count))
        got = self.offset + skipped + len(taken)
        if got < offset + count:
            raise ConfigError(
                f"the data set ended after {got} samples of pass {self.number}, but a pass has {self._size}",
                remedy="give grid.batches the true length=, the same on all workers",
            )
        self.offset = offset + count
        return taken
