"""The index of a sharded data set: its files, with the number of samples, size and digest of each.

    gridtrain data index part-*.jsonl --out index.json

    {"version": 1, "format": "jsonl", "tokenizer": "",
     "shards": [{"url": "part-0.jsonl", "samples": 1203, "bytes": 48213, "sha256": "9f2c...", "tokens": 0}]}

With the index, the number of samples is known before anything is read, and a file that was truncated or
changed is detected when it is opened.  A relative URL is relative to the folder of the index.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tarfile import TarError
from typing import Any
from urllib.parse import quote

from gridtrain.errors import ConfigError, DataError, disk_errors
from gridtrain.quantities import format_count, shorten
from gridtrain.training.data import shard_files
from gridtrain.training.data.shard_fetch import Copy, copy_rest, refuse_credentials
from gridtrain.training.data.shard_files import ShardFile
from gridtrain.training.data.shard_formats import FORMATS, ShardFormat, format_named, format_of
from gridtrain.training.data.token_packing import Tokenize

VERSION = 1
"""The value of `version` in an index; readers reject any other value."""

MAX_INDEX_BYTES = 256 << 20
"""The maximum size of an index."""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The files of a data set.

    Attributes:
        format: a key of `shard_formats.FORMATS`.
        shards: the files, in the order of the data set.
        tokenizer: the name of the tokenizer that counted the tokens; "" if they were not counted.
        base: the folder or URL against which relative URLs are resolved.
    """

    format: str
    shards: tuple[ShardFile, ...]
    tokenizer: str = ""
    base: str = ""

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """12 hexadecimal digits of a digest of everything but the locations of the files, which may differ
        from worker to worker."""
        contents = [(s.samples, s.bytes, s.sha256, s.tokens) for s in self.shards]
        text = json.dumps([VERSION, self.format, self.tokenizer, contents])
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def url(self, shard: ShardFile) -> str:
        """Return the URL or the path of a shard's file."""
        return shard_files.join(self.base, shard.url)


def read_index(location: str | Path, root: str | Path = "") -> ShardIndex:
    """Read an index from a file or a URL.

    Args:
        root: the folder or URL against which relative URLs are resolved; by default the folder of the index.

    Raises:
        ConfigError: the file cannot be read, or is not a valid index of the supported version.
    """
    place = str(location)
    try:
        body = json.loads(shard_files.read_bytes(place, MAX_INDEX_BYTES))
        if not isinstance(body, dict) or body.get("version") != VERSION:
            found = body.get("version") if isinstance(body, dict) else type(body).__name__
            raise ConfigError(
                f"{place} has version {found}; this version of gridtrain reads version {VERSION}",
                remedy="regenerate the index with `gridtrain data index`",
            )
        shards = tuple(ShardFile(**entry) for entry in body["shards"])
        named, tokenizer = str(body["format"]), str(body["tokenizer"])
        index = ShardIndex(named, shards, tokenizer, str(root) or posixpath.dirname(place))
    except OSError as error:
        raise ConfigError(
            f"the index {place} cannot be read: {error.strerror or error}",
            remedy="pass its path or URL; `gridtrain data index FILES --out index.json` writes one",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{place} is not the index of a data set: {type(error).__name__}: {error}",
            remedy="write one with `gridtrain data index FILES --out index.json`",
        ) from None
    format_named(index.format)
    if not index.samples or any(shard.problem for shard in index.shards):
        problem = next((f"{s.url}: {s.problem}" for s in index.shards if s.problem), "no file has a sample")
        raise ConfigError(f"{place} is not a valid index: {problem}", remedy="regenerate the index")
    return index


