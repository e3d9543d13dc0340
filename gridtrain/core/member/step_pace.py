"""The mean duration of a step, the timeout for silent members derived from it, and this worker's heartbeats.

A step lasts from the previous commit to its own commit, including the time for computing; if there was no
commit in this generation, it begins with the first submission.  After each step, mean = 0.9 mean +
0.1 duration.  The timeout is `Deadlines.first_step_s` until a step has been measured; after that, it is
`patience_floor_s` plus `patience_factor` times the mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.member_events import HeartbeatDue


class StepPace:
    """Estimates the mean duration of a step; a step that a new generation interrupts is ignored."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._step_start_s: float | None = None
        self._mean_step_s: float | None = None
        self._heartbeats = 0
        self._progress = 0

    @property
    def timeout_s(self) -> float:
        """The time without a vote or a progress message after which a member is considered silent."""
        if self._mean_step_s is None:
            return self._deadlines.first_step_s
        return self._deadlines.patience_floor_s + self._deadlines.patience_factor * self._mean_step_s

    def step_started(self, now_s: float) -> None:
        """Record the start of the step, unless the last commit or an earlier submission in the same step has
        already set it."""
        self._step_start_s = now_s if self._step_start_s is None else self._step_start_s

    def step_committed(self, now_s: float) -> None:
        if self._step_start_s is not None:
            step_s = now_s - self._step_start_s
            mean_s = self._mean_step_s if self._mean_step_s is not None else step_s
            self._mean_step_s = 0.9 * mean_s + 0.1 * step_s
        self._step_start_s = now_s

    def step_interrupted(self) -> None:
        """Discard the measurement in progress, because a new generation begins."""
        self._step_start_s = None

    def update_progress(self, progress: int) -> bool:
        """Record `progress` and return whether it has grown since the last call."""
        has_moved, self._progress = progress > self._progress, progress
        return has_moved

    def make_heartbeat(self, step: int, event: HeartbeatDue, skips: Mapping[str, int]) -> m.Heartbeat:
        """Return the next heartbeat for the coordinator.

        Args:
            skips: `ReplicaState.skip_metrics`, which is added to the metrics of `event`; any metrics beyond
                `MAX_METRICS` are omitted.
        """
        self._heartbeats += 1
        metrics = *event.metrics, *((name, float(steps)) for name, steps in skips.items())
        return m.Heartbeat(self._heartbeats, step, event.progress, metrics[: m.MAX_METRICS])
