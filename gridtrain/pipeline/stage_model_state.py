"""Manages a stage between two steps: checkpoints, pauses, departure, residual and export (see `ModelState`).

If another worker has the same stage when this worker leaves or pauses, the largest entries of the residual
are sent to that worker, and the rest is saved.  Otherwise, the current state is saved; the other workers keep
their states of the same step in memory, and wait until this worker returns.  When this worker returns, the
saved part of its residual is added if no step was committed in the meantime.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from gridtrain.core.collectives import ring
from gridtrain.core.collectives.direct_allgather import neighbours as all_ranks
from gridtrain.core.collectives.subgroup import neighbours_within
from gridtrain.core.group.member_events import MemberPhase
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import CheckpointInfo, Facts, LedgerSpec, Setup, Span
from gridtrain.core.planning.workload import NeighboursOf
from gridtrain.core.stages.stage_cost import Layer
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.pipeline.held_stage import HeldStage
from gridtrain.pipeline.model_costs import describe_staged_model
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.profiler import Profile
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint, CheckpointContent
from gridtrain.training.checkpoint.model_export import (
    END,
    FINAL_INDEX,
    keep_earlier_parts,
    plain_state,
    save_model,
)
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore
from gridtrain.training.data.batch_sizes import BatchSizes
from gridtrain.training.exchangers import neighbours_of
from gridtrain.training.model_state import (
    NOT_SAVED,
    ModelState,
    ModelStateOptions,
    describe_machine,
    largest_state_bytes,
    position_of,
)
from gridtrain.training.residual_departure import LeftResidual, load_left_residual
from gridtrain.training.worker_residual import WorkerResidual

log = logging.getLogger("gridtrain")


class StageModelState(ModelState):
    """The state of the model's stage that this worker holds; other workers hold the other stages.

    Args:
        profile: the costs of the model's layers, which the coordinator uses to repartition the model.
        memory_bytes: the memory that training may use on this worker; 0 if unknown.
        measure_flops: a function that measures this device's float32 operations per second.
    """

    _store: StageCheckpointStore | None

    def __init__(
        self,
        session: GroupSession,
        held: HeldStage,
        options: ModelStateOptions,
        *,
        profile: Profile | Sequence[Layer] | None = None,
        memory_bytes: int = 0,
        measure_flops: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(session, options)
        self._held, self._profile, self._memory_bytes = held, profile, memory_bytes
        self._measure_flops = measure_flops
        self._has_read_disk = False
        session.tasks.attach_state(
            held.capture_state, self._restore_state, largest_state_bytes(held.defined.whole)
        )
        session.is_state_unchanged = lambda: True  # until `Pipeline.step`
        session.tasks.attach_residual(0, self._add_residual)  # `HeldStage` reports its length

    def join(self, facts: Facts, spec: LedgerSpec, sizes: BatchSizes) -> None:
        held, defined, options = self._held, self._held.defined, self._held.options
        about = (("stages", str(options.stages)), ("blocks", str(len(defined.blueprint))))
        facts = (*facts, *defined.blueprint.facts, *about)
        self._define(facts, spec)
        self._store = StageCheckpointStore(
            self._options.folder,
            self._facts,
            every=self._options.every,
            keep=self._options.keep,
            report=self._session.tasks.report_checkpoints,
            load_state=self._load_checkpoints,
            pack_state=lambda info: held.pack_replaced(info, self._facts),
            report_figures=self._session.report_figures,
            on_written=self._upload,
            pretrained=defined.blueprint.pretrained,
        )
        self._store.claim()
        self._fetch_checkpoint(self._store.latest_complete_step(len(defined.blueprint)))
        if self._options.is_chosen:
            self._store.check_not_refused()
        self._session.tasks.attach_stage_checkpoints(self._store)
        model = describe_staged_model(
            defined, options, held.template, self._profile, sizes.batch_size, held.trackers.values()
        )
        setup = Setup(
            facts,
            spec,
            sizes.batch_size,
            sizes.global_batch_size,
            stages=options.stages,
            stage_checkpoints=self._store.stored_checkpoints(),
            model=model,
            memory_bytes=self._memory_bytes,
            flops=self._measure_flops(),
        )
        self._session.join(
            setup,
            stage_neighbours(defined, neighbours_of(options.exchange)),
            describe_machine(defined.device, held.base),
        )

    @property
    def exports(self) -> bool:
        """Whether this worker writes its stage's part of the final model: the first replica does."""
        snapshot = self._session.snapshot
        if not snapshot.world_size:
            return False  # a standby
        return self._held.places.layout(snapshot).replica_of(snapshot.rank) == 0

    @property
    def holds_stage(self) -> bool:
        snapshot, current = self._session.snapshot, self._held.current
        is_member = snapshot.world_size > 0 and snapshot.is_synced
        return is_member and current is not None and current.applied == snapshot.applied

    @property
    def others_wait(self) -> bool:
        snapshot = self._session.last_snapshot
        # In any other phase the stage's replicas may also be gone.
        return self._held.places.is_alone(snapshot) or snapshot.phase is not MemberPhase.RUNNING

    def export(self, folder: Path) -> None:
        """Write this stage's part of the final model into `folder`; for the first stage, also write the
        index of all parts."""
        held, stages = self._held.assigned(), self._held.places.latest
        snapshot, path = self._session.snapshot, folder / _part_name(held.stage, stages.stages)
        end = f"step {snapshot.applied + 1}, {snapshot.history.hex()}, stages cut at {list(stages.cuts)}"
        earlier = keep_earlier_parts(folder, end)
        save_model(plain_state(self._exported), path, {END: end})
        if held.stage == 0:
            parts = {
                name: _part_name(stage, stages.stages)
                for stage in range(stages.stages)
                for name in stages.tensor_names(stage)
            }
            metadata = {"stages": stages.stages, END: end}
            text = json.dumps({"metadata": metadata, "weight_map": parts}, indent=1)
            partial = path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / FINAL_INDEX)
        part = f"stage {held.stage} of the model" if stages.stages > 1 else "the model"
        log.warning("the run has finished; %s is in %s%s", part, path, earlier)
        if base := self._held.base.describe():
            log.warning("the file contains what was trained, without the base (%s)", base)

    @property
    def _exported(self) -> nn.Module:
        return self._held.assigned().module

    @property
    def _continuation_text(self) -> str:
        out = "OUT.safetensors" if self._held.defined.blueprint.pretrained is None else "OUT"
        return (
            "the state folders of workers with all of the model's stages (see docs/operations.md), and "
            f"gridtrain export FOLDER {out} writes the whole model from copies of them in FOLDER; this "
            f"worker's folder is {self._options.folder}"
        )

    @property
    def _layers(self) -> Span:
        assert self._held.layers is not None
        return self._held.layers

    @property
    def _residual(self) -> WorkerResidual | None:
        return self._held.residual

    @property
    def _checkpoints(self) -> StageCheckpointStore:
        assert self._store is not None, "`join` opens the store"
        return self._store

    def _load_state(self, blobs: Sequence[bytes | memoryview]) -> None:
        self._held.restore_state(blobs)

    def _load_checkpoints(self, checkpoints: Sequence[Checkpoint], layers: Span) -> None:
        self._held.load_checkpoints(checkpoints, layers)
        for found in checkpoints:
            self._upload(found.path, found.path.parent.name)  # may be missing from the remote store

    def _is_checkpoint_due(self, snapshot: WorkerSnapshot) -> bool:
        return self._checkpoints.is_due(self._held.places.layers(snapshot), snapshot.applied + 1)

    def _write_checkpoint(self, snapshot: WorkerSnapshot) -> None:
        residual = self._held.at(snapshot).residual.state()
        self._checkpoints.write(self._held.places.layers(snapshot), self._content(snapshot, residual))

    def _content(self, snapshot: WorkerSnapshot, residual: Mapping[str, Tensor]) -> CheckpointContent:
        document, tensors = self._held.pack(snapshot)
        described = self._held.defined.blueprint.pretrained
        return CheckpointContent(position_of(snapshot), self._facts, document, tensors, residual, described)

    def _keep_for_pause(self) -> CheckpointInfo | None:
        """Save the stage unless another worker holds it, and free its memory."""
        self._keep_for_others()
        self._held.release()
        return None

    def _keep_for_others(self, *, between_steps: bool = True) -> None:
        """Save the stage unless another worker holds it.

        Args:
            between_steps: whether no step is in progress; otherwise the state before the step is saved, if
                the stage still has it.
        """
        snapshot = self._session.last_snapshot
        layers, stage = self._held.layers, self._held.stage
        if layers is None or snapshot.applied < 0 or not snapshot.is_synced:
            return
        if not self.others_wait:
            return
        if self._held.places.layers(snapshot) != layers:
            return  # the group has continued with other stages
        if not between_steps:
            if not self._held.is_whole_after(snapshot.applied):
                log.warning(NOT_SAVED, "it ends in the middle of a step")
                return
            self._held.abort_step()
        # The residual is excluded, because it was sent or is saved separately.
        if self._checkpoints.write_now(layers, self._content(snapshot, {})):
            is_alone = self._held.places.is_alone(snapshot)
            why = "is held only by this worker" if is_alone else "might not be held by any other worker"
            log.warning(
                "stage %d %s: step %d is on this worker's disk; unless another worker has this state, the "
                "others wait for this worker, or continue from earlier checkpoints",
                *(stage, why, snapshot.applied + 1),
            )

    def _drop_from_checkpoint(self, step: int) -> None:
        self._checkpoints.drop_residual(self._layers, step)

    def _left_folder(self, left: LeftResidual) -> Path:
        return self._checkpoints.folder_of(left.layers)

    def _take_left(self) -> list[LeftResidual]:
        found = super()._take_left()
        if not self._has_read_disk:
            self._has_read_disk = True
            for layers, folder in self._checkpoints.stages():
                n = self._held.defined.gradient_elements(layers.start, layers.stop)
                left = load_left_residual(folder, self._facts, n, layers)
                found += [] if left is None else [left]
        return found

    def _add_left(self, left: LeftResidual, entries: SparseVector, snapshot: WorkerSnapshot) -> bool:
        if left.layers != self._held.places.layers(snapshot):
            return False
        residual = self._held.at(snapshot).residual  # builds the stage, if it is not in memory yet
        residual.clear()  # it came from a checkpoint of the same step; `left` is the remainder
        return residual.add(entries, snapshot.world_size)


