"""The checkpoints of a worker that has held one stage of a model, or several in turn.

Decides where each stage's lie and which are told of.  Never decides from which the run goes on: the
coordinator does, as it takes all stages of one step (`protocol.copies`).

    <folder>/blocks-000-003/step-00000200/     as `optim.checkpoint` writes them, latest few of each stage
    <folder>/blocks-003-007/step-00000100/     also the stage before's, see `runtime.copies`

A stage is named by its blocks, the first one and the one after the last: the model may be cut anew.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.optim import checkpoint, state_sync
from gridtrain.optim.checkpoint import Checkpoint, Checkpoints, Snapshot
from gridtrain.protocol.messages import MOST_KEPT, Facts, Held, Span
from gridtrain.runtime.copies import FILES

log = logging.getLogger("gridtrain")

_BLOCKS = re.compile(r"blocks-(\d{3,})-(\d{3,})")


class StageCheckpoints:
    """Of one worker in one run.

    Args:
        folder: as in `Checkpoints`, as are `every` and `keep`.
        facts: of the training; checkpoints of another one are left alone.
        told: called with what is on the disk whenever that has changed, from a thread of its own.
        loaded: called with the checkpoints that are to become this worker's state, of these blocks.
        packed: called for a snapshot of what this worker has in memory, of these blocks; None: it has not.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        *,
        every: int,
        keep: int,
        told: Callable[[tuple[Held, ...]], None],
        loaded: Callable[[Sequence[Checkpoint], Span], None],
        packed: Callable[[Held], Snapshot | None] = lambda held: None,
    ) -> None:
        self.folder, self._facts, self._told, self._loaded = folder, facts, told, loaded
        self._packed = packed
        self._every, self._keep = every, keep
        self._lock = Checkpoints(folder, every=every, keep=keep)
        self._of: dict[Span, Checkpoints] = {}
        self._spoilt: set[Path] = set()  # cannot be used: not told of, until one is written in its place
        self._writer: threading.Thread | None = None
        self._latest: tuple[Span, int] | None = None

    def claim(self) -> None:
        """See `Checkpoints.claim`."""
        self._lock.claim()

    def release(self) -> None:
        self._lock.release()

    def held(self) -> tuple[Held, ...]:
        """What can be loaded, the latest first."""
        found = []
        for blocks, folder in self.stages():
            for path in checkpoint.folders(folder):
                if path in self._spoilt:
                    continue
                try:
                    held, facts = checkpoint.head(path)
                except ConfigError as error:
                    log.warning("%s", error)
                    continue
                if facts == self._facts:
                    found.append(replace(held, blocks=blocks))
        return tuple(sorted(found, key=lambda held: (-held.applied, held.blocks.start)))[:MOST_KEPT]

    def due(self, blocks: Span, step: int) -> bool:
        """After `step` committed steps: the same ones on all workers, as only whole models are of use."""
        return self._every > 0 and step > 0 and step % self._every == 0 and self._latest != (blocks, step)

    def write(self, blocks: Span, snapshot: Snapshot) -> None:
        """In the background."""
        self.wait()  # rather than to leave one out that the other stages have
        self._latest = blocks, snapshot.held.applied + 1
        store = self._store(blocks)
        self._drop_odd(blocks)
        store.adopt()  # what another life of this worker has left is pruned as well
        self._comes_anew(blocks, snapshot.held)
        store.write(snapshot)

        def tell() -> None:
            store.wait()
            self._told(self.held())

        self._writer = threading.Thread(target=tell, name="gridtrain-checkpoint-told", daemon=True)
        self._writer.start()

    def void(self, blocks: Span, step: int) -> None:
        """See `Checkpoints.void`."""
        self._store(blocks).void(step)

    def write_now(self, blocks: Span, snapshot: Snapshot) -> bool:
        """At once, at any step: this worker goes, and nobody else has the stage.  False: the disk is full.

        It takes no other's place: one that all stages have is not given up for one that they do not.
        """
        self.wait()
        self._drop_odd(blocks)
        try:
            checkpoint.save(snapshot, self._comes_anew(blocks, snapshot.held))
        except OSError as error:
            log.error("a stage is not written down: %s; what only this worker holds is lost", error)
            return False
        self._told(self.held())
        return True

    def _drop_odd(self, blocks: Span) -> None:
        """Those of a step at which not all stages have written one."""
        for path in checkpoint.folders(self.folder_of(blocks)) if self._every else ():
            if checkpoint.step_of(path) % self._every:
                shutil.rmtree(path, ignore_errors=True)

    def wait(self, timeout_s: float | None = None) -> None:
        if self._writer is not None:
            self._writer.join(timeout_s)

    def reload(self, held: Sequence[Held], blocks: Span) -> None:
        """Raises `ConfigError` if one cannot be read, `RemoteProtocolError` if it does not fit."""
        founds = [self.load(one) for one in held]
        try:
            self._loaded(founds, blocks)
        except RemoteProtocolError:
            self._spoilt.update(found.path for found in founds)
            raise
        step, ends = held[0].applied + 1, (blocks.start, blocks.stop - 1)
        log.warning("blocks %d to %d go on from %d checkpoints of step %d", *ends, len(held), step)

    def put_aside(self, held: Held) -> None:
        """What this worker has in memory, at once: the model is cut otherwise now.  Raises `OSError`."""
        self.wait()
        snapshot = self._packed(held)
        if snapshot is None:
            log.warning("the state of step %d is not in memory any more", held.applied + 1)
            return
        folder = self.folder_of(held.blocks)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        checkpoint.save(snapshot, self._comes_anew(held.blocks, held))

    def give(self, held: Held) -> Sequence[bytes]:
        """For another worker, as `state_sync.restore` takes it.  Raises `ConfigError`."""
        found = self.load(held)
        return state_sync.framed(found.document, found.tensors)

    def load(self, held: Held) -> Checkpoint:
        """Raises `ConfigError` if it is not there any more, or damaged; it is not told of then any more."""
        path = self._path(held.blocks, held)
        try:
            found = checkpoint.read(path)
        except ConfigError:
            self._spoilt.add(path)
            raise
        if (found.held.applied, found.held.history) != (held.applied, held.history):
            raise ConfigError(
                f"the checkpoint {path} is of another history than the run's",
                remedy="move it away: another worker's is taken",
            )
        return found

    def is_whole(self, held: Held) -> bool:
        """It can be read; else that is told.  From any thread."""
        try:
            self.load(held)
        except ConfigError as error:
            log.warning("it is not given to anybody: %s", error)
            self._told(self.held())
            return False
        return True

    def check(self, blobs: Sequence[bytes], digest: bytes) -> None:
        """What another worker gave is the checkpoint that it should be.  Raises `RemoteProtocolError`."""
        state_sync.check_content(blobs, digest)

    def copy_files(self, held: Held) -> Sequence[Path]:
        """Of a checkpoint that goes to another worker's disk as well; a residual stays here."""
        folder = checkpoint.step_folder(self.folder_of(held.blocks), held.applied + 1)
        return [folder / name for name in FILES]

    def copy_folder(self, held: Held) -> Path:
        """Raises `OSError`."""
        self.folder_of(held.blocks).mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.folder_of(held.blocks).glob(".copy-*"):
            shutil.rmtree(left, ignore_errors=True)  # whoever sent it was lost
        folder = self.folder_of(held.blocks) / f".copy-{held.applied + 1:08d}"
        folder.mkdir()
        return folder

    def adopt_copy(self, held: Held, folder: Path) -> None:
        """From another worker: only if it says of itself what it was said to be."""
        try:
            found, facts = checkpoint.head(folder)
            if (replace(found, blocks=held.blocks), facts) != (held, self._facts):
                raise ConfigError("it is of another state, or another training", remedy="none is needed")
            checkpoint.read(folder)  # its tensors are those that it was said to have
            store = self.folder_of(held.blocks)
            path = self._comes_anew(held.blocks, held)
            self._drop_odd(held.blocks)
            checkpoint.sync_files(folder)
            checkpoint.put_in_place(folder, path)
            for old in checkpoint.folders(store)[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        except (OSError, ConfigError) as error:
            log.warning("a copy of another stage's checkpoint is not kept: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            return
        self._told(self.held())

    def discard(self, after: int) -> None:
        """Of a history that the group has given up."""
        self.wait()
        if self._latest is not None and self._latest[1] > after + 1:
            self._latest = None  # that step is due once more, when it comes again
        for _, folder in self.stages():
            for path in checkpoint.folders(folder):
                if checkpoint.step_of(path) > after + 1:
                    shutil.rmtree(path, ignore_errors=True)

    def _path(self, blocks: Span, held: Held) -> Path:
        return checkpoint.step_folder(self.folder_of(blocks), held.applied + 1)

    def _comes_anew(self, blocks: Span, held: Held) -> Path:
        """Where it is about to be written; what was wrong with the one that lies there is over."""
        path = self._path(blocks, held)
        self._spoilt.discard(path)
        return path

    def _store(self, blocks: Span) -> Checkpoints:
        if blocks not in self._of:
            self._of[blocks] = Checkpoints(self.folder_of(blocks), every=self._every, keep=self._keep)
        return self._of[blocks]

    def folder_of(self, blocks: Span) -> Path:
        return self.folder / folder_name(blocks)

    def stages(self) -> list[tuple[Span, Path]]:
        """Of which there is something on the disk, and where."""
        if not self.folder.is_dir():
            return []
        found = [(blocks_of(path.name), path) for path in self.folder.iterdir()]
        known = [(blocks, path) for blocks, path in found if blocks is not None]
        return sorted(known, key=lambda one: (one[0].start, one[0].stop))


def folder_name(blocks: Span) -> str:
    return f"blocks-{blocks.start:03d}-{blocks.stop:03d}"


def blocks_of(name: str) -> Span | None:
    """Of what `folder_name` gave; None: it did not."""
    match = _BLOCKS.fullmatch(name)
    blocks = Span(int(match[1]), int(match[2])) if match else None
    return blocks if blocks is not None and blocks.start < blocks.stop else None
