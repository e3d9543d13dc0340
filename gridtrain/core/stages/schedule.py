"""In which order the stages of a pipeline compute their micro-batches: the schedule as data.

Every stage works through its own list, and waits where the payload of an action has not arrived.
    fill-drain (GPipe, arXiv 1811.06965, figure 2c), S = 3, M = 4       time ->
    stage 0    F0  F1  F2  F3   .   .   .   .  B0  B1  B2  B3
    stage 1     .  F0  F1  F2  F3   .   .  B0  B1  B2  B3   .
    stage 2     .   .  F0  F1  F2  F3  B0  B1  B2  B3   .   .

    1F1B (PipeDream-Flush, arXiv 2006.09503, section 2.2): as long; stage s keeps S - s micro-batches, not M
    stage 0    F0  F1  F2   .   .  B0  F3  B1   .  B2   .  B3
    stage 1     .  F0  F1   .  B0  F2  B1  F3  B2   .  B3   .
    stage 2     .   .  F0  B0  F1  B1  F2  B2  F3  B3   .   .

Backward runs in ascending order in both, on every stage: so a parameter's gradient is the same sum in the
same order for every schedule and every number of stages (`docs/decisions/0026`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from gridtrain.core.messages import Channel
from gridtrain.errors import ConfigError, LocalProtocolError


class ActionKind(Enum):
    """Forward or backward of a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


class PayloadKind(IntEnum):
    """`Channel.kind` of payloads between stages; 0 is the exchange of gradients among replicas."""

    ACTIVATIONS = 1  # stage s to s + 1, index: the micro-batch
    GRADIENTS = 2  # stage s to s - 1, of these activations, index: the micro-batch
    TIED_GRADIENTS = 3  # between the stages that hold a tied parameter, index: which one
    TIED_PARAMETERS = 4  # from the lowest of these stages to the others, index: which one


def activations_channel(micro_batch: int) -> Channel:
    return Channel(kind=PayloadKind.ACTIVATIONS, index=micro_batch)


def gradients_channel(micro_batch: int) -> Channel:
    return Channel(kind=PayloadKind.GRADIENTS, index=micro_batch)


def tied_gradients_channel(index: int) -> Channel:
    return Channel(kind=PayloadKind.TIED_GRADIENTS, index=index)


def tied_parameters_channel(index: int) -> Channel:
    return Channel(kind=PayloadKind.TIED_PARAMETERS, index=index)


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch."""

    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"


def divide_samples(samples: int, micro_batches: int) -> tuple[int, ...]:
    """The sizes of the micro-batches of a mini-batch: as even as possible, larger ones first, none empty.

    Seven samples in three micro-batches: (3, 2, 2).  Fewer samples than micro-batches: one sample in each,
    and fewer micro-batches.  No samples: ().
    """
    if samples < 0 or micro_batches < 1:
        raise ConfigError(
            f"{samples} samples cannot be divided into {micro_batches} micro-batches",
            remedy="at least one micro-batch, and no less than 0 samples",
        )
    count = min(samples, micro_batches)
    return tuple(samples // count + (i < samples % count) for i in range(count))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of S stages and M micro-batches; `actions[s]` are those of stage s, in order."""

    name: str
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    def max_in_flight(self, stage: int) -> int:
        """The largest number of micro-batches whose activations this stage keeps at one time."""
        now = most = 0
        for action in self.actions[stage]:
            now += 1 if action.kind is ActionKind.FORWARD else -1
            most = max(most, now)
        return most


def fill_drain(stages: int, micro_batches: int) -> Schedule:
    """The schedule of GPipe: all forwards, then all backwards, ascending.  A stage keeps M micro-batches."""
    return _scheduled("fill-drain", stages, micro_batches, [micro_batches] * stages)


def one_forward_one_backward(stages: int, micro_batches: int, *, ahead: float = 0.0) -> Schedule:
    """The schedule of PipeDream-Flush: each backward as early as possible.  Stage s keeps min(M, S - s).

    Args:
        stages: S >= 1.
        micro_batches: M >= 0.
        ahead: further micro-batches in flight for each stage that follows.  Between machines a payload takes
            time, and without these the next-to-last stage waits for each one (see `ahead_for`); with infinity
            this is fill-drain.
    """
    warm_up = [
        min(micro_batches, math.ceil((stages - 1 - s) * (1 + ahead)) if s < stages - 1 else 0)
        for s in (range(stages) if not math.isinf(ahead) else ())
    ] or [micro_batches] * stages
    name = "1F1B" if not ahead else f"1F1B, {ahead:g} ahead"
    return _scheduled(name, stages, micro_batches, warm_up)


