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


def written(path: Path) -> list[StoredEntry]:
    """A journal of a few pages, closed, with its key."""
    store = JournalStore.open(path)
    store.identity()
    store.next_term()
    for number in range(40):
        store.append("generation", {"term": 1, "generation": number, "verdict": "ABORT", "note": "x" * 200})
    entries = store.entries()
    store.close()
    return entries


def opened(path: Path) -> list[StoredEntry]:
    store = JournalStore.open(path)
    try:
        store.identity()
        return store.entries()
    finally:
        store.close()


def digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes()).digest()


def test_no_flipped_bit_becomes_an_entry(path: Path, seeds: Seeds) -> None:
    """Wherever it is: either nothing has changed (the bit meant nothing), or the error says what to do."""
    entries = written(path)
    whole = path.read_bytes()
    told = 0
    for seed in seeds(400):
        rng = random.Random(seed)
        place = rng.choice((rng.randrange(100), rng.randrange(len(whole))))  # the header has 100 bytes
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << rng.randrange(8)
        path.write_bytes(spoilt)
        try:
            assert opened(path) == entries, f"byte {place}"
        except (JournalError, ConfigError) as error:
            told += 1
            assert error.remedy
            assert path.read_bytes() == spoilt, f"byte {place}: a file that is refused stays as it was"
        for left in path.parent.glob(f"{JOURNAL}-*"):
            left.unlink()
    assert told > 0


def test_a_file_that_was_cut_short(path: Path, seeds: Seeds) -> None:
    written(path)
    whole = path.read_bytes()
    for seed in seeds(60):
        length = random.Random(seed).randrange(len(whole))
        path.write_bytes(whole[:length])
        with pytest.raises(JournalError) as caught:
            opened(path)
        assert caught.value.remedy
        assert path.read_bytes() == whole[:length], f"cut at {length}"


def test_an_empty_file_is_no_new_run_where_there_was_one(path: Path) -> None:
    written(path)
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="it is empty, although"):
        JournalStore.open(path)
    assert path.read_bytes() == b""


def test_a_number_in_an_entry_was_changed(path: Path) -> None:
    """Valid as SQLite and as JSON: only the digests reveal it."""
    written(path)
    content = path.read_bytes()
    assert content.count(b'"generation":17,') == 1
    path.write_bytes(content.replace(b'"generation":17,', b'"generation":71,'))
    with pytest.raises(JournalError, match="damaged") as caught:
        JournalStore.open(path)
    assert "--from-backup" in caught.value.remedy


@pytest.mark.parametrize("place", ["a page", "the WAL"])
def test_after_sigkill_a_torn_wal_costs_its_end_and_no_more(path: Path, place: str) -> None:
    """What SQLite cannot read of a WAL was never written: entries end earlier, and none differs."""
    script = (
        "import os, signal, sys; from gridtrain_coordinator.journal.store import JournalStore\n"
        "s = JournalStore.open(sys.argv[1])\n"
        "s.identity(); s.next_term()\n"
        "for n in range(30): s.append('state', {'state': 'training', 'n': n})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    wal = path.with_name(f"{JOURNAL}-wal")
    content = bytearray(wal.read_bytes())
    assert len(content) > 30_000
    if place == "the WAL":
        del content[len(content) * 2 // 3 :]
    else:
        content[len(content) * 2 // 3] ^= 0x10
    wal.write_bytes(content)
    entries = opened(path)
    assert 5 < len(entries) < 31
    assert [entry.body["n"] for entry in entries[1:]] == list(range(len(entries) - 1))


def test_another_programs_database_is_not_touched(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    connection.close()
    before = digest(path)
    with pytest.raises(JournalError, match="another program's"):
        JournalStore.open(path)
    assert digest(path) == before and os.listdir(path.parent) == [JOURNAL]


def test_a_newer_journal_is_not_touched(path: Path) -> None:
    written(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    before = digest(path)
    with pytest.raises(JournalError, match="version 9") as caught:
        JournalStore.open(path)
    assert "newer" in caught.value.remedy and digest(path) == before


def test_a_failed_first_start_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_migrations", lambda: ["CREATE TABLE broken (;"])
    with pytest.raises(JournalError):
        JournalStore.open(path)
    assert os.listdir(path.parent) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(path: Path) -> None:
    entries = written(path)
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with pytest.raises(JournalError) as caught:
            JournalStore.open(path)
        assert "permissions" in caught.value.remedy or "who may write" in caught.value.remedy
    finally:
        path.parent.chmod(0o700)
        path.chmod(0o600)
    assert opened(path) == entries


def test_what_does_not_fit_is_as_if_it_had_not_been_tried(path: Path) -> None:
    store = JournalStore.open(path)
    store.append("state", {"n": 1})
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalFull, match="the disk is full"):
        store.append_all([("state", {"n": 2}), ("state", {"note": "x" * 50_000})])
    store._connection.execute("PRAGMA max_page_count = 100000")
    store.append("state", {"n": 3})
    assert [entry.body["n"] for entry in store.entries()] == [1, 3]
    store.close()
    assert [entry.body["n"] for entry in JournalStore.open(path).entries()] == [1, 3], "its digests go on too"