def write_index(index: ShardIndex, path: Path, url: str = "") -> None:
    """Write the index; files below its folder are named by their paths relative to that folder.

    Args:
        url: the URL at which workers find the folder with all files, if the files of the index are on this
            machine; the index then contains URLs.

    Raises:
        ConfigError: no file has a sample, the index cannot be written, or `url` contains a password or is
            given although not all files are on this machine.
    """
    if not index.samples:
        count = format_count(len(index.shards), "file")
        raise ConfigError(
            f"{path} was not written: no sample in the format {index.format} was found in {count}",
            remedy="check the files and --format",
        )
    refuse_credentials(url)
    places = [_absolute(index.url(shard)) for shard in index.shards]
    if url and not all(map(shard_files.is_local, places)):
        raise ConfigError(f"--url is {url}, but not all files are on this machine", remedy="leave out --url")
    base = posixpath.commonpath(map(posixpath.dirname, places)) if url else _absolute(str(path.parent))
    names = [posixpath.relpath(place, base) if place.startswith(base + "/") else place for place in places]
    shards = [
        asdict(shard) | {"url": shard_files.join(url, quote(name) if url.startswith("http") else name)}
        for shard, name in zip(index.shards, names, strict=True)
    ]
    body = {"version": VERSION, "format": index.format, "tokenizer": index.tokenizer, "shards": shards}
    with disk_errors(f"{path} cannot be written", "choose another file with --out"):
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _absolute(place: str) -> str:
    return str(Path(shard_files.local_path(place)).absolute()) if shard_files.is_local(place) else place


def build_index(
    files: Iterable[str],
    *,
    format: str = "",
    tokenize: Tokenize | None = None,
    tokenizer: str = "",
    cache: shard_files.ShardCache | None = None,
    progress: Callable[[ShardFile], None] = lambda shard: None,
    copy: Copy = copy_rest,
) -> ShardIndex:
    """Read all files and return their index.

    Args:
        files: paths or URLs, in the order of the data set; `*` and `?` match parts of names.
        format: a key of `shard_formats.FORMATS`; by default, the format that the file names indicate.
        tokenize, tokenizer: a function that converts a sample to its tokens, and the tokenizer's name; with
            them, the tokens of each file are counted (`token_packing`).
        progress: a function that is called with the entry of each file that has been read.
        copy: a function that copies a remote file.

    Raises:
        ConfigError: there are no files, their format is unknown, or a sample cannot be tokenized.
        DataError: a file cannot be read, or is not in this format.
    """
    places = [place for name in files for place in shard_files.expand(name)]
    if not places:
        raise ConfigError("there are no files for the index", remedy="name files, such as data/*.jsonl")
    reader = format_named(format or _common_format(places))
    shards = []
    for place in places:
        shards.append(_read_file(place, reader, tokenize, cache or shard_files.ShardCache(), copy))
        progress(shards[-1])
    return ShardIndex(reader.name, tuple(shards), tokenizer)


def _read_file(
    place: str, reader: ShardFormat, tokenize: Tokenize | None, cache: shard_files.ShardCache, copy: Copy
) -> ShardFile:
    file, nbytes, sha256 = cache.open_unknown(place, reader.convert, copy)
    tokens, where = 0, ""
    with file:
        try:
            ranges = reader.ranges(file)
            # Every sample is decoded, so that a damaged one is detected before the run.
            for number, (start, stop) in enumerate(ranges.tolist()):
                where = f"sample {number} (bytes {start} to {stop}) of "
                file.seek(start)
                sample = reader.decode(file.read(stop - start))
                tokens += 0 if tokenize is None else _count_tokens(sample, tokenize, f"{where}{place}")
        except (ValueError, TarError) as error:
            raise DataError(
                f"{where}{place} is not in the format {reader.name}: {error}",
                remedy="repair the file, or pass --format",
            ) from None
    return ShardFile(place, len(ranges), nbytes, sha256, tokens)


def _count_tokens(sample: Any, tokenize: Tokenize, where: str) -> int:
    try:
        return len(tokenize(sample))
    except ValueError as error:
        fields = ", ".join(map(str, sample)) if isinstance(sample, dict) else "none"
        remedy = f"pass --text-field with one of its fields: {fields}"
        raise ConfigError(f"{where} cannot be tokenized: {error}", remedy=remedy) from None


def _common_format(places: Sequence[str]) -> str:
    found = {format_of(place) for place in places}
    if len(found) == 1 and (name := found.pop()):
        return name
    names = shorten(", ".join(map(posixpath.basename, places)), 80)
    raise ConfigError(
        f"the file names ({names}) do not indicate a single format",
        remedy=f"pass --format with one of {', '.join(FORMATS)}",
    )
