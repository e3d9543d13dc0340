"""A journal and its key belong together, and neither file reveals the other's secret."""

from __future__ import annotations

import errno
import fcntl
import sqlite3
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from gridtrain.errors import ConfigError, JournalError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import CONTACT_FILE, COORDINATOR_KEY, OPERATOR_KEY, EndpointFile
from gridtrain_coordinator.journal.keys import operator_identity
from gridtrain_coordinator.journal.store import JournalStore


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def start(journal: Path) -> Identity:
    store = JournalStore.open(journal)
    try:
        return store.identity()
    finally:
        store.close()


def refusal(journal: Path) -> JournalError:
    with pytest.raises(JournalError) as caught:
        start(journal)
    assert "coordinator.key" in caught.value.remedy and "backup" in caught.value.remedy
    assert "new run" in caught.value.remedy
    return caught.value


def test_the_secret_is_in_a_file_of_its_own(journal: Path) -> None:
    identity = start(journal)
    path = journal.with_name(COORDINATOR_KEY)
    assert start(journal) == identity == Identity.read(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = b"".join(file.read_bytes() for file in journal.parent.glob("journal.sqlite*"))
    assert identity.public in content
    assert identity.secret not in content and identity.secret.hex().encode() not in content


def test_another_key_beside_the_journal_is_refused(journal: Path) -> None:
    first = start(journal)
    journal.with_name(COORDINATOR_KEY).unlink()
    other = Identity.generate()
    other.write(journal.with_name(COORDINATOR_KEY))
    reason = refusal(journal).reason
    assert first.public.hex()[:12] in reason and other.public.hex()[:12] in reason


def test_a_missing_key_is_refused(journal: Path) -> None:
    start(journal)
    journal.with_name(COORDINATOR_KEY).unlink()
    assert "does not exist" in refusal(journal).reason
    assert not journal.with_name(COORDINATOR_KEY).exists(), "no new key is made"


def test_a_coordinator_killed_before_the_key_was_journalled_keeps_it(journal: Path) -> None:
    identity = Identity.generate()
    identity.write(journal.with_name(COORDINATOR_KEY))
    assert start(journal) == identity


def test_a_key_that_others_may_read_is_refused(journal: Path) -> None:
    start(journal)
    journal.with_name(COORDINATOR_KEY).chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        start(journal)


def test_the_journal_does_not_change_its_key(journal: Path) -> None:
    start(journal)
    store = JournalStore.open(journal)
    for change in ("UPDATE coordinator SET key = zeroblob(32)", "DELETE FROM coordinator"):
        with pytest.raises(sqlite3.IntegrityError, match="know the coordinator by its key"):
            store._connection.execute(change)
    with pytest.raises(JournalError):
        store._adopt(bytes(32))


def test_the_operators_key_is_not_the_coordinators(journal: Path) -> None:
    operator = operator_identity(journal)
    assert operator == operator_identity(journal) == Identity.read(journal.with_name(OPERATOR_KEY))
    assert operator != start(journal)


# -- coordinator.json ------------------------------------------------------------------------------

ENDPOINT = EndpointFile("tcp://lab-pc:7700", "tcp://127.0.0.1:7700", b"k" * 32, "default", True)


def test_the_endpoint_file_is_private_and_removed(tmp_path: Path) -> None:
    ENDPOINT.write(tmp_path)
    assert EndpointFile.read(tmp_path) == ENDPOINT
    assert stat.S_IMODE((tmp_path / CONTACT_FILE).stat().st_mode) == 0o600
    ENDPOINT.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []
    ENDPOINT.remove(tmp_path)  # it may be gone already
    with pytest.raises(FileNotFoundError):
        EndpointFile.read(tmp_path)


def test_another_coordinators_endpoint_file_stays(tmp_path: Path) -> None:
    other = EndpointFile("tcp://lab-pc:7701", "tcp://127.0.0.1:7701", b"l" * 32, "mine", False)
    ENDPOINT.write(tmp_path)
    other.write(tmp_path)
    ENDPOINT.remove(tmp_path)
    assert EndpointFile.read(tmp_path) == other


def test_commands_that_look_at_the_same_time_both_see_an_abandoned_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ENDPOINT.write(tmp_path)
    flock, seen = fcntl.flock, []

    def lock_and_look_again(file: BinaryIO, operation: int) -> None:
        flock(file, operation)
        monkeypatch.setattr(fcntl, "flock", flock)
        seen.append(EndpointFile.is_abandoned(tmp_path))

    monkeypatch.setattr(fcntl, "flock", lock_and_look_again)
    assert [EndpointFile.is_abandoned(tmp_path), *seen] == [True, True]


def test_an_abandoned_file_is_recognized_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks a file exclusively only if it is open for writing."""
    flock = fcntl.flock

    def lock_as_on_nfs(file: BinaryIO, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, "bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_as_on_nfs)
    with ENDPOINT.published(tmp_path):
        assert not EndpointFile.is_abandoned(tmp_path)
    ENDPOINT.write(tmp_path)
    assert EndpointFile.is_abandoned(tmp_path)


def test_no_file_counts_as_abandoned_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_lock(file: BinaryIO, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    ENDPOINT.write(tmp_path)
    assert EndpointFile.is_abandoned(tmp_path)
    monkeypatch.setattr(fcntl, "flock", cannot_lock)
    assert not EndpointFile.is_abandoned(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 4000,
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1, "address": 7, "here": "", "key": "", "run": "r", "encrypted": true}',
        '{"version": 1, "address": "", "here": "", "key": "", "run": "r", "encrypted": true}',
        '{"version": 1, "address": "", "here": "", "key": 7, "run": "r", "encrypted": true}',
        '{"version": 1, "address": "", "here": "", "key": "zz", "run": "r", "encrypted": 1}',
    ],
)
def test_an_invalid_endpoint_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CONTACT_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"is not a valid endpoint file.*restart the coordinator"):
        EndpointFile.read(tmp_path)


def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        ENDPOINT.write(tmp_path / "missing")
