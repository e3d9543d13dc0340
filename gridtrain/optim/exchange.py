"""From a contribution to a workspace, and from a sealed workspace to an update: one class for each family.

Decides which numbers a worker brings into a round.  Never changes committed state before `commit`, so that an
aborted attempt needs no undoing.

    contribution_N --prepare--> Attempt(workspace, skip) --session.run--> commit --> update, dense or sparse
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.config import Dense, Exchange, GTopK, TopK
from gridtrain.runtime.buckets import BucketedWorkspace
from gridtrain.runtime.buffers import ButterflyWorkspace, DenseWorkspace, GatherWorkspace
from gridtrain.runtime.plan import StepPlan
from gridtrain.sparsify.feedback import ErrorFeedback, Prepared
from gridtrain.sparsify.merge import largest_summable
from gridtrain.wire.sparse import Sparse, ValueKind

_KINDS = {"fp16": ValueKind.FP16, "fp32": ValueKind.FP32}


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one worker brings into one attempt.

    Attributes:
        skip: its values cannot travel, nobody may apply.
        parts: of a `BucketedWorkspace`, each bucket's.
    """

    workspace: DenseWorkspace | GatherWorkspace | ButterflyWorkspace | BucketedWorkspace
    skip: bool
    prepared: Prepared | None = None
    parts: tuple[Attempt, ...] = ()

    @property
    def resumes(self) -> bool:
        """A retry goes on from what has arrived in it, so it must be the same one."""
        workspace = self.workspace
        if isinstance(workspace, BucketedWorkspace):
            return not workspace.is_sparse
        return isinstance(workspace, DenseWorkspace)


class Feedback(Protocol):
    """What others ask of `sparsify.feedback.ErrorFeedback`, or of several: see there."""

    @property
    def residual_N(self) -> Tensor: ...

    def absorb(
        self, indices_K: npt.NDArray[np.int64], values_K: npt.NDArray[np.float32], limit: float
    ) -> bool: ...

    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...


class Exchanger(Protocol):
    """`feedback` is None for an exchange that keeps nothing back."""

    @property
    def feedback(self) -> Feedback | None: ...

    def prepare(self, contribution_N: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        """May be called again after an abort.  `usable`: no |contribution| is above `largest_summable`."""
        ...

    def commit(self, attempt: Attempt) -> npt.NDArray[np.float32] | Sparse:
        """The update of a committed round that nobody skipped."""
        ...


def exchanger(exchange: Exchange, n: int, device: torch.device) -> Exchanger:
    """The worker's side of `exchange` for a flat gradient of n elements on `device`."""
    return DenseExchanger() if isinstance(exchange, Dense) else SparseExchanger(exchange, n, device)


class DenseExchanger:
    feedback: ErrorFeedback | None = None

    def prepare(self, contribution_N: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        # The ring sums in place: the workspace gets a copy that is nobody else's.
        return Attempt(DenseWorkspace(contribution_N.cpu().numpy(), plan.world_size), not usable)

    def commit(self, attempt: Attempt) -> npt.NDArray[np.float32]:
        return cast(DenseWorkspace, attempt.workspace).update_N


class SparseExchanger:
    """TopK and GTopK: selection and error feedback are the same, only the workspace differs."""

    def __init__(self, exchange: TopK | GTopK, n: int, device: torch.device) -> None:
        self._exchange = exchange
        self._n = n
        self._kind = _KINDS[exchange.values]
        self.feedback = ErrorFeedback(n, device, exchange.momentum)

    def prepare(self, contribution_N: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        n, kind, k = self._n, self._kind, self._exchange.k_at(plan.step, self._n)
        if usable:
            limit = largest_summable(plan.world_size)
            prepared = self.feedback.prepare(contribution_N, k, kind, limit)
        else:
            prepared = self.feedback.prepare_skip(kind)
        workspace: GatherWorkspace | ButterflyWorkspace
        if isinstance(self._exchange, TopK):
            workspace = GatherWorkspace(plan.rank, plan.world_size, prepared.payload, n=n, k=k, kind=kind)
        else:
            workspace = ButterflyWorkspace(prepared.payload, n=n, k=k, kind=kind)
        return Attempt(workspace, prepared.skip, prepared)

    def commit(self, attempt: Attempt) -> Sparse:
        workspace = attempt.workspace
        kept = workspace.kept if isinstance(workspace, ButterflyWorkspace) else []
        self.feedback.commit(cast(Prepared, attempt.prepared), kept)
        return cast(GatherWorkspace | ButterflyWorkspace, workspace).update
