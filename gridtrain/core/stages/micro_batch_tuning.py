"""`micro_batches="auto"`: how many micro-batches a step is best divided into, from the first steps.

Decides the number, from figures that all members of a committed step hold alike; never measures, and knows
no clock: who has the same figures decides the same.

    step       0        1         2         3         4 ...
    number   4 S      4 S       8 S       8 S       proposed, for the rest of the run
            warm-up  counted   warm-up   counted
                        |                   |
                  t(n), hop(n)  and  t(n/2), hop(n/2):   t(n) = overhead + n x per sample

Two sizes tell what a micro-batch costs however small it is, and `pipelining.propose` weighs that and the
links against the bubble.  Both trials are at least as fine as GPipe's advice (4 micro-batches for each stage,
section 2.3), so that nothing is tried that needs more memory than that; the number that is chosen may be
smaller where all members have said that a larger micro-batch fits.
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
"""The other trials only warm up: kernels are compiled and memory is found for a size that is new."""


MAX_FIGURE = 1e9
"""Seconds, or samples: more is no honest member's."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """What a member has measured in one step.

    Attributes:
        forward_s, backward_s: of a micro-batch, the mean; the second forward is part of backward.
        turn_s: on the first stage: from the first micro-batch's departure until its gradient is back; 0: not
            known, since the stage had work until then.
        samples: of this replica's batch.
        most: samples of the largest micro-batch that fits this member; infinite: it knows no bound.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    round_trip_s: float = 0.0
    samples: float = 0.0
    max_micro_batch_samples: float = math.inf

    def is_plausible(self) -> bool:
        """Whether an honest member can have said so."""
        values = (self.forward_s, self.backward_s, self.round_trip_s, self.samples)
        return (
            all(0 <= value <= MAX_FIGURE for value in values)
            and self.samples % 1 == 0
            and self.max_micro_batch_samples >= 0
        )


TrialTimings = tuple[StepTimings, ...]
"""Of all members, in rank order."""


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """The number for the rest of the run, and why."""

    micro_batches: int
    reason: str


def trial_micro_batches(number: int, stages: int) -> int:
    """Micro-batches of the so-manieth trial, from 0."""
    return TRIALS[number] * stages


def is_complete(told: Sequence[TrialTimings]) -> bool:
    return len(told) == len(TRIALS)


def choose_micro_batches(
    told: Sequence[TrialTimings],
    seats: RankLayout,
    order: ScheduleKind,
    ahead: float,
    stages: int | None = None,
) -> MicroBatchChoice:
    """From all trials.

    Args:
        seats: of the generation that made the last one.
        stages: for which the trials were; None: as `seats` has.  A model that was cut anew has fewer now.
    """
    once, twice = (told[number] for number in MEASURED_TRIALS)
    numbers_tried = [trial_micro_batches(number, stages or seats.stages) for number in MEASURED_TRIALS]
    first = numbers_tried[0]
    batch = round(max(figures.samples for figures in once))
    sizes = [divide_samples(batch, number)[0] for number in numbers_tried]
    if sizes[0] == sizes[1] or len(once) != len(twice) or len(once) != seats.world_size:
        return MicroBatchChoice(
            first,
            f"{first} micro-batches, {TRIAL_MICRO_BATCHES_PER_STAGE} for each stage: there was one size to try",
        )
    layers = [_stage_layer(stage, seats, (once, twice), sizes) for stage in range(seats.stages)]
    hops_s = [_hop_s(told_, seats) for told_ in (once, twice)]
    per_sample_s, alpha_s = _fit_line(sizes, hops_s)
    network = uniform_network(seats.stages, alpha_s, 1 / per_sample_s if per_sample_s > 0 else math.inf)
    most = min(figures.max_micro_batch_samples for figures in (*once, *twice))
    numbers = [
        n for n in step_time.micro_batch_candidates(batch) if math.ceil(batch / n) <= max(most, sizes[0])
    ]
    running = ExecutionSettings(order=order, rematerialise=False, ahead=ahead)
    proposal = step_time.propose_micro_batches(
        layers,
        [Card()] * seats.stages,
        network,
        running,
        batch,
        cuts=range(seats.stages + 1),
        numbers=numbers,
        ahead=ahead,
    )
    return MicroBatchChoice(proposal.micro_batches, proposal.reason)


def _stage_layer(
    stage: int, seats: RankLayout, told: tuple[TrialTimings, TrialTimings], sizes: Sequence[int]
) -> Layer:
    """A stage as one layer; its slowest replica counts, as all replicas wait for it."""
    forwards, backwards = (
        _fit_line(
            sizes, [max(getattr(each[rank], what) for rank in seats.stage_ranks(stage)) for each in told]
        )
        for what in ("forward_s", "backward_s")
    )
    return Layer(
        f"stage {stage}",
        forwards[0],
        backwards[0],
        parameter_bytes=0,
        output_bytes=1,  # a sample's activations are one unit, and the network's rate is in these
        overhead_s=(forwards[1] + backwards[1]) / 2,
    )


def _fit_line(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """(per sample, overhead), neither below 0, that agree with the time of the larger size."""
    (large, small), (large_s, small_s) = sizes, times_s
    per_sample_s = min(max(0.0, (large_s - small_s) / (large - small)), large_s / large)
    return per_sample_s, large_s - large * per_sample_s


def _hop_s(told: TrialTimings, seats: RankLayout) -> float:
    """Of one payload from a stage to the next, on average: what the first micro-batch's way there and back
    took beside the work of the stages behind the first."""
    found = []
    for replica in range(seats.replicas):
        first, *behind = (told[rank] for rank in seats.pipeline_ranks(replica))
        if first.round_trip_s > 0:
            work_s = sum(figures.forward_s + figures.backward_s for figures in behind)
            found.append(max(0.0, first.round_trip_s - work_s) / (2 * (seats.stages - 1)))
    return max(found, default=0.0)
