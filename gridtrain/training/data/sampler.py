"""Maps positions to samples of a data set, in an order shuffled with the seed, the same on all machines.

The data ledger (`gridtrain.core.commit.data_ledger`) assigns the positions to workers.

    position          0   1   2   3   4 |  5   6   7   8   9 | 10 ...      size = 5
    pass                       0        |          1         |
    permutation(5, seed, pass)  3 0 4 1 2   1 4 0 2 3

With shards, the ledger determines the order of the shards, and the data set the order within each.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler, default_collate

from gridtrain.core.commit.shard_leases import locate, split_at_shards
from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.errors import ConfigError, describe_type
from gridtrain.quantities import MAX_NAMES
from gridtrain.training.checkpoint.nested_values import tensor_bytes
from gridtrain.training.data.shards import ShardedDataset, random_order

DIGEST_SAMPLES = 16
collate = default_collate
_NOTE = "(sample"

GENERATORS_LOCK = threading.RLock()
"""Held from seeding the process's random generators until they are restored, because workers may be threads
of one process (`gridtrain.local`)."""


@lru_cache(maxsize=2)  # a step with re-queued positions may touch two passes
def permutation(size: int, seed: int, pass_number: int) -> npt.NDArray[np.int64]:
    """Return the order of the samples in one pass over the data; see `random_order`."""
    return random_order(size, seed, pass_number)


def sample_indices(spec: LedgerSpec, spans: Sequence[Span], dataset: Any = None) -> list[int]:
    """Return the indices of the samples at the positions of `spans`, in the same order."""
    indices: list[int] = []
    if isinstance(dataset, ShardedDataset):
        for span in split_at_shards(spec, spans):
            shard, first, _ = locate(spec, span.start)
            order = dataset.shard_order(shard, spec.seed, span.start // spec.size)
            indices.extend(order[first : first + span.stop - span.start].tolist())
        return indices
    for span in spans:
        start = span.start
        while start < span.stop:
            pass_number, offset = divmod(start, spec.size)
            count = min(span.stop - start, spec.size - offset)
            order = permutation(spec.size, spec.seed, pass_number)
            indices.extend(order[offset : offset + count].tolist())
            start += count
    return indices


def split_spans(spans: Sequence[Span], count: int) -> list[tuple[Span, ...]]:
    """Split `spans` into `count` pieces with nearly equal numbers of positions; if there are fewer positions
    than pieces, repeat some."""
    total = sum(span.stop - span.start for span in spans)
    bounds = [total * part // count for part in range(count + 1)]
    pairs = [(a, b) if a < b else (a % total, a % total + 1) for a, b in pairwise(bounds)]
    return [_slice_spans(spans, start, stop) for start, stop in pairs]


def _slice_spans(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Return the positions `start` to `stop` - 1 of `spans`, counted from their beginning."""
    taken, before = [], 0
    for span in spans:
        first, last = max(start - before, 0), min(stop - before, span.stop - span.start)
        if first < last:
            taken.append(Span(span.start + first, span.start + last))
        before += span.stop - span.start
    return tuple(taken)


def fetch_batch(
    dataset: Any, indices: Sequence[int], collate_fn: Callable[[list[Any]], Any] = collate
) -> Any:
    """Return one batch, built as `DataLoader` builds it.  An error raised by the data set gets a note that
    names the sample (see `describe_read_error`)."""
    if hasattr(dataset, "__getitems__"):
        with _named(indices):
            samples = dataset.__getitems__(list(indices))
    else:
        samples = []
        for index in indices:
            with _named([index]):
                samples.append(dataset[index])
    return collate_fn(samples)


@contextmanager
def _named(indices: Sequence[int]) -> Iterator[None]:
    """Add a note with the indices to an error in the `with` block."""
    try:
        yield
    except Exception as error:
        first = ", ".join(map(str, indices[:MAX_NAMES])) + (", ..." if len(indices) > MAX_NAMES else "")
        error.add_note(f"{_NOTE} {first} of the data set)")
        raise


def describe_read_error(error: Exception) -> str:
    """Return the last line of an error's message and, in parentheses, the sample, if it is known.

    The error of a reading process has that process's traceback as its message.
    """
    lines = "".join(traceback.format_exception_only(error)).split("\n")
    *_, cause, last = ["", *filter(None, lines)]
    return f"{cause} {last}" if last.startswith(_NOTE) else last


