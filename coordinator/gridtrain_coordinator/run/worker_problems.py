"""Turns the problems that workers report, such as skipped steps, into log events, alerts and status messages.

one worker's figures  --> WorkerProblems.update --> LogEvent, at intervals       for the log
                          WorkerProblems.text   --> "made the group skip ..."    for the worker's status
all members' figures  --> SkippedSteps          --> "the last 558 steps ..."     for the run's status and end
                          SkipAlert             --> LogEvent                     when an alert begins or ends
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high

from gridtrain.core import messages as m
from gridtrain.quantities import ALERT_SKIPS, SKIP_REASON, describe_skipped, format_count, list_first
from gridtrain_coordinator.run.events import LogEvent

SKIP_EVENT_INTERVAL_S = 60.0
"""The shortest time between two events of one kind about a worker: steps that it made the group skip, steps
that the group took without it, or calls to `grid.mean` that no other worker made.  The event about the
worker's return may come sooner."""

SKIPS_SHOWN_S = 600.0
"""How long the status mentions the latest skipped step, and the latest step taken without the worker."""

CHECKPOINT_EVENT_INTERVAL_S, RECOVERED_INTERVAL_S = 600.0, 60.0
"""The shortest time to the next event about checkpoints: after an event about a failure, and after the
event that checkpoints are being written again.  The same times apply to uploads."""

ALERT_CHECK_INTERVAL_S = 2.0
"""The shortest time between two checks of whether the alert begins or ends, which read all members' reports;
long enough for a heartbeat of every member, so that the second check knows who caused the skipped steps."""

MAX_CAUSES_SHOWN = 3

OWN_SKIP_REASON = "its gradient was not finite, or too large to be summed"
MISSED_REASON = "its training loop had stalled"
BACK_REASON = f"{MISSED_REASON}; it takes part again, after"
LONE_MEAN_REMEDY = "all workers must call it at the same point; its log names the workers that do not call it"
CHECKPOINT_REMEDY = "free space on its disk; its log names the folder"
EXPORT_REMEDY = "free space on its disk, or make the folder writable; its log names the folder"
UPLOAD_REMEDY = "check the storage and its credentials; its log names the URL"


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """The skipped steps of the run, as its members report them.

    Attributes:
        skipped_samples: the number of samples in skipped steps.
        samples: the number of samples in all steps.
        in_a_row: the number of consecutive skipped steps, up to the latest step.
        step: the number of steps that the reports cover.
        causes: the names of the members whose gradients caused these consecutive skipped steps; empty if
            all members' gradients did, or if the cause is not known.
    """

    skipped_samples: int = 0
    samples: int = 0
    in_a_row: int = 0
    step: int = 0
    causes: tuple[str, ...] = ()

    @classmethod
    def from_reports(cls, reports: Sequence[tuple[int, Mapping[str, float]]]) -> SkippedSteps:
        """Combine the members' reports, which consist of their steps and figures.

        Each number is the median, or the higher of the two middle values.  It therefore stays in the range
        that the others report even if fewer than half of the members report wrong numbers, or do not know the
        steps before they joined.
        """
        if not reports:
            return cls()
        names = m.SKIPPED_SAMPLES, m.COMMITTED_SAMPLES, m.SKIPPED_IN_A_ROW
        skipped, samples, in_a_row = (
            median_high(_count(figures, name) for _, figures in reports) for name in names
        )
        step = median_high(step for step, _ in reports)
        return cls(min(skipped, samples), samples, min(in_a_row, step), step)

    @property
    def alert(self) -> str:
        """The alert for the headline of the status; "" unless many consecutive steps are skipped."""
        if self.in_a_row < ALERT_SKIPS:
            return ""
        steps = f"the last {self.in_a_row:,} steps were skipped, {SKIP_REASON}"
        return f"{m.NOTHING_LEARNED}: {steps}{self._causes_text()}"

    def _causes_text(self) -> str:
        if not self.causes:
            return ""
        is_one = len(self.causes) == 1
        names, whose = list_first(self.causes, MAX_CAUSES_SHOWN), "its" if is_one else "their"
        kick = f"it with gridtrain kick {names}" if is_one else "one with gridtrain kick NAME"
        return f"; caused by {names}: check {whose} loss and data, or remove {kick}"

    def ending(self, steps: int = 0) -> str:
        """Return what to append to a sentence about the end of the run; "" if few steps were skipped.

        Args:
            steps: the number of steps of the run; 0 if the run continues.
        """
        of = "" if self.step == steps else f" of the first {self.step:,} steps"
        last = self.in_a_row if ALERT_SKIPS <= self.in_a_row < self.step else 0
        learned = describe_skipped(self.skipped_samples, self.samples, last, of)
        return f"; {learned}" if learned else ""


