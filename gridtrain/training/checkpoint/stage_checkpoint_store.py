"""Stores a pipeline's checkpoints, and copies of the previous stage's, on a worker's disk by stage.

It also decides which of them to keep and to load.  The layout on disk:

    <folder>/blocks-000-003/step-00000200/     as `checkpoint_store` writes them, the latest few of each stage
    <folder>/blocks-003-007/step-00000100/     and copies from the previous stage (`checkpoint_copy`)

A stage is named by the numbers of its first layer and of the layer after its last one, because the model may
be partitioned again.  The coordinator decides which checkpoints the run continues from; it needs those
of all stages at one step.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gridtrain.core.messages import MAX_STAGE_CHECKPOINTS, CheckpointInfo, Facts, Span
from gridtrain.core.stages.repartition import uncovered_spans
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.transport.identity import make_private_folder
from gridtrain.quantities import format_count
from gridtrain.runtime.state_transfer.checkpoint_copy import FILES
from gridtrain.training.checkpoint import checkpoint_store, serialization
from gridtrain.training.checkpoint.checkpoint_store import (
    Checkpoint,
    CheckpointContent,
    CheckpointStore,
    ReportFigures,
)

log = logging.getLogger("gridtrain")

_BLOCKS = re.compile(r"blocks-(\d{3,})-(\d{3,})")


class StageCheckpointStore:
    """The checkpoints of one worker in one run.

    Args:
        folder, every, keep: as in `CheckpointStore`.
        facts: the training settings; checkpoints with different settings are ignored.
        report: a function that is called, from any thread, with the checkpoints on disk when they have
            changed.
        load_state: a function that is called with the checkpoints that become this worker's state, and with
            its layers.
        pack_state: a function that copies the layers of a checkpoint if they are in memory, and otherwise
            returns None.
        report_figures: as in `CheckpointStore`.
        on_written: a function that is called, from a thread, with the folder of each checkpoint of this
            worker's stage that has been written, and with the name of the stage's folder.
        pretrained: the layout of this worker's model, which replaces the layout in copies from other workers.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        *,
        every: int,
        keep: int,
        report: Callable[[tuple[CheckpointInfo, ...]], None],
        load_state: Callable[[Sequence[Checkpoint], Span], None],
        pack_state: Callable[[CheckpointInfo], CheckpointContent | None] = lambda held: None,
        report_figures: ReportFigures = lambda figures: None,
        on_written: Callable[[Path, str], None] = lambda path, stage: None,
        pretrained: Any = None,
    ) -> None:
        self._pretrained = pretrained
        self.folder, self._facts, self._report, self._load_state = folder, facts, report, load_state
        self._pack_state, self._report_figures, self._on_written = pack_state, report_figures, on_written
        self._every, self._keep = every, keep
        self._lock = CheckpointStore(folder, every=every, keep=keep)
        self._stores: dict[Span, CheckpointStore] = {}
        self._damaged: set[Path] = set()  # unusable, and not reported until they are written again
        self._writer: threading.Thread | None = None
        self._latest: tuple[Span, int] | None = None
        self._has_kept_refused, self._refused_lock = False, threading.Lock()

    def claim(self) -> None:
        """Lock the folder, as `CheckpointStore.claim` does."""
        self._lock.claim()

    def release(self) -> None:
        self._lock.release()

    def stored_checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Return the readable checkpoints with these training settings, latest first; at most
        `MAX_STAGE_CHECKPOINTS`."""
        found = []
        for blocks, folder in self.stages():
            for path in checkpoint_store.list_checkpoints(folder):
                if path in self._damaged:
                    continue
                try:
                    held, facts = checkpoint_store.read_header(path)
                except ConfigError as error:
                    if path.exists():  # otherwise, another thread has removed an old checkpoint
                        log.warning("%s", error)
                    continue
                if checkpoint_store.matches_facts(facts, self._facts):
                    found.append(replace(held, layers=blocks))
        return tuple(sorted(found, key=lambda held: (-held.applied, held.layers.start)))[
            :MAX_STAGE_CHECKPOINTS
        ]

    def check_not_refused(self) -> None:
        """Raise `ConfigError` if all checkpoints on disk were written with different training settings."""
        if not self.stored_checkpoints():
            folders = [folder for _, folder in self.stages()]
            checkpoint_store.check_not_refused(folders, self._facts, self.folder)

    def latest_complete_step(self, layers: int) -> int:
        """Return the latest step for which this disk alone has checkpoints of all layers; 0 if there is none.

        Args:
            layers: the number of layers in the model.
        """
        spans: dict[tuple[int, bytes], list[Span]] = {}
        for held in self.stored_checkpoints():
            spans.setdefault((held.applied, held.history), []).append(held.layers)
        complete = (applied + 1 for (applied, _), own in spans.items() if not uncovered_spans(own, layers))
        return max(complete, default=0)

    def is_due(self, blocks: Span, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps.  It is due at the same steps on all workers,
        because a run can continue only from checkpoints of all stages."""
        return self._every > 0 and step > 0 and step % self._every == 0 and self._latest != (blocks, step)

    def write(self, blocks: Span, content: CheckpointContent) -> None:
        """Write a checkpoint in the background."""
        self.wait()  # rather than leave out a step for which the other stages have checkpoints
        self._latest = blocks, content.position.applied + 1
        store = self._store(blocks)
        self._drop_unaligned(blocks)
        store.mark_verified()  # so that checkpoints of an earlier process are also pruned
        self._damaged.discard(self._path(blocks, content.position))
        store.write(content)

        def report() -> None:
            store.wait()
            self._report(self.stored_checkpoints())

        self._writer = threading.Thread(target=report, name="gridtrain-checkpoint-report", daemon=True)
        self._writer.start()

    def drop_residual(self, blocks: Span, step: int) -> None:
        """Remove from the stage's checkpoint of `step` the residual, which was sent to another worker, as
        `CheckpointStore.drop_residual` does."""
        self._store(blocks).drop_residual(step)

    def write_now(self, blocks: Span, content: CheckpointContent) -> bool:
        """Write a checkpoint immediately, regardless of the step.

        Call this method when this worker leaves with the only copy of the stage.

        Returns False if the checkpoint cannot be written.  Earlier checkpoints of steps at which all stages
        write one are kept.
        """
        self.wait()
        self._drop_unaligned(blocks)
        try:
            checkpoint_store.save(content, self._replace(blocks, content.position))
        except OSError as error:
            log.error(
                "this worker's stage cannot be saved: %s; its progress since the last checkpoint is lost",
                error.strerror or error,
            )
            return False
        self._report(self.stored_checkpoints())
        return True

    def _drop_unaligned(self, blocks: Span) -> None:
        """Remove the stage's checkpoints of steps that are not multiples of `every`, because the other stages
        have no checkpoints of these steps."""
        if not self._every or not self._can_keep_refused():
            return
        for path in checkpoint_store.list_checkpoints(self.folder_of(blocks)):
            if checkpoint_store.checkpoint_step(path) % self._every:
                checkpoint_store.remove(path)

    def _can_keep_refused(self) -> bool:
        """Move checkpoints with different training settings to another folder
        (`checkpoint_store.keep_refused`), once; return whether this has succeeded.  May be called from any
        thread."""
        with self._refused_lock:
            if not self._has_kept_refused:
                try:
                    checkpoint_store.keep_refused(
                        self.folder, [folder for _, folder in self.stages()], self._facts
                    )
                    self._has_kept_refused = True
                except OSError as error:
                    log.error("checkpoints with different training settings cannot be moved: %s", error)
            return self._has_kept_refused

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait as `CheckpointStore.wait` does."""
        if self._writer is not None:
            self._writer.join(timeout_s)
        return self._writer is None or not self._writer.is_alive()

    def reload(self, held: Sequence[CheckpointInfo], blocks: Span) -> None:
        """Load the layers `blocks` from checkpoints on disk.  Raises `ConfigError` if a checkpoint cannot be
        read, and `RemoteProtocolError` if the checkpoints do not match the stage."""
        checkpoints = [self.load(one) for one in held]
        try:
            self._load_state(checkpoints, blocks)
        except RemoteProtocolError:
            self._damaged.update(found.path for found in checkpoints)
            raise
        step, ends = held[0].applied + 1, (blocks.start, blocks.stop - 1)
        number = format_count(len(held), "checkpoint")
        log.warning("layers %d to %d are continuing from %s of step %d", *ends, number, step)

    def save_now(self, held: CheckpointInfo) -> None:
        """Write the checkpoint `held` immediately, if its layers are still in memory with this state;
        otherwise log a warning.  Call this method before the model is repartitioned.  Raises `OSError` if the
        checkpoint cannot be written."""
        self.wait()
        content = self._pack_state(held)
        if content is None:
            log.warning("the state of step %d is no longer in memory", held.applied + 1)
            return
        checkpoint_store.save(content, self._replace(held.layers, held))

    def read_for_peer(self, held: CheckpointInfo) -> Sequence[bytes | memoryview]:
        """Read a checkpoint for a peer, in the form that `serialization.restore_state` accepts.  Raises the
        same errors as `load`."""
        found = self.load(held)
        return serialization.frame_state(found.document, found.tensors)

    def load(self, held: CheckpointInfo) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            ConfigError: it is missing or damaged (it is then no longer reported), or it belongs to a
                different history.
        """
        path = self._path(held.layers, held)
        try:
            found = checkpoint_store.read(path)
        except ConfigError:
            self._damaged.add(path)
            raise
        if (found.position.applied, found.position.history) != (held.applied, held.history):
            raise ConfigError(
                f"the checkpoint {path} belongs to a different history than the run's",
                remedy="move it to another folder, so that another worker's checkpoint is used",
            )
        return found

    def is_intact(self, held: CheckpointInfo) -> bool:
        """Whether the checkpoint can be read; if not, report the loss.  May be called from any thread."""
        try:
            self.load(held)
        except ConfigError as error:
            log.warning("a checkpoint was not sent to another worker: %s", error)
            self._report(self.stored_checkpoints())
            return False
        return True

    def verify(self, blobs: Sequence[bytes | memoryview], digest: bytes) -> None:
        """Check that a state from another worker has the checkpoint's digest.  Raises
        `RemoteProtocolError` if it does not."""
        serialization.check_content(blobs, digest)

    def files_to_copy(self, held: CheckpointInfo) -> Sequence[Path]:
        """Return the files that are copied to another worker's disk; the residual is not copied."""
        return [self._path(held.layers, held) / name for name in FILES]

    def make_copy_folder(self, held: CheckpointInfo) -> Path:
        """Create a new folder for a copy from another worker.  Raises `OSError` if it cannot be created."""
        stage = self.folder_of(held.layers)
        make_private_folder(stage)
        partial = checkpoint_store.partial_folder(self._path(held.layers, held), ".copy-")
        # Another thread may still be adopting an earlier copy of this checkpoint.
        return Path(tempfile.mkdtemp(partial.suffix, partial.stem, stage))

    def adopt_copy(self, held: CheckpointInfo, folder: Path) -> None:
        """Publish a copy from another worker if it is the checkpoint that was announced; otherwise discard
        it."""
        try:
            found, facts = checkpoint_store.read_header(folder)
            is_same = checkpoint_store.matches_facts(facts, self._facts)
            if replace(found, layers=held.layers) != held or not is_same:
                raise ConfigError(
                    "it is not the checkpoint that was announced, or has different training settings",
                    remedy="no action is needed; the next checkpoint is copied, too",
                )
            if checkpoint_store.read(folder).pretrained != self._pretrained:  # also checks its tensors
                checkpoint_store.replace_pretrained(folder, self._pretrained)
            path = self._replace(held.layers, held)
            self._drop_unaligned(held.layers)
            checkpoint_store.sync_files(folder)
            checkpoint_store.publish_folder(folder, path)
            for old in checkpoint_store.list_checkpoints(path.parent)[: -self._keep]:
                checkpoint_store.remove(old)
        except (OSError, ConfigError) as error:
            log.warning("a copy of another stage's checkpoint was not stored: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            return
        self._report(self.stored_checkpoints())

    def discard_after(self, after: int) -> None:
        """Remove the checkpoints later than step index `after`, whose history the group has abandoned."""
        self.wait()
        if self._latest is not None and self._latest[1] > after + 1:
            self._latest = None  # that step will be due again
        for _, folder in self.stages() if self._can_keep_refused() else ():
            for path in checkpoint_store.list_checkpoints(folder):
                if checkpoint_store.checkpoint_step(path) > after + 1:
                    checkpoint_store.remove(path)

    def _path(self, blocks: Span, held: CheckpointInfo) -> Path:
        return checkpoint_store.step_folder(self.folder_of(blocks), held.applied + 1)

    def _replace(self, blocks: Span, held: CheckpointInfo) -> Path:
        """Return the path that is about to be written; a checkpoint at this path is no longer considered
        damaged.  Raises `OSError` if a checkpoint with different training settings may be there."""
        if not self._can_keep_refused():
            raise OSError(f"{self.folder} contains checkpoints with different training settings")
        path = self._path(blocks, held)
        self._damaged.discard(path)
        return path

    def _store(self, blocks: Span) -> CheckpointStore:
        if blocks not in self._stores:
            self._stores[blocks] = CheckpointStore(
                self.folder_of(blocks),
                every=self._every,
                keep=self._keep,
                report_figures=self._report_figures,
                on_written=lambda path: self._on_written(path, path.parent.name),
            )
        return self._stores[blocks]

    def folder_of(self, blocks: Span) -> Path:
        return self.folder / stage_folder_name(blocks)

    def stages(self) -> list[tuple[Span, Path]]:
        """Return the stages that have checkpoints on disk, and their folders."""
        if not self.folder.is_dir():
            return []
        found = [(parse_stage_folder(path.name), path) for path in self.folder.iterdir()]
        known = [(blocks, path) for blocks, path in found if blocks is not None]
        return sorted(known, key=lambda one: (one[0].start, one[0].stop))


def stage_folder_name(blocks: Span) -> str:
    return f"blocks-{blocks.start:03d}-{blocks.stop:03d}"


def parse_stage_folder(name: str) -> Span | None:
    """Return the layers for which `stage_folder_name` returns `name`; None for any other name."""
    match = _BLOCKS.fullmatch(name)
    blocks = Span(int(match[1]), int(match[2])) if match else None
    return blocks if blocks is not None and blocks.start < blocks.stop else None
