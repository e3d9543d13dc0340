"""The journal survives a killed coordinator, and an error says what is wrong with a file."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gridtrain.errors import JournalError
from gridtrain_coordinator.journal import store as module
from gridtrain_coordinator.journal.store import JournalStore

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


def test_entries_are_read_as_they_were_written(path: Path) -> None:
    store = JournalStore.open(path)
    assert store.next_term() == 1
    store.append_all([("run", {"facts": {"model": "120576 parameters"}})])
    store.append_all([("generation", GENERATION), ("state", {"state": "training"})])
    store.close()

    entries = list(JournalStore.open(path).entries())
    assert [(entry.id, entry.kind, entry.body) for entry in entries] == [
        (1, "term", {"term": 1}),
        (2, "run", {"facts": {"model": "120576 parameters"}}),
        (3, "generation", GENERATION),
        (4, "state", {"state": "training"}),
    ]
    assert all(entry.at.endswith("+00:00") for entry in entries)


def test_the_journal_is_private(path: Path) -> None:
    store = JournalStore.open(path)
    store.next_term()
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in path.parent.glob("journal.sqlite*")}
    assert modes == {"journal.sqlite": "0o600", "journal.sqlite-journal": "0o600"}


def test_every_start_has_a_new_term_and_the_same_key(path: Path) -> None:
    seen = []
    for _ in range(3):
        store = JournalStore.open(path)
        seen.append((store.next_term(), store.identity()))
        store.close()
    key = seen[0][1]
    assert seen == [(1, key), (2, key), (3, key)] and len(key.public) == 32


def test_a_term_entry_of_the_core_does_not_count_twice(path: Path) -> None:
    store = JournalStore.open(path)
    term = store.next_term()
    store.append_all([("term", {"term": term, "run": "default"})])
    assert store.next_term() == term + 1


DIES_AFTER_APPEND = """
import os, signal, sys
from gridtrain_coordinator.journal.store import JournalStore
store = JournalStore.open(sys.argv[1])
store.next_term()
store.append_all([("state", {"state": "training"})])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_appended_entries_survive_sigkill(path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES_AFTER_APPEND, str(path)], timeout=60)
    assert died.returncode == -signal.SIGKILL
    store = JournalStore.open(path)  # the lock died with its process
    assert [entry.kind for entry in store.entries()] == ["term", "state"]
    assert store.next_term() == 2


def test_commits_are_synchronous(path: Path) -> None:
    store = JournalStore.open(path)
    (synchronous,) = store._connection.execute("PRAGMA synchronous").fetchone()
    assert synchronous == 2, "2 is FULL"


def test_entries_of_one_call_become_durable_together_or_not_at_all(path: Path) -> None:
    store = JournalStore.open(path)
    with pytest.raises(JournalError, match="rejected"):
        store.append_all([("state", {"state": "training"}), ("gossip", {})])
    assert list(store.entries()) == []
    store.append_all([("state", {"state": "paused"})])  # the store is still usable
    assert len(list(store.entries())) == 1


