"""Sharded data sets on a disk, whose samples are numbered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gridtrain.training.data.shard_index import build_index, write_index

SIZES = (31, 5, 47, 12, 1, 60, 29, 55)
"""240 samples in shards of very unequal sizes."""


def write_shards(folder: Path, sizes: Sequence[int] = SIZES) -> Path:
    """Write files of JSON lines {"number": 0}, {"number": 1} ... and return the path of their index."""
    folder.mkdir(parents=True, exist_ok=True)
    first, names = 0, []
    for shard, size in enumerate(sizes):
        names.append(folder / f"part-{shard:02}.jsonl")
        lines = (json.dumps({"number": number}) + "\n" for number in range(first, first + size))
        names[-1].write_text("".join(lines))
        first += size
    write_index(build_index(map(str, names)), folder / "index.json")
    return folder / "index.json"


def number_of(sample: dict[str, Any]) -> int:
    """`decode=` of the numbers of samples."""
    number: int = sample["number"]
    return number
