"""What the training thread does for the group while it waits: capture, load, replay, read and write.

    WorkerSnapshot.tasks --> next_task --> run(task) --> the script's model, residual and disk
                                             |
                                             +--> supply, finish, io.StateLoaded, ... --> I/O thread

Tasks that replace the model are done between two batches only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import (
    AddResiduals,
    CaptureState,
    CopySnapshot,
    DoCatchUpWork,
    LoadState,
    ReadCheckpoint,
    WorkerTask,
)
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_BYTES
from gridtrain.runtime.state_transfer.catch_up_receiver import SnapshotWork
from gridtrain.runtime.state_transfer.catch_up_source import SnapshotParts
from gridtrain.runtime.state_transfer.checkpoint_copy import CheckpointDisk
from gridtrain.runtime.state_transfer.update_log import StepUpdate

log = logging.getLogger("gridtrain")

CaptureBlobs = Callable[[WorkerSnapshot, bool], Sequence[bytes | memoryview] | None]
"""Captures the state at this worker's rank, the whole or its first part; None: it is not in memory."""
RestoreState = Callable[[Sequence[bytes]], None]
ReplayUpdate = Callable[[StepUpdate], None]
CopyState = Callable[[], Callable[[], SnapshotParts]]
AddResidual = Callable[[m.PeerId, SparseVector], None]

LOAD_TASKS = (LoadState, io.LoadCheckpoints)
"""Tasks that replace the model: only between two batches."""


class StageCheckpointDisk(CheckpointDisk, Protocol):
    """A worker's checkpoints of the stages that it has held."""

    def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...]: ...

    def discard_after(self, after: int) -> None:
        """Remove those after this step."""
        ...

    def reload(self, held: Sequence[m.CheckpointInfo], blocks: m.Span) -> None:
        """Restore this worker's state from these.  Raises `ConfigError`, `RemoteProtocolError`."""
        ...

    def save_now(self, held: m.CheckpointInfo) -> None:
        """Write this worker's state as a checkpoint, at once.  Raises `OSError`."""
        ...

    def read_for_peer(self, held: m.CheckpointInfo) -> Sequence[bytes]:
        """The blobs for another member's restore.  Raises `ConfigError`."""
        ...

    def verify(self, blobs: Sequence[bytes], digest: bytes) -> None:
        """Check a state from another member against its digest.  Raises `RemoteProtocolError`."""
        ...


