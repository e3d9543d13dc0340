"""Manages the model's state between two steps: checkpoints, pauses, departure, and export.

The procedure is the same for a whole model and for a stage of a pipeline.  The differences are methods of the
subclasses: `WholeModelState` in this module, `StageModelState` in `gridtrain.pipeline`.

    join          load the checkpoint on disk, and describe the training settings to the coordinator
    begin_turn    add a saved residual if it belongs to the current step; write a checkpoint if one is due
    finished run  write the checkpoint of the last step
    rest, leave   send the largest entries of the residual to another worker, and keep the rest in memory
    close         after this worker has left: write the rest of the residual, and the state, to disk
    export        write the final model
"""

from __future__ import annotations

import logging
import math
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from gridtrain._version import __version__
from gridtrain.config import round_exchange
from gridtrain.core.collectives import direct, ring
from gridtrain.core.messages import (
    BASE_FACT,
    BASE_ORIGIN,
    KEPT_STEP,
    CheckpointInfo,
    Facts,
    LedgerSpec,
    Setup,
    Span,
    WorkerInfo,
)
from gridtrain.core.planning.exchange_facts import as_direct, direct_marker
from gridtrain.core.planning.workload import NeighboursOf
from gridtrain.errors import ConfigError, GridtrainError, JoinRefused, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.state_transfer import residual_pieces
from gridtrain.training.checkpoint import checkpoint_store, pretrained
from gridtrain.training.checkpoint.checkpoint_store import (
    CheckpointContent,
    CheckpointStore,
    checkpoint_step,
    step_folder,
)
from gridtrain.training.checkpoint.checkpoint_upload import MAX_FINAL_ATTEMPTS, CheckpointUploader
from gridtrain.training.checkpoint.frozen_base import FrozenBase
from gridtrain.training.checkpoint.model_export import FINAL_FILE, keep_earlier, plain_state, save_model
from gridtrain.training.checkpoint.remote_store import MODEL_PART, RemoteStore, shown_url
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore
from gridtrain.training.data.batch_sizes import BatchSizes
from gridtrain.training.exchangers import neighbours_of
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.residual_departure import (
    WHOLE_MODEL,
    LeftResidual,
    load_left_residual,
    save_left_residual,
    transfer_residual,
)
from gridtrain.training.worker_residual import REPLACED, WorkerResidual

log = logging.getLogger("gridtrain")

SETTLE_TIMEOUT_S = 5.0
"""The longest time that a leaving worker waits for the end of a round that does not wait for its trainer."""

PAUSE_TIMEOUT_S = 300.0
"""The longest time that a paused worker waits for the disk to complete the previous checkpoint."""

SAVE_REPORT_S = 5.0
"""How long a paused worker waits for its checkpoint before it reports which step is on its disk."""

CHANGED = "its script has changed the parameters since then (call grid.close() before loading other weights)"
WITHIN_STEP = "was stopped within a step"
UNSETTLED = (
    "was stopped after an update, before its script had requested the next batch, so the objects that it "
    "tracks may not be up to date (gridtrain worker stop ends a script between two steps)"
)
NOT_SAVED = "this worker leaves without a checkpoint of its last step: %s"


@dataclass(frozen=True, slots=True)
class ModelStateOptions:
    """The settings for a worker's checkpoints, and for the residual that the worker sends when it leaves.

    Attributes:
        folder: the folder of the worker's checkpoints.
        is_chosen: whether the user chose the folder.
        saves_on_leave: whether a worker that leaves saves the state that others may need; False for one that
            cannot come back.
        every: the number of steps between two checkpoints; 0 writes none.
        keep: the number of checkpoints to keep.
        url: the URL to which checkpoints are uploaded, if any.
        max_transfer_bytes: the maximum number of bytes of the residual that the worker sends when it leaves.
    """

    folder: Path
    every: int
    keep: int
    url: str = ""
    max_transfer_bytes: int = 0
    is_chosen: bool = False
    saves_on_leave: bool = True


