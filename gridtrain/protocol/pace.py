"""How long this group's steps take, and so how long a member may be silent; and this worker's signs of life.

Decides both from what this worker sees itself.  Never reads a clock, and never decides who is to blame.

    begun    committed   committed        a step ends where the next begins: the next one's compute is in it
      |---------|-----------|------>      usual = 0.9 usual + 0.1 last
    first_step_s  floor + factor * usual  patience: before the first step is through, and then
"""

from __future__ import annotations

from gridtrain.config import Deadlines
from gridtrain.protocol import messages as m
from gridtrain.protocol.member_io import Pulse


class Pace:
    """See the module's text.  Both outlive a generation; a step that one interrupts is not counted."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._began_s: float | None = None
        self._usual_s: float | None = None
        self._beats = 0
        self._progress = 0

    @property
    def patience_s(self) -> float:
        """How long a member may show neither vote nor sign of life."""
        if self._usual_s is None:
            return self._deadlines.first_step_s
        return self._deadlines.patience_floor_s + self._deadlines.patience_factor * self._usual_s

    def begun(self, now_s: float) -> None:
        """A part of the step is submitted."""
        self._began_s = now_s if self._began_s is None else self._began_s

    def committed(self, now_s: float) -> None:
        if self._began_s is not None:
            took_s = now_s - self._began_s
            usual_s = self._usual_s if self._usual_s is not None else took_s
            self._usual_s = 0.9 * usual_s + 0.1 * took_s
        self._began_s = now_s

    def interrupted(self) -> None:
        """Another generation begins."""
        self._began_s = None

    def stirred(self, progress: int) -> bool:
        """Something has moved here since this was asked last."""
        stirred, self._progress = progress > self._progress, progress
        return stirred

    def beat(self, step: int, pulse: Pulse) -> m.Beat:
        """For the coordinator."""
        self._beats += 1
        return m.Beat(self._beats, step, pulse.progress, pulse.figures)
