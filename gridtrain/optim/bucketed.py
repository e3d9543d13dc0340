"""An exchange bucket by bucket: each has a selection, a residual and a workspace of its own.

Decides nothing that `exchange` does not decide; it hands each bucket its part of the vector.

    contribution_N   [ bucket 0 | bucket 1 | bucket 2 ]     k of each in proportion to its length
    residual         [ bucket 0 | bucket 1 | bucket 2 ]     one vector for everybody who asks from outside
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.config import Exchange
from gridtrain.errors import ConfigError
from gridtrain.optim.exchange import Attempt, exchanger
from gridtrain.runtime.buckets import Bounds, BucketedWorkspace
from gridtrain.runtime.plan import StepPlan
from gridtrain.sparsify.feedback import ErrorFeedback
from gridtrain.wire.sparse import Sparse


class BucketedExchanger:
    """Implements `exchange.Exchanger` over buckets, and one bucket alone.

    Args:
        bounds: of the buckets in the flat gradient.
        device: where selection happens.
    """

    def __init__(self, exchange: Exchange, bounds: Bounds, device: torch.device) -> None:
        self.bounds = bounds
        self._parts = [exchanger(exchange, stop - start, device) for start, stop in pairwise(bounds)]
        feedbacks = [part.feedback for part in self._parts]
        self.feedback = (
            None if feedbacks[0] is None else BucketedFeedback(bounds, cast(list[ErrorFeedback], feedbacks))
        )

    def prepare_bucket(self, bucket: int, contribution_B: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        """As `prepare`, for the elements bounds[bucket] .. bounds[bucket + 1] alone."""
        return self._parts[bucket].prepare(contribution_B, plan, usable=usable)

    def prepare(self, contribution_N: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        parts = enumerate(pairwise(self.bounds))
        return self.assemble(
            [self.prepare_bucket(i, contribution_N[a:b], plan, usable=usable) for i, (a, b) in parts]
        )

    def assemble(self, attempts: Sequence[Attempt]) -> Attempt:
        """One attempt of all buckets' attempts, in order."""
        workspaces = [attempt.workspace for attempt in attempts]
        assert not any(isinstance(workspace, BucketedWorkspace) for workspace in workspaces)
        whole = BucketedWorkspace(self.bounds, workspaces)  # type: ignore[arg-type]
        return Attempt(whole, any(attempt.skip for attempt in attempts), parts=tuple(attempts))

    def commit(self, attempt: Attempt) -> npt.NDArray[np.float32] | Sparse:
        for part, of_part in zip(self._parts, attempt.parts, strict=True):
            part.commit(of_part)
        whole = cast(BucketedWorkspace, attempt.workspace)
        return whole.update if whole.is_sparse else whole.update_N


class BucketedFeedback:
    """The buckets' error feedbacks as one: implements `exchange.Feedback`."""

    def __init__(self, bounds: Bounds, parts: Sequence[ErrorFeedback]) -> None:
        self._bounds, self._parts = bounds, parts

    @property
    def residual_N(self) -> Tensor:
        return torch.cat([part.residual_N for part in self._parts])

    def absorb(
        self, indices_K: npt.NDArray[np.int64], values_K: npt.NDArray[np.float32], limit: float
    ) -> bool:
        whole_N = self.residual_N
        where = torch.from_numpy(indices_K).to(whole_N.device, torch.int64)
        summed_K = whole_N[where] + torch.from_numpy(values_K).to(whole_N.device)
        if not bool((summed_K.abs() <= limit).all()):
            return False
        cuts = np.searchsorted(indices_K, self._bounds)
        for part, start, (a, b) in zip(self._parts, self._bounds, pairwise(cuts), strict=False):
            part.absorb(indices_K[a:b] - start, values_K[a:b], limit)
        return True

    def state(self) -> dict[str, Tensor]:
        states = [part.state() for part in self._parts]
        return {name: torch.cat([state[name] for state in states]) for name in states[0]}

    def load(self, state: Mapping[str, Tensor]) -> None:
        n = self._bounds[-1]
        lengths = {name: tensor.numel() for name, tensor in state.items()}
        if any(length != n for length in lengths.values()):
            raise ConfigError(
                f"residual state of lengths {lengths} for a model of {n} elements",
                remedy="load the residual that was saved with this model and exchange",
            )
        for part, (start, stop) in zip(self._parts, pairwise(self._bounds), strict=True):
            part.load({name: tensor[start:stop] for name, tensor in state.items()})
