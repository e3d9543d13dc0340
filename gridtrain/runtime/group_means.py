"""`grid.mean` on the training thread: repeats calls, and raises an error if other workers do not call it.

Each call that the loop makes has a step and an index (`scalar_means`).  If the generation changes during a
call, the call is repeated in the next one.  A newcomer makes all calls of its first step, so the other
members repeat their calls of the latest step in each new generation.

A call that only some of the workers make delays each step by about one heartbeat interval.  Such a call is
logged, and on rank 0 raises an error if it is repeated and at least half of the workers do not make it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group import member_events as ev
from gridtrain.core.member.scalar_means import BEFORE_STEP_INDEX, MAX_OPEN_MEANS, WEIGHTS_INDEX, MeanKey
from gridtrain.core.messages import LONE_MEANS
from gridtrain.errors import ConfigError
from gridtrain.quantities import MAX_NAMES, list_first
from gridtrain.runtime.group_connection import GroupConnection
from gridtrain.runtime.mailbox.step_plan import StepPlan

log = logging.getLogger("gridtrain")

MAX_LONE_CALLS = 3
"""Number of consecutive calls missed by other workers after which rank 0 raises an error, if at least half of
all workers missed the latest one."""

REMEDY = (
    "call grid.mean on all workers at the same point of the loop: not under `if grid.is_first:`, and at "
    "steps chosen by grid.step instead of a counter of the script"
)


class GroupMeans:
    """This worker's contributions to means.  Use it on the training thread.

    Args:
        connection: the connection to the group.
        await_generation: a function that waits for a generation in which the trainer can still make a call in
            the given step.  It returns the generation's number, or None if there is no such generation.
    """

    def __init__(self, connection: GroupConnection, await_generation: Callable[[int], int | None]) -> None:
        self._connection, self._await_generation = connection, await_generation
        self._generation = -1
        self._values: dict[MeanKey, float] = {}  # of this worker's latest calls
        self._place, self._count = (-1, 0), 0  # step and first index of the latest calls, and their number
        self._announced: tuple[int, int, int] | None = None  # generation, step and weight
        self._lone_calls: dict[int, int] = {}  # consecutive calls missed by others, by index
        self._lone_step, self._lone_steps = -1, 0  # the latest step with a lone call, and the number of them
        self._late_calls = 0

    def begin_turn(self, step: int) -> None:
        """Number the calls of this step's turn from 0.

        Only the values of the previous step, and those of calls for this step before its batch was received,
        are kept to be contributed again.  Values of earlier calls with this step's batch, and values of later
        steps, are discarded, because the turn may be repeated with another batch or after a rollback.
        """
        self._place, end = (-1, 0), (step, BEFORE_STEP_INDEX)
        self._values = {key: each for key, each in self._values.items() if (step - 1, 0) <= key < end}

    def average(self, step: int, generation: int, value: float, *, is_before_step: bool) -> float:
        """Return the mean of the workers' values.

        Returns `value` if the mean does not arrive in time, if this worker has to leave the group, or if the
        generation has ended and this call cannot be repeated in another generation.

        Args:
            step: the number of the next `optimizer.step()`.
            generation: the current generation.
            value: this worker's value.
            is_before_step: whether the script has the batch of this step.

        Raises `ConfigError` on rank 0 if other workers repeatedly do not make the call (`MAX_LONE_CALLS`).
        """
        first = BEFORE_STEP_INDEX if is_before_step else 0
        if (step, first) != self._place:
            self._place, self._count = (step, first), 0
        self.repeat(generation)
        while len(self._values) >= MAX_OPEN_MEANS:
            del self._values[next(iter(self._values))]
        index = first + self._count
        self._count += 1
        self._values.pop((step, index), None)  # the awaited call is repeated last
        self._values[step, index] = value
        self._connection.loop.request_average(step, index, value)
        self._announced = None  # its answer is no longer awaited
        while (answer := self._await_calls(step, index)) is not None and answer.value is None:
            self._generation = -1  # the generation has ended, or has not started
            if (new := self._await_generation(step)) is None:
                return value
            self.repeat(new)
        if answer is None or answer.value is None:
            return value
        self._check_missing(answer)
        return answer.value

    def repeat(self, generation: int) -> None:
        """Contribute the latest values again if `generation` is a new generation."""
        if generation != self._generation:
            self._generation = generation
            self._announced = None  # the answer is dropped, so the weight is announced again
            for key, value in self._values.items():
                self._connection.loop.request_average(*key, value)

    def announce_weight(self, generation: int, step: int, weight: int) -> None:
        """Contribute the weight of this worker's batch, without waiting for the other workers' weights."""
        self._announced = generation, step, weight
        self._connection.loop.request_average(step, WEIGHTS_INDEX, weight)

    def total_weight(self, plan: StepPlan, weight: int) -> int | None:
        """See `GroupSession.total_weight`."""
        if self._announced != (plan.generation, plan.step, weight):
            self.announce_weight(plan.generation, plan.step, weight)
        answer = self._await(plan.step, WEIGHTS_INDEX)
        if answer is None or answer.value is None:
            return None
        if not math.isfinite(total_weight := answer.value * plan.world_size):
            return None
        total = round(total_weight)
        return total if total >= weight else None  # otherwise a member has sent a wrong value

    def _await(self, step: int, index: int) -> ev.DeliverMean | None:
        timeout_s = self._connection.config.deadlines.first_step_s
        return self._connection.loop.await_average(step, index, timeout_s)

    def _await_calls(self, step: int, index: int) -> ev.DeliverMean | None:
        """Wait for the other workers' calls, which an evaluation may delay; log a long wait."""
        soon_s = self._connection.config.deadlines.patience_floor_s
        answer = self._connection.loop.await_average(step, index, soon_s)
        if answer is not None or self._connection.should_interrupt:
            return answer
        self._late_calls += 1
        if _is_logged(self._late_calls):
            text = "grid.mean in step %d has waited %.0f s for workers that have not called it yet"
            log.warning(text, step + 1, soon_s)
        if (answer := self._await(step, index)) is None:
            log.warning("grid.mean in step %d received no reply; using this worker's own value", step + 1)
        return answer

    def _check_missing(self, answer: ev.DeliverMean) -> None:
        """Log a call that other workers have not made, and count it in the figures for `gridtrain status`.

        Raises `ConfigError` after `MAX_LONE_CALLS` such calls in a row, unless more than half of the workers
        have made the latest one: a worker with a different script must not end the run of the others.  Only
        rank 0 raises it, because the others know only from rank 0 which workers have not made the
        call.
        """
        count = self._lone_calls.get(answer.index, 0) + 1 if answer.missing else 0
        self._lone_calls[answer.index] = count
        if not count:
            return
        names, loop = list_first(answer.missing, MAX_NAMES), self._connection.loop
        here = loop.mailbox.snapshot
        if count >= MAX_LONE_CALLS and here.rank == ROOT and 2 * len(answer.missing) >= here.world_size:
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
    """Return whether to log the `count`-th occurrence of an event: only if `count` is a power of two."""
    return count & (count - 1) == 0
