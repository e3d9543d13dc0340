"""From a gradient to a workspace, and from a sealed workspace to an update: one class for each family.

Decides which numbers a worker brings into a round.  Never changes committed state before `commit`, so that an
aborted attempt needs no undoing.

    gradient_N   [ bucket 0 | bucket 1 | ... ]      one bucket, but for `Overlap`
                       | prepare_bucket (times n_i / N)
                 Attempt   Attempt     ...  --assemble--> Attempt --session.run--> commit --> update
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.config import Dense, Exchange, GTopK, TopK
from gridtrain.protocol.roads import DIRECT
from gridtrain.runtime.buckets import Bounds, BucketedWorkspace, BucketWorkspace
from gridtrain.runtime.buffers import ButterflyWorkspace, DenseWorkspace, GatherWorkspace
from gridtrain.runtime.plan import StepPlan
from gridtrain.runtime.stars import SPARSE_WORKSPACES, dense_workspace
from gridtrain.sparsify.feedback import ErrorFeedback, Prepared
from gridtrain.sparsify.merge import Kept, keep_freed_memory, largest_summable
from gridtrain.wire.sparse import Sparse
from gridtrain.wire.values import BY_NAME


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one worker brings into one attempt.

    Attributes:
        workspace: of the whole vector, or of one bucket.
        skip: its values cannot travel, nobody may apply.
        parts: of a `BucketedWorkspace`, each bucket's.
    """

    workspace: BucketWorkspace | BucketedWorkspace
    skip: bool
    prepared: Prepared | None = None
    parts: tuple[Attempt, ...] = ()

    @property
    def buckets(self) -> tuple[Attempt, ...]:
        return self.parts or (self,)

    @property
    def resumes(self) -> bool:
        """A retry goes on from what has arrived in it, so it must be the same one."""
        first = self.buckets[0].workspace
        return isinstance(first, DenseWorkspace) and first.resumes


class Exchanger(Protocol):
    """One worker's side of an exchange.

    Attributes:
        bounds: of the buckets in the flat gradient.
    """

    bounds: Bounds

    @property
    def feedback(self) -> ErrorFeedback | None:
        """None for an exchange that keeps nothing back."""
        ...

    def prepare_bucket(self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        """May be called again after an abort, for one bucket in any order.

        Args:
            gradient_B: mean gradient over this worker's samples, of the bucket's elements; any, without.
            usable: False: it is known to be of no use, and this worker skips the step.
        """
        ...

    def commit(self, attempt: Attempt) -> npt.NDArray[np.float32] | Sparse:
        """The update of a committed round that nobody skipped."""
        ...


def exchanger(
    exchange: Exchange, bounds: Bounds, device: torch.device, feedback: ErrorFeedback | None = None
) -> Exchanger:
    """The worker's side of `exchange` for a flat gradient on `device`, cut at `bounds` (0, ..., n).

    `feedback`: of another one, cut elsewhere, that takes turns with this one.
    """
    if isinstance(exchange, Dense):
        return DenseExchanger(exchange, bounds)
    return SparseExchanger(exchange, bounds, device, feedback)


def assemble(bounds: Bounds, attempts: Sequence[Attempt]) -> Attempt:
    """One attempt out of all buckets' attempts, in order."""
    if len(attempts) == 1:
        return attempts[0]
    workspaces = [cast(BucketWorkspace, attempt.workspace) for attempt in attempts]
    whole = BucketedWorkspace(bounds, workspaces)
    return Attempt(whole, any(attempt.skip for attempt in attempts), parts=tuple(attempts))


class DenseExchanger:
    feedback: ErrorFeedback | None = None

    def __init__(self, exchange: Dense, bounds: Bounds) -> None:
        self.bounds = bounds
        self._topology = exchange.topology

    def prepare_bucket(self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        # Sums are made in place: the workspace gets an array that is nobody else's.
        contribution_B = gradient_B * plan.weight if plan.samples else torch.zeros_like(gradient_B)
        return self.contribute(contribution_B, plan, usable=usable)

    def contribute(self, contribution_B: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        """As `prepare_bucket`, of what is weighted already and may be changed."""
        usable = usable and largest_magnitude(contribution_B) <= largest_summable(plan.world_size)
        topology = self._topology
        if topology == "auto":  # see `protocol.roads`; empty: round a ring
            topology = "direct" if plan.exchange == DIRECT else "ring"
        workspace = dense_workspace(topology, contribution_B.cpu().numpy(), plan.world_size)
        return Attempt(workspace, not usable)

    def commit(self, attempt: Attempt) -> npt.NDArray[np.float32]:
        workspace = attempt.workspace
        assert not isinstance(workspace, GatherWorkspace | ButterflyWorkspace)
        return workspace.update_N


class SparseExchanger:
    """TopK and GTopK: selection and error feedback are the same, only the workspace differs."""

    def __init__(
        self,
        exchange: TopK | GTopK,
        bounds: Bounds,
        device: torch.device,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self.bounds = bounds
        self._exchange = exchange
        self._kind = BY_NAME[exchange.values]
        self.feedback = feedback or ErrorFeedback(bounds[-1], device, exchange.momentum)
        keep_freed_memory()

    def prepare_bucket(self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool) -> Attempt:
        start, n, kind = self.bounds[bucket], gradient_B.numel(), self._kind
        k = self._exchange.k_at(plan.step, n)
        if usable:
            limit, weight = largest_summable(plan.world_size), plan.weight if plan.samples else 0.0
            prepared = self.feedback.prepare(gradient_B, k, kind, limit, weight=weight, start=start)
        else:
            prepared = self.feedback.prepare_skip(kind, start=start, n=n)
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
        self.feedback.commit_parts([(cast(Prepared, part.prepared), _kept(part)) for part in attempt.buckets])
        return cast(GatherWorkspace | ButterflyWorkspace | BucketedWorkspace, attempt.workspace).update


def _kept(attempt: Attempt) -> list[Kept]:
    return attempt.workspace.kept if isinstance(attempt.workspace, ButterflyWorkspace) else []


def largest_magnitude(values_N: Tensor) -> float:
    """NaN if there is one; infinite or NaN compares as too large for any bound."""
    low, high = torch.aminmax(values_N)
    return float(torch.maximum(-low, high))
