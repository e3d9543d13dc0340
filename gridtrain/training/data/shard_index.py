"""The index of a sharded data set: its files, with the samples, size and digest of each.

    gridtrain data index part-*.jsonl --out index.json

    {"version": 1, "format": "jsonl", "tokenizer": "",
     "shards": [{"url": "part-0.jsonl", "samples": 1203, "bytes": 48213, "sha256": "9f2c...", "tokens": 0}]}

Because of the index the number of samples is known before anything is read, and a file that was truncated or
changed is noticed when it is opened.  A relative URL is relative to the folder of the index.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tarfile import TarError

from gridtrain.errors import ConfigError, DataError
from gridtrain.quantities import format_count
from gridtrain.training.data import shard_files
from gridtrain.training.data.shard_files import ShardFile
from gridtrain.training.data.shard_formats import FORMATS, ShardFormat, format_named, format_of
from gridtrain.training.data.token_packing import Tokenize

VERSION = 1
"""The value of `version` in an index; a reader refuses others."""

MAX_INDEX_BYTES = 256 << 20
"""Largest index that is read."""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The files of a data set.

    Attributes:
        format: a key of `shard_formats.FORMATS`.
        shards: the files, in the order of the data set.
        tokenizer: the name of the tokenizer that counted the tokens; "" if they were not counted.
        base: the folder or URL to which relative URLs are relative.
    """

    format: str
    shards: tuple[ShardFile, ...]
    tokenizer: str = ""
    base: str = ""

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def digest(self) -> str:
        """12 hexadecimal digits of a digest of everything but the places of the files, which may differ from
        worker to worker."""
        contents = [(s.samples, s.bytes, s.sha256, s.tokens) for s in self.shards]
        text = json.dumps([VERSION, self.format, self.tokenizer, contents])
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def url(self, shard: ShardFile) -> str:
        """Return the URL or the path of a shard's file."""
        return shard_files.join(self.base, shard.url)


def read_index(location: str | Path, root: str | Path = "") -> ShardIndex:
    """Read an index from a file or a URL.

    Args:
        root: the folder or URL to which relative URLs are relative; by default the folder of the index.

    Raises:
        ConfigError: there is no such file, or it is not an index.
    """
    place = str(location)
    try:
        body = json.loads(shard_files.read_bytes(place, MAX_INDEX_BYTES))
        if not isinstance(body, dict) or body.get("version") != VERSION:
            found = body.get("version") if isinstance(body, dict) else type(body).__name__
            raise ConfigError(
                f"{place} has version {found}; this version of gridtrain reads version {VERSION}",
                remedy="write the index again with `gridtrain data index`",
            )
        shards = tuple(ShardFile(**entry) for entry in body["shards"])
        index = ShardIndex(body["format"], shards, body["tokenizer"], str(root) or shard_files.parent(place))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place} is not the index of a data set: {type(error).__name__}: {error}",
            remedy="write one with `gridtrain data index FILES --out index.json`",
        ) from None
    format_named(index.format)
    if not index.samples or any(shard.problem for shard in index.shards):
        problem = next((f"{s.url}: {s.problem}" for s in index.shards if s.problem), "no file has a sample")
        raise ConfigError(f"{place} is not a valid index: {problem}", remedy="write the index again")
    return index


def write_index(index: ShardIndex, path: Path) -> None:
    """Write the index; the files are named relative to its folder if they are below it.

    Raises `ConfigError` if no file has a sample.
    """
    if not index.samples:
        count = format_count(len(index.shards), "file")
        raise ConfigError(
            f"{path} is not written: {count}, and no sample in the format {index.format}",
            remedy="check the files and --format",
        )
    base = str(path.absolute().parent)
    shards = [asdict(shard) | {"url": _relative(index.url(shard), base)} for shard in index.shards]
    body = {"version": VERSION, "format": index.format, "tokenizer": index.tokenizer, "shards": shards}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _relative(place: str, base: str) -> str:
    if shard_files.is_local(place):
        place = str(Path(shard_files.local_path(place)).absolute())
    return posixpath.relpath(place, base) if place.startswith(base + "/") else place


def build_index(
    files: Iterable[str],
    *,
    format: str = "",
    tokenize: Tokenize | None = None,
    tokenizer: str = "",
    cache: shard_files.ShardCache | None = None,
    progress: Callable[[ShardFile], None] = lambda shard: None,
) -> ShardIndex:
    """Read all files, and return their index.

    Args:
        files: paths or URLs, in the order of the data set; `*` and `?` stand for parts of names.
        format: a key of `shard_formats.FORMATS`; by default, the one that fits the names of the files.
        tokenize, tokenizer: a function from a sample to its tokens, and its name, so that the tokens of each
            shard are counted (`token_packing`).
        progress: called for each file that was read.

    Raises:
        ConfigError: there are no files, or their format is unknown.
        DataError: a file cannot be read.
    """
    places = list(_expand(files))
    if not places:
        raise ConfigError("there are no files for the index", remedy="name files, such as data/*.jsonl")
    reader = format_named(format or _common_format(places))
    shards = []
    for place in places:
        shards.append(_read_file(place, reader, tokenize, cache or shard_files.ShardCache()))
        progress(shards[-1])
    return ShardIndex(reader.name, tuple(shards), tokenizer)


def _read_file(
    place: str, reader: ShardFormat, tokenize: Tokenize | None, cache: shard_files.ShardCache
) -> ShardFile:
    file, nbytes, sha256 = cache.open_unknown(place)
    tokens, where = 0, ""
    with file:
        try:
            ranges = reader.ranges(file)
            # Every sample is decoded, so that a damaged one is noticed before the run.
            for number, (start, stop) in enumerate(ranges.tolist()):
                where = f"sample {number} (bytes {start} to {stop}) of "
                file.seek(start)
                sample = reader.decode(file.read(stop - start))
                tokens += 0 if tokenize is None else len(tokenize(sample))
        except (ValueError, TarError) as error:
            raise DataError(
                f"{where}{place} is not {reader.name}: {error}", remedy="mend the file, or pass --format"
            ) from None
    return ShardFile(place, len(ranges), nbytes, sha256, tokens)


def _expand(files: Iterable[str]) -> Iterator[str]:
    for name in files:
        yield from shard_files.expand(name)


def _common_format(places: Sequence[str]) -> str:
    found = {format_of(place) for place in places}
    if len(found) == 1 and (name := found.pop()):
        return name
    raise ConfigError(
        f"the format of {places[0]} and {len(places) - 1} other files is not clear from their names",
        remedy=f"pass --format with one of {', '.join(FORMATS)}",
    )
