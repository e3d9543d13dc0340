"""Sending the gradient while backward still computes it: last layers first (Baidu, 2017).

Decides when a bucket's gradient is complete and whether sending it early pays.  Never waits: what could not
be sent early is sent by `step`, as without overlap.

    backward     layer 4   layer 3   layer 2   layer 1  |  step
    ready            [ bucket 1 ]        [ bucket 0 ]   |
    network              [===== bucket 1 =====][======= bucket 0 =====] vote
                                                        ^ only what is right of here is waited for

A round commits as a whole, so nothing of its update is used before the last bucket is there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gridtrain.errors import ConfigError
from gridtrain.optim.exchange import Attempt, Exchanger
from gridtrain.optim.flat import FlatGradient
from gridtrain.optim.session import Session
from gridtrain.runtime.buckets import BucketedWorkspace
from gridtrain.runtime.plan import StepPlan

TRIAL_STEPS, PERIOD_STEPS, WARM_UP_STEPS = 12, 600, 3


class Switch:
    """Whether overlap pays here: both ways are tried for a few steps, every now and then.

    Workers need not agree: what is sent is the same.  But all of them try at the same steps, since a step
    takes as long as its slowest worker.

        step % PERIOD_STEPS     0 .. 11    12 .. 23    24 ...
                                early      late        what took less (the median; equal: early)
    """

    def __init__(self, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._took_s: dict[bool, list[float]] = {True: [], False: []}
        self._last_s: float | None = None

    def early(self, step: int) -> bool:
        phase = step % PERIOD_STEPS
        if not self._adaptive or phase < TRIAL_STEPS:
            return True
        if phase < 2 * TRIAL_STEPS:
            return False
        early_s, late_s = self._took_s[True], self._took_s[False]
        return not (early_s and late_s) or statistics.median(early_s) <= statistics.median(late_s)

    def done(self, step: int, now_s: float) -> None:
        """The step is over."""
        phase, last_s, self._last_s = step % PERIOD_STEPS, self._last_s, now_s
        if phase == 0:
            self._took_s = {True: [], False: []}
        # The first steps of a way still feel the other one, or compile.
        if last_s is not None and phase < 2 * TRIAL_STEPS and phase % TRIAL_STEPS >= WARM_UP_STEPS:
            self._took_s[phase < TRIAL_STEPS].append(now_s - last_s)


class Overlapper:
    """Watches the gradients of one model, and sends a bucket when its last one is complete.

    Args:
        adaptive: send early only where that is faster.

    Attributes:
        backwards: backward passes in one step (`grid.batches(accumulate=)`).
        selecting_s: seconds of the current backward spent on selection here.
    """

    def __init__(
        self,
        flat: FlatGradient,
        exchanger: Exchanger,
        session: Session,
        adaptive: bool,
    ) -> None:
        self._flat, self._exchanger, self._session = flat, exchanger, session
        self._switch = Switch(adaptive)
        self._members = _members(flat.sizes, exchanger.bounds)
        self._bucket_of = {p: b for b, members in enumerate(self._members) for p in members}
        self.backwards = 1
        self.selecting_s = 0.0
        self._reset()
        for index, parameter in enumerate(flat.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def _reset(self) -> None:
        self._seen = [0] * len(self._flat.sizes)
        self._missing = [len(members) for members in self._members]
        self._plan: StepPlan | None = None
        self._asked = False
        self._sent: dict[int, Attempt] = {}

    # -- in the middle of backward -------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._complete(index)

    def _complete(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if bucket in self._sent:
            raise ConfigError(
                f"more than {self.backwards} backward passes before one step(), and their gradients are sent",
                remedy="use grid.batches(..., accumulate=a) for a backward passes a step, or overlap=None",
            )
        self._seen[index] += 1
        if self._seen[index] == self.backwards:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: int) -> None:
        if not self._asked:
            self._asked, plan = True, self._session.early()
            self._plan = plan if plan is not None and self._switch.early(plan.step) else None
        if self._plan is None:
            return
        began_s = time.perf_counter()
        members = self._members[bucket]
        self._flat.gather(members)
        start, stop = self._exchanger.bounds[bucket : bucket + 2]
        gradient_B = self._flat.flat_N[start:stop]
        attempt = self._exchanger.prepare_bucket(bucket, gradient_B, self._plan, usable=True)
        self._sent[bucket] = attempt
        self.selecting_s += time.perf_counter() - began_s
        assert not isinstance(attempt.workspace, BucketedWorkspace)
        self._session.send_early(self._plan, bucket, attempt.workspace, attempt.skip)

    # -- in step -------------------------------------------------------------------------------------

    def take(self) -> tuple[StepPlan | None, dict[int, Attempt]]:
        """The plan that buckets were sent for, and these buckets; what is under way stays so.

        Raises `ConfigError` if a gradient was changed after it was sent.
        """
        plan, sent = self._plan, self._sent
        changed = self._flat.differs([index for bucket in sent for index in self._members[bucket]])
        self._reset()
        if changed:
            raise ConfigError(
                "gradients were changed after they had been sent",
                remedy="with overlap, clip by grid.optimizer(..., clip_norm=...); for anything else between "
                "backward and step leave overlap out",
            )
        return plan, sent

    def done(self, step: int) -> float:
        """A step is over; returns the seconds of selection within its backward."""
        self._switch.done(step, time.perf_counter())
        selecting_s, self.selecting_s = self.selecting_s, 0.0
        return selecting_s


def _members(sizes: Sequence[int], bounds: Sequence[int]) -> list[list[int]]:
    """Indices of each bucket's parameters."""
    members: list[list[int]] = [[] for _ in bounds[1:]]
    at = bucket = 0
    for index, size in enumerate(sizes):
        while bucket + 2 < len(bounds) and at >= bounds[bucket + 1]:
            bucket += 1
        members[bucket].append(index)
        at += size
    return members


def refuse_scaler(optimizer: object) -> None:
    """Raises `ConfigError`: what is sent before `step` has not been unscaled."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            "a GradScaler scales gradients that overlap sends before they are unscaled",
            remedy="use bfloat16 autocast, which needs no scaler, or leave overlap out",
        )
