"""Problems that a worker's heartbeats report: steps that it made the group skip, steps that did not wait for
it, and failed checkpoints.

figures of heartbeats --> update() --> LogEvent, at intervals        for the log, the journal of events
                          text()   --> "made the group skip ..."     for `gridtrain status`, the dashboard
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.quantities import format_count
from gridtrain_coordinator.run.events import LogEvent

SKIP_EVENT_INTERVAL_S = 60.0
"""The shortest time between two events about steps that one worker made the group skip, and between two
events about steps that did not wait for it."""

SKIPS_SHOWN_S = 600.0
"""How long the status mentions the latest skipped step, and the latest step that did not wait."""

CHECKPOINT_EVENT_INTERVAL_S, RECOVERED_INTERVAL_S = 600.0, 60.0
"""The shortest time from one event about failed checkpoints to the next: after an event that reports a
failure and, as the second value, after an event that reports that checkpoints are written again."""

SKIP_REASON = "its gradient was not finite, or too large to be summed"
MISSED_REASON = "its training loop had stalled"
CHECKPOINT_REMEDY = "free space on its disk; its log names the folder"


@dataclass(slots=True)
class StepCounter:
    """A counter of steps in a worker's heartbeats, and when it last grew.

    Attributes:
        total: the latest value.
        latest_step: the worker's step when the counter last grew.
    """

    total: int = 0
    latest_step: int = 0
    _grew_s: float = -math.inf
    _announced: int = 0
    _event_s: float = -math.inf

    def update(self, total: int, step: int, now_s: float) -> int:
        """Set the value; return the number of steps to announce in an event now, or 0."""
        if total < self.total:  # another process with the worker's key
            self._announced = 0
        if total > self.total:
            self.latest_step, self._grew_s = step, now_s
        self.total = total
        new = total - self._announced
        if new <= 0 or now_s < self._event_s + SKIP_EVENT_INTERVAL_S:
            return 0
        self._announced, self._event_s = total, now_s
        return new

    def is_shown(self, now_s: float) -> bool:
        """Return whether the counter has grown within `SKIPS_SHOWN_S`."""
        return now_s < self._grew_s + SKIPS_SHOWN_S

    def describe(self) -> str:
        """Return a description such as "3 steps, the latest near step 17"."""
        return f"{format_count(self.total, 'step')}, the latest near step {self.latest_step}"


@dataclass(slots=True)
class WorkerProblems:
    """The problems of one worker."""

    _skips: StepCounter = field(default_factory=StepCounter)
    _missed: StepCounter = field(default_factory=StepCounter)
    _failed_checkpoints: int = 0
    _next_checkpoint_event_s: float = -math.inf
    _is_failure_announced: bool = False

    def update(self, name: str, step: int, figures: Mapping[str, float], now_s: float) -> list[LogEvent]:
        """Read the figures of a heartbeat of the worker `name`, which has committed `step` steps."""
        skipped = self._skips.update(_count(figures, m.OWN_SKIPPED_STEPS), step, now_s)
        missed = self._missed.update(_count(figures, m.MISSED_STEPS), step, now_s)
        events = []
        if skipped:
            step, reason = self._skips.latest_step, SKIP_REASON
            fields = {"name": name, "step": step, "skipped": skipped, "reason": reason}
            events.append(LogEvent("warning", "step_skipped", fields))
        if missed:
            step, reason = self._missed.latest_step, MISSED_REASON
            fields = {"name": name, "step": step, "missed": missed, "reason": reason}
            events.append(LogEvent("info", "step_missed", fields))
        return events + self._update_checkpoints(name, _count(figures, m.FAILED_CHECKPOINTS), now_s)

    def _update_checkpoints(self, name: str, failed: int, now_s: float) -> list[LogEvent]:
        self._failed_checkpoints = failed
        if failed and now_s >= self._next_checkpoint_event_s:
            self._next_checkpoint_event_s = now_s + CHECKPOINT_EVENT_INTERVAL_S
            self._is_failure_announced = True
            fields = {"name": name, "failed": failed, "remedy": CHECKPOINT_REMEDY}
            return [LogEvent("warning", "checkpoint_failed", fields)]
        if self._is_failure_announced and not failed:
            self._next_checkpoint_event_s = now_s + RECOVERED_INTERVAL_S
            self._is_failure_announced = False
            return [LogEvent("info", "checkpoint_written", {"name": name})]
        return []

    def text(self, now_s: float) -> str:
        """Describe the problems for the status; return "" if there are none."""
        texts = []
        if self._skips.is_shown(now_s):
            texts.append(f"made the group skip {self._skips.describe()}: {SKIP_REASON}")
        if self._missed.is_shown(now_s):
            texts.append(f"was left out of {self._missed.describe()}: {MISSED_REASON}")
        if self._failed_checkpoints:
            texts.append(
                f"could not write {self._failed_checkpoints} checkpoints in a row: {CHECKPOINT_REMEDY}"
            )
        return "; ".join(texts)


def _count(figures: Mapping[str, float], name: str) -> int:
    """Return a counter that a worker reports, or 0 if it is out of bounds."""
    value = figures.get(name, 0.0)
    return int(value) if 0 <= value < 2**53 else 0
