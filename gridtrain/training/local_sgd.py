"""`LocalSteps`: each worker trains alone for some steps, and then the changes in the parameters are averaged.

The change in the parameters is exchanged like a gradient; `GridOptimizer` handles the residual, the vote and
retries.

    anchor                parameters after the last committed round, bit-identical on all workers
      |  inner.step()     `every` times, each worker with its own gradients and moments
      v
    local parameters      change_N = (anchor - local) * share;  parameters = anchor
                             |
                             +--> round (Dense, TopK, GTopK; error feedback)  --> update_N on all workers
    next anchor  <-------- anchor - outer_learning_rate * nesterov(update_N)

The share is this worker's fraction of the step's samples or tokens.

Based on DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1); sparse exchanges are as in SparseLoCo
(Sarfi et al. 2025, arXiv 2508.15706).  After each committed round, the parameters and the outer velocity are
equal on all workers; their digests are compared, and newcomers receive them.  The moments of the inner
optimizer differ from worker to worker and are not sent.

A state that a newcomer requests during a turn is captured after the next local step, with the anchor as its
parameters, and with the settings and trackers from the start of the turn (`turn_start_state`).  The
parameters are reset to the anchor *before* the round begins.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gridtrain.config import LocalSteps
from gridtrain.errors import ConfigError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.group_session import GroupSession
from gridtrain.sparsify.error_feedback import add_at
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.flat_gradient import FlatGradient, finish_queued_work
from gridtrain.training.checkpoint.frozen_base import state_parameters
from gridtrain.training.exchangers import largest_magnitude
from gridtrain.training.optimizer import GridOptimizer, check_applied, interrupted_error
from gridtrain.training.parameter_watch import ParameterWatch
from gridtrain.training.turn_start_state import capture_turn_start
from gridtrain.training.wrapping_optimizer import WrappingOptimizer

log = logging.getLogger("gridtrain")

_ZERO_TIMINGS = dict.fromkeys(("waiting_s", "selecting_s", "communicating_s", "applying_s"), 0.0)


class OuterOptimizer(WrappingOptimizer):
    """Applies a committed update to the parameters; its state is the same on all workers.

    Its groups are those of the inner optimizer, so that learning rates are sent and compared as usual.  Its
    state is the velocity, (n,) float32; without momentum, the state is empty.

    Args:
        flat: the flat gradient; updates have the same layout.

    Attributes:
        update: the committed update that `step` applies, (n,) float32 or sparse.
    """

    update: npt.NDArray[np.float32] | SparseVector | None = None

    def __init__(self, inner: torch.optim.Optimizer, flat: FlatGradient, exchange: LocalSteps) -> None:
        self._wrap(inner)
        self._flat = flat
        self._rate, self._momentum = exchange.outer_learning_rate, exchange.outer_momentum
        self._velocity_N = torch.zeros_like(flat.flat_N) if self._momentum else None

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {} if self._velocity_N is None else {0: {"velocity": self._velocity_N}}

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": self.inner.state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the velocity and the groups from `state_dict`.  Raises `ValueError` if it is not the state of
        an `OuterOptimizer`, if its velocity has a different shape or dtype, or if the state has a velocity
        and this optimizer has none, or vice versa."""
        velocity_N = _velocity_of(state_dict["state"])
        mine_N = self._velocity_N
        if (velocity_N is None) != (mine_N is None):
            raise ValueError("only one of the two states has an outer velocity")
        if velocity_N is not None and mine_N is not None:
            found = velocity_N.shape, velocity_N.dtype
            if found != (mine_N.shape, mine_N.dtype):
                raise ValueError(f"the outer velocity's shape or dtype differs: {found}")
        own = self.inner.state_dict()["state"]
        self.inner.load_state_dict({"state": own, "param_groups": state_dict["param_groups"]})
        serialization.keep_dtypes(self.inner, own)
        if velocity_N is not None and mine_N is not None:
            mine_N.copy_(velocity_N)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply `update` as torch's SGD applies a gradient with Nesterov momentum (Sutskever et al. 2013).

        Multiplication and addition are separate operations, because the rounding of a fused operation depends
        on the number of threads, and all workers must get the same bits.
        """
        update, self.update = self.update, None
        assert update is not None
        parameters = self._flat.parameters
        is_plain = self._velocity_N is None and all(p.dtype == torch.float32 for p in parameters)
        sparse = update if is_plain and isinstance(update, SparseVector) else None
        for part, (parameter,) in self._flat.blocks(parameters, divided=sparse is None):
            if sparse is not None and parameter.is_contiguous():
                where_K, values_K = _entries_of(sparse, part, parameter.device)
                add_at(parameter.view(-1), where_K, values_K.mul(self._rate), factor=-1)
                continue
            step_B = _part_of(update, part, self._flat.flat_N.device)
            if self._velocity_N is not None:
                velocity_B = self._velocity_N[part].mul_(self._momentum).add_(step_B)
                step_B.add_(velocity_B * self._momentum)
            if self._rate != 1.0:
                step_B.mul_(self._rate)
            subtract(parameter, step_B.view_as(parameter), parameter)


class LocalSGDOptimizer(GridOptimizer):
    """A `GridOptimizer` that exchanges once every `exchange.every` calls to `step`.

    `param_groups`, `state` and `state_dict` are the inner optimizer's.  Clip the local gradients between
    `backward()` and `step`, as you would when training alone.

    It takes the arguments of `GridOptimizer`, but raises `ConfigError` unless `clip_norm` and `overlap` are
    None.

    Attributes:
        replicated: the outer optimizer.
        local_calls: the number of calls to `step` since the last exchange.
    """

    shares_scale = False
    replicated: OuterOptimizer

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        exchange: LocalSteps,
        session: GroupSession,
        **options: Any,
    ) -> None:
        if options.get("overlap") is not None:
            raise ConfigError(
                "overlap was set with LocalSteps, which exchanges no gradient that could be sent early",
                remedy="remove the argument overlap=",
            )
        if (clip_norm := options.get("clip_norm")) is not None:
            raise ConfigError(
                f"clip_norm={clip_norm} was set with LocalSteps, which exchanges no gradient to clip",
                remedy="clip each worker's gradient: clip_grad_norm_(...) between backward() and step()",
            )
        super().__init__(inner, model, exchange, session, **options)
        self.calls_per_turn = exchange.every
        self.replicated = OuterOptimizer(inner, self._flat, exchange)
        self._initial_moments = copy.deepcopy(inner.state_dict()["state"])
        device = self._flat.flat_N.device
        self._anchor = [torch.empty_like(p.detach(), device=device) for p in self._flat.parameters]
        self.local_calls = 0
        self._calls_with_samples = self.calls_per_turn
        self._calls_left: int | None = None  # calls until the turn ends; None outside of turns
        self._has_anchor = False  # from a turn's first local step until the turn's update is applied
        self._is_anchor_own = True  # whether the script has left the anchor's values unchanged
        frozen = [p for _, p in state_parameters(model) if not p.requires_grad]  # `send_frozen`; not anchored
        self._frozen_watch = ParameterWatch(model, frozen) if frozen else None
        self._computing_s = 0.0

    # -- turns ---------------------------------------------------------------------------------------

    def begin_turn(self, calls_with_samples: int) -> None:
        self.local_calls, self._calls_left = 0, self.calls_per_turn
        self._calls_with_samples = calls_with_samples
        self._has_anchor = False
        self.weights.begin_turn()
        self._statistics.save()
        self._save_turn_start()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of the inner optimizer; the last call in a turn also exchanges the change in the
        parameters.

        Raises:
            ConfigError: `step` was called with a closure, before all of its batches were requested, more than
                `exchange.every` times in a turn, or, if steps are weighted by tokens, without a weight; or
                the script trains parameters that were frozen when the optimizer was wrapped.
        """
        if closure is not None:
            super().step(closure)  # raises ConfigError
        if self._calls_left == 0:
            every = self.calls_per_turn
            raise ConfigError(
                f"optimizer.step() was called {every + 1} times for a step's {every} batches",
                remedy="call optimizer.step() once per batch, or once per N batches with "
                "grid.batches(..., accumulate=N)",
            )
        check_applied(self.unapplied_step)
        self._check_batches()
        self._calls_left = None if self._calls_left is None else self._calls_left - 1
        if self.local_calls == 0:
            self._save_anchor()
        self.local_calls += 1
        self.weights.take(self.local_calls <= self._calls_with_samples)
        self._leave_out_stand_ins()
        self._local_step()
        if self.local_calls < self.calls_per_turn:
            self._report_speed()
            self._report_local()
        else:
            self._global_step()

    @property
    def is_unchanged(self) -> bool:
        return self._calls_left == self.calls_per_turn and super().is_unchanged

    @torch.no_grad()
    def abort_turn(self) -> None:
        super().abort_turn()
        self.local_calls = 0  # the parameters are the anchor, and a state that is loaded next replaces both
        if self._has_anchor:  # otherwise the parameters have not changed in this turn
            for anchor, parameter in zip(self._anchor, self._flat.parameters, strict=True):
                parameter.copy_(anchor)
            self.parameter_watch.record()

    @torch.no_grad()
    def apply_update(self, update: npt.NDArray[np.float32] | SparseVector) -> None:
        super().apply_update(update)
        if self._has_anchor:  # in a turn: `abort_turn` must not undo the missed step
            self._copy_to_anchor()

    def resume(self) -> None:
        if self._has_anchor and self._is_applied and self._has_changed_frozen:
            raise interrupted_error(self._session.step, "its script changes frozen parameters in local steps")
        super().resume()

    @property
    def _has_changed_frozen(self) -> bool:
        """Whether frozen parameters of the state have changed since the turn's first local step."""
        return self._frozen_watch is not None and self._frozen_watch.is_written

    def exchange(self) -> bool:
        raise ConfigError(
            "optimizer.exchange() was called with LocalSteps, which exchanges no gradient",
            remedy="call optimizer.step() only; clip between loss.backward() and optimizer.step()",
        )

    # -- local steps -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _save_anchor(self) -> None:
        """Save the parameters as the anchor.  This is done in the first local step of a turn, because a state
        may have been loaded since the previous step."""
        self._check_script_changes(self.parameter_watch.is_written)
        if self._calls_left is None:
            self._save_turn_start()
        self._copy_to_anchor()
        self._is_anchor_own = not self.parameter_watch.has_changed
        if self._frozen_watch is not None:
            self._frozen_watch.record()
        self._has_anchor = True

    def _copy_to_anchor(self) -> None:
        for anchor, parameter in zip(self._anchor, self._flat.parameters, strict=True):
            anchor.copy_(parameter)

    def _local_step(self) -> None:
        self._flat.check_unchanged()
        overflowed = self._unscale(self._flat.rescale)
        if not overflowed and self.local_calls <= self._calls_with_samples:
            self._flat.rescale(self._flat.scale)
            with self._own_changes():
                self.inner.step()
        self.last_skipped = overflowed

    def _report_speed(self) -> None:
        """Report this turn's compute figures so far, at the interval of heartbeats and before the turn's
        stand-ins."""
        calls = self._calls_with_samples
        is_due = self.local_calls < calls and self._session.is_computing_unreported
        if is_due or self.local_calls == calls:
            self._finish_local_steps()
            self._session.finish_computing(self.local_calls / calls)

    def _report_local(self) -> None:
        self._stopwatch.lap("computing_s")
        laps_s = self._stopwatch.reset()
        self._computing_s += laps_s["computing_s"]
        self.timings = _ZERO_TIMINGS | laps_s
        self._session.report_figures({})  # shows progress; the other workers may already wait in the round
        if self._turn_start is not None:
            self._session.serve_state(lambda: not self._has_changed_frozen)

    def _finish_local_steps(self) -> None:
        """Wait for the local steps on a GPU, so that the measured speed includes them."""
        finish_queued_work(self._flat.parameters[0].device)

    # -- the exchange ------------------------------------------------------------------------------------

    def _global_step(self) -> None:
        self.local_calls = 0
        with self._own_changes():
            finite = self._compute_delta()
        if not finite:
            self._reset_inner()
        self._run_attempts(finite)
        self._apply()

    def _end_step(self) -> None:
        super()._end_step()
        self._has_anchor = False

    @contextmanager
    def _own_changes(self) -> Iterator[None]:
        """Record that changes of the parameters in the `with` block are not the script's, even if the block
        is interrupted.  Do nothing if the script has changed frozen parameters, which `abort_turn` cannot
        restore."""
        self._is_anchor_own = self._is_anchor_own and not self._has_changed_frozen
        try:
            yield
        finally:
            if self._is_anchor_own:
                self.parameter_watch.record()

    @torch.no_grad()
    def _compute_delta(self) -> bool:
        """Set flat_N = anchor - parameters, then parameters = anchor; return whether flat_N is finite."""
        sums: list[Tensor] = []
        for part, (parameter, anchor) in self._flat.blocks(self._flat.parameters, self._anchor):
            delta = self._flat.flat_N[part].view_as(parameter)
            subtract(anchor, parameter, delta)
            parameter.copy_(anchor)
            sums.append(delta.sum())
        return is_finite(self._flat.flat_N, sums)

    def _reset_inner(self) -> None:
        """Reset the inner optimizer's moments to their initial values, and the running statistics to those
        before the turn.  Like the local parameters, both usually contain values that are not finite."""
        self._statistics.restore()
        log.warning(
            "this worker's parameters are not finite after %d local steps: the group skips the step, and "
            "this worker's %s restarts with new moments and the group's parameters",
            self.calls_per_turn,
            type(self.inner).__name__,
        )
        self._load_moments(copy.deepcopy(self._initial_moments))  # a copy, because training changes it

    def _take_turn_timings(self) -> dict[str, float]:
        computing_s, self._computing_s = self.timings.get("computing_s", 0.0) + self._computing_s, 0.0
        return self.timings | {"computing_s": computing_s}

    def _load_update(self, update: npt.NDArray[np.float32] | SparseVector) -> None:
        """Store the update in the outer optimizer; leave the parameters' gradients unchanged."""
        self.replicated.update = update

    # -- the state that is sent --------------------------------------------------------------------------

    @property
    def _anchors(self) -> Mapping[Tensor, Tensor]:
        return dict(zip(self._flat.parameters, self._anchor, strict=True)) if self.local_calls else {}

    def _save_turn_start(self) -> None:
        """Save the optimizer settings and the trackers at the start of a turn.  Weight averages are copied,
        too, because the script may update them after each local step."""
        self._turn_start = capture_turn_start(self.inner, self.trackers, averages=True)

    # -- this worker's own part of a checkpoint ----------------------------------------------------------

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Pack the state as `GridOptimizer` does, together with the inner optimizer's moments, for this
        worker's own disk.  The moments are left out after `abort_turn` if they contain the aborted local
        steps."""
        document, tensors = super().pack()
        if self._has_anchor:
            return document, tensors
        moments = serialization.pack_private({"state": self.inner.state_dict()["state"]}, tensors)
        return document | {"moments": moments}, tensors

    def unpack(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().unpack(document, tensors)
        if "moments" not in document:
            return
        try:
            self._load_moments(serialization.unpack_private(document["moments"], tensors)["state"])
        except Exception as error:  # a user's optimizer may raise anything
            text = f"the moments of {type(self.inner).__name__} do not match: {type(error).__name__}: {error}"
            raise RemoteProtocolError(text, remedy="build the same optimizer as before") from error

    def _load_moments(self, state: Any) -> None:
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        serialization.keep_dtypes(self.inner, state)


@torch.no_grad()
def subtract(a: Tensor, b: Tensor, result: Tensor, factor: float = 1.0) -> None:
    """Set result = a - factor * b, computed in at least float32.  The tensors may differ in dtype and device.
    With a factor other than 1, the rounding may depend on the processor."""
    if a.dtype == b.dtype == result.dtype == torch.float32 and a.device == b.device == result.device:
        torch.sub(a, b, alpha=factor, out=result)  # no temporary tensor
    else:
        result.copy_(_to_float32(a).sub(_to_float32(b).to(a.device), alpha=factor))


def is_finite(values_N: Tensor, sums: Sequence[Tensor]) -> bool:
    """Whether all values are finite.

    Args:
        sums: for each block of the values, the sum of its elements.
    """
    # A sum is finite only if its terms are, but finite terms may add up to infinity.
    is_certain = bool(torch.isfinite(torch.stack(list(sums))).all())
    return is_certain or math.isfinite(largest_magnitude(values_N))


def _part_of(update: npt.NDArray[np.float32] | SparseVector, part: slice, device: torch.device) -> Tensor:
    """Return a dense copy of a part of an update."""
    if not isinstance(update, SparseVector):
        return torch.from_numpy(update[part]).to(device, copy=True)
    step_B = torch.zeros(part.stop - part.start, dtype=torch.float32, device=device)
    add_at(step_B, *_entries_of(update, part, device))
    return step_B


def _entries_of(update: SparseVector, part: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the entries in a part of a sparse update: their indices in this part, and their values."""
    first, last = np.searchsorted(update.indices, (part.start, part.stop))
    where_K = torch.from_numpy(update.indices[first:last] - part.start)
    return where_K.to(device), torch.from_numpy(update.values[first:last]).to(device)


def _to_float32(values: Tensor) -> Tensor:
    """Return the values, detached and in at least float32, because the difference of two bfloat16 values
    needs more precision."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.detach().to(wide)


def _velocity_of(state: Any) -> Tensor | None:
    """Return the velocity in `state`, or None if `state` is empty; raise `ValueError` if `state` is not the
    state of an `OuterOptimizer`."""
    if state == {}:
        return None
    match state:
        case {0: {"velocity": Tensor() as velocity_N, **others}, **more} if not others and not more:
            return velocity_N
    raise ValueError("the outer optimizer's state is not a single velocity")
