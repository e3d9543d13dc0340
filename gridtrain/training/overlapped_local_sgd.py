"""`LocalSteps(overlap=t)`: exchanges one turn's changes during the next turn's first t local steps.

    A       the anchor: the parameters after the last committed round, equal on all workers
    D_r     the change that turn r has made on this worker so far
    share   the fraction of its own latest change that a worker keeps when it begins a turn (`kept_share`)

    turn r begins           D_(r-1) is submitted to round r;  parameters = A - share * D_(r-1);  D_r = 0
    local steps 1 to t      the parameters change;  meanwhile the group exchanges D_(r-1)
    after local step t      the worker waits until round r is committed, and applies its update:
                            A = A - outer_learning_rate * nesterov(update);  parameters = A - D_r
    after the last step     D_r is stored for the next round;  parameters = A

A worker thus applies a share of its own latest change immediately, and the changes of the other workers t
local steps later.  They are applied at the same local step on all workers, so that a run is determined by its
seeds.

Based on Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), which mixes local and global parameters,
and on eager updates (Kale et al. 2025, arXiv 2502.12996).  Unlike in Streaming DiLoCo, all parameters are
exchanged in one round.

Between two turns, the parameters are the anchor, so states, checkpoints and comparisons work as in
`local_sgd`.  The data ledger counts the samples of a turn when its change is committed (`LedgerSpec.delay`).
If the first attempt at round r is aborted, the next attempts are made after local step t.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.config import LocalSteps
from gridtrain.runtime.group_session import GroupSession
from gridtrain.training.checkpoint.joint_optimizer import JointOptimizer
from gridtrain.training.local_sgd import LocalSGDOptimizer, is_finite, subtract

log = logging.getLogger("gridtrain")


class OverlappedLocalSGDOptimizer(LocalSGDOptimizer):
    """A `LocalSGDOptimizer` whose rounds overlap with the next turn.

    It takes the arguments of `LocalSGDOptimizer`.  `wait="auto"` has no effect: a round waits only for
    workers that have not finished the previous turn, so that a stall delays no other worker if the stall and
    the exchange together take less time than the overlapped local steps.
    """

    delay = 1

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        exchange: LocalSteps,
        session: GroupSession,
        **options: Any,
    ) -> None:
        if options.get("wait") == "auto":
            log.info('wait="auto" has no effect with LocalSteps(overlap=...)')
            options["wait"] = "all"
        super().__init__(inner, model, exchange, session, **options)
        self._overlapped_steps = exchange.overlapped_steps
        # Between two turns, the change of the latest turn.  During a turn, that change is in flat_N until it
        # is committed, and this vector is unused.
        flat_N = self._flat.flat_N
        self._change_N = torch.zeros_like(flat_N, pin_memory=flat_N.is_pinned())
        self._is_change_finite = True
        self._kept_share = 1.0  # the turn starts at anchor - this share of the change in flat_N
        self._is_repeating = False
        self._step_settings = inner

    # -- turns ---------------------------------------------------------------------------------------

    def begin_turn(self, calls_with_samples: int) -> None:
        """Submit the change of the previous turn, and begin the next turn with a share of this change."""
        super().begin_turn(calls_with_samples)
        self._is_repeating = False
        self._stopwatch.lap("computing_s")
        self._step_settings = _copy_settings(self.inner)
        plan = self._session.predict_plan()  # None: after an aborted attempt, which is repeated later
        self._change_N = self._flat.swap(self._change_N)
        is_counted = plan is None or plan.samples > 0  # False if this worker has left the group
        if not (is_counted and self._is_change_finite):
            self._flat.flat_N.zero_()
        self._kept_share = kept_share(1 if plan is None else plan.world_size)
        self._set_parameters_to_start()
        if plan is not None:
            self._send_step(plan, usable=self._is_change_finite)
        self._stopwatch.lap("selecting_s")

    def end_empty_turn(self) -> None:
        """End a turn in which no worker has samples: only the change of the previous turn is exchanged."""
        self._calls_left = 0
        self._exchange_latest()

    def begin_repeated_turn(self, calls_with_samples: int) -> None:
        """Begin a turn that starts at the anchor and exchanges nothing; the next turn submits its change."""
        super().begin_turn(calls_with_samples)
        self._is_repeating = True
        self._flat.flat_N.zero_()
        self._set_parameters_to_start()

    def _save_anchor(self) -> None:
        """Do nothing: the anchor was saved at the start of the turn."""

    # -- the exchange --------------------------------------------------------------------------------

    def _report_local(self) -> None:
        if self.local_calls != self._overlapped_steps or self._is_repeating:
            super()._report_local()
            return
        overflowed = self.last_skipped
        self._finish_local_steps()
        self._session.pause_computing(min(1.0, self.local_calls / max(1, self._calls_with_samples)))
        self._exchange_latest()
        # From here on, the change is measured from the new anchor.
        self._change_N = self._flat.swap(self._change_N)
        self._kept_share = 1.0
        self._set_parameters_to_start()
        self._kept_share = 0.0
        self.last_skipped = overflowed
        self._session.resume_computing()

    def _global_step(self) -> None:
        self.local_calls = 0
        if self._is_repeating or self._overlapped_steps < self.calls_per_turn:  # already exchanged
            self._finish_local_steps()
            self._session.finish_computing()
            super()._report_local()
            self._keep_change()
            self.parameter_watch.record_step()
            self._is_repeating = self.last_skipped = False
        else:
            self._exchange_latest()
        if not self._is_change_finite:
            self._reset_inner()

    def _exchange_latest(self) -> None:
        """Store the change that this turn has made so far, wait until the round with the previous turn's
        change is committed, and apply its update; then the parameters are the new anchor."""
        was_finite = self._is_change_finite
        self._keep_change()
        self._run_attempts(was_finite)
        self._apply()

    @torch.no_grad()
    def _set_parameters_to_start(self) -> None:
        """Set anchor = parameters, then parameters = anchor - kept share * flat_N, the start of the turn."""
        for part, (parameter, anchor) in self._flat.blocks(self._flat.parameters, self._anchor):
            anchor.copy_(parameter)
            subtract(anchor, self._flat.flat_N[part].view_as(parameter), parameter, self._kept_share)

    @torch.no_grad()
    def _keep_change(self) -> None:
        """Set change = parameters at the turn's start - parameters, then parameters = anchor."""
        sums: list[Tensor] = []
        for part, (parameter, anchor) in self._flat.blocks(self._flat.parameters, self._anchor):
            change = self._change_N[part].view_as(parameter)
            start = change if parameter.dtype == torch.float32 else torch.empty_like(anchor)
            sent = self._flat.flat_N[part].view_as(parameter)
            subtract(anchor, sent, start, self._kept_share)  # as in `_set_parameters_to_start`
            subtract(start, parameter, change)
            parameter.copy_(anchor)
            sums.append(change.sum())
        self._is_change_finite = is_finite(self._change_N, sums)

    @property
    def _settings_of_step(self) -> torch.optim.Optimizer:
        """An optimizer with the settings from the start of the turn, which a retry in the turn also uses."""
        return self._step_settings


def kept_share(world_size: int) -> float:
    """Return the share of its own latest change that a worker keeps at the start of its next turn.

    A worker that trains alone makes the group's whole change; a worker in a group contributes 1 / world_size
    of the mean change.  The share is the mean of 1 and 1 / world_size (decision 0067).
    """
    return (1.0 + 1.0 / world_size) / 2.0


def _copy_settings(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class that has only a copy of the groups' settings."""
    if isinstance(optimizer, JointOptimizer):
        return JointOptimizer([_copy_settings(each) for each in optimizer.optimizers])
    copied = object.__new__(type(optimizer))
    copied.defaults = optimizer.defaults
    copied.param_groups = [dict(group) for group in optimizer.param_groups]
    return copied