@dataclass(slots=True)
class SkipAlert:
    """Decides when to announce that the alert of `SkippedSteps` begins or ends.

    An alert begins once two successive checks find it, but no sooner than `SKIP_EVENT_INTERVAL_S` after the
    previous alert began.

    Attributes:
        reason: the announced alert; empty after its end.
    """

    reason: str = ""
    _is_found: bool = False
    _began_s: float = -math.inf
    _checked_s: float = -math.inf

    def is_check_due(self, figures: Mapping[str, float], now_s: float) -> bool:
        """Return whether to call `update` after a member's heartbeat with these figures."""
        may_change = self._is_found or _count(figures, m.SKIPPED_IN_A_ROW) >= ALERT_SKIPS
        return may_change and now_s >= self._checked_s + ALERT_CHECK_INTERVAL_S

    def update(self, skipped: SkippedSteps, now_s: float) -> list[LogEvent]:
        """Return an event if the alert has begun or ended."""
        was_found, self._is_found, self._checked_s = self._is_found, bool(skipped.alert), now_s
        if self.reason and not self._is_found:
            self.reason = ""
            reason = f"steps are applied again, near step {skipped.step:,}"
            return [LogEvent("info", "learning_again", {"reason": reason})]
        is_allowed = now_s >= self._began_s + SKIP_EVENT_INTERVAL_S
        if not self.reason and was_found and self._is_found and is_allowed:
            self.reason, self._began_s = skipped.alert, now_s
            return [LogEvent("warning", "not_learning", {"reason": self.reason})]
        return []


@dataclass(slots=True)
class StepCounter:
    """A counter of steps in a worker's heartbeats, and when it last grew.

    The first value is the worker's count before this coordinator knew the worker, and is not announced.

    Attributes:
        total: the latest value.
        latest_step: the worker's step when the counter last grew.
    """

    total: int = 0
    latest_step: int = 0
    _grew_s: float = -math.inf
    _announced: int | None = None
    _event_s: float = -math.inf
    _row_start: int | None = None  # the value before a row of steps that was announced, until its end

    def update(self, total: int, step: int, now_s: float) -> int:
        """Set the value; return the number of steps that an event should announce now, or 0 for no event."""
        if self._announced is None:
            self.total = self._announced = total
        if total < self.total:  # another process with the worker's key
            self._announced, self._row_start = 0, None
        if total > self.total:
            self.latest_step, self._grew_s = step, now_s
        self.total = total
        new = total - self._announced
        if new <= 0 or now_s < self._event_s + SKIP_EVENT_INTERVAL_S:
            return 0
        self._row_start = self._announced if self._row_start is None else self._row_start
        self._announced, self._event_s = total, now_s
        return new

    def end_row(self, step: int) -> tuple[int, int]:
        """Return, for a row of steps that has ended, the number of steps that no event has announced, and the
        total number; (0, 0) if there is no such row.

        Args:
            step: the worker's step.
        """
        if self._row_start is None or step <= self.latest_step:
            return 0, 0
        new, in_all = self.total - (self._announced or 0), self.total - self._row_start
        self._announced, self._row_start = self.total, None
        return new, in_all

    def is_shown(self, now_s: float) -> bool:
        """Return whether the counter has grown within `SKIPS_SHOWN_S`."""
        return now_s < self._grew_s + SKIPS_SHOWN_S

    def describe(self) -> str:
        """Return a description such as "3 steps, the latest near step 17"."""
        return f"{format_count(self.total, 'step')}, the latest near step {self.latest_step}"


@dataclass(slots=True)
class FailureCount:
    """The number of consecutive failures that a worker's heartbeats report; 0 after a success.

    Attributes:
        events: the names of the events about a failure and about the next success.
    """

    events: tuple[str, str]
    remedy: str
    count: int = 0
    _next_event_s: float = -math.inf
    _is_announced: bool = False

    def update(self, name: str, count: int, now_s: float) -> list[LogEvent]:
        self.count = count
        if count and now_s >= self._next_event_s:
            self._next_event_s, self._is_announced = now_s + CHECKPOINT_EVENT_INTERVAL_S, True
            fields = {"name": name, "failed": count, "remedy": self.remedy}
            return [LogEvent("warning", self.events[0], fields)]
        if self._is_announced and not count:
            self._next_event_s, self._is_announced = now_s + RECOVERED_INTERVAL_S, False
            return [LogEvent("info", self.events[1], {"name": name})]
        return []


