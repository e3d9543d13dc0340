"""Chooses the number of micro-batches for `micro_batches="auto"` from trials in a run's first steps.

After a committed step, all members have the same timings, so all choose the same number.  With S stages:

    step       0        1         2         3         4 ...
    number   4 S      4 S       8 S       8 S       the number chosen for the rest of the run
            warm-up  measured  warm-up  measured
                        |                   |
                  t(n), hop(n)  and  t(n/2), hop(n/2):   t(n) = overhead + n x time per sample

Here t(n) is a stage's time for a micro-batch of n samples, and hop(n) is the time of its payload on a link.
The times of two sizes give the fixed cost of a micro-batch, which `step_time.propose_micro_batches` weighs,
together with the cost of the links, against the bubble.  The trials use at least the number of micro-batches
that GPipe recommends (4 for each stage, section 2.3), so they need no more memory than GPipe.  A smaller
number is chosen only if its micro-batches do not exceed any bound that a member has reported for its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.stages import step_time
from gridtrain.core.stages.schedule import divide_samples
from gridtrain.core.stages.stage_cost import Device, ExecutionSettings, Layer, ScheduleKind

TRIAL_MICRO_BATCHES_PER_STAGE = 4
TRIALS = (
    TRIAL_MICRO_BATCHES_PER_STAGE,
    TRIAL_MICRO_BATCHES_PER_STAGE,
    2 * TRIAL_MICRO_BATCHES_PER_STAGE,
    2 * TRIAL_MICRO_BATCHES_PER_STAGE,
)
MEASURED_TRIALS = (1, 3)
"""Indices of the trials whose timings are used.  The other trials are warm-ups, because kernels are
compiled and memory is allocated for a new size."""

MAX_FIGURE = 1e9
"""Upper bound on reported seconds and samples."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """The measurements of one member in one step.

    Attributes:
        forward_s, backward_s: the mean time of a micro-batch's forward pass, and of its backward pass
            including a second forward pass if there is one.
        round_trip_s: on the first stage, the time from sending the first micro-batch until its gradient
            arrives; 0 if it is unknown because the stage was still busy when the gradient arrived.
        samples: the number of samples in this replica's batch.
        max_micro_batch_samples: the number of samples in the largest micro-batch that fits into this member's
            memory; infinite if no bound is known.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    round_trip_s: float = 0.0
    samples: float = 0.0
    max_micro_batch_samples: float = math.inf

    def is_plausible(self) -> bool:
        """Return whether a correct member could have measured these values."""
        values = (self.forward_s, self.backward_s, self.round_trip_s, self.samples)
        return (
            all(0 <= value <= MAX_FIGURE for value in values)
            and self.samples % 1 == 0
            and self.max_micro_batch_samples >= 0
        )


TrialTimings = tuple[StepTimings, ...]
"""The timings of all members in one step, in rank order."""


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """The number of micro-batches for the rest of the run, and the reason for it, as text."""

    micro_batches: int
    reason: str


def trial_micro_batches(number: int, stages: int) -> int:
    """Return the number of micro-batches in trial `number`; trials are counted from 0."""
    return TRIALS[number] * stages


def is_complete(timings: Sequence[TrialTimings]) -> bool:
    return len(timings) == len(TRIALS)


def choose_micro_batches(
    timings: Sequence[TrialTimings],
    layout: RankLayout,
    order: ScheduleKind,
    ahead: float,
    stages: int | None = None,
) -> MicroBatchChoice:
    """Choose the number of micro-batches for the rest of the run from the timings of all trials.

    If the times of the two sizes cannot be compared, the number of the first measured trial is chosen.

    Args:
        timings: the timings of each trial, as many as `TRIALS`.
        layout: the layout of the generation that ran the last trial.
        order: the schedule of the run.
        ahead: see `schedule.one_forward_one_backward`.
        stages: the number of stages with which the trials began, by default `layout.stages`; after a
            repartition, `layout.stages` is smaller.
    """
    once, twice = (timings[number] for number in MEASURED_TRIALS)
    numbers_tried = [trial_micro_batches(number, stages or layout.stages) for number in MEASURED_TRIALS]
    first = numbers_tried[0]
    batch = round(max(figures.samples for figures in once))
    sizes = [divide_samples(batch, number)[0] for number in numbers_tried]
    if sizes[0] == sizes[1] or len(once) != len(twice) or len(once) != layout.world_size:
        return MicroBatchChoice(
            first,
            f"{first} micro-batches, {TRIAL_MICRO_BATCHES_PER_STAGE} for each stage: "
            "the times of two sizes could not be compared",
        )
    layers = [_stage_layer(stage, layout, (once, twice), sizes) for stage in range(layout.stages)]
    hops_s = [_hop_s(each, layout) for each in (once, twice)]
    per_sample_s, alpha_s = _fit_line(sizes, hops_s)
    network = uniform_network(layout.stages, alpha_s, 1 / per_sample_s if per_sample_s > 0 else math.inf)
    most = min(figures.max_micro_batch_samples for figures in (*once, *twice))
    numbers = [
        n for n in step_time.micro_batch_candidates(batch) if math.ceil(batch / n) <= max(most, sizes[0])
    ]
    running = ExecutionSettings(order=order, rematerialise=False, ahead=ahead)
    proposal = step_time.propose_micro_batches(
        layers,
        [Device()] * layout.stages,
        network,
        running,
        batch,
        cuts=range(layout.stages + 1),
        numbers=numbers,
        ahead=ahead,
    )
    return MicroBatchChoice(proposal.micro_batches, proposal.reason)


def _stage_layer(
    stage: int, layout: RankLayout, timings: tuple[TrialTimings, TrialTimings], sizes: Sequence[int]
) -> Layer:
    """Return a layer that stands for a stage and takes as long as the stage's slowest replica.

    The slowest replica determines the times because all replicas wait for it.
    """
    forwards, backwards = (
        _fit_line(
            sizes, [max(getattr(each[rank], what) for rank in layout.stage_ranks(stage)) for each in timings]
        )
        for what in ("forward_s", "backward_s")
    )
    return Layer(
        f"stage {stage}",
        forwards[0],
        backwards[0],
        parameter_bytes=0,
        output_bytes=1,  # the activations of one sample are the unit in which the network's rate is given
        overhead_s=(forwards[1] + backwards[1]) / 2,
    )


def _fit_line(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Return (seconds per sample, overhead in seconds), which match the time of the larger size exactly.

    Both are at least 0.  `sizes` and `times_s` begin with the larger size.
    """
    (large, small), (large_s, small_s) = sizes, times_s
    per_sample_s = min(max(0.0, (large_s - small_s) / (large - small)), large_s / large)
    return per_sample_s, large_s - large * per_sample_s


def _hop_s(timings: TrialTimings, layout: RankLayout) -> float:
    """Return how long a payload takes from one stage to the next in the slowest pipeline; 0.0 if unknown.

    The time is the round trip of the first micro-batch, minus the work of the later stages, divided by the
    number of hops.
    """
    found = []
    for replica in range(layout.replicas):
        first, *later = (timings[rank] for rank in layout.pipeline_ranks(replica))
        if first.round_trip_s > 0:
            work_s = math.fsum(figures.forward_s + figures.backward_s for figures in later)
            found.append(max(0.0, first.round_trip_s - work_s) / (2 * (layout.stages - 1)))
    return max(found, default=0.0)
