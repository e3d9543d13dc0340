"""The times at which the stages of a schedule compute, for tests and diagrams.

`gridtrain.core.stages.step_time` predicts a step with a network model; this is the independent, simpler
computation with which it is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.stages.schedule import Action, ActionKind, Schedule
from gridtrain.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class TimeSlot:
    """The time at which a stage computes an action."""

    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """The times of all actions of a schedule; `slots[s]` are the slots of stage s in ascending order."""

    slots: tuple[tuple[TimeSlot, ...], ...]

    @property
    def makespan_s(self) -> float:
        return max((slot.stop_s for slots in self.slots for slot in slots), default=0.0)

    def busy_share(self, stage: int) -> float:
        """Return the share of the time in which this stage computes; the rest is its bubble."""
        if not self.slots[stage]:
            return 0.0
        return sum(slot.stop_s - slot.start_s for slot in self.slots[stage]) / self.makespan_s


def timetable(
    schedule: Schedule,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    *,
    send_s: float = 0.0,
    latency_s: float = 0.0,
) -> Timetable:
    """Compute the timetable of a schedule.

    With `send_s = latency_s = 0` and even stages both schedules take (M + S - 1)(forward + backward).

    Args:
        forward_s, backward_s: the time of a micro-batch, as one number for all stages or a sequence with one
            number for each stage.
        send_s: how long a payload occupies its link; each direction has its own link.
        latency_s: the time from the end of sending until the payload arrives.

    Raises:
        LocalProtocolError: the schedule has a deadlock, or a sequence does not have one time for each stage.
    """
    simulation = _ScheduleSimulation(
        schedule, _per_stage(forward_s, schedule), _per_stage(backward_s, schedule), send_s, latency_s
    )
    return Timetable(tuple(tuple(slots) for slots in simulation.slots))


def _per_stage(value_s: float | Sequence[float], schedule: Schedule) -> Sequence[float]:
    each = [value_s] * schedule.stages if isinstance(value_s, int | float) else value_s
    if len(each) != schedule.stages:
        raise LocalProtocolError(f"{len(each)} durations were given for {schedule.stages} stages")
    return each


class _ScheduleSimulation:
    """Computes the times of all stages' actions; raises `LocalProtocolError` if no stage can continue."""

    def __init__(
        self,
        schedule: Schedule,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        send_s: float,
        latency_s: float,
    ) -> None:
        self._schedule, self._send_s, self._latency_s = schedule, send_s, latency_s
        self._durations_s = {ActionKind.FORWARD: forward_s, ActionKind.BACKWARD: backward_s}
        self._ready_s: dict[tuple[int, Action], float] = {}
        self._link_free_s: dict[tuple[int, ActionKind], float] = {}
        self.slots: list[list[TimeSlot]] = [[] for _ in range(schedule.stages)]
        while any(self._advance(stage) for stage in range(schedule.stages)):
            pass
        if any(len(done) < len(due) for done, due in zip(self.slots, schedule.actions, strict=True)):
            raise LocalProtocolError(f"the schedule {schedule.name} has a deadlock: no stage can continue")

    def _advance(self, stage: int) -> bool:
        before = len(self.slots[stage])
        for action in self._schedule.actions[stage][before:]:
            ready_s = self._ready_time_s(stage, action)
            if ready_s is None:
                break
            start_s = max(ready_s, self.slots[stage][-1].stop_s if self.slots[stage] else 0.0)
            stop_s = start_s + self._durations_s[action.kind][stage]
            self.slots[stage].append(TimeSlot(action, start_s, stop_s))
            self._deliver(stage, action, stop_s)
        return len(self.slots[stage]) > before

    def _ready_time_s(self, stage: int, action: Action) -> float | None:
        if action.kind is ActionKind.FORWARD and stage == 0:
            return 0.0
        return self._ready_s.get((stage, action))

    def _deliver(self, stage: int, action: Action, stop_s: float) -> None:
        """Send an action's result to the neighbour; the last stage instead makes its backward ready."""
        last = self._schedule.stages - 1
        if action.kind is ActionKind.FORWARD and stage == last:
            self._ready_s[stage, Action(ActionKind.BACKWARD, action.micro_batch)] = stop_s
            return
        sent_s = max(stop_s, self._link_free_s.get((stage, action.kind), 0.0)) + self._send_s
        self._link_free_s[stage, action.kind] = sent_s
        neighbour = stage + 1 if action.kind is ActionKind.FORWARD else stage - 1
        self._ready_s[neighbour, action] = sent_s + self._latency_s
