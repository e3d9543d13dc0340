"""What becomes of a stage when its worker goes for a while, or for good, between two steps.

Decides what is written to the disk then and what is given to a replica; never decides where the run goes on
(`protocol.copies`), nor who takes a residual over (`protocol.handover`).

    a replica of the stage is here     the residual's largest entries go to it; the rest is written down
    it is the stage's only worker      the stage is written down as it is now: the others wait with the same
                                       step in memory, and go on from it when this worker is back
    it comes back                      the rest of the residual is read back if no step was committed since
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gridtrain.core.group.member_events import MemberPhase
from gridtrain.core.messages import CheckpointInfo, Facts, Span
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.state_transfer import residual_pieces
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore
from gridtrain.training.residual_departure import (
    LeftResidual,
    load_left_residual,
    save_left_residual,
    transfer_residual,
)

log = logging.getLogger("gridtrain")


@dataclass(slots=True)
class StageDeparture:
    """Of one worker in one run."""

    session: GroupSession
    pipe: Pipeline
    store: StageCheckpointStore
    facts: Facts
    has_checkpoints: bool  # there are checkpoints
    _left_residual: tuple[Span, LeftResidual] | None = None
    _has_read_disk: bool = False

    def rest(self, budget_bytes: int) -> None:
        """Before a pause: nothing of the stage stays in this worker's memory."""
        self._left_residual = self._transfer_residual(budget_bytes) or self._left_residual
        self._write_checkpoint()
        self.pipe.forget()

    def leave(self, budget_bytes: int, *, between_steps: bool) -> None:
        """For good, as far as anybody knows."""
        left = self._transfer_residual(budget_bytes) or self._left_residual
        if between_steps:
            self._write_checkpoint()
        if left is not None and self.has_checkpoints:
            save_left_residual(self.store.folder_of(left[0]), self.facts, left[1])

    def _transfer_residual(self, budget_bytes: int) -> tuple[Span, LeftResidual] | None:
        blocks = self.pipe.held_blocks
        if blocks is None or not self.pipe.residual_size:
            return None
        voids = partial(self.store.drop_residual, blocks) if self.has_checkpoints else None
        left = transfer_residual(self.session, self.pipe, budget_bytes, voids)
        self.pipe.clear_residual()
        return None if left is None else (blocks, left)

    def _write_checkpoint(self) -> None:
        picture = self.session.snapshot
        blocks, stage = self.pipe.held_blocks, self.pipe.held_stage
        if blocks is None or picture.applied < 0 or not picture.is_synced:
            return
        if not self.pipe.is_alone(picture) and picture.phase is MemberPhase.RUNNING:
            return  # where the run stands, its replicas may be gone, too
        if self.pipe.blocks_at(picture) != blocks:
            return  # the group has moved on: what is held here is nobody's any more
        if not self.has_checkpoints:
            text = (
                "stage %d is held by this worker alone, which keeps no checkpoints: what was trained is lost"
            )
            log.warning(text, stage)
            return
        document, tensors = self.pipe.pack(picture)
        held = CheckpointInfo(picture.applied, picture.history, picture.ledger)
        # Without the residual, which is in what was left.
        if not self.store.write_now(blocks, CheckpointContent(held, self.facts, document, tensors, {})):
            return
        why = (
            "is held by this worker alone" if self.pipe.is_alone(picture) else "may be in nobody else's hands"
        )
        text = "stage %d %s: step %d is on its disk, and the others wait with it"
        log.warning(text, stage, why, picture.applied + 1)

    def restore_residual(self, picture: WorkerSnapshot) -> None:
        """At the first turn after a start or a pause: a residual that still fits is sent from here again."""
        found = [self._left_residual] if self._left_residual is not None else []
        self._left_residual = None
        if not self._has_read_disk:
            self._has_read_disk = True
            found += self._residuals_on_disk()
        for blocks, left in found:
            fits = (left.applied, left.history) == (picture.applied, picture.history)
            indices_K = np.flatnonzero(left.residual_N)
            entries = SparseVector(indices_K, left.residual_N[indices_K])
            back = fits and blocks == self.pipe.blocks_at(picture) and self._absorb(entries, picture)
            mass = residual_pieces.magnitude_sum([entries])
            self.session.report_figures(
                {"read_back_mass": mass if back else 0.0, "lost_mass": 0.0 if back else mass}
            )
            text = "the residual of blocks %d to %d, step %d, mass %.3g is %s; the run is at step %d"
            become = "read back" if back else "lost"
            ends = blocks.start, blocks.stop - 1
            log.warning(text, *ends, left.applied + 1, mass, become, picture.applied + 1)

    def _absorb(self, entries: SparseVector, picture: WorkerSnapshot) -> bool:
        self.pipe.residual_state(picture)  # builds the stage, if nothing has yet
        self.pipe.clear_residual()  # a checkpoint's of the same step: what was left is what remains of it
        return self.pipe.add_residual(entries, picture.world_size)

    def _residuals_on_disk(self) -> Sequence[tuple[Span, LeftResidual]]:
        found = []
        for blocks, folder in self.store.stages():
            left = load_left_residual(folder, self.facts, self.pipe.elements_of(blocks))
            if left is not None:
                found.append((blocks, left))
        return found
