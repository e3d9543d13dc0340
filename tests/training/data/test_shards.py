"""Sharded data sets: the index, the formats, packing, and the order of samples."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sharded_data import SIZES, number_of, write_shards

import gridtrain
from gridtrain.cli.main import cli
from gridtrain.core.messages import MAX_SHARDS, LedgerSpec, Span
from gridtrain.errors import ConfigError, DataError
from gridtrain.training.data import readers, sampler
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.shard_formats import FORMATS, format_of
from gridtrain.training.data.shard_index import build_index, read_index, write_index
from gridtrain.training.data.shards import ShardedDataset
from gridtrain.training.data.token_packing import END_OF_TEXT, pack, tokenizer_named

# -- formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("", []),
        ("a\n", ["a"]),
        ("a", ["a"]),
        ("a\nbc", ["a", "bc"]),
        ("\n\na\n\nb\n\n", ["a", "b"]),
        ("a\r\n\r\nbc\r\n", ["a", "bc"]),
        ("ä\n \n", ["ä", " "]),
    ],
)
def test_lines_are_read(text: str, samples: list[str]) -> None:
    file = io.BytesIO(text.encode())
    form = FORMATS["text"]
    found = [file.getvalue()[start:stop] for start, stop in form.ranges(file).tolist()]
    assert [form.decode(each) for each in found] == samples


def tar_of(*members: tuple[str, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_sample_of_a_tar_file_is_a_group_of_files(kind: int) -> None:
    long = "deep/" * (40 if kind != tarfile.USTAR_FORMAT else 10)
    members = [("a/1.jpg", b"x" * 700), ("a/1.cls", b"3"), (long + "2.seg.png", b""), ("b/1.jpg", b"y")]
    file = io.BytesIO(tar_of(*members, kind=kind))
    form = FORMATS["tar"]
    found = [form.decode(file.getvalue()[start:stop]) for start, stop in form.ranges(file).tolist()]
    assert found == [
        {"__key__": "a/1", "jpg": b"x" * 700, "cls": b"3"},
        {"__key__": long + "2", "seg.png": b""},
        {"__key__": "b/1", "jpg": b"y"},
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.jsonl", "jsonl"),
        ("a.JSONL.gz", "jsonl"),
        ("s3://b/a-0.tar", "tar"),
        ("a.txt.zst", "text"),
        ("a", ""),
    ],
)
def test_the_format_follows_from_the_name(name: str, found: str) -> None:
    assert format_of(name) == found


# -- the index -------------------------------------------------------------------------------------------


def test_an_index_without_a_sample_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    done = CliRunner().invoke(
        cli, ["data", "index", str(tmp_path / "empty.jsonl"), "--out", str(tmp_path / "i.json")]
    )
    assert isinstance(done.exception, ConfigError) and "was found in 1 file" in done.exception.reason
    assert not (tmp_path / "i.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "{0}/none.jsonl",
            "none.jsonl does not exist, or matches no file -> name files, such as {0}/*.jsonl",
        ),
        ("{0}", "{0} is a folder -> name files, such as "),
        (
            "{0}/a.jsonl {0}/b.bin",
            "(a.jsonl, b.bin) do not indicate a single format -> pass --format with one of jsonl",
        ),
        (
            "{0}/a.jsonl --out {0}/none/i.json",
            "{0}/none does not exist -> create it, or choose another --out",
        ),
        ("{0}/a.jsonl --out /proc/i.json", "/proc/i.json cannot be written: "),
        (
            "{0}/a.jsonl --tokenizer bytes --text-field t",
            "'t' -> pass --text-field with one of its fields: body, id",
        ),
        ("memory2://bucket/*.jsonl", "memory2://bucket/*.jsonl cannot be read: Protocol not known"),
    ],
)
def test_an_index_that_cannot_be_made_is_refused_with_a_remedy(
    tmp_path: Path, arguments: str, words: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "id": 1}\n')
    (tmp_path / "b.bin").touch()
    arguments_list = ["--out", str(tmp_path / "i.json"), *arguments.format(tmp_path).split()]
    done = CliRunner().invoke(cli, ["data", "index", *arguments_list])
    assert isinstance(done.exception, ConfigError), done.exception
    assert words.format(tmp_path) in str(done.exception)


def test_the_command_writes_an_index_with_relative_names(tmp_path: Path, monkeypatch: Any) -> None:
    write_shards(tmp_path / "data", (3, 4))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        cli, ["data", "index", "data/part-*.jsonl", "--out", "data/other.json"], catch_exceptions=False
    )
    assert "data/other.json: 7 samples in 2 files, index " in result.output
    body = json.loads((tmp_path / "data" / "other.json").read_text())
    assert [(shard["url"], shard["samples"]) for shard in body["shards"]] == [
        ("part-00.jsonl", 3),
        ("part-01.jsonl", 4),
    ]
    moved = (tmp_path / "data").rename(tmp_path / "moved")
    assert len(gridtrain.Shards(moved / "other.json")) == 7


def test_an_index_of_local_files_for_workers_elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("a/x y.txt", "b/z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    monkeypatch.chdir(tmp_path)
    argv = ["data", "index", "*/*.txt", "--url", "https://host/c"]
    result = CliRunner().invoke(cli, argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    urls = [shard["url"] for shard in json.loads((tmp_path / "index.json").read_text())["shards"]]
    assert urls == ["https://host/c/a/x%20y.txt", "https://host/c/b/z.txt"]


def test_the_digest_of_an_index_does_not_depend_on_its_location(tmp_path: Path) -> None:
    here, there = (read_index(write_shards(tmp_path / name, (3, 4))) for name in ("a", "b"))
    other = read_index(write_shards(tmp_path / "c", (4, 3)))
    assert here.digest == there.digest != other.digest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not the index of a data set: JSONDecodeError"),
        ("[]", "has version list"),
        ('{"version": 2}', "has version 2; this version of gridtrain reads version 1"),
        ('{"version": 1, "format": "csv", "tokenizer": "", "shards": []}', "the format 'csv' is unknown"),
        ('{"version": 1, "format": "text", "tokenizer": "", "shards": []}', "no file has a sample"),
        ('{"version": 1, "format": "text", "tokenizer": "", "shards": [{"url": "a"}]}', "TypeError"),
        ('{"version": 1, "format": [], "tokenizer": "", "shards": []}', "the format '\\[\\]' is unknown"),
        ("[" * 100_000, "RecursionError"),
        (
            '{"version": 1, "format": "text", "tokenizer": "", "shards": '
            '[{"url": "a", "samples": -1, "bytes": 1, "sha256": ""}]}',
            "no file has a sample|integers >= 0",
        ),
    ],
)
def test_a_malformed_index_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_index(tmp_path / "index.json")


def test_a_missing_index_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*gridtrain data index"):
        gridtrain.Shards(tmp_path / "index.json")


def test_a_damaged_sample_is_found_when_the_index_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(
        DataError, match=r"sample 1 \(bytes 9 to 15\) of .*a.jsonl is not in the format jsonl"
    ):
        build_index([str(tmp_path / "a.jsonl")])
    (tmp_path / "a.tar").write_bytes(tar_of(("a.txt", b"x" * 2000))[:1024])
    with pytest.raises(DataError, match=r"a.tar is not in the format tar: "):
        build_index([str(tmp_path / "a.tar")])


def test_files_of_unclear_formats_are_refused(tmp_path: Path) -> None:
    for names in (["a.dat"], ["a.txt", "a.tar"]):
        for name in names:
            (tmp_path / name).touch()
        with pytest.raises(ConfigError, match="--format with one of jsonl, text, tar"):
            build_index([str(tmp_path / name) for name in names])


# -- the data set ----------------------------------------------------------------------------------------


def test_a_position_of_a_pass_is_one_sample_in_shards_of_each_pass(tmp_path: Path) -> None:
    data = gridtrain.Shards(write_shards(tmp_path), decode=number_of)
    spec = LedgerSpec(len(data), 5, 2, shards=data.shard_sizes)
    passes = [sampler.sample_indices(spec, [Span(n * 240, n * 240 + 240)], data) for n in range(2)]
    assert passes[0] != passes[1] and all(sorted(each) == list(range(240)) for each in passes)
    shard_of = np.repeat(np.arange(len(SIZES)), SIZES)
    for each in passes:
        changes = np.flatnonzero(np.diff(shard_of[each]))
        assert len(changes) == len(SIZES) - 1, "one shard after the other"
        assert each != sorted(each)
    assert (
        sampler.sample_indices(spec, [Span(100, 130), Span(7, 9)], data)
        == passes[0][100:130] + passes[0][7:9]
    )


def test_reading_opens_the_files_of_the_positions_only(tmp_path: Path) -> None:
    data = gridtrain.Shards(write_shards(tmp_path), decode=number_of)
    size, text = readers.measure_dataset(data, None)
    assert size == 240 and text.startswith("240 samples in 8 files, index ") and data.opened == []
    spec = LedgerSpec(size, 0, 1, shards=data.shard_sizes)
    reader = readers.MapReader(data, spec, 1, sampler.collate)
    for start in range(0, 30, 5):
        (batch,) = reader.read([Span(start, start + 5)])
        assert batch.tolist() == sampler.sample_indices(spec, [Span(start, start + 5)], data)
    assert len(data.opened) <= 3 and len(set(data.opened)) == len(data.opened)


def test_a_copy_for_another_process_opens_files_itself(tmp_path: Path) -> None:
    data = gridtrain.Shards(write_shards(tmp_path), decode=number_of)
    assert data[3] == 3
    copy = pickle.loads(pickle.dumps(data))
    assert copy[200] == 200 and data.opened == ["part-00.jsonl"]


def test_the_number_of_open_files_is_bounded(tmp_path: Path) -> None:
    data = gridtrain.Shards(write_shards(tmp_path, (2, 2, 2)), decode=number_of, keep_open=2)
    assert [data[index] for index in (0, 2, 1, 4, 0, 2)] == [0, 2, 1, 4, 0, 2]
    assert data.opened == ["part-00.jsonl", "part-01.jsonl", "part-02.jsonl", "part-01.jsonl"]
    with pytest.raises(IndexError, match="sample 6 of 6"):
        data[6]


def test_more_files_than_a_ledger_has_shards_are_joined(tmp_path: Path, monkeypatch: Any) -> None:
    index = write_shards(tmp_path, (2, 3, 4, 5, 6))
    monkeypatch.setattr("gridtrain.training.data.shards.MAX_SHARDS", 3)
    data = gridtrain.Shards(index, decode=number_of)
    assert data.shard_sizes == (5, 9, 6) and MAX_SHARDS > 3
    order = data.shard_order(1, 0, 0).tolist()
    assert sorted(order[:4]) == [5, 6, 7, 8] and sorted(order[4:]) == [9, 10, 11, 12, 13]


class Halves(ShardedDataset):
    """A data set that a user has written."""

    shard_sizes = (4, 6)
    description = "ten numbers"

    def __getitem__(self, index: int) -> int:
        return index


def test_a_users_own_data_set_is_read_by_shards() -> None:
    data = Halves()
    assert readers.measure_dataset(data, None) == (10, "ten numbers")
    assert sorted(data.shard_order(1, 3, 0).tolist()) == [4, 5, 6, 7, 8, 9]


# -- packing ---------------------------------------------------------------------------------------------


def test_packing_orders_documents_by_the_seed() -> None:
    documents = [[7, 3, 9, 0], [4, 0], [8, 8, 2, 6, 0]]
    found = {tuple(pack(3, documents.__getitem__, list, seed).tolist()) for seed in range(20)}
    assert (7, 3, 9, 0, 4, 0, 8, 8, 2, 6, 0) in found and len(found) == 6
    again = pack(3, documents.__getitem__, list, 3)
    assert again.dtype == np.int32 and np.array_equal(again, pack(3, documents.__getitem__, list, 3))


def write_texts(folder: Path) -> Path:
    names = [folder / f"part-{number}.jsonl" for number in range(3)]
    for number, name in enumerate(names):
        name.write_text(
            "".join(json.dumps({"text": "ab" * line}) + "\n" for line in range(1, 5 * number + 2))
        )
    index = build_index(map(str, names), tokenize=tokenizer_named("bytes"), tokenizer="bytes")
    write_index(index, folder / "index.json")
    return folder / "index.json"


def test_packed_sequences_contain_all_tokens_except_the_rest_of_each_shard(tmp_path: Path) -> None:
    data = gridtrain.Shards(write_texts(tmp_path), pack=8)
    assert [shard.tokens for shard in data.index.shards] == [3, 48, 143]
    assert data.shard_sizes == (6, 17), "the first file has less than a sequence"
    assert "packed by 8 tokens with seed 0" in data.description
    sequences = torch.stack([data[index] for index in range(len(data))])
    assert sequences.dtype is torch.int64 and sequences.shape == (23, 8)
    first = sequences[:6].flatten()
    assert int((first == END_OF_TEXT).sum()) == 6 and int((first == ord("a")).sum()) == 21
    other = gridtrain.Shards(tmp_path / "index.json", pack=8, pack_seed=1)
    assert not torch.equal(torch.stack([other[i] for i in range(len(other))]), sequences)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"pack": 0}, ConfigError, "pack is 0"),
        ({"pack": 500}, ConfigError, "no file has 500 tokens"),
        (
            {"pack": 8, "tokenize": lambda sample: [1]},
            DataError,
            "has 6 tokens, but 48 according to the index",
        ),
        (
            {"pack": 8, "text_field": "body"},
            DataError,
            "cannot be packed: it has no text in the field 'body'",
        ),
        ({"cache_limit": "much"}, ConfigError, "cache_limit is 'much'"),
        ({"keep_open": 0}, ConfigError, "keep_open is 0"),
    ],
)
def test_invalid_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        gridtrain.Shards(write_texts(tmp_path), **options)[0]


def test_packing_requires_counted_tokens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contains no token counts.*--tokenizer"):
        gridtrain.Shards(write_shards(tmp_path, (2,)), pack=8)


def test_the_context_of_opening_is_left_in_a_long_outage(tmp_path: Path, caplog: Any) -> None:
    """The waits of 1, 5 and 25 s are part of opening the file, those of 60 s are not, until bytes arrive."""
    write_shards(tmp_path, (3,))
    waited_s, in_context, attempts = {True: 0.0, False: 0.0}, False, []
    now_s = lambda: sum(waited_s.values())  # noqa: E731

    @contextmanager
    def opening() -> Iterator[None]:
        nonlocal in_context
        in_context = True
        yield
        in_context = False

    def sleep(duration_s: float) -> None:
        waited_s[in_context] += duration_s

    def copy(place: str, part: Path, limit_bytes: int, meter: FetchMeter) -> None:
        before = in_context
        if len(attempts) == 5:
            part.write_bytes((tmp_path / "part-00.jsonl").read_bytes())
            meter.count(limit_bytes)
        attempts.append((before, in_context))
        if len(attempts) < 6:
            raise ConnectionRefusedError("refused")

    data = gridtrain.Shards(tmp_path / "index.json", root="memory://none", cache=tmp_path / "cache")
    data.obey(FetchMeter(now_s, sleep))
    data.while_opening = opening
    data._copy = copy
    assert number_of(data[1]) == 1 and not in_context
    assert waited_s == {True: 31.0, False: 120.0}
    assert attempts == [(True, True)] * 4 + [(False, False), (False, True)]
    assert [text.partition(":")[0] for text in caplog.messages[1:]] == [
        "the group no longer waits for the file"
    ]
