"""The number of micro-batches in the next step: configured, or chosen by trials and the free memory.

If it is not configured, the first steps are trials with different numbers.  Each member's summary of a step
contains the member's timings; after the last trial, the number for the run is chosen from the timings.  The
timings and the choice are part of the state that a newcomer receives, and of checkpoints.

A step's summaries are part of the vote, so workers that have committed the same steps have the same number.
`gridtrain.core.stages.micro_batch_trials` makes the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages import micro_batch_trials
from gridtrain.core.stages.micro_batch_trials import MicroBatchChoice, StepTimings
from gridtrain.core.stages.stage_cost import ScheduleKind
from gridtrain.errors import ConfigError
from gridtrain.pipeline.executor import StepResult
from gridtrain.runtime.free_memory import free_memory_bytes

MAX_MICRO_BATCHES = 1 << 14

MEMORY_HEADROOM = 4.0
"""The free memory must be at least this many times the additional memory that autograd uses for a larger
micro-batch, because layers need more while they run, and other programs may also need memory."""


def parse_micro_batches(micro_batches: int | str) -> int | None:
    """Parse the argument `micro_batches` of `Grid.pipeline`; return None for "auto".

    Raises:
        ConfigError: `micro_batches` is neither "auto" nor an integer from 1 to `MAX_MICRO_BATCHES`.
    """
    if micro_batches == "auto":
        return None
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(
            f'micro_batches is {micro_batches!r}; it must be an integer >= 1, or "auto"',
            remedy='leave it out to use "auto"',
        )
    if micro_batches > MAX_MICRO_BATCHES:
        raise ConfigError(
            f"micro_batches is {micro_batches}; it must be at most {MAX_MICRO_BATCHES}",
            remedy='use "auto", which chooses enough to keep the stages busy',
        )
    return micro_batches


class MicroBatchCount:
    """The number of micro-batches of one run, the same on all members.

    A number that is chosen from timings is tracked as part of the state.

    Args:
        asked: the configured number; None to choose it from timings.
        stages, order, ahead: the parameters of the run's schedule.
    """

    def __init__(self, asked: int | None, stages: int, order: ScheduleKind, ahead: float) -> None:
        self._configured, self._stages, self._order, self._ahead = asked, stages, order, ahead
        self._max_samples = math.inf
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first step."""
        self._trial_timings: list[micro_batch_trials.TrialTimings] = []
        self._chosen = self._configured

    @property
    def number(self) -> int:
        """The number of micro-batches of the next step."""
        if self._chosen is not None:
            return self._chosen
        return micro_batch_trials.trial_micro_batches(len(self._trial_timings), self._stages)

    @property
    def is_auto(self) -> bool:
        return self._configured is None

    @property
    def needs_memory_measurement(self) -> bool:
        """Whether the next step must measure how much memory autograd uses.

        The measurement limits the size of the micro-batches that can be chosen.
        """
        return self._chosen is None and not self._trial_timings

    def record_memory(self, kept_bytes: int, largest: int, device: torch.device) -> None:
        """Record that autograd stored at most `kept_bytes` in a step, to limit the size of micro-batches.

        Args:
            largest: the number of samples in the step's largest micro-batch.
        """
        free = free_bytes(device)
        self._max_samples = (
            math.inf if free is None else largest * (1 + free / (MEMORY_HEADROOM * max(1, kept_bytes)))
        )

    def step_timings(self, outcome: StepResult, samples: int) -> StepTimings:
        """Return this member's timings of a step for its summary, or `StepTimings()` once the number of
        micro-batches has been chosen."""
        if self._chosen is not None:
            return StepTimings()
        most = math.floor(self._max_samples) if math.isfinite(self._max_samples) else math.inf
        return StepTimings(outcome.forward_s, outcome.backward_s, outcome.round_trip_s, samples, most)

    def record_step(self, timings: Sequence[StepTimings], layout: RankLayout) -> MicroBatchChoice | None:
        """Record all members' timings of a committed step, in rank order.

        If this was the last trial, choose the number of micro-batches and return the choice; otherwise return
        None.
        """
        if self._chosen is not None or any(each.samples == 0 for each in timings):
            return None  # a replica without samples measures nothing
        if self._trial_timings and len(timings) != len(self._trial_timings[0]):
            self._trial_timings = []  # the group has changed
        self._trial_timings.append(tuple(timings))
        if not micro_batch_trials.is_complete(self._trial_timings):
            return None
        chosen = micro_batch_trials.choose_micro_batches(
            self._trial_timings, layout, self._order, self._ahead, self._stages
        )
        self._trial_timings, self._chosen = [], chosen.micro_batches
        return chosen

    def state_dict(self) -> dict[str, Any]:
        trials = [[list(astuple(each)) for each in step] for step in self._trial_timings]
        return {"chosen": self._chosen or 0, "told": trials}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            KeyError, TypeError, ValueError: the argument cannot be a result of `state_dict`.
        """
        trials = [tuple(StepTimings(*map(float, row)) for row in step) for step in state_dict["told"]]
        chosen = int(state_dict["chosen"])
        alike = all(step and len(step) == len(trials[0]) for step in trials)
        fit = all(each.is_plausible() for step in trials for each in step)
        if chosen > MAX_MICRO_BATCHES:
            raise ValueError(f"{chosen} micro-batches were chosen; at most {MAX_MICRO_BATCHES} are supported")
        if chosen < 0 or len(trials) >= len(micro_batch_trials.TRIALS) or not (alike and fit):
            raise ValueError(f"{chosen} micro-batches after trial {len(trials)} are not a valid state")
        self._trial_timings, self._chosen = trials, chosen or self._configured


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes activations could use in addition to the memory in use; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory_bytes() or None
