"""Measures how fast this worker computes: samples, and seconds from a batch to its gradient.

Shares are made from these figures (`gridtrain.core.planning.batch_shares`).

    a turn begins            step() is called          decided          a turn begins
         |---- reading, forward, backward ----|---- waiting, exchange ----|
                       counted                           not counted
"""

from __future__ import annotations

from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE

WARM_UP_STEPS = 1
"""First batches, in which kernels are compiled and memory is allocated; they do not count."""


class ComputeRate:
    """Totals since this worker joined; a turn that is given up, or in which it evaluates, does not count."""

    def __init__(self) -> None:
        self._measured_steps = 0
        self._began_s: float | None = None
        self._open_samples = 0
        self._samples = 0
        self._seconds_s = 0.0

    def begin(self, now_s: float, samples: int) -> None:
        """A batch of so many samples is handed out; 0: this worker takes part without samples."""
        self._measured_steps += samples > 0
        counts = samples > 0 and self._measured_steps > WARM_UP_STEPS
        self._began_s, self._open_samples = now_s if counts else None, samples

    def discard(self) -> None:
        """The present turn does not count."""
        self._began_s = None

    def end(self, now_s: float) -> bool:
        """The gradient is there.  Returns whether the figures have changed; only the first call can."""
        began_s, self._began_s = self._began_s, None
        if began_s is None:
            return False
        self._samples += self._open_samples
        self._seconds_s += now_s - began_s
        return True

    def figures(self) -> dict[str, float]:
        """For a heartbeat."""
        return {SAMPLES_FIGURE: float(self._samples), SECONDS_FIGURE: self._seconds_s}
