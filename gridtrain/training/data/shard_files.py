"""The files of a sharded data set: the cache and its limit, retries, digests and decompression.

    path, file://...            opened where it is, after its size and digest were compared with the index
    https://, s3://, hf:// ...  fetched into the cache (`shard_fetch`), resumed if interrupted, and compared
    .gz, .bz2, .xz, .zst        compared, then decompressed into the cache
    .parquet, .arrow            compared, then converted and written to the cache (`shard_tables`)

The cache is a folder that all workers on a machine may share.  Its files are named by their digests, so each
is fetched once, and the least recently used ones are removed when the cache is full.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import logging
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from gridtrain.errors import DISK_FULL, BudgetSpent, ConfigError, DataError
from gridtrain.extras import require
from gridtrain.quantities import format_bytes, parse_bytes, shorten
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.shard_fetch import (
    BRIEF_S,
    CHUNK_BYTES,
    RETRY_AFTER_S,
    Copy,
    FetchRetries,
    copy_rest,
    describe,
    file_system,
    open_remote,
    path_of,
    refuse_credentials,
)

log = logging.getLogger("gridtrain")

MAX_URL = 2000
"""The maximum number of characters in a URL in an index."""

DEFAULT_LIMIT_BYTES = 20 * 10**9
LIMIT = "GRIDTRAIN_CACHE_LIMIT"
"""The environment variable with the volunteer's limit on the cache; it takes precedence over the script's
limit."""

_UNFINISHED = (".part", ".expanding")
"""The suffixes of files that a worker writes while it holds the lock of the same name."""

_DISK_ERRORS = (*DISK_FULL, errno.EROFS)
_CHANGED = (
    "fetch the file again; if the new file is the right one, regenerate the index with "
    "`gridtrain data index` and give it to all workers"
)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a data set, as the index describes it.

    Attributes:
        url: a URL, a path, or a path relative to the folder of the index.
        bytes, sha256: the size and digest of the file as it is stored.
        tokens: the number of tokens in all samples; 0 if they were not counted.
    """

    url: str
    samples: int
    bytes: int
    sha256: str
    tokens: int = 0

    @property
    def problem(self) -> str:
        """What is wrong with an entry that was read from an index; "" if nothing is."""
        if not isinstance(self.url, str) or not 0 < len(self.url) <= MAX_URL or not self.url.isprintable():
            return f"url is {self.url!r:.200}; it must be a path or a URL of at most {MAX_URL} characters"
        counts = (self.samples, self.bytes, self.tokens)
        if any(type(count) is not int or not 0 <= count < 2**53 for count in counts):
            return f"samples, bytes and tokens are {counts}; they must be integers >= 0 and below 2**53"
        is_digest = isinstance(self.sha256, str) and re.fullmatch("[0-9a-f]{64}", self.sha256)
        return "" if is_digest else f"sha256 is {self.sha256!r}; it must be 64 lower-case hexadecimal digits"


# -- places ----------------------------------------------------------------------------------------------


def is_local(place: str) -> bool:
    return "://" not in place or place.startswith("file://")


def local_path(place: str) -> str:
    return place.removeprefix("file://")


def join(base: str, url: str) -> str:
    """Resolve a URL, which may be relative to `base`."""
    return url if "://" in url else posixpath.join(base, url)


def public_name(url: str) -> str:
    """Return a URL from an index, in at most 200 bytes and without what other members should not see:
    credentials, the query, the folder of an absolute path."""
    if is_local(url):
        path = local_path(url)
        return shorten(posixpath.basename(path) if posixpath.isabs(path) else path, 200)
    return shorten(re.sub("://[^/]*@", "://", path_of(url).partition("?")[0]), 200)


