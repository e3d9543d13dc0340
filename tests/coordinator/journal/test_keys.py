"""A journal and its key belong together, and neither file reveals the other's secret."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from gridtrain.errors import ConfigError, JournalError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import CONTACT_FILE, COORDINATOR_KEY, OPERATOR_KEY, EndpointFile
from gridtrain_coordinator.journal.keys import operator_identity
from gridtrain_coordinator.journal.store import JournalStore


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def started(journal: Path) -> Identity:
    store = JournalStore.open(journal)
    try:
        return store.identity()
    finally:
        store.close()


def complaint(journal: Path) -> JournalError:
    with pytest.raises(JournalError) as caught:
        started(journal)
    assert "coordinator.key" in caught.value.remedy and "backup" in caught.value.remedy
    assert "new run" in caught.value.remedy
    return caught.value


def test_the_secret_lies_in_a_file_of_its_own(journal: Path) -> None:
    identity = started(journal)
    path = journal.with_name(COORDINATOR_KEY)
    assert started(journal) == identity == Identity.read(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    held = b"".join(file.read_bytes() for file in journal.parent.glob("journal.sqlite*"))
    assert identity.public in held
    assert identity.secret not in held and identity.secret.hex().encode() not in held


def test_another_key_beside_the_journal(journal: Path) -> None:
    first = started(journal)
    journal.with_name(COORDINATOR_KEY).unlink()
    other = Identity.generate()
    other.write(journal.with_name(COORDINATOR_KEY))
    reason = complaint(journal).reason
    assert first.public.hex()[:12] in reason and other.public.hex()[:12] in reason


def test_the_key_is_gone(journal: Path) -> None:
    started(journal)
    journal.with_name(COORDINATOR_KEY).unlink()
    assert "does not exist" in complaint(journal).reason
    assert not journal.with_name(COORDINATOR_KEY).exists(), "and no new one is made in silence"


def test_a_coordinator_killed_before_it_wrote_its_key_down(journal: Path) -> None:
    identity = Identity.generate()
    identity.write(journal.with_name(COORDINATOR_KEY))
    assert started(journal) == identity


def test_others_may_read_the_key(journal: Path) -> None:
    started(journal)
    journal.with_name(COORDINATOR_KEY).chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        started(journal)


def test_the_journal_does_not_change_its_key(journal: Path) -> None:
    started(journal)
    store = JournalStore.open(journal)
    for change in ("UPDATE coordinator SET key = zeroblob(32)", "DELETE FROM coordinator"):
        with pytest.raises(sqlite3.IntegrityError, match="know the coordinator by its key"):
            store._connection.execute(change)
    with pytest.raises(JournalError):
        store._adopt(bytes(32))


def test_the_operators_key_is_another_one(journal: Path) -> None:
    operator = operator_identity(journal)
    assert operator == operator_identity(journal) == Identity.read(journal.with_name(OPERATOR_KEY))
    assert operator != started(journal)


# -- coordinator.json ------------------------------------------------------------------------------

CONTACT = EndpointFile("tcp://lab-pc:7700", "tcp://127.0.0.1:7700", b"k" * 32, "default", True)


def test_the_contact_file(tmp_path: Path) -> None:
    CONTACT.write(tmp_path)
    assert EndpointFile.read(tmp_path) == CONTACT
    assert stat.S_IMODE((tmp_path / CONTACT_FILE).stat().st_mode) == 0o600
    CONTACT.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []
    CONTACT.remove(tmp_path)  # it may be gone already
    with pytest.raises(FileNotFoundError):
        EndpointFile.read(tmp_path)


def test_another_coordinators_contact_file_stays(tmp_path: Path) -> None:
    other = EndpointFile("tcp://lab-pc:7701", "tcp://127.0.0.1:7701", b"l" * 32, "mine", False)
    CONTACT.write(tmp_path)
    other.write(tmp_path)
    CONTACT.remove(tmp_path)
    assert EndpointFile.read(tmp_path) == other


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
def test_a_contact_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / CONTACT_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"is not a valid endpoint file.*restart the coordinator"):
        EndpointFile.read(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        CONTACT.write(tmp_path / "missing")
