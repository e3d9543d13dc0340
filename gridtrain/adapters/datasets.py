"""Uses streams of Hugging Face's `datasets` package as shards; a worker reads only those leased to it.

    stream = datasets.load_dataset("org/name", revision="...", split="train", streaming=True).map(tokenize)
    write_index(stream, "index.json")              # once, by the run's owner: it reads everything
    data = StreamShards(stream, "index.json")      # on all workers, with the same stream
    for batch in grid.batches(data, batch_size=32, epochs=1): ...

When a shard is opened, its rows, `stream.shard(num_shards, index)`, are written to the cache and compared
with the index.  Each row is therefore read and mapped only once, and the rows can be shuffled.  A run can
resume in the middle of a shard.

Use neither `stream.shuffle` nor `split_dataset_by_node`, because the run itself shuffles the samples and
divides the shards among the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gridtrain.errors import ConfigError, DataError, describe_type
from gridtrain.quantities import format_count
from gridtrain.training.data import shard_index, shard_tables
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.shard_files import ShardCache
from gridtrain.training.data.shards import Shards

_PLACE = "datasets://shard/"
_BATCH_ROWS = 256


class StreamShards(Shards):
    """A data set whose files are the shards of a `datasets.IterableDataset`.

    Args:
        stream: the stream, the same on all workers.
        index: the path or the URL of the index that `write_index` wrote.
        options: the other arguments of `gridtrain.Shards`.

    Raises:
        ConfigError: `stream` is not a stream of the `datasets` package, the index cannot be read or describes
            other data, or an option is invalid.
    """

    def __init__(self, stream: Any, index: str | Path, **options: Any) -> None:
        count = _shard_count(stream)
        super().__init__(index, **options)
        self._copy = partial(_copy, stream)
        found = [shard.url for shard in self.index.shards]
        if found != _places(count):
            raise ConfigError(
                f"the stream has {format_count(count, 'shard')}, but {index} describes "
                f"{format_count(len(found), 'file')}, of which the first is {found[0]}",
                remedy="write the index of this stream with gridtrain.adapters.datasets.write_index",
            )


def write_index(stream: Any, path: str | Path, *, cache: ShardCache | None = None, **options: Any) -> None:
    """Read the whole stream and write its index.

    Args:
        cache: the cache to which the rows are written, for a later `StreamShards` on this machine; by
            default `ShardCache()`.
        options: `tokenize`, `tokenizer` and `progress` of `shard_index.build_index`.

    Raises:
        ConfigError: `stream` is not a stream of the `datasets` package, or a sample cannot be tokenized.
        DataError: a shard cannot be read.
    """
    places = _places(_shard_count(stream))
    copy = partial(_copy, stream)
    index = shard_index.build_index(places, format="rows", cache=cache, copy=copy, **options)
    shard_index.write_index(index, Path(path))


def _places(count: int) -> list[str]:
    return [f"{_PLACE}{number}" for number in range(count)]


def _shard_count(stream: Any) -> int:
    if not all(hasattr(stream, name) for name in ("num_shards", "shard", "iter", "state_dict")):
        raise ConfigError(
            f"{describe_type(stream)} was passed instead of a datasets.IterableDataset (3.1 or newer)",
            remedy="use load_dataset(..., streaming=True), or dataset.to_iterable_dataset(num_shards=64)",
        )
    count: int = stream.num_shards
    return count


def _copy(stream: Any, place: str, part: Path, limit_bytes: int, meter: FetchMeter) -> None:
    """Write the rows of the shard `place` to the file `part`, from the beginning.

    The `datasets` package reads the files itself, so the bytes of the rows are counted instead of the bytes
    read: more rows are requested only when the download limit has allowed the bytes of the previous rows.
    For the arguments and errors, see `gridtrain.training.data.shard_fetch.copy_rest`.
    """
    meter.check_undivided(place, limit_bytes)
    shard = stream.shard(num_shards=stream.num_shards, index=int(place.removeprefix(_PLACE)))
    with part.open("wb") as file:

        def rows() -> Iterator[dict[str, Any]]:
            counted = 0
            for batch in shard.iter(batch_size=_BATCH_ROWS):  # `iter(shard)` would divide it among loaders
                if file.tell() > limit_bytes:
                    raise DataError(
                        f"{place} has changed: its rows are now larger than {limit_bytes} bytes",
                        remedy="regenerate the index, or pin the data set's revision",
                    )
                meter.count(file.tell() - counted)
                counted = file.tell()
                meter.request(1)
                columns = list(batch)
                yield from (
                    dict(zip(columns, values, strict=True)) for values in zip(*batch.values(), strict=True)
                )

            meter.count(file.tell() - counted)

        shard_tables.write_rows(rows(), file)