def stage_neighbours(defined: ModelStages, neighbours: NeighboursOf) -> Callable[..., frozenset[int]]:
    """Return a function of (rank, world size, stage bounds) that returns the ranks to connect to.

    Args:
        neighbours: a function that returns the neighbours of a rank in the exchange among a stage's replicas.
    """

    def ranks(rank: int, world_size: int, stage_bounds: tuple[int, ...] = ()) -> frozenset[int]:
        stages = defined.with_cuts(stage_bounds or defined.cuts)
        layout = RankLayout.for_world_size(stages.stages, world_size)
        stage, replica = layout.stage_of(rank), layout.replica_of(rank)
        group = layout.stage_ranks(stage)
        adjacent = {layout.previous_stage_rank(rank), layout.next_stage_rank(rank)}
        tied = {layout.rank_of(other, replica) for other in stages.stages_tied_to(stage)}
        replicas = neighbours_within(neighbours, group, rank) | neighbours_within(
            ring.neighbours, group, rank
        )
        found = {r for r in adjacent if r is not None} | tied | replicas | all_ranks(rank, world_size)
        return frozenset(found - {rank})

    return ranks


def _part_name(stage: int, stages: int) -> str:
    return f"final-{stage + 1:05d}-of-{stages:05d}.safetensors"
