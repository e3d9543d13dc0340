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

from gridtrain.errors import ConfigError
from gridtrain.pipeline.runner import Outcome
from gridtrain.protocol import dividing
from gridtrain.protocol.dividing import Chosen, Figures
from gridtrain.protocol.seats import Seats
from gridtrain.protocol.stage_costs import Order

MOST_MICRO_BATCHES = 1 << 14

ROOM = 4.0
"""What autograd keeps, times this, is to fit into what is free: layers hold more than that while they run,
and others may want memory too."""


def asked_for(micro_batches: int | str) -> int | None:
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


class MicroBatches:
    """Of one run; equal on all its members.  A tracker of the state (`state_sync.Stateful`).

    Args:
        asked: None: to be found out.
        stages, order, ahead: as the run has them.
    """

    def __init__(self, asked: int | None, stages: int, order: Order, ahead: float) -> None:
        self._asked, self._stages, self._order, self._ahead = asked, stages, order, ahead
        self._most = math.inf
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing has been committed."""
        self._told: list[dividing.Told] = []
        self._chosen = self._asked

    @property
    def number(self) -> int:
        """Of the next step."""
        return dividing.trial(len(self._told), self._stages) if self._chosen is None else self._chosen

    @property
    def is_auto(self) -> bool:
        return self._asked is None

    @property
    def weighs(self) -> bool:
        """The next step shows what autograd keeps, before anything larger can be chosen."""
        return self._chosen is None and not self._told

    def weighed(self, kept_bytes: int, largest: int, device: torch.device) -> None:
        """In a step whose largest micro-batch has so many samples, so many bytes were kept at most."""
        free = free_bytes(device)
        self._most = math.inf if free is None else largest * (1 + free / (ROOM * max(1, kept_bytes)))

    def figures(self, outcome: Outcome, samples: int) -> Figures:
        """What this member tells of a step."""
        if self._chosen is not None:
            return Figures()
        most = math.floor(self._most) if math.isfinite(self._most) else math.inf
        return Figures(outcome.forward_s, outcome.backward_s, outcome.turn_s, samples, most)

    def committed(self, told: Sequence[Figures], seats: Seats) -> Chosen | None:
        """A step was; `told`: in rank order.  Returns the choice when it is made."""
        if self._chosen is not None or any(figures.samples == 0 for figures in told):
            return None  # a replica without samples has nothing to tell
        if self._told and len(told) != len(self._told[0]):
            self._told = []  # the group is another one
        self._told.append(tuple(told))
        if not dividing.is_complete(self._told):
            return None
        chosen = dividing.choose(self._told, seats, self._order, self._ahead, self._stages)
        self._told, self._chosen = [], chosen.micro_batches
        return chosen

    def state_dict(self) -> dict[str, Any]:
        told = [[list(astuple(figures)) for figures in step] for step in self._told]
        return {"chosen": self._chosen or 0, "told": told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises `ValueError`, `TypeError` for what `state_dict` never gives."""
        told = [tuple(Figures(*map(float, row)) for row in step) for step in state_dict["told"]]
        chosen = int(state_dict["chosen"])
        alike = all(step and len(step) == len(told[0]) for step in told)
        fit = all(figures.fit() for step in told for figures in step)
        if chosen > MOST_MICRO_BATCHES:
            raise ValueError(f"{chosen} micro-batches are chosen, and {MOST_MICRO_BATCHES} are the most")
        if chosen < 0 or len(told) >= len(dividing.TRIALS) or not (alike and fit):
            raise ValueError(f"{chosen} micro-batches after {len(told)} trials")
        self._told, self._chosen = told, chosen or self._asked


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
