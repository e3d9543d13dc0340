"""`Overlap`: sends buckets of the gradient during the backward pass, beginning with the last layers.

`overlap_trial` decides in which steps buckets are sent early.  `step` sends the buckets that could not be
sent early.

    backward     layer 4   layer 3   layer 2   layer 1  |  step
    ready            [ bucket 1 ]        [ bucket 0 ]   |
    network              [===== bucket 1 =====][======= bucket 0 =====] vote
                                                        ^ `step` waits only for what is to the right

A round commits as a whole, so no part of its update is used before the last bucket has arrived.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gridtrain.config import Exchange, Overlap
from gridtrain.errors import ConfigError
from gridtrain.runtime.buffers.buckets import BucketedBuffer, UpdateBuffer, bucket_bounds
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.checkpoint.flat_gradient import FlatGradient, finish_queued_work
from gridtrain.training.exchangers import ExchangePart, Exchanger, make_exchanger
from gridtrain.training.overlap_trial import OverlapTrial

log = logging.getLogger("gridtrain")


def make_overlapper(
    flat: FlatGradient, whole: Exchanger, session: GroupSession, overlap: Overlap, exchange: Exchange
) -> Overlapper | None:
    """Return an `Overlapper`, or None if the gradient is too short to be divided into buckets.

    Raises `ConfigError` if `overlap` is not an `Overlap`.
    """
    if not isinstance(overlap, Overlap):
        raise ConfigError(
            f"overlap is {overlap!r}, which is not an Overlap",
            remedy="pass overlap=gridtrain.Overlap(), or leave the argument out",
        )
    least = overlap.least_of(exchange)
    bounds = bucket_bounds(flat.sizes, overlap.buckets, least)
    if len(bounds) == 2:
        text = (
            "overlap is off: %d elements in %d parameters, from the last one on, do not fill two buckets of "
            "whole parameters with at least %d elements each"
        )
        log.warning(text, flat.n, len(flat.sizes), least)
        return None
    parts = make_exchanger(exchange, bounds, flat.flat_N.device, whole.feedback)
    return Overlapper(flat, whole, parts, session, OverlapTrial(overlap.adaptive))


class Overlapper:
    """Sends each bucket of a model's gradient when the gradients of all parameters in it are complete.

    Args:
        whole, parts: the exchangers of the whole vector and of its buckets, which share one error feedback.

    Attributes:
        trial: the trial, which decides which of the two exchangers each step uses.
        backwards: the number of backward passes before one call to `step` (`grid.batches(accumulate=)`).
        selecting_s: the time that the current backward pass has spent on selection, in seconds.
    """

    def __init__(
        self,
        flat: FlatGradient,
        whole: Exchanger,
        parts: Exchanger,
        session: GroupSession,
        trial: OverlapTrial,
    ) -> None:
        self._flat, self._session = flat, session
        self._whole_exchanger, self._bucket_exchanger, self.trial = whole, parts, trial
        self._bucket_parameters = _bucket_members(flat.sizes, parts.bounds)
        self._bucket_of = {p: b for b, members in enumerate(self._bucket_parameters) for p in members}
        self.backwards = 1
        self.selecting_s = 0.0
        self._began_s: float | None = None  # start of this step's backward pass
        self._current_plan: StepPlan | None = None  # the plan of the latest attempt at this step
        self._reset()
        for index, parameter in enumerate(flat.parameters):
            hook = partial(self._complete, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _reset(self) -> None:
        self._backward_counts = [0] * len(self._flat.sizes)
        self._missing_counts = [len(members) for members in self._bucket_parameters]
        self._plan: StepPlan | None = None
        self._has_plan = False
        self._sent: dict[int, ExchangePart] = {}

    # -- during backward -----------------------------------------------------------------------------

    def _complete(self, index: int, _: Tensor) -> None:
        bucket = self._bucket_of[index]
        if self._began_s is None:
            self._began_s = time.perf_counter()
        if bucket in self._sent:
            raise ConfigError(
                f"more than {self.backwards} backward pass{'es' * (self.backwards != 1)} ran before one "
                "step(), or one pass added to a gradient twice, as for layers that are used in two calls of "
                "torch.utils.checkpoint with use_reentrant=True; the gradients have already been sent",
                remedy="use grid.batches(..., accumulate=N) for N backward passes per step, "
                "use_reentrant=False, or overlap=None",
            )
        self._backward_counts[index] += 1
        if self._backward_counts[index] == self.backwards:
            self._missing_counts[bucket] -= 1
            if self._missing_counts[bucket] == 0:
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: int) -> None:
        if not self._has_plan:
            self._has_plan, plan = True, self._session.predict_plan()
            self._plan = plan if plan is not None and self.trial.is_overlapped(plan) else None
        if self._plan is None:
            return
        finish_queued_work(self._flat.flat_N.device)  # selection would also wait for it
        began_s = time.perf_counter()
        members = self._bucket_parameters[bucket]
        self._flat.gather(members)
        start, stop = self._bucket_exchanger.bounds[bucket : bucket + 2]
        gradient_B = self._flat.flat_N[start:stop]
        part = self._bucket_exchanger.prepare_bucket(bucket, gradient_B, self._plan, usable=True)
        self._sent[bucket] = part
        self.selecting_s += time.perf_counter() - began_s
        assert not isinstance(part.buffer, BucketedBuffer)
        self._session.begin_bucket(self._plan, bucket, part.buffer, part.skip)

    # -- in step -------------------------------------------------------------------------------------

    def take_sent(self) -> tuple[StepPlan | None, dict[int, ExchangePart]]:
        """Return the step plan under which buckets were sent during the backward pass, and the parts of
        these buckets, by bucket.  The plan may be None if no bucket was sent.

        Afterwards, the flat vector also holds the gradients of the buckets that were not sent.

        Raises `ConfigError` if a gradient was changed after it was sent, or cannot be gathered.
        """
        plan, sent = self._plan, self._sent
        changed = self._flat.has_changed(
            [index for bucket in sent for index in self._bucket_parameters[bucket]]
        )
        self._reset()
        if changed:
            raise ConfigError(
                "gradients were changed after they had been sent",
                remedy="clip with grid.optimizer(..., clip_norm=...); to change gradients in another way "
                "between backward() and step(), remove overlap=",
            )
        rest = (members for bucket, members in enumerate(self._bucket_parameters) if bucket not in sent)
        self._flat.gather([index for members in rest for index in members])
        return plan, sent

    def exchanger(self, plan: StepPlan) -> Exchanger:
        """Return the exchanger that all members use to divide their gradients in this attempt."""
        self._current_plan = plan
        return self._bucket_exchanger if self.trial.is_overlapped(plan) else self._whole_exchanger

    def make_empty_buffer(self, plan: StepPlan) -> UpdateBuffer | None:
        """See `Exchanger.make_empty_buffer`.  Also returns None in a trial, which needs this worker's
        durations, and while this worker does not know the trial's decision."""
        is_overlapped = self.trial.is_overlapped_outside_trials(plan)
        if is_overlapped is None:
            return None
        exchanger = self._bucket_exchanger if is_overlapped else self._whole_exchanger
        return exchanger.make_empty_buffer(plan)

    def finish_trial(self, plan: StepPlan, table: DenseRingBuffer) -> None:
        """Apply a table of durations after its round was committed; log the decision if it has changed."""
        text = self.trial.apply_table(plan, table.update)
        if text:
            log.log(logging.INFO if self.trial.is_worthwhile else logging.WARNING, "%s", text)

    def end_step(self) -> float:
        """End a step; return how long selection took during its backward pass, in seconds."""
        plan, self._current_plan = self._current_plan, None
        began_s, self._began_s = self._began_s, None
        if plan is not None and began_s is not None:
            self.trial.record_duration(plan, time.perf_counter() - began_s)
        selecting_s, self.selecting_s = self.selecting_s, 0.0
        return selecting_s


def _bucket_members(sizes: Sequence[int], bounds: Sequence[int]) -> list[list[int]]:
    """Return the indices of the parameters in each bucket."""
    members: list[list[int]] = [[] for _ in bounds[1:]]
    at = bucket = 0
    for index, size in enumerate(sizes):
        while bucket + 2 < len(bounds) and at >= bounds[bucket + 1]:
            bucket += 1
        members[bucket].append(index)
        at += size
    return members


def check_no_scaler(optimizer: object) -> None:
    """Raise `ConfigError` if a GradScaler is used, because a bucket is sent before `step` can unscale it."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            "a GradScaler is used, but overlap sends gradients before they are unscaled",
            remedy="use bfloat16 autocast, which needs no scaler, or remove overlap=",
        )
