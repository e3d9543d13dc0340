"""A backup is complete or absent, readable only by its owner, and a standby can start from it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gridtrain.errors import ConfigError, JournalError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import COORDINATOR_KEY, OPERATOR_KEY
from gridtrain_coordinator.journal import backups as module
from gridtrain_coordinator.journal.backups import JOURNAL, Backups, latest_backup, restore
from gridtrain_coordinator.journal.keys import operator_identity
from gridtrain_coordinator.journal.store import JournalStore


def running(state: Path) -> JournalStore:
    """The journal of a coordinator that has started."""
    state.mkdir(exist_ok=True)
    store = JournalStore.open(state / JOURNAL)
    store.identity(), operator_identity(state / JOURNAL)
    store.next_term()
    return store


def make(backups: Backups, store: JournalStore) -> Path:
    backups.begin(store, 0.0)
    backups.wait(0.0)
    path = backups.poll(0.0)
    assert path is not None
    return path


def test_a_standby_starts_with_every_journalled_entry(tmp_path: Path) -> None:
    store = running(tmp_path / "state")
    store.append_all([("enrolled", {"peer": "ab" * 32}), ("state", {"state": "training"})])
    path = make(Backups(tmp_path / "backups", tmp_path / "state"), store)
    assert path.name == "backup-1-00000003"
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert modes == dict.fromkeys((JOURNAL, COORDINATOR_KEY, OPERATOR_KEY), 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    assert restore(tmp_path / "backups", tmp_path / "standby") == path
    assert sorted(os.listdir(tmp_path / "standby")) == [COORDINATOR_KEY, JOURNAL, OPERATOR_KEY]
    standby = JournalStore.open(tmp_path / "standby" / JOURNAL)
    assert list(standby.entries()) == list(store.entries())
    assert standby.identity() == store.identity()
    assert standby.next_term() == 2


def test_a_stale_rollback_journal_does_not_alter_a_restored_backup(tmp_path: Path) -> None:
    """A damaged journal.sqlite was removed but not its -journal, which SQLite would apply to the backup."""
    store = running(tmp_path / "state")
    path = make(Backups(tmp_path / "backups", tmp_path / "state"), store)
    before = list(store.entries())
    store.append_all([("state", {"number": number}) for number in range(50)])
    (tmp_path / "again").mkdir()
    store._connection.execute("PRAGMA cache_size = 1")  # pages are written before the end of the commit
    with pytest.raises(KeyboardInterrupt), store._transaction():
        for number in range(50):
            store._insert("state", {"number": number, "note": "x" * 3000})
        shutil.copy(tmp_path / "state" / f"{JOURNAL}-journal", tmp_path / "again" / f"{JOURNAL}-journal")
        raise KeyboardInterrupt
    assert restore(tmp_path / "backups", tmp_path / "again") == path
    assert list(JournalStore.open(tmp_path / "again" / JOURNAL).entries()) == before


def test_the_latest_backup_is_that_of_the_latest_term(tmp_path: Path) -> None:
    """A standby that started from an older backup has fewer entries, but a later term."""
    store = running(tmp_path / "state")
    first = make(Backups(tmp_path / "backups", tmp_path / "state"), store)
    restore(first, tmp_path / "standby")
    store.append_all([("state", {})] * 9)
    make(Backups(tmp_path / "backups", tmp_path / "state"), store)
    standby = JournalStore.open(tmp_path / "standby" / JOURNAL)
    standby.next_term()
    path = make(Backups(tmp_path / "backups", tmp_path / "standby", keep=2), standby)
    assert latest_backup(tmp_path / "backups") == path == tmp_path / "backups" / "backup-2-00000002"
    assert sorted(os.listdir(tmp_path / "backups")) == ["backup-1-00000010", "backup-2-00000002"]


def test_a_journal_is_not_replaced(tmp_path: Path) -> None:
    store = running(tmp_path / "state")
    make(Backups(tmp_path / "backups", tmp_path / "state"), store)
    running(tmp_path / "other").close()
    before = (tmp_path / "other" / JOURNAL).read_bytes()
    with pytest.raises(
        ConfigError, match="already contains a journal, which a backup must not replace"
    ) as caught:
        restore(tmp_path / "backups", tmp_path / "other")
    assert "omit --from-backup" in caught.value.remedy
    assert (tmp_path / "other" / JOURNAL).read_bytes() == before


def test_a_missing_backup_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".backup.partial").mkdir()
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="there is no backup in"):
            restore(folder, tmp_path / "standby")


def test_a_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    store = running(tmp_path / "state")
    path = make(Backups(tmp_path / "backups", tmp_path / "state"), store)
    content = (path / JOURNAL).read_bytes()
    (path / JOURNAL).write_bytes(content.replace(b'"term":1', b'"term":7'))
    with pytest.raises(JournalError, match="cannot be used: .* is damaged") as caught:  # noqa: RUF043
        restore(path, tmp_path / "standby")
    assert "older backup" in caught.value.remedy
    assert not [name for name in os.listdir(tmp_path / "standby") if JOURNAL in name]
    (path / JOURNAL).write_bytes(content)
    restore(path, tmp_path / "standby")  # a failed start can be repeated


def test_a_backup_without_the_coordinators_key_is_none(tmp_path: Path) -> None:
    """The state folder was emptied while the coordinator was running; the latest backup must stay usable."""
    store = running(tmp_path / "state")
    backups = Backups(tmp_path / "backups", tmp_path / "state")
    first = make(backups, store)
    for path in (tmp_path / "state").iterdir():
        path.unlink()
    store.append_all([("state", {})])
    with pytest.raises(JournalError, match=COORDINATOR_KEY):
        make(backups, store)
    assert backups.failure and latest_backup(tmp_path / "backups") == first


def test_two_runs_cannot_share_a_backup_folder(tmp_path: Path) -> None:
    one, other = running(tmp_path / "one"), running(tmp_path / "other")
    make(Backups(tmp_path / "backups", tmp_path / "one"), one)
    with pytest.raises(JournalError, match="belongs to another coordinator"):
        make(Backups(tmp_path / "backups", tmp_path / "other"), other)
    assert os.listdir(tmp_path / "backups") == ["backup-1-00000001"]
    with pytest.raises(ConfigError, match="the folder of the journal itself"):
        Backups(tmp_path / "one", tmp_path / "one")


def test_a_full_disk_leaves_earlier_backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = running(tmp_path / "state")
    backups = Backups(tmp_path / "backups", tmp_path / "state")
    make(backups, store)
    store.append_all([("state", {})])

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_sync", full)
        with pytest.raises(JournalError, match="No space left on device"):
            make(backups, store)
    assert os.listdir(tmp_path / "backups") == ["backup-1-00000001"] and backups.failure
    make(backups, store)
    assert not backups.failure and latest_backup(tmp_path / "backups").name == "backup-1-00000002"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Backups]:
    """The backups in a folder that does not answer: the thread waits for a writer of a named pipe."""
    pipe = tmp_path / "backups" / "backup-1-00000001" / COORDINATOR_KEY
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe, 0o600)
    yield Backups(tmp_path / "backups", tmp_path / "state")
    with contextlib.suppress(OSError):  # without a reader
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


def test_a_folder_that_does_not_answer_fails_the_backup(tmp_path: Path, hung: Backups) -> None:
    store = running(tmp_path / "state")
    hung.begin(store, 100.0)
    assert hung.poll(129.0) is None and hung.status(129.0)["behind"] and not hung.failure
    hung.wait(130.0)  # returns at once
    for now_s in (130.0, 500.0):
        with pytest.raises(JournalError, match="it has not answered for 30 s") as caught:
            hung.poll(now_s)
        assert "another folder" in caught.value.remedy and hung.status(now_s)["failed"] == hung.failure
    hung.request()
    assert hung.due_s == math.inf, "only one backup is written at a time"
    pipe = tmp_path / "backups" / "backup-1-00000001" / COORDINATOR_KEY
    with pipe.open("wb") as answer:  # the folder answers again
        answer.write((tmp_path / "state" / COORDINATOR_KEY).read_bytes())
    hung.wait(100.0)
    assert hung.poll(501.0) is not None and not hung.failure and hung.due_s < math.inf


def test_a_folder_that_does_not_answer_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "backups" / ".backup.trial"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    with monkeypatch.context() as brief:
        brief.setattr(module, "ANSWER_TIMEOUT_S", 0.05)
        with pytest.raises(ConfigError, match=r"it has not answered for 0\.05 s") as caught:
            Backups(tmp_path / "backups", tmp_path / "state").check_folder()
    assert "another disk" in caught.value.remedy
    pipe.read_bytes()  # ends the thread
    Backups(tmp_path / "backups", tmp_path / "state").check_folder()


WAITS = """
import sys
from pathlib import Path
from gridtrain_coordinator.journal import backups
from gridtrain_coordinator.journal.store import JournalStore
store = JournalStore.open(Path(sys.argv[1]) / "journal.sqlite")
made = backups.Backups(Path(sys.argv[2]), Path(sys.argv[1]))
made.begin(store, 0.0), made.wait(backups.ANSWER_TIMEOUT_S)
"""


@pytest.mark.usefixtures("hung")
def test_a_folder_that_does_not_answer_does_not_keep_the_process(tmp_path: Path) -> None:
    running(tmp_path / "state").close()
    argv = (sys.executable, "-c", WAITS, str(tmp_path / "state"), str(tmp_path / "backups"))
    assert subprocess.run(argv, timeout=60).returncode == 0


DIES = """
import os, signal, sys, threading
from pathlib import Path
from gridtrain_coordinator.journal import backups
from gridtrain_coordinator.journal.store import JournalStore
state, folder, left = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
store = JournalStore.open(state / "journal.sqlite")
store.append_all([("state", {"n": left})])
def dies(frame, event, arg):
    global left
    left -= frame.f_code.co_filename == backups.__file__
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return dies
sys.settrace(dies), threading.settrace(dies)
made = backups.Backups(folder, state, keep=1)
made.begin(store, 0.0), made.wait(0.0), made.poll(0.0)
"""


def test_a_complete_backup_exists_wherever_the_process_is_killed(tmp_path: Path) -> None:
    store = running(tmp_path / "state")
    make(Backups(tmp_path / "backups", tmp_path / "state"), store)
    store.close()
    killed = 0
    for events in range(0, 168, 7):
        argv = (sys.executable, "-c", DIES, str(tmp_path / "state"), str(tmp_path / "backups"), str(events))
        killed += subprocess.run(argv, timeout=60).returncode == -signal.SIGKILL
        standby = tmp_path / f"standby-{events}"
        restore(tmp_path / "backups", standby)
        restored = JournalStore.open(standby / JOURNAL)
        assert restored.identity() == Identity.read(tmp_path / "state" / COORDINATOR_KEY)
        restored.close()
    assert killed >= 5
