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

from gridtrain.core.messages import MAX_STAGE_CHECKPOINTS, CheckpointInfo, Facts, Span
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.runtime.state_transfer.checkpoint_copy import FILES
from gridtrain.training.checkpoint import checkpoint_store, serialization
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint, CheckpointContent, CheckpointStore

log = logging.getLogger("gridtrain")

_BLOCKS = re.compile(r"blocks-(\d{3,})-(\d{3,})")


class StageCheckpointStore:
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
        told: Callable[[tuple[CheckpointInfo, ...]], None],
        loaded: Callable[[Sequence[Checkpoint], Span], None],
        packed: Callable[[CheckpointInfo], CheckpointContent | None] = lambda held: None,
    ) -> None:
        self.folder, self._facts, self._report, self._load_state = folder, facts, told, loaded
        self._pack_state = packed
        self._every, self._keep = every, keep
        self._lock = CheckpointStore(folder, every=every, keep=keep)
        self._stores: dict[Span, CheckpointStore] = {}
        self._damaged: set[Path] = set()  # cannot be used: not told of, until one is written in its place
        self._writer: threading.Thread | None = None
        self._latest: tuple[Span, int] | None = None

    def claim(self) -> None:
        """See `Checkpoints.claim`."""
        self._lock.claim()

    def release(self) -> None:
        self._lock.release()

    def stored_checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """What can be loaded, the latest first."""
        found = []
        for blocks, folder in self.stages():
            for path in checkpoint_store.list_checkpoints(folder):
                if path in self._damaged:
                    continue
                try:
                    held, facts = checkpoint_store.read_header(path)
                except ConfigError as error:
                    log.warning("%s", error)
                    continue
                if facts == self._facts:
                    found.append(replace(held, layers=blocks))
        return tuple(sorted(found, key=lambda held: (-held.applied, held.layers.start)))[
            :MAX_STAGE_CHECKPOINTS
        ]

    def is_due(self, blocks: Span, step: int) -> bool:
        """After `step` committed steps: the same ones on all workers, as only whole models are of use."""
        return self._every > 0 and step > 0 and step % self._every == 0 and self._latest != (blocks, step)

    def write(self, blocks: Span, snapshot: CheckpointContent) -> None:
        """In the background."""
        self.wait()  # rather than to leave one out that the other stages have
        self._latest = blocks, snapshot.position.applied + 1
        store = self._store(blocks)
        self._drop_unaligned(blocks)
        store.mark_verified()  # what another life of this worker has left is pruned as well
        self._replace(blocks, snapshot.position)
        store.write(snapshot)

        def tell() -> None:
            store.wait()
            self._report(self.stored_checkpoints())

        self._writer = threading.Thread(target=tell, name="gridtrain-checkpoint-told", daemon=True)
        self._writer.start()

    def drop_residual(self, blocks: Span, step: int) -> None:
        """See `Checkpoints.void`."""
        self._store(blocks).drop_residual(step)

    def write_now(self, blocks: Span, snapshot: CheckpointContent) -> bool:
        """At once, at any step: this worker goes, and nobody else has the stage.  False: the disk is full.

        It takes no other's place: one that all stages have is not given up for one that they do not.
        """
        self.wait()
        self._drop_unaligned(blocks)
        try:
            checkpoint_store.save(snapshot, self._replace(blocks, snapshot.position))
        except OSError as error:
            log.error("a stage is not written down: %s; what only this worker holds is lost", error)
            return False
        self._report(self.stored_checkpoints())
        return True

    def _drop_unaligned(self, blocks: Span) -> None:
        """Those of a step at which not all stages have written one."""
        for path in checkpoint_store.list_checkpoints(self.folder_of(blocks)) if self._every else ():
            if checkpoint_store.checkpoint_step(path) % self._every:
                shutil.rmtree(path, ignore_errors=True)

    def wait(self, timeout_s: float | None = None) -> None:
        if self._writer is not None:
            self._writer.join(timeout_s)

    def reload(self, held: Sequence[CheckpointInfo], blocks: Span) -> None:
        """Raises `ConfigError` if one cannot be read, `RemoteProtocolError` if it does not fit."""
        founds = [self.load(one) for one in held]
        try:
            self._load_state(founds, blocks)
        except RemoteProtocolError:
            self._damaged.update(found.path for found in founds)
            raise
        step, ends = held[0].applied + 1, (blocks.start, blocks.stop - 1)
        log.warning("blocks %d to %d go on from %d checkpoints of step %d", *ends, len(held), step)

    def save_now(self, held: CheckpointInfo) -> None:
        """What this worker has in memory, at once: the model is cut otherwise now.  Raises `OSError`."""
        self.wait()
        snapshot = self._pack_state(held)
        if snapshot is None:
            log.warning("the state of step %d is not in memory any more", held.applied + 1)
            return
        folder = self.folder_of(held.layers)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        checkpoint_store.save(snapshot, self._replace(held.layers, held))

    def read_for_peer(self, held: CheckpointInfo) -> Sequence[bytes]:
        """For another worker, as `state_sync.restore` takes it.  Raises `ConfigError`."""
        found = self.load(held)
        return serialization.frame_state(found.document, found.tensors)

    def load(self, held: CheckpointInfo) -> Checkpoint:
        """Raises `ConfigError` if it is not there any more, or damaged; it is not told of then any more."""
        path = self._path(held.layers, held)
        try:
            found = checkpoint_store.read(path)
        except ConfigError:
            self._damaged.add(path)
            raise
        if (found.position.applied, found.position.history) != (held.applied, held.history):
            raise ConfigError(
                f"the checkpoint {path} is of another history than the run's",
                remedy="move it away: another worker's is taken",
            )
        return found

    def is_intact(self, held: CheckpointInfo) -> bool:
        """It can be read; else that is told.  From any thread."""
        try:
            self.load(held)
        except ConfigError as error:
            log.warning("it is not given to anybody: %s", error)
            self._report(self.stored_checkpoints())
            return False
        return True

    def verify(self, blobs: Sequence[bytes], digest: bytes) -> None:
        """What another worker gave is the checkpoint that it should be.  Raises `RemoteProtocolError`."""
        serialization.check_content(blobs, digest)

    def files_to_copy(self, held: CheckpointInfo) -> Sequence[Path]:
        """Of a checkpoint that goes to another worker's disk as well; a residual stays here."""
        folder = checkpoint_store.step_folder(self.folder_of(held.layers), held.applied + 1)
        return [folder / name for name in FILES]

    def make_copy_folder(self, held: CheckpointInfo) -> Path:
        """Raises `OSError`."""
        self.folder_of(held.layers).mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.folder_of(held.layers).glob(".copy-*"):
            shutil.rmtree(left, ignore_errors=True)  # whoever sent it was lost
        folder = self.folder_of(held.layers) / f".copy-{held.applied + 1:08d}"
        folder.mkdir()
        return folder

    def adopt_copy(self, held: CheckpointInfo, folder: Path) -> None:
        """From another worker: only if it says of itself what it was said to be."""
        try:
            found, facts = checkpoint_store.read_header(folder)
            if (replace(found, layers=held.layers), facts) != (held, self._facts):
                raise ConfigError("it is of another state, or another training", remedy="none is needed")
            checkpoint_store.read(folder)  # its tensors are those that it was said to have
            store = self.folder_of(held.layers)
            path = self._replace(held.layers, held)
            self._drop_unaligned(held.layers)
            checkpoint_store.sync_files(folder)
            checkpoint_store.publish_folder(folder, path)
            for old in checkpoint_store.list_checkpoints(store)[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        except (OSError, ConfigError) as error:
            log.warning("a copy of another stage's checkpoint is not kept: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            return
        self._report(self.stored_checkpoints())

    def discard_after(self, after: int) -> None:
        """Of a history that the group has given up."""
        self.wait()
        if self._latest is not None and self._latest[1] > after + 1:
            self._latest = None  # that step is due once more, when it comes again
        for _, folder in self.stages():
            for path in checkpoint_store.list_checkpoints(folder):
                if checkpoint_store.checkpoint_step(path) > after + 1:
                    shutil.rmtree(path, ignore_errors=True)

    def _path(self, blocks: Span, held: CheckpointInfo) -> Path:
        return checkpoint_store.step_folder(self.folder_of(blocks), held.applied + 1)

    def _replace(self, blocks: Span, held: CheckpointInfo) -> Path:
        """Where it is about to be written; what was wrong with the one that lies there is over."""
        path = self._path(blocks, held)
        self._damaged.discard(path)
        return path

    def _store(self, blocks: Span) -> CheckpointStore:
        if blocks not in self._stores:
            self._stores[blocks] = CheckpointStore(self.folder_of(blocks), every=self._every, keep=self._keep)
        return self._stores[blocks]

    def folder_of(self, blocks: Span) -> Path:
        return self.folder / stage_folder_name(blocks)

    def stages(self) -> list[tuple[Span, Path]]:
        """Of which there is something on the disk, and where."""
        if not self.folder.is_dir():
            return []
        found = [(parse_stage_folder(path.name), path) for path in self.folder.iterdir()]
        known = [(blocks, path) for blocks, path in found if blocks is not None]
        return sorted(known, key=lambda one: (one[0].start, one[0].stop))


def stage_folder_name(blocks: Span) -> str:
    return f"blocks-{blocks.start:03d}-{blocks.stop:03d}"


def parse_stage_folder(name: str) -> Span | None:
    """Of what `folder_name` gave; None: it did not."""
    match = _BLOCKS.fullmatch(name)
    blocks = Span(int(match[1]), int(match[2])) if match else None
    return blocks if blocks is not None and blocks.start < blocks.stop else None
