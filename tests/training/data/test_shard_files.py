"""Files of data sets: damaged files are reported; remote files are fetched, resumed and cached."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from sharded_data import number_of, write_shards

import gridtrain
from gridtrain.errors import ConfigError, DataError
from gridtrain.training.data import shard_files
from gridtrain.training.data.shard_files import ShardCache, ShardFile
from gridtrain.training.data.shard_index import build_index, read_index, write_index


class Remote:
    """Another machine, whose connections break after the numbers of bytes in `breaks`."""

    def __init__(self, monkeypatch: Any) -> None:
        self.breaks: list[int] = []
        self.requests: list[str] = []
        self.files = MemoryFileSystem()
        open_file = MemoryFileSystem._open

        def open_recorded(system: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
            file = open_file(system, path, mode, **options)
            if mode != "rb":
                return file
            self.requests.append(path)
            return Breaking(file, self.breaks.pop(0)) if self.breaks else file

        monkeypatch.setattr(MemoryFileSystem, "_open", open_recorded)


class Breaking:
    def __init__(self, file: Any, left: int) -> None:
        self._file, self._left = file, left

    def __enter__(self) -> Breaking:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, position: int) -> None:
        self._file.seek(position)

    def read(self, count: int) -> bytes:
        if not self._left:
            raise ConnectionResetError("the connection broke")
        part: bytes = self._file.read(min(count, self._left))
        self._left -= len(part)
        return part


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: Any) -> Iterator[Remote]:
    remote = Remote(monkeypatch)
    for path in write_shards(tmp_path / "origin", (5, 9, 3)).parent.iterdir():
        remote.files.pipe(f"/corpus/{path.name}", path.read_bytes())
    yield remote
    remote.files.rm("/corpus", recursive=True)


URL = "memory://corpus/index.json"


def open_at_once(cache: ShardCache, shard: ShardFile) -> bytes:
    with cache.open(f"memory://corpus/{shard.url}", shard) as file:
        return file.read()


def test_a_remote_file_is_fetched_once_and_cached(remote: Remote, tmp_path: Path) -> None:
    for _ in range(2):
        data = gridtrain.Shards(URL, cache=tmp_path / "cache", decode=number_of)
        assert [data[index] for index in range(17)] == list(range(17))
    assert [name for name in remote.requests if "part" in name] == [
        f"/corpus/part-0{number}.jsonl" for number in range(3)
    ]
    assert data.fetched_bytes == 0 and data.failed_reads == 0


def test_the_index_of_remote_files_is_that_of_local_ones(remote: Remote, tmp_path: Path) -> None:
    index = build_index(["memory://corpus/part-*.jsonl"], cache=ShardCache(tmp_path / "cache"))
    assert index.digest == read_index(tmp_path / "origin" / "index.json").digest
    write_index(index, tmp_path / "index.json")
    data = gridtrain.Shards(tmp_path / "index.json", cache=tmp_path / "cache", decode=number_of)
    before = len(remote.requests)
    assert data[16] == 16 and len(remote.requests) == before, "it is in the cache already"


def test_a_broken_download_continues_where_it_ended(remote: Remote, tmp_path: Path) -> None:
    shard = read_index(URL).shards[1]
    cache = ShardCache(tmp_path / "cache", retry_after_s=(0.0, 0.0))
    remote.breaks += [40, 30, 10]
    words = r"corpus/part-01\.jsonl cannot be read after 80 bytes: ConnectionResetError: the connection broke"
    with pytest.raises(DataError, match=words):
        open_at_once(cache, shard)
    assert cache.failed_reads == 3, "the last attempt, too"
    remote.breaks += [20]
    assert open_at_once(cache, shard).count(b"\n") == 9
    assert cache.failed_reads == 4 and cache.meter.fetched_bytes == shard.bytes, "no byte is fetched twice"


def test_the_least_recently_used_files_are_removed_first(remote: Remote, tmp_path: Path) -> None:
    index = read_index(URL)
    sizes = [shard.bytes for shard in index.shards]
    cache = ShardCache(tmp_path / "cache", sizes[0] + sizes[1])
    for number in (0, 1, 0):
        open_at_once(cache, index.shards[number])
    still_open = cache.open(f"memory://corpus/{index.shards[1].url}", index.shards[1])
    open_at_once(cache, index.shards[0])
    times = {shard.sha256: at for at, shard in enumerate((index.shards[1], index.shards[0]))}
    for path in (tmp_path / "cache").iterdir():  # clocks of file systems are coarse
        if path.name in times:
            shard_files.os.utime(path, (times[path.name], times[path.name]))
    open_at_once(cache, index.shards[2])
    cached = {path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"}
    assert cached == {index.shards[0].sha256, index.shards[2].sha256}
    assert still_open.read().count(b"\n") == 9, "a reader that has it open can still read it"
    still_open.close()


def test_a_file_that_is_larger_than_the_cache_is_refused(remote: Remote, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a shard of 1\d\d B does not fit into the cache of 50 B"):
        open_at_once(ShardCache(tmp_path / "cache", 50), read_index(URL).shards[1])


@pytest.mark.parametrize("abandoned", [0, 300_000])
def test_the_size_of_a_decompressed_file_is_bounded(abandoned: int, tmp_path: Path) -> None:
    stored, folder = gzip.compress(bytes(750_000)), tmp_path / "cache"
    (tmp_path / "a.txt.gz").write_bytes(stored)
    shard = ShardFile("a.txt.gz", 1, len(stored), hashlib.sha256(stored).hexdigest())
    folder.mkdir()
    (folder / "aa.part").write_bytes(bytes(abandoned))
    with pytest.raises(DataError, match=r"a\.txt\.gz, with its decompressed .* does not fit"):
        ShardCache(folder, 700_000).open(str(tmp_path / "a.txt.gz"), shard)
    assert not list(folder.glob("*.expanding"))
    ShardCache(folder, 1_000_000).open(str(tmp_path / "a.txt.gz"), shard).close()
    assert (folder / "aa.part").exists() == (not abandoned)
    assert sum(path.stat().st_size for path in folder.iterdir()) == 750_000


def test_a_file_that_another_worker_is_writing_is_not_removed(remote: Remote, tmp_path: Path) -> None:
    one, other = (ShardCache(tmp_path / "cache", 300) for _ in range(2))
    first, second = read_index(URL).shards[:2]

    def convert(file: BinaryIO, rows: BinaryIO) -> None:
        rows.write(bytes(200))
        rows.flush()
        assert open_at_once(other, second).count(b"\n") == 9

    with one.open(f"memory://corpus/{first.url}", first, convert=convert) as rows:
        assert rows.read() == bytes(200)
    cached = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert cached == 200, "the other file was removed"


def test_a_file_that_is_used_by_its_path_stays_as_long_as_it_is_open(remote: Remote, tmp_path: Path) -> None:
    first, second = read_index(URL).shards[:2]
    one, other = (ShardCache(tmp_path / "cache", second.bytes + 1) for _ in range(2))
    for _ in ("fetched", "in the cache"):
        with one.open(f"memory://corpus/{first.url}", first, as_stored=True):
            with pytest.raises(DataError, match=f"in which other runs use {first.bytes} B"):
                open_at_once(other, second)
            assert (tmp_path / "cache" / first.sha256).stat().st_size == first.bytes
    assert open_at_once(other, second).count(b"\n") == 9
    assert not (tmp_path / "cache" / first.sha256).exists()


def test_workers_on_one_machine_fetch_a_file_once(remote: Remote, tmp_path: Path) -> None:
    shard, found = read_index(URL).shards[1], []

    def fetch() -> None:
        found.append(open_at_once(ShardCache(tmp_path / "cache"), shard))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(set(found)) == 1 and len(found) == 4
    assert [name for name in remote.requests if "part" in name] == ["/corpus/part-01.jsonl"]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed_files_are_read_as_plain_ones(
    suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    plain = write_shards(tmp_path / "plain", (4, 6))
    files = []
    for path in sorted(plain.parent.glob("*.jsonl")):
        files.append(tmp_path / (path.name + suffix))
        files[-1].write_bytes(compress(path.read_bytes()))
    cache = ShardCache(tmp_path / "cache")
    write_index(build_index(map(str, files), cache=cache), tmp_path / "index.json")
    data = gridtrain.Shards(tmp_path / "index.json", cache=tmp_path / "cache", decode=number_of)
    assert [data[index] for index in range(10)] == list(range(10))
    files[0].write_bytes(files[0].read_bytes()[:-9])
    cached = list((tmp_path / "cache").glob("*.plain"))
    assert len(cached) == 2
    cached[0].unlink()
    cached[1].unlink()
    with pytest.raises(DataError, match=rf"part-00.jsonl{suffix} is truncated"):
        gridtrain.Shards(tmp_path / "index.json", cache=tmp_path / "cache")[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "is truncated: it is 80 bytes long, but 84"),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"\n"),
            "has changed: it is 85 bytes long, but 84",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-2] + b"?\n"), "has changed: its SHA-256 is"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
    ],
)
def test_a_local_file_that_is_not_the_one_of_the_index_is_an_error(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    data = gridtrain.Shards(write_shards(tmp_path, (3, 6)), decode=number_of)
    damage(tmp_path / "part-01.jsonl")
    assert data[2] == 2
    with pytest.raises(DataError, match=rf"part-01.jsonl {words}.*->"):
        data[3]
    assert data.failed_reads == 1


def test_without_digests_a_damaged_sample_is_named_with_its_position(tmp_path: Path) -> None:
    data = gridtrain.Shards(write_shards(tmp_path, (3, 6)), decode=number_of, verify=False)
    path = tmp_path / "part-01.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"number": 5}', b'{"number"; 5}'))
    assert data[4] == 4
    with pytest.raises(
        DataError, match=r"sample 2 of .*part-01.jsonl \(bytes 28 to 41\) cannot be read: JSON"
    ):
        data[5]
    path.write_bytes(path.read_bytes().replace(b"}\n{", b"} {", 1))
    again = gridtrain.Shards(tmp_path / "index.json", verify=False)
    with pytest.raises(DataError, match="has 5 samples, but 6 according to the index"):
        again[4]


def test_a_protocol_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"other://h/index.json cannot be read: .*other -> install the package"
    ):
        gridtrain.Shards("other://h/index.json")


def test_a_cache_that_cannot_be_written_to_is_named(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match=r"the cache .* cannot be written to: .*XDG_CACHE_HOME"):
        gridtrain.Shards(URL, cache=tmp_path / "cache")[0]


@pytest.mark.parametrize("at", ["copy", "convert"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_named_at_once(at: str, number: int, remote: Remote, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    shard, cache = read_index(URL).shards[1], ShardCache(tmp_path / "cache", retry_after_s=(60.0,))
    words = f"the cache {tmp_path / 'cache'} cannot be written to: {os.strerror(number)} -> free space"
    with pytest.raises(DataError, match=re.escape(words)):
        if at == "copy":
            cache.open(f"memory://corpus/{shard.url}", shard, copy=fails)
        else:
            cache.open(f"memory://corpus/{shard.url}", shard, convert=fails)
    assert cache.failed_reads == 1 and not list((tmp_path / "cache").glob("*.expanding"))


@pytest.mark.parametrize("at", ["copy", "convert"])
def test_on_a_full_disk_files_that_are_not_in_use_are_removed(
    at: str, remote: Remote, tmp_path: Path, monkeypatch: Any
) -> None:
    folder, (first, second, third) = tmp_path / "cache", read_index(URL).shards
    cache, remove, files = ShardCache(folder), shard_files._remove, []

    def copy(place: str, part: Path, *_: object) -> None:
        if at == "copy" and (folder / second.sha256).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part.write_bytes(remote.files.cat(place))

    def convert(file: BinaryIO, rows: BinaryIO) -> None:
        files.extend([rows.fileno(), os.dup(rows.fileno())])
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), rows.fileno())
        rows.write(file.read())

    def remove_and_make_room(path: Path) -> bool:
        is_removed = remove(path)
        if is_removed and files:
            os.dup2(files[1], files[0])
        return is_removed

    monkeypatch.setattr(shard_files, "_remove", remove_and_make_room)
    with cache.open(f"memory://corpus/{first.url}", first, as_stored=True):  # in use
        open_at_once(cache, second)
        place = f"memory://corpus/{third.url}"
        with cache.open(place, third, convert=convert if at == "convert" else None, copy=copy) as file:
            assert file.read().count(b"\n") == third.samples
        assert (folder / first.sha256).exists() and not (folder / second.sha256).exists()
    assert cache.failed_reads == 0
    for number in files[1:]:
        os.close(number)


def test_on_a_full_disk_files_that_are_kept_open_are_closed(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    data = gridtrain.Shards(URL, cache=folder, decode=number_of)
    data[0]
    opened = next(iter(data._open.values()))._file

    def copy(place: str, part: Path, limit_bytes: int, meter: Any) -> None:
        if not opened.closed:  # a removed file that is open still occupies the disk
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        part.write_bytes(remote.files.cat(place))

    data._copy = copy
    assert data[5] == 5
    assert data.failed_reads == 0
