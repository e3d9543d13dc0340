"""`gridtrain.Shards`: reads a data set shard by shard, in random order, and checks its files.

    data = gridtrain.Shards("https://host/corpus/index.json", decode=to_tensors)
    for batch in grid.batches(data, batch_size=32, epochs=1): ...

`grid.batches` and `grid.sampler` read every `ShardedDataset` in this way: the ledger assigns positions shard
by shard (`core.commit.shard_leases`), and `shard_order` gives a shard's samples in the order of a pass.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from tarfile import TarError
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from gridtrain.core.messages import MAX_SHARDS
from gridtrain.errors import ConfigError, DataError
from gridtrain.quantities import format_count
from gridtrain.training.data import token_packing
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.shard_fetch import Copy, copy_rest
from gridtrain.training.data.shard_files import (
    DEFAULT_LIMIT_BYTES,
    LIMIT,
    ShardCache,
    ShardFile,
    parse_limit,
    public_name,
)
from gridtrain.training.data.shard_formats import Ranges, format_named
from gridtrain.training.data.shard_index import ShardIndex, read_index

log = logging.getLogger("gridtrain")

Order = npt.NDArray[np.int64]


@lru_cache(maxsize=8)
def permute(count: int, seed: int, pass_number: int, part: int) -> Order:
    """Return a random order of the `count` samples of one part of the data; see `random_order`."""
    return random_order(count, seed, pass_number, part)


def random_order(count: int, seed: int, pass_number: int, *part: int) -> Order:
    """Return a random order of `count` samples, determined by the arguments: (count,) int64, read-only.

    The order comes from `RandomState`, whose stream numpy guarantees to be the same in every version.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32, pass_number & 0xFFFFFFFF, pass_number >> 32, *part]
    order = np.random.RandomState(words).permutation(count).astype(np.int64)
    order.flags.writeable = False
    return order


class ShardedDataset(Dataset[Any]):
    """A data set whose samples are read from shards as `dataset[i]`; only a few shards should be open at a
    time.

    Attributes:
        shard_sizes: the number of samples in each shard, at least 1.  The samples of a shard have consecutive
            indices.
        description: a text that is equal on workers with the same data.
        failed_reads: the number of failed attempts at reading a file or a sample.
        while_opening: a function that returns a context that is active while a shard is being opened, which
            may take a long time; `Shards` leaves the context while a server does not answer for more than
            half a minute.
    """

    shard_sizes: tuple[int, ...]
    description: str
    failed_reads = 0
    while_opening: Callable[[], AbstractContextManager[None]] = nullcontext

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def obey(self, meter: FetchMeter) -> None:
        """From now on, keep fetches within the limits of `meter`, and count their bytes in it."""

    def shard_order(self, shard: int, seed: int, pass_number: int) -> Order:
        """Return the indices of a shard's samples in the order in which a pass reads them: (samples,)."""
        return sum(self.shard_sizes[:shard]) + permute(self.shard_sizes[shard], seed, pass_number, shard)


