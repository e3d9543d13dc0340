"""The number of micro-batches of the next step: configured, or chosen from measurements of the first steps.

    step committed --> summaries of all members --> timings --> after the last trial: chosen, for the rest of
    the run
                                                       |
                             part of the state that a joining worker receives, and of checkpoints

A step's summaries are part of the vote, so workers that have committed the same steps have the same number.
`gridtrain.core.stages.micro_batch_tuning` makes the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages import micro_batch_tuning
from gridtrain.core.stages.micro_batch_tuning import MicroBatchChoice, StepTimings
from gridtrain.core.stages.stage_cost import ScheduleKind
from gridtrain.errors import ConfigError
from gridtrain.pipeline.executor import StepResult

MOST_MICRO_BATCHES = 1 << 14

MEMORY_HEADROOM = 4.0
"""What autograd stores, times this, has to fit the free memory: layers need more than that while they run,
and other programs may need memory, too."""


def parse_micro_batches(micro_batches: int | str) -> int | None:
    """See `Grid.pipeline`; None: "auto".  Raises `ConfigError`."""
    if micro_batches == "auto":
        return None
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches is {micro_batches!r}", remedy='give a number >= 1, or "auto"')
    if micro_batches > MOST_MICRO_BATCHES:
        raise ConfigError(
            f"micro_batches is {micro_batches}; it must be at most {MOST_MICRO_BATCHES}",
            remedy='use "auto", which chooses as many as keep the stages busy',
        )
    return micro_batches


class MicroBatchCount:
    """The number of micro-batches of one run; equal on all members.  A tracker of the state.

    Args:
        asked: the configured number; None: to be chosen.
        stages, order, ahead: of the run's schedule.
    """

    def __init__(self, asked: int | None, stages: int, order: ScheduleKind, ahead: float) -> None:
        self._configured, self._stages, self._order, self._ahead = asked, stages, order, ahead
        self._max_samples = math.inf
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first step."""
        self._trial_timings: list[micro_batch_tuning.TrialTimings] = []
        self._chosen = self._configured

    @property
    def number(self) -> int:
        """Micro-batches of the next step."""
        return (
            micro_batch_tuning.trial_micro_batches(len(self._trial_timings), self._stages)
            if self._chosen is None
            else self._chosen
        )

    @property
    def is_auto(self) -> bool:
        return self._configured is None

    @property
    def needs_memory_measurement(self) -> bool:
        """Whether the next step measures what autograd stores, before a larger micro-batch can be chosen."""
        return self._chosen is None and not self._trial_timings

    def record_memory(self, kept_bytes: int, largest: int, device: torch.device) -> None:
        """Record the most bytes that were stored in a step whose largest micro-batch had `largest`
        samples."""
        free = free_bytes(device)
        self._max_samples = (
            math.inf if free is None else largest * (1 + free / (MEMORY_HEADROOM * max(1, kept_bytes)))
        )

    def step_timings(self, outcome: StepResult, samples: int) -> StepTimings:
        """This member's timings of a step, for its summary."""
        if self._chosen is not None:
            return StepTimings()
        most = math.floor(self._max_samples) if math.isfinite(self._max_samples) else math.inf
        return StepTimings(outcome.forward_s, outcome.backward_s, outcome.round_trip_s, samples, most)

    def record_step(self, timings: Sequence[StepTimings], layout: RankLayout) -> MicroBatchChoice | None:
        """Record a committed step; `timings`: in rank order.  Returns the choice when it is made."""
        if self._chosen is not None or any(each.samples == 0 for each in timings):
            return None  # a replica without samples measures nothing
        if self._trial_timings and len(timings) != len(self._trial_timings[0]):
            self._trial_timings = []  # the group has changed
        self._trial_timings.append(tuple(timings))
        if not micro_batch_tuning.is_complete(self._trial_timings):
            return None
        chosen = micro_batch_tuning.choose_micro_batches(
            self._trial_timings, layout, self._order, self._ahead, self._stages
        )
        self._trial_timings, self._chosen = [], chosen.micro_batches
        return chosen

    def state_dict(self) -> dict[str, Any]:
        trials = [[list(astuple(each)) for each in step] for step in self._trial_timings]
        return {"chosen": self._chosen or 0, "told": trials}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises `ValueError` or `TypeError` unless `state_dict` could have returned it."""
        trials = [tuple(StepTimings(*map(float, row)) for row in step) for step in state_dict["told"]]
        chosen = int(state_dict["chosen"])
        alike = all(step and len(step) == len(trials[0]) for step in trials)
        fit = all(each.is_plausible() for step in trials for each in step)
        if chosen > MOST_MICRO_BATCHES:
            raise ValueError(f"{chosen} micro-batches are chosen; at most {MOST_MICRO_BATCHES} are possible")
        if chosen < 0 or len(trials) >= len(micro_batch_tuning.TRIALS) or not (alike and fit):
            raise ValueError(f"{chosen} micro-batches after {len(trials)} trials")
        self._trial_timings, self._chosen = trials, chosen or self._configured


def free_bytes(device: torch.device) -> int | None:
    """Bytes that activations could fill in addition to what is used now; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
