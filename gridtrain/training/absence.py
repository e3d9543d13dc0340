"""`wait="auto"`: decides whether steps may commit without this worker; applies the steps that it missed.

    I/O thread        make_empty_buffers   makes an empty contribution to the step, in the trainer's place
    training thread   apply                applies the committed updates, in order, before taking part again

Afterwards, the model, the optimizer and the residual are as if the worker had contributed zeros.  The
gradient that the trainer was computing is contributed to a later step, with the weight that it would have
had.  The group waits for the trainer in steps that need this worker's state, and whenever a missed step could
not be applied later; `find_obstacle` returns the reason.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import lr_scheduler

from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.runtime.buffers.buckets import BucketedBuffer, UpdateBuffer
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.runtime.missed_step import MissedStep
from gridtrain.training import hyperparameter_check
from gridtrain.training.checkpoint import hyperparameters, serialization
from gridtrain.training.worker_residual import WorkerResidual

log = logging.getLogger("gridtrain")


class AbsentOptimizer(Protocol):
    """The part of the optimizer wrapper (`optimizer.GridOptimizer`) that `Absence` uses."""

    inner: torch.optim.Optimizer
    wait: str
    unapplied_step: int | None
    residual: WorkerResidual
    backwards_per_step: int
    calls_per_turn: int

    def is_state_needed(self, plan: StepPlan) -> bool: ...

    def make_empty_buffer(self, plan: StepPlan) -> UpdateBuffer | None: ...

    def load_settings(self, settings: bytes) -> None: ...

    def apply_update(self, update: npt.NDArray[np.float32] | SparseVector) -> None: ...

    def compare_replicas(self, step: int, *, is_due: bool) -> None: ...


class Absence:
    """The part of an optimizer wrapper that lets steps commit without this worker's trainer.

    Args:
        trackers: the objects that the script tracks, by name; they may be added later.
    """

    def __init__(self, optimizer: AbsentOptimizer, trackers: Mapping[str, serialization.Stateful]) -> None:
        self._optimizer, self._trackers = optimizer, trackers
        self._latest: tuple[int, bytes, tuple[int, ...]] | None = None  # step, settings, steps of schedulers
        self._are_schedulers_seen = False  # whether each has stepped once in a step of the run
        self._comparisons: set[int] = set()  # missed steps after which replicas are compared
        self._found_obstacle = ""
        self._is_obstacle_logged = False

    def find_obstacle(self) -> str:
        """Return the reason why the group must wait for this worker in every step; "" if there is none.

        That is the case if `advance_schedulers` cannot repeat all that the script may change in a step.
        """
        optimizer = self._optimizer
        if self._found_obstacle:
            return self._found_obstacle
        if self._schedulers and not self._are_schedulers_seen:
            return "its schedulers have not been seen to step once for each step of the run"
        in_one_call = optimizer.calls_per_turn == 1 and optimizer.backwards_per_step == 1
        for name, tracker in list(self._trackers.items()):  # the script may be adding one
            is_plateau = isinstance(tracker, lr_scheduler.ReduceLROnPlateau)
            if is_plateau or not (in_one_call and _counts_steps(tracker)):
                return f"it tracks {name!r}, whose changes cannot be repeated for a missed step"
        return ""

    def check_step(self, step: int, settings: bytes) -> None:
        """Compare the optimizer settings and the schedulers in a step with those in the previous step.

        If these change in a way that could not be repeated for a missed step, no later step commits without
        this worker.
        """
        before = self._latest
        if before is not None and before[0] == step:  # a retry
            return
        schedulers = tuple(int(each.last_epoch) for each in self._schedulers)
        self._latest = step, settings, schedulers
        if before is None or before[0] + 1 != step or len(before[2]) != len(schedulers):
            return
        if any(now != then + 1 for now, then in zip(schedulers, before[2], strict=True)):
            self.set_obstacle("its schedulers do not step once for each step of the run")
        elif not self._trackers and settings != before[1]:
            self.set_obstacle("its optimizer settings change, and grid.track names no scheduler")
        self._are_schedulers_seen = True
        self._log_obstacle()

    def set_obstacle(self, reason: str) -> None:
        """Prevent steps from committing without this worker from now on."""
        self._found_obstacle = self._found_obstacle or reason
        self._log_obstacle()

    def _log_obstacle(self) -> None:
        if self._is_obstacle_logged or self._optimizer.wait != "auto":
            return
        if obstacle := self.find_obstacle():
            self._is_obstacle_logged = True
            log.info("the group will wait for this worker if its loop stalls: %s", obstacle)

    @property
    def _schedulers(self) -> list[lr_scheduler.LRScheduler]:
        return [each for each in list(self._trackers.values()) if _counts_steps(each)]

    # -- I/O thread ------------------------------------------------------------------------------

    def make_empty_buffers(
        self, plan: StepPlan, previous: Sequence[CollectiveBuffer | BucketedBuffer]
    ) -> list[CollectiveBuffer | BucketedBuffer] | None:
        """Return the buffers of a contribution without samples; None if the trainer has to take part.

        Args:
            plan: the plan of the step.
            previous: the buffers of the previous attempt at the step; a ring can resume that attempt.
        """
        optimizer = self._optimizer
        if optimizer.is_state_needed(plan) or self.find_obstacle():
            return None
        if plan.compare_after:
            self._comparisons.add(plan.step)
        main: CollectiveBuffer | BucketedBuffer | None = previous[0] if previous else None
        if not (isinstance(main, UpdateBuffer) and main.is_resumable):
            main = optimizer.make_empty_buffer(plan)
        if main is None:
            return None
        if plan.attempt == 0:
            return [main]
        return [main, hyperparameter_check.make_empty_buffer(plan)]

    # -- training thread -------------------------------------------------------------------------

    def apply(self, steps: Sequence[MissedStep]) -> None:
        """Apply committed steps that this worker has missed, in order.  The gradients of the parameters are
        overwritten.

        Raises:
            GridtrainError: a step cannot be applied; the model is then unusable.
        """
        for step in steps:
            self._optimizer.unapplied_step = step.step
            own = hyperparameters.hyperparameters_json(self._optimizer.inner)
            if step.update is not None:
                if step.settings != own:
                    self._optimizer.load_settings(step.settings)
                self._optimizer.apply_update(step.update)
                self._optimizer.residual.add_truncated(step.truncated, step.rest_N)
            self._optimizer.compare_replicas(step.step, is_due=step.step in self._comparisons)
            self._comparisons.discard(step.step)
            if step.settings != own and self._schedulers:
                self._optimizer.load_settings(own)
                self.set_obstacle("its schedulers give settings different from those of the other workers")
            self.advance_schedulers()
            self._optimizer.unapplied_step = None
        if steps:
            log.info("applied the missed steps %d to %d", steps[0].step + 1, steps[-1].step + 1)

    def drop(self, steps: Sequence[MissedStep]) -> None:
        """Add to the residual the truncated entries and the rounding errors of missed steps.

        Called before a state that includes these steps is loaded, which reports the whole residual as lost.
        """
        for step in steps:
            self._optimizer.residual.add_truncated(step.truncated, step.rest_N)

    def advance_schedulers(self) -> None:
        """Step the tracked schedulers, as the script does after each step."""
        _step_all(self._schedulers)

    def advance_late_schedulers(self) -> None:
        """Step the tracked schedulers that the script has not stepped since `check_step`."""
        if self._latest is not None and len(self._latest[2]) == len(self._schedulers):
            pairs = zip(self._schedulers, self._latest[2], strict=True)
            _step_all([each for each, then in pairs if int(each.last_epoch) == then])


def _step_all(schedulers: Sequence[lr_scheduler.LRScheduler]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects its own optimizer's step before each
        for scheduler in schedulers:
            scheduler.step()


def _counts_steps(tracker: object) -> TypeGuard[lr_scheduler.LRScheduler]:
    """Whether the object is a scheduler that counts its steps; a `ChainedScheduler` does not."""
    return isinstance(tracker, lr_scheduler.LRScheduler) and hasattr(tracker, "last_epoch")
