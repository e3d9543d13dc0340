"""The worker's side of `Auto(...)`: switches to the exchange that a step plan names, and keeps the residual.

The residual of one exchange is passed on to the next, so that no gradient is lost:

    plan.exchange   Dense()     GTopK(..)   TopK(..)      Dense()
    residual          none    --> r1 -----> r2 ---------> sent by the first dense step --> none

In a dense step that sends a residual, contribution' = contribution + residual, and residual = 0 once the step
is committed.  Summed over all workers, residuals after (0) + update = residuals before + contributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.config import Dense, Exchange
from gridtrain.core.planning.exchange_facts import as_direct
from gridtrain.errors import LocalProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import Bounds, UpdateBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.training.exchangers import (
    DenseExchanger,
    ExchangePart,
    Exchanger,
    make_empty_buffer,
    make_exchanger,
)


class AutoExchanger(Exchanger):
    """Switches between exchangers that share one error feedback.  Its only bucket is the whole gradient.

    Args:
        exchanges: the exchanges that the coordinator may choose (`Auto.exchanges`).

    Attributes:
        choices: these exchanges, and their variants with the direct topology, by description.
    """

    def __init__(self, exchanges: Sequence[Exchange], bounds: Bounds, device: torch.device) -> None:
        assert len(bounds) == 2
        self.bounds: Bounds = bounds
        self._device = device
        self.choices = {exchange.describe(): exchange for exchange in exchanges}
        direct = (as_direct(exchange) for exchange in exchanges)
        self.choices |= {exchange.describe(): exchange for exchange in direct if exchange is not None}
        self._name = ""
        self._current: Exchanger | None = None
        self.feedback = None
        self.keeps_residual = any(each.sparse for each in exchanges)

    @property
    def current_exchange(self) -> Exchange | None:
        """The exchange of the latest step; None before the first step."""
        return self.choices.get(self._name)

    def open_feedback(self) -> ErrorFeedback | None:
        if self.feedback is None and self.keeps_residual:
            self.feedback = ErrorFeedback(self.bounds[-1], self._device)
        return self.feedback

    def clear_residual(self) -> None:
        self.feedback = None

    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangePart:
        """Prepare a bucket as `Exchanger` describes; raise `LocalProtocolError` if the plan names an
        exchange that is not one of the choices."""
        current = self._switch_to(plan.exchange)
        return current.prepare_bucket(bucket, gradient_B, plan, usable=usable)

    def make_empty_buffer(self, plan: StepPlan) -> UpdateBuffer | None:
        exchange = self.choices.get(plan.exchange)
        return make_empty_buffer(exchange, self.bounds, plan) if exchange is not None else None

    def commit(self, part: ExchangePart) -> npt.NDArray[np.float32] | SparseVector:
        current = self._current
        assert current is not None
        update = current.commit(part)
        # Another worker's residual may have been added since a dense step began, and must be kept.
        left = current.feedback if isinstance(current, DenseExchanger) else None
        if left is not None and not bool(left.residual_N.any()):
            self.feedback = None
        return update

    def _switch_to(self, name: str) -> Exchanger:
        exchange = self.choices.get(name)
        if exchange is None:
            raise LocalProtocolError(
                f"a step began with the exchange {name!r}, which is not one of the choices"
            )
        feedback = self.feedback if isinstance(exchange, Dense) else self.open_feedback()
        if self._current is None or name != self._name:
            self._current = make_exchanger(exchange, self.bounds, self._device, feedback)
            self._name = name
        self._current.feedback = feedback
        return self._current
