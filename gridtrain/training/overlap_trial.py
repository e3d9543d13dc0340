"""Whether overlap pays: tried, and decided by all members alike.

Decides in which steps the gradient is cut into buckets that are sent early, and in which it travels whole in
`step`, as without overlap.  Both sides of a message have to be cut alike, so this is a function of what all
members know alike: the generation, the step, and a table that a committed round has summed.  Never cuts,
never sends, and reads no clock.

    phase (step - the generation's first)
     0 1   2 3 4   5 6 7   8 9 10  11 12 13  14       15 ...                       100 .. 111  112
     whole early   whole   early   whole     whole,   early where that takes at    the same    table, ...
                                             table    most 98 % of whole           trial

    table (P, 2), a row of each member, all others zeros       rank 0   0.573   0.549   s: early, whole
    in one more dense vector of the round after the trial      rank 1   0.570   0.551   --> their medians

The first step of each three is not counted: it still feels the other way.  A generation begins anew, as its
members and links are others, and who has come has seen no trial.
"""

from __future__ import annotations

import statistics

import numpy as np

from gridtrain.core.planning.exchange_comparison import format_seconds
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.step_plan import StepPlan
from gridtrain.sparsify.merge import FloatArray

WARM_UP_STEPS = 2
BLOCK_STEPS, BLOCKS = 3, 4
TRIAL_STEPS = BLOCK_STEPS * BLOCKS
SECOND_PHASE, PERIOD_STEPS = 100, 600

MARGIN = 0.02
"""Buckets have to save this part of a step's backward and exchange: less is within what steps vary by, and
a sparse exchange of the whole vector leaves the better entries out."""

MOST_S = 1e6


def last_trial_start(phase: int) -> int | None:
    """The phase in which the latest trial has begun; None: there was none yet."""
    if phase >= PERIOD_STEPS:
        return phase - phase % PERIOD_STEPS
    if phase >= SECOND_PHASE:
        return SECOND_PHASE
    return WARM_UP_STEPS if phase >= WARM_UP_STEPS else None


class OverlapTrial:
    """One member's view of what all decide alike.

    Args:
        adaptive: False: always early, and nothing is measured.

    Attributes:
        pays: early, outside of trials.
    """

    def __init__(self, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._has_reported: bool | None = None
        self._begin(-1)

    def _begin(self, generation: int) -> None:
        self._generation = generation
        self.is_worthwhile = not self._adaptive
        self._is_decided = -1  # the beginning of the latest trial whose table was summed
        self._measured = -1  # the beginning of the trial that these are of
        self._took_s: dict[bool, list[float]] = {True: [], False: []}

    def is_overlapped(self, plan: StepPlan) -> bool:
        """Whether this step's gradient is cut, on all members."""
        if not self._adaptive:
            return True
        phase, begun = self._phase_of(plan)
        if begun is not None and phase < begun + TRIAL_STEPS:
            return (phase - begun) // BLOCK_STEPS % 2 == 0
        return self.is_worthwhile

    def record_duration(self, plan: StepPlan, seconds: float) -> None:
        """How long this worker's backward and exchange took in a step."""
        phase, begun = self._phase_of(plan)
        if begun is None or not self._adaptive:
            return
        at = phase - begun
        if begun != self._measured:
            self._measured, self._took_s = begun, {True: [], False: []}
        if at < TRIAL_STEPS and at % BLOCK_STEPS:
            self._took_s[self.is_overlapped(plan)].append(seconds)

    def make_table(self, plan: StepPlan) -> DenseRingBuffer | None:
        """What this worker measured, where a trial is over and its table is not summed yet."""
        phase, begun = self._phase_of(plan)
        if not self._adaptive or begun is None or self._is_decided == begun or phase < begun + TRIAL_STEPS:
            return None
        rows = np.zeros((plan.world_size, 2), np.float32)
        if all(self._took_s.values()):  # a member without samples has had no backward
            middle_s = (statistics.median(self._took_s[early]) for early in (True, False))
            rows[plan.rank] = [min(each_s, MOST_S) for each_s in middle_s]
        return DenseRingBuffer(rows.reshape(-1), plan.world_size)

    def apply_table(self, plan: StepPlan, table: FloatArray) -> str:
        """The round that carried the table is committed.  What is to be told, if that is news."""
        phase, begun = self._phase_of(plan)
        assert begun is not None
        self._is_decided = begun
        known = [row for row in table.reshape(-1, 2).tolist() if all(0 < each <= MOST_S for each in row)]
        if not known:
            return ""
        early_s, whole_s = (statistics.median(column) for column in zip(*known, strict=True))
        self.is_worthwhile = early_s <= (1 - MARGIN) * whole_s
        if self.is_worthwhile == self._has_reported:
            return ""
        self._has_reported = self.is_worthwhile
        took = (
            f"backward and exchange take {format_seconds(early_s)} with it, {format_seconds(whole_s)} without"
        )
        if self.is_worthwhile:
            return f"overlap is on from step {plan.step + 1}: {took}"
        again = SECOND_PHASE if phase < SECOND_PHASE else (phase // PERIOD_STEPS + 1) * PERIOD_STEPS
        return (
            f"overlap is off from step {plan.step + 1}, as it has to save {MARGIN:.0%}: {took}; "
            f"it is tried again in step {plan.first_step + again}"
        )

    def _phase_of(self, plan: StepPlan) -> tuple[int, int | None]:
        """The step's phase, and when the latest trial began."""
        if plan.generation != self._generation:
            self._begin(plan.generation)
        phase = plan.step - plan.first_step
        return phase, last_trial_start(phase)
