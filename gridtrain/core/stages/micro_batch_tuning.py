"""`micro_batches="auto"`: into how many micro-batches a step is best divided, from the first steps.

All members of a committed step have the same timings, so all choose the same number.
    step       0        1         2         3         4 ...
    number   4 S      4 S       8 S       8 S       proposed, for the rest of the run
            warm-up  counted   warm-up   counted
                        |                   |
                  t(n), hop(n)  and  t(n/2), hop(n/2):   t(n) = overhead + n x per sample

Two sizes give the fixed cost of a micro-batch, and `step_time.propose_micro_batches` weighs that and the
links against the bubble.  Both trials use at least the number that GPipe recommends (4 micro-batches for each
stage, section 2.3), so that none needs more memory than that; the chosen number may be smaller where all
members have reported that a larger micro-batch fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.stages import step_time
from gridtrain.core.stages.schedule import divide_samples
from gridtrain.core.stages.stage_cost import Card, ExecutionSettings, Layer, ScheduleKind

TRIAL_MICRO_BATCHES_PER_STAGE = 4
TRIALS = (
    TRIAL_MICRO_BATCHES_PER_STAGE,
    TRIAL_MICRO_BATCHES_PER_STAGE,
    2 * TRIAL_MICRO_BATCHES_PER_STAGE,
    2 * TRIAL_MICRO_BATCHES_PER_STAGE,
)
MEASURED_TRIALS = (1, 3)
"""The other trials only warm up: kernels are compiled and memory is allocated for a new size."""

MAX_FIGURE = 1e9
"""Bound of reported seconds and samples."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """What a member has measured in one step.

    Attributes:
        forward_s, backward_s: of a micro-batch, the mean; the second forward is part of backward.
        round_trip_s: on the first stage: from sending the first micro-batch until its gradient is back; 0:
            unknown, since the stage had work until then.
        samples: of this replica's batch.
        max_micro_batch_samples: of the largest micro-batch that fits this member; infinite: no bound is
            known.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    round_trip_s: float = 0.0
    samples: float = 0.0
    max_micro_batch_samples: float = math.inf

    def is_plausible(self) -> bool:
        """Whether an honest member can have measured it."""
        values = (self.forward_s, self.backward_s, self.round_trip_s, self.samples)
        return (
            all(0 <= value <= MAX_FIGURE for value in values)
            and self.samples % 1 == 0
            and self.max_micro_batch_samples >= 0
        )


TrialTimings = tuple[StepTimings, ...]
"""Timings of one step by all members, in rank order."""


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """The number for the rest of the run, and why."""

    micro_batches: int
    reason: str


def trial_micro_batches(number: int, stages: int) -> int:
    """Number of micro-batches of trial `number`, from 0."""
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
    """The number for the rest of the run, from the timings of all trials.

    Args:
        layout: of the generation that made the last trial.
        stages: number of stages that the trials were for; None: as `layout`.  After a repartition there are
            fewer.
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
            "there was one size to try",
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
        [Card()] * layout.stages,
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
    """A stage as one layer, with the times of its slowest replica, as all replicas wait for it."""
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
        output_bytes=1,  # activations of a sample are one unit, in which the network's rate is given
        overhead_s=(forwards[1] + backwards[1]) / 2,
    )


def _fit_line(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """(seconds per sample, overhead), neither below 0, that agree with the time of the larger size."""
    (large, small), (large_s, small_s) = sizes, times_s
    per_sample_s = min(max(0.0, (large_s - small_s) / (large - small)), large_s / large)
    return per_sample_s, large_s - large * per_sample_s


def _hop_s(timings: TrialTimings, layout: RankLayout) -> float:
    """Mean seconds of one payload from a stage to the next: the round trip of the first micro-batch without
    the work of the stages after the first."""
    found = []
    for replica in range(layout.replicas):
        first, *later = (timings[rank] for rank in layout.pipeline_ranks(replica))
        if first.round_trip_s > 0:
            work_s = sum(figures.forward_s + figures.backward_s for figures in later)
            found.append(max(0.0, first.round_trip_s - work_s) / (2 * (layout.stages - 1)))
    return max(found, default=0.0)
