"""A damaged journal is never used and never overwritten, and the error says what to do."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
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


def test_a_changed_number_in_an_entry_is_detected(path: Path) -> None:
    """The file is valid as SQLite and as JSON; only the digests differ."""
    write_journal(path)
    content = path.read_bytes()
    assert content.count(b'"generation":17,') == 1
    path.write_bytes(content.replace(b'"generation":17,', b'"generation":71,'))
    with pytest.raises(JournalError, match="damaged") as caught:
        JournalStore.open(path)
    assert "--from-backup" in caught.value.remedy


@pytest.mark.parametrize("damage", ["flipped bit", "truncated"])
def test_a_torn_wal_after_sigkill_loses_only_its_end(path: Path, damage: str) -> None:
    """SQLite drops the unreadable end of a WAL: there are fewer entries, and none differs."""
    script = (
        "import os, signal, sys; from gridtrain_coordinator.journal.store import JournalStore\n"
        "s = JournalStore.open(sys.argv[1])\n"
        "s.identity(); s.next_term()\n"
        "for n in range(30): s.append_all([('state', {'state': 'training', 'n': n})])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    wal = path.with_name(f"{JOURNAL}-wal")
    content = bytearray(wal.read_bytes())
    assert len(content) > 30_000
    if damage == "truncated":
        del content[len(content) * 2 // 3 :]
    else:
        content[len(content) * 2 // 3] ^= 0x10
    wal.write_bytes(content)
    entries = read_entries(path)
    assert 5 < len(entries) < 31
    assert [entry.body["n"] for entry in entries[1:]] == list(range(len(entries) - 1))


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error(path: Path) -> None:
    entries = write_journal(path)
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with pytest.raises(JournalError) as caught:
            JournalStore.open(path)
        assert "permissions" in caught.value.remedy or "who may write" in caught.value.remedy
    finally:
        path.parent.chmod(0o700)
        path.chmod(0o600)
    assert read_entries(path) == entries


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
