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
from gridtrain.core.planning.exchange_facts import DIRECT_DENSE
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.network.wire.value_encoding import VALUE_KINDS
from gridtrain.runtime.buffers.buckets import Bounds, BucketBuffer, BucketedBuffer
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer, DenseRingBuffer
from gridtrain.runtime.buffers.star_buffers import SPARSE_BUFFERS, make_dense_buffer
from gridtrain.runtime.step_plan import StepPlan
from gridtrain.sparsify.error_feedback import ErrorFeedback, PreparedState
from gridtrain.sparsify.merge import TruncatedEntries, keep_freed_memory, largest_summable


@dataclass(frozen=True, slots=True)
class ExchangeAttempt:
    """What one worker brings into one attempt.

    Attributes:
        workspace: of the whole vector, or of one bucket.
        skip: its values cannot travel, nobody may apply.
        parts: of a `BucketedWorkspace`, each bucket's.
    """

    buffer: BucketBuffer | BucketedBuffer
    skip: bool
    prepared: PreparedState | None = None
    parts: tuple[ExchangeAttempt, ...] = ()

    @property
    def buckets(self) -> tuple[ExchangeAttempt, ...]:
        return self.parts or (self,)

    @property
    def is_resumable(self) -> bool:
        """A retry goes on from what has arrived in it, so it must be the same one."""
        first = self.buckets[0].buffer
        return isinstance(first, DenseRingBuffer) and first.is_resumable


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

    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangeAttempt:
        """May be called again after an abort, for one bucket in any order.

        Args:
            gradient_B: mean gradient over this worker's samples, of the bucket's elements; any, without.
            usable: False: it is known to be of no use, and this worker skips the step.
        """
        ...

    def commit(self, attempt: ExchangeAttempt) -> npt.NDArray[np.float32] | SparseVector:
        """The update of a committed round that nobody skipped."""
        ...


def make_exchanger(
    exchange: Exchange, bounds: Bounds, device: torch.device, feedback: ErrorFeedback | None = None
) -> Exchanger:
    """The worker's side of `exchange` for a flat gradient on `device`, cut at `bounds` (0, ..., n).

    `feedback`: of another one, cut elsewhere, that takes turns with this one.
    """
    if isinstance(exchange, Dense):
        return DenseExchanger(exchange, bounds)
    return SparseExchanger(exchange, bounds, device, feedback)


def join_attempts(bounds: Bounds, attempts: Sequence[ExchangeAttempt]) -> ExchangeAttempt:
    """One attempt out of all buckets' attempts, in order."""
    if len(attempts) == 1:
        return attempts[0]
    workspaces = [cast(BucketBuffer, attempt.buffer) for attempt in attempts]
    whole = BucketedBuffer(bounds, workspaces)
    return ExchangeAttempt(whole, any(attempt.skip for attempt in attempts), parts=tuple(attempts))


class DenseExchanger:
    feedback: ErrorFeedback | None = None

    def __init__(self, exchange: Dense, bounds: Bounds) -> None:
        self.bounds = bounds
        self._topology = exchange.topology

    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangeAttempt:
        # Sums are made in place: the workspace gets an array that is nobody else's.
        contribution_B = gradient_B * plan.weight if plan.samples else torch.zeros_like(gradient_B)
        return self.prepare_contribution(contribution_B, plan, usable=usable)

    def prepare_contribution(
        self, contribution_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangeAttempt:
        """As `prepare_bucket`, of what is weighted already and may be changed."""
        usable = usable and largest_magnitude(contribution_B) <= largest_summable(plan.world_size)
        topology = self._topology
        if topology == "auto":  # see `protocol.roads`; empty: round a ring
            topology = "direct" if plan.exchange == DIRECT_DENSE else "ring"
        workspace = make_dense_buffer(topology, contribution_B.cpu().numpy(), plan.world_size)
        return ExchangeAttempt(workspace, not usable)

    def commit(self, attempt: ExchangeAttempt) -> npt.NDArray[np.float32]:
        workspace = attempt.buffer
        assert not isinstance(workspace, AllGatherBuffer | ButterflyBuffer)
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
        self._kind = VALUE_KINDS[exchange.values]
        self.feedback = feedback or ErrorFeedback(bounds[-1], device, exchange.momentum)
        keep_freed_memory()

    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangeAttempt:
        start, n, kind = self.bounds[bucket], gradient_B.numel(), self._kind
        k = self._exchange.k_at(plan.step, n)
        if usable:
            limit, weight = largest_summable(plan.world_size), plan.weight if plan.samples else 0.0
            prepared = self.feedback.prepare(gradient_B, k, kind, limit, weight=weight, start=start)
        else:
            prepared = self.feedback.prepare_skip(kind, start=start, n=n)
        mine, decoded = prepared.payload, prepared.decoded
        workspace: AllGatherBuffer | ButterflyBuffer
        if isinstance(self._exchange, TopK):
            here = plan.rank, plan.world_size
            workspace = AllGatherBuffer(*here, mine, n=n, k=k, kind=kind, decoded=decoded)
        else:
            made = SPARSE_BUFFERS[self._exchange.topology]
            workspace = made(mine, n=n, k=k, kind=kind, decoded=decoded)
        return ExchangeAttempt(workspace, prepared.skip, prepared)

    def commit(self, attempt: ExchangeAttempt) -> SparseVector:
        self.feedback.commit_parts(
            [(cast(PreparedState, part.prepared), _truncated(part)) for part in attempt.buckets]
        )
        return cast(AllGatherBuffer | ButterflyBuffer | BucketedBuffer, attempt.buffer).update


def _truncated(attempt: ExchangeAttempt) -> list[TruncatedEntries]:
    return attempt.buffer.truncated if isinstance(attempt.buffer, ButterflyBuffer) else []


def largest_magnitude(values_N: Tensor) -> float:
    """NaN if there is one; infinite or NaN compares as too large for any bound."""
    low, high = torch.aminmax(values_N)
    return float(torch.maximum(-low, high))
