"""Writes due checkpoints to a worker's disk, keeps a few, rejects incompatible ones, warns about a full disk.

    <folder>/step-00000200/
        state.json             step, history, ledger, facts, digests, and the state without its tensors;
                               for a PEFT or transformers model, also `pretrained.PretrainedLayout`
        tensors.safetensors    the tensors of parameters, buffers, optimizer and trackers
        residual.safetensors   the residual, if the exchange keeps one

The state is copied on the training thread between two steps.  A writer thread writes the copy to a temporary
folder and renames the folder when everything is on disk, so that a checkpoint is either complete or absent.
The coordinator decides whether a run continues from a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from gridtrain.core.commit.ledger_record import ledger_entry, parse_ledger
from gridtrain.core.messages import FAILED_CHECKPOINTS, LATER_FACTS, CheckpointInfo, Facts
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.transport.identity import make_private_folder
from gridtrain.runtime.state_transfer.checkpoint_copy import RESIDUAL_FILE
from gridtrain.training.checkpoint.serialization import content_digest, safetensors_pieces

log = logging.getLogger("gridtrain")

FORMAT = 1
MAX_JSON_BYTES = 256 << 20
_DIGEST_BYTES = 32
WARNING_INTERVAL_S = 600.0
"""The interval at which a worker repeats the message that it cannot write or upload checkpoints."""

START_FROM_MODEL = "to train its model with other settings, load it in a new run (see docs/operations.md)"
"""What to do with a model whose checkpoint is rejected."""

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".step-*.partial"
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """The content of a checkpoint.  Until it is written, its tensors are copies that training does not
    change.

    Attributes:
        facts: the training settings, as in `Setup.facts`.
        document, tensors: the state as `serialization.pack_state` returned it.
        residual: the residual by name; empty if the checkpoint contains none.
        pretrained: a `PretrainedLayout` as JSON; None for other models, and in older checkpoints.
    """

    position: CheckpointInfo
    facts: Facts
    document: dict[str, Any]
    tensors: Mapping[str, Tensor]
    residual: Mapping[str, Tensor]
    pretrained: Any = None


@dataclass(frozen=True, slots=True)
class Checkpoint(CheckpointContent):
    """A checkpoint that was read from disk."""

    path: Path = field(kw_only=True)

    @property
    def step(self) -> int:
        """The number of steps that were committed before the checkpoint."""
        return self.position.applied + 1


ReportFigures = Callable[[Mapping[str, float]], None]


class FailureCounter:
    """Counts consecutive failures and decides which of them are logged: the first, each whose error differs
    from the previous one, and a persistent error at intervals.

    Args:
        figure: the name of the figure that reports the count.
    """

    def __init__(
        self, figure: str, report_figures: ReportFigures, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._figure, self._report_figures, self._clock = figure, report_figures, clock
        self.count, self._error, self._warned_s = 0, "", -math.inf

    def add(self, error: str) -> bool:
        """Count a failure; return whether to log it."""
        self.count += 1
        now_s = self._clock()
        is_due = error != self._error or now_s >= self._warned_s + WARNING_INTERVAL_S
        self._error, self._warned_s = error, now_s if is_due else self._warned_s
        self._report_figures({self._figure: float(self.count)})
        return is_due

    def clear(self) -> bool:
        """Record a success; return whether failures preceded it."""
        had_failed, self.count, self._error, self._warned_s = self.count > 0, 0, "", -math.inf
        if had_failed:
            self._report_figures({self._figure: 0.0})
        return had_failed


class CheckpointStore:
    """The checkpoints of one worker in one run.

    Args:
        folder: the folder for the checkpoints; `claim` creates it.
        every: the number of steps between two checkpoints; 0 writes none.
        keep: the number of checkpoints to keep.
        report_figures: a function that is called, from the writer thread, with the number of consecutive
            failed checkpoints.
        clock: a function that returns monotonic seconds.
        on_written: a function that is called, from the writer thread, with the folder of each checkpoint
            that has been written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep: int,
        report_figures: ReportFigures = lambda figures: None,
        clock: Callable[[], float] = time.monotonic,
        on_written: Callable[[Path], None] = lambda path: None,
    ) -> None:
        if every < 0 or keep < 1:
            raise ConfigError(
                f"every is {every} and keep is {keep}; every must be >= 0 and keep >= 1",
                remedy="try every=500 and keep=2",
            )
        self.folder = folder
        self._every, self._keep = every, keep
        self._writer: threading.Thread | None = None
        self._failures = FailureCounter(FAILED_CHECKPOINTS, report_figures, clock)
        self._on_written = on_written
        self._latest: int | None = None
        self._own: list[Path] = []  # oldest first; other checkpoints on disk may belong to another history
        self._has_written = False
        self._lock: int | None = None
        self._dropped_residual: int | None = None  # the step of a residual that was sent

    def claim(self) -> None:
        """Lock the folder for this worker until `release`; log a warning if it cannot be written to.

        Raises:
            ConfigError: another worker uses the folder.
        """
        if not self._every:
            return
        try:
            make_private_folder(self.folder)  # residuals contain traces of samples
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_partial()
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"the checkpoint folder {self.folder} is in use by another worker",
                remedy="use a separate state directory for each worker: --state-dir",
            ) from None
        except OSError as error:
            log.warning(
                "no checkpoints will be written: %s is not writable: %s; start this worker with another "
                "--state-dir, or with --checkpoint-every 0 to write none",
                *(self.folder, error.strerror or error),
            )

    def _remove_partial(self) -> None:
        """Remove the partial checkpoints of killed processes, because they take up a lot of space."""
        for left in (*self.folder.glob(_PARTIAL), *self.folder.glob(f"*/{_PARTIAL}")):
            shutil.rmtree(left, ignore_errors=True)

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def mark_verified(self) -> None:
        """Record that training continues from the latest checkpoint; the checkpoints on disk thus belong to
        the group's history."""
        with contextlib.suppress(OSError):
            self._own = list_checkpoints(self.folder)

    def keep_other_history(self, facts: Facts, current: CheckpointInfo) -> Path | None:
        """Move the checkpoints that were written with these settings, but belong to a different history than
        the group's state, to a new folder `earlier-N`.

        Returns this folder, or None if there are no such checkpoints.

        Raises:
            OSError: they cannot be moved.
        """
        found = [
            path
            for path, position, written in (readable_headers(self.folder) if self._every else ())
            if matches_facts(written, facts) and is_of_other_history(position, current)
        ]
        return _move_to_earlier(self.folder, found) if found else None

    def _prune_unverified(self, step: int) -> None:
        """Remove the checkpoints before `step` that earlier processes wrote with the same settings.

        The latest of them stays, because it may belong to a different history than the group's.
        """
        found = [path for path in list_checkpoints(self.folder) if checkpoint_step(path) < step]
        for path in found[:-1]:
            with contextlib.suppress(ConfigError):  # unreadable: its settings are unknown
                read_header(path)
                remove(path)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` committed steps.  While the previous checkpoint is being
        written, none is due."""
        if self._latest is None:
            self._latest = step  # the step at which this worker starts
        return (
            self._every > 0 and not self._is_writing() and step // self._every > self._latest // self._every
        )

    def write(self, content: CheckpointContent) -> None:
        """Write a checkpoint in the background.  Errors, such as a full disk, are logged, and training
        continues."""
        self.wait()
        self._dropped_residual = None
        self._latest = content.position.applied + 1
        self._writer = threading.Thread(
            target=self._write, args=(content,), name="gridtrain-checkpoint", daemon=True
        )
        self._writer.start()

    def drop_residual(self, step: int) -> None:
        """Remove the residual, which was sent to another worker, from the checkpoint of `step`, even if the
        checkpoint is still being written."""
        self._dropped_residual = step  # set first, because the writer reads it after the rename
        self._drop_residual(step)

    def _drop_residual(self, step: int) -> None:
        with contextlib.suppress(OSError):
            (step_folder(self.folder, step) / RESIDUAL_FILE).unlink()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no checkpoint is being written; return False if `timeout_s` passes first."""
        if self._writer is not None:
            self._writer.join(timeout_s)
        return not self._is_writing()

    def latest(self, facts: Facts) -> Checkpoint | None:
        """Return the latest readable checkpoint with these settings; None if there is none.

        Damaged checkpoints, and checkpoints of a different model or data set, are skipped with a warning.
        """
        try:
            paths = list_checkpoints(self.folder)
        except OSError as error:
            log.warning("checkpoints in %s cannot be listed: %s", self.folder, error.strerror or error)
            paths = []
        for path in reversed(paths):
            try:
                checkpoint = read(path)
            except ConfigError as error:
                log.warning("%s", error)
                continue
            if matches_facts(checkpoint.facts, facts):
                return checkpoint
            log.warning(
                "the checkpoint %s was written with different training settings (%s) and will not be "
                "used; %s",
                *(path, describe_difference(checkpoint.facts, facts), START_FROM_MODEL),
            )
        return None

    def latest_step(self, facts: Facts, most: int) -> int:
        """Return the step of the latest checkpoint with these settings that is not later than step `most` and
        has a readable header; 0 if there is none."""
        with contextlib.suppress(OSError):
            headers = list(readable_headers(self.folder))
            for _, position, written in reversed(headers):
                if position.applied < most and matches_facts(written, facts):
                    return position.applied + 1
        return 0

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _write(self, content: CheckpointContent) -> None:
        step = content.position.applied + 1
        try:
            if is_first := not self._has_written:
                keep_refused(self.folder, [self.folder], content.facts)
            save(content, step_folder(self.folder, step))
            self._has_written = True
            if is_first and not self._own:
                self._prune_unverified(step)
            if step == self._dropped_residual:
                self._drop_residual(step)
            written = step_folder(self.folder, step)
            self._own = [path for path in self._own if path != written and path.exists()]  # others were moved
            self._own.append(written)
            while len(self._own) > self._keep:
                remove(self._own.pop(0))
        except OSError as error:
            if self._failures.add(str(error)):
                log.error(
                    "the checkpoint of step %d cannot be written to %s: %s (failed checkpoints in a row: "
                    "%d); training continues without it; free space on that disk, or start this worker with "
                    "another --state-dir",
                    *(step, self.folder, error.strerror or error, self._failures.count),
                )
            return
        if self._failures.clear():
            log.info("checkpoints can be written again; the latest is of step %d: %s", step, self.folder)
        self._on_written(step_folder(self.folder, step))


def parse_facts(pairs: Iterable[Sequence[object]]) -> Facts:
    """Return the facts that were written to JSON as (name, value) pairs."""
    return tuple((str(name), str(value)) for name, value in pairs)


def matches_facts(written: Facts, facts: Facts) -> bool:
    """Whether a file was written with these training settings.

    Earlier versions recorded fewer settings.  Instead of a description of the base, those versions wrote the
    base's values, which are compared when they are loaded (`frozen_base.without_base`).
    """
    known = dict(written)
    return written == tuple(fact for fact in facts if fact[0] in known or fact[0] not in LATER_FACTS)


def describe_difference(written: Facts, facts: Facts) -> str:
    """Return a description of the training settings in which a file and `facts` differ, with both values of
    each."""
    there, here = dict(written), dict(facts)
    other = [name for name in dict.fromkeys((*there, *here)) if there.get(name) != here.get(name)]
    return "; ".join(f"{n}: {there.get(n, 'missing')}, now {here.get(n, 'missing')}" for n in other)


def refused_checkpoints(folders: Iterable[Path], facts: Facts) -> dict[Path, str]:
    """Map each checkpoint in `folders` that was written with different training settings to a description of
    the difference."""
    headers = itertools.chain.from_iterable(map(readable_headers, folders))
    return {
        path: describe_difference(written, facts)
        for path, _, written in headers
        if not matches_facts(written, facts)
    }


def check_not_refused(folders: Iterable[Path], facts: Facts, place: Path) -> None:
    """Raise `ConfigError` if checkpoints in `folders` were written with different training settings.

    Args:
        place: the folder that contains `folders`; the message names it.
    """
    if refused := refused_checkpoints(folders, facts):
        path, difference = refused.popitem()
        raise ConfigError(
            f"the checkpoint {path} was written with different training settings ({difference})",
            remedy="undo the change to continue from the checkpoint, or begin a new run with a --state-dir "
            f"other than {place}; {START_FROM_MODEL}",
        )


def keep_refused(place: Path, folders: Iterable[Path], facts: Facts) -> None:
    """Move the checkpoints that were written with different training settings from `folders` to a new folder
    `earlier-N` in `place`, so that they are neither replaced nor removed.  Raises `OSError` if they cannot be
    moved."""
    if refused := refused_checkpoints(folders, facts):
        kept = _move_to_earlier(place, refused)
        log.warning("the checkpoints that were written with different training settings are now in %s", kept)


def earlier_folder(place: Path, is_free: Callable[[Path], bool]) -> Path:
    """Return the first of the paths `earlier-1`, `earlier-2`, ... in `place` for which `is_free` is true."""
    return next(path for n in itertools.count(1) if is_free(path := place / f"earlier-{n}"))


def _move_to_earlier(place: Path, paths: Iterable[Path]) -> Path:
    kept = earlier_folder(place, lambda path: not path.exists())
    for path in paths:
        target = kept / path.relative_to(place)
        make_private_folder(target.parent)
        os.rename(path, target)
    return kept


def is_of_other_history(written: CheckpointInfo, current: CheckpointInfo) -> bool:
    """Whether it is certain that the state `current` was not trained from the checkpoint `written`."""
    is_same = (written.applied, written.history) == (current.applied, current.history)
    is_restarted = written.ledger.restart_generation != current.ledger.restart_generation
    return is_restarted or (written.applied >= current.applied and not is_same)


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return folder / checkpoint_folder_name(step)


def checkpoint_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def partial_folder(path: Path, use: str = "") -> Path:
    """Return the folder in which a checkpoint is prepared; `claim` removes the folders that killed processes
    left behind."""
    return path.with_name(f".{path.name}{use}.partial")


def save(content: CheckpointContent, path: Path) -> None:
    """Write a checkpoint to the folder `path`, completely or not at all; replace an existing one.  Raises
    `OSError` if it cannot be written."""
    with replaced_folder(path) as partial:
        _write_file(partial / "tensors.safetensors", safetensors_pieces(content.tensors))
        residual = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        if content.residual:
            _write_file(partial / RESIDUAL_FILE, _hashed(safetensors_pieces(content.residual), residual))
        body = {
            "format": FORMAT,
            "applied": content.position.applied,
            "history": content.position.history.hex(),
            "ledger": ledger_entry(content.position.ledger),
            "facts": [list(fact) for fact in content.facts],
            "content": content_digest(content.document, content.tensors).hex(),
            "residual": residual.hexdigest(),
            "state": content.document,
        }
        if content.pretrained is not None:
            body["pretrained"] = content.pretrained
        _write_file(partial / "state.json", [json.dumps(body, separators=(",", ":")).encode()])


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder; after the `with` block, flush its files to disk and put it in place of the folder
    `path`.  After an error, remove the new folder, and leave `path` as it is."""
    partial = partial_folder(path)
    shutil.rmtree(partial, ignore_errors=True)
    make_private_folder(path.parent)
    partial.mkdir()
    try:
        yield partial
        sync_files(partial)
        publish_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint.  It is renamed first, if possible, so that no reader finds it incomplete."""
    removed = partial_folder(path, ".removed")
    try:
        os.rename(path, removed)
    except OSError:  # it is already removed, or the folder is read-only
        removed = path
    shutil.rmtree(removed, ignore_errors=True)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint.  Raises `ConfigError` if it cannot be read or is damaged."""
    try:
        text = _read_text(path / "state.json")
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise ValueError(
                f"its format is {body['format']!r}; this version of gridtrain reads format {FORMAT}"
            )
        held = _parse_position(body)
        facts = parse_facts(body["facts"])
        tensors = safetensors.torch.load_file(path / "tensors.safetensors")
        residual = _read_residual(path / RESIDUAL_FILE, body.get("residual", ""))
        if held.digest and content_digest(dict(body["state"]), tensors) != held.digest:
            raise ValueError("its tensors differ from those that were written")
        state = dict(body["state"])
        return Checkpoint(held, facts, state, tensors, residual, body.get("pretrained"), path=path)
    except (*_UNREADABLE, RemoteProtocolError, SafetensorError) as error:
        raise _unreadable_error(path, error) from None


def replace_pretrained(path: Path, pretrained: Any) -> None:
    """Replace the `PretrainedLayout` of a checkpoint that is not published yet; the checkpoint's digest does
    not cover the layout.  Raises `OSError` if the checkpoint cannot be read or written."""
    body = json.loads(_read_text(path / "state.json"))
    body["pretrained"] = pretrained
    _write_file(path / "state.json", [json.dumps(body, separators=(",", ":")).encode()])


def _read_residual(path: Path, written: str) -> dict[str, Tensor]:
    """Read the residual; return an empty one if the file is missing, or if it differs from what was written,
    because the state is usable without the residual.

    Args:
        written: the residual's digest according to `state.json`; "" in older checkpoints.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    if written and hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest() != written:
        log.warning(
            "the residual %s differs from what was written and is lost; the state is not affected", path
        )
        return {}
    return safetensors.torch.load(data)


def _hashed(pieces: Iterable[memoryview], total: hashlib.blake2b) -> Iterator[memoryview]:
    """Yield the pieces, and add each to the digest `total`."""
    for piece in pieces:
        total.update(piece)
        yield piece


def read_header(path: Path) -> tuple[CheckpointInfo, Facts]:
    """Read a checkpoint's position and facts; `read` may still find the checkpoint damaged.  Raises
    `ConfigError` if they cannot be read."""
    try:
        body = json.loads(_read_text(path / "state.json"))
        return _parse_position(body), parse_facts(body["facts"])
    except _UNREADABLE as error:
        raise _unreadable_error(path, error) from None


def _parse_position(body: Mapping[str, Any]) -> CheckpointInfo:
    digest = bytes.fromhex(body.get("content", ""))  # older checkpoints have none
    history = bytes.fromhex(body["history"])
    return CheckpointInfo(int(body["applied"]), history, parse_ledger(body["ledger"]), digest=digest)


def _unreadable_error(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}",
        remedy="move it to another folder; an older checkpoint in the same folder may be usable",
    )


def parse_step(name: str) -> int | None:
    """Return the step of the checkpoint folder `name`; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint that `list_checkpoints` has found."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if parse_step(path.name) is not None)
    return sorted(found, key=checkpoint_step)


def readable_headers(folder: Path) -> Iterator[tuple[Path, CheckpointInfo, Facts]]:
    """Yield path, position and facts of each complete checkpoint with a readable header, oldest first."""
    for path in list_checkpoints(folder):
        with contextlib.suppress(ConfigError):
            yield path, *read_header(path)


def _read_text(path: Path) -> bytes:
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_JSON_BYTES} bytes")
    return text


def publish_folder(partial: Path, path: Path) -> None:
    """Replace the folder `path` with `partial`, whose files have been flushed to disk.  Raises `OSError` if
    that fails."""
    sync_folder(partial)
    shutil.rmtree(path, ignore_errors=True)  # it is from before a rollback
    os.rename(partial, path)
    sync_folder(path.parent)


def sync_files(folder: Path) -> None:
    """Flush the files in `folder` to disk.  Raises `OSError` if that fails."""
    for path in folder.iterdir():
        sync_folder(path)


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        file.writelines(pieces)


def sync_folder(folder: Path) -> None:
    """Flush a folder or a file to disk.  Raises `OSError` if that fails."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
