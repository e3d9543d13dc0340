"""The exchangers: turn gradients into buffers, or skip the step if they are not finite; results into updates.

Committed state changes only in `commit`, so an aborted attempt need not be undone.

    gradient_N   [ bucket 0 | bucket 1 | ... ]      a single bucket without `Overlap`
                       | prepare_bucket (weighted by `StepPlan.weight`)
                 ExchangePart ...  --join_parts--> ExchangePart --session.run--> commit --> update
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gridtrain.config import Auto, Dense, Exchange, GTopK, LocalSteps, TopK, round_exchange
from gridtrain.core.planning.exchange_facts import direct_marker
from gridtrain.core.planning.workload import NEIGHBOURS, NeighboursOf
from gridtrain.network.wire.sparse_payload import SparseVector, encode_with_decoded
from gridtrain.network.wire.value_encoding import VALUE_KINDS, ValueKind
from gridtrain.runtime.buffers.buckets import Bounds, BucketBuffer, BucketedBuffer, UpdateBuffer
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer, DenseRingBuffer
from gridtrain.runtime.buffers.rounded_buffers import largest_contribution, make_dense_buffer
from gridtrain.runtime.buffers.star_buffers import SPARSE_BUFFERS
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.sparsify.error_feedback import ErrorFeedback, PreparedState
from gridtrain.sparsify.merge import largest_summable


def neighbours_of(exchange: Exchange | LocalSteps | Auto) -> NeighboursOf:
    """Return the neighbours in `exchange`, as a function of rank and world size."""
    return NEIGHBOURS[topology_of(round_exchange(exchange))]


def topology_of(exchange: Exchange | Auto, chosen: str = "") -> str:
    """Return the topology of an exchange in a step.

    Args:
        chosen: the coordinator's choice (`StepPlan.exchange`), which applies if the topology is "auto".
    """
    if exchange.topology != "auto":
        return exchange.topology
    if chosen == direct_marker(exchange):
        return "direct"
    return "butterfly" if isinstance(exchange, GTopK) else "ring"


@dataclass(frozen=True, slots=True)
class ExchangePart:
    """One worker's part in an exchange; if an attempt is aborted, the next may continue with the same part.

    Attributes:
        buffer: the collective buffer of the whole vector or of one bucket.
        skip: whether some values cannot be sent (they are not finite or too large); if so, the group
            skips the step.
        prepared: the change that a sparse exchange commits to its residual.
        sent_residual_B: the residual that a dense exchange sends with the gradient; None if there is none.
        parts: the parts of the buckets, if `buffer` is a `BucketedBuffer`.
    """

    buffer: UpdateBuffer
    skip: bool
    prepared: PreparedState | None = None
    sent_residual_B: Tensor | None = None
    parts: tuple[ExchangePart, ...] = ()

    @property
    def buckets(self) -> tuple[ExchangePart, ...]:
        return self.parts or (self,)


class Exchanger(ABC):
    """One worker's side of an exchange.

    Attributes:
        bounds: the buckets' bounds (0, ..., n) in the flat gradient.
        feedback: the error feedback; None if there is currently no residual.
        keeps_residual: whether the exchange keeps a residual, now or in a later step.
    """

    bounds: Bounds
    feedback: ErrorFeedback | None
    keeps_residual: bool

    def open_feedback(self) -> ErrorFeedback | None:
        """Return the error feedback, creating it if necessary; None if the exchange keeps no residual."""
        return self.feedback

    def clear_residual(self) -> None:
        """Set the residual to zero."""
        if self.feedback is not None:
            self.feedback.clear()

    @abstractmethod
    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangePart:
        """Prepare this worker's part in one bucket, in any order of buckets, and again after an abort.

        Args:
            gradient_B: the mean gradient of this worker's samples; ignored if the worker has no samples.
            usable: False if the gradient is known not to be finite; this worker then votes to skip the step.
        """

    @abstractmethod
    def make_empty_buffer(self, plan: StepPlan) -> UpdateBuffer | None:
        """Return the buffer of a worker that contributes nothing.

        Reads no state that `prepare_bucket` or `commit` changes, so another thread may call it.  Returns None
        if the exchange needs this worker's contribution.
        """

    @abstractmethod
    def commit(self, part: ExchangePart) -> npt.NDArray[np.float32] | SparseVector:
        """Commit `part`, whose round was committed and not skipped, and return the update."""


def make_exchanger(
    exchange: Exchange, bounds: Bounds, device: torch.device, feedback: ErrorFeedback | None = None
) -> DenseExchanger | SparseExchanger:
    """Return this worker's exchanger for `exchange` and a flat gradient on `device`.

    Args:
        bounds: the buckets' bounds (0, ..., n) in the flat gradient.
        feedback: the error feedback to share with another exchanger, which may have other bounds; by default
            a new one, if the exchange keeps a residual.
    """
    if isinstance(exchange, Dense):
        return DenseExchanger(exchange, bounds, feedback)
    return SparseExchanger(exchange, bounds, device, feedback)


def make_empty_buffer(exchange: Exchange, bounds: Bounds, plan: StepPlan) -> UpdateBuffer:
    """Return the buffer of a worker that contributes nothing to a step with `exchange`."""
    parts: list[BucketBuffer] = []
    for start, stop in pairwise(bounds):
        n = stop - start
        if isinstance(exchange, Dense):
            parts.append(_make_dense_buffer(exchange, np.zeros(n, np.float32), plan))
        else:
            none, kind = (np.empty(0, np.int64), np.empty(0, np.float32)), VALUE_KINDS[exchange.values]
            made = encode_with_decoded(*none, n=n, kind=kind)
            parts.append(_make_sparse_buffer(exchange, made.payload, made.sparse, n, plan))
    return join_buffers(bounds, parts)


def _make_dense_buffer(
    exchange: Dense, contribution_B: npt.NDArray[np.float32], plan: StepPlan
) -> DenseRingBuffer:
    topology, kind = topology_of(exchange, plan.exchange), VALUE_KINDS[exchange.values]
    return make_dense_buffer(topology, contribution_B, plan.world_size, kind)


def _make_sparse_buffer(
    exchange: TopK | GTopK, payload: bytes, decoded: SparseVector, n: int, plan: StepPlan
) -> AllGatherBuffer | ButterflyBuffer:
    k, kind = exchange.k_at(plan.step, n), VALUE_KINDS[exchange.values]
    topology = topology_of(exchange, plan.exchange)
    if topology == "all-gather":
        return AllGatherBuffer(plan.rank, plan.world_size, payload, n=n, k=k, kind=kind, decoded=decoded)
    return SPARSE_BUFFERS[topology](payload, n=n, k=k, kind=kind, decoded=decoded)


def join_parts(bounds: Bounds, parts: Sequence[ExchangePart]) -> ExchangePart:
    """Join the parts of all buckets, given in order, into one."""
    if len(parts) == 1:
        return parts[0]
    whole = join_buffers(bounds, [cast(BucketBuffer, part.buffer) for part in parts])
    return ExchangePart(whole, any(part.skip for part in parts), parts=tuple(parts))


def join_buffers(bounds: Bounds, parts: Sequence[BucketBuffer]) -> UpdateBuffer:
    """Join the buffers of all buckets, given in order, into one buffer."""
    return parts[0] if len(parts) == 1 else BucketedBuffer(bounds, parts)


class DenseExchanger(Exchanger):
    """`Dense`: sends the whole gradient, and the residual if there is one.

    With values other than fp32, it keeps the rounding errors as a residual on the CPU.

    Attributes:
        feedback: the error feedback; its residual is sent with the next gradient.
    """

    def __init__(self, exchange: Dense, bounds: Bounds, feedback: ErrorFeedback | None = None) -> None:
        self.bounds = bounds
        self._exchange, self._kind = exchange, VALUE_KINDS[exchange.values]
        self.keeps_residual = self._kind is not ValueKind.FP32
        if feedback is None and self.keeps_residual:
            feedback = ErrorFeedback(bounds[-1], "cpu")
        self.feedback = feedback

    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangePart:
        # The collective sums in place, so the buffer gets an array that nothing else uses.
        contribution_B = gradient_B * plan.weight if plan.samples else torch.zeros_like(gradient_B)
        sent_B: Tensor | None = None
        if self.feedback is not None:
            start, stop = self.bounds[bucket : bucket + 2]
            sent_B = self.feedback.residual_N[start:stop].to("cpu", copy=True)
            contribution_B = contribution_B.cpu().add_(sent_B)
        limit = largest_contribution(plan.world_size, self._kind)
        usable = usable and largest_magnitude(contribution_B) <= limit
        buffer = _make_dense_buffer(self._exchange, contribution_B.cpu().numpy(), plan)
        return ExchangePart(buffer, not usable, sent_residual_B=sent_B)

    def make_empty_buffer(self, plan: StepPlan) -> UpdateBuffer:
        return make_empty_buffer(self._exchange, self.bounds, plan)

    def commit(self, part: ExchangePart) -> npt.NDArray[np.float32]:
        rests = [
            (bucket.sent_residual_B, bucket.buffer.rest_N)
            for bucket in part.buckets
            if bucket.sent_residual_B is not None
        ]
        if self.feedback is not None and rests:
            self.feedback.commit_rests(rests)
        return cast(npt.NDArray[np.float32], part.buffer.update)


class SparseExchanger(Exchanger):
    """`TopK` and `GTopK`: both use the same selection and error feedback, but different collective
    buffers."""

    feedback: ErrorFeedback
    keeps_residual = True

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
        self.feedback = feedback or ErrorFeedback(
            bounds[-1], device, exchange.momentum, exchange.chunk, exchange.residual_decay
        )

    def prepare_bucket(
        self, bucket: int, gradient_B: Tensor, plan: StepPlan, *, usable: bool
    ) -> ExchangePart:
        start, n, kind = self.bounds[bucket], gradient_B.numel(), self._kind
        if usable:
            limit, weight = largest_summable(plan.world_size), plan.weight if plan.samples else 0.0
            own_k = self._exchange.k_at(plan.step, n, plan.entries_share)
            prepared = self.feedback.prepare(gradient_B, own_k, kind, limit, weight=weight, start=start)
        else:
            prepared = self.feedback.prepare_skip(kind, start=start, n=n)
        buffer = _make_sparse_buffer(self._exchange, prepared.payload, prepared.decoded, n, plan)
        return ExchangePart(buffer, prepared.skip, prepared)

    def make_empty_buffer(self, plan: StepPlan) -> UpdateBuffer:
        return make_empty_buffer(self._exchange, self.bounds, plan)

    def commit(self, part: ExchangePart) -> SparseVector:
        self.feedback.commit_parts(
            [(cast(PreparedState, bucket.prepared), bucket.buffer.truncated) for bucket in part.buckets]
        )
        return cast(SparseVector, part.buffer.update)


def largest_magnitude(values_N: Tensor) -> float:
    """Return the largest absolute value, or NaN if any value is NaN; NaN fails every comparison with a
    bound."""
    low, high = torch.aminmax(values_N)
    return float(torch.maximum(-low, high))
