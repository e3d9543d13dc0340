"""The journal (SQLite): its entries, digests and migrations, and the errors for damaged or locked files.

    migrations/0001_journal.sql ... --applied in order, each in a transaction--> PRAGMA user_version

An entry consists of a kind and a JSON body, which this module does not interpret.  One connection locks the
file exclusively, because two coordinators with the same journal could reach different verdicts.  It uses a
rollback journal with synchronous=FULL: once `append_all` has returned, the entries are in the file itself and
survive SIGKILL and power loss.

Each entry has a digest, which covers the entry and the previous digest.  The digests are checked when the
journal is opened, so that a flipped bit cannot change a verdict.  A rejected file is left unchanged.

    before   1 term   2 run   3 generation   4 state   5 generation            5's digest: D
    after    0 compacted (D)   1 term   2 run   5 generation                   each digest is computed again
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from gridtrain.core.messages import PeerId
from gridtrain.errors import JournalError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import COORDINATOR_KEY
from gridtrain_coordinator.journal.keys import coordinator_identity

MEMORY = ":memory:"
APPLICATION_ID = 0x67726964  # "grid"; distinguishes journals from other programs' databases
BUSY_S = 1.0
CHAIN_BYTES = 16
PROBE_BYTES = 2**20
DAMAGED_REMEDY = (
    "start from a backup with --from-backup FOLDER and a new --state, or choose a new folder with --state"
)


class JournalFull(JournalError):
    """The disk is full or a quota is used up: nothing was written, and the write can be retried."""


_IN_USE = (
    "is in use by another coordinator or program",
    "stop the other coordinator, or choose another folder with --state",
)
_CHECK_OWNER = (
    "check who owns the folder and its files, and their permissions, or choose another folder with --state"
)
_REMEDIES = {  # SQLite's result code -> (what happened, what to do)
    "SQLITE_NOTADB": (
        "is not a journal, because it is not an SQLite database",
        "choose another folder with --state",
    ),
    "SQLITE_CORRUPT": ("is damaged", DAMAGED_REMEDY),
    "SQLITE_BUSY": _IN_USE,
    "SQLITE_LOCKED": _IN_USE,
    "SQLITE_FULL": ("cannot grow: the disk is full", "free disk space, then start the coordinator again"),
    "SQLITE_QUOTA": (  # not a code of SQLite, which reports an I/O error
        "cannot grow: the disk quota is used up",
        "free disk space or raise the quota, then start the coordinator again",
    ),
    "SQLITE_IOERR": ("cannot be read or written", "check the disk, then start the coordinator again"),
    "SQLITE_CANTOPEN": ("cannot be opened", _CHECK_OWNER),
    "SQLITE_READONLY": ("is read-only", _CHECK_OWNER),
    "SQLITE_CONSTRAINT": ("rejected an invalid entry", "report this as a bug in gridtrain"),
}


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One entry of the journal.

    Attributes:
        id: the number of the entry, from 1; 0 for the "compacted" entry.
        at: the time at which the entry was written, in UTC as ISO 8601.
    """

    id: int
    at: str
    kind: str
    body: dict[str, Any]


