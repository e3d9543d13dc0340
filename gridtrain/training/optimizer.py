"""The optimizer that a user's loop calls: the group's update instead of the local gradient.

Decides what a worker brings into a step and applies what the group committed (DESIGN section 7).  Never opens
a socket and never decides a commit: that is the session's.

    p.grad --gather--> flat_N --(n_i / N)--> contribution --prepare--> workspace --+
      ^                  ^                                                         |  session.run
      |                  |            not committed: begin again, same gradient <--+
      +-----scatter------+------ clip_norm ------- update <----- committed --------+
      |                                            (skip: no update, the inner optimizer is not called)
      +--> inner.step()
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gridtrain.config import Auto, Dense, Exchange, LocalSteps, Overlap, round_exchange
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import Bounds
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.state_transfer.update_log import StepUpdate
from gridtrain.runtime.step_plan import RoundOutcome, StepPlan
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.training import hyperparameter_check
from gridtrain.training.auto_exchanger import AutoExchanger
from gridtrain.training.buffer_averaging import BufferAveraging
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.flat_gradient import FlatGradient
from gridtrain.training.exchangers import ExchangeAttempt, Exchanger, join_attempts, make_exchanger
from gridtrain.training.overlap import Overlapper, check_no_scaler, make_overlapper
from gridtrain.training.pending_attempt import PendingAttempt, add_residual
from gridtrain.training.session_interface import TrainingSession
from gridtrain.training.turn_start_state import TurnStartState
from gridtrain.training.wrapping_optimizer import WrappingOptimizer

_NORM_BLOCK = 1 << 20

EarlyBuckets = tuple[StepPlan | None, dict[int, ExchangeAttempt]]
"""The plan that buckets were sent for while backward computed, and these buckets."""


class GridOptimizer(WrappingOptimizer):
    """A real `torch.optim.Optimizer` around the user's, whose groups, state and `state_dict` it shows.

    Between backward and `step`, clipping clips the local gradient.  To clip what the group agreed on, give
    `clip_norm=`, or use the explicit form::

        optimizer.exchange()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    Args:
        inner: the optimizer that applies updates.
        model: all of its trainable parameters take part, zeros where a gradient is None.
        exchange: `Dense()`, `TopK(...)`, `GTopK(...)` or `Auto(...)`; `LocalSteps(...)` is for
            `LocalStepsOptimizer`.
        session: this worker's place in the run.
        clip_norm: largest 2-norm of the exchanged update; None: not clipped.
        average_buffers_every: steps between two averages of the model's buffers; 0: never.
        compare_every: steps between two comparisons of the whole state with the others'; 0: never.
        overlap: exchange while backward still computes; None: all of it in `step`.  Gradients must then not
            be changed between backward and `step`.

    Attributes:
        replicated: the optimizer that applies updates and whose state is equal on all workers: here `inner`.
        skipped_steps: committed steps whose update was empty because somebody's gradient was not finite.
        last_skipped: whether the latest step was one of these, or went on without this worker.
        last_overflowed: whether it was one of these.
        timings: seconds of the latest step: computing, waiting, selecting, communicating, applying.

    Raises:
        ConfigError: inner, model and exchange do not fit together; the text says what to change.
    """

    shares_scale = True  # a GradScaler's scale has to be equal on all workers
    local_calls = 0  # of `step` in this turn, without an exchange yet
    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to `step`

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        exchange: Exchange | LocalSteps | Auto,
        session: TrainingSession,
        *,
        clip_norm: float | None = None,
        average_buffers_every: int = 0,
        compare_every: int = 0,
        overlap: Overlap | None = None,
    ) -> None:
        check_compatible(inner, exchange, clip_norm)
        self._wrap(inner)
        self.model = model
        self.exchange_config = exchange
        self.replicated = inner
        self._session = session
        self._clip_norm = clip_norm
        self._flat = FlatGradient(model, inner)
        self.overlap_config = overlap
        self._overlapper: Overlapper | None = None
        bounds: Bounds = (0, self._flat.n)
        wire, device = round_exchange(exchange), self._flat.flat_N.device
        self._exchanger: Exchanger
        if isinstance(wire, Auto):
            self._exchanger = AutoExchanger(wire, bounds, device)
        else:
            self._exchanger = make_exchanger(wire, bounds, device)
            if overlap is not None:
                self._overlapper = make_overlapper(self._flat, self._exchanger, session, overlap, wire)
        self.buffer_averaging = BufferAveraging(model, average_buffers_every)
        self._trackers: dict[str, serialization.Stateful] = {}
        self.compare_every = compare_every
        self._step = -1
        self._compare_next = False
        self._has_exchanged = False
        self._pending_attempt = PendingAttempt()
        self._backwards = 1
        self._turn_start: TurnStartState | None = None  # the turn that is under way
        self._micro_batches_given: TurnStartState | None = (
            None  # the same, while the round may hand this worker's state out
        )
        self.skipped_steps = 0
        self.last_skipped = self.last_overflowed = False
        self.timings: dict[str, float] = {}
        self._stopwatch = _Stopwatch()

    def describe_exchange(self) -> str:
        """For comparison and for people: what all workers must have alike."""
        buckets = self.overlap_config.describe() if self.overlap_config is not None else ""
        return self.exchange_config.describe() + buckets

    def set_backwards_per_step(self, count: int) -> None:
        """So many backward passes are one step: with overlap, gradients are complete after the last."""
        self._backwards = count
        if self._overlapper is not None:
            self._overlapper.backwards = count

    @property
    def is_overlapping(self) -> bool:
        """Whether steps are cut and sent early now, trials apart."""
        return self._overlapper is not None and self._overlapper.is_active

    # -- what an Optimizer is --------------------------------------------------------------------

    @property
    def flat_size(self) -> int:
        """Of the flat gradient."""
        return self._flat.n

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "a parameter group was added after the optimizer was wrapped, when the flat layout is fixed",
            remedy="add all groups to the inner optimizer before grid.optimizer(...)",
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Exchange (unless `exchange()` was called), then apply the committed update."""
        if closure is not None:
            raise ConfigError(
                "step() was called with a closure; a gradient is exchanged once and cannot be re-evaluated",
                remedy="call loss.backward() and then optimizer.step()",
            )
        if not self._has_exchanged:
            self._exchange()
        self._has_exchanged = False
        self._apply()

    # -- turns: what `Grid` hands out for one step of the run ---------------------------------------

    @property
    def calls_per_turn(self) -> int:
        """How often `step` is called in one step of the run."""
        return 1

    def begin_turn(self, trained: int) -> None:
        """`trained`: so many of the turn's calls are for samples; the others are for stand-ins."""
        if self._backwards > 1:  # a loop may step its scheduler for each of them
            self._turn_start = TurnStartState.capture(self.inner, self._trackers, averages=False)

    def begin_micro_batch(self, number: int, weights: Sequence[float]) -> None:
        """The loop is given a step's micro-batch of this number, and divides each one's loss by how many
        there are.  What it has accumulated is scaled, so that they count by their weights; the last factor,
        of at most 1 where weights never rise, is left to the step, so that a clipped gradient stays so."""
        self._flat.rescale(weights[number - 1] / weights[number] if number else 1.0)
        self._flat.scale = len(weights) * weights[-1] / math.fsum(weights)

    # -- the group's step ------------------------------------------------------------------------

    def exchange(self) -> bool:
        """Replace every `p.grad` by the group's committed update; `step` then only applies it.

        Returns False if the step is skipped: gradients are as they were, and `step` will not apply them.
        With a GradScaler call `scaler.unscale_(optimizer)` first.
        """
        self._session.disable_replay("its script may change updates between exchange() and step()")
        return self._exchange()

    def _exchange(self) -> bool:
        if self._has_exchanged:
            raise ConfigError(
                "exchange() was called twice for one step",
                remedy="call optimizer.step() after each optimizer.exchange()",
            )
        early = None
        if self._overlapper is not None:
            check_no_scaler(self)
            early = self._overlapper.take_sent()
        else:
            self._flat.gather()
        overflowed = self._unscale()
        self._run_attempts(not overflowed, early)
        self._has_exchanged = True
        return not self.last_skipped

    def _run_attempts(self, usable: bool, early: EarlyBuckets | None = None) -> None:
        """Attempts at one step until one commits; the local gradient in flat_N stays until then.

        Args:
            usable: False: it is known not to be finite.
            early: the plan for which buckets are under way already, and these.
        """
        self._micro_batches_given = self._turn_start
        try:
            self._iterate_attempts(usable, early)
        finally:
            self._micro_batches_given = self._turn_start = None

    def _iterate_attempts(self, usable: bool, early: EarlyBuckets | None) -> None:
        self._stopwatch.lap("computing_s")
        attempt: ExchangeAttempt | None = None
        averages = compared = before = tried = None
        while True:
            plan = self._session.begin()
            self._stopwatch.lap("waiting_s")
            if plan is None:
                self.last_skipped, self.last_overflowed = True, False
                return
            fresh = before is None or plan.attempt == 0 or replace(plan, attempt=before.attempt) != before
            before = plan
            if attempt is None or fresh or not attempt.is_resumable:
                sent = early[1] if early is not None and early[0] is plan else {}
                early = None
                attempt = self._prepare(plan, usable or plan.samples == 0, sent)
            if fresh:  # else the rings go on from what has arrived
                averages = self.buffer_averaging.make_collective_buffer(plan)
                tried = self._overlapper.make_trial_buffer(plan) if self._overlapper is not None else None
            if fresh or compared is None:
                compared = hyperparameter_check.make_hyperparameter_buffer(plan, self.inner)
            # A retry adds what is compared: behind the others, whose channels stay what they are.
            extra = [each for each in (averages, tried, compared) if each is not None]
            self._stopwatch.lap("selecting_s")
            settings_text = serialization.hyperparameters_json(self.inner)
            self._pending_attempt.mark_sent(attempt)
            outcome = self._session.run(plan, [attempt.buffer, *extra], attempt.skip, settings_text)
            self._stopwatch.lap("communicating_s")
            if outcome.is_committed:
                break
            self._pending_attempt.mark_ended()
            if compared is not None:
                self._check_hyperparameters(plan, compared)
        self.last_skipped = self.last_overflowed = outcome.is_skipped
        self._step, self._compare_next = plan.step, plan.compare_after
        if outcome.is_skipped:
            self._pending_attempt.mark_ended()
            self.skipped_steps += 1
            return
        if averages is not None:
            self.buffer_averaging.apply(averages)
        if tried is not None and self._overlapper is not None:
            self._overlapper.finish_trial(plan, tried)
        self._load_update(self._pending_attempt.commit(self._exchanger, attempt))

    def _check_hyperparameters(self, plan: StepPlan, compared: DenseRingBuffer) -> None:
        try:
            hyperparameter_check.check_hyperparameters(plan, compared)
        except ConfigError as error:
            self._session.close(error.reason)  # at once: the others need not wait for the script's end
            raise

    def _prepare(self, plan: StepPlan, usable: bool, sent: Mapping[int, ExchangeAttempt]) -> ExchangeAttempt:
        """This worker's part; `sent`: buckets of it that are under way already."""
        attempts = []
        mine = self._exchanger if self._overlapper is None else self._overlapper.exchanger(plan)
        for bucket, (start, stop) in enumerate(pairwise(mine.bounds)):
            attempt = sent.get(bucket)
            if attempt is None:
                gradient_B = self._flat.flat_N[start:stop]
                attempt = mine.prepare_bucket(bucket, gradient_B, plan, usable=usable)
            attempts.append(attempt)
        return join_attempts(mine.bounds, attempts)

    def _apply(self) -> None:
        if not self.last_skipped:
            self.inner.step()
        self._compare()
        self._stopwatch.lap("applying_s")
        self.timings = self._stopwatch.reset()
        if self._overlapper is not None:
            within_s = self._overlapper.end_step()
            self.timings["selecting_s"] = self.timings.get("selecting_s", 0.0) + within_s
            self.timings["computing_s"] = self.timings.get("computing_s", 0.0) - within_s
        self._session.report_figures(self.timings)

    def _compare(self) -> None:
        step, self._step = self._step, -1
        due = self._compare_next or (self.compare_every and (step + 1) % self.compare_every == 0)
        if step >= 0 and self.compare_every and due:
            self._session.report_digest(step, serialization.replica_digest(self.model, self.replicated))

    def _unscale(self) -> bool:
        """What GradScaler leaves to an optimizer that declares `_step_supports_amp_scaling`.

        Returns whether it found a gradient that is not finite.
        """
        scale: Tensor | None = getattr(self, "grad_scale", None)  # None: already unscaled, or no scaler
        if scale is not None:
            self._flat.flat_N.mul_(1.0 / float(scale))
        return float(getattr(self, "found_inf", 0.0)) > 0.0

    # -- what has to be equal on all workers ------------------------------------------------------

    def hyperparameter_digest(self) -> bytes:
        """32-byte digest of learning rates, weight decays, ... of all groups.

        Part of every vote: a learning rate that one worker's scheduler changed alone forks no replica.
        """
        return serialization.hyperparameter_digest(self.inner)

    def track(self, **trackers: serialization.Stateful) -> None:
        """Put schedulers, averages and the like into what a joining worker receives.  All workers alike."""
        self._trackers.update(trackers)

    def capture_state(self, whole: bool = True) -> Sequence[bytes | memoryview]:
        """The replicated state; see `state_sync.capture`."""
        return serialization.capture_state(self.model, *self._turn_start_view(), whole=whole)

    def initial_digest(self) -> bytes:
        """Digest of what `capture` gives, before the first step; see `state_sync.begins`."""
        return serialization.initial_digest(self.model, self.replicated, self._trackers)

    def copy_state(self) -> serialization.StateCopy:
        """The same, without making bytes of it yet."""
        return serialization.copy_state(self.model, *self._turn_start_view())

    def _turn_start_view(self) -> tuple[torch.optim.Optimizer, serialization.Trackers]:
        """What stands for optimizer and trackers in a state that is given away now."""
        before = self._micro_batches_given
        return (
            (self.replicated, self._trackers)
            if before is None
            else before.apply_to(self.replicated, self._trackers)
        )

    def replay_update(self, step: StepUpdate) -> None:
        """What the members did in a step in which this worker did not take part.

        Raises:
            RemoteProtocolError: it cannot be replayed; the model is of no use then.
        """
        if step.update is None:
            return
        try:
            _, groups = json.loads(step.settings)
            serialization.load_hyperparameters(self.inner, groups)
            self._load_update(step.update)
            self.replicated.step()
        except Exception as error:  # other people's code, given what a peer made up: it may raise anything
            text = f"step {step.step} cannot be replayed: {type(error).__name__}: {error}"
            raise RemoteProtocolError(text, remedy="take the whole state") from error
        self.inner.zero_grad()

    def _load_update(self, update: npt.NDArray[np.float32] | SparseVector) -> None:
        """The update into every `p.grad`, clipped."""
        self._flat.load_update(update)
        if self._clip_norm is not None:
            self._flat.flat_N.mul_(min(1.0, self._clip_norm / (l2_norm(update) + 1e-6)))
        self._flat.scatter()

    def restore_state(self, blobs: bytes | memoryview | Sequence[bytes | memoryview]) -> None:
        """Take over another worker's `capture`; see `state_sync.restore`."""
        serialization.restore_state(blobs, self.model, self.replicated, self._trackers)

    def capture_turn_state(self) -> Callable[[], None]:
        """See `set_back.Trained`."""
        own = self.capture_state(whole=False)
        return lambda: self.restore_state(own)

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `state_sync.pack`; for checkpoints."""
        return serialization.pack_state(self.model, self.replicated, self._trackers)

    def unpack(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `pack` copied; raises `RemoteProtocolError` if it does not fit."""
        serialization.unpack_state(document, tensors, self.model, self.replicated, self._trackers)

    def residual_state(self) -> dict[str, Tensor]:
        """What this worker has not yet sent; empty for `Dense`.  Not part of `state_dict`: not replicated."""
        feedback = self._exchanger.feedback
        return {} if feedback is None else feedback.state()

    @property
    def residual_size(self) -> int:
        """Elements of the residual; 0: the exchange keeps nothing back."""
        keeps = self._exchanger.feedback is not None or self.can_choose_sparse
        return self._flat.n if keeps else 0

    @property
    def choices(self) -> Sequence[Exchange]:
        """What the coordinator may choose; empty: the script has."""
        return (*self._exchanger.choices.values(),) if isinstance(self._exchanger, AutoExchanger) else ()

    @property
    def current_exchange(self) -> Exchange | LocalSteps | None:
        """What the latest step used; None: nothing is chosen yet."""
        if isinstance(self._exchanger, AutoExchanger):
            return self._exchanger.current_exchange
        return self.exchange_config if not isinstance(self.exchange_config, Auto) else None

    @property
    def can_choose_sparse(self) -> bool:
        """The coordinator may choose an exchange that keeps something back."""
        return any(each.sparse for each in self.choices)

    def _open_feedback(self) -> ErrorFeedback | None:
        mine = self._exchanger
        return (
            mine.open_feedback()
            if isinstance(mine, AutoExchanger) and self.can_choose_sparse
            else mine.feedback
        )

    def take_residual(self, settle: Callable[[], RoundOutcome | None]) -> npt.NDArray[np.float32] | None:
        """The residual of a worker that takes no further step; see `InFlight.surrender`."""
        if self._exchanger.feedback is None and self.residual_size:
            return np.zeros(self.residual_size, np.float32)  # a sparse exchange may be chosen; none is now
        return self._pending_attempt.take_residual(self._exchanger, settle)

    def add_residual(self, entries: SparseVector, world_size: int) -> bool:
        """Add what another worker had not sent, between two rounds; False: it cannot be, and is dropped."""
        return add_residual(self._open_feedback(), entries, world_size)

    def clear_residual(self) -> None:
        """What was not sent belongs to another life of this worker."""
        self._pending_attempt.clear()
        if isinstance(self._exchanger, AutoExchanger):
            self._exchanger.clear()
        elif self._exchanger.feedback is not None:
            self._exchanger.feedback.clear()

    def load_residual_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over `residual_state` of the same model and exchange; raises `ConfigError` otherwise."""
        feedback = self._open_feedback()
        if feedback is not None:
            feedback.load(state)


class _Stopwatch:
    """Laps of one step by name, in seconds; time outside of steps counts as the next one's first lap."""

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
    """Raise `ConfigError` if these cannot train together; called by what the user has called."""
    name = type(inner).__name__
    if isinstance(inner, GridOptimizer):
        raise ConfigError("the optimizer is already wrapped", remedy="call grid.optimizer(...) once")
    if isinstance(inner, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigError(f"{name} cannot take its gradients from a group", remedy="use SGD or AdamW")
    if clip_norm is not None and not 0.0 < clip_norm < math.inf:
        raise ConfigError(f"clip_norm is {clip_norm}; it must be > 0 and finite", remedy="try clip_norm=1.0")
    if isinstance(exchange, Dense | LocalSteps | Auto):
        return
    momentum = max(float(group.get("momentum", 0.0)) for group in inner.param_groups)
    if momentum and exchange.momentum:
        raise ConfigError(
            f"{name} has momentum {momentum} and {exchange.describe()} corrects for momentum, too",
            remedy=f"keep the exchange's and build {name} with momentum=0",
        )
    if "betas" in inner.defaults:
        warnings.warn(
            f"{name} after a sparse exchange learns badly, most elements of an update being zero -> "
            "use exchange=Dense(), SGD with GTopK(momentum=0.9), or LocalSteps(every=32, exchange=GTopK())",
            stacklevel=4,  # the line that called grid.optimizer(...)
        )


def l2_norm(update: npt.NDArray[np.float32] | SparseVector) -> float:
    """2-norm, summed in float64 on the host: equal on all workers whatever their number of threads."""
    values = update.values if isinstance(update, SparseVector) else update
    blocks = (values[i : i + _NORM_BLOCK].astype(np.float64) for i in range(0, values.size, _NORM_BLOCK))
    return math.sqrt(math.fsum(float(np.square(block).sum()) for block in blocks))
