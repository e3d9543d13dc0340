"""Uploads checkpoints to a URL in the background; retries until the worker exits, and decides which to drop.

    CheckpointStore --written--> add: hard links --> thread: RemoteStore.put, prune
                                                     failed: try again after 1, 5, 25, 60, 60, ... seconds

Training never waits for an upload.  If an upload takes longer than the interval between checkpoints, later
checkpoints are queued; if more than `keep` are waiting, the oldest is dropped.  If several workers have the
same URL, each part is uploaded only by the worker that uploaded it for the previous checkpoint.  The
checkpoint of the last step, which no later one replaces, is also uploaded by other workers if it does not
appear in time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gridtrain.core.messages import FAILED_UPLOADS
from gridtrain.errors import ConfigError
from gridtrain.runtime.state_transfer.checkpoint_copy import FILES
from gridtrain.training.checkpoint import checkpoint_store
from gridtrain.training.checkpoint.checkpoint_store import FailureCounter, ReportFigures
from gridtrain.training.checkpoint.remote_store import RemoteStore

log = logging.getLogger("gridtrain")

RETRY_AFTER_S = (1.0, 5.0, 25.0, 60.0)
"""The seconds to wait before each further attempt; the last value is repeated."""

FINAL_WAIT_S, FINAL_LOOK_S = 120.0, 1.0
"""How long a worker leaves the last step's checkpoint to the worker that uploaded the previous one, and the
interval at which it checks for this checkpoint."""

MAX_FINAL_ATTEMPTS = 5
"""The maximum number of attempts to upload a checkpoint when the worker is about to exit."""


@dataclass(frozen=True, slots=True)
class _Upload:
    """A checkpoint to upload.

    Attributes:
        files: a folder with hard links to the checkpoint's files, which remain when the checkpoint is
            removed.
        part: see `remote_store.Manifest`.
        is_final: whether the checkpoint belongs to the run's last step.
    """

    files: Path
    part: str
    step: int
    history: str
    is_final: bool


class CheckpointUploader:
    """Uploads the checkpoints of one worker.  The first upload starts a thread.

    Args:
        folder: the folder of the worker's checkpoints, by which its uploads are recognized after a restart.
        every, keep: the number of steps between two checkpoints, and the number of checkpoints to keep.
        start_step: the step of the latest checkpoint at the URL when this worker joined.  A run that begins
            at an earlier step must not replace this checkpoint, and the checkpoint does not prove that its
            uploader is still active.
        report_figures: as in `CheckpointStore`.
    """

    def __init__(
        self,
        store: RemoteStore,
        folder: Path,
        *,
        every: int,
        keep: int,
        start_step: int,
        report_figures: ReportFigures = lambda figures: None,
        retry_after_s: Sequence[float] = RETRY_AFTER_S,
        final_wait_s: float = FINAL_WAIT_S,
    ) -> None:
        self._store, self._every, self._keep, self._start_step = store, every, keep, start_step
        self._worker = hashlib.sha256(f"{platform.node()}:{folder.absolute()}".encode()).hexdigest()[:16]
        self._failures = FailureCounter(FAILED_UPLOADS, report_figures)
        self._retry_after_s, self._final_wait_s = tuple(retry_after_s), final_wait_s
        self._changed = threading.Condition()
        self._waiting: list[_Upload] = []  # oldest first
        self._current: _Upload | None = None  # one of those waiting
        self._attempts_left: int | None = None  # None until this worker leaves: any number
        self._thread: threading.Thread | None = None

    def add(self, folder: Path, part: str, *, is_final: bool = False) -> None:
        """Queue the checkpoint in `folder` to be uploaded.

        Args:
            is_final: whether it belongs to the run's last step; if so, no later one can replace it.
        """
        links = checkpoint_store.partial_folder(folder, f".{part}.upload")
        shutil.rmtree(links, ignore_errors=True)
        try:
            links.mkdir()
            for name in FILES:
                try:
                    os.link(folder / name, links / name)
                except OSError:  # a file system without hard links
                    shutil.copy2(folder / name, links / name)
            position, _ = checkpoint_store.read_header(links)
        except (OSError, ConfigError) as error:
            log.error("the checkpoint %s cannot be uploaded: %s", folder, error)
            shutil.rmtree(links, ignore_errors=True)
            return
        with self._changed:
            step, history = position.applied + 1, position.history.hex()
            self._waiting.append(_Upload(links, part, step, history, is_final))
            while len(others := [each for each in self._waiting if each != self._current]) > self._keep:
                self._drop(others[0])
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gridtrain-upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float, max_attempts: int = 1) -> None:
        """Upload the waiting checkpoints, with at most `max_attempts` attempts, and wait at most `timeout_s`.
        Further calls have no effect."""
        with self._changed:
            if self._attempts_left is not None:
                return
            self._attempts_left = max_attempts
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._changed:
            for upload in self._waiting:
                log.error(
                    "the checkpoint of step %d is not in %s, because its upload failed or took longer than "
                    "%g s; it is on this worker's disk",
                    *(upload.step, self._store.shown, timeout_s),
                )

    def _run(self) -> None:
        while (upload := self._next()) is not None:
            try:
                self._upload(upload)
            except Exception as error:  # fsspec's libraries raise errors of their own
                self._report_failure(upload, error)
                self._wait_after_failure()
                continue
            if self._failures.clear():
                log.info("checkpoints can be uploaded again; the latest is of step %d", upload.step)
            with self._changed:
                self._drop(upload)

    def _wait_after_failure(self) -> None:
        """Wait before the next attempt; a worker that starts to leave tries again immediately."""
        wait_s = self._retry_after_s[min(self._failures.count, len(self._retry_after_s)) - 1]
        with self._changed:
            if self._attempts_left is None:
                self._changed.wait_for(lambda: self._attempts_left is not None, wait_s)
                return
            self._attempts_left -= 1
            if self._attempts_left:
                self._changed.wait(wait_s)

    def _next(self) -> _Upload | None:
        """Wait for a checkpoint to upload; return None if this worker is leaving and no checkpoint, or no
        attempt, remains.

        The latest is uploaded first, but a step of which another stage is already stored has priority,
        because a checkpoint of a pipeline needs all stages.
        """
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._waiting or self._attempts_left is not None)
            several = len(self._waiting) > 1
        known: set[int] = set()
        with contextlib.suppress(Exception):  # the upload will also fail, and its error is logged
            known = set(self._store.steps()) if several else known
        with self._changed:
            if self._waiting and self._attempts_left != 0:
                self._current = max(self._waiting, key=lambda upload: (upload.step in known, upload.step))
            return self._current

    def _drop(self, upload: _Upload) -> None:
        self._waiting.remove(upload)
        shutil.rmtree(upload.files, ignore_errors=True)
        self._changed.notify_all()

    def _upload(self, upload: _Upload) -> None:
        if upload.step < self._start_step:
            raise ConfigError(
                f"this URL has a checkpoint of step {self._start_step}, from which the run has not continued",
                remedy="start this worker with another URL",
            )
        until_s = time.monotonic() + (self._final_wait_s if upload.is_final else 0.0)
        while self._is_superfluous(upload, self._every):
            if not upload.is_final or self._is_superfluous(upload, 0):
                return
            if time.monotonic() >= until_s:
                break
            time.sleep(FINAL_LOOK_S)
        self._store.put(upload.files, upload.part, self._worker)
        log.info("the checkpoint of step %d is in %s", upload.step, self._store.shown)
        self._store.prune(self._keep)

    def _is_superfluous(self, upload: _Upload, steps_before: int) -> bool:
        """Whether this checkpoint or a complete later one has been uploaded, or another worker has uploaded a
        checkpoint of this part that is at most `steps_before` steps earlier."""
        first = min(upload.step, max(self._start_step + 1, upload.step - steps_before))
        for step in self._store.steps():
            if step > upload.step and self._store.complete(step):
                return True
            for known in self._store.manifests(step) if first <= step <= upload.step else ():
                is_done, is_others = known.history == upload.history, known.worker != self._worker
                if known.part == upload.part and (is_done if step == upload.step else is_others):
                    return True
        return False

    def _report_failure(self, upload: _Upload, error: Exception) -> None:
        if self._failures.add(type(error).__name__):  # its text may name a different file each time
            log.error(
                "the checkpoint of step %d cannot be uploaded to %s: %s: %s (failed attempts in a row: %d); "
                "training continues, and the upload will be retried",
                *(upload.step, self._store.shown, type(error).__name__, error, self._failures.count),
            )