class ModelState(ABC):
    """One worker's model in one run.  Use it on the training thread.

    Attributes:
        has_failed: whether the script ended with an error, which may have left the model in the middle of a
            step.
    """

    has_failed = False

    def __init__(self, session: GroupSession, options: ModelStateOptions) -> None:
        self._session, self._options = session, options
        self._facts: Facts = ()
        self._left: LeftResidual | None = None  # of this worker when it left or paused; not added back yet
        self._has_initial_weights = True
        self._has_taken_part = False  # in a step, since this process joined the run
        self._store: CheckpointStore | StageCheckpointStore | None = None  # a subclass opens it
        self._uploader: CheckpointUploader | None = None
        self._written_step: int | None = None  # of the checkpoint that was written last
        self._final_step: int | None = None  # the run's last step, if its checkpoint is being written
        self._is_leaving = False  # from `leave` until `close` has saved what this worker still has
        self._left_at: WorkerSnapshot | None = None  # the snapshot of the state to save, the model's latest
        self._left_step: int | None = None  # of the state that this worker left or paused with
        self._paused_step: int | None = None  # of a checkpoint that is not uploaded
        # The state of the latest pause, until the next turn, and whether no other worker had it:
        self._paused_with: tuple[CheckpointInfo, bool] | None = None

    # -- joining -------------------------------------------------------------------------------------

    @abstractmethod
    def join(self, facts: Facts, spec: LedgerSpec, sizes: BatchSizes) -> None:
        """Open the checkpoints and request to join the run.

        Args:
            facts: the settings that must be equal on all workers.
        """

    def _define(self, facts: Facts, spec: LedgerSpec) -> None:
        """Set the facts that identify checkpoints with the same training settings."""
        self._facts = (*facts, ("order", f"{spec.size} samples, seed {spec.seed}"))

    @property
    def _has_checkpoints(self) -> bool:
        return self._options.every > 0

    def _fetch_checkpoint(self, step: int) -> bool:
        """Copy the latest checkpoint at the URL to this worker's disk if it is later than `step`, and upload
        checkpoints from now on; return whether there was a later one.  Without a URL, do nothing.

        Raises:
            ConfigError: the storage or its checkpoints cannot be used, or this worker writes no checkpoints.
        """
        options = self._options
        if not options.url:
            return False
        if not options.every:
            raise ConfigError(
                f"checkpoints are to be uploaded to {shown_url(options.url)}, but checkpoint_every is 0",
                remedy="set checkpoint_every to the number of steps between two checkpoints",
            )
        store = RemoteStore(options.url)
        store.check()
        latest = store.fetch_latest(options.folder, self._facts, step)
        self._uploader = CheckpointUploader(
            store,
            options.folder,
            every=options.every,
            keep=options.keep,
            start_step=latest,
            report_figures=self._session.report_figures,
        )
        return latest > step

    def _upload(self, path: Path, part: str = MODEL_PART) -> None:
        """Upload a checkpoint that has been written.  May be called from any thread."""
        self._written_step = checkpoint_step(path)
        if self._uploader is not None and self._written_step != self._paused_step:
            self._uploader.add(path, part, is_final=self._written_step == self._final_step)

    # -- between two steps -----------------------------------------------------------------------------

    def begin_turn(self, snapshot: WorkerSnapshot) -> None:
        """Begin a step: add a saved residual if it belongs to the current step, and write a checkpoint if one
        is due."""
        self._has_initial_weights, self._has_taken_part = False, True
        self._warn_if_begun_again(snapshot)
        self._paused_step = None
        self._restore_left_residuals(snapshot)
        if self._is_checkpoint_due(snapshot):
            self._write_checkpoint(snapshot)

    def _warn_if_begun_again(self, snapshot: WorkerSnapshot) -> None:
        """Warn after a pause if the group's state, which replaced this worker's state, does not include
        this worker's latest steps."""
        (held, was_alone), self._paused_with = self._paused_with or (None, False), None
        if held is None or held.history == snapshot.history:
            return
        step = held.applied + 1
        is_written = step == self._written_step
        is_uploaded = is_written and self._uploader is not None and step != self._paused_step
        if held.applied < snapshot.applied and (is_uploaded or not was_alone):
            return  # the others have probably continued from these steps, which a history does not show
        hint = (
            f"; gridtrain export writes the model of step {step} from its checkpoint in "
            f"{self._options.folder}, until later checkpoints replace it"
        )
        log.warning(
            "this worker paused after step %d, but the group has restarted without this worker's steps; this "
            "worker is continuing after the group's step %d%s",
            *(step, snapshot.applied + 1, hint if is_written else ""),
        )

    @property
    def holds_stage(self) -> bool:
        """Whether this worker is a member of a pipeline, and its stage has the state after the last step that
        this worker knows to be committed."""
        return False

    def write_final_checkpoint(self, timeout_s: float) -> bool:
        """Start writing the checkpoint of the last step, if this worker writes checkpoints and has the model
        or a stage.

        Returns:
            False if the previous checkpoint is still being written after `timeout_s`, so that this checkpoint
            was not started; otherwise True.  The failure is logged unless `timeout_s` is 0.
        """
        snapshot = self._session.snapshot
        if not (
            self._has_checkpoints and snapshot.is_synced and snapshot.world_size and snapshot.applied >= 0
        ):
            return True
        if not self._wait_for_writer(timeout_s):
            if timeout_s:
                log.error(
                    "the checkpoint of the last step was not written to %s, because the previous one was "
                    "still being written after %g s",
                    *(self._options.folder, timeout_s),
                )
            return False
        self._final_step, self._paused_step = snapshot.applied + 1, None
        self._write_checkpoint(snapshot)
        return True

    def finish_checkpoints(self, timeout_s: float) -> None:
        """Wait for the final checkpoint, if any, to be written and then uploaded, for at most `timeout_s`
        each."""
        if self._final_step is not None:
            self._wait_for_writer(timeout_s)
        if self._uploader is not None:
            self._uploader.close(timeout_s, MAX_FINAL_ATTEMPTS)
        if self.has_final_checkpoint:
            log.warning("a run with more steps can continue from %s", self._continuation_text)

    @property
    def has_final_checkpoint(self) -> bool:
        """Whether the checkpoint of the run's last step has been written."""
        return self._final_step is not None and self._final_step == self._written_step

    def lacks_final_checkpoint(self, timeout_s: float) -> bool:
        """Wait for the final checkpoint, for at most `timeout_s`; return whether writing it has failed.

        Returns False if no final checkpoint was started, or if it is still being written.
        """
        is_over = self._final_step is not None and self._wait_for_writer(timeout_s)
        return is_over and not self.has_final_checkpoint

    @property
    def others_wait(self) -> bool:
        """Whether the other workers may have to wait for this worker's state while this worker is away."""
        return False

    def rest(self, budget_bytes: int) -> CheckpointInfo | None:
        """Transfer the residual before a pause; return the position of the state that stays in memory, or
        None if no usable state stays."""
        is_settled = self._session.tasks.settle_absences(SETTLE_TIMEOUT_S)
        self._leave_residual(budget_bytes)
        held = self._keep_for_pause()
        if not is_settled:  # then a step may have committed that the model lacks
            held = None
        if held is not None:
            snapshot = self._session.snapshot
            was_alone = snapshot.world_size == 1 and snapshot.first_step <= held.applied
            self._paused_with = self._paused_with or (held, was_alone)
            if self._has_taken_part:  # otherwise what it has on disk stays valid
                self._keep_for_others()
        self._report_kept()
        return held

    def save_paused(self) -> None:
        """Start writing the state that `rest` has recorded, because all workers may pause and none may
        return.  Unless a checkpoint of this step is due, the state is not uploaded, because the pause may be
        meant to spare the worker's link or its budget.

        Called after this worker has left, so that the other members do not wait for the copy and the disk.
        """
        self._write_left(PAUSE_TIMEOUT_S, is_pause=True)

    def leave(self, budget_bytes: int, *, between_steps: bool) -> None:
        """Transfer the residual, and record which state `close` has to save, when this worker leaves a run
        that has not reached its end.

        The other members wait until this worker has left, so copying and writing are left to `close`.

        Args:
            budget_bytes: the maximum number of bytes of the residual to send.
            between_steps: whether the script has finished a step and not begun another.
        """
        self._is_leaving, is_settled = True, False
        try:
            if self._leaves_before_first_step():  # what it has on disk stays valid
                log.warning("this worker is leaving before taking part in a step")
                return
            is_settled = self._session.tasks.settle_absences(SETTLE_TIMEOUT_S)
            self._leave_residual(budget_bytes)
        except GridtrainError as error:
            is_settled = is_settled and self._session.has_ended_by(error)
            log.debug("the residual is not transferred: %s", error)  # this worker is no longer a member
        if is_settled and self._options.saves_on_leave:
            try:
                self._keep_for_others(between_steps=between_steps)
            except JoinRefused:  # the script says why
                log.warning(NOT_SAVED, "it is no longer a member")
            except Exception as error:  # such as too little memory, which must not prevent the departure
                log.warning(NOT_SAVED, error)
        self._report_kept()

    def _report_kept(self) -> None:
        """Report the step of the checkpoint that this worker keeps when it leaves or pauses."""
        kept = self._written_step or 0 if self._left_at is None else self._left_at.applied + 1
        self._session.report_figures({KEPT_STEP: float(kept)})

    def close(self, timeout_s: float, *, is_run_over: bool) -> None:
        """Save what `leave` has recorded, wait for a checkpoint that is being written or uploaded, and
        release the folder.  No step may be taken after `leave`.

        Args:
            timeout_s: the maximum time for each of these waits.
            is_run_over: whether the run has ended, so that this worker cannot continue from its state.
        """
        if self._is_leaving:
            self._save_left(timeout_s)
        self._wait_for_writer(timeout_s)
        if self._left_step is not None and self._left_step == self._written_step:
            log.warning(
                "the state after step %d is in %s: %sgridtrain export writes its model",
                *(self._written_step, self._options.folder),
                "" if is_run_over else "this worker can continue from it, and ",
            )
        if self._uploader is not None:
            self._uploader.close(timeout_s)
        if self._store is not None:
            self._store.release()

    def _save_left(self, timeout_s: float) -> None:
        """Save the residual that remains with this worker, and start writing the state that it left with."""
        self._is_leaving = False
        if self._left is not None and self._has_checkpoints:
            save_left_residual(self._left_folder(self._left), self._facts, self._left)
        self._write_left(timeout_s)

    def _write_left(self, timeout_s: float, *, is_pause: bool = False) -> None:
        left_at, self._left_at = self._left_at, None  # the model may change from now on
        if left_at is None:
            return
        self._left_step = left_at.applied + 1
        if not self._wait_for_writer(timeout_s):
            log.warning(NOT_SAVED, "the previous checkpoint is still being written")
            return
        if self._left_step == self._written_step:
            return
        self._paused_step = self._left_step if is_pause and not self._is_checkpoint_due(left_at) else None
        try:
            self._write_checkpoint(left_at)
        except Exception as error:  # such as too little memory, which must not prevent the departure
            log.warning(NOT_SAVED, error)

    # -- the final model ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def exports(self) -> bool:
        """Whether this worker writes the final model, or a part of it."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the final model, or this worker's part of it.  May be called again after an error."""

    @property
    def export_text(self) -> str:
        """A clause that says how to write the model from this worker's checkpoint of the last step; "" if
        other workers' checkpoints are needed."""
        return ""

    @property
    def export_bytes(self) -> int:
        """The number of bytes that suffice for what `export` writes, including headers and partial blocks."""
        state = plain_state(self._exported)
        contents = sum(len(n) + 100 + x.nbytes for n, x in state.items() if isinstance(x, torch.Tensor))
        return math.ceil(1.01 * (contents + 4096))  # sufficient even when rounded to three digits

    @property
    @abstractmethod
    def _exported(self) -> torch.nn.Module:
        """The module that `export` writes."""

    # -- what a subclass decides -------------------------------------------------------------------------

    @property
    @abstractmethod
    def _layers(self) -> Span:
        """The layers in this worker's memory."""

    @property
    @abstractmethod
    def _residual(self) -> WorkerResidual | None:
        """The residual; None if this worker holds no stage."""

    @abstractmethod
    def _load_state(self, blobs: Sequence[bytes | memoryview]) -> None:
        """Load another worker's state."""

    @property
    def _continuation_text(self) -> str:
        """The place of the checkpoints of the last step, as the end of a sentence."""
        return f"the checkpoints in {self._options.folder} (see docs/operations.md)"

    @abstractmethod
    def _is_checkpoint_due(self, snapshot: WorkerSnapshot) -> bool: ...

    @abstractmethod
    def _write_checkpoint(self, snapshot: WorkerSnapshot) -> None:
        """Start writing a checkpoint in the background."""

    @abstractmethod
    def _keep_for_pause(self) -> CheckpointInfo | None:
        """Prepare the state for a pause; return its position if it stays in memory, otherwise None."""

    @abstractmethod
    def _keep_for_others(self, *, between_steps: bool = True) -> None:
        """Save the state, or mark it to be saved later, when this worker leaves or pauses, in case no other
        worker keeps it.

        Args:
            between_steps: whether the script has finished a step and not begun another.
        """

    @abstractmethod
    def _drop_from_checkpoint(self, step: int) -> None:
        """Remove the residual, which was sent to another worker, from the checkpoint of `step`."""

    def _left_folder(self, left: LeftResidual) -> Path:
        return self._options.folder

    def _take_left(self) -> list[LeftResidual]:
        """Remove and return the residuals that remained with this worker when it left."""
        left, self._left = self._left, None
        return [] if left is None else [left]

    def _add_left(self, left: LeftResidual, entries: SparseVector, snapshot: WorkerSnapshot) -> bool:
        """Add a residual that belongs to the run's current step to this worker's residual; return False if it
        cannot be added."""
        assert self._residual is not None
        return self._residual.add(entries, snapshot.world_size)

    # -- shared --------------------------------------------------------------------------------------------

    def _wait_for_writer(self, timeout_s: float) -> bool:
        """Wait until no checkpoint is being written; return False if `timeout_s` passes first."""
        return self._store is None or self._store.wait(timeout_s)

    def _restore_state(self, blobs: Sequence[bytes | memoryview]) -> None:
        self._load_state(blobs)
        if self._has_initial_weights:
            self._has_initial_weights = False
            log.warning("this worker's initial weights were replaced by the group's weights")

    def _leaves_before_first_step(self) -> bool:
        """Return whether this worker has taken no step and, not being a synced member, cannot have received
        another worker's residual."""
        if self._has_taken_part:
            return False
        snapshot = self._session.snapshot
        return not (snapshot.world_size and snapshot.is_synced)

    def _leave_residual(self, budget_bytes: int) -> None:
        """Transfer the residual.  Keep the part that no worker accepted; add it to the part that was kept at
        the last pause if no step has been taken since then."""
        older, left = self._left, self._transfer_residual(budget_bytes)
        if older is None or left is None:
            self._left = left or older
        elif (older.applied, older.history, older.layers) == (left.applied, left.history, left.layers):
            self._left = replace(left, residual_N=older.residual_N + left.residual_N)
        else:
            self._left, lost = (older, left) if older.applied > left.applied else (left, older)
            self._session.increase_figure("lost_mass", residual_pieces.magnitude_sum(lost.residual_N))
            log.warning("the residual of %sstep %d is lost", lost.text, lost.applied + 1)

    def _transfer_residual(self, budget_bytes: int) -> LeftResidual | None:
        residual = self._residual
        if residual is None or not residual.size:
            return None
        drop = self._drop_from_checkpoint if self._has_checkpoints else None
        most_bytes = min(budget_bytes, self._options.max_transfer_bytes)
        left = transfer_residual(self._session, residual, most_bytes, drop, self._layers)
        residual.clear()
        return left

    def _restore_left_residuals(self, snapshot: WorkerSnapshot) -> None:
        for left in self._take_left():
            fits = (left.applied, left.history) == (snapshot.applied, snapshot.history)
            indices_K = np.flatnonzero(left.residual_N)
            entries = SparseVector(indices_K, left.residual_N[indices_K])
            magnitude = residual_pieces.magnitude_sum(entries.values)
            is_added = fits and self._add_left(left, entries, snapshot)
            self._session.increase_figure("read_back_mass" if is_added else "lost_mass", magnitude)
            log.warning(
                "the residual of %sstep %d, of magnitude %.3g, is %s; the run is at step %d",
                left.text,
                left.applied + 1,
                magnitude,
                "read back" if is_added else "lost",
                snapshot.applied + 1,
            )

    def _add_residual(self, name: str, entries: SparseVector) -> None:
        """Add the residual of a member that has left, so that this worker sends it in later steps."""
        residual, magnitude = self._residual, residual_pieces.magnitude_sum(entries.values)
        is_added = residual is not None and residual.add(entries, self._session.snapshot.world_size)
        self._session.increase_figure("inherited_mass" if is_added else "lost_mass", magnitude)
        keeps_residual = residual is not None and residual.size
        cause = "the sum is too large to send" if keeps_residual else "this worker keeps no residual"
        log.warning(
            "the residual of %s, %s of magnitude %.3g, is %s",
            name,
            f"{len(entries.values)} entr{'y' if len(entries.values) == 1 else 'ies'}",
            magnitude,
            "added to this worker's residual" if is_added else f"lost, because {cause}",
        )