def expand(name: str) -> list[str]:
    """Return the paths or URLs that match a name with `*` (in paths also `?` and `[...]`), in ascending
    order.

    Raises `ConfigError` if no file on this machine or at the URL matches, or if the URL is invalid, cannot be
    listed, or contains a password.
    """
    refuse_credentials(name)
    if not is_local(name) and "*" not in name:
        return [name]
    if is_local(name):
        path = local_path(name)
        found = sorted(each for each in glob.glob(path) if os.path.isfile(each)) or [path]
        if not os.path.isfile(found[0]):
            what = "is a folder" if os.path.isdir(path) else "does not exist, or matches no file"
            raise ConfigError(
                f"{name} {what}", remedy=f"name files, such as {posixpath.dirname(name) or '.'}/*.jsonl"
            )
        return found
    system, path = file_system(name)
    try:
        found = sorted(system.unstrip_protocol(each) for each in system.glob(path))
    except Exception as error:  # file systems of fsspec raise errors of the libraries they use
        raise ConfigError(
            f"{name} cannot be listed: {describe(error)}",
            remedy="check the URL, the connection and the credentials",
        ) from None
    if not found:
        raise ConfigError(f"no file matches {name}", remedy="check the URL")
    return found


def read_bytes(place: str, max_bytes: int) -> bytes:
    """Return the contents of a small file.

    Raises `ValueError` if it is larger than `max_bytes`, `OSError` if it cannot be read, and `ConfigError` if
    its URL is not of a supported kind or needs a package that is not installed.
    """
    try:
        with open_remote(place) if not is_local(place) else open(local_path(place), "rb") as file:
            contents: bytes = file.read(max_bytes + 1)
    except (OSError, ConfigError):
        raise
    except Exception as error:  # of the library that fsspec uses, or because it is not installed
        raise OSError(describe(error)) from None
    if len(contents) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return contents


def _decompressor(place: str) -> Callable[..., BinaryIO] | None:
    """Return a function that opens a compressed file; None if the name has no compression suffix.  Raises
    `ConfigError` if a package for the compression is not installed."""
    place = path_of(place)
    if not place.endswith((".gz", ".bz2", ".xz", ".zst")):
        return None
    require("fsspec", f"reading the compressed file {place}")
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    name = infer_compression(place)
    if name not in compr:
        raise ConfigError(
            f"{place} is compressed by a method whose package is not installed",
            remedy="pip install zstandard, or decompress the files and regenerate the index",
        )
    opened: Callable[..., BinaryIO] = compr[name]
    return opened


def parse_limit(name: str, text: str) -> int:
    """Parse a size in bytes.  Raises `ConfigError` if `text` is not a size; the message begins with
    `name`."""
    if limit_bytes := parse_bytes(text):
        return limit_bytes
    raise ConfigError(f"{name} is {text!r}", remedy='use a size such as "20GB"')


Convert = Callable[[BinaryIO, BinaryIO], None]
"""A function that reads a file, and writes it in another form."""


def copy_plain(file: BinaryIO, plain: BinaryIO) -> None:
    shutil.copyfileobj(file, plain, CHUNK_BYTES)


# -- the cache ---------------------------------------------------------------------------------------------


