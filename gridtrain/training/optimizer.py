"""`grid.optimizer`: exchanges gradients with retries, clips and applies updates, checks the optimizer.

    p.grad --gather--> flat_N --(* share)--> contribution --prepare--> buffer -----+
      ^                  ^                                                         |  session.run
      |                  |          not committed: begin again, same gradient <----+
      +-----scatter------+------ clip_norm ------- update <----- committed --------+
      |                                            (skipped: no update, the inner optimizer is not called)
      +--> inner.step()

The share is this worker's fraction of the step's samples or tokens.  The session decides whether a step is
committed (see "Commit rules" in docs/architecture.md).
"""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gridtrain.config import WAITS, Auto, Dense, Exchange, LocalSteps, Overlap, round_exchange
from gridtrain.errors import ConfigError, GridtrainError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import Bounds, UpdateBuffer
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.step_plan import StepPlan, is_comparison_due
from gridtrain.runtime.state_transfer.update_log import StepUpdate
from gridtrain.training import hyperparameter_check
from gridtrain.training.absence import Absence
from gridtrain.training.auto_exchanger import AutoExchanger
from gridtrain.training.batch_weights import BatchWeights, check_weighting
from gridtrain.training.buffer_averaging import BufferAveraging
from gridtrain.training.checkpoint import hyperparameters, serialization
from gridtrain.training.checkpoint.flat_gradient import (
    FlatGradient,
    finish_queued_work,
    sparse_gradient_error,
)
from gridtrain.training.checkpoint.frozen_base import FrozenBase, state_parameters
from gridtrain.training.checkpoint.joint_optimizer import parts_of
from gridtrain.training.checkpoint.model_buffers import buffers_of
from gridtrain.training.exchangers import ExchangePart, Exchanger, join_parts, make_exchanger
from gridtrain.training.overlap import Overlapper, check_no_scaler, make_overlapper
from gridtrain.training.parameter_watch import ParameterWatch
from gridtrain.training.running_statistics import RunningStatistics
from gridtrain.training.skip_report import SkipReport
from gridtrain.training.turn_start_state import capture_turn_start
from gridtrain.training.worker_residual import WorkerResidual
from gridtrain.training.wrapping_optimizer import WrappingOptimizer

_NORM_BLOCK = 1 << 20

log = logging.getLogger("gridtrain")

SentStep = tuple[StepPlan, ExchangePart, DenseRingBuffer | None]
"""The plan, the part and the buffer averages of a step that was submitted before its turn's end."""

EarlyBuckets = tuple[StepPlan | None, dict[int, ExchangePart]]
"""The plan of the buckets that were sent during the backward pass, and this worker's parts by bucket."""


