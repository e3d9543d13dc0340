"""Performs the training thread's tasks for the group: captures and loads states, and replays updates.

    WorkerSnapshot.tasks --> next_task --> run(task) --> the script's model, residual and disk
                                             |
                                             +--> supply, finish, ev.StateLoaded, ... --> I/O thread

Tasks that replace the model are performed only between two batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.errors import ConfigError, GridtrainError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.io_loop import IoLoop
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import (
    AddResiduals,
    ApplyMissedSteps,
    CaptureState,
    CopyStateSnapshot,
    DoCatchUpWork,
    LoadState,
    ReadCheckpoint,
    WorkerTask,
)
from gridtrain.runtime.missed_step import MissedStep
from gridtrain.runtime.state_transfer.blobs import MAX_STATE_BYTES
from gridtrain.runtime.state_transfer.catch_up_receiver import StateSnapshotWork
from gridtrain.runtime.state_transfer.checkpoint_copy import CheckpointDisk
from gridtrain.runtime.state_transfer.update_log import StepUpdate
from gridtrain.runtime.step_rounds import MakeEmpty

log = logging.getLogger("gridtrain")

CaptureBlobs = Callable[[WorkerSnapshot, bool], Sequence[bytes | memoryview] | None]
"""Captures this worker's whole state, or only its first part; returns None if the state is not in memory."""
RestoreState = Callable[[Sequence[bytes | memoryview]], None]
ReplayUpdate = Callable[[StepUpdate], None]
ApplyMissed = Callable[[Sequence[MissedStep]], None]
AddResidual = Callable[[str, SparseVector], None]
"""Adds the residual of the worker with this name."""

LOAD_TASKS = (LoadState, ev.LoadCheckpoints, DoCatchUpWork)
"""Tasks that replace the model; they are performed only between two batches."""


class StageCheckpointDisk(CheckpointDisk, Protocol):
    """The disk on which a worker stores checkpoints of the stages that it has held."""

    def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...]: ...

    def discard_after(self, after: int) -> None:
        """Remove all checkpoints of steps after `after`."""

    def reload(self, held: Sequence[m.CheckpointInfo], blocks: m.Span) -> None:
        """Restore the state of the layers `blocks` from the checkpoints in `held`.

        Raises `ConfigError` if a checkpoint cannot be read, and `RemoteProtocolError` if its content does not
        match the stage.
        """

    def save_now(self, held: m.CheckpointInfo) -> None:
        """Write this worker's state as a checkpoint, and wait until it is written.

        Raises `OSError` if it cannot be written.
        """

    def read_for_peer(self, held: m.CheckpointInfo) -> Sequence[bytes | memoryview]:
        """Read a checkpoint and return it as blobs for a member that will load it.

        Raises `ConfigError` if the checkpoint is missing or damaged.
        """

    def verify(self, blobs: Sequence[bytes | memoryview], digest: bytes) -> None:
        """Raise `RemoteProtocolError` unless `blobs`, a state from another member, have this digest."""


