"""The narrow waist between the optimizer wrapper and the runtime.

Decides nothing.  `gridtrain.runtime.group_session` implements it over a group; tests over a perfect network.

    wrapper (training thread)                      session (owns rounds, votes, the loop's thread)
       begin() ------------------------------------->  waits for a running generation
       <------------------------------- StepPlan ----  who takes part, with how many samples
       run(plan, [workspace], skip, settings) ---------->  collective, vote, decision
       <--------------------------- RoundOutcome ----  committed: apply.  Not: begin again, same gradient
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gridtrain.runtime.buffers.buckets import BucketedBuffer
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer
from gridtrain.runtime.step_plan import RoundOutcome, StepPlan


class TrainingSession(Protocol):
    """One worker's place in the run.  All methods are called on the training thread."""

    def begin(self) -> StepPlan | None:
        """Block until a generation runs and the next attempt can start.

        None: this worker was away, and the group has gone on without its batch, or its owner wants it
        elsewhere; nothing is to be applied.  May capture this worker's state meanwhile, to hand it to one
        that joins.
        Raises `RunPaused` when the run cannot go on.
        """
        ...

    def predict_plan(self) -> StepPlan | None:
        """The plan of the step whose batch is being computed, without waiting; None: not known yet.

        `begin` returns this very object if buckets that were sent for it are still of use.
        """
        ...

    def begin_bucket(self, plan: StepPlan, bucket: int, workspace: CollectiveBuffer, skip: bool) -> None:
        """Begin to exchange one bucket of the first workspace that `run` will be given, which must be a
        `BucketedWorkspace` with `workspace` in this place.  Returns at once."""
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
            skip: this worker's gradient is not finite; ORed over all members.
            settings: of the optimizer, equal on all members; part of the vote's digest.
        """
        ...

    def disable_replay(self, reason: str) -> None:
        """The updates alone do not tell what the steps do: nobody can follow by replaying them."""
        ...

    def report_digest(self, step: int, digest: bytes) -> None:
        """32 bytes of the parameters and the optimizer's state after `step`; whose are not those of most is
        given the state anew before its next step."""
        ...

    def report_figures(self, figures: Mapping[str, float]) -> None:
        """Seconds of the step that was just finished: computing, waiting, selecting, ..."""
        ...

    def close(self, reason: str) -> None:
        """Leave the run at once: this worker cannot go on."""
        ...
