"""Parquet and Arrow files, and streams of the package `datasets`, as shards."""

from __future__ import annotations

import datetime
import decimal
import io
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed_group import run
from torch import nn

import gridtrain
from gridtrain.errors import BudgetSpent, ConfigError, DataError
from gridtrain.training.data import shard_tables
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.shard_files import ShardCache
from gridtrain.training.data.shard_index import build_index, read_index, write_index

SIZES = (7, 40, 1, 30, 22)
TOTAL = sum(SIZES)


def rows_of(shard: int) -> list[dict[str, Any]]:
    first = sum(SIZES[:shard])
    return [{"number": n, "text": f"ä{n}", "raw": bytes([n]), "list": [n, None]} for n in
            range(first, first + SIZES[shard])]  # fmt: skip


# -- rows ------------------------------------------------------------------------------------------------


def stored(rows: list[dict[str, Any]]) -> io.BytesIO:
    file = io.BytesIO()
    shard_tables.write_rows(rows, file)
    return file


def read_back(file: io.BytesIO) -> list[Any]:
    return [shard_tables.decode(file.getvalue()[a:b]) for a, b in shard_tables.ranges(file).tolist()]


@pytest.mark.parametrize("rows", [[], [{}], rows_of(0)])
def test_rows_are_ranges_of_bytes(rows: list[dict[str, Any]]) -> None:
    assert read_back(stored(rows)) == rows


def test_values_that_are_not_of_json_become_text_or_are_refused() -> None:
    id_ = uuid.UUID(int=3)
    row = {"d": datetime.date(2026, 1, 2), "n": decimal.Decimal("1.50"), "u": id_, "a": np.arange(2)}
    assert read_back(stored([row])) == [{"d": "2026-01-02", "n": "1.50", "u": str(id_), "a": [0, 1]}]
    with pytest.raises(ValueError, match="a column has a Tensor, which has no portable form"):
        stored([{"x": torch.zeros(1)}])


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-8], lambda b: b[1:], lambda b: b + bytes(7)])
def test_damaged_rows_are_noticed(damage: Any) -> None:
    with pytest.raises(ValueError, match="offsets of its"):
        shard_tables.ranges(io.BytesIO(damage(stored(rows_of(0)).getvalue())))
    with pytest.raises(ValueError):
        shard_tables.decode(stored(rows_of(0)).getvalue()[:3])


def test_without_pyarrow_the_package_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    from gridtrain import extras

    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    for suffix in ("parquet", "arrow"):
        (tmp_path / f"a.{suffix}").write_bytes(b"PAR1")
        with pytest.raises(ConfigError, match="needs pyarrow to be installed -> pip install pyarrow"):
            build_index([str(tmp_path / f"a.{suffix}")], cache=ShardCache(tmp_path / "cache"))


# -- files of tables -------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pytest.importorskip("pyarrow", reason="pyarrow is not installed").Table.from_pylist(rows)
    from pyarrow import parquet

    parquet.write_table(table, path, row_group_size=5)


def write_arrow(path: Path, rows: list[dict[str, Any]], as_file: bool = False) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pyarrow.Table.from_pylist(rows)
    make = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with make(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=3)


