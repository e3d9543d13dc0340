"""The attempt whose round has not ended here yet, and with it the residual of a worker that is cut off.

Decides whether a residual can be given away, and as which round has left it.  Never decides who gets it
(`protocol.handover`), and never knows whose exchanger it is: a whole model's or a stage's.

    sent(attempt) --> the round: committed --> commit         the exchanger's state is the new one
                                 otherwise --> ended          the exchanger's state is as before
          |                                       |
          +-- cut off here: surrender settles the round first, and then gives the residual away
                             cut off in `commit`: half applied, nothing can be given away until the
                             residual is `forgotten` and begins anew, or a later round is committed
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.step_plan import RoundOutcome
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.sparsify.merge import largest_summable
from gridtrain.training.exchangers import ExchangeAttempt, Exchanger


class PendingAttempt:
    """Of one worker; used from the thread that trains."""

    def __init__(self) -> None:
        self._attempt: ExchangeAttempt | None = None
        self._committing = False

    def mark_sent(self, attempt: ExchangeAttempt) -> None:
        """From now on the others may commit it."""
        self._attempt = attempt

    def mark_ended(self) -> None:
        """Its round was not committed, or it was skipped: it changes nothing."""
        self._attempt = None

    def clear(self) -> None:
        """The residual is no more, nor what the attempt under way, or half applied, would leave of it."""
        self._attempt, self._committing = None, False

    def commit(
        self, exchanger: Exchanger, attempt: ExchangeAttempt
    ) -> npt.NDArray[np.float32] | SparseVector:
        """The update.  Not to be begun twice, wherever Ctrl-C comes in between."""
        self._attempt, self._committing = None, True
        update = exchanger.commit(attempt)
        self._committing = False
        return update

    def take_residual(
        self, exchanger: Exchanger, settle: Callable[[], RoundOutcome | None]
    ) -> npt.NDArray[np.float32] | None:
        """(n,): the residual of a worker that takes no further step: as its last round, if any, has left it.

        None: there is none, or it cannot be told how that round ended, or it is half applied.

        Args:
            settle: waits for the end of the round in which the training was interrupted; None: not known.
        """
        before = exchanger.feedback
        if before is None:
            return None
        if self._attempt is not None:
            outcome = settle()
            if outcome is None:
                return None
            if outcome.is_committed and not outcome.is_skipped:
                self.commit(exchanger, self._attempt)
            self._attempt = None
        if self._committing:
            return None
        if exchanger.feedback is None:  # the round was a dense step's, which has taken all of it along
            return np.zeros(before.residual_N.numel(), np.float32)
        return exchanger.feedback.residual_N.cpu().numpy().copy()


def add_residual(feedback: ErrorFeedback | None, entries: SparseVector, world_size: int) -> bool:
    """Add what another worker had not sent, between two rounds; False: it cannot be, and is dropped."""
    limit = largest_summable(world_size)
    return feedback is not None and feedback.add_residual(entries.indices, entries.values, limit)