class Shards(ShardedDataset):
    """A data set of files (JSON lines, text lines, WebDataset tar, Parquet, Arrow), described by an index.

    A sample is the content of its line, row or group of files (`shard_formats`) or, with `pack`, a sequence
    of tokens: (pack,) int64.  `decode` is applied to either.  The order within a shard is random, determined
    by the data seed.

    Args:
        index: the path or the URL of an index that `gridtrain data index` wrote.
        root: the folder or the URL with the files, if it is not the folder of the index.
        decode: a function that converts a sample into the value that is collated into batches.
        pack: the number of tokens in a sequence (`token_packing`); None for unpacked samples.
        tokenize: with `pack`, the function that counted the tokens for the index; by default, the tokenizer
            that the index names, applied to the field `text_field`.
        pack_seed: the seed for the order in which documents are packed, the same on all workers.
        cache: the folder for files that are fetched; by default `$XDG_CACHE_HOME/gridtrain/shards`.
        cache_limit: the maximum size of that folder, such as "20GB"; a limit set by the volunteer takes
            precedence.
        verify: whether the digest of a file is computed when it is opened; its size is always compared, and
            fetched files are always verified.
        keep_open: the maximum number of files that are open at the same time in a process.

    Raises:
        ConfigError: an argument is invalid, or the index cannot be read.

    Attributes:
        opened: the files that this process has opened, in order.
    """

    def __init__(
        self,
        index: str | Path,
        *,
        root: str | Path = "",
        decode: Callable[[Any], Any] | None = None,
        pack: int | None = None,
        tokenize: token_packing.Tokenize | None = None,
        text_field: str = "text",
        pack_seed: int = 0,
        cache: str | Path | None = None,
        cache_limit: str | int = DEFAULT_LIMIT_BYTES,
        verify: bool = True,
        keep_open: int = 2,
    ) -> None:
        limit = os.environ.get(LIMIT) or cache_limit
        limit_bytes = limit if isinstance(limit, int) else parse_limit("cache_limit", limit)
        if keep_open < 1:
            raise ConfigError(f"keep_open is {keep_open}; it must be >= 1", remedy="use keep_open=2")
        self.index = read_index(index, root)
        self._pack = _check_packing(self.index, pack)
        self._tokenize, self._text_field = tokenize, text_field
        self._pack_seed, self._decode = pack_seed, decode
        self._cache = ShardCache(None if cache is None else Path(cache), limit_bytes)
        self._copy: Copy = copy_rest  # for files that are not on this machine
        self._cache.close_idle, self._cache.note_outage = self._close_files, self._note_outage
        self._opening, self._is_in_outage = ExitStack(), False
        self._verify, self._keep_open = verify, keep_open
        sizes = [s.tokens // self._pack if self._pack else s.samples for s in self.index.shards]
        self._files = [shard for shard, size in zip(self.index.shards, sizes, strict=True) if size]
        self._sizes = [size for size in sizes if size]
        if not self._files:
            raise ConfigError(
                f"no file has {self._pack} tokens", remedy="pack shorter sequences, or write larger files"
            )
        self._starts = list(accumulate(self._sizes, initial=0))  # of each file, then the total
        per_shard = -(-len(self._files) // MAX_SHARDS)
        self._first_files = [*range(0, len(self._files), per_shard), len(self._files)]  # of each shard
        bounds = [self._starts[first] for first in self._first_files]
        self.shard_sizes = tuple(b - a for a, b in pairwise(bounds))
        packed = f", packed by {self._pack} tokens with seed {pack_seed}" if self._pack else ""
        self.description = (
            f"{len(self)} samples in {len(self._files)} files, index {self.index.digest}{packed}"
        )
        self.opened: list[str] = []
        self._failed_samples = 0
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()

    @property
    def failed_reads(self) -> int:  # type: ignore[override]
        return self._cache.failed_reads + self._failed_samples

    @property
    def yields_tokens(self) -> bool:
        """Whether a sample is a tensor of token ids."""
        return bool(self._pack) and self._decode is None

    def obey(self, meter: FetchMeter) -> None:
        self._cache.meter = meter

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes that this worker has copied from other machines."""
        return self._cache.meter.fetched_bytes

    def shard_order(self, shard: int, seed: int, pass_number: int) -> Order:
        files = range(self._first_files[shard], self._first_files[shard + 1])
        orders = [self._starts[file] + permute(self._sizes[file], seed, pass_number, file) for file in files]
        return orders[0] if len(orders) == 1 else np.concatenate(orders)

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            BudgetSpent: the traffic budget does not suffice to fetch the sample's file.
            ConfigError: a package that is needed to read the file is not installed.
            DataError: the file cannot be read or does not match the index, or the sample is damaged.
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, failed_before = bisect_right(self._starts, index) - 1, self._cache.failed_reads
        try:
            sample = self._opened(number).sample(index - self._starts[number])
        except DataError as error:
            self._failed_samples += self._cache.failed_reads == failed_before  # each failure is counted once
            error.summary = f"{public_name(self._files[number].url)}: {error.kind or 'not as in the index'}"
            raise
        return sample if self._decode is None else self._decode(sample)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_open": OrderedDict(),
            "_opening": ExitStack(),
            "while_opening": nullcontext,
        }

    def _opened(self, number: int) -> _OpenFile:
        found = self._open.get(number)
        if found is not None:
            self._open.move_to_end(number)
            return found
        while len(self._open) >= self._keep_open:
            self._open.popitem(last=False)[1].close()
        self._is_in_outage = False
        with self._opening as opening:
            opening.enter_context(self.while_opening())
            found = self._open[number] = self._open_file(self._files[number])
        return found

    def _note_outage(self, is_long: bool) -> None:
        """Leave the context of `while_opening` in a long outage, and enter it again when bytes arrive."""
        if is_long == self._is_in_outage:
            return
        self._is_in_outage = is_long
        if not is_long:
            self._opening.enter_context(self.while_opening())
            return
        self._opening.close()
        if self.while_opening is not nullcontext:
            log.warning(
                "the group no longer waits for the file: it may continue without this worker, which then "
                "rejoins once the file is there"
            )

    def _close_files(self) -> bool:
        """Close all open files, because their space on the disk cannot be freed while they are open; return
        whether there were any."""
        had_files = bool(self._open)
        while self._open:
            self._open.popitem()[1].close()
        return had_files

    def _open_file(self, shard: ShardFile) -> _OpenFile:
        place = self.index.url(shard)
        self.opened.append(shard.url)
        convert = format_named(self.index.format).convert
        file = self._cache.open(place, shard, compares_digest=self._verify, convert=convert, copy=self._copy)
        opened = _OpenFile(place, file, self.index, shard)
        if self._pack:
            if self._tokenize is None:
                self._tokenize = token_packing.tokenizer_named(self.index.tokenizer, self._text_field)
            opened.pack(self._pack, self._tokenize, self._pack_seed, shard.tokens)
        return opened


def _check_packing(index: ShardIndex, pack: int | None) -> int:
    """Return the length of packed sequences; 0 if samples are not packed.  Raises `ConfigError` if `pack` is
    below 1, or if the index has no token counts."""
    if pack is None:
        return 0
    if pack < 1:
        raise ConfigError(f"pack is {pack}; it must be >= 1", remedy="pass pack=1024")
    if not index.tokenizer:
        raise ConfigError(
            "pack was given, but the index contains no token counts",
            remedy="regenerate the index with `gridtrain data index --tokenizer NAME`",
        )
    return pack


class _OpenFile:
    """An open file of a data set, with the byte ranges of its samples."""

    def __init__(self, place: str, file: BinaryIO, index: ShardIndex, shard: ShardFile) -> None:
        self._place, self._file, self._form = place, file, format_named(index.format)
        self._tokens: torch.Tensor | None = None  # (sequences, length), if samples are packed
        try:
            self._ranges: Ranges = self._form.ranges(file)
        except (ValueError, TarError) as error:
            raise DataError(
                f"{place} is not a {index.format} file: {error}", remedy="regenerate the index"
            ) from None
        if len(self._ranges) != shard.samples:
            raise DataError(
                f"{place} has {format_count(len(self._ranges), 'sample')}, but {shard.samples} according to "
                "the index",
                remedy="regenerate the index with `gridtrain data index` and give it to all workers",
            )

    def pack(self, length: int, tokenize: token_packing.Tokenize, seed: int, tokens: int) -> None:
        """Replace the samples with packed sequences of `length` tokens.

        Args:
            tokens: the number of tokens in the file according to the index.

        Raises:
            DataError: the tokenizer does not fit the samples or the index.
        """
        try:
            packed = token_packing.pack(len(self._ranges), self._read, tokenize, seed)
        except ValueError as error:
            raise DataError(
                f"{self._place} cannot be packed: {error}",
                kind="cannot be packed",
                remedy="pass the tokenizer and the text_field with which the index was written",
            ) from None
        if len(packed) != tokens:
            raise DataError(
                f"{self._place} has {format_count(len(packed), 'token')}, but {tokens} according to the "
                "index",
                remedy="pass the tokenizer with which the index was written, or regenerate the index",
            )
        whole = tokens // length * length
        self._tokens = torch.from_numpy(packed[:whole].reshape(-1, length))

    def sample(self, number: int) -> Any:
        return self._read(number) if self._tokens is None else self._tokens[number].long()

    def _read(self, number: int) -> Any:
        start, stop = self._ranges[number].tolist()
        try:
            # Not seek and read, because a forked process shares the position in the file.
            return self._form.decode(os.pread(self._file.fileno(), stop - start, start))
        except (OSError, ValueError, TarError) as error:
            raise DataError(
                f"sample {number} of {self._place} (bytes {start} to {stop}) cannot be read: "
                f"{type(error).__name__}: {error}",
                kind="a sample is damaged",
                remedy="repair the file and regenerate the index with `gridtrain data index`",
            ) from None

    def close(self) -> None:
        self._file.close()
