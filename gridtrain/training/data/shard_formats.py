"""Finds and decodes samples in shards (jsonl, text, WebDataset tar; tables as `shard_tables` writes them).

    jsonl   one JSON value in each line               any value
    text    one line, in UTF-8                        str
    tar     WebDataset: files with the same base name {"__key__": "0001", "jpg": bytes, "cls": bytes}
    parquet, arrow, rows    one row of a table        {"text": "...", "label": 3} (`shard_tables`)

Every sample is a range of bytes of the decompressed or converted file, so that any sample can be read without
reading those before it.  Empty lines are not samples.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gridtrain.errors import ConfigError
from gridtrain.training.data import shard_tables as tables
from gridtrain.training.data.shard_fetch import path_of

Ranges = npt.NDArray[np.int64]
"""(samples, 2): the first byte of each sample, and the byte after its last."""

_CHUNK_BYTES = 16 << 20
_TAR_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """A format of shards.

    Attributes:
        suffixes: the suffixes of file names that identify the format.
        ranges: a function that finds the samples in a file; raises `ValueError` or `tarfile.TarError`.
        decode: a function that converts the bytes of one sample; raises `ValueError` or `tarfile.TarError`.
        convert: a function that first writes the file in the form that the other functions read; None if they
            read it as it is.
    """

    name: str
    suffixes: tuple[str, ...]
    ranges: Callable[[BinaryIO], Ranges]
    decode: Callable[[bytes], Any]
    convert: Callable[[BinaryIO, BinaryIO], None] | None = None


def _line_ranges(file: BinaryIO) -> Ranges:
    size = 0
    ends: list[npt.NDArray[np.int64]] = []
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        ends.append(size + np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")))
        size += len(chunk)
    # The last line may have no line end; if it has one, the line after it is empty.
    stops = np.concatenate([*ends, np.array([size], np.int64)])
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1])
    lengths = stops - starts
    is_sample = lengths > 0
    for number in np.flatnonzero(lengths == 1):  # "\r\n" is also an empty line
        file.seek(int(starts[number]))
        is_sample[number] = file.read(1) != b"\r"
    ranges: Ranges = np.stack([starts, stops], axis=1)[is_sample]
    return ranges


def _tar_ranges(file: BinaryIO) -> Ranges:
    """Find the samples of a WebDataset tar file.  A sample consists of consecutive files whose names are
    equal up to the first dot after the last slash.  Raises `ValueError` if the file ends within a sample."""
    ranges: list[list[int]] = []
    latest = None
    size = file.seek(0, 2)
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if not member.isreg():
                continue
            key = _split_name(member.name)[0]
            blocks = -(-member.size // _TAR_BLOCK_BYTES)
            stop = member.offset_data + blocks * _TAR_BLOCK_BYTES
            if key == latest:
                ranges[-1][1] = stop
            else:
                ranges.append([member.offset, stop])
            latest = key
    if ranges and ranges[-1][1] > size:
        raise ValueError(f"the last sample ends at byte {ranges[-1][1]}, but the file has {size} bytes")
    return np.array(ranges, np.int64).reshape(-1, 2)


def _split_name(name: str) -> tuple[str, str]:
    """Split a file's name into its sample's key and its field: "train/0001.seg.png" into ("train/0001",
    "seg.png")."""
    folder, slash, last = name.rpartition("/")
    stem, _, field = last.partition(".")
    return folder + slash + stem, field


def _decode_tar(data: bytes) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                sample["__key__"], field = _split_name(member.name)
                sample[field] = content.read()
    return sample


def _decode_text(data: bytes) -> str:
    return data.decode().removesuffix("\r")


FORMATS = {
    each.name: each
    for each in (
        ShardFormat("jsonl", (".jsonl", ".ndjson", ".json"), _line_ranges, json.loads),
        ShardFormat("text", (".txt", ".text"), _line_ranges, _decode_text),
        ShardFormat("tar", (".tar",), _tar_ranges, _decode_tar),
        ShardFormat("parquet", (".parquet",), tables.ranges, tables.decode, tables.convert_parquet),
        ShardFormat("arrow", (".arrow",), tables.ranges, tables.decode, tables.convert_arrow),
        ShardFormat("rows", (), tables.ranges, tables.decode),
    )
}
"""The formats, by name."""


def format_named(name: str) -> ShardFormat:
    """Return the format called `name`; raise `ConfigError` if it is unknown."""
    if name not in FORMATS:
        raise ConfigError(f"the format {name!r} is unknown", remedy=f"use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(place: str) -> str:
    """Return the name of the format that fits a file's name, ignoring a compression suffix; "" if no
    format fits."""
    stem = path_of(place).lower()
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        stem = stem.removesuffix(suffix)
    return next((name for name, each in FORMATS.items() if stem.endswith(each.suffixes)), "")