class GridOptimizer(WrappingOptimizer):
    """A `torch.optim.Optimizer` that exchanges gradients before it steps the optimizer that it wraps.

    It exposes the groups, the state and the `state_dict` of the wrapped optimizer.

    Clipping between `backward()` and `step` clips the local gradient.  To clip the group's update, pass
    `clip_norm=`, or use the explicit form::

        optimizer.exchange()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    Args:
        inner: the optimizer that applies updates.
        model: the model; all of its trainable parameters take part, with zeros if a gradient is None; see
            `unused`.
        exchange: `Dense()`, `TopK(...)`, `GTopK(...)` or `Auto(...)`; `LocalSteps(...)` is for
            `LocalSGDOptimizer`.
        session: this worker's session in the run.
        clip_norm: the maximum 2-norm of the exchanged update; None disables clipping.
        average_buffers_every: the interval, in steps, at which the model's buffers are averaged; 0 disables
            averaging.
        compare_every: the interval, in steps, at which the whole state is compared with the other workers'
            states; within the first interval, it is compared after steps 1, 2, 4, 8, ...; 0 disables
            comparisons.
        overlap: how to exchange gradients during the backward pass; with None, `step` does the whole
            exchange.  With overlap, gradients must not be changed between `backward()` and `step`.
        wait: "all" to wait in every step for all workers; "auto" to continue without workers whose training
            loops have stalled, and to use their gradients in a later step.
        base: the frozen parameters that are not part of the state; by default, all frozen parameters.
        weigh_by: "samples" to weight a worker's gradient by its samples; "tokens" to weight it by the counts
            that the script passes to `weigh`.
        exchange_device: the device of the flat gradient, the residual and the tensors that local steps keep:
            "cpu" for host memory; by default the device of the parameters.
        unused: "zero" to treat a parameter that has a gradient on no worker like one with a zero gradient;
            "skip" to leave its `grad` None, so that `inner` skips it.

    Attributes:
        replicated: the optimizer that applies updates and whose state is equal on all workers; in this class
            it is `inner`.
        requested_batches: how many of the batches for the next call to `step` the script has requested.
        residual: the gradient that this worker has not sent yet.
        flat_size: the number of elements in the flat gradient.
        weights: how much this worker's batch counts in a step.
        parameter_watch: detects whether the script has changed the parameters since the latest step.
        trackers: the tracked objects by name.
        last_skipped: whether the latest step was skipped, or was taken without this worker.
        last_overflowed: whether the latest step was skipped because a gradient was not finite.
        timings: how long each phase of the latest step took, in seconds: computing, waiting, selecting,
            communicating, applying.
        unapplied_step: the step that is committed, but not completely applied to this model; None if there is
            none.

    Raises:
        ConfigError: an argument is invalid, or the arguments are not compatible.
    """

    delay = 0  # `LedgerSpec.delay`
    shares_scale = True  # whether a GradScaler's scale must be the same on all workers
    calls_per_turn = 1  # to `step`, in one step of the run
    local_calls = 0  # calls to `step` in this turn without an exchange yet
    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to `step`

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        exchange: Exchange | LocalSteps | Auto,
        session: GroupSession,
        *,
        clip_norm: float | None = None,
        average_buffers_every: int = 0,
        compare_every: int = 0,
        overlap: Overlap | None = None,
        wait: str = "all",
        base: FrozenBase | None = None,
        weigh_by: str = "samples",
        exchange_device: torch.device | str | None = None,
        unused: str = "zero",
    ) -> None:
        check_unused(unused, exchange, overlap)
        check_weighting(weigh_by, exchange, overlap, wait)
        check_compatible(inner, exchange, clip_norm)
        if wait not in WAITS:
            raise ConfigError(
                f"wait is {wait!r}; it must be one of {', '.join(WAITS)}",
                remedy='use wait="all" or wait="auto"',
            )
        self._wrap(inner)
        self.model = model
        self.exchange_config = exchange
        self.replicated = inner
        self._session = session
        self.clip_norm = clip_norm
        self._flat = FlatGradient(
            model,
            inner,
            exchange_device,
            has_used=unused == "skip",
            allows_sparse=isinstance(exchange, LocalSteps),
        )
        named = *state_parameters(model), *buffers_of(model)
        serialization.check_loadable("the model", [tensor for _, tensor in named])
        self.flat_size = self._flat.n
        self.unused = unused
        self.base = base or FrozenBase(model)
        self.overlap_config = overlap
        self._overlapper: Overlapper | None = None
        bounds: Bounds = (0, self._flat.n)
        wire, device = round_exchange(exchange), self._flat.flat_N.device
        self._exchanger: Exchanger
        if isinstance(wire, Auto):
            choices = wire.exchanges(self._flat.n, local_steps=isinstance(exchange, LocalSteps))
            self._exchanger = AutoExchanger(choices, bounds, device)
        else:
            self._exchanger = make_exchanger(wire, bounds, device)
            if overlap is not None:
                self._overlapper = make_overlapper(self._flat, self._exchanger, session, overlap, wire)
        self.buffer_averaging = BufferAveraging(model, average_buffers_every)
        self.trackers: dict[str, serialization.Stateful] = {}
        self._rates_at_step: dict[str, object] = {}  # directly after the latest step
        self._is_applied = True  # False from the first attempt at a step until its update is applied
        self.unapplied_step: int | None = None
        self.compare_every = compare_every
        self._step = -1
        self._compare_next = False
        self._has_exchanged = False
        self.residual = WorkerResidual(self._exchanger, self._flat.n, session.increase_figure)
        self.backwards_per_step = self.requested_batches = 1
        # Of the latest turn, until its round is over.
        self._turn_start: serialization.TurnStartState | None = None
        self._statistics = RunningStatistics(model)
        self._calls_with_samples = 1  # of the turn
        self.parameter_watch = ParameterWatch(model, [p for _, p in state_parameters(model)])
        self._skips = SkipReport(lambda figures: session.report_figures(figures))
        self.last_skipped = self.last_overflowed = False
        self.timings: dict[str, float] = {}
        self._stopwatch = _Stopwatch()
        self.wait = wait
        self.absence = Absence(self, self.trackers)
        self._is_exchanging = False  # flat_N holds a gradient that is not applied yet
        self._sent: SentStep | None = None  # until its outcome is known
        self._is_usable = True  # the argument of the latest `_run_attempts`
        self.weigh_by, self.weights = weigh_by, BatchWeights(weigh_by, self._flat, session)

    @property
    def skipped_steps(self) -> int:
        """The number of committed steps whose update was skipped because a gradient was not finite."""
        return self._skips.total

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients are exchanged; the script may freeze some of them in some steps."""
        return self._flat.parameters

    def describe_exchange(self) -> str:
        """Return a description of the exchange, which must be equal on all workers."""
        buckets = self.overlap_config.describe() if self.overlap_config is not None else ""
        return self.exchange_config.describe() + buckets

    def set_backwards_per_step(self, count: int) -> None:
        """Set the number of backward passes before one call to `step`; with overlap, gradients are complete
        after the last of them."""
        self.backwards_per_step = count
        if self._overlapper is not None:
            self._overlapper.backwards = count

    @property
    def is_overlapping(self) -> bool:
        """Whether buckets are sent during the backward pass, except in trials, which measure both ways."""
        return self._overlapper is not None and self._overlapper.trial.is_worthwhile

    # -- torch.optim.Optimizer -------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "a parameter group was added after grid.optimizer had fixed the flat layout of the gradient",
            remedy="add all groups to the inner optimizer before grid.optimizer(...)",
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Exchange the gradient, unless `exchange()` was called, and apply the committed update.

        Raises:
            ConfigError: `step` was called with a closure, before all of its batches were requested, or, if
                steps are weighted by tokens, without a weight; the gradients cannot be exchanged; or the
                optimizer settings differ from those of most workers.
        """
        if closure is not None:
            raise ConfigError(
                "step() was called with a closure; a gradient is exchanged once and cannot be re-evaluated",
                remedy="call loss.backward() and then optimizer.step()",
            )
        if not self._has_exchanged:
            self._exchange()
        self._has_exchanged = False
        self._apply()

    def _disable_replay(self, reason: str) -> None:
        """From now on, make the group wait for this worker in every step, and let no newcomer catch up from
        it, because the updates alone do not determine the effect of a step."""
        self._session.tasks.disable_replay(reason)
        self.absence.set_obstacle(reason)

    # -- turns: the calls to `step` in one step of the run -------------------------------------------

    def begin_turn(self, calls_with_samples: int) -> None:
        """Begin a turn.

        Args:
            calls_with_samples: the number of the turn's calls to `step` that have samples; the remaining
                calls get stand-in batches.
        """
        self._calls_with_samples = calls_with_samples
        self.weights.begin_turn()
        self._statistics.save()
        if self.backwards_per_step > 1:  # a loop may step its scheduler after each of these passes
            self._turn_start = capture_turn_start(self.inner, self.trackers, averages=False)

    def weigh(self, count: int) -> None:
        """Weight this worker's batch, or its next micro-batch, by `count` instead of by the number of
        its samples; see `Grid.weigh`."""
        number = self.weights.add(count)
        if number == self.backwards_per_step and self.local_calls + 1 == self.calls_per_turn:
            self.weights.announce()

    # -- the group's step ------------------------------------------------------------------------

    def exchange(self) -> bool:
        """Replace every `p.grad` with the group's committed update; `step` then only applies the update.

        Returns False if the step is skipped, which leaves the gradients unchanged, or if it is taken without
        this worker; `step` then applies no update.  With a GradScaler, call `scaler.unscale_(optimizer)`
        first.

        Raises:
            ConfigError: `exchange` was called twice for one step, or one of the errors of `step` occurred.
        """
        self._disable_replay("its script may change updates between exchange() and step()")
        return self._exchange()

    def _exchange(self) -> bool:
        if self._has_exchanged:
            raise ConfigError(
                "exchange() was called twice for one step",
                remedy="call optimizer.step() after each optimizer.exchange()",
            )
        check_applied(self.unapplied_step)
        if not self._is_applied and self._overlapper is None:  # interrupted; the gradient is still in flat_N
            self._run_attempts(self._is_usable)
            self._has_exchanged = True
            return not self.last_skipped
        self._check_batches()
        self._check_script_changes(self.parameter_watch.is_written)
        self.weights.take()
        self._leave_out_stand_ins()
        early = None
        if self._overlapper is not None:
            check_no_scaler(self)
            early = self._overlapper.take_sent()
        else:
            self._flat.gather()
        overflowed = self._unscale(self._flat.gradient_N.mul_)
        self._run_attempts(not overflowed, early)
        self._has_exchanged = True
        return not self.last_skipped

    def _check_batches(self) -> None:
        """Raise `ConfigError` if the script has not requested all batches of this call to `step`."""
        if self.requested_batches < self.backwards_per_step:
            raise ConfigError(
                f"optimizer.step() was called after only {self.requested_batches} of its "
                f"{self.backwards_per_step} batches had been requested",
                remedy=f"call optimizer.step() once per {self.backwards_per_step} batches, or remove "
                f"accumulate={self.backwards_per_step} from grid.batches(...)",
            )

    def _leave_out_stand_ins(self) -> None:
        """In a turn without samples, undo the stand-in's change of the running statistics."""
        if self._calls_with_samples == 0:
            self._statistics.restore()

    def _run_attempts(self, usable: bool, early: EarlyBuckets | None = None) -> None:
        """Attempt one step until an attempt is committed; the local gradient stays in flat_N until then.

        Args:
            usable: False if the gradient is known not to be finite.
            early: the buckets that have already been sent.
        """
        self.base.check_sometimes()
        self._is_applied, self._is_usable = False, usable
        self._is_exchanging = True
        try:
            self._iterate_attempts(usable, early)
            self._turn_start = None
            self.weights.end_step()
        finally:
            self._is_exchanging = False

    def _iterate_attempts(self, usable: bool, early: EarlyBuckets | None) -> None:
        finish_queued_work(self._flat.flat_N.device)  # the measured speed includes the backward pass
        self._stopwatch.lap("computing_s")
        part: ExchangePart | None = None
        plan: StepPlan | None
        averages = compared = before = trial = weighed = None
        while True:
            if self._sent is not None:
                plan, part, averages = self._sent
                before = plan
                outcome = self._session.await_submitted()
                self._sent = None
                self._stopwatch.lap("waiting_s")
                if outcome.is_committed:
                    break
                self.residual.mark_ended()
            plan = self._session.begin()
            self._stopwatch.lap("waiting_s")
            if plan is None:
                self.last_skipped, self.last_overflowed = True, False
                return
            fresh = before is None or plan.attempt == 0 or replace(plan, attempt=before.attempt) != before
            before = plan
            if part is None or fresh or not part.buffer.is_resumable:
                sent = early[1] if early is not None and early[0] is plan else {}
                early = None
                weighed = self.weights.plan_by_counts(plan)
                self._stopwatch.lap("waiting_s")
                part = self._prepare(weighed, usable or weighed.samples == 0, sent)
            if fresh:  # otherwise the rings continue with what they have received
                averages = self.buffer_averaging.make_collective_buffer(plan)
                trial = self._overlapper.trial.make_table(plan) if self._overlapper is not None else None
            if fresh or compared is None:
                compared = hyperparameter_check.make_hyperparameter_buffer(plan, self._settings_of_step)
            # A retry adds the hyperparameters at the end, so that the other buffers' channels do not change.
            extra = [each for each in (averages, trial, compared) if each is not None]
            self._stopwatch.lap("selecting_s")
            settings_text = hyperparameters.hyperparameters_json(self._settings_of_step)
            self.absence.check_step(plan.step, settings_text)
            self.residual.mark_sent(part)
            self._sent = plan, part, averages
            outcome = self._session.run(plan, [part.buffer, *extra], part.skip, settings_text)
            self._sent = None
            # An aborted attempt is a wait, often for a member that was then removed.
            self._stopwatch.lap("communicating_s" if outcome.is_committed else "waiting_s")
            if outcome.is_committed:
                break
            self.residual.mark_ended()
            if compared is not None:
                self._check_hyperparameters(plan, compared)
        self.last_skipped = self.last_overflowed = outcome.is_skipped
        self._step, self._compare_next = plan.step, plan.compare_after
        self.unapplied_step = plan.step
        if outcome.is_skipped:
            self.residual.mark_ended()
            self._skips.record_skipped(plan.step, is_own=part.skip, is_scaled=self._is_scaled)
            if part.skip:
                self._statistics.restore()
            return
        if weighed is plan and self.weigh_by != "samples":
            log.warning("step %d was weighted by samples: not all counts were known in time", plan.step + 1)
        if averages is not None:
            self.buffer_averaging.apply(averages)
            if self._calls_with_samples == 0:  # overlapped local steps continue with the averages
                self._statistics.save()
        if trial is not None and self._overlapper is not None:
            self._overlapper.finish_trial(plan, trial)
        self._load_update(self.residual.commit(part))

    def _send_step(self, plan: StepPlan, *, usable: bool) -> None:
        """Submit the gradient in flat_N for the plan that the session has predicted, without waiting; the
        next `_run_attempts` waits for the outcome."""
        part = self._prepare(plan, usable or plan.samples == 0, {})
        averages = self.buffer_averaging.make_collective_buffer(plan)
        self.residual.mark_sent(part)
        settings = hyperparameters.hyperparameters_json(self._settings_of_step)
        buffers = [part.buffer] if averages is None else [part.buffer, averages]
        self._session.submit(plan, buffers, part.skip, settings)
        self._sent = plan, part, averages

    @property
    def _settings_of_step(self) -> torch.optim.Optimizer:
        """An optimizer with the settings that the members vote on in this step."""
        return self.inner

    @property
    def _is_scaled(self) -> bool:
        """Whether a scaler of `Grid.scaler` reduces the group's scale after a skipped step."""
        scalers = (each for each in self.trackers.values() if isinstance(each, torch.amp.GradScaler))
        return self.shares_scale and any(each.is_enabled() for each in scalers)

    def _check_hyperparameters(self, plan: StepPlan, compared: DenseRingBuffer) -> None:
        try:
            hyperparameter_check.check_hyperparameters(plan, self._settings_of_step, compared)
        except ConfigError as error:
            self._session.close(error.reason)  # so that other workers do not wait for this script's end
            raise

    def _prepare(self, plan: StepPlan, usable: bool, sent: Mapping[int, ExchangePart]) -> ExchangePart:
        """Prepare this worker's part in an exchange.

        Args:
            sent: the parts of the buckets that were already sent, by bucket.
        """
        exchanger = self._exchanger if self._overlapper is None else self._overlapper.exchanger(plan)
        parts = [
            sent.get(bucket)
            or exchanger.prepare_bucket(bucket, self._flat.flat_N[start:stop], plan, usable=usable)
            for bucket, (start, stop) in enumerate(pairwise(exchanger.bounds))
        ]
        return join_parts(exchanger.bounds, parts)

    def _apply(self) -> None:
        if not self.last_skipped:
            self.replicated.step()
        self._compare()
        self._stopwatch.lap("applying_s")
        self.timings = self._stopwatch.reset()
        if self._overlapper is not None:
            within_s = self._overlapper.end_step()
            self.timings["selecting_s"] = self.timings.get("selecting_s", 0.0) + within_s
            self.timings["computing_s"] = self.timings.get("computing_s", 0.0) - within_s
        self._session.report_figures(self._take_turn_timings())
        self._end_step()

    def _take_turn_timings(self) -> dict[str, float]:
        """Return the timings of the turn that ends."""
        return self.timings

    def _end_step(self) -> None:
        self._is_applied, self.unapplied_step = True, None
        self.parameter_watch.record_step()
        self._rates_at_step = rates_by_tracker(self.trackers)

    @property
    def is_settled(self) -> bool:
        """Whether the state after a committed step is certainly complete: the update is applied, and all
        tracked objects are schedulers that the script has stepped since then.  With other objects, and with
        schedulers that are stepped less often, this is not known, and the result is False."""
        return self._is_applied and have_stepped(self.trackers, self._rates_at_step)

    def record_turn(self) -> None:
        """Record that the script requests its next batch; raise `GridtrainError` if a committed update
        was not applied, so that this worker neither trains with a different state, nor sends or saves it."""
        check_applied(self.unapplied_step)
        self._check_script_changes(self.parameter_watch.record_turn())

    def _check_script_changes(self, are_written: bool) -> None:
        """Disable replay if the script has changed parameters outside of steps, because updates lack such
        changes."""
        if are_written:
            self._disable_replay("its script changes parameters outside of its steps")

    @property
    def is_unchanged(self) -> bool:
        """Whether the parameters are still those after the last step, even if a new batch was requested."""
        return not self.parameter_watch.has_changed

    def abort_turn(self) -> None:
        """Undo what the turn in progress has changed, so that `pack` can copy the state before the turn.  The
        turn's update must not have been applied, not even in part."""
        self._statistics.restore()

    def resume(self) -> None:
        """Prepare for the next batch after the script has left its loop, for example because a notebook cell
        was interrupted: finish a step whose exchange has begun; otherwise undo what the turn has changed.

        Raises:
            GridtrainError: the step can neither be finished nor undone.
        """
        check_applied(self.unapplied_step)
        if not self._is_applied:
            self._finish_step()
        elif self.local_calls or not self._session.is_turn_done:
            if self.delay or self._overlapper is not None:
                raise interrupted_error(self._session.step, "its exchange overlaps with the computation")
            self.abort_turn()
            if self._turn_start is not None:
                self.capture_turn_state()()  # restores trackers and settings from the start of the turn
        elif not self.absence.find_obstacle():
            self.absence.advance_late_schedulers()  # interrupted before the script stepped them
        self.inner.zero_grad()  # the script may not have done so

    def _finish_step(self) -> None:
        """Continue an interrupted exchange, and do what the script does in and after a step."""
        overlaps = self.delay or self._overlapper is not None
        obstacle = "its exchange overlaps with the computation" if overlaps else self.absence.find_obstacle()
        if obstacle:
            raise interrupted_error(self._session.step, obstacle)
        self._run_attempts(self._is_usable)
        self._apply()
        self.absence.advance_schedulers()

    def _compare(self) -> None:
        step, self._step = self._step, -1
        if step >= 0:
            self.compare_replicas(step, is_due=self._compare_next)

    def compare_replicas(self, step: int, *, is_due: bool) -> None:
        """Report the digest of the state after `step`, if the workers compare their states after this step.

        Args:
            is_due: whether a comparison is due regardless of the interval `compare_every`.  If
                `compare_every` is 0, no states are compared.
        """
        if self.compare_every and (is_due or is_comparison_due(step, self.compare_every)):
            self._session.report_digest(step, serialization.replica_digest(self.model, self.replicated))

    def _unscale(self, multiply: Callable[[float], object]) -> bool:
        """Multiply gradients by the inverse of a GradScaler's scale, because `_step_supports_amp_scaling`
        leaves this to the optimizer.

        Returns whether the scaler found a gradient that is not finite.
        """
        scale: Tensor | None = getattr(self, "grad_scale", None)  # None: already unscaled, or no scaler
        if scale is not None:
            multiply(1.0 / float(scale))
        return float(getattr(self, "found_inf", 0.0)) > 0.0

    # -- the replicated state -----------------------------------------------------------------------

    def track(self, **trackers: serialization.Stateful) -> None:
        """Add stateful objects, such as schedulers and weight averages, to the replicated state.  Every
        worker must track the same objects, under the same names."""
        serialization.check_stateful(trackers)
        self.trackers.update(trackers)

    def capture_state(self, whole: bool = True) -> Sequence[bytes | memoryview]:
        """Return the replicated state; see `serialization.capture_state`."""
        if whole:
            self.base.check_unchanged()
        state, start = (self.model, self.replicated, self.trackers), self._start_of_turn
        return serialization.capture_state(*state, whole=whole, start=start, anchors=self._anchors)

    def initial_digest(self) -> bytes:
        """Return a digest of the state before the first step; see `serialization.initial_digest`."""
        return serialization.initial_digest(self.model, self.replicated, self.trackers)

    @property
    def _anchors(self) -> Mapping[Tensor, Tensor]:
        """The parameters' values after the last step, if this turn has changed them; otherwise empty."""
        return {}

    @property
    def _start_of_turn(self) -> serialization.TurnStartState | None:
        """The settings and trackers from the start of the turn in progress; None if they are the current
        ones."""
        return self._turn_start if self._session.is_in_turn else None

    def replay_update(self, step: StepUpdate) -> None:
        """Apply a step in which this worker did not take part.

        Raises:
            RemoteProtocolError: the step cannot be replayed; the model is then unusable.
        """
        if step.update is None:
            return
        try:
            self.load_settings(step.settings)
            self.apply_update(step.update)
        except Exception as error:  # a user's optimizer with a peer's settings may raise anything
            text = f"step {step.step + 1} cannot be replayed: {type(error).__name__}: {error}"
            raise RemoteProtocolError(text, remedy="request the whole state instead") from error

    def load_settings(self, settings: bytes) -> None:
        """Load another worker's optimizer settings, as `hyperparameters.hyperparameters_json` wrote them."""
        _, groups = json.loads(settings)
        hyperparameters.load_hyperparameters(self.inner, groups)

    def apply_update(self, update: npt.NDArray[np.float32] | SparseVector) -> None:
        """Apply the update of a step in which this worker did not take part, with the current settings.

        A gradient that is being exchanged is kept.
        """
        kept_N = self._flat.flat_N.clone() if self._is_exchanging else None
        was_changed = self.parameter_watch.has_changed
        self._load_update(update)
        self.replicated.step()
        if not was_changed:
            self.parameter_watch.record()
        self.inner.zero_grad()
        if kept_N is not None:
            self._flat.flat_N.copy_(kept_N)

    def is_state_needed(self, plan: StepPlan) -> bool:
        """Whether the buffers are averaged in the step, which then needs this worker's buffers."""
        return self.buffer_averaging.is_due(plan)

    def make_empty_buffer(self, plan: StepPlan) -> UpdateBuffer | None:
        """See `Exchanger.make_empty_buffer`."""
        if self._overlapper is not None:
            return self._overlapper.make_empty_buffer(plan)
        return self._exchanger.make_empty_buffer(plan)

    def _load_update(self, update: npt.NDArray[np.float32] | SparseVector) -> None:
        """Write the update, clipped if there is a `clip_norm`, to every `p.grad`."""
        self._flat.load_update(update)
        if self.clip_norm is not None:
            gradient_N = self._flat.gradient_N
            norm = l2_norm(update if isinstance(update, SparseVector) else update[: len(gradient_N)])
            gradient_N.mul_(min(1.0, self.clip_norm / (norm + 1e-6)))
        self._flat.scatter()

    def restore_state(self, blobs: bytes | memoryview | Sequence[bytes | memoryview]) -> None:
        """Load another worker's state; see `serialization.restore_state`."""
        serialization.restore_state(blobs, self.model, self.replicated, self.trackers)
        self.parameter_watch.record()

    def capture_turn_state(self) -> Callable[[], None]:
        """Copy the buffers, trackers and settings, which the script may change between two steps; return a
        function that restores them."""
        own = self.capture_state(whole=False)
        return lambda: self.restore_state(own)

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Copy the state for a checkpoint; see `serialization.pack_state`."""
        self.base.check_unchanged()
        state, start = (self.model, self.replicated, self.trackers), self._start_of_turn
        return serialization.pack_state(*state, start=start)

    def unpack(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `pack`; raise `RemoteProtocolError` if it does not match the model and the
        optimizer."""
        values = serialization.read_state(document, tensors)
        serialization.load_state(values, self.model, self.replicated, self.trackers)

    @property
    def choices(self) -> Sequence[Exchange]:
        """The exchanges that the coordinator may choose; empty if the script has chosen the exchange."""
        return (*self._exchanger.choices.values(),) if isinstance(self._exchanger, AutoExchanger) else ()

    @property
    def current_exchange(self) -> Exchange | LocalSteps | None:
        """The exchange of the latest step; None if none has been chosen yet."""
        if isinstance(self._exchanger, AutoExchanger):
            current = self._exchanger.current_exchange
            local = self.exchange_config
            return replace(local, exchange=current) if isinstance(local, LocalSteps) and current else current
        return self.exchange_config if not isinstance(self.exchange_config, Auto) else None