class TrainerTasks:
    """Performs the tasks in a snapshot with the functions that the `attach_...` methods have set.

    Only the training thread uses this object.

    Args:
        loop: the current I/O loop; after a pause, `connect` sets the new loop.

    Attributes:
        applied: the last step reflected in the trainer's model; -1 if there is none.  The group's last step
            (`WorkerSnapshot.applied`) may be later, until the trainer has loaded or applied later steps.
    """

    def __init__(self, loop: IoLoop) -> None:
        self._loop = loop
        self.applied = -1
        self._capture: CaptureBlobs | None = None
        self._restore: RestoreState | None = None
        self._replay: ReplayUpdate | None = None
        self._make_empty: MakeEmpty | None = None
        self._apply_missed: ApplyMissed | None = None
        self._drop_missed: ApplyMissed | None = None
        self._add_residual: AddResidual | None = None
        self._disk: StageCheckpointDisk | None = None
        self._max_state_bytes = MAX_STATE_BYTES
        self._gradient_length = 0
        self._residual_length = 0
        self._replay_obstacle = ""

    def connect(self, loop: IoLoop) -> None:
        """Use this I/O loop and pass all attached settings to it.  The call can be repeated."""
        self._loop = loop
        with loop.mailbox.condition:
            loop.state_receiver.blobs.max_bytes = self._max_state_bytes
            loop.catch_up.limits = (self._max_state_bytes, self._gradient_length)
            loop.residuals.incoming.n = self._residual_length
        if self._replay_obstacle:
            loop.catch_up_source.disable(self._replay_obstacle)
        if self._make_empty is not None:
            loop.step_rounds.attach_empty(self._make_empty)
        loop.checkpoint_copier.disk, loop.checkpoint_copier.max_bytes = self._disk, self._max_state_bytes

    # -- functions of the script -----------------------------------------------------------------

    def attach_state(
        self, capture: CaptureBlobs, restore: RestoreState, max_state_bytes: int = MAX_STATE_BYTES
    ) -> None:
        """Set the functions that capture this worker's state and load another worker's state.

        A state from another worker is rejected if it is larger than `max_state_bytes`.
        """
        self._capture, self._restore, self._max_state_bytes = capture, restore, max_state_bytes
        self.connect(self._loop)

    def attach_catch_up(self, replay: ReplayUpdate, gradient_length: int) -> None:
        """Set the function that applies the update of a step, and the length of the flat gradient.

        `attach_state` sets the function that loads a state.
        """
        self._replay, self._gradient_length = replay, gradient_length
        self.connect(self._loop)

    def attach_absence(
        self, make_empty: MakeEmpty, apply_missed: ApplyMissed, drop_missed: ApplyMissed
    ) -> None:
        """Set the functions that let steps commit without the trainer, and apply these steps later.

        Args:
            make_empty: makes an empty contribution; it is called in the I/O thread.
            apply_missed: applies committed steps in order.
            drop_missed: adds committed steps that a state being loaded already contains to what is lost.
        """
        self._make_empty, self._apply_missed, self._drop_missed = make_empty, apply_missed, drop_missed
        self.connect(self._loop)

    def attach_residual(self, length: int, add: AddResidual) -> None:
        """Set the function that adds another worker's residual to this worker's residual.

        Both residuals have `length` elements.
        """
        self._add_residual, self._residual_length = add, length
        self.connect(self._loop)

    def resize_residual(self, length: int) -> None:
        """Set the length of the residual, which changes when this worker takes over another stage."""
        self._residual_length = length
        with self._loop.mailbox.condition:
            self._loop.residuals.incoming.n = length

    def attach_stage_checkpoints(self, disk: StageCheckpointDisk) -> None:
        """Attach the disk that holds this worker's stage checkpoints and the copies of the previous
        stage's checkpoints."""
        self._disk = disk
        self.connect(self._loop)

    def report_checkpoints(self, states: tuple[m.CheckpointInfo, ...]) -> None:
        """Report to the group which checkpoints are now on this worker's disk."""
        self._loop.mailbox.submit(ev.StageCheckpointsChanged(states))

    def disable_replay(self, reason: str) -> None:
        """Prevent other workers from catching up by replaying updates from this worker.

        Call this method if the updates alone do not determine the effect of a step.
        """
        self._replay_obstacle = reason
        self.connect(self._loop)

    @property
    def stored_checkpoints(self) -> tuple[m.CheckpointInfo, ...] | None:
        """The stage checkpoints on this worker's disk; None if this worker keeps no stage checkpoints."""
        return self._disk.stored_checkpoints() if self._disk is not None else None

    # -- tasks -------------------------------------------------------------------------------------

    def next_task(
        self, snapshot: WorkerSnapshot, *, is_round_begun: bool = False, between_batches: bool = True
    ) -> WorkerTask | None:
        """Return the first task that can be performed now, or None.

        Args:
            snapshot: the snapshot with the tasks.
            is_round_begun: whether buckets of the open round have been sent.  If so, residuals are not added,
                because this worker's residual must not change.
            between_batches: whether the trainer is between two batches.  If not, a task that replaces the
                model and all tasks after it have to wait.
        """
        for task in snapshot.tasks:
            if isinstance(task, LOAD_TASKS) and not between_batches:
                return None
            if self._can_run(task) and not (is_round_begun and isinstance(task, AddResiduals)):
                return task
        return None

    def _can_run(self, task: WorkerTask) -> bool:
        match task:
            case ApplyMissedSteps():
                return self._apply_missed is not None
            case DoCatchUpWork() | CopyStateSnapshot():
                return self._replay is not None
            case AddResiduals():
                return self._add_residual is not None
            case CaptureState():
                return self._capture is not None
            case LoadState():
                return True
            case _:
                return self._disk is not None

    def run(self, task: WorkerTask, snapshot: WorkerSnapshot, *, is_pipeline: bool) -> None:
        """Perform a task.

        During the task, this worker reports itself as busy, because a task may take a long time.

        Args:
            task: a task that `next_task` has returned.
            snapshot: the snapshot that contains the task.
            is_pipeline: whether the model has stages.  If so, a received state that cannot be loaded is
                rejected, and its source is reported; otherwise, `RemoteProtocolError` is raised.

        Raises `ConfigError` if a state has to be loaded, but `attach_state` has not been called.
        """
        loop = self._loop
        was_busy, loop.heartbeat.is_busy = loop.heartbeat.is_busy, True
        try:
            match task:
                case ApplyMissedSteps(last_step):
                    self._apply_missed_steps(last_step)
                case DoCatchUpWork():
                    self._do_catch_up_work()
                case AddResiduals():
                    self._add_residuals()
                case ev.DiscardCheckpoints(after):
                    self._attached_disk().discard_after(after)
                    loop.checkpoint_requests.finish(task)
                case ev.SaveCheckpoint():
                    self._save_checkpoint(task)
                case ReadCheckpoint():
                    self._read_checkpoint(task)
                case ev.LoadCheckpoints():
                    self._load_checkpoints(task, snapshot.applied)
                case LoadState():
                    self._load_state(task, snapshot.applied, is_pipeline=is_pipeline)
                case CaptureState(_, is_whole):
                    assert self._capture is not None
                    loop.state_sender.supply_state(task, self._capture(snapshot, is_whole))
                case CopyStateSnapshot():
                    assert self._capture is not None
                    if (blobs := self._capture(snapshot, True)) is not None:
                        loop.catch_up_source.store_copy(snapshot.applied, snapshot.history, blobs)
        finally:
            loop.mailbox.finish_task(task)
            loop.heartbeat.is_busy = was_busy

    def _attached_disk(self) -> StageCheckpointDisk:
        assert self._disk is not None
        return self._disk

    def settle_absences(self, timeout_s: float) -> bool:
        """Apply all missed steps and prevent further steps from committing without the trainer.

        Returns False if a round in which the trainer is absent is still open after `timeout_s`.
        """
        rounds = self._loop.step_rounds
        rounds.stop_absences()
        if self._apply_missed is None:
            return True
        with suppress(GridtrainError):  # the loop has ended: nothing commits any more
            self._loop.mailbox.wait(lambda _: not rounds.is_absent, timeout_s)
        is_settled = not rounds.is_absent
        self._apply(rounds.take_missed())
        return is_settled

    def _apply_missed_steps(self, last_step: int) -> None:
        """Apply the steps from which this worker was absent, up to `last_step`."""
        self._loop.mailbox.submit(ev.TrainerReturned())  # first, so that the next step is not also missed
        self._apply(self._loop.step_rounds.take_missed(last_step))

    def _apply(self, missed: Sequence[MissedStep]) -> None:
        assert self._apply_missed is not None
        self._apply_missed(missed)
        if missed:
            self.applied = missed[-1].step

    def _do_catch_up_work(self) -> None:
        """Load a snapshot of the state or replay updates, while the members keep training."""
        assert self._restore is not None and self._replay is not None
        catch_up = self._loop.catch_up
        while (work := catch_up.take_work()) is not None:
            try:
                if isinstance(work, StateSnapshotWork):
                    self._restore([work.private_part, work.shared_part])
                    self.applied = work.applied
                else:
                    for step in work.steps:
                        self._replay(step)
                        self.applied = step.step
            except RemoteProtocolError as error:
                catch_up.fail_work(error.reason)
                return
            catch_up.finish_work(work)

    def _add_residuals(self) -> None:
        """Add the confirmed residuals of other workers.  Call this method only between two rounds."""
        assert self._add_residual is not None
        for name, entries in self._loop.residuals.take_confirmed():
            self._add_residual(name, entries)

    def _save_checkpoint(self, task: ev.SaveCheckpoint) -> None:
        disk, checkpoint = self._attached_disk(), task.checkpoint
        try:
            disk.save_now(checkpoint)
        except OSError as error:
            reason = error.strerror or error
            log.error("cannot write the state of step %d: %s", checkpoint.applied + 1, reason)
        self._loop.checkpoint_requests.finish(task)  # first, because the event may lead to the same request
        states = disk.stored_checkpoints()
        is_written = any(
            each.matches(checkpoint.layers, checkpoint.applied, checkpoint.history) for each in states
        )
        self._loop.mailbox.submit(ev.StageCheckpointsChanged(states, None if is_written else checkpoint))

    def _read_checkpoint(self, task: ReadCheckpoint) -> None:
        disk = self._attached_disk()
        blobs: Sequence[bytes | memoryview] | None = None
        try:
            blobs = disk.read_for_peer(task.checkpoint)
        except ConfigError as error:
            log.warning("%s", error)
            # Reported first, so that no other member requests this checkpoint.
            self.report_checkpoints(disk.stored_checkpoints())
        self._loop.state_sender.supply_checkpoint(task, blobs)

    def _load_checkpoints(self, task: ev.LoadCheckpoints, applied: int) -> None:
        """Load the state after the step `applied` from this worker's disk.

        If the checkpoints cannot be read, they are reported as missing, and another member sends the state.
        """
        disk, event = self._attached_disk(), None
        try:
            disk.reload(task.checkpoints, task.layers)
            self.applied = applied
        except (ConfigError, RemoteProtocolError) as error:
            log.warning("%s", error)
            readable = (each for each in disk.stored_checkpoints() if each not in task.checkpoints)
            event = ev.StageCheckpointsChanged(tuple(readable))
        self._loop.checkpoint_requests.finish(task)  # first, because the event may lead to another request
        self._loop.mailbox.submit(event or ev.StateLoaded(task.term, task.generation))

    def _load_state(self, task: LoadState, applied: int, *, is_pipeline: bool) -> None:
        """Load the state after the step `applied` that the state source has sent."""
        if self._restore is None:
            raise ConfigError(
                "a state arrived before the optimizer was wrapped",
                remedy="call grid.optimizer(optimizer, model, ...) before grid.batches(...)",
            )
        taken = self._loop.state_receiver.take_state(task.generation)
        if taken is None:
            return
        missed = self._loop.step_rounds.take_missed()  # the state that is loaded contains these steps
        if self._drop_missed is not None:
            self._drop_missed(missed)
        term, generation, blobs = taken
        try:
            if task.expected_digest and self._disk is not None:
                self._disk.verify(blobs, task.expected_digest)
            self._restore(blobs)
        except RemoteProtocolError as error:
            if not is_pipeline:
                raise
            log.warning("the state of this worker's stage was rejected: %s", error)
            reason = f"sent a state that does not belong to this stage: {error.reason}"
            self._loop.state_receiver.reject_state(generation, reason)
        else:
            self.applied = applied
            self._loop.mailbox.submit(ev.StateLoaded(term, generation))