class ShardCache:
    """Opens the files of a data set; keeps copies of remote files, and decompressed or converted files.

    Args:
        folder: by default `$XDG_CACHE_HOME/gridtrain/shards`.
        limit_bytes: the size above which files are removed from the cache; a file that is opened must fit.
        retry_after_s: the waits before further attempts; see `RETRY_AFTER_S`.
        meter: the meter that counts and limits the bytes that are fetched; by default a `FetchMeter`, which
            imports torch.

    Attributes:
        failed_reads: the number of failed attempts at fetching or opening a file.
        close_idle: a function that is called when the disk is full; it closes files that the caller does not
            need at present, and returns whether there were any.
        note_outage: a function that is called with True before each wait for a server if the waits then
            exceed `BRIEF_S` in total, and with False whenever bytes arrive.
    """

    close_idle: Callable[[], bool] = staticmethod(lambda: False)
    note_outage: Callable[[bool], None] = staticmethod(lambda is_long: None)

    def __init__(
        self,
        folder: Path | None = None,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        retry_after_s: Sequence[float] = RETRY_AFTER_S,
        meter: FetchMeter | None = None,
    ) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self.folder = folder or Path(home) / "gridtrain" / "shards"
        self._limit_bytes, self._retry_after_s = limit_bytes, tuple(retry_after_s)
        self.meter = FetchMeter() if meter is None else meter
        self.failed_reads = 0

    def open(
        self,
        place: str,
        expected: ShardFile,
        *,
        compares_digest: bool = True,
        convert: Convert | None = None,
        as_stored: bool = False,
        copy: Copy = copy_rest,
    ) -> BinaryIO:
        """Open a file, decompressed and converted, after comparing it with the index.

        Args:
            compares_digest: whether to compare the digest, and not only the size, of a file that is opened
                where it is; the digests of other files are compared when they enter the cache.
            convert: a function that writes the file in another form, which is opened instead.
            as_stored: whether to skip decompression; a remote file then stays at `folder / expected.sha256`
                while it is open, and its digest is compared even if it was fetched earlier.
            copy: a function that copies a remote file.

        Raises:
            BudgetSpent: the traffic budget does not suffice to fetch the file.
            ConfigError: a package that is needed to read the file is not installed.
            DataError: the file cannot be read, does not match the index, or does not fit into the cache.
        """
        expand_file = None if as_stored else _decompressor(place)
        suffix = ".rows" if convert else ".plain" if expand_file else ""
        if is_local(place) and not suffix:
            file = self._open_local(place)
            self._compare(file, place, expected, compares_digest)
            return file
        with self._locked(expected.sha256):
            kept = self.folder / f"{expected.sha256}{suffix}"
            with suppress(FileNotFoundError):
                opened = self._open_kept(kept, as_stored)
                is_whole = suffix or os.fstat(opened.fileno()).st_size == expected.bytes
                if is_whole and (not as_stored or _sha256(opened) == expected.sha256):
                    opened.seek(0)
                    return opened
                opened.close()
                kept.unlink()
            raw = self._fetch_compared(place, expected, copy)
            new = self._expand(raw, kept, place, expand_file, convert or copy_plain) if suffix else raw
            if suffix and not is_local(place):
                raw.unlink()
            opened = self._open_kept(kept, as_stored, new)
            try:
                self._make_room(0, expected.sha256)
            except DataError:
                opened.close()
                raise
            return opened

    def _open_kept(self, kept: Path, stays: bool, new: Path | None = None) -> BufferedReader:
        """Open a file in the cache.

        Args:
            stays: whether the file must not be removed from the cache while it is open.
            new: a file that first replaces `kept`.

        Raises:
            FileNotFoundError: the file is not in the cache.
        """
        with self._locked("room"):  # nothing is removed in the meantime
            if new is not None:
                new.replace(kept)
            os.utime(kept)
            opened = kept.open("rb")
            if stays:
                fcntl.flock(opened, fcntl.LOCK_SH)
            return opened

    def open_unknown(
        self, place: str, convert: Convert | None = None, copy: Copy = copy_rest
    ) -> tuple[BinaryIO, int, str]:
        """Open a file that has no entry in an index yet, decompressed and converted; return the opened file,
        and the size and the SHA-256 of the file as it is stored.

        Raises:
            BudgetSpent, ConfigError: as `open` does.
            DataError: the file cannot be read, or does not fit into the cache.
        """
        if is_local(place):
            with self._open_local(place) as file:
                nbytes, sha256 = os.fstat(file.fileno()).st_size, _sha256(file)
        else:
            name = hashlib.sha256(place.encode()).hexdigest()
            with self._locked(name):
                (self.folder / f"{name}.part").unlink(missing_ok=True)  # may belong to an earlier file
                raw = self._fetch(place, ShardFile(place, 0, 0, name), copy)
                with raw.open("rb") as file:
                    nbytes, sha256 = os.fstat(file.fileno()).st_size, _sha256(file)
                raw.replace(self.folder / f"{sha256}.part")
        found = ShardFile(place, 0, nbytes, sha256)
        opened = self.open(place, found, compares_digest=False, convert=convert)
        if not is_local(place):
            (self.folder / f"{sha256}.part").unlink(missing_ok=True)
        return opened, nbytes, sha256

    def _open_local(self, place: str) -> BufferedReader:
        try:
            return open(local_path(place), "rb")
        except OSError as error:
            self.failed_reads += 1
            raise DataError(
                f"{place} cannot be read: {error.strerror or error}",
                kind=error.strerror or type(error).__name__,
                remedy="copy the file to this machine, or pass the folder that has it as root=",
            ) from None

    def _compare(self, file: BufferedReader, place: str, expected: ShardFile, compares_digest: bool) -> None:
        """Raise `DataError` unless the size and digest match those recorded in the index."""
        size = os.fstat(file.fileno()).st_size
        found = what = ""
        if size != expected.bytes:
            what = "is truncated" if size < expected.bytes else "has changed"
            found = f"{what}: it is {size} bytes long, but {expected.bytes} according to the index"
        elif compares_digest and (sha256 := _sha256(file)) != expected.sha256:
            what = "has changed"
            found = f"{what}: its SHA-256 is {sha256[:12]}, but {expected.sha256[:12]} in the index"
        file.seek(0)
        if found:
            self.failed_reads += 1
            raise DataError(f"{place} {found}", kind=what, remedy=_CHANGED)

    def _fetch_compared(self, place: str, expected: ShardFile, copy: Copy) -> Path:
        """Return the path of the file as it is stored, after comparing it with the index.  Raises the same
        errors as `open`."""
        for is_last in (False, True):
            is_resumed, failed_before = (self.folder / f"{expected.sha256}.part").exists(), self.failed_reads
            raw = self._fetch(place, expected, copy)
            is_resumed = is_resumed or self.failed_reads > failed_before
            with raw.open("rb") as file:
                try:
                    self._compare(file, place, expected, True)
                    break
                except DataError:
                    if is_local(place):
                        raise
                    is_short = raw.stat().st_size < expected.bytes
                    raw.unlink()  # so that the next attempt does not resume it
                    if is_last or not (is_resumed or is_short):  # parts of another file, or a login page
                        raise
        return raw

    def _fetch(self, place: str, expected: ShardFile, copy: Copy) -> Path:
        """Return the path of the file as it is stored, after copying it to this machine if necessary.  Raises
        the same errors as `open`."""
        if is_local(place):
            self._open_local(place).close()
            return Path(local_path(place))
        part = self.folder / f"{expected.sha256}.part"
        present = part.stat().st_size if part.exists() else 0
        self._make_room(max(0, expected.bytes - present), expected.sha256)
        retries = FetchRetries(place, self._retry_after_s)
        self.meter.bytes_arrived = partial(self.note_outage, False)
        while True:
            try:
                may_be_longer = copy(place, part, expected.bytes or self._limit_bytes, self.meter)
                if may_be_longer and (size := part.stat().st_size) < expected.bytes:
                    raise EOFError(
                        f"a response without a length ended after {size} of {expected.bytes} bytes"
                    )
                return part
            except BudgetSpent:
                raise  # the partial file is resumed later
            except Exception as error:  # file systems of fsspec raise errors of the libraries they use
                done = part.stat().st_size if part.exists() else 0
                if self._freed_disk(error, expected.bytes - done, expected.sha256):
                    continue
                self.failed_reads += 1
                if isinstance(error, DataError | ConfigError):
                    part.unlink(missing_ok=True)
                    raise
                if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                    raise self._unwritable(error) from None
                wait_s = retries.wait_after(error, done)
                if retries.waited_s > BRIEF_S:
                    self.note_outage(True)
                self.meter.wait(wait_s)

    def _expand(
        self,
        raw: Path,
        kept: Path,
        place: str,
        expand_file: Callable[..., BinaryIO] | None,
        convert: Convert,
    ) -> Path:
        """Write the decompressed or converted form of a file, within the cache's limit; return its path."""
        temporary = kept.with_suffix(".expanding")
        what = f"{place}, with its decompressed or converted form,"
        make_room = partial(self._make_room, own=kept.stem, what=what)
        free_disk = partial(self._freed_disk, own=kept.stem)
        try:
            with (
                raw.open("rb") as file,
                BufferedWriter(_BoundedFile(temporary, make_room, free_disk), CHUNK_BYTES) as plain,
            ):
                convert(file if expand_file is None else expand_file(file, mode="rb"), plain)
        except (ConfigError, DataError):  # a package is missing, or there is no room
            temporary.unlink(missing_ok=True)
            raise
        except Exception as error:  # each compression and format raises its own errors
            temporary.unlink(missing_ok=True)
            self.failed_reads += 1
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise self._unwritable(error) from None
            what = f"cannot be {'decompressed' if expand_file else 'converted'}"
            raise DataError(f"{place} {what}: {describe(error)}", kind=what, remedy=_CHANGED) from None
        return temporary

    def _make_room(self, nbytes: int, own: str, what: str = "a shard") -> None:
        """Remove the least recently used files until `nbytes` more fit.

        Files in use are counted, but not removed.  Files that other workers are writing may make the cache
        exceed its limit.

        Args:
            own: the digest of the file that needs the room, whose lock the caller holds.
            what: the file, for the message.

        Raises:
            DataError: the cache is too small.
        """
        with self._locked("room"):  # otherwise `_remove` could find a lock held by another worker's `_remove`
            files, needed = self._files_except(own), nbytes
            for path in self.folder.glob(f"{own}*"):
                with suppress(FileNotFoundError):
                    needed += path.stat().st_size
            free, used = self._limit_bytes - needed - sum(size for _, size, _ in files), 0
            for _, size, path in files if needed <= self._limit_bytes else ():
                if free >= 0:
                    break
                if _remove(path):
                    free += size
                elif path.suffix not in _UNFINISHED:
                    used += size
            if needed + used > self._limit_bytes:
                others = f", in which other runs use {format_bytes(used)}" if used else ""
                raise DataError(
                    f"{what} of {format_bytes(needed)} does not fit into the cache of "
                    f"{format_bytes(self._limit_bytes)}{others}",
                    kind="does not fit into the cache",
                    remedy="use a larger cache_limit= (volunteers: --cache-limit), or smaller files",
                )

    def _freed_disk(self, error: Exception, nbytes: int, own: str) -> bool:
        """If `error` says that the disk is full, remove the least recently used files, with at least `nbytes`
        in total, or all files that are not in use; return whether any file was removed or closed.

        Args:
            own: as for `_make_room`.
        """
        if not isinstance(error, OSError) or error.errno not in DISK_FULL:
            return False
        has_closed, freed = self.close_idle(), 0
        with self._locked("room"):
            for _, size, path in self._files_except(own):
                if freed >= max(1, nbytes):
                    break
                if _remove(path):
                    freed += size
        if freed:
            log.warning("the disk of the cache %s is full: %s were removed", self.folder, format_bytes(freed))
        return has_closed or freed > 0

    def _files_except(self, own: str) -> list[tuple[float, int, Path]]:
        """Return (time of the last use, size, path) of the cache's files that do not have the digest `own`,
        the least recently used first."""
        files = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # a worker has renamed or removed it
                status = path.stat()
                if path.stem != own and path.suffix != ".lock":
                    files.append((status.st_mtime, status.st_size, path))
        return sorted(files)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the cache's lock `name`; other workers, including those in other processes, wait for it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / f"{name}.lock").open("w")
        except OSError as error:
            raise self._unwritable(error) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"the cache {self.folder} cannot be written to: {error.strerror}",
            kind=f"the cache cannot be written to ({error.strerror})",
            remedy="free space on that disk, or set XDG_CACHE_HOME (or cache=) to a folder on another disk",
        )


class _BoundedFile(FileIO):
    """A file that makes room in the cache, and on a full disk, for the data written to it."""

    def __init__(
        self, path: Path, make_room: Callable[[int], None], free_disk: Callable[[Exception, int], bool]
    ) -> None:
        super().__init__(path, "wb")
        self._make_room, self._free_disk = make_room, free_disk

    def write(self, data: Any, /) -> int:
        nbytes = memoryview(data).nbytes
        self._make_room(nbytes)
        while True:
            try:
                return super().write(data)
            except OSError as error:
                if not self._free_disk(error, nbytes):
                    raise


def _remove(path: Path) -> bool:
    """Remove a file from the cache unless it is in use; return whether it was removed."""
    lock = path.with_suffix(".lock") if path.suffix in _UNFINISHED else path
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # a worker that has it open can still read it
    except BlockingIOError:
        return False
    return True


def _sha256(file: BufferedReader) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