@dataclass(slots=True)
class WorkerProblems:
    """The problems of one worker.

    Attributes:
        export_attempts: the number of attempts to write the final model, including the one in progress; 0
            once it is written.
    """

    export_attempts: int = 0

    _skips: StepCounter = field(default_factory=StepCounter)
    _missed: StepCounter = field(default_factory=StepCounter)
    _lone_means: StepCounter = field(default_factory=StepCounter)
    _checkpoints: FailureCount = field(
        default_factory=lambda: FailureCount(("checkpoint_failed", "checkpoint_written"), CHECKPOINT_REMEDY)
    )
    _uploads: FailureCount = field(
        default_factory=lambda: FailureCount(("upload_failed", "checkpoint_uploaded"), UPLOAD_REMEDY)
    )

    def update(self, name: str, step: int, figures: Mapping[str, float], now_s: float) -> list[LogEvent]:
        """Record the metrics in a heartbeat; return the events to log.

        Args:
            name: the worker's name.
            step: the number of steps that the worker has committed.
            figures: the heartbeat's metrics, by name.
        """
        skipped = self._skips.update(_count(figures, m.OWN_SKIPPED_STEPS), step, now_s)
        missed = self._missed.update(_count(figures, m.MISSED_STEPS), step, now_s)
        in_all = 0
        if not missed:
            missed, in_all = self._missed.end_row(step)
        events = []
        if skipped:
            step, reason = self._skips.latest_step, OWN_SKIP_REASON
            fields = {"name": name, "step": step, "skipped": skipped, "reason": reason}
            events.append(LogEvent("warning", "step_skipped", fields))
        if missed:
            step, reason = self._missed.latest_step, MISSED_REASON
            if in_all:
                reason = f"{BACK_REASON} {format_count(in_all, 'step')}"
            fields = {"name": name, "step": step, "missed": missed, "reason": reason}
            events.append(LogEvent("info", "step_missed", fields))
        if self._lone_means.update(_count(figures, m.LONE_MEANS), step, now_s):
            fields = {"name": name, "step": self._lone_means.latest_step, "remedy": LONE_MEAN_REMEDY}
            events.append(LogEvent("warning", "lone_mean", fields))
        self.export_attempts = _count(figures, m.EXPORT_ATTEMPTS)
        events += self._checkpoints.update(name, _count(figures, m.FAILED_CHECKPOINTS), now_s)
        return events + self._uploads.update(name, _count(figures, m.FAILED_UPLOADS), now_s)

    def caused_skips_after(self, step: int) -> bool:
        """Return whether the worker has made the group skip a step after its step `step`."""
        return self._skips.latest_step > step

    @property
    def failed_exports(self) -> int:
        return max(0, self.export_attempts - 1)

    @property
    def is_writing(self) -> bool:
        """Whether the worker is writing the final model, or could not write its latest checkpoint."""
        return self.export_attempts > 0 or self._checkpoints.count > 0

    def text(self, now_s: float) -> str:
        """Describe the problems for the status; return "" if there are none."""
        texts = []
        if self._skips.is_shown(now_s):
            texts.append(f"made the group skip {self._skips.describe()}: {OWN_SKIP_REASON}")
        if self._missed.is_shown(now_s):
            texts.append(f"was left out of {self._missed.describe()}: {MISSED_REASON}")
        if self._lone_means.is_shown(now_s):
            steps = self._lone_means.describe()
            texts.append(f"called grid.mean without other workers in {steps}: {LONE_MEAN_REMEDY}")
        if failed := self._checkpoints.count:
            what = "its latest checkpoint" if failed == 1 else f"{failed} checkpoints in a row"
            texts.append(f"could not write {what}: {CHECKPOINT_REMEDY}")
        if failed := self._uploads.count:
            attempts = format_count(failed, "attempt")
            texts.append(f"could not upload a checkpoint in {attempts}: {UPLOAD_REMEDY}")
        if failed := self.failed_exports:
            attempts = format_count(failed, "attempt")
            texts.append(f"{m.MODEL_NOT_WRITTEN} in {attempts}, and tries again: {EXPORT_REMEDY}")
        return "; ".join(texts)


def _count(figures: Mapping[str, float], name: str) -> int:
    """Return a counter that a worker reports, or 0 if it is out of bounds."""
    value = figures.get(name, 0.0)
    return int(value) if 0 <= value < 2**53 else 0