class GridSampler(Sampler[list[int]]):
    """A batch sampler for `DataLoader` that yields one list of sample indices for each step of this worker.

    Args:
        spec: the run's data ledger.
        turns: a function that is called for each iteration; it returns an iterator over this worker's spans,
            step by step.
        dataset: the data set of the loader, which may be sharded.
    """

    def __init__(
        self, spec: LedgerSpec, turns: Callable[[], Iterator[Sequence[Span]]], dataset: Any = None
    ) -> None:
        self._spec, self._dataset = spec, dataset
        self._turns = turns

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the lists.

        Raises `ConfigError` if a `DataLoader` was given this sampler as `sampler=`: it would make batches of
        these lists.
        """
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, BatchSampler) and getattr(caller, "sampler", None) is self:
            raise ConfigError(
                "the DataLoader has sampler=grid.sampler(...), which yields whole batches",
                remedy="pass DataLoader(dataset, batch_sampler=grid.sampler(dataset, ...)), without "
                "batch_size=, shuffle= and drop_last=",
            )
        return self._indices()

    def _indices(self) -> Iterator[list[int]]:
        for spans in self._turns():
            yield sample_indices(self._spec, spans, self._dataset)


# -- do all workers have the same data? ------------------------------------------------------------


def describe_dataset(dataset: Any) -> str:
    """Return a description of a data set: its length, and a digest of up to 16 of its samples.

    Each sample is read twice, with different random numbers that are the same on all workers.  If the two
    readings differ (random augmentation), or a sample contains something other than tensors, arrays, numbers,
    strings and containers of these, only the length is compared.

    Raises:
        ConfigError: the data set has no length, or is empty.
    """
    try:
        size = len(dataset)
    except TypeError:
        raise ConfigError(
            f"{describe_type(dataset)} without a length cannot be divided among workers",
            remedy="use a map-style data set with __len__ and __getitem__",
        ) from None
    if size < 1:
        raise ConfigError(
            f"the {type(dataset).__name__} has {size} samples; it must have at least 1",
            remedy="check the paths and filters that define the data set",
        )
    total = hashlib.blake2b(str(size).encode(), digest_size=32)
    samples = _samples_digest(dataset, size)
    if samples is None:
        return f"{size} samples (contents not compared)"
    total.update(samples)
    return f"{size} samples, digest {total.hexdigest()[:12]}"


def _samples_digest(dataset: Any, size: int) -> bytes | None:
    total = hashlib.blake2b(digest_size=32)
    count = min(size, DIGEST_SAMPLES)
    with preserve_random_state():
        for index in (i * size // count for i in range(count)):
            first, again = (value_digest(_read_sample(dataset, index, reading)) for reading in range(2))
            if first is None or first != again:
                return None
            total.update(first)
    return total.digest()


def _read_sample(dataset: Any, index: int, reading: int) -> Any:
    seed_random(2 * index + reading)
    return dataset[index]


def value_digest(value: Any) -> bytes | None:
    """Return a digest of `value`; None for a type that has no portable encoding."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        array = np.ascontiguousarray(value)
        return _digest(f"{array.dtype.str} {array.shape}", array.tobytes())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return _digest(f"{value.dtype} {tuple(value.shape)}", tensor_bytes(value).tobytes())
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return _digest(type(value).__name__, repr(value).encode())
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple):
        parts = [value_digest(item) for item in value]
        return None if None in parts else _digest("sequence", b"".join(cast(list[bytes], parts)))
    return None


def _digest(kind: str, content: bytes) -> bytes:
    return hashlib.blake2b(kind.encode() + b"\0" + content, digest_size=32).digest()


def seed_random(seed: int) -> None:
    """Seed the random generators, so that random augmentation is the same on all workers.  Otherwise, an
    augmentation that is rarely applied would occur on some workers only, and digests would differ.  Call this
    function while `preserve_random_state` is active."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # only the CPU's generator, because no other is restored


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Hold `GENERATORS_LOCK` in the `with` block, and restore the random state afterwards, so that reading
    samples for a digest does not change the training."""
    with GENERATORS_LOCK:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        torch_state = torch.get_rng_state()
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            torch.set_rng_state(torch_state)
