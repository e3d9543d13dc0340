"""Means of numbers over the members, for logs (`Grid.mean`) and for the weights of a step's batches.

Each call that the loop makes in a step has an index.  A member that enters a generation makes all calls of
its step, so the other members contribute their values for the step once more in each new generation.

A call that only some of the workers make costs each step about a heartbeat: it is logged, and where most
workers do not make it, it ends in an error.
"""

from __future__ import annotations

import logging
import math

from gridtrain.core.group import member_events as io
from gridtrain.core.member.scalar_means import WEIGHTS_INDEX
from gridtrain.core.messages import LONE_MEANS
from gridtrain.errors import ConfigError
from gridtrain.quantities import MAX_NAMES, list_first
from gridtrain.runtime.group_connection import GroupConnection
from gridtrain.runtime.step_plan import StepPlan

log = logging.getLogger("gridtrain")

MAX_LONE_CALLS = 3
"""The number of consecutive calls without most other workers that end in an error."""

REMEDY = (
    "call grid.mean on all workers at the same point of the loop: not under `if grid.is_first:`, and at "
    "steps chosen by grid.step instead of a counter of the script"
)


class GroupMeans:
    """This worker's contributions to means.  Use it on the training thread."""

    def __init__(self, connection: GroupConnection) -> None:
        self._connection = connection
        self._step, self._generation = 0, -1
        self._values: list[float] = []  # this worker's values in `_step`
        self._announced: tuple[int, int, int] | None = None  # generation, step and weight
        self._lone_calls: dict[int, int] = {}  # consecutive ones by index
        self._lone_step, self._lone_steps = -1, 0  # the latest step with a lone call, and the number of them
        self._late_calls = 0

    def average(self, step: int, generation: int, value: float) -> float:
        """Return the mean of the workers' values, or `value` if the group changes first."""
        if step != self._step:
            self._step, self._values = step, []
        self.repeat(step, generation)
        self._values.append(value)
        index = len(self._values) - 1
        self._connection.loop.request_average(step, index, value)
        self._announced = None  # its answer is no longer awaited
        answer = self._await_calls(step, index)
        if answer is None or answer.value is None:  # the generation had ended, or had not started
            self._generation = -1
            return value
        self._check_missing(answer)
        return answer.value

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
        answer = self._await(plan.step, WEIGHTS_INDEX)
        if answer is None or answer.value is None or not math.isfinite(answer.value):
            return None
        total = round(answer.value * plan.world_size)
        return total if total >= weight else None  # otherwise a member has sent a wrong value

    def _await(self, step: int, index: int) -> io.DeliverMean | None:
        timeout_s = self._connection.config.deadlines.first_step_s
        return self._connection.loop.await_average(step, index, timeout_s)

    def _await_calls(self, step: int, index: int) -> io.DeliverMean | None:
        """Wait for the other workers' calls, which an evaluation may delay; log a long wait."""
        soon_s = self._connection.config.deadlines.patience_floor_s
        answer = self._connection.loop.await_average(step, index, soon_s)
        if answer is not None:
            return answer
        self._late_calls += 1
        if _is_logged(self._late_calls):
            text = "grid.mean in step %d has waited %.0f s for workers that have not called it yet"
            log.warning(text, step + 1, soon_s)
        if (answer := self._await(step, index)) is None:
            log.warning("grid.mean in step %d had no answer; this worker uses its own number", step + 1)
        return answer

    def _check_missing(self, answer: io.DeliverMean) -> None:
        """Log, and count for the status, a call that other workers have not made.

        Raises `ConfigError` if this happens repeatedly, unless most workers make the call: one worker with
        another script must not end the run of the others.
        """
        count = self._lone_calls.get(answer.index, 0) + 1 if answer.missing else 0
        self._lone_calls[answer.index] = count
        if not count:
            return
        names, loop = list_first(answer.missing, MAX_NAMES), self._connection.loop
        if count >= MAX_LONE_CALLS and 2 * len(answer.missing) >= loop.mailbox.snapshot.world_size:
            raise ConfigError(
                f"grid.mean was called {count} times in a row without {names}, up to step {answer.step + 1}",
                remedy=REMEDY,
            )
        if answer.step != self._lone_step:
            self._lone_step, self._lone_steps = answer.step, self._lone_steps + 1
            loop.heartbeat.add_figures({LONE_MEANS: self._lone_steps})
            if _is_logged(self._lone_steps):
                where = f"in step {answer.step + 1} without {names}"
                log.warning("grid.mean was called %s -> %s", where, REMEDY)


def _is_logged(count: int) -> bool:
    """Return whether to log an event that has happened `count` times: more and more rarely."""
    return count & (count - 1) == 0