def position_of(snapshot: WorkerSnapshot) -> CheckpointInfo:
    """Return the position of the state after the last committed step."""
    return CheckpointInfo(snapshot.applied, snapshot.history, snapshot.ledger)


class WholeModelState(ModelState):
    """A model that this worker holds as a whole, as every other worker does."""

    _layers = WHOLE_MODEL
    _earlier: str | None = None  # the result of `keep_earlier`, whose files a repeated export must not move

    def __init__(self, session: GroupSession, optimizer: GridOptimizer, options: ModelStateOptions) -> None:
        super().__init__(session, options)
        self._optimizer = optimizer
        self.checkpoints = self._store = CheckpointStore(
            options.folder,
            every=options.every,
            keep=options.keep,
            report_figures=session.report_figures,
            on_written=self._upload,
        )
        self._checkpoint_step: int | None = None  # the step of the checkpoint that was found on disk
        # The step that this worker, the last one, cannot save when it leaves, and why:
        self._lost_step: tuple[int, str] | None = None
        # State and residual come from the checkpoint, and no step has been taken since:
        self._is_resumed = False
        largest_bytes = largest_state_bytes(optimizer.model)
        session.tasks.attach_state(
            lambda place, whole: optimizer.capture_state(whole), self._restore_state, largest_bytes
        )
        session.is_state_unchanged = lambda: optimizer.is_unchanged
        session.tasks.attach_residual(optimizer.residual.size, self._add_residual)
        if optimizer.wait == "auto":
            absence = optimizer.absence
            session.tasks.attach_absence(absence.make_empty_buffers, absence.apply, absence.drop)
        session.tasks.attach_catch_up(optimizer.replay_update, optimizer.flat_size)

    def join(self, facts: Facts, spec: LedgerSpec, sizes: BatchSizes) -> None:
        self._define(facts, spec)
        wrapped, found = self._optimizer, self._load_checkpoint()
        setup = Setup(
            facts,
            spec,
            sizes.batch_size,
            sizes.global_batch_size,
            found,
            can_catch_up=round_exchange(wrapped.exchange_config).sparse,
            initial_state_digest=wrapped.initial_digest() if found is None else b"",
        )
        neighbours = _with_ring(neighbours_of(wrapped.exchange_config))
        self._session.join(
            setup,
            neighbours,
            describe_machine(device_of(wrapped.model), wrapped.base),
            _exchange_choices(wrapped),
            may_be_absent=wrapped.wait == "auto",
        )

    def _load_checkpoint(self) -> CheckpointInfo | None:
        """Load the latest checkpoint with these settings, from disk or the URL; return its position, or None
        if there is none.  The group may have a later state.

        Raises:
            ConfigError: the checkpoint does not match the model, all checkpoints in a folder that the user
                chose have different settings, the folder is in use, or the URL cannot be used.
        """
        self.checkpoints.claim()
        found = self.checkpoints.latest(self._facts)
        if self._fetch_checkpoint(0 if found is None else found.step):
            found = self.checkpoints.latest(self._facts)
        if found is None and self._options.is_chosen:
            folder = self._options.folder
            checkpoint_store.check_not_refused([folder], self._facts, folder)
        residual = self._optimizer.residual
        self._left = load_left_residual(self._options.folder, self._facts, residual.size)
        if found is None:
            return None
        try:
            self._optimizer.unpack(found.document, found.tensors)
        except RemoteProtocolError as error:
            raise ConfigError(
                f"the checkpoint {found.path} of step {found.step} cannot be used: {error.reason}",
                remedy="move it to another folder; this worker then uses an older checkpoint, or the "
                "group's state",
            ) from None
        if found.residual:  # missing if another worker has it (`CheckpointStore.drop_residual`)
            residual.load(found.residual)
        if self._left is not None and self._left.history == found.position.history:
            residual.clear()  # `_left` is the part that remains
        self._is_resumed, self._has_initial_weights, self._checkpoint_step = True, False, found.step
        log.warning("this worker has a checkpoint of step %d: %s", found.step, found.path)
        return found.position

    def begin_turn(self, snapshot: WorkerSnapshot) -> None:
        if self._is_resumed:
            self.checkpoints.mark_verified()
            assert self._checkpoint_step is not None
            log.warning("the run is continuing from the checkpoint of step %d", self._checkpoint_step)
            # The URL may not have it.
            self._upload(step_folder(self.checkpoints.folder, self._checkpoint_step))
        elif self._checkpoint_step is not None:
            log.warning(
                "the run is continuing from step %d, not from the checkpoint of step %d, which %s",
                *(snapshot.applied + 1, self._checkpoint_step, self._keep_other_history(snapshot)),
            )
        self._is_resumed, self._checkpoint_step = False, None
        super().begin_turn(snapshot)

    def _keep_other_history(self, snapshot: WorkerSnapshot) -> str:
        """Move checkpoints whose history is not the group's to another folder, so that later ones do not
        replace them; return where the latest of them is, as the end of a sentence."""
        with suppress(OSError):
            if kept := self.checkpoints.keep_other_history(self._facts, position_of(snapshot)):
                return f"is now in {kept}"
        return f"stays in {self.checkpoints.folder} until later ones replace it"

    def close(self, timeout_s: float, *, is_run_over: bool) -> None:
        if self._lost_step is not None:
            self._wait_for_writer(timeout_s)
            self._warn_of_loss(*self._lost_step)
        super().close(timeout_s, is_run_over=is_run_over)

    def _warn_of_loss(self, step: int, why: str) -> None:
        """Warn that `step`, the run's latest, is lost, unless a checkpoint of it is on disk.

        Args:
            why: why this worker could not save the step, as a clause with "this worker" as its subject, or
                `CHANGED`.
        """
        latest = self.checkpoints.latest_step(self._facts, step)
        if latest < step:
            lost = f"steps {latest + 1} to {step} are lost" if latest + 1 < step else f"step {step} is lost"
            own = f"this worker's latest checkpoint is of step {latest}"
            where = own if latest else "it has no usable checkpoint"
            log.warning(NOT_SAVED, f"it is the last worker, and {why}; {lost}: {where}")

    @property
    def exports(self) -> bool:
        """Whether this worker has rank 0, and therefore writes the final model."""
        snapshot = self._session.snapshot
        return snapshot.world_size > 0 and snapshot.rank == 0

    def export(self, folder: Path) -> None:
        model, layout = self._exported, self._layout
        if self._earlier is None:
            self._earlier = keep_earlier(folder, FINAL_FILE, *pretrained.FINAL_FOLDERS)
        path = None if layout is None else pretrained.export_final(model, layout, folder)
        if path is None:
            path = folder / FINAL_FILE
            save_model(plain_state(model), path)
        log.warning("the run has finished; the model is in %s%s", path, self._earlier)
        if path.is_file() and (base := self._optimizer.base.describe()):
            log.warning("the file contains what was trained, without the base (%s)", base)

    @property
    def export_text(self) -> str:
        return f"gridtrain export {self._options.folder} OUT writes it from the latest checkpoint"

    @property
    def _exported(self) -> torch.nn.Module:
        return self._optimizer.model

    @cached_property
    def _layout(self) -> pretrained.PretrainedLayout | None:
        return pretrained.describe(self._optimizer.model, self._optimizer.trained)

    @property
    def _residual(self) -> WorkerResidual:
        return self._optimizer.residual

    def _load_state(self, blobs: Sequence[bytes | memoryview]) -> None:
        if self._is_resumed and self._left is not None:
            self._residual.clear()  # the checkpoint's: `_left` is what remained of it later
        else:
            self._residual.drop(REPLACED)
        self._is_resumed = False
        self._optimizer.restore_state(blobs)

    def _is_checkpoint_due(self, snapshot: WorkerSnapshot) -> bool:
        return self.checkpoints.is_due(snapshot.applied + 1)

    def save_paused(self) -> None:
        super().save_paused()
        if not self._has_taken_part:  # what it has on disk stays valid
            return
        done, step, folder = self._wait_for_writer(SAVE_REPORT_S), self._written_step, self._options.folder
        saved = f"the state after step {step} is on this worker's disk, in {folder}"
        log.warning(
            "%s%s",
            "this worker has written no checkpoint since it started" if step is None else saved,
            "" if done else "; its last state is still being written",
        )

    def _write_checkpoint(self, snapshot: WorkerSnapshot) -> None:
        document, tensors = self._optimizer.pack()
        residual, layout = self._residual.state(), self._layout
        described = None if layout is None else layout.to_json()
        self.checkpoints.write(
            CheckpointContent(position_of(snapshot), self._facts, document, tensors, residual, described)
        )

    def _keep_for_pause(self) -> CheckpointInfo | None:
        """Set the residual to zero; return the position of the model in memory if it has the state after the
        last committed step, otherwise None."""
        self._residual.clear()
        snapshot = self._session.snapshot
        return position_of(snapshot) if snapshot.is_synced and snapshot.applied >= 0 else None

    def _keep_for_others(self, *, between_steps: bool = True) -> None:
        """Record the state, because all workers may be leaving or pausing, and no worker knows whether it is
        the last.

        With overlapped local steps no state is recorded, because the latest change is not applied yet.  A
        worker that leaves, unlike one that pauses, may have stopped before its tracked objects stepped: in
        that case their state is known only when the script requests its next batch.  Nor is a state recorded
        if the script has changed the parameters since the last step, for example to those with the best loss.
        """
        snapshot = self._session.last_snapshot
        is_complete = snapshot.is_synced and snapshot.applied >= 0 and not self._optimizer.delay
        if not (self._has_checkpoints and is_complete):
            return
        held = snapshot if between_steps else None
        if not (between_steps or self.has_failed):
            held = self._session.snapshot_of_model(snapshot)
        if held is not None and held.applied >= 0 and not self._optimizer.parameter_watch.has_changed:
            if not between_steps and self._session.is_in_turn:
                self._optimizer.abort_turn()
            self._left_at = held
        elif snapshot.world_size <= 1:
            is_updated = self._session.is_turn_done and self._optimizer.unapplied_step is None
            why = CHANGED if held is not None else UNSETTLED if is_updated else WITHIN_STEP
            self._lost_step = snapshot.applied + 1, why
        elif held is not None:
            log.warning(NOT_SAVED, CHANGED)

    def _drop_from_checkpoint(self, step: int) -> None:
        self.checkpoints.drop_residual(step)