class _Stopwatch:
    """Measures a step's phases in seconds; the time between two steps counts toward the first phase of the
    next step."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()
        self._laps_s: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now_s = time.perf_counter()
        self._laps_s[name] = self._laps_s.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def reset(self) -> dict[str, float]:
        laps_s, self._laps_s = self._laps_s, {}
        return laps_s


def check_compatible(
    inner: torch.optim.Optimizer, exchange: Exchange | LocalSteps | Auto, clip_norm: float | None
) -> None:
    """Raise `ConfigError` if the arguments, or the parameters' dtypes, are not compatible, or if the
    optimizer's state cannot be sent to newcomers; warn about an adaptive optimizer with a sparse exchange.

    The warning names the line that called `grid.optimizer`.  For this, there must be exactly two frames
    between this function and that line.
    """
    for part in parts_of(inner):
        if isinstance(part, GridOptimizer):
            raise ConfigError("the optimizer is already wrapped", remedy="call grid.optimizer(...) once")
        if isinstance(part, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS cannot be used in a run: it evaluates a batch several times in one step, but its "
                "gradient is exchanged once",
                remedy="use SGD or AdamW",
            )
        if isinstance(part, torch.optim.SparseAdam) and not isinstance(exchange, LocalSteps):
            raise sparse_gradient_error("SparseAdam needs")
    serialization.check_stateful({"optimizer": inner})
    if clip_norm is not None and not (isinstance(clip_norm, SupportsFloat) and 0.0 < clip_norm < math.inf):
        text = f"clip_norm is {clip_norm!r}; it must be a finite number > 0"
        raise ConfigError(text, remedy="try clip_norm=1.0")
    wire, parameters = round_exchange(exchange), [p for group in inner.param_groups for p in group["params"]]
    if not isinstance(wire, Dense) and any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ConfigError(
            f"a parameter is {torch.float16}, whose range an update of {type(wire).__name__} may exceed, "
            "because unsent gradients add up in the residual",
            remedy="keep parameters in float32 (with torch.autocast) or bfloat16, or use exchange=Dense()",
        )
    if isinstance(exchange, Dense | LocalSteps | Auto):
        return
    for part in parts_of(inner):
        name = type(part).__name__
        momentum = max(float(group.get("momentum", 0.0)) for group in part.param_groups)
        if momentum and exchange.momentum:
            raise ConfigError(
                f"{name} has momentum {momentum}, and {exchange.describe()} applies momentum, too",
                remedy=f"keep the exchange's momentum and build {name} with momentum=0",
            )
        if "betas" in part.defaults:
            warnings.warn(
                f"{name} converges poorly with a sparse exchange, because most elements of an update are "
                "zero -> use exchange=Dense(), SGD with GTopK(momentum=0.9), or LocalSteps(every=32, "
                "exchange=GTopK())",
                stacklevel=4,  # the line that called grid.optimizer(...)
            )


def check_unused(unused: str, exchange: Exchange | LocalSteps | Auto, overlap: Overlap | None) -> None:
    """Raise `ConfigError` if `unused` is unknown, or cannot be used with the other arguments."""
    if unused not in ("zero", "skip"):
        raise ConfigError(
            f"unused is {unused!r}; it must be zero or skip", remedy='use unused="zero" or unused="skip"'
        )
    is_exact = isinstance(exchange, Dense) and exchange.values == "fp32" and overlap is None
    if unused == "skip" and not is_exact:
        given = exchange.describe() + (" and overlap" if overlap is not None else "")
        raise ConfigError(
            f'unused="skip" was set with {given}; it needs Dense() with values="fp32" and without overlap',
            remedy='use exchange=Dense() without overlap=, or unused="zero"',
        )


def check_applied(unapplied_step: int | None) -> None:
    """Raise `GridtrainError` if a committed step was not completely applied to this worker's model, for
    example after the script caught an exception from the inner optimizer."""
    if unapplied_step is not None:
        raise GridtrainError(
            f"the update of step {unapplied_step + 1} was committed, but this worker has not applied it "
            "completely, because of an exception or because step() was not called after exchange(); its "
            "model may differ from that of the others",
            remedy="let the exception end this script, and start it again: it then receives the group's "
            "state or, without other workers, continues from its latest checkpoint",
        )


def interrupted_error(step: int, why: str) -> GridtrainError:
    """Return the error for a loop that is run again after an interrupt but cannot continue.

    Args:
        step: the number of steps that the model contains.
        why: the reason, as a clause.
    """
    return GridtrainError(
        f"this worker's script was interrupted in step {step + 1}, which cannot be continued: {why}",
        remedy="call grid.close(), and run the script, or all cells from gridtrain.join() on, again",
    )


def l2_norm(update: npt.NDArray[np.float32] | SparseVector) -> float:
    """Return the 2-norm, summed in float64 on the host, so that it is equal on all workers, regardless of
    their number of threads."""
    values = update.values if isinstance(update, SparseVector) else update
    blocks = (values[i : i + _NORM_BLOCK].astype(np.float64) for i in range(0, values.size, _NORM_BLOCK))
    return math.sqrt(math.fsum(float(np.square(block).sum()) for block in blocks))


def rates_by_tracker(trackers: Mapping[str, serialization.Stateful]) -> dict[str, object]:
    """Return the schedulers' lists of learning rates, for `have_stepped`."""
    return {name: _rates_of(tracker) for name, tracker in trackers.items()}


def have_stepped(trackers: Mapping[str, serialization.Stateful], before: Mapping[str, object]) -> bool:
    """Return whether all trackers are schedulers that have stepped since `rates_by_tracker` returned
    `before`."""
    rates = rates_by_tracker(trackers)
    return all(each is not None and each is not before.get(name) for name, each in rates.items())


def _rates_of(tracker: serialization.Stateful) -> object:
    """Return a scheduler's list of learning rates, which is a new object after each of its steps; None for
    other objects."""
    return tracker.get_last_lr() if isinstance(tracker, torch.optim.lr_scheduler.LRScheduler) else None
