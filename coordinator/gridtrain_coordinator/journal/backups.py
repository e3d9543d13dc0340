"""Decides how often to back up the coordinator's state and how many backups to keep; restores a backup.

FOLDER/backup-3-00000042/          term 3, up to entry 42 of the journal
    journal.sqlite                 a copy made with SQLite's online backup API
    coordinator.key  operator.key  mode 0600; anyone who has a backup can impersonate the coordinator
FOLDER/.backup.partial/            a backup that is being written; renamed once it is on disk

    loop: begin(store) -- copy of the journal in memory --> thread: write, fsync, rename, remove old backups
          poll() <------- path, error, or no answer yet ---------+

Only the thread touches FOLDER, which may be on a disk or a server that has stopped answering.  It is a daemon
thread, so that it cannot keep the process from exiting.

gridtrain coordinator --backup-to FOLDER                     the running coordinator
gridtrain coordinator --state NEW --from-backup FOLDER       its successor, at the same address
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from gridtrain.errors import ConfigError, JournalError
from gridtrain.network.transport.identity import Identity, make_private_folder
from gridtrain.runtime.client.endpoint_file import COORDINATOR_KEY, OPERATOR_KEY
from gridtrain.runtime.client.private_file import replace_private_file
from gridtrain_coordinator.journal.store import JournalStore

JOURNAL = "journal.sqlite"
EVERY_S, KEEP = 5.0, 3
MAX_TIME_FRACTION = 0.05
"""The largest fraction of the time that backups may take, so that the loop and the disk stay responsive.

