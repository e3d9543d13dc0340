"""A damaged journal is never used and never overwritten, and the error says what to do."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gridtrain.errors import ConfigError, JournalError
from gridtrain_coordinator.journal import store as module
from gridtrain_coordinator.journal.backups import JOURNAL
from gridtrain_coordinator.journal.store import JournalFull, JournalStore, StoredEntry

Seeds = Callable[[int], Iterator[int]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL


def write_journal(path: Path) -> list[StoredEntry]:
    """A journal of a few pages, closed, with its key."""
    store = JournalStore.open(path)
    store.identity()
    store.next_term()
    for number in range(40):
        store.append_all(
            [("generation", {"term": 1, "generation": number, "verdict": "ABORT", "note": "x" * 200})]
        )
    entries = list(store.entries())
    store.close()
    return entries


def read_entries(path: Path) -> list[StoredEntry]:
    store = JournalStore.open(path)
    try:
        store.identity()
        return list(store.entries())
    finally:
        store.close()


def digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes()).digest()


def test_no_flipped_bit_becomes_an_entry(path: Path, seeds: Seeds) -> None:
    """Either the entries are unchanged (the bit was unused), or the error says what to do."""
    entries = write_journal(path)
    whole = path.read_bytes()
    detected = 0
    for seed in seeds(400):
        rng = random.Random(seed)
        position = rng.choice((rng.randrange(100), rng.randrange(len(whole))))  # the header has 100 bytes
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert read_entries(path) == entries, f"byte {position}"
        except (JournalError, ConfigError) as error:
            detected += 1
            assert error.remedy
            assert path.read_bytes() == damaged, f"byte {position}: a refused file is not changed"
        for left in path.parent.glob(f"{JOURNAL}-*"):
            left.unlink()
    assert detected > 0


def test_a_truncated_file_is_refused(path: Path, seeds: Seeds) -> None:
    write_journal(path)
    whole = path.read_bytes()
    for seed in seeds(60):
        length = random.Random(seed).randrange(len(whole))
        path.write_bytes(whole[:length])
        with pytest.raises(JournalError) as caught:
            read_entries(path)
        assert caught.value.remedy
        assert path.read_bytes() == whole[:length], f"truncated at {length}"


def test_an_empty_file_beside_a_key_starts_no_new_run(path: Path) -> None:
    write_journal(path)
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="it is empty, although"):
        JournalStore.open(path)
    assert path.read_bytes() == b""


def test_other_bytes_beside_a_key_are_a_damaged_journal(path: Path) -> None:
    write_journal(path)
    path.write_bytes(b"\xff\xff" + path.read_bytes()[2:])
    with pytest.raises(JournalError, match=r"is damaged \(file is not a database\)") as caught:
        JournalStore.open(path)
    assert "--from-backup" in caught.value.remedy


def test_a_changed_number_in_an_entry_is_detected(path: Path) -> None:
    """The file is valid as SQLite and as JSON; only the digests differ."""
    write_journal(path)
    content = path.read_bytes()
    assert content.count(b'"generation":17,') == 1
    path.write_bytes(content.replace(b'"generation":17,', b'"generation":71,'))
    with pytest.raises(JournalError, match="damaged") as caught:
        JournalStore.open(path)
    assert "--from-backup" in caught.value.remedy


KILLED_AFTER_APPENDS = """
import os, signal, sys; from gridtrain_coordinator.journal.store import JournalStore
s = JournalStore.open(sys.argv[1])
s.identity(); s.next_term()
for n in range(30): s.append_all([('state', {'state': 'training', 'n': n})])
"""
KILLED_DURING_COMMIT = f"""{KILLED_AFTER_APPENDS}
s._connection.execute('PRAGMA cache_size = 1')  # pages are written to the file before the end of the commit
s._connection.create_function('die', 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
with s._transaction():
    for n in range(30, 60): s._insert('state', {{'state': 'paused', 'n': n, 'note': 'x' * 3000}})
    s._connection.execute('SELECT die()')
"""


def killed(script: str, path: Path) -> None:
    text = f"{script}\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", text, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_damage_after_sigkill_loses_no_entry_silently(path: Path, seeds: Seeds) -> None:
    """Either all entries are read (the bytes were unused), or the journal is refused."""
    killed(KILLED_AFTER_APPENDS, path)
    files = {file: file.read_bytes() for file in sorted(path.parent.glob(f"{JOURNAL}*"))}

    def entries_with_damage(file: Path, position: int) -> list[StoredEntry]:
        for name, content in files.items():
            name.write_bytes(content)
        file.write_bytes(files[file][:position] + b"\xff\xff" + files[file][position + 2 :])
        return read_entries(path)

    with pytest.raises(JournalError, match="is damaged"):
        entries_with_damage(path, files[path].index(b'"n":17}'))
    for seed in seeds(200):
        rng = random.Random(seed)
        file = rng.choice(list(files))
        position = rng.randrange(len(files[file]) - 1)
        try:
            entries = entries_with_damage(file, position)
        except (JournalError, ConfigError) as error:
            assert error.remedy
            continue
        assert [entry.body.get("n") for entry in entries] == [None, *range(30)], f"{file.name}: {position}"


@pytest.mark.parametrize("damage", ["none", "two bytes", "truncated"])
def test_a_commit_that_sigkill_interrupted_is_rolled_back(path: Path, damage: str, seeds: Seeds) -> None:
    """If the rollback journal is also damaged, the journal may be refused, but no entry differs."""
    killed(KILLED_DURING_COMMIT, path)
    rollback = path.with_name(f"{JOURNAL}-journal")
    content, undo = path.read_bytes(), rollback.read_bytes()
    assert b"xxxxxxxx" in content and undo[0] != 0, "the file contains a part of the commit"
    for seed in seeds(1 if damage == "none" else 40):
        rng = random.Random(seed)
        position = rng.randrange(len(undo) - 1)
        damaged = bytearray(undo)
        if damage == "two bytes":
            damaged[position : position + 2] = b"\xff\xff"
        elif damage == "truncated":
            del damaged[position:]
        path.write_bytes(content)
        rollback.write_bytes(damaged)
        try:
            entries = read_entries(path)
        except (JournalError, ConfigError) as error:
            assert damage != "none" and error.remedy
            continue
        numbers = [entry.body.get("n") for entry in entries]
        assert numbers == [None, *range(len(numbers) - 1)] and len(numbers) > 30, f"{position}"
        assert damage != "none" or len(numbers) == 31


def test_another_programs_database_is_not_touched(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    connection.close()
    before = digest(path)
    with pytest.raises(JournalError, match="another program's database") as caught:
        JournalStore.open(path)
    assert caught.value.remedy
    assert digest(path) == before and os.listdir(path.parent) == [JOURNAL]


def test_a_newer_journal_is_not_touched(path: Path) -> None:
    write_journal(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    before = digest(path)
    with pytest.raises(JournalError, match="version 9; this gridtrain supports versions up to 4") as caught:
        JournalStore.open(path)
    assert "newer" in caught.value.remedy and digest(path) == before


def test_a_failed_first_start_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_migrations", lambda: ["CREATE TABLE broken (;"])
    with pytest.raises(JournalError):
        JournalStore.open(path)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("modes", [(0o400, 0o700), (0o600, 0o500), (0o400, 0o500), (0o000, 0o700)])
def test_a_folder_or_file_that_is_not_writable_is_an_error(modes: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not `tmp_path`, which only this user may enter
        path = Path(folder) / JOURNAL
        entries = write_journal(path)
        path.chmod(modes[0])
        path.parent.chmod(modes[1])
        with (
            without_privileges(path),
            pytest.raises(JournalError, match=r"is read-only|cannot be opened") as caught,
        ):
            JournalStore.open(path)
        assert "check who owns the folder and its files" in caught.value.remedy
        path.parent.chmod(0o700)
        path.chmod(0o600)
        assert read_entries(path) == entries


@contextmanager
def without_privileges(path: Path) -> Iterator[None]:
    """Run as a user that owns the file and its folder, but is not root."""
    if os.geteuid() != 0:
        yield
        return
    nobody = 65534
    os.chown(path, nobody, nobody)
    os.chown(path.parent, nobody, nobody)
    os.seteuid(nobody)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("whole_folder", [False, True])
def test_an_open_journal_that_was_moved_is_missing_until_it_is_back(path: Path, whole_folder: bool) -> None:
    write_journal(path)
    store = JournalStore.open(path)
    here = path.parent if whole_folder else path
    assert not store.is_missing and not JournalStore.open(module.MEMORY).is_missing
    away = here.rename(here.with_name("away"))
    assert store.is_missing
    store.next_term()
    away.rename(here)
    assert not store.is_missing
    store.close()
    assert read_entries(path)[-1].kind == "term", "SQLite has written to the moved file"


def test_an_append_that_does_not_fit_changes_nothing(path: Path) -> None:
    store = JournalStore.open(path)
    store.append_all([("state", {"n": 1})])
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalFull, match="the disk is full"):
        store.append_all([("state", {"n": 2}), ("state", {"note": "x" * 50_000})])
    store._connection.execute("PRAGMA max_page_count = 100000")
    store.append_all([("state", {"n": 3})])
    assert [entry.body["n"] for entry in store.entries()] == [1, 3]
    store.close()
    assert [entry.body["n"] for entry in JournalStore.open(path).entries()] == [1, 3], (
        "the chain of digests continues"
    )


class FailingCommit:
    """A connection whose commit fails as over NFS, which writes late."""

    def __init__(self, connection: sqlite3.Connection, code: str, is_committed: bool) -> None:
        self.connection, self.code, self.is_committed = connection, code, is_committed

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)

    def execute(self, command: str, *values: object) -> sqlite3.Cursor:
        if command != "COMMIT":
            return self.connection.execute(command, *values)
        self.connection.execute("COMMIT" if self.is_committed else "ROLLBACK")
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = self.code
        raise error


@pytest.mark.parametrize("is_early", [False, True], ids=["", "without digests"])
@pytest.mark.parametrize(
    ("code", "is_committed", "number", "text"),
    [
        ("SQLITE_IOERR_FSYNC", False, errno.EDQUOT, "the disk quota is used up"),
        ("SQLITE_IOERR_TRUNCATE", False, errno.ENOSPC, "the disk is full"),
        ("SQLITE_IOERR_FSYNC", False, errno.EIO, "cannot be read or written"),
        ("SQLITE_IOERR_DIR_FSYNC", True, errno.EDQUOT, "cannot be read or written"),
    ],
)
def test_a_commit_beyond_a_quota_can_be_repeated_if_it_was_rolled_back(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    is_committed: bool,
    number: int,
    text: str,
    is_early: bool,
) -> None:
    """Otherwise the entries would be written twice."""

    def fail(**options: object) -> None:
        raise OSError(number, os.strerror(number))

    store = JournalStore.open(path)
    store.append_all([("state", {"n": 1})])
    store.close()
    if is_early:
        with contextlib.closing(sqlite3.connect(path)) as early:
            early.execute("DROP TRIGGER journal_is_not_changed")
            early.execute("UPDATE journal SET chain = NULL")
            early.commit()
    store = JournalStore.open(path)
    connection = store._connection
    store._connection = FailingCommit(connection, code, is_committed)  # type: ignore[assignment]
    monkeypatch.setattr(module.tempfile, "TemporaryFile", fail)
    with pytest.raises(JournalError, match=text) as raised:
        store.append_all([("state", {"n": 2})])
    is_full = isinstance(raised.value, JournalFull)
    assert is_full is (not is_committed and number != errno.EIO)
    store._connection = connection
    if is_full:
        store.append_all([("state", {"n": 2})])
        assert [entry.body["n"] for entry in store.entries()] == [1, 2]
    store.close()


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO])
def test_an_append_beyond_a_disk_quota_can_be_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """SQLite reports an I/O error for both; here the largest size of a file causes it."""

    def fail(**options: object) -> None:
        raise OSError(number, os.strerror(number))

    store = JournalStore.open(path)
    store.append_all([("state", {"n": 1})])
    monkeypatch.setattr(module.tempfile, "TemporaryFile", fail)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        with pytest.raises(JournalError) as raised:
            store.append_all([("state", {"note": "x" * 50_000})])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(raised.value, JournalFull) is (number == errno.EDQUOT)
    assert ("quota" in str(raised.value)) is (number == errno.EDQUOT)
    store.append_all([("state", {"n": 2})])
    assert [entry.body["n"] for entry in store.entries()] == [1, 2]
    store.close()
