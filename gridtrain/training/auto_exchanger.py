"""The worker's side of `exchange="auto"`: whatever exchange the plan of a step names.

Decides how what one exchange has kept back goes on under the next one, so that no gradient is lost (promise
2).  Which exchange it is, is the coordinator's choice (`protocol.exchanging`).

    plan.exchange   Dense()     GTopK(..)   TopK(..)      Dense()
    residual          none    --> r1 -----> r2 ---------> taken along by the first dense step --> none

A dense step that takes a residual along: contribution' = contribution + residual, and residual = 0 once it is
committed.  So sum of residuals after (0) + update = sum of residuals before + contributions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.config import Auto, Dense, Exchange
from gridtrain.core.planning.exchange_facts import DIRECT_DENSE
from gridtrain.errors import LocalProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import Bounds
from gridtrain.runtime.step_plan import StepPlan
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.training.exchangers import DenseExchanger, ExchangeAttempt, Exchanger, SparseExchanger


class AutoExchanger:
    """See the module's text.  One bucket: the whole gradient."""

    def __init__(self, auto: Auto, bounds: Bounds, device: torch.device) -> None:
        assert len(bounds) == 2
        self.bounds: Bounds = bounds
        self._device = device
        self._choices = {exchange.describe(): exchange for exchange in auto.exchanges(bounds[-1])}
        self._choices[DIRECT_DENSE] = Dense(topology="direct")  # the other road of `Dense()`
        self._name = ""
        self._current: Exchanger | None = None
        self._feedback: ErrorFeedback | None = None
        self._taken_N: Tensor | None = None  # what of the residual the dense step under way takes along

    @property
    def feedback(self) -> ErrorFeedback | None:
        return self._feedback

    @property
    def choices(self) -> dict[str, Exchange]:
        return dict(self._choices)

    @property
    def current_exchange(self) -> Exchange | None:
        """What the latest step used; None: there was none."""
        return self._choices.get(self._name)

    def open_feedback(self) -> ErrorFeedback:
        """For what another worker, or a checkpoint, has kept."""
        if self._feedback is None:
            self._feedback = ErrorFeedback(self.bounds[-1], self._device)
        return self._feedback

    def clear(self) -> None:
        """What was kept belongs to another life of this worker."""
        self._feedback = self._taken_N = None

    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangeAttempt:
        """See `Exchanger`.  Raises `LocalProtocolError` where nothing is chosen, or something else."""
        current = self._switch_to(plan.exchange)
        self._taken_N = None
        if isinstance(current, SparseExchanger) or self._feedback is None or not usable:
            return current.prepare_bucket(bucket, gradient_B, plan, usable=usable)
        taken_N = self._feedback.residual_N.clone()
        weighted_N = gradient_B * plan.weight if plan.samples else torch.zeros_like(gradient_B)
        assert isinstance(current, DenseExchanger)
        attempt = current.prepare_contribution(weighted_N.add_(taken_N), plan, usable=usable)
        self._taken_N = taken_N
        return attempt

    def commit(self, attempt: ExchangeAttempt) -> npt.NDArray[np.float32] | SparseVector:
        assert self._current is not None
        update = self._current.commit(attempt)
        taken_N, self._taken_N = self._taken_N, None
        if taken_N is not None and self._feedback is not None:
            # Another worker's may have come in between: it stays.
            left_N = torch.where(
                self._feedback.residual_N == taken_N,
                torch.zeros_like(taken_N),
                self._feedback.residual_N - taken_N,
            )
            if bool(left_N.any()):
                self._feedback.load({"residual": left_N})
            else:
                self._feedback = None
        return update

    def _switch_to(self, name: str) -> Exchanger:
        if self._current is not None and name == self._name:
            if isinstance(self._current, SparseExchanger):
                self._current.feedback = self.open_feedback()
            return self._current
        exchange = self._choices.get(name)
        if exchange is None:
            raise LocalProtocolError(f"a step began with the exchange {name!r}, which is none to choose")
        if isinstance(exchange, Dense):
            self._current = DenseExchanger(exchange, self.bounds)
        else:
            self._current = SparseExchanger(exchange, self.bounds, self._device, self.open_feedback())
        self._name = name
        return self._current
