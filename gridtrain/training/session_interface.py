"""The interface between the optimizer wrapper and the runtime.

Implemented by `gridtrain.runtime.group_session` over a group, and by the tests over a perfect network.

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
    """One worker's place in the run.  All methods are called from the training thread."""

    def begin(self) -> StepPlan | None:
        """Block until a generation runs and the next attempt can start.

        None if nothing is to be applied: the group has gone on without this worker's batch, or the agent
        wants a pause.  Meanwhile this worker's state may be captured for a joining worker. Raises `RunPaused`
        when the run cannot go on.
        """
        ...

    def predict_plan(self) -> StepPlan | None:
        """The plan of the step whose batch is being computed, without waiting; None if it is not known yet.

        `begin` returns this very object if buckets that were sent for it are still valid.
        """
        ...

    def begin_bucket(self, plan: StepPlan, bucket: int, workspace: CollectiveBuffer, skip: bool) -> None:
        """Begin to exchange a bucket of the first buffer of the coming `run`, which must be a
        `BucketedBuffer` with `workspace` in this place.  Returns at once."""
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
            skip: this worker's gradient is not finite; the step is skipped if it is true for any member.
            settings: of the optimizer, equal on all members; part of the vote's digest.
        """
        ...

    def disable_replay(self, reason: str) -> None:
        """The steps cannot be repeated from the updates alone: no worker can catch up by replaying them."""
        ...

    def report_digest(self, step: int, digest: bytes) -> None:
        """Compare a 32-byte digest of the parameters and the optimizer's state after `step`.  A worker that
        differs from the majority is sent the state before its next step."""
        ...

    def report_figures(self, figures: Mapping[str, float]) -> None:
        """Report seconds of the step that has just ended: computing, waiting, selecting, ..."""
        ...

    def close(self, reason: str) -> None:
        """Leave the run at once: this worker cannot go on."""
        ...
