"""How many micro-batches the next step has: as asked for, or found out in the first steps.

Decides what a member tells of a step, and keeps what all have told; the choice is `protocol.dividing`'s.

    step committed --> rows of all members --> told --> after the last trial: chosen, for the rest of the run
                                                |
                         part of the state that a newcomer takes over, and of checkpoints

A step's rows are covered by the vote, so whoever has committed the same steps has the same number.
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
"""What autograd keeps, times this, is to fit into what is free: layers hold more than that while they run,
and others may want memory too."""


def parse_micro_batches(micro_batches: int | str) -> int | None:
    """See `Grid.pipeline`; None: "auto".  Raises `ConfigError`."""
    if micro_batches == "auto":
        return None
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(f"micro_batches is {micro_batches!r}", remedy='a number >= 1, or "auto"')
    if micro_batches > MOST_MICRO_BATCHES:
        raise ConfigError(
            f"micro_batches is {micro_batches}; it must be at most {MOST_MICRO_BATCHES}",
            remedy='"auto" finds out how many keep the stages busy',
        )
    return micro_batches


class MicroBatchCount:
    """Of one run; equal on all its members.  A tracker of the state (`state_sync.Stateful`).

    Args:
        asked: None: to be found out.
        stages, order, ahead: as the run has them.
    """

    def __init__(self, asked: int | None, stages: int, order: ScheduleKind, ahead: float) -> None:
        self._configured, self._stages, self._order, self._ahead = asked, stages, order, ahead
        self._max_samples = math.inf
        self.reset()

    def reset(self) -> None:
        """Nothing has been committed."""
        self._trial_timings: list[micro_batch_tuning.TrialTimings] = []
        self._chosen = self._configured

    @property
    def number(self) -> int:
        """Of the next step."""
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
        """The next step shows what autograd keeps, before anything larger can be chosen."""
        return self._chosen is None and not self._trial_timings

    def record_memory(self, kept_bytes: int, largest: int, device: torch.device) -> None:
        """In a step whose largest micro-batch has so many samples, so many bytes were kept at most."""
        free = free_bytes(device)
        self._max_samples = (
            math.inf if free is None else largest * (1 + free / (MEMORY_HEADROOM * max(1, kept_bytes)))
        )

    def step_timings(self, outcome: StepResult, samples: int) -> StepTimings:
        """What this member tells of a step."""
        if self._chosen is not None:
            return StepTimings()
        most = math.floor(self._max_samples) if math.isfinite(self._max_samples) else math.inf
        return StepTimings(outcome.forward_s, outcome.backward_s, outcome.round_trip_s, samples, most)

    def record_step(self, told: Sequence[StepTimings], seats: RankLayout) -> MicroBatchChoice | None:
        """A step was; `told`: in rank order.  Returns the choice when it is made."""
        if self._chosen is not None or any(figures.samples == 0 for figures in told):
            return None  # a replica without samples has nothing to tell
        if self._trial_timings and len(told) != len(self._trial_timings[0]):
            self._trial_timings = []  # the group is another one
        self._trial_timings.append(tuple(told))
        if not micro_batch_tuning.is_complete(self._trial_timings):
            return None
        chosen = micro_batch_tuning.choose_micro_batches(
            self._trial_timings, seats, self._order, self._ahead, self._stages
        )
        self._trial_timings, self._chosen = [], chosen.micro_batches
        return chosen

    def state_dict(self) -> dict[str, Any]:
        told = [[list(astuple(figures)) for figures in step] for step in self._trial_timings]
        return {"chosen": self._chosen or 0, "told": told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises `ValueError`, `TypeError` for what `state_dict` never gives."""
        told = [tuple(StepTimings(*map(float, row)) for row in step) for step in state_dict["told"]]
        chosen = int(state_dict["chosen"])
        alike = all(step and len(step) == len(told[0]) for step in told)
        fit = all(figures.is_plausible() for step in told for figures in step)
        if chosen > MOST_MICRO_BATCHES:
            raise ValueError(f"{chosen} micro-batches are chosen, and {MOST_MICRO_BATCHES} are the most")
        if chosen < 0 or len(told) >= len(micro_batch_tuning.TRIALS) or not (alike and fit):
            raise ValueError(f"{chosen} micro-batches after {len(told)} trials")
        self._trial_timings, self._chosen = told, chosen or self._configured


def free_bytes(device: torch.device) -> int | None:
    """That activations could fill beside what is held now; None: not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
