"""The plan and the outcome of an attempt at a step, for the optimizer and the runtime."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The data that this worker needs for one attempt at a step's exchange.

    Attributes:
        step: the number of the step, counted from 0 over the whole run.
        attempt: the number of the attempt at the step, counted from 0 in each generation.
        rank, world_size: this worker's rank and the world size in the generation that runs the step.
        samples: the number of samples in this worker's contribution, which is empty if there are none.
        total_samples: the number of samples of all members in the step to which the contribution's batch was
            assigned, which is an earlier step if the batch is late or pending.
        exchange: the exchange that the coordinator has chosen; "" if the coordinator does not choose one.
        compare_after: whether all members compare their replicas after this step, because workers have
            joined or the run has just begun.
        is_last: whether the run ends with this step, if no member is absent from it.
        stage_bounds: the first layer of each stage, followed by the number of layers; empty for a model
            without stages.
        generation, first_step: the generation that runs the step, and the first step of that generation.
        entries_share: this worker's share of the k entries of a sparse exchange (`Member.entries_share`).
    """

    step: int
    attempt: int
    rank: int
    world_size: int
    samples: int
    total_samples: int
    compare_after: bool = False
    is_last: bool = False
    exchange: str = ""
    stage_bounds: tuple[int, ...] = ()
    generation: int = 0
    first_step: int = 0
    entries_share: float = 1.0

    @property
    def weight(self) -> float:
        """The weight of this worker's mean gradient in the step: its fraction of the step's samples."""
        return self.samples / self.total_samples if self.samples else 0.0


def is_comparison_due(step: int, every: int) -> bool:
    """Return whether a regular comparison of replicas is due after `step`, which is counted from 0.

    It is due after each multiple of `every` steps and, for short runs, after 1, 2, 4, 8, ... steps below
    `every`.  If `every` is 0, it is never due.
    """
    taken = step + 1
    return every > 0 and (taken % every == 0 or (taken < every and taken & (taken - 1) == 0))


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The outcome of an attempt, which is the same on every member.

    Attributes:
        is_committed: whether the round has committed.  If not, the model and the residual stay unchanged, and
            the next attempt uses the same gradient.
        is_skipped: whether the update is empty because a member's gradient was not finite.
        is_unknown: whether the round may have been committed by the others, although not by this worker.
    """

    is_committed: bool
    is_skipped: bool
    is_unknown: bool = False


NOT_COMMITTED = RoundOutcome(is_committed=False, is_skipped=False)