def largest_state_bytes(model: torch.nn.Module) -> int:
    """Return an upper bound on the size of a state, in bytes.  An optimizer's state is as large as two or
    three copies of the model, and each weight average adds another copy."""
    tensors = (*model.parameters(), *model.buffers())
    return (64 << 20) + 16 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def describe_machine(device: torch.device, base: FrozenBase) -> WorkerInfo:
    """Describe this worker for the run's owner: the device, its memory, the software versions, and the
    model's base."""
    texts = {"device": f"CPU, {os.cpu_count() or 1} cores"}
    if device.type == "cuda":
        texts["device"] = torch.cuda.get_device_name(device)
        texts["memory"] = f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
    elif device.type != "cpu":
        texts["device"] = device.type
    texts |= {"torch": torch.__version__, "python": platform.python_version(), "gridtrain": __version__}
    texts |= {BASE_FACT: base.describe(), BASE_ORIGIN: base.origin}
    return WorkerInfo(tuple((name, text[:128]) for name, text in texts.items() if text))


def _with_ring(neighbours: NeighboursOf) -> NeighboursOf:
    """Return `neighbours` with the ring's neighbours added, because every exchange uses a ring for buffer
    averages, trial tables and, in retries, hyperparameters."""
    return lambda rank, world_size: neighbours(rank, world_size) | ring.neighbours(rank, world_size)


def _exchange_choices(wrapped: GridOptimizer) -> Mapping[str, NeighboursOf]:
    """Map the name of each exchange that a membership view may contain to the neighbours in this exchange; ""
    stands for a view that names no exchange."""
    exchange = round_exchange(wrapped.exchange_config)
    if as_direct(exchange) is not None:
        usual, directly = _with_ring(neighbours_of(exchange)), _with_ring(direct.neighbours)
        return {"": usual, direct_marker(exchange): directly}
    return {each.describe(): _with_ring(neighbours_of(each)) for each in wrapped.choices}
