"""From a contribution to a workspace, and from a sealed workspace to an update: one class for each family.

Decides which numbers a worker brings into a round.  Never changes committed state before `commit`, so that an
aborted attempt needs no undoing.

    contribution_N --prepare--> Attempt(workspace, skip) --session.run--> commit --> update, dense or sparse
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.config import Dense, Exchange, GTopK, TopK
from gridtrain.runtime.buffers import ButterflyWorkspace, DenseWorkspace, GatherWorkspace
from gridtrain.runtime.plan import StepPlan
from gridtrain.runtime.stars import SPARSE_WORKSPACES, DenseStarWorkspace, dense_workspace
from gridtrain.sparsify.feedback import ErrorFeedback, Prepared
from gridtrain.sparsify.merge import keep_freed_memory, largest_summable
from gridtrain.wire.sparse import Sparse
from gridtrain.wire.values import BY_NAME


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one worker brings into one attempt.  `skip`: its values cannot travel, nobody may apply."""

    workspace: DenseWorkspace | DenseStarWorkspace | GatherWorkspace | ButterflyWorkspace
    skip: bool
    prepared: Prepared | None = None


class Exchanger(Protocol):
    """`feedback` is None for an exchange that keeps nothing back."""

    @property
    def feedback(self) -> ErrorFeedback | None: ...

    def prepare(self, contribution_N: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        """May be called again after an abort.  `usable`: no |contribution| is above `largest_summable`."""
        ...

    def commit(self, attempt: Attempt) -> npt.NDArray[np.float32] | Sparse:
        """The update of a committed round that nobody skipped."""
        ...


def exchanger(exchange: Exchange, n: int, device: torch.device) -> Exchanger:
    """The worker's side of `exchange` for a flat gradient of n elements on `device`."""
    return DenseExchanger(exchange) if isinstance(exchange, Dense) else SparseExchanger(exchange, n, device)


class DenseExchanger:
    feedback: ErrorFeedback | None = None

    def __init__(self, exchange: Dense) -> None:
        self._topology = exchange.topology

    def prepare(self, contribution_N: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        # Sums are made in place: the workspace gets a copy that is nobody else's.
        own_N = contribution_N.cpu().numpy()
        return Attempt(dense_workspace(self._topology, own_N, plan.world_size), not usable)

    def commit(self, attempt: Attempt) -> npt.NDArray[np.float32]:
        return cast(DenseWorkspace | DenseStarWorkspace, attempt.workspace).update_N


class SparseExchanger:
    """TopK and GTopK: selection and error feedback are the same, only the workspace differs."""

    def __init__(self, exchange: TopK | GTopK, n: int, device: torch.device) -> None:
        self._exchange = exchange
        self._n = n
        self._kind = BY_NAME[exchange.values]
        self.feedback = ErrorFeedback(n, device, exchange.momentum)
        keep_freed_memory()

    def prepare(self, contribution_N: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        n, kind, k = self._n, self._kind, self._exchange.k_at(plan.step, self._n)
        if usable:
            limit = largest_summable(plan.world_size)
            prepared = self.feedback.prepare(contribution_N, k, kind, limit)
        else:
            prepared = self.feedback.prepare_skip(kind)
        mine, decoded = prepared.payload, prepared.decoded
        workspace: GatherWorkspace | ButterflyWorkspace
        if isinstance(self._exchange, TopK):
            here = plan.rank, plan.world_size
            workspace = GatherWorkspace(*here, mine, n=n, k=k, kind=kind, decoded=decoded)
        else:
            made = SPARSE_WORKSPACES[self._exchange.topology]
            workspace = made(mine, n=n, k=k, kind=kind, decoded=decoded)
        return Attempt(workspace, prepared.skip, prepared)

    def commit(self, attempt: Attempt) -> Sparse:
        workspace = attempt.workspace
        kept = workspace.kept if isinstance(workspace, ButterflyWorkspace) else []
        self.feedback.commit(cast(Prepared, attempt.prepared), kept)
        return cast(GatherWorkspace | ButterflyWorkspace, workspace).update
