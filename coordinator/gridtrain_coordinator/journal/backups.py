"""Backups of a coordinator's state while it runs, and a standby's first start from one.

Decides when a backup is due, how it lies in its folder and which ones stay.  Never reads what a journal says.

    FOLDER/backup-3-00000042/          of term 3; 42: the last entry of the journal that is in it
        journal.sqlite                 SQLite's online copy
        coordinator.key  operator.key  0600: who can read a backup can be the coordinator
        .backup-....partial            while it is written; renamed when all of it is on the disk

    gridtrain coordinator --backup-to FOLDER                     the running one
    gridtrain coordinator --state NEW --from-backup FOLDER       the next one, at the same address
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from gridtrain.errors import ConfigError, JournalError
from gridtrain.network.transport.identity import Identity, make_private_folder
from gridtrain.runtime.client.endpoint_file import COORDINATOR_KEY, OPERATOR_KEY
from gridtrain_coordinator.journal.store import JournalStore

JOURNAL = "journal.sqlite"
EVERY_S, KEEP = 5.0, 3
MAX_TIME_FRACTION = 0.05
"""A backup that took 1 s makes the next one wait for 20 s: the loop has other things to do."""

_NAME = re.compile(r"backup-(\d+)-(\d{8,})")
_KEYS = (COORDINATOR_KEY, OPERATOR_KEY)
_BESIDE = ("-wal", "-shm", "-journal")


class Backups:
    """Of one coordinator, in one folder.

    Args:
        folder: made if need be, for its owner's eyes.
        state: where the keys lie.
        every_s: at most one backup in this time.
        keep: so many of the latest stay.

    Attributes:
        failed: why there is none of the latest entries; empty: all is well.
        written_s: when the latest was finished; None: none yet.
    """

    def __init__(self, folder: Path, state: Path, *, every_s: float = EVERY_S, keep: int = KEEP) -> None:
        if keep < 1:
            raise ConfigError(f"{keep} backups are to be kept; it must be >= 1", remedy=f"try {KEEP}")
        if folder.absolute() == state.absolute():
            raise ConfigError(
                f"{folder} is the folder of the journal itself", remedy="name another disk's with --backup-to"
            )
        self.folder = folder
        self.failure = ""
        self.written_s: float | None = None
        self._state, self._interval_s, self._keep = state, every_s, keep
        self._is_pending = True  # what there is at the start is worth a backup
        self._next_s = float("-inf")

    def check_folder(self) -> None:
        """Write something there, and remove it: a folder that takes nothing is found out at the start.

        Raises `ConfigError`.
        """
        trial = self.folder / ".backup.trial"
        try:
            make_private_folder(self.folder)
            trial.write_bytes(b"backups of a coordinator's journal and keys go here")
            trial.unlink()
        except OSError as error:
            raise ConfigError(
                f"no backup can be written to {self.folder}: {error.strerror or error}",
                remedy="name a folder on another disk with --backup-to",
            ) from None

    def request(self) -> None:
        """The journal has another entry."""
        self._is_pending = True

    @property
    def is_pending(self) -> bool:
        return self._is_pending

    @property
    def due_s(self) -> float:
        return self._next_s if self._is_pending else float("inf")

    def make(self, store: JournalStore, began_s: float) -> Path:
        """Write one.  Raises `JournalError`, and leaves the earlier ones as they are."""
        self._next_s = began_s + self._interval_s
        partial = self.folder / ".backup.partial"
        try:
            make_private_folder(self.folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            term, last = store.copy_to(partial / JOURNAL)
            self._check_same_run(store)
            for name in _KEYS:
                if (self._state / name).exists():
                    Identity.read(self._state / name).write(partial / name)
            _sync(partial / JOURNAL)
            _sync(partial)
            path = self.folder / f"backup-{term}-{last:08d}"
            _put(partial, path)
            _sync(self.folder)
            for old in _complete_backups(self.folder)[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        except (OSError, ConfigError, JournalError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = str(error.strerror or error) if isinstance(error, OSError) else error.reason
            self.failure = f"no backup can be written to {self.folder}: {reason}"
            raise JournalError(self.failure, remedy="make room there, or see who may write there") from None
        self._is_pending, self.failure = False, ""
        return path

    def status(self, now_s: float) -> dict[str, object]:
        """For `gridtrain status`."""
        age_s = None if self.written_s is None else round(now_s - self.written_s, 1)
        return {
            "folder": str(self.folder),
            "age_s": age_s,
            "failed": self.failure,
            "behind": self._is_pending,
        }

    def _check_same_run(self, store: JournalStore) -> None:
        """The backups of two runs in one folder would crowd each other out."""
        for path in _complete_backups(self.folder)[-1:]:
            if (key := Identity.read(path / COORDINATOR_KEY).public) != store.key():
                raise ConfigError(f"{path} is of another coordinator ({key.hex()[:12]})")

    def record_duration(self, now_s: float, took_s: float) -> None:
        """What it took decides when the next may come."""
        self.written_s = now_s
        self._next_s = max(self._next_s, now_s + took_s / MAX_TIME_FRACTION)


def latest_backup(folder: Path) -> Path:
    """`folder` if it is a backup itself, else the latest in it.  Raises `ConfigError`."""
    if (folder / JOURNAL).is_file():
        return folder
    found = _complete_backups(folder)
    if not found:
        raise ConfigError(
            f"there is no backup in {folder}",
            remedy="name what --backup-to named, or one backup in it",
        )
    return found[-1]


def restore(backup: Path, state: Path) -> Path:
    """Make `state` what `backup` has; the journal comes last, so that a start that fails can be repeated.

    Returns the backup that was taken.

    Raises:
        ConfigError: there is a journal already, or no backup.
        JournalError: the backup is damaged, or cannot be copied.
    """
    if (state / JOURNAL).exists():
        raise ConfigError(
            f"there is a journal in {state} already, which a backup must not replace",
            remedy="leave --from-backup out to go on with it, or name a new folder with --state",
        )
    source = latest_backup(backup)
    partial = state / f".{JOURNAL}.partial"
    try:
        make_private_folder(state)
        for name in _KEYS:
            if (source / name).exists() and not (state / name).exists():
                Identity.read(source / name).write(state / name)
        _copy(source / JOURNAL, partial)
        JournalStore.open(partial).close()  # is it whole?
        for left in _BESIDE:  # of a journal that was removed alone: SQLite would write it over this one
            (state / f"{JOURNAL}{left}").unlink(missing_ok=True)
        os.rename(partial, state / JOURNAL)
        _sync(state)
    except OSError as error:
        raise JournalError(
            f"the backup {source} cannot be copied to {state}: {error.strerror}",
            remedy="make room, or see who may read and write there",
        ) from None
    except JournalError as error:
        raise JournalError(
            f"the backup {source} cannot be used: {error.reason}",
            remedy="name an older one with --from-backup",
        ) from None
    finally:
        for path in state.glob(f".{JOURNAL}.partial*"):
            path.unlink(missing_ok=True)
    return source


def _complete_backups(folder: Path) -> list[Path]:
    """The oldest first."""
    if not folder.is_dir():
        return []
    names = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    found = [((int(match[1]), int(match[2])), path) for path, match in names if match is not None]
    return [path for _, path in sorted(found)]


def _put(partial: Path, path: Path) -> None:
    """In the place of one of the same entries, if there is one."""
    old = path.with_name(".backup.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    with (
        source.open("rb") as read,
        open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as write,
    ):
        shutil.copyfileobj(read, write)
        write.flush()
        os.fsync(write.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
