"""Means of numbers over the members, for logs (`Grid.mean`) and for the weights of a step's batches.

Each call that the loop makes in a step has an index.  A member that enters a generation makes all calls of
its step, so the other members contribute their values for the step once more in each new generation.
"""

from __future__ import annotations

import math

from gridtrain.core.member.scalar_means import WEIGHTS_INDEX
from gridtrain.runtime.group_connection import GroupConnection
from gridtrain.runtime.step_plan import StepPlan


class GroupMeans:
    """This worker's contributions to means.  Use it on the training thread."""

    def __init__(self, connection: GroupConnection) -> None:
        self._connection = connection
        self._step, self._generation = 0, -1
        self._values: list[float] = []  # this worker's values in `_step`
        self._announced: tuple[int, int, int] | None = None  # generation, step and weight

    def average(self, step: int, generation: int, value: float) -> float:
        """Return the mean of the workers' values, or `value` if the group changes first."""
        if step != self._step:
            self._step, self._values = step, []
        self.repeat(step, generation)
        self._values.append(value)
        index = len(self._values) - 1
        self._connection.loop.request_average(step, index, value)
        self._announced = None  # its answer is no longer awaited
        mean = self._await(step, index)
        if mean is None:  # the generation had ended, or had not started
            self._generation = -1
            return value
        return mean

    def repeat(self, step: int, generation: int) -> None:
        """Contribute this step's values once more in a new generation."""
        if generation != self._generation:
            self._generation = generation
            for index, value in enumerate(self._values if step == self._step else ()):
                self._connection.loop.request_average(step, index, value)

    def announce_weight(self, generation: int, step: int, weight: int) -> None:
        """Contribute the weight of this worker's batch, without waiting for the others' weights."""
        self._announced = generation, step, weight
        self._connection.loop.request_average(step, WEIGHTS_INDEX, weight)

    def total_weight(self, plan: StepPlan, weight: int) -> int | None:
        """See `GroupSession.total_weight`."""
        if self._announced != (plan.generation, plan.step, weight):
            self.announce_weight(plan.generation, plan.step, weight)
        mean = self._await(plan.step, WEIGHTS_INDEX)
        if mean is None or not math.isfinite(mean):
            return None
        total = round(mean * plan.world_size)
        return total if total >= weight else None  # otherwise a member has sent a wrong value

    def _await(self, step: int, index: int) -> float | None:
        timeout_s = self._connection.config.deadlines.first_step_s
        return self._connection.loop.await_average(step, index, timeout_s)