After a backup that took 1 s, the next one is made no earlier than 20 s later.
"""
ANSWER_TIMEOUT_S = 30.0
"""The time after which a backup that is still being written counts as failed."""

_Result = TypeVar("_Result")
_NAME = re.compile(r"backup-(\d+)-(\d{8,})")
_KEYS = (COORDINATOR_KEY, OPERATOR_KEY)
_BESIDE = ("-wal", "-shm", "-journal")


class Backups:
    """The backups of one coordinator in one folder.

    Args:
        folder: the folder of the backups; created if necessary, readable only by its owner.
        state: the folder of the journal and the keys.
        every_s: the shortest time between two backups, in seconds.
        keep: the number of backups to keep.

    Attributes:
        failure: the reason why the latest backup failed; empty if it succeeded or none has been attempted.
        written_s: when the latest backup was finished; None before the first backup.
        is_pending: whether the latest backup, including one that is being written, lacks a journal entry.
    """

    def __init__(self, folder: Path, state: Path, *, every_s: float = EVERY_S, keep: int = KEEP) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}; it must be at least 1", remedy=f"use --backup-keep {KEEP}")
        if folder.absolute() == state.absolute():
            raise ConfigError(
                f"backups cannot be written to {folder}, because it is the folder of the journal itself",
                remedy="choose a folder on another disk with --backup-to",
            )
        self.folder = folder
        self.failure = ""
        self.written_s: float | None = None
        self._state, self._interval_s, self._keep = state, every_s, keep
        self.is_pending = True  # so that the initial state is also backed up
        self._next_s = self._began_s = float("-inf")
        self._writing: Future[tuple[Path, float]] | None = None

    def check_folder(self) -> None:
        """Write a file and remove it, so that an unusable folder is detected at startup.

        Raises `ConfigError` if the file cannot be written within `ANSWER_TIMEOUT_S`.
        """
        trial = _in_thread(self._try_folder)
        wait([trial], ANSWER_TIMEOUT_S)
        error = trial.exception() if trial.done() else _no_answer()
        if isinstance(error, OSError):
            raise ConfigError(
                f"no backup can be written to {self.folder}: {error.strerror or error}",
                remedy="choose a folder on another disk with --backup-to",
            ) from None
        trial.result()

    def _try_folder(self) -> None:
        make_private_folder(self.folder)
        probe = self.folder / ".backup.trial"
        probe.write_bytes(b"backups of a coordinator's journal and keys go here")
        probe.unlink()

    def request(self) -> None:
        """Request a backup.  Call when the journal has a new entry."""
        self.is_pending = True

    @property
    def due_s(self) -> float:
        """When to call `begin`; infinite if no backup is needed, or one is being written."""
        return self._next_s if self.is_pending and self._writing is None else float("inf")

    @property
    def is_writing(self) -> bool:
        """Whether a backup has begun and `poll` has not reported its end yet."""
        return self._writing is not None

    def begin(self, store: JournalStore, now_s: float) -> None:
        """Copy the journal into memory, and begin to write the copy to the folder; `poll` reports the end.

        Args:
            now_s: the current time; the next backup is made at least `every_s` later.
        """
        self._began_s, self._next_s = now_s, now_s + self._interval_s
        self.is_pending = False
        began_s = time.monotonic()
        try:
            copy = store.copy_to_memory()
        except JournalError as error:
            self._writing = Future()
            self._writing.set_exception(error)
            return
        self._writing = _in_thread(lambda: (self._write(copy), time.monotonic() - began_s))

    def poll(self, now_s: float) -> Path | None:
        """Return the folder of a backup that has been finished since the previous call.

        Raises `JournalError` if the backup cannot be written (earlier backups then remain unchanged), or is
        not finished within `ANSWER_TIMEOUT_S` (it may still be finished later).
        """
        if self._writing is None:
            return None
        if not self._writing.done():
            if now_s - self._began_s < ANSWER_TIMEOUT_S:
                return None
            raise self._failed(_no_answer())
        ended, self._writing = self._writing, None
        try:
            path, duration_s = ended.result()
        except (OSError, ConfigError, JournalError) as error:
            self.is_pending = True
            raise self._failed(error) from None
        self.failure, self.written_s = "", now_s
        self._next_s = max(self._next_s, now_s + duration_s / MAX_TIME_FRACTION)
        return path

    def wait(self, now_s: float) -> None:
        """Wait for the backup that is being written, if any, at most until `poll` reports it as failed."""
        if self._writing is not None:
            wait([self._writing], max(self._began_s + ANSWER_TIMEOUT_S - now_s, 0.0))

    def _write(self, copy: JournalStore) -> Path:
        """Write a backup and remove old ones; return the new one's folder.  Runs in a thread of its own."""
        partial = self.folder / ".backup.partial"
        try:
            make_private_folder(self.folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            term, last = copy.copy_to(partial / JOURNAL)
            self._check_same_run(copy)
            for name in _KEYS:
                if name == COORDINATOR_KEY or (self._state / name).exists():
                    Identity.read(self._state / name).write(partial / name)
            _sync(partial / JOURNAL)
            _sync(partial)
            path = self.folder / f"backup-{term}-{last:08d}"
            _put(partial, path)
            _sync(self.folder)
            for old in _complete_backups(self.folder)[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            copy.close()
        return path

    def _failed(self, error: OSError | ConfigError | JournalError) -> JournalError:
        reason = str(error.strerror or error) if isinstance(error, OSError) else error.reason
        self.failure = f"no backup can be written to {self.folder}: {reason}"
        return JournalError(
            self.failure,
            remedy="free disk space, check the disk and the permissions, or choose another folder with "
            "--backup-to",
        )

    def status(self, now_s: float) -> dict[str, object]:
        """Return the information about backups for `gridtrain status`."""
        age_s = None if self.written_s is None else round(now_s - self.written_s, 1)
        return {
            "folder": str(self.folder),
            "age_s": age_s,
            "failed": self.failure,
            "behind": self.is_pending or self.is_writing,
        }

    def _check_same_run(self, store: JournalStore) -> None:
        """Raise `ConfigError` if the latest backup in the folder belongs to another coordinator.

        Two coordinators with one backup folder would delete each other's backups.
        """
        for path in _complete_backups(self.folder)[-1:]:
            if (key := Identity.read(path / COORDINATOR_KEY).public) != store.key():
                raise ConfigError(f"{path} belongs to another coordinator (key {key.hex()[:12]})")


def latest_backup(folder: Path) -> Path:
    """Return `folder` if it is itself a backup, otherwise the latest backup in it.

    Raises `ConfigError` if there is none.
    """
    if (folder / JOURNAL).is_file():
        return folder
    found = _complete_backups(folder)
    if not found:
        raise ConfigError(
            f"there is no backup in {folder}",
            remedy="specify the folder that was given to --backup-to, or one backup in that folder",
        )
    return found[-1]


def restore(backup: Path, state: Path) -> Path:
    """Copy a backup to the folder `state`, the journal last, so that a failed restore can be repeated.

    Returns the backup that was used.

    Args:
        backup: a backup, or a folder of backups, of which the latest is used.

    Raises:
        ConfigError: `state` already contains a journal, there is no backup, or a key file cannot be read or
            written.
        JournalError: the backup is damaged, or cannot be copied.
    """
    if (state / JOURNAL).exists():
        raise ConfigError(
            f"{state} already contains a journal, which a backup must not replace",
            remedy="omit --from-backup to continue with this journal, or choose a new folder with --state",
        )
    source = latest_backup(backup)
    partial = state / f".{JOURNAL}.partial"
    try:
        make_private_folder(state)
        for name in _KEYS:
            if (source / name).exists() and not (state / name).exists():
                Identity.read(source / name).write(state / name)
        replace_private_file(partial, (source / JOURNAL).read_bytes(), durable=True)
        JournalStore.open(partial).close()  # checks that the copy is complete
        for suffix in _BESIDE:  # left behind if only the journal was removed; SQLite would apply these files
            (state / f"{JOURNAL}{suffix}").unlink(missing_ok=True)
        os.rename(partial, state / JOURNAL)
        _sync(state)
    except OSError as error:
        raise JournalError(
            f"the backup {source} cannot be copied to {state}: {error.strerror}",
            remedy="free disk space, or check the permissions of both folders",
        ) from None
    except JournalError as error:
        raise JournalError(
            f"the backup {source} cannot be used: {error.reason}",
            remedy="choose an older backup with --from-backup",
        ) from None
    finally:
        for path in state.glob(f".{JOURNAL}.partial*"):
            path.unlink(missing_ok=True)
    return source


def _in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Call `call` in a daemon thread; return the future of its result."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised in the thread that asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="gridtrain-backup", daemon=True).start()
    return future


def _no_answer() -> OSError:
    return OSError(errno.ETIMEDOUT, f"it has not answered for {ANSWER_TIMEOUT_S:g} s")


def _complete_backups(folder: Path) -> list[Path]:
    """Return the complete backups in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    names = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    found = [((int(match[1]), int(match[2])), path) for path, match in names if match is not None]
    return [path for _, path in sorted(found)]


def _put(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`, replacing any backup of the same entries."""
    old = path.with_name(".backup.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
