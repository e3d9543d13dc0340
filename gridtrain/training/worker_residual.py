"""A worker's residual: replaced at a commit, kept after an abort, taken on leaving, lost with its state.

The same object serves a whole model and a stage of a pipeline.

    mark_sent(part) -----> the round is committed      --> commit       stores the part's new residual
                           it is aborted or skipped    --> mark_ended   leaves the residual unchanged
                           its outcome is unknown      --> mark_ended, and drop when the group's state arrives
          |
          +-- if training is interrupted here, `take` waits for the end of the round before it returns the
              residual; after an interrupted `commit`, there is no residual until `clear` or a later commit
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.mailbox.step_plan import RoundOutcome
from gridtrain.sparsify.merge import TruncatedEntries, largest_summable
from gridtrain.training.exchangers import ExchangePart, Exchanger

log = logging.getLogger("gridtrain")

REPLACED = "the group's state replaces this worker's state"


class WorkerResidual:
    """The residual that `exchanger` keeps.  Use it on the training thread.

    Args:
        n: the number of elements in the flat gradient.
        increase_figure: a function that adds to a figure, by name: to decayed_mass the magnitudes that decay
            has dropped, to lost_mass those that `drop` reports.
    """

    def __init__(self, exchanger: Exchanger, n: int, increase_figure: Callable[[str, float], None]) -> None:
        self._exchanger, self._n, self._increase_figure = exchanger, n, increase_figure
        self._part: ExchangePart | None = None
        self._is_committing = False

    @property
    def size(self) -> int:
        """The number of elements in the residual; 0 if the exchange keeps none."""
        return self._n if self._exchanger.keeps_residual else 0

    @property
    def magnitude(self) -> float:
        """The sum of the residual's absolute values."""
        feedback = self._exchanger.feedback
        if feedback is None or not feedback.residual_N.any():  # of a newcomer: the sum takes memory
            return 0.0
        return float(feedback.residual_N.abs().sum(dtype=torch.float64))

    def mark_sent(self, part: ExchangePart) -> None:
        """Record that `part` is about to be sent.  From now on, its round can be committed even if this
        worker is interrupted."""
        self._part = part

    def mark_ended(self) -> None:
        """Record that the round has ended without an update: it was aborted or skipped, which leaves the
        residual unchanged, or its outcome is unknown.

        In the latter case the group's state replaces this worker's state, and `drop` must follow.
        """
        self._part = None

    def commit(self, part: ExchangePart) -> npt.NDArray[np.float32] | SparseVector:
        """Apply `part` to the residual and return the update.

        After an interrupt (Ctrl-C) during the commit, the residual is considered lost, and is not committed
        twice.
        """
        self._part, self._is_committing = None, True
        feedback = self._exchanger.feedback
        before = 0.0 if feedback is None else feedback.decayed_magnitude
        update = self._exchanger.commit(part)
        self._is_committing = False
        if feedback is not None:
            self._increase_figure("decayed_mass", feedback.decayed_magnitude - before)
        return update

    def take(self, resolve: Callable[[], RoundOutcome | None]) -> npt.NDArray[np.float32] | None:
        """Return the residual after this worker's last round, (n,) float32.  Call this method when the worker
        leaves or pauses.

        Returns None if the exchange keeps no residual, if the outcome of that round is unknown, or if a
        commit was interrupted.

        Args:
            resolve: a function that waits for the outcome of the interrupted round; it returns None if the
                outcome is unknown.
        """
        before = self._exchanger.feedback
        if before is None:  # with exchange="auto" a sparse exchange may be chosen later
            return np.zeros(self.size, np.float32) if self.size else None
        if self._part is not None:
            outcome = resolve()
            if outcome is None or outcome.is_unknown:
                return None
            if outcome.is_committed and not outcome.is_skipped:
                self.commit(self._part)
            self._part = None
        if self._is_committing:
            return None
        if self._exchanger.feedback is None:  # the round was a dense step, which has sent all of it
            return np.zeros(before.residual_N.numel(), np.float32)
        return self._exchanger.feedback.residual_N.cpu().numpy().copy()

    def add(self, entries: SparseVector, world_size: int) -> bool:
        """Add another worker's residual, between two rounds.  Return False, and add nothing, if the exchange
        keeps no residual or the sum would be too large to send."""
        feedback = self._exchanger.open_feedback()
        limit = largest_summable(world_size)
        return feedback is not None and feedback.add_residual(entries.indices, entries.values, limit)

    def add_truncated(
        self, truncated: Sequence[TruncatedEntries], rest_N: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Add to the residual what remains with this worker after a committed round in which its contribution
        was empty.

        Args:
            truncated: the entries that this worker's merges left out.
            rest_N: this worker's rounding errors, (n,) float32; None if nothing was rounded.
        """
        feedback = self._exchanger.open_feedback() if truncated or rest_N is not None else None
        if feedback is not None:
            feedback.add_truncated(truncated, rest_N)

    def clear(self) -> None:
        """Set the residual to zero and discard the part in flight."""
        self._part, self._is_committing = None, False
        self._exchanger.clear_residual()

    def drop(self, why: str) -> None:
        """Clear the residual and report it as lost, because the state to which it belongs is gone or unknown.

        Its magnitude is an upper bound on the loss: the group may have received a part of the residual since,
        for example since a checkpoint, or may compute its gradients again.

        Args:
            why: the cause, as a clause.
        """
        if magnitude := self.magnitude:
            self._increase_figure("lost_mass", magnitude)
            log.warning("the residual, of magnitude %.3g, is lost, because %s", magnitude, why)
        self.clear()

    def state(self) -> dict[str, Tensor]:
        """Return the residual for a checkpoint; empty if there is none."""
        feedback = self._exchanger.feedback
        return {} if feedback is None else feedback.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a result of the method `state`; do nothing if the exchange keeps no residual.

        Raises:
            ConfigError: `state` belongs to another model or exchange.
        """
        feedback = self._exchanger.open_feedback()
        if feedback is not None:
            feedback.load(state)
