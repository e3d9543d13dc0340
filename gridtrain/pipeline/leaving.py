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

from gridtrain.optim.checkpoint import Snapshot
from gridtrain.optim.leaving import Left, hand_over, pick_up, put_down
from gridtrain.optim.stage_checkpoints import StageCheckpoints
from gridtrain.pipeline.group import Pipeline
from gridtrain.protocol.member_io import Stage
from gridtrain.protocol.messages import Facts, Held, Span
from gridtrain.runtime import handover
from gridtrain.runtime.api import GroupSession
from gridtrain.runtime.picture import Picture
from gridtrain.wire.sparse import Sparse

log = logging.getLogger("gridtrain")


@dataclass(slots=True)
class StageLeaving:
    """Of one worker in one run."""

    session: GroupSession
    pipe: Pipeline
    store: StageCheckpoints
    facts: Facts
    keeps: bool  # there are checkpoints
    _left: tuple[Span, Left] | None = None
    _looked: bool = False

    def rest(self, budget_bytes: int) -> None:
        """Before a pause: nothing of the stage stays in this worker's memory."""
        self._left = self._hand_over(budget_bytes) or self._left
        self._write_down()
        self.pipe.forget()

    def leave(self, budget_bytes: int, *, between_steps: bool) -> None:
        """For good, as far as anybody knows."""
        left = self._hand_over(budget_bytes) or self._left
        if between_steps:
            self._write_down()
        if left is not None and self.keeps:
            put_down(self.store.folder_of(left[0]), self.facts, left[1])

    def _hand_over(self, budget_bytes: int) -> tuple[Span, Left] | None:
        blocks = self.pipe.held_blocks
        if blocks is None or not self.pipe.residual_size:
            return None
        voids = partial(self.store.void, blocks) if self.keeps else None
        left = hand_over(self.session, self.pipe, budget_bytes, voids)
        self.pipe.forget_residual()
        return None if left is None else (blocks, left)

    def _write_down(self) -> None:
        picture = self.session.picture
        blocks, stage = self.pipe.held_blocks, self.pipe.held_stage
        if blocks is None or picture.applied < 0 or not picture.synced:
            return
        if not self.pipe.is_alone(picture) and picture.stage is Stage.RUNNING:
            return  # where the run stands, its replicas may be gone, too
        if self.pipe.blocks_at(picture) != blocks:
            return  # the group has moved on: what is held here is nobody's any more
        if not self.keeps:
            text = (
                "stage %d is held by this worker alone, which keeps no checkpoints: what was trained is lost"
            )
            log.warning(text, stage)
            return
        document, tensors = self.pipe.pack(picture)
        held = Held(picture.applied, picture.history, picture.ledger)
        # Without the residual, which is in what was left.
        if not self.store.write_now(blocks, Snapshot(held, self.facts, document, tensors, {})):
            return
        why = (
            "is held by this worker alone" if self.pipe.is_alone(picture) else "may be in nobody else's hands"
        )
        text = "stage %d %s: step %d is on its disk, and the others wait with it"
        log.warning(text, stage, why, picture.applied + 1)

    def take_back(self, picture: Picture) -> None:
        """At the first turn after a start or a pause: a residual that still fits is sent from here again."""
        found = [self._left] if self._left is not None else []
        self._left = None
        if not self._looked:
            self._looked = True
            found += self._picked_up()
        for blocks, left in found:
            fits = (left.applied, left.history) == (picture.applied, picture.history)
            indices_K = np.flatnonzero(left.residual_N)
            entries = Sparse(indices_K, left.residual_N[indices_K])
            back = fits and blocks == self.pipe.blocks_at(picture) and self._absorb(entries, picture)
            mass = handover.mass_of([entries])
            self.session.note({"read_back_mass": mass if back else 0.0, "lost_mass": 0.0 if back else mass})
            text = "the residual of blocks %d to %d, step %d, mass %.3g is %s; the run is at step %d"
            become = "read back" if back else "lost"
            ends = blocks.start, blocks.stop - 1
            log.warning(text, *ends, left.applied + 1, mass, become, picture.applied + 1)

    def _absorb(self, entries: Sparse, picture: Picture) -> bool:
        self.pipe.residual_state(picture)  # builds the stage, if nothing has yet
        self.pipe.forget_residual()  # a checkpoint's of the same step: what was left is what remains of it
        return self.pipe.absorb(entries, picture.world_size)

    def _picked_up(self) -> Sequence[tuple[Span, Left]]:
        found = []
        for blocks, folder in self.store.stages():
            left = pick_up(folder, self.facts, self.pipe.elements_of(blocks))
            if left is not None:
                found.append((blocks, left))
        return found