class JournalStore:
    """An open journal, for use by one thread at a time.  Every method may raise `JournalError`."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._chain = b""  # digest of the latest entry

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> JournalStore:
        """Open the journal at `path`; create or migrate it if necessary.

        The journal ":memory:" is not stored on disk.

        Raises:
            JournalError: the directory does not exist, or the file is not a journal, is damaged, in use or
                not writable, or was written by a newer version of gridtrain.
        """
        name = os.fspath(path)
        if name != MEMORY and not Path(name).absolute().parent.is_dir():
            folder = Path(name).absolute().parent
            raise JournalError(
                f"the journal's directory {folder} does not exist", remedy=f"create it: mkdir -p {folder}"
            )
        created = name != MEMORY and _created(Path(name))
        with _explained(name):
            connection = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        store = cls(connection, name)
        try:
            with _explained(name):
                store._check(created)
                store._prepare()
            store._check_digests()
        except BaseException:
            connection.close()
            if created:
                Path(name).unlink(missing_ok=True)  # so that a failed start leaves no trace
            raise
        return store

    def close(self) -> None:
        self._connection.close()

    @property
    def is_missing(self) -> bool:
        """Whether the open file was moved or removed; SQLite continues to write to it without an error."""
        return self._path != MEMORY and not os.path.exists(self._path)

    def identity(self) -> Identity:
        """Return the coordinator's key pair; create it on the first start with this journal.

        The key pair is in `coordinator.key` beside the journal, which must be on disk.

        Raises:
            JournalError: this journal belongs to another key, or the key file is missing.
            ConfigError: the key file cannot be used.
        """
        return coordinator_identity(Path(self._path), self.key(), self._adopt)

    def key(self) -> PeerId | None:
        """Return the coordinator's public key from the journal; None if the journal has no key yet."""
        with _explained(self._path):
            row = self._connection.execute("SELECT key FROM coordinator").fetchone()
        if row is not None and not isinstance(row[0], bytes):
            raise self._damaged("its key is invalid")
        return row[0] if row is not None else None

    def _adopt(self, key: PeerId) -> None:
        with self._transaction():
            self._connection.execute("INSERT INTO coordinator VALUES (1, ?)", (key,))

    def next_term(self) -> int:
        """Write the next term to the journal; return it once it is durable.

        The next term is one more than the highest term in the journal.
        """
        with self._transaction():
            (last,) = self._connection.execute("SELECT max(term) FROM terms").fetchone()
            term = (last or 0) + 1
            self._insert("term", {"term": term})
        return term

    def append_all(self, entries: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Make all of the entries durable, or none of them (in one transaction).

        Raises `JournalFull` if the disk is full.
        """
        with self._transaction():
            for kind, body in entries:
                self._insert(kind, body)

    def entries(self, *, without: str = "") -> Iterator[StoredEntry]:
        """Return all entries, or all but those of the kind `without`, oldest first.

        Each entry is read when the iterator reaches it.
        """
        query = "SELECT id, at, kind, body FROM journal WHERE kind != ? ORDER BY id"
        with _explained(self._path):
            for row_id, at, kind, body in self._connection.execute(query, (without,)):
                try:
                    yield StoredEntry(row_id, at, kind, json.loads(body))
                except (ValueError, TypeError) as error:  # in a journal without digests
                    raise self._damaged(f"entry {row_id} is not JSON: {error}") from None

    def total_bytes(self, ids: Iterable[int]) -> int:
        """Return the total size of the bodies of these entries."""
        query = "SELECT total(length(body)) FROM journal WHERE id IN (SELECT value FROM json_each(?))"
        with _explained(self._path):
            (size,) = self._connection.execute(query, (json.dumps(list(ids)),)).fetchone()
        return int(size)

    @contextmanager
    def compaction(self, superseded: Collection[int], body: Mapping[str, Any]) -> Iterator[None]:
        """Return a context manager that removes entries, and commits the removal on exit without an error.

        Within the context, `entries` returns what remains.  The new first entry, "compacted", contains
        `body`, the number and the digest of the last entry before the compaction, and the number of removed
        entries; all later digests cover this entry.

        Args:
            superseded: the numbers of the entries to remove; not that of the last entry.
        """
        run = self._connection.execute
        (last,) = run("SELECT max(id) FROM journal").fetchone()
        before = {"last": last, "chain": self._chain.hex(), "removed": len(superseded)}
        triggers = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'journal'"
        with self._transaction():
            guards = run(triggers).fetchall()
            for name, _ in guards:
                run(f"DROP TRIGGER {name}")
            self._connection.executemany(
                "DELETE FROM journal WHERE id = ?", [(0,), *((number,) for number in superseded)]
            )
            row = (0, _now(), "compacted", _to_json({**before, **body}))
            run("INSERT INTO journal (id, at, kind, body) VALUES (?, ?, ?, ?)", row)
            self._chain, chains = b"", []
            for line in run("SELECT id, at, kind, body FROM journal ORDER BY id"):
                self._chain = _chain_digest(self._chain, *line)
                chains.append((self._chain, line[0]))
            self._connection.executemany("UPDATE journal SET chain = ? WHERE id = ?", chains)
            for _, sql in guards:
                run(sql)
            yield
        with contextlib.suppress(sqlite3.Error):  # on a full disk the file keeps its size for later entries
            run("VACUUM")

    def copy_to_memory(self) -> JournalStore:
        """Return a copy of the journal in memory, which another thread may use."""
        with _explained(self._path):
            memory = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
            self._connection.backup(memory)
        return JournalStore(memory, MEMORY)

    def copy_to(self, path: Path) -> tuple[int, int]:
        """Copy the journal to a new file, `path` (mode 0600); return the copy's term and last entry number.

        Raises:
            JournalError: the copy cannot be written; an incomplete file is left behind.
        """
        with _explained(str(path)), contextlib.closing(_new_file(path)) as copy:
            self._connection.backup(copy)
            (last,) = copy.execute("SELECT max(id) FROM journal").fetchone()
            (term,) = copy.execute("SELECT max(term) FROM terms").fetchone()
        return term or 0, last or 0

    # -- internal ------------------------------------------------------------------------------

    def _check(self, created: bool) -> None:
        """Raise `JournalError` if the file cannot be used.  Does not change the file.

        Args:
            created: whether this process has just created the file; otherwise, an empty file beside a key
                file counts as damaged.
        """
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("BEGIN EXCLUSIVE")  # the lock is kept until the connection is closed
        run("PRAGMA user_version = 0")  # fails if the file or its folder is read-only
        run("ROLLBACK")  # not COMMIT, which would write a header to an empty file
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        (application,) = run("PRAGMA application_id").fetchone()
        if tables and application != APPLICATION_ID:
            raise JournalError(
                f"{self._path} is another program's database, not a journal",
                remedy="choose another folder with --state",
            )
        key = _key_beside(self._path)
        if not tables and not created and self._path != MEMORY and key.exists():
            raise self._damaged(f"it is empty, although {key} exists")
        known = len(_migrations())
        if version > known:
            raise JournalError(
                f"{self._path} has journal version {version}; this gridtrain supports versions up to {known}",
                remedy="install the version of gridtrain that wrote the journal, or a newer version",
            )
        (verdict, *_) = run("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(verdict)

    def _check_digests(self) -> None:
        """Raise `JournalError` if an entry has been altered, or one before it has been removed."""
        query, chained = "SELECT id, at, kind, body, chain FROM journal ORDER BY id", False
        with _explained(self._path):
            for row_id, at, kind, body, written in self._connection.execute(query):
                self._chain = _chain_digest(self._chain, row_id, at, kind, body)
                chained = chained or written is not None
                if chained and written != self._chain:  # early versions wrote no digests
                    raise self._damaged(f"entry {row_id} has been altered")

    def _damaged(self, how: str) -> JournalError:
        return JournalError(f"the journal {self._path} is damaged ({how})", remedy=DAMAGED_REMEDY)

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA journal_mode = DELETE")  # not WAL, whose entries after a damaged byte are lost silently
        run("PRAGMA synchronous = FULL")
        (version,) = run("PRAGMA user_version").fetchone()
        for number, script in enumerate(_migrations()[version:], start=version + 1):
            self._migrate(number, script)

    def _migrate(self, number: int, script: str) -> None:
        try:
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {script}\n"
                f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number}; COMMIT;"
            )
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _insert(self, kind: str, body: Mapping[str, Any]) -> None:
        at, text = _now(), _to_json(body)
        (last,) = self._connection.execute("SELECT max(id) FROM journal").fetchone()
        row_id = (last or 0) + 1
        self._chain = _chain_digest(self._chain, row_id, at, kind, text)
        line = (row_id, at, kind, text, self._chain)
        self._connection.execute(
            "INSERT INTO journal (id, at, kind, body, chain) VALUES (?, ?, ?, ?, ?)", line
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        chain = self._chain
        with _explained(self._path, lambda: self._is_at(chain)):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._chain = chain
                if self._connection.in_transaction:  # if the disk is full, SQLite has already rolled back
                    self._connection.execute("ROLLBACK")
                raise

    def _is_at(self, chain: bytes) -> bool:
        """Return whether no transaction is open and the last entry has this digest or none (early versions).

        A commit that fails after the file was written, for example when the folder is synchronized, may
        still be complete.
        """
        try:
            row = self._connection.execute("SELECT chain FROM journal ORDER BY id DESC LIMIT 1").fetchone()
        except sqlite3.Error:
            return False
        return not self._connection.in_transaction and (row or (None,))[0] in (None, chain)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _to_json(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _chain_digest(before: bytes, row_id: int, at: str, kind: str, body: str) -> bytes:
    """Return the digest of an entry, which covers the previous digest and all of the entry's fields."""
    text = f"{row_id}\0{at}\0{kind}\0{body}".encode(errors="surrogatepass")
    return hashlib.blake2b(before + text, digest_size=CHAIN_BYTES).digest()


def _key_beside(path: str) -> Path:
    return Path(path).absolute().parent / COORDINATOR_KEY


def _created(path: Path) -> bool:
    """Create the file, readable only by its owner, because it contains members' addresses.

    Returns False if the file already exists or cannot be created.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:  # it exists, or SQLite reports what is wrong
        return False
    return True


def _new_file(path: Path) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise JournalError(
            f"{path} cannot be created: {error.strerror}",
            remedy="check the folder's permissions and the free space",
        ) from None
    return sqlite3.connect(path, isolation_level=None)


def _migrations() -> list[str]:
    """Return the migration scripts in order; script n is named 000n_*.sql."""
    folder = resources.files("gridtrain_coordinator.journal") / "migrations"
    scripts = [file for file in folder.iterdir() if file.name.endswith(".sql")]
    return [file.read_text(encoding="utf-8") for file in sorted(scripts, key=lambda file: file.name)]


def _lack_of_space(folder: Path) -> str:
    """Return "SQLITE_FULL" or "SQLITE_QUOTA" if one of them keeps the folder from growing, otherwise "".

    SQLite reports an exceeded quota as "disk I/O error", even if NFS notices it only while writing back, and
    the sqlite3 module does not provide the system's error number.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            left = os.urandom(PROBE_BYTES)  # random, because some file systems compress
            while left:
                left = left[probe.write(left) :]
            os.fsync(probe)
    except OSError as error:
        return {errno.ENOSPC: "SQLITE_FULL", errno.EDQUOT: "SQLITE_QUOTA"}.get(error.errno or 0, "")
    return ""


@contextmanager
def _explained(path: str, is_unchanged: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Convert SQLite's errors into `JournalError`, or `JournalFull` if the disk is full, with a remedy.

    Args:
        is_unchanged: returns whether a failed transaction was rolled back, so that it can be repeated.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # a name in a damaged schema
        raise JournalError(f"the journal {path} is damaged ({error})", remedy=DAMAGED_REMEDY) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"
        if code.startswith("SQLITE_NOTADB") and _key_beside(path).exists():
            code = "SQLITE_CORRUPT"  # it was a journal
        if code.startswith("SQLITE_IOERR") and is_unchanged():
            code = _lack_of_space(Path(path).absolute().parent) or code
        known = next((text for prefix, text in _REMEDIES.items() if code.startswith(prefix)), None)
        what, remedy = known or ("cannot be used", DAMAGED_REMEDY)
        kind = JournalFull if code.startswith(("SQLITE_FULL", "SQLITE_QUOTA")) else JournalError
        detail = "" if known is _IN_USE else f" ({error})"
        raise kind(f"the journal {path} {what}{detail}", remedy=remedy) from error