def ahead_for(forward_s: float, backward_s: float, hop_s: float) -> float:
    """The `ahead` with which 1F1B is as fast as fill-drain when a payload takes `hop_s` to the next stage.

    A micro-batch returns to a stage that h others follow after (h + 1)(forward + backward) + 2 h hop seconds.
    To have work for that time, the stage needs 2 hop / (forward + backward) further micro-batches for each
    hop; and one more, since forward and backward alternate whichever of the two has arrived.  Without that
    one a schedule took up to 22 % longer than fill-drain, with it never longer (S <= 8, M <= 32, hops of 0.03
    to 5 (forward + backward)).
    """
    return 1 + 2 * hop_s / (forward_s + backward_s) if hop_s > 0 else 0.0


def _scheduled(name: str, stages: int, micro_batches: int, warm_up: Sequence[int]) -> Schedule:
    """Each stage: `warm_up` forwards, then forward and backward alternately, then the remaining backwards."""
    if stages < 1 or micro_batches < 0:
        raise ConfigError(
            f"{stages} stages and {micro_batches} micro-batches",
            remedy="at least 1 stage, and no less than 0 micro-batches",
        )
    everything = []
    for first in warm_up:
        actions = [Action(ActionKind.FORWARD, m) for m in range(first)]
        for m in range(first, micro_batches):
            actions += [Action(ActionKind.FORWARD, m), Action(ActionKind.BACKWARD, m - first)]
        actions += [Action(ActionKind.BACKWARD, m) for m in range(micro_batches - first, micro_batches)]
        everything.append(tuple(actions))
    return Schedule(name, stages, micro_batches, tuple(everything))


@dataclass(frozen=True, slots=True)
class TimeSlot:
    """When a stage computes an action; only work and links take time."""

    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """`slots[s]` are those of stage s, ascending."""

    slots: tuple[tuple[TimeSlot, ...], ...]

    @property
    def makespan_s(self) -> float:
        return max((slot.stop_s for slots in self.slots for slot in slots), default=0.0)

    def busy_share(self, stage: int) -> float:
        """The share of the time in which this stage computes; the rest is its bubble."""
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
    """The timetable of a schedule.

    Args:
        forward_s, backward_s: of a micro-batch; one number, or one for each stage.

    A payload occupies its link, one for each direction, for `send_s` and arrives `latency_s` later.  With
    `send_s = latency_s = 0` and even stages both schedules take (M + S - 1)(forward + backward).
    """
    simulation = _ScheduleSimulation(
        schedule, _per_stage(forward_s, schedule), _per_stage(backward_s, schedule), send_s, latency_s
    )
    return Timetable(tuple(tuple(slots) for slots in simulation.slots))


def _per_stage(value_s: float | Sequence[float], schedule: Schedule) -> Sequence[float]:
    each = [value_s] * schedule.stages if isinstance(value_s, int | float) else value_s
    if len(each) != schedule.stages:
        raise LocalProtocolError(f"{len(each)} times for {schedule.stages} stages")
    return each


class _ScheduleSimulation:
    """Works through the lists of all stages; raises `LocalProtocolError` where none can go on."""

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
            raise LocalProtocolError(f"the schedule {schedule.name} waits for itself: no stage can go on")

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
        """Send the result to the neighbour; the last stage begins the backward of a forward itself."""
        last = self._schedule.stages - 1
        if action.kind is ActionKind.FORWARD and stage == last:
            self._ready_s[stage, Action(ActionKind.BACKWARD, action.micro_batch)] = stop_s
            return
        sent_s = max(stop_s, self._link_free_s.get((stage, action.kind), 0.0)) + self._send_s
        self._link_free_s[stage, action.kind] = sent_s
        neighbour = stage + 1 if action.kind is ActionKind.FORWARD else stage - 1
        self._ready_s[neighbour, action] = sent_s + self._latency_s


def draw_schedule(schedule: Schedule, *, forward: int = 1, backward: int = 1, hop: int = 0) -> str:
    """The schedule as text, a line for each stage; `forward`, `backward` and `hop` (latency) in columns.

    `=` continues work that is longer than one column; `.` is the bubble.
    """
    table = timetable(schedule, forward, backward, latency_s=hop)
    columns = round(table.makespan_s)
    width = max((len(str(slot.action)) for slots in table.slots for slot in slots), default=1) + 2
    lines = []
    for stage, slots in enumerate(table.slots):
        cells = ["."] * columns
        for slot in slots:
            start, stop = round(slot.start_s), round(slot.stop_s)
            cells[start:stop] = [str(slot.action), *["="] * (stop - start - 1)]
        lines.append(f"stage {stage}  " + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines)
