"""A start reads each entry once, and removes those that the run no longer needs."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.errors import JournalError
from gridtrain_coordinator import daemon
from gridtrain_coordinator.daemon import _recover, _recover_and_compact
from gridtrain_coordinator.journal import store as module
from gridtrain_coordinator.journal.backups import JOURNAL, Backups, latest_backup, restore
from gridtrain_coordinator.journal.store import JournalFull, JournalStore
from gridtrain_coordinator.run.journal_recovery import (
    LeftWorker,
    generation_entry,
    is_same_run,
    left_entry,
)
from gridtrain_coordinator.serving import load_authorization

OPERATOR, COORDINATOR = b"o" * 32, b"c" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_a_start_parses_each_entry_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JournalStore.open(path)
    store.append_all([("state", {"state": "training", "n": number}) for number in range(10)])
    store.append_all([("generation", generation(number)) for number in range(1, 11)])
    store.close()
    parsed: list[str] = []

    def loads(text: str) -> object:
        parsed.append(text)
        return json.loads(text)

    monkeypatch.setattr(module, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    store = JournalStore.open(path)
    assert parsed == []
    next(store.entries())
    assert len(parsed) == 1, "the others are not read before they are needed"
    parsed.clear()
    load_authorization(store, "default", OPERATOR, COORDINATOR)
    assert len(parsed) == 10, "access control does not need the generations"
    assert _recover(store, "default").generation == 10
    assert len(parsed) == 30


def generation(number: int) -> dict[str, Any]:
    """Each generation has anna and a worker that is in no other."""
    peers = [(b"a" * 32, "anna"), (number.to_bytes(32), f"worker-{number}")]
    roster = tuple(m.Member(peer, name, "tcp://192.0.2.1:7", 6, False) for peer, name in peers)
    ledger = m.LedgerState(number, 12 * number, (), 12 * number, 0, None)
    view = m.MembershipView(1, number, 2, m.Verdict.COMMIT, None, number - 1, bytes(32), ledger, "x" * 200)
    return generation_entry(view, roster)


def left(number: int) -> dict[str, Any]:
    return {"left": left_entry(number.to_bytes(32), LeftWorker(f"worker-{number}", ()))}


ENTRIES: list[tuple[str, dict[str, Any]]] = [
    ("term", {"term": 1}),
    ("term", {"term": 1, "run": "default", "software": "test"}),
    ("invitation", {"key": "ab" * 32, "uses": 3, "until_s": 1e12, "at_s": 1.0}),
    ("enrolled", {"peer": "0" * 64, "invitation": "ab" * 32}),
    ("state", {"state": "waiting", "reason": "for workers"}),
    ("generation", generation(1)),
    ("state", {"state": "training", "reason": ""}),
    ("state", left(1)),
    ("state", {"state": "paused", "reason": "", "reached": 7}),
    ("expelled", {"peer": "1" * 64, "ban": True, "reason": "spam", "cause": "order"}),
    ("generation", generation(2)),
    ("state", {"ending": True}),
    ("generation", generation(3)),
    ("state", {"state": "paused", "reason": "nobody is here", "reached": 9}),
]
KEPT = [1, 2, 3, 4, 7, 10, 12, 13, 14]


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        self.events.append(f"{level} {event}")


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "COMPACTION_BYTES", 1)


def write(path: Path, entries: Iterable[tuple[str, Mapping[str, Any]]] = ENTRIES) -> JournalStore:
    store = JournalStore.open(path)
    store.identity()
    store.append_all(entries)
    return store


def door(store: JournalStore) -> dict[str, Any]:
    return load_authorization(store, "default", OPERATOR, COORDINATOR).status(0.0)


@pytest.mark.usefixtures("small")
def test_a_start_removes_the_entries_that_the_run_no_longer_needs(path: Path, log: Log) -> None:
    store = write(path)
    whole, entries, last, access = (
        _recover(store, "default"), list(store.entries()), store._chain, door(store),
    )  # fmt: skip
    assert _recover_and_compact(store, "default", log) == whole and log.events == ["info compacted"]
    store.close()

    store = JournalStore.open(path)
    first, *kept = store.entries()
    assert kept == [entry for entry in entries if entry.id in KEPT]
    assert (first.id, first.kind, first.body) == (
        0,
        "compacted",
        {
            "last": 14,
            "chain": last.hex(),
            "removed": 5,
            "names": [[number.to_bytes(32).hex(), f"worker-{number}"] for number in (1, 2)]
            + [[(b"a" * 32).hex(), "anna"], [(3).to_bytes(32).hex(), "worker-3"]],
        },
    )
    assert is_same_run(_recover(store, "default"), whole) and whole.has_started and len(whole.names) == 4
    assert door(store) == access
    assert store.next_term() == 2
    store.append_all([("generation", {**generation(4), "term": 2})])
    assert [entry.id for entry in store.entries()][-2:] == [15, 16], "the numbers continue"
    for change in ("UPDATE journal SET body = '{}'", "DELETE FROM journal"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            store._connection.execute(change)
    store.close()

    store = JournalStore.open(path)
    whole = _recover(store, "default")
    assert is_same_run(_recover_and_compact(store, "default", log), whole)
    assert [(entry.id, entry.kind) for entry in store.entries()][:2] == [(0, "compacted"), (1, "term")]
    assert is_same_run(_recover(store, "default"), whole) and len(whole.names) == 5


def test_only_a_large_journal_is_compacted_and_its_file_shrinks(path: Path, log: Log) -> None:
    store = write(path)
    _recover_and_compact(store, "default", log)
    assert log.events == [] and len(list(store.entries())) == len(ENTRIES)
    store.append_all([("generation", generation(number)) for number in range(4, 1500)])
    store.close()
    assert path.stat().st_size > daemon.COMPACTION_BYTES
    store = JournalStore.open(path)
    whole = _recover(store, "default")
    assert is_same_run(_recover_and_compact(store, "default", log), whole)
    store.close()
    assert log.events == ["info compacted"] and path.stat().st_size < daemon.COMPACTION_BYTES / 3
    assert is_same_run(_recover(JournalStore.open(path), "default"), whole)


@pytest.mark.usefixtures("small")
def test_a_journal_from_which_another_run_would_be_recovered_is_left_as_it_is(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write(path)
    whole, entries = _recover(store, "default"), list(store.entries())
    monkeypatch.setattr(daemon, "compacted_entry", lambda recovered: {"names": []})
    assert _recover_and_compact(store, "default", log) == whole and log.events == ["warning not_compacted"]
    assert list(store.entries()) == entries
    store.next_term()
    store.close()
    assert list(JournalStore.open(path).entries())[:-1] == entries, "the chain of digests continues"


@pytest.mark.usefixtures("small")
def test_a_full_disk_leaves_the_journal_as_it_is(path: Path, log: Log) -> None:
    store = write(path, [*ENTRIES, ("generation", {**generation(4), "reason": "x" * 20_000})])
    entries = list(store.entries())
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    store._connection.execute("PRAGMA temp_store = MEMORY")
    names = [[number.to_bytes(32).hex(), "x" * 60] for number in range(4000)]
    with pytest.raises(JournalFull), store.compaction([6], {"names": names}):
        raise AssertionError("it does not fit")
    assert list(store.entries()) == entries


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM journal WHERE id = 0",
        "DELETE FROM journal WHERE id < 7",
        "DELETE FROM journal WHERE id = 12",
        "UPDATE journal SET body = replace(body, 'worker-1', 'worker-7') WHERE id = 0",
    ],
)
def test_an_entry_that_was_cut_off_or_altered_is_found(path: Path, log: Log, damage: str) -> None:
    store = write(path)
    _recover_and_compact(store, "default", log)
    store.close()
    with sqlite3.connect(path) as connection:
        for trigger in ("journal_is_not_changed", "journal_is_not_shortened"):
            connection.execute(f"DROP TRIGGER {trigger}")
        assert connection.execute(damage).rowcount > 0
    connection.close()
    with pytest.raises(JournalError, match="damaged"):
        JournalStore.open(path)


@pytest.mark.usefixtures("small")
def test_an_older_gridtrain_refuses_a_compacted_journal(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write(path)
    _recover_and_compact(store, "default", log)
    store.close()
    older = module._migrations()[:3]
    monkeypatch.setattr(module, "_migrations", lambda: older)
    with pytest.raises(JournalError, match="version 4; this gridtrain supports versions up to 3") as caught:
        JournalStore.open(path)
    assert "newer version" in caught.value.remedy


DIES = """
import os, signal, sys
from gridtrain_coordinator.journal.store import JournalStore
store = JournalStore.open(sys.argv[1])
with store.compaction([5, 6, 8], {"names": []}):
    store._connection.execute("PRAGMA cache_spill = 1")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_coordinator_that_is_killed_meanwhile_finds_the_whole_journal(path: Path) -> None:
    store = write(path)
    entries = list(store.entries())
    store.close()
    assert subprocess.run([sys.executable, "-c", DIES, str(path)], timeout=60).returncode == -signal.SIGKILL
    assert list(JournalStore.open(path).entries()) == entries


@pytest.mark.usefixtures("small")
def test_a_standby_continues_from_the_backup_of_a_compacted_journal(tmp_path: Path, log: Log) -> None:
    state, folder = tmp_path / "state", tmp_path / "backups"
    state.mkdir()
    store, backups = write(state / JOURNAL), Backups(folder, state)

    def back_up() -> str:
        backups.begin(store, 0.0)
        backups.wait(0.0)
        path = backups.poll(0.0)
        assert path is not None
        return path.name

    assert back_up() == "backup-1-00000014"
    whole = _recover_and_compact(store, "default", log)
    store.next_term()
    assert back_up() == "backup-2-00000015" == latest_backup(folder).name
    runs = []
    for name in ("backup-1-00000014", "backup-2-00000015"):
        restore(folder / name, tmp_path / name)
        standby = JournalStore.open(tmp_path / name / JOURNAL)
        assert standby.identity() == store.identity()
        runs.append(_recover(standby, "default"))
        standby.close()
    assert is_same_run(runs[0], whole) and is_same_run(runs[1], whole), "members' reports are compared to it"