class TrainerTasks:
    """What the script has attached, and the tasks that are done with it.  Used by the training thread.

    Args:
        loop: the present I/O loop; after a pause, `connect` brings the next one.
    """

    def __init__(self, loop: IoLoop) -> None:
        self._loop = loop
        self._capture: CaptureBlobs | None = None
        self._restore: RestoreState | None = None
        self._copy: CopyState | None = None
        self._replay: ReplayUpdate | None = None
        self._add_residual: AddResidual | None = None
        self._disk: StageCheckpointDisk | None = None
        self._max_state_bytes = MAX_STATE_BYTES
        self._catch_up_limits = (MAX_STATE_BYTES, 0)
        self._residual_length = 0
        self._replay_obstacle = ""

    def connect(self, loop: IoLoop) -> None:
        """Tell this I/O loop all that was attached; to repeat that changes nothing."""
        self._loop = loop
        loop.state_receiver.set_limit(self._max_state_bytes)
        loop.catch_up.set_limits(*self._catch_up_limits)
        loop.residuals.set_length(self._residual_length)
        if self._replay_obstacle:
            loop.catch_up_source.disable(self._replay_obstacle)
        if self._disk is not None:
            loop.checkpoint_requests.attach(self._disk, self._max_state_bytes)

    # -- what the script attaches ----------------------------------------------------------------

    def attach_state(
        self, capture: CaptureBlobs, restore: RestoreState, max_state_bytes: int = MAX_STATE_BYTES
    ) -> None:
        """How to capture this worker's state, and how to load another's, which is no larger."""
        self._capture, self._restore, self._max_state_bytes = capture, restore, max_state_bytes
        self.connect(self._loop)

    def attach_catch_up(
        self, copy: CopyState, replay: ReplayUpdate, max_state_bytes: int, elements: int
    ) -> None:
        """How to copy this worker's state between two steps, and how to apply the update of a step.

        Args:
            copy: returns what converts the copy to bytes, which is called in another thread.
            elements: of the flat gradient.
        """
        self._copy, self._replay = copy, replay
        self._catch_up_limits = (max_state_bytes, elements)
        self.connect(self._loop)

    def attach_residual(self, length: int, add: AddResidual) -> None:
        """How to add another worker's residual to this one's; both have `length` elements."""
        self._add_residual, self._residual_length = add, length
        self.connect(self._loop)

    def resize_residual(self, length: int) -> None:
        """This worker holds another stage now, with a residual of so many elements."""
        self._residual_length = length
        self._loop.residuals.set_length(length)

    def attach_stage_checkpoints(self, disk: StageCheckpointDisk) -> None:
        """Where this worker's checkpoints of stages lie, and copies of those of the stage before."""
        self._disk = disk
        self.connect(self._loop)

    def report_checkpoints(self, states: tuple[m.CheckpointInfo, ...]) -> None:
        """These checkpoints are on the disk now."""
        self._loop.mailbox.submit(io.StageCheckpointsChanged(states))

    def disable_replay(self, reason: str) -> None:
        """The updates alone do not determine what the steps do: nobody can catch up from this worker."""
        self._replay_obstacle = reason
        self.connect(self._loop)

    @property
    def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...] | None:
        """None: this worker keeps no checkpoints of stages."""
        return self._disk.stored_checkpoints() if self._disk is not None else None

    # -- tasks -------------------------------------------------------------------------------------

    def next_task(
        self, snapshot: WorkerSnapshot, *, is_round_begun: bool = False, between_batches: bool = True
    ) -> WorkerTask | None:
        """The first task that can be done now.

        Args:
            is_round_begun: buckets of the open round were sent, so what they were made of may not change.
            between_batches: False: no task is done that comes after one that replaces the model.
        """
        for task in snapshot.tasks:
            if isinstance(task, LOAD_TASKS) and not between_batches:
                return None
            if self._can_run(task) and not (is_round_begun and isinstance(task, AddResiduals)):
                return task
        return None

    def _can_run(self, task: WorkerTask) -> bool:
        match task:
            case DoCatchUpWork():
                return self._replay is not None
            case AddResiduals():
                return self._add_residual is not None
            case CaptureState():
                return self._capture is not None
            case CopySnapshot():
                return self._copy is not None
            case LoadState():
                return True
            case _:
                return self._disk is not None

    def run(self, task: WorkerTask, snapshot: WorkerSnapshot, *, is_pipeline: bool) -> None:
        """Do it.  It may take long, and others wait for it: meanwhile this worker counts as busy."""
        loop = self._loop
        loop.heartbeat.set_busy(True)
        try:
            match task:
                case DoCatchUpWork():
                    self._do_catch_up_work()
                case AddResiduals():
                    self._add_residuals()
                case io.DiscardCheckpoints(after):
                    self._attached_disk().discard_after(after)
                    loop.checkpoint_requests.finish(task)
                case io.SaveCheckpoint():
                    self._save_checkpoint(task)
                case ReadCheckpoint():
                    self._read_checkpoint(task)
                case io.LoadCheckpoints():
                    self._load_checkpoints(task)
                case LoadState():
                    self._load_state(task, is_pipeline=is_pipeline)
                case CaptureState(_, is_whole):
                    assert self._capture is not None
                    loop.state_sender.supply_state(task, self._capture(snapshot, is_whole))
                case CopySnapshot():
                    assert self._copy is not None
                    loop.catch_up_source.store_copy(snapshot.applied, snapshot.history, self._copy())
        finally:
            loop.mailbox.finish_task(task)
            loop.heartbeat.set_busy(False)

    def _attached_disk(self) -> StageCheckpointDisk:
        assert self._disk is not None
        return self._disk

    def _do_catch_up_work(self) -> None:
        """Load a snapshot, or replay updates; the members keep training."""
        assert self._restore is not None and self._replay is not None
        catch_up = self._loop.catch_up
        while (work := catch_up.take_work()) is not None:
            try:
                if isinstance(work, SnapshotWork):
                    self._restore([bytes(work.private_part), bytes(work.shared_part)])
                else:
                    for step in work.steps:
                        self._replay(step)
            except RemoteProtocolError as error:
                catch_up.fail_work(error.reason)
                return
            catch_up.finish_work(work)

    def _add_residuals(self) -> None:
        """Between two rounds: none is prepared."""
        assert self._add_residual is not None
        for peer, entries in self._loop.residuals.take_confirmed():
            self._add_residual(peer, entries)

    def _save_checkpoint(self, task: io.SaveCheckpoint) -> None:
        disk, checkpoint = self._attached_disk(), task.checkpoint
        try:
            disk.save_now(checkpoint)
        except OSError as error:
            log.error("the state of step %d cannot be written: %s", checkpoint.applied + 1, error)
        self._loop.checkpoint_requests.finish(task)  # first: what follows may lead to the same request
        states = disk.stored_checkpoints()
        is_written = any(
            each.matches(checkpoint.layers, checkpoint.applied, checkpoint.history) for each in states
        )
        self._loop.mailbox.submit(io.StageCheckpointsChanged(states, None if is_written else checkpoint))

    def _read_checkpoint(self, task: ReadCheckpoint) -> None:
        disk = self._attached_disk()
        blobs: Sequence[bytes] | None = None
        try:
            blobs = disk.read_for_peer(task.checkpoint)
        except ConfigError as error:
            log.warning("%s", error)
            self.report_checkpoints(disk.stored_checkpoints())  # first: then nobody else asks for this one
        self._loop.state_sender.supply_checkpoint(task, blobs)

    def _load_checkpoints(self, task: io.LoadCheckpoints) -> None:
        """The state is on this worker's disk; where it cannot be read, another member sends it."""
        disk, event = self._attached_disk(), None
        try:
            disk.reload(task.checkpoints, task.layers)
        except (ConfigError, RemoteProtocolError) as error:
            log.warning("%s", error)
            readable = (each for each in disk.stored_checkpoints() if each not in task.checkpoints)
            event = io.StageCheckpointsChanged(tuple(readable))
        self._loop.checkpoint_requests.finish(task)  # first: what follows may lead to another request
        self._loop.mailbox.submit(event or io.StateLoaded(task.term, task.generation))

    def _load_state(self, task: LoadState, *, is_pipeline: bool) -> None:
        if self._restore is None:
            raise ConfigError(
                "a state arrived before the optimizer was wrapped",
                remedy="call grid.optimizer(optimizer, model, ...) before grid.batches(...)",
            )
        taken = self._loop.state_receiver.take_state(task.generation)
        if taken is None:
            return
        term, generation, blobs = taken
        try:
            if task.expected_digest and self._disk is not None:
                self._disk.verify(blobs, task.expected_digest)
            self._restore(blobs)
        except RemoteProtocolError as error:
            if not is_pipeline:
                raise
            log.warning("the state of this worker's stage was rejected: %s", error)
            reason = f"gave a state that is not this stage's: {error.reason}"
            self._loop.state_receiver.reject_state(generation, reason)
        else:
            self._loop.mailbox.submit(io.StateLoaded(term, generation))
