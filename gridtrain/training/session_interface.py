"""The interface between the optimizer wrapper and the runtime.

It is implemented by `gridtrain.runtime.group_session` for a group, and by tests for a perfect network.

    optimizer (training thread)                    session (rounds, votes, the I/O thread)
       begin() ------------------------------------->  waits for a running generation
       <------------------------------- StepPlan ----  who takes part, with how many samples
       run(plan, [buffer], skip, settings) ---------->  collective, vote, decision
       <--------------------------- RoundOutcome ----  committed: apply.  Not: begin again, same gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gridtrain.runtime.buffers.buckets import BucketedBuffer
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer
from gridtrain.runtime.step_plan import RoundOutcome, StepPlan


class TrainingSession(Protocol):
    """One worker's session in the run.  All methods are called from the training thread."""

    def begin(self) -> StepPlan | None:
        """Block until a generation runs and the next attempt can start.

        Returns None if there is nothing to apply, because the group has continued without this worker's batch
        or because the agent requests a pause.  Meanwhile this worker's state may be captured for a joining
        worker.  Raises `RunPaused` when the run cannot continue.
        """
        ...

    def predict_plan(self) -> StepPlan | None:
        """Return the plan of the step whose batch is being computed, without waiting; None if the plan is not
        known yet.

        `begin` returns the same object if the buckets that were sent for this plan are still valid.
        """
        ...

    def begin_bucket(self, plan: StepPlan, bucket: int, workspace: CollectiveBuffer, skip: bool) -> None:
        """Begin to exchange a bucket of the first buffer of the next `run`.  That buffer is a
        `BucketedBuffer`, whose buffer of this bucket must be `workspace`.  Returns at once."""
        ...

    def run(
        self,
        plan: StepPlan,
        workspaces: Sequence[CollectiveBuffer | BucketedBuffer],
        skip: bool,
        settings: bytes,
    ) -> RoundOutcome:
        """Exchange, vote and wait for the decision.

        Args:
            skip: whether this worker's gradient is not finite; the step is skipped if any member sets this
                flag.
            settings: the optimizer's settings, equal on all members; part of the vote's digest.
        """
        ...

    def submit(
        self,
        plan: StepPlan,
        workspaces: Sequence[CollectiveBuffer | BucketedBuffer],
        skip: bool,
        settings: bytes,
    ) -> None:
        """Submit this worker's part for the plan that `predict_plan` has returned, without waiting.

        The arguments are those of `run`.  `await_submitted` returns the outcome.
        """
        ...

    def pause_computing(self, share: float) -> None:
        """Leave the time until `resume_computing` out of this turn's compute figures.  `share` of the turn's
        samples have been computed, 0 < share <= 1."""
        ...

    def resume_computing(self) -> None:
        """See `pause_computing`."""
        ...

    def finish_computing(self) -> None:
        """Report this turn's compute figures, once the gradient of its samples is complete.  Later calls in a
        turn have no effect; `begin` and `await_submitted` include one, unless computing is paused."""
        ...

    def await_submitted(self) -> RoundOutcome:
        """Wait for the decision on what `submit` has submitted.  After an abort, `begin` follows."""
        ...

    def announce_weight(self, weight: int) -> None:
        """Send the weight of this worker's batch, a count of at least 0, to the other members, without
        waiting for theirs."""
        ...

    def total_weight(self, plan: StepPlan, weight: int) -> int | None:
        """Return the sum of the weights of all members' batches in the plan's step.

        Returns None if the generation has ended, or if a member has sent none in time or a wrong one.  The
        weight is sent unless `announce_weight` has sent the same one for this step.
        """
        ...

    def disable_replay(self, reason: str) -> None:
        """Declare that steps cannot be repeated from the updates alone, so that no worker catches up by
        replaying them."""
        ...

    def report_digest(self, step: int, digest: bytes) -> None:
        """Report a 32-byte digest of the parameters and the optimizer's state after `step` for comparison.  A
        worker whose digest differs from the majority's receives the state before its next step."""
        ...

    def report_figures(self, figures: Mapping[str, float]) -> None:
        """Report the seconds that the phases of the latest step took: computing, waiting, selecting, ..."""
        ...

    def close(self, reason: str) -> None:
        """Leave the run at once because this worker cannot continue."""
        ...