def test_a_journalled_verdict_never_changes(path: Path) -> None:
    store = JournalStore.open(path)
    store.append_all([("generation", GENERATION)])
    with pytest.raises(JournalError):
        store.append_all([("generation", {**GENERATION, "verdict": "COMMIT"})])
    for change in ("UPDATE journal SET body = '{}'", "DELETE FROM journal"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store._connection.execute(change)
    assert [entry.body for entry in store.entries()] == [GENERATION]


def test_generations_can_be_read_as_a_table(path: Path) -> None:
    store = JournalStore.open(path)
    store.append_all([("generation", GENERATION)])
    row = store._connection.execute(
        "SELECT term, generation, step, verdict, digest FROM generations"
    ).fetchone()
    assert row == (1, 1, 0, "ABORT", "ab")


# -- migrations ------------------------------------------------------------------------------------

FIRST, ACCESS, CHAIN, COMPACTION = module._migrations()
MORE = "CREATE TABLE links (a, b);"


def old_journal(path: Path) -> None:
    """As gridtrain wrote it before there were keys: version 1, with an identity without a secret."""
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.executescript(FIRST)
        connection.execute(f"PRAGMA application_id = {module.APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
        connection.execute("INSERT INTO identity VALUES (1, ?)", (b"i" * 32,))
        entries = [("term", {"term": 1}), ("generation", GENERATION), ("state", {"state": "training"})]
        for number, (kind, body) in enumerate(entries):
            row = (10 * number + 7, f"2024-05-0{number + 1}", kind, json.dumps(body))
            connection.execute("INSERT INTO journal (id, at, kind, body) VALUES (?, ?, ?, ?)", row)
    connection.close()


def test_a_journal_of_the_first_version_is_migrated(path: Path) -> None:
    old_journal(path)
    store = JournalStore.open(path)
    assert [(entry.id, entry.at, entry.kind, entry.body) for entry in store.entries()] == [
        (7, "2024-05-01", "term", {"term": 1}),
        (17, "2024-05-02", "generation", GENERATION),
        (27, "2024-05-03", "state", {"state": "training"}),
    ]
    assert store.key() is None, "the old identity had no secret"
    assert store.identity().public == store.key() != b"i" * 32
    assert store.next_term() == 2
    with pytest.raises(JournalError):
        store.append_all([("generation", {**GENERATION, "verdict": "COMMIT"})])
    for change in ("UPDATE journal SET body = '{}'", "DELETE FROM journal"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store._connection.execute(change)
    row = store._connection.execute("SELECT term, generation, verdict FROM generations").fetchone()
    assert row == (1, 1, "ABORT")


def test_an_old_and_a_new_journal_have_one_schema(tmp_path: Path) -> None:
    def schema(path: Path) -> list[tuple[str, ...]]:
        store = JournalStore.open(path)
        rows = store._connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name")
        found = rows.fetchall()
        store.close()
        return found

    old_journal(tmp_path / "old.sqlite")
    names = [row[1] for row in schema(tmp_path / "old.sqlite")]
    assert schema(tmp_path / "old.sqlite") == schema(tmp_path / "new.sqlite")
    assert "identity" not in names and "journal_of_version_1" not in names


@pytest.mark.parametrize("kind", ["invitation", "enrolled", "expelled", "pardoned", "strike"])
def test_entries_of_access_control_are_stored(path: Path, kind: str) -> None:
    store = JournalStore.open(path)
    store.append_all([(kind, {"peer": "ab" * 32})])
    store.close()
    assert [(entry.kind, entry.body) for entry in JournalStore.open(path).entries()] == [
        (kind, {"peer": "ab" * 32})
    ]


def test_migrations_are_applied_once_and_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JournalStore.open(path)
    store.next_term()
    store.close()
    monkeypatch.setattr(module, "_migrations", lambda: [FIRST, ACCESS, CHAIN, COMPACTION, MORE])
    for _ in range(2):  # the second time nothing is left to do
        store = JournalStore.open(path)
        assert store._connection.execute("PRAGMA user_version").fetchone() == (5,)
        assert store._connection.execute("SELECT count(*) FROM links").fetchone() == (0,)
        assert [entry.kind for entry in store.entries()] == ["term"]
        store.close()


def test_a_migration_that_fails_leaves_no_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    JournalStore.open(path).close()
    monkeypatch.setattr(
        module,
        "_migrations",
        lambda: [FIRST, ACCESS, CHAIN, COMPACTION, MORE + "CREATE TABLE links (again);"],
    )
    with pytest.raises(JournalError):
        JournalStore.open(path)
    monkeypatch.undo()
    store = JournalStore.open(path)
    assert store._connection.execute("PRAGMA user_version").fetchone() == (4,)
    assert store._connection.execute("SELECT name FROM sqlite_master WHERE name = 'links'").fetchall() == []


# -- unusable files --------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(JournalError) as caught:
        JournalStore.open(path)
    assert caught.value.remedy, "says what to do next"
    return caught.value.reason


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing" / "journal.sqlite")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "cannot be opened" in refusal(tmp_path)


def test_a_text_file_is_refused(path: Path) -> None:
    path.write_text("these are my notes, " * 100)
    assert "is not a journal" in refusal(path)


def test_a_second_coordinator_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_S", 0.01)
    first = JournalStore.open(path)
    said = refusal(path)
    assert "is in use by another coordinator" in said and "database is locked" not in said
    first.next_term()  # the first is not disturbed


def test_a_journal_can_be_in_memory() -> None:
    store = JournalStore.open(":memory:")
    assert store.next_term() == 1
    store.append_all([("generation", GENERATION)])
    assert [entry.kind for entry in store.entries()] == ["term", "generation"]
