"""What a stage has not sent yet (the residual of a sparse exchange), when its worker leaves or moves.

Decides what is given away and what is reported as lost.  Never decides who takes it over, which is always a
replica of the same stage (`protocol.handover`), nor what is written down (`pipeline.leaving`).

    leaves, pauses     surrender --> a replica: absorb --> sent from there         (nothing is lost)
    gets another seat  _lose --> `lost_mass`                    (its replicas do not know it any more)
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from gridtrain.core.messages import Span
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.pipeline.stage_state import StageState
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.step_plan import RoundOutcome
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.training.pending_attempt import PendingAttempt, add_residual

log = logging.getLogger("gridtrain")


class StageResiduals:
    """The part of `Pipeline` that knows of residuals."""

    _session: GroupSession

    def __init__(self) -> None:
        self._state: StageState | None = None
        self._in_flight = PendingAttempt()
        self._lost_mass = 0.0
        self._is_set_aside = False  # it is on the disk, for whoever holds these blocks in another cut

    @property
    def held_stage(self) -> int | None:
        """The stage in this worker's memory, whoever sits where by now; None: there is none."""
        return self._state.stage if self._state is not None else None

    @property
    def held_blocks(self) -> Span | None:
        """As `held_stage`, by its blocks."""
        return self._state.blocks if self._state is not None else None

    @property
    def residual_size(self) -> int:
        """Elements of this stage's residual; 0: the exchange keeps nothing back, or no stage is held."""
        return self._state.flat.n if self._state is not None and self._feedback is not None else 0

    def take_residual(self, settle: Callable[[], RoundOutcome | None]) -> npt.NDArray[np.float32] | None:
        """As `GridOptimizer.surrender`, of the stage that this worker holds."""
        held = self._state
        return self._in_flight.take_residual(held.exchanger, settle) if held is not None else None

    def add_residual(self, entries: SparseVector, world_size: int) -> bool:
        """As `GridOptimizer.absorb`: what a replica of this stage had not sent."""
        return add_residual(self._feedback, entries, world_size)

    def clear_residual(self) -> None:
        """What was not sent belongs to another life of this worker."""
        self._in_flight.clear()
        if self._feedback is not None:
            self._feedback.clear()

    @property
    def _feedback(self) -> ErrorFeedback | None:
        return self._state.exchanger.feedback if self._state is not None else None

    def _discard_residual(self) -> None:
        """This worker gets another state: nobody can send any more what it has not sent of this one."""
        feedback = self._feedback
        aside, self._is_set_aside = self._is_set_aside, False
        mass = float(feedback.residual_N.abs().sum(dtype=torch.float64)) if feedback is not None else 0.0
        if mass and not aside and self._state is not None:
            self._lost_mass += mass
            self._session.report_figures({"lost_mass": self._lost_mass})
            log.warning("residual of stage %d, mass %.3g: lost with the seat", self._state.stage, mass)
