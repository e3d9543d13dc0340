"""The stage of the model that is in this worker's memory: built, replaced, copied for others, loaded.

rank in a snapshot or a step plan --> stage and layers --> StageState, built if another one is in memory
                                                             |  replaced: its residual is lost, unless it
                                                             |  was transferred or saved before
    a replica's state, checkpoints  --restore_state, load--> |
    newcomers, checkpoints, export <--capture_state, pack----+
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import CheckpointInfo, Facts, Span
from gridtrain.errors import ConfigError
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.stage_optimizer import StageOptimizer
from gridtrain.pipeline.stage_state import MakeOptimizer, PipelineOptions, StageState, make_optimizer
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.step_plan import StepPlan
from gridtrain.training.checkpoint import checkpoint_merge, serialization
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint, CheckpointContent
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.checkpoint.model_export import save_model
from gridtrain.training.worker_residual import WorkerResidual

log = logging.getLogger("gridtrain")


class HeldStage:
    """One worker's stage.  Used from the training thread.

    Args:
        defined: the stages as the run is defined; the coordinator may partition the model otherwise.
        session: knows this worker's rank, and is told when the residual changes its length or is lost.

    Attributes:
        template: the optimizer of the whole model, on the meta device: groups and settings.
        optimizer: the optimizer of the stage that is held, whichever it is: one object for schedulers.
        trackers: schedulers and the like by name, part of the state.
        current: the stage in memory; None if there is none.
    """

    def __init__(
        self, defined: ModelStages, make: MakeOptimizer, options: PipelineOptions, session: GroupSession
    ) -> None:
        self.defined, self.options = defined, options
        self._stages = defined  # as the model is partitioned in the latest generation
        self._make_optimizer, self._session = make, session
        self.template = make_optimizer(make, defined.whole.parameters())
        self.optimizer = StageOptimizer(self.template)
        self.trackers: dict[str, serialization.Stateful] = {}
        self.current: StageState | None = None
        self._restore_start: Callable[[], None] | None = None
        self._lost_magnitude = 0.0
        self._is_saved = False  # the residual is on disk, for those that hold these layers from now on

    def track(self, **trackers: serialization.Stateful) -> None:
        """Add to what a joining worker receives."""
        self.trackers.update(trackers)

    # -- where this worker is ------------------------------------------------------------------------

    def stages_at(self, place: WorkerSnapshot | StepPlan) -> ModelStages:
        """The stages in this generation; before the first one, as the run is defined."""
        bounds = place.stage_bounds or self.defined.cuts
        if bounds != self._stages.cuts:
            self._stages = self.defined.with_cuts(bounds)
        return self._stages

    def layout_at(self, place: WorkerSnapshot | StepPlan) -> RankLayout:
        """The ranks of stages and replicas."""
        return RankLayout.for_world_size(self.stages_at(place).stages, place.world_size)

    def stage_at(self, place: WorkerSnapshot | StepPlan) -> int:
        """The stage of this worker's rank."""
        return self.layout_at(place).stage_of(place.rank)

    def layers_at(self, place: WorkerSnapshot | StepPlan) -> Span:
        """The layers of this worker's rank."""
        return Span(*self.stages_at(place).block_range(self.stage_at(place)))

    def is_alone(self, place: WorkerSnapshot) -> bool:
        """Whether no other worker holds the stage of this worker's rank."""
        return place.world_size == self.stages_at(place).stages

    # -- the stage in memory ---------------------------------------------------------------------------

    @property
    def stage(self) -> int | None:
        """The stage in memory, whichever rank this worker has by now; None if there is none."""
        return self.current.stage if self.current is not None else None

    @property
    def layers(self) -> Span | None:
        """The layers in memory; None if there are none."""
        return self.current.blocks if self.current is not None else None

    @property
    def residual(self) -> WorkerResidual | None:
        """The residual of the stage in memory."""
        return self.current.residual if self.current is not None else None

    def at(self, place: WorkerSnapshot | StepPlan) -> StageState:
        """The stage of this worker's rank, built if another one is in memory."""
        stages, stage = self.stages_at(place), self.stage_at(place)
        if self.current is None or self.current.blocks != Span(*stages.block_range(stage)):
            self._restore_start = self._restore_start or self.capture_settings()
            self._report_lost_residual()
            self.release()  # frees its memory before the next one is built
            self.current = StageState(stage, stages, self._make_optimizer, self.options)
            self.optimizer.set_inner(self.current.inner)
            self._session.tasks.resize_residual(self.current.residual.size)
        self.current.set_position(stages, stage)
        return self.current

    def assigned(self) -> StageState:
        """The stage of this worker's rank now.  Raises `ConfigError` before there is one."""
        snapshot = self._session.snapshot
        if not snapshot.world_size:
            raise ConfigError(
                "which stage this worker holds is not known before the group has formed",
                remedy="ask inside of the loop over grid.batches(...)",
            )
        return self.at(snapshot)

    def in_memory(self) -> StageState:
        """The stage in memory, which others may still need after this worker's rank has changed."""
        return self.assigned() if self.current is None else self.current

    def release(self) -> None:
        """Free the stage's memory; its optimizer's settings stay."""
        self.optimizer.set_inner(self.template)
        self.current = None

    def restart(self) -> None:
        """Return to step 0, because no worker has a later state of all stages."""
        assert self._restore_start is not None
        self.release()
        self._restore_start()

    def _report_lost_residual(self) -> None:
        """The stage in memory is replaced: no worker can send its residual any more."""
        is_saved, self._is_saved = self._is_saved, False
        magnitude = self.current.residual.magnitude if self.current is not None else 0.0
        if magnitude and not is_saved and self.current is not None:
            self._lost_magnitude += magnitude
            self._session.report_figures({"lost_mass": self._lost_magnitude})
            log.warning(
                "residual of stage %d, magnitude %.3g: lost, because this worker holds another stage now",
                self.current.stage,
                magnitude,
            )

    # -- its state ---------------------------------------------------------------------------------------

    def capture_settings(self) -> Callable[[], None]:
        """Copy the optimizer's settings and the trackers; the function that is returned restores them."""
        settings = self.optimizer.settings()
        trackers = {name: copy.deepcopy(item.state_dict()) for name, item in self.trackers.items()}

        def restore() -> None:
            self.optimizer.load_settings(settings)
            for name, state in trackers.items():
                self.trackers[name].load_state_dict(copy.deepcopy(state))

        return restore

    def capture_state(self, place: WorkerSnapshot, whole: bool = True) -> Sequence[bytes | memoryview] | None:
        """The state of the stage of `place`, see `serialization.capture_state`; None: another one is in
        memory.

        Before the first step the stage is built, because one that was built for another rank is not needed.
        """
        if place.applied >= 0 and self.layers not in (None, self.layers_at(place)):
            return None
        held = self.at(place)
        return serialization.capture_state(held.module, held.inner, self.trackers, whole=whole)

    def restore_state(self, blobs: bytes | memoryview | Sequence[bytes | memoryview]) -> None:
        """Load a replica's state.  Another stage's is refused, because its names differ."""
        self._report_lost_residual()
        self.release()
        held = self.assigned()
        serialization.restore_state(blobs, held.module, held.inner, self.trackers)

    def pack(self, place: WorkerSnapshot) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `serialization.pack_state`; for checkpoints of the stage of `place`."""
        return self._pack(self.at(place))

    def _pack(self, held: StageState) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """With what `checkpoint_merge` needs to build a stage of another partition."""
        document, tensors = serialization.pack_state(held.module, held.inner, self.trackers)
        document[checkpoint_merge.PARAMETER_ORDER_KEY] = checkpoint_merge.parameter_order(
            held.module, held.inner
        )
        parameters = canonical_parameters(held.module)
        document[checkpoint_merge.FROZEN_KEY] = [name for name, p in parameters if not p.requires_grad]
        return document, tensors

    def pack_replaced(self, info: CheckpointInfo, facts: Facts) -> CheckpointContent | None:
        """The state in memory after this worker's rank has changed; None if it is not that of `info`."""
        if self.current is None or self.current.blocks != info.layers:
            return None
        self._is_saved = True
        return CheckpointContent(info, facts, *self._pack(self.current), self.current.residual.state())

    def load_checkpoints(self, found: Sequence[Checkpoint], layers: Span) -> None:
        """Load these layers and their residual from checkpoints.

        Raises:
            RemoteProtocolError: they are of other layers or another model.
        """
        if self.layers != layers:
            self._report_lost_residual()  # that of the same layers comes back with the checkpoint
        self.release()
        held = self.assigned()
        if held.blocks != layers:
            return  # this worker's rank has changed meanwhile: it is asked again
        checkpoint_merge.load_merged(found, held.module, held.inner, self.trackers, self._stages.tied_names)
        if held.residual.size and (
            residual := checkpoint_merge.merged_residual(found, held.module, held.flat)
        ):
            held.residual.load(residual)

    @property
    def exports(self) -> bool:
        """Whether this worker writes its stage's part of the final model."""
        snapshot = self._session.snapshot
        if not snapshot.world_size:
            return False  # a standby
        return self.layout_at(snapshot).replica_of(snapshot.rank) == 0

    def export(self, folder: Path) -> None:
        """Write this stage's part of the final model and, for the first stage, the index of all parts."""
        held, stages = self.assigned(), self._stages
        path = folder / _part_name(held.stage, stages.stages)
        save_model(held.module.state_dict(), path)
        if held.stage == 0:
            parts = {
                name: _part_name(stage, stages.stages)
                for stage in range(stages.stages)
                for name in stages.tensor_names(stage)
            }
            text = json.dumps({"metadata": {"stages": stages.stages}, "weight_map": parts}, indent=1)
            partial = path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / "final.safetensors.index.json")
        log.warning("the run is finished; stage %d of the model is in %s", held.stage, path)


def _part_name(stage: int, stages: int) -> str:
    return f"final-{stage + 1:05d}-of-{stages:05d}.safetensors"