WRITERS = {
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "b.arrow": lambda path, rows: write_arrow(path, rows, True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_of_a_table_is_a_sample(name: str, tmp_path: Path) -> None:
    files = []
    for shard in range(len(SIZES)):
        files.append(tmp_path / f"{shard}-{name}")
        WRITERS[name](files[-1], rows_of(shard))
    cache = tmp_path / "cache"
    write_index(build_index(map(str, files), cache=ShardCache(cache)), tmp_path / "index.json")
    data = gridtrain.Shards(tmp_path / "index.json", cache=cache)
    assert data.shard_sizes == SIZES
    assert [data[n] for n in (99, 0, 46, 7)] == [rows_of(s)[i] for s, i in ((4, 21), (0, 0), (1, 39), (1, 0))]

    path, right = files[1], files[1].read_bytes()
    for damaged, words in ((right[:-9], "is truncated"), (right[:-20] + bytes(20), "has changed: its SHA")):
        path.write_bytes(damaged)
        for kept in cache.glob("*.rows"):
            kept.unlink()
        data = gridtrain.Shards(tmp_path / "index.json", cache=cache)
        with pytest.raises(DataError, match=f"{path.name} {words}"):
            data[8]
        assert data.failed_reads == 1
    path.write_bytes(right[: len(right) // 2])
    with pytest.raises(DataError, match=r"cannot be converted: \w+: "):
        build_index([str(path)], cache=ShardCache(cache))


# -- streams ---------------------------------------------------------------------------------------------


def stream_of(folder: Path, **options: Any) -> Any:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    for shard in range(len(SIZES)):
        if not (folder / f"{shard}.parquet").exists():
            write_parquet(folder / f"{shard}.parquet", rows_of(shard))
    files = [str(folder / f"{shard}.parquet") for shard in range(len(SIZES))]
    loaded = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "hf")
    )
    return loaded.map(_length, remove_columns=["raw", "list"], **options)


def _length(row: dict[str, Any]) -> dict[str, int]:
    return {"length": len(row["text"])}


def made(folder: Path) -> tuple[Any, Path]:
    stream = stream_of(folder)
    from gridtrain.adapters.datasets import write_index as write_stream_index

    write_stream_index(stream, folder / "index.json", cache=ShardCache(folder / "written"))
    return stream, folder / "index.json"


def test_a_stream_is_read_by_its_shards(tmp_path: Path) -> None:
    stream, index = made(tmp_path)
    from gridtrain.adapters.datasets import StreamShards

    data = StreamShards(stream, index, cache=tmp_path / "cache")
    assert data.shard_sizes == SIZES and read_index(index).format == "rows"
    assert [data[n] for n in (8, 47)] == [
        {"number": 8, "text": "ä8", "length": 2}, {"number": 47, "text": "ä47", "length": 3}
    ]  # fmt: skip
    assert data.opened == ["datasets://shard/1", "datasets://shard/2"]
    again = StreamShards(stream_of(tmp_path).map(_fail), index, cache=tmp_path / "cache")
    assert again[9]["number"] == 9, "the cache has it"
    other = StreamShards(stream_of(tmp_path).map(_alter), index, cache=tmp_path / "other")
    with pytest.raises(DataError, match=r"datasets://shard/0 has changed: it is|is truncated|its SHA-256"):
        other[0]
    assert other.failed_reads == 1


def _fail(row: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("this row is damaged")


def _alter(row: dict[str, Any]) -> dict[str, Any]:
    return {"length": row["length"] + 1}


def test_a_stream_that_fails_is_reported_and_counted(tmp_path: Path) -> None:
    _, index = made(tmp_path)
    from gridtrain.adapters.datasets import StreamShards

    data = StreamShards(stream_of(tmp_path).map(_fail), index, cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"datasets://shard/1 cannot be read .*this row is damaged"):
        data[8]
    assert data.failed_reads == 1


class PlainStream:
    """What `StreamShards` needs of a stream; `reads` are the shards that were read."""

    num_shards, state_dict = len(SIZES), None

    def __init__(self, number: int | None = None, reads: list[int | None] | None = None) -> None:
        self.number, self.reads = number, [] if reads is None else reads

    def shard(self, num_shards: int, index: int) -> PlainStream:
        return PlainStream(index, self.reads)

    def iter(self, batch_size: int) -> Any:
        self.reads.append(self.number)
        assert self.number is not None
        rows = rows_of(self.number)
        yield {"number": [row["number"] for row in rows], "text": [row["text"] for row in rows]}


def test_a_shard_of_a_stream_is_not_begun_beyond_the_budget(tmp_path: Path) -> None:
    """It would begin anew each day, because a stream cannot be continued."""
    from gridtrain.adapters.datasets import StreamShards
    from gridtrain.adapters.datasets import write_index as write_stream_index

    stream, index, meter = PlainStream(), tmp_path / "index.json", FetchMeter()
    write_stream_index(stream, index, cache=ShardCache(tmp_path / "written"))
    stream.reads.clear()
    data = StreamShards(stream, index, cache=tmp_path / "cache")
    data.obey(meter)
    nbytes = data.index.shards[1].bytes
    meter.limit(None, nbytes - 1, nbytes - 1)
    with pytest.raises(
        DataError,
        match=r"datasets://shard/1 of 1\.\d+ kB, .* larger than the traffic budget of a day, 1\.\d+ kB -> "
        r"raise the budget \(gridtrain worker set budget=\.\.\.\), or ask the run's owner for smaller shards",
    ):
        data[8]
    meter.limit(None, nbytes - 1, nbytes)
    with pytest.raises(BudgetSpent, match=r"datasets://shard/1 .* needs more than the 1\.\d+ kB left in the"):
        data[8]
    assert stream.reads == [] and data.fetched_bytes == 0
    meter.limit(None, nbytes, nbytes)
    assert data[8]["number"] == 8 and stream.reads == [1]


def test_what_is_no_stream_of_this_index_is_refused(tmp_path: Path) -> None:
    stream, index = made(tmp_path)
    from gridtrain.adapters.datasets import StreamShards

    with pytest.raises(ConfigError, match=r"a list was passed instead of a datasets\.IterableDataset \(3"):
        StreamShards([1], index)
    fewer = stream.shard(num_shards=2, index=0)
    with pytest.raises(ConfigError, match=r"the stream has \d shards, but .* describes 5 files"):
        StreamShards(fewer, index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_continues_in_the_middle_of_a_stream(tmp_path: Path, num_workers: int) -> None:
    """Two workers stop in mid-shard; three others continue, and every sample counts once."""
    stream, index = made(tmp_path)
    from gridtrain.adapters.datasets import StreamShards

    def work(grid: gridtrain.Grid, until: int) -> list[tuple[int, list[int]]]:
        data = StreamShards(stream, index, cache=tmp_path / "cache", decode=lambda row: row["number"])
        model = nn.Linear(1, 1)
        optimizer = grid.optimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
        counted = []
        for numbers in grid.batches(data, epochs=1, global_batch_size=12, num_workers=num_workers):
            step = grid.step
            grid._model_state.checkpoints.wait()  # type: ignore[union-attr]
            model(numbers[:, None].float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if grid._session._turn.spans:
                counted.append((step, numbers.tolist()))
            if grid.step == until:
                break
        return counted

    counted = [s for steps in run(tmp_path, 2, lambda grid: work(grid, 4)) for step, s in steps if step < 3]
    counted += [samples for steps in run(tmp_path, 3, lambda grid: work(grid, -1)) for _, samples in steps]
    assert sorted(sample for samples in counted for sample in samples) == list(range(TOTAL))
