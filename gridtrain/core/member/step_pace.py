"""How long this group's steps take, and so how long a member may be silent; and this worker's signs of life.

Decides both from what this worker sees itself.  Never reads a clock, and never decides who is to blame.

    begun    committed   committed        a step ends where the next begins: the next one's compute is in it
      |---------|-----------|------>      usual = 0.9 usual + 0.1 last
    first_step_s  floor + factor * usual  patience: before the first step is through, and then
"""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.member_events import HeartbeatDue


class StepPace:
    """See the module's text.  Both outlive a generation; a step that one interrupts is not counted."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._step_start_s: float | None = None
        self._mean_step_s: float | None = None
        self._heartbeats = 0
        self._progress = 0

    @property
    def timeout_s(self) -> float:
        """How long a member may show neither vote nor sign of life."""
        if self._mean_step_s is None:
            return self._deadlines.first_step_s
        return self._deadlines.patience_floor_s + self._deadlines.patience_factor * self._mean_step_s

    def step_started(self, now_s: float) -> None:
        """A part of the step is submitted."""
        self._step_start_s = now_s if self._step_start_s is None else self._step_start_s

    def step_committed(self, now_s: float) -> None:
        if self._step_start_s is not None:
            took_s = now_s - self._step_start_s
            usual_s = self._mean_step_s if self._mean_step_s is not None else took_s
            self._mean_step_s = 0.9 * usual_s + 0.1 * took_s
        self._step_start_s = now_s

    def step_interrupted(self) -> None:
        """Another generation begins."""
        self._step_start_s = None

    def update_progress(self, progress: int) -> bool:
        """Something has moved here since this was asked last."""
        stirred, self._progress = progress > self._progress, progress
        return stirred

    def make_heartbeat(self, step: int, pulse: HeartbeatDue) -> m.Heartbeat:
        """For the coordinator."""
        self._heartbeats += 1
        return m.Heartbeat(self._heartbeats, step, pulse.progress, pulse.metrics)
