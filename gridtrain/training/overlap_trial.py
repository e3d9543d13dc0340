"""Decides when to measure `Overlap`, and whether to use it.  All members reach the same decision.

The sender and the receiver of a message must divide the gradient in the same way.  The decision therefore
depends only on data that all members have: the generation, the step, and a table that was summed in a
committed round.

In an overlapped step, buckets are sent during the backward pass; in a whole step, the gradient is sent in
`step`.

    phase (step - first step of the generation)
    0, 1         whole
    2 to 13      the first trial, in blocks of three steps: overlapped, whole, overlapped, whole
    14           whole; the round also sums the table of durations
    15 to 99     overlapped if this takes at most 98 % of the time of a whole step; otherwise whole
    100 to 111   the second trial; its table is summed in phase 112.  Further trials: 600, 1200, ...

    table (P ranks, 2), in s     overlapped   whole     Each member fills its own row and leaves zeros in
    rank 0                       0.573        0.549     the other rows.  The medians of the two columns of
    rank 1                       0.570        0.551     the sum are compared.

The first step of each block is not measured, because the previous block still affects it.  The trial starts
again in each generation, because members and links may have changed, and new members have no measurements.
"""

from __future__ import annotations

import statistics

import numpy as np

from gridtrain.quantities import format_seconds
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.sparsify.merge import FloatArray

WARM_UP_STEPS = 2
BLOCK_STEPS, BLOCKS = 3, 4
TRIAL_STEPS = BLOCK_STEPS * BLOCKS
SECOND_PHASE, PERIOD_STEPS = 100, 600

MARGIN = 0.02
"""The smallest fraction of the time for backward pass and exchange that overlap has to save.  The margin is
larger than the variation between steps.  It also compensates for the fact that a selection from the whole
vector finds better entries than selections from its buckets."""

MAX_S = 1e6
"""The upper bound on a duration in the table."""


def last_trial_start(phase: int) -> int | None:
    """Return the phase in which the latest trial began; None before the first trial."""
    if phase >= PERIOD_STEPS:
        return phase - phase % PERIOD_STEPS
    if phase >= SECOND_PHASE:
        return SECOND_PHASE
    return WARM_UP_STEPS if phase >= WARM_UP_STEPS else None


class OverlapTrial:
    """One member's part in deciding whether to overlap.

    Args:
        adaptive: whether to measure; if False, overlap is always on.

    Attributes:
        is_worthwhile: whether overlap is on outside of trials.
    """

    def __init__(self, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._last_reported: bool | None = None
        self._begin(-1)

    def _begin(self, generation: int) -> None:
        self._decided_trial = -1  # start of the latest trial whose table was summed
        self.is_worthwhile = not self._adaptive
        self._measured_trial = -1  # start of the trial that `_durations_s` belongs to
        self._durations_s: dict[bool, list[float]] = {True: [], False: []}  # by whether parts were sent early
        self._generation = generation  # set last, for `is_overlapped_outside_trials`

    def is_overlapped(self, plan: StepPlan) -> bool:
        """Whether all members divide this step's gradient into buckets."""
        phase, start = self._phase_of(plan)
        if start is not None and phase < start + TRIAL_STEPS:
            return (phase - start) // BLOCK_STEPS % 2 == 0
        return self.is_worthwhile

    def is_overlapped_outside_trials(self, plan: StepPlan) -> bool | None:
        """Whether all members divide this step's gradient into buckets; None in a trial, and until this
        member knows the trial's decision.  Another thread may call this method, because it changes
        nothing."""
        if not self._adaptive:
            return True
        start = last_trial_start(plan.step - plan.first_step)
        if plan.generation != self._generation or (start is not None and self._decided_trial != start):
            return None
        return self.is_worthwhile

    def record_duration(self, plan: StepPlan, seconds: float) -> None:
        """Record how long this worker's backward pass and exchange took in a step, in seconds."""
        phase, start = self._phase_of(plan)
        if start is None:
            return
        at = phase - start
        if start != self._measured_trial:
            self._measured_trial, self._durations_s = start, {True: [], False: []}
        if at < TRIAL_STEPS and at % BLOCK_STEPS:
            self._durations_s[self.is_overlapped(plan)].append(seconds)

    def make_table(self, plan: StepPlan) -> DenseRingBuffer | None:
        """Return the table with this worker's medians if a trial has ended and its table has not been summed
        yet; otherwise None."""
        phase, start = self._phase_of(plan)
        if start is None or self._decided_trial == start or phase < start + TRIAL_STEPS:
            return None
        rows = np.zeros((plan.world_size, 2), np.float32)
        if all(self._durations_s.values()):  # empty for a member without samples
            medians_s = (statistics.median(self._durations_s[early]) for early in (True, False))
            rows[plan.rank] = [min(each_s, MAX_S) for each_s in medians_s]
        return DenseRingBuffer(rows.reshape(-1), plan.world_size)

    def apply_table(self, plan: StepPlan, table: FloatArray) -> str:
        """Decide from the table of a committed round; return a message if the decision has changed,
        otherwise ""."""
        text = self._decide(plan, table)
        _, start = self._phase_of(plan)
        assert start is not None
        self._decided_trial = start  # set last, for `is_overlapped_outside_trials`
        return text

    def _decide(self, plan: StepPlan, table: FloatArray) -> str:
        phase, _ = self._phase_of(plan)
        known = [row for row in table.reshape(-1, 2).tolist() if all(0 < each <= MAX_S for each in row)]
        if not known:
            return ""
        early_s, whole_s = (statistics.median(column) for column in zip(*known, strict=True))
        self.is_worthwhile = early_s <= (1 - MARGIN) * whole_s
        if self.is_worthwhile == self._last_reported:
            return ""
        self._last_reported = self.is_worthwhile
        took = (
            f"the backward pass and the exchange take {format_seconds(early_s)} with overlap, "
            f"{format_seconds(whole_s)} without"
        )
        if self.is_worthwhile:
            return f"overlap is on from step {plan.step + 2}: {took}"
        again = SECOND_PHASE if phase < SECOND_PHASE else (phase // PERIOD_STEPS + 1) * PERIOD_STEPS
        return (
            f"overlap is off from step {plan.step + 2}, because it does not save at least {MARGIN:.0%}: "
            f"{took}; overlap will be tried again in step {plan.first_step + again + 1}"
        )

    def _phase_of(self, plan: StepPlan) -> tuple[int, int | None]:
        """Return the step's phase and the start of the latest trial; None if there was none."""
        if plan.generation != self._generation:
            self._begin(plan.generation)
        phase = plan.step - plan.first_step
        return phase, last_trial_start(phase) if self._adaptive else None
