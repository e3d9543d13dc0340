"""The journal survives what kills a coordinator, and says clearly what is wrong with a file."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gridtrain.errors import JournalError
from gridtrain_coordinator import store as module
from gridtrain_coordinator.store import Store

GENERATION = {
    "term": 1,
    "generation": 1,
    "step": 0,
    "verdict": "ABORT",
    "digest": "ab",
    "members": [],
    "ledger": {},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_a_journal_reads_as_it_was_written(path: Path) -> None:
    store = Store.open(path)
    assert store.next_term() == 1
    store.append("run", {"facts": {"model": "120576 parameters"}})
    store.append_all([("generation", GENERATION), ("state", {"state": "training"})])
    store.close()

    entries = Store.open(path).entries()
    assert [(entry.id, entry.kind, entry.body) for entry in entries] == [
        (1, "term", {"term": 1}),
        (2, "run", {"facts": {"model": "120576 parameters"}}),
        (3, "generation", GENERATION),
        (4, "state", {"state": "training"}),
    ]
    assert all(entry.at.endswith("+00:00") for entry in entries)


def test_every_start_is_a_new_term_and_the_key_stays(path: Path) -> None:
    seen = []
    for _ in range(3):
        store = Store.open(path)
        seen.append((store.next_term(), store.identity()))
        store.close()
    key = seen[0][1]
    assert seen == [(1, key), (2, key), (3, key)] and len(key) == 32


def test_the_cores_own_term_entry_does_not_count_twice(path: Path) -> None:
    store = Store.open(path)
    term = store.next_term()
    store.append("term", {"term": term, "run": "default"})
    assert store.next_term() == term + 1


DIES_AFTER_APPEND = """
import os, signal, sys
from gridtrain_coordinator.store import Store
store = Store.open(sys.argv[1])
store.next_term()
store.append("state", {"state": "training"})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_appended_survives_sigkill(path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES_AFTER_APPEND, str(path)], timeout=60)
    assert died.returncode == -signal.SIGKILL
    store = Store.open(path)  # the lock died with its process
    assert [entry.kind for entry in store.entries()] == ["term", "state"]
    assert store.next_term() == 2


def test_a_commit_waits_for_the_disk(path: Path) -> None:
    store = Store.open(path)
    (synchronous,) = store._connection.execute("PRAGMA synchronous").fetchone()
    assert synchronous == 2, "2 is FULL"


def test_entries_of_one_call_become_durable_together_or_not_at_all(path: Path) -> None:
    store = Store.open(path)
    with pytest.raises(JournalError, match="refused"):
        store.append_all([("state", {"state": "training"}), ("gossip", {})])
    assert store.entries() == []
    store.append("state", {"state": "paused"})  # and it goes on
    assert len(store.entries()) == 1


def test_a_journalled_verdict_never_changes(path: Path) -> None:
    store = Store.open(path)
    store.append("generation", GENERATION)
    with pytest.raises(JournalError):
        store.append("generation", {**GENERATION, "verdict": "COMMIT"})
    for change in ("UPDATE journal SET body = '{}'", "DELETE FROM journal"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store._connection.execute(change)
    assert [entry.body for entry in store.entries()] == [GENERATION]


def test_generations_can_be_read_as_a_table(path: Path) -> None:
    store = Store.open(path)
    store.append("generation", GENERATION)
    row = store._connection.execute(
        "SELECT term, generation, step, verdict, digest FROM generations"
    ).fetchone()
    assert row == (1, 1, 0, "ABORT", "ab")


# -- migrations ------------------------------------------------------------------------------------

FIRST, SECOND = module._migrations()[0], "CREATE TABLE links (a, b);"


def test_migrations_are_applied_once_and_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(path)
    store.next_term()
    store.close()
    monkeypatch.setattr(module, "_migrations", lambda: [FIRST, SECOND])
    for _ in range(2):  # the second time there is nothing to do
        store = Store.open(path)
        assert store._connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert store._connection.execute("SELECT count(*) FROM links").fetchone() == (0,)
        assert [entry.kind for entry in store.entries()] == ["term"]
        store.close()


def test_a_migration_that_fails_leaves_no_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(path).close()
    monkeypatch.setattr(module, "_migrations", lambda: [FIRST, SECOND + "CREATE TABLE links (again);"])
    with pytest.raises(JournalError):
        Store.open(path)
    monkeypatch.undo()
    store = Store.open(path)
    assert store._connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert store._connection.execute("SELECT name FROM sqlite_master WHERE name = 'links'").fetchall() == []


# -- what can be wrong with a file -----------------------------------------------------------------


def complaint(path: Path) -> str:
    with pytest.raises(JournalError) as caught:
        Store.open(path)
    assert caught.value.remedy, "says what to do next"
    return caught.value.reason


def test_no_directory(tmp_path: Path) -> None:
    assert "does not exist" in complaint(tmp_path / "missing" / "journal.sqlite")


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    assert "cannot be opened" in complaint(tmp_path)


def test_not_a_database(path: Path) -> None:
    path.write_text("these are my notes, " * 100)
    assert "is not a journal" in complaint(path)


def test_another_programs_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    connection.close()
    assert "another program's database" in complaint(path)


def test_a_damaged_journal(path: Path) -> None:
    store = Store.open(path)
    store.append_all([("state", {"state": "training", "note": "x" * 500})] * 100)
    store.close()
    content = bytearray(path.read_bytes())
    content[1000:] = b"\xff" * (len(content) - 1000)
    path.write_bytes(content)
    with pytest.raises(JournalError, match="damaged"):
        Store.open(path).entries()


def test_a_newer_version(path: Path) -> None:
    store = Store.open(path)
    store._connection.execute("PRAGMA user_version = 9")
    store.close()
    assert "version 9; this gridtrain knows up to 1" in complaint(path)


def test_two_coordinators_on_one_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_S", 0.01)
    first = Store.open(path)
    assert "is in use" in complaint(path)
    first.next_term()  # the first is not disturbed


def test_a_full_disk(path: Path) -> None:
    store = Store.open(path)
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalError, match="disk is full"):
        store.append("state", {"note": "x" * 10_000})
    assert store.entries() == []


def test_a_group_in_one_process_journals_to_memory() -> None:
    store = Store.open(":memory:")
    assert store.next_term() == 1
    store.append("generation", GENERATION)
    assert [entry.kind for entry in store.entries()] == ["term", "generation"]
