"""Builds the stage of this worker's rank; replaces it when the rank changes, and saves and loads its state.

    rank in a snapshot or a step plan  --> stage and layers --> StageState, built unless it is in memory
    a replica's state, checkpoints     --restore_state, load_checkpoints--> StageState
    state for newcomers, checkpoints   <--capture_state, pack-------------- StageState

When the stage in memory is replaced, its residual is lost, unless it was transferred or saved before.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gridtrain.core.messages import CheckpointInfo, Facts, Span
from gridtrain.errors import ConfigError
from gridtrain.pipeline.model_stages import ModelStages, StagePlaces
from gridtrain.pipeline.stage_optimizer import StageOptimizer
from gridtrain.pipeline.stage_state import MakeOptimizer, PipelineOptions, StageState, make_optimizer
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.checkpoint import checkpoint_merge, serialization
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint, CheckpointContent
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.checkpoint.frozen_base import FROZEN_KEY, FrozenBase
from gridtrain.training.optimizer import have_stepped, rates_by_tracker
from gridtrain.training.worker_residual import REPLACED, WorkerResidual

log = logging.getLogger("gridtrain")

MOVED = "this worker now holds another stage"
MICRO_BATCHES_TRACKER = "gridtrain: micro-batches"
"""The name of the tracker that holds the `MicroBatchCount`, which only `Pipeline.step` changes."""


class HeldStage:
    """The stage that this worker holds.  Use it on the training thread only.

    Args:
        defined: the stages of the run's definition; the coordinator may later partition the model
            differently.
        make: a function that makes the optimizer for given parameters.
        options: the options of the run.
        session: the session that provides this worker's rank; the residual's length and lost residuals are
            reported to it.
        base: the frozen parameters of the whole model, which are not part of the state.

    Attributes:
        places: provides the stage and the layers of this worker's rank.
        template: the optimizer of the whole model on the meta device, which provides groups and settings.
        optimizer: the optimizer of the held stage; it stays the same object when the stage changes.
        trackers: schedulers and other tracked objects by name; they are part of the state.
        current: the stage in memory; None if there is none.
    """

    def __init__(
        self,
        defined: ModelStages,
        make: MakeOptimizer,
        options: PipelineOptions,
        session: GroupSession,
        base: FrozenBase,
    ) -> None:
        self.defined, self.options, self.base = defined, options, base
        self.places = StagePlaces(defined)
        self._make_optimizer, self._session = make, session
        self.template = make_optimizer(make, defined.whole.parameters())
        self.optimizer = StageOptimizer(self.template)
        self.trackers: dict[str, serialization.Stateful] = {}
        self.current: StageState | None = None
        self._restore_start: Callable[[], None] | None = None
        # Since the last applied or dropped step, the script has requested the batch of another step.
        self._is_in_turn = False
        # The schedulers' learning rates after that step or request; None after a step that was dropped.
        self._rates: dict[str, object] | None = None
        self._is_saved = False  # the residual is on disk, for the workers that hold these layers from now on

    def track(self, **trackers: serialization.Stateful) -> None:
        """Add objects, by name, to the state that newcomers receive and checkpoints contain."""
        self.trackers.update(trackers)

    # -- the stage in memory ---------------------------------------------------------------------------

    @property
    def stage(self) -> int | None:
        """The index of the stage in memory; None if there is none.

        It may differ from the stage of this worker's current rank.
        """
        return self.current.stage if self.current is not None else None

    @property
    def layers(self) -> Span | None:
        """The layers in memory; None if there are none."""
        return self.current.blocks if self.current is not None else None

    @property
    def residual(self) -> WorkerResidual | None:
        """The residual of the stage in memory; None if there is none."""
        return self.current.residual if self.current is not None else None

    def at(self, place: WorkerSnapshot | StepPlan) -> StageState:
        """Return the stage of this worker's rank in `place`; build it unless it is in memory."""
        stages, stage = self.places.stages(place), self.places.stage(place)
        if self.current is None or self.current.blocks != Span(*stages.block_range(stage)):
            self._restore_start = self._restore_start or self.capture_settings()
            self._release_without_residual(MOVED)  # frees its memory before the next one is built
            self.current = StageState(
                stage, stages, self._make_optimizer, self.options, self._session.increase_figure
            )
            self.base.mark(self.current.module)
            self.base.check_unchanged(self.current.module)
            self.optimizer.set_inner(self.current.inner)
            self._session.tasks.resize_residual(self.current.residual.size)
        self.current.set_position(stages, stage)
        return self.current

    def assigned(self) -> StageState:
        """Return the stage of this worker's current rank, built if necessary.

        Raises:
            ConfigError: the group has not formed, or the run has finished, so this worker has no rank.
        """
        snapshot = self._session.snapshot
        if not snapshot.world_size and snapshot.run_state[0] == "finished":
            raise ConfigError(
                "the run has finished, and this worker held no stage at its end",
                remedy="read pipe.module only if pipe.stage is not None",
            )
        if not snapshot.world_size:
            raise ConfigError(
                "the stage of this worker is not known before the group has formed",
                remedy="access the stage inside the loop over grid.batches(...)",
            )
        return self.at(snapshot)

    def in_memory(self) -> StageState:
        """Return the stage in memory, even if this worker's rank has changed; build the assigned stage if
        none is in memory."""
        return self.assigned() if self.current is None else self.current

    def abort_step(self) -> None:
        """Undo what an open step has changed in the stage in memory."""
        if self.current is not None and self.current.executor is not None:
            self.current.executor.stage.abort()

    def record_turn(self) -> None:
        """Record that the script requests its next batch and has therefore ended the previous step."""
        self._is_in_turn, self._rates = True, rates_by_tracker(self.trackers)

    def record_step(self, step: int) -> None:
        """Record that the update of `step` was fully applied to the stage in memory, or was skipped."""
        assert self.current is not None
        self._is_in_turn, self._rates = False, rates_by_tracker(self.trackers)
        self.current.applied = step

    def record_dropped_step(self) -> None:
        """Record that a step was dropped; the script may nevertheless change tracked objects afterwards."""
        self._is_in_turn, self._rates = False, None

    def _record_load(self, held: StageState, step: int) -> None:
        """Record that `held` and the tracked objects have the complete state after `step`.

        The script has already requested a batch, and the loaded state may contain other learning rates.
        """
        held.applied = step if step >= 0 else None
        self.record_turn()

    def is_whole_after(self, step: int) -> bool:
        """Return whether the stage in memory has the complete state after `step`; the next step may be open.

        The state is complete if the update is fully applied and, if the script tracks objects,

        - the script has requested the next batch, and has stepped no tracked scheduler since then, or
        - all tracked objects are schedulers that the script has stepped since the update.
        """
        own = serialization.INTERNAL_PREFIX, MICRO_BATCHES_TRACKER
        tracked = {name: each for name, each in self.trackers.items() if not name.startswith(own)}
        if self.current is None or self.current.applied != step:
            return False
        if not tracked or self._rates is None:
            return not tracked
        before = self._rates
        if self._is_in_turn:
            return all(rates is before.get(name) for name, rates in rates_by_tracker(tracked).items())
        return have_stepped(tracked, before)

    def release(self) -> None:
        """Free the stage's memory; keep the settings of its optimizer."""
        self.optimizer.set_inner(self.template)
        self.current, self._is_saved = None, False

    def restart(self) -> None:
        """Free the stage and restore the initial settings, because the group restarts at step 0.

        The group does so if no later state of the whole model remains.
        """
        assert self._restore_start is not None
        self._release_without_residual("the group restarts at step 0")
        self._restore_start()

    def _release_without_residual(self, why: str) -> None:
        """Free the stage's memory, and report its residual as lost unless it has been saved.

        Args:
            why: see `WorkerResidual.drop`.
        """
        if self.current is not None and not self._is_saved:
            self.current.residual.drop(why)
        self.release()

    # -- its state ---------------------------------------------------------------------------------------

    def capture_settings(self) -> Callable[[], None]:
        """Copy the optimizer's settings and the trackers; return a function that restores them."""
        settings = self.optimizer.settings()
        trackers = {name: copy.deepcopy(item.state_dict()) for name, item in self.trackers.items()}

        def restore() -> None:
            self.optimizer.load_settings(settings)
            for name, state in trackers.items():
                self.trackers[name].load_state_dict(copy.deepcopy(state))

        return restore

    def capture_state(self, place: WorkerSnapshot, whole: bool = True) -> Sequence[bytes | memoryview] | None:
        """Return a copy of the state of this worker's stage in `place`; see `serialization.capture_state`.

        Return None if other layers are in memory.  Before the first step, however, the stage is built,
        because no worker needs the state of the other layers yet.
        """
        if place.applied >= 0 and self.layers not in (None, self.places.layers(place)):
            return None
        held = self.at(place)
        self.base.check_unchanged(held.module)
        return serialization.capture_state(held.module, held.inner, self.trackers, whole=whole)

    def restore_state(self, blobs: bytes | memoryview | Sequence[bytes | memoryview]) -> None:
        """Load the state of a replica of this worker's stage.

        The state of another stage is rejected, because its tensors have other names.
        """
        self._release_without_residual(REPLACED)
        held = self.assigned()
        serialization.restore_state(blobs, held.module, held.inner, self.trackers)
        self._record_load(held, self._session.snapshot.applied)

    def pack(self, place: WorkerSnapshot) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Pack the stage of `place` for a checkpoint; see `serialization.pack_state`."""
        return self._pack(self.at(place))

    def _pack(self, held: StageState) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Pack the stage and the data from which `checkpoint_merge` builds a stage of another partition."""
        self.base.check_unchanged(held.module)
        document, tensors = serialization.pack_state(held.module, held.inner, self.trackers)
        order = checkpoint_merge.parameter_order(held.module, held.inner)
        document[checkpoint_merge.PARAMETER_ORDER_KEY] = order
        parameters = canonical_parameters(held.module)
        document[FROZEN_KEY] = [name for name, p in parameters if not p.requires_grad]
        return document, tensors

    def pack_replaced(self, info: CheckpointInfo, facts: Facts) -> CheckpointContent | None:
        """Pack the stage in memory for the checkpoint `info`, after this worker's rank has changed.

        Return None if the layers in memory are not those of `info`.
        """
        if self.current is None or self.current.blocks != info.layers:
            return None
        self._is_saved = True
        residual = self.current.residual.state()
        return CheckpointContent(
            info, facts, *self._pack(self.current), residual, self.defined.blueprint.pretrained
        )

    def load_checkpoints(self, found: Sequence[Checkpoint], layers: Span) -> None:
        """Load `layers` and their residual from checkpoints, unless this worker's rank now has other layers.

        Raises:
            RemoteProtocolError: the checkpoints have different layers or belong to another model.
        """
        if self.layers == layers and any(each.residual for each in found):
            self.release()  # the checkpoint restores the residual of the same layers
        else:
            self._release_without_residual(REPLACED if self.layers == layers else MOVED)
        held = self.assigned()
        if held.blocks != layers:
            return  # this worker's rank has changed; the caller tries again
        tied = self.places.latest.tied_names
        checkpoint_merge.load_merged(found, held.module, held.inner, self.trackers, tied)
        residual = checkpoint_merge.merged_residual(found, held.module, held.flat)
        if held.residual.size and residual:
            held.residual.load(residual)
        self._record_load(held, found[0].position.applied)
