"""A worker's residual: the gradient that it has not sent yet, and the attempt that is about to change it.

The same object serves a whole model and a stage of a pipeline.

    mark_sent(attempt) --> the round is committed  --> commit       the residual is what the attempt leaves
                           it is aborted, skipped  --> mark_ended   the residual is as before
          |
          +-- training is interrupted here: `take` waits for the end of the round before it gives the
              residual away; after an interrupted `commit` there is nothing to give until `clear` or a
              later commit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.step_plan import RoundOutcome
from gridtrain.sparsify.merge import largest_summable
from gridtrain.training.exchangers import ExchangeAttempt, Exchanger


class WorkerResidual:
    """The residual that `exchanger` keeps, used from the training thread.

    Args:
        n: elements of the flat gradient.
    """

    def __init__(self, exchanger: Exchanger, n: int) -> None:
        self._exchanger, self._n = exchanger, n
        self._attempt: ExchangeAttempt | None = None
        self._is_committing = False

    @property
    def size(self) -> int:
        """Elements of the residual; 0 if the exchange keeps none."""
        return self._n if self._exchanger.keeps_residual else 0

    @property
    def magnitude(self) -> float:
        """Sum of the absolute values."""
        feedback = self._exchanger.feedback
        return 0.0 if feedback is None else float(feedback.residual_N.abs().sum(dtype=torch.float64))

    def mark_sent(self, attempt: ExchangeAttempt) -> None:
        """From now on the other workers may commit `attempt`."""
        self._attempt = attempt

    def mark_ended(self) -> None:
        """The round was aborted or skipped: the residual is unchanged."""
        self._attempt = None

    def commit(self, attempt: ExchangeAttempt) -> npt.NDArray[np.float32] | SparseVector:
        """Apply `attempt` to the residual and return the update.

        After an interrupt (Ctrl-C) in the middle, the residual counts as lost: it is not committed twice.
        """
        self._attempt, self._is_committing = None, True
        update = self._exchanger.commit(attempt)
        self._is_committing = False
        return update

    def take(self, resolve: Callable[[], RoundOutcome | None]) -> npt.NDArray[np.float32] | None:
        """(n,): the residual after this worker's last round, for a worker that takes no further step.

        None if there is none, if the outcome of that round is unknown, or if a commit was interrupted.

        Args:
            resolve: waits for the outcome of the interrupted round; None if it is unknown.
        """
        before = self._exchanger.feedback
        if before is None:  # with exchange="auto" a sparse exchange may be chosen later
            return np.zeros(self.size, np.float32) if self.size else None
        if self._attempt is not None:
            outcome = resolve()
            if outcome is None:
                return None
            if outcome.is_committed and not outcome.is_skipped:
                self.commit(self._attempt)
            self._attempt = None
        if self._is_committing:
            return None
        if self._exchanger.feedback is None:  # the round was a dense step, which has sent all of it
            return np.zeros(before.residual_N.numel(), np.float32)
        return self._exchanger.feedback.residual_N.cpu().numpy().copy()

    def add(self, entries: SparseVector, world_size: int) -> bool:
        """Add another worker's residual, between two rounds.  Returns False, and adds nothing, if the
        exchange keeps no residual or the sum would be too large to send."""
        feedback = self._exchanger.open_feedback()
        limit = largest_summable(world_size)
        return feedback is not None and feedback.add_residual(entries.indices, entries.values, limit)

    def clear(self) -> None:
        """Set the residual to zero and forget the attempt in flight."""
        self._attempt, self._is_committing = None, False
        self._exchanger.clear_residual()

    def state(self) -> dict[str, Tensor]:
        """The residual for a checkpoint; empty if there is none."""
        feedback = self._exchanger.feedback
        return {} if feedback is None else feedback.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, if the exchange keeps a residual.

        Raises:
            ConfigError: `state` is of another model or exchange.
        """
        feedback = self._exchanger.open_feedback()
        if feedback is not None:
            feedback.load(state)
