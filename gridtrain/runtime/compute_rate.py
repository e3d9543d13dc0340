"""Measures how fast this worker computes, from its samples and the seconds spent on their gradients.

From these two figures of each worker, the coordinator computes the workers' shares of the global batch
(`gridtrain.core.planning.batch_shares`).

    turn begins              step() is called       outcome known       next turn begins
         |---- reading, forward, backward ----|---- waiting, exchange ----|
                       counted                           not counted
"""

from __future__ import annotations

from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE

UNCOUNTED_STEPS = 1
"""Number of this worker's first batches that are not counted, because kernels are compiled and memory is
allocated while they are being computed."""


class ComputeRate:
    """The samples and seconds of all counted turns since this worker joined.

    Turns that were abandoned or interrupted by an evaluation are not counted.
    """

    def __init__(self) -> None:
        self._measured_steps = 0
        self._turn_began_s, self._computed_share = 0.0, 1.0
        self._began_s: float | None = None
        self._before_pause_s: float | None = None
        self._open_samples = 0
        self._samples = 0
        self._seconds_s = 0.0

    def begin(self, now_s: float, samples: int) -> None:
        """Start measuring a turn.

        Args:
            now_s: the current time.
            samples: the number of samples in the turn's batch; 0 if this worker takes part without samples.
        """
        self._measured_steps += samples > 0
        counts = samples > 0 and self._measured_steps > UNCOUNTED_STEPS
        self._turn_began_s, self._computed_share = now_s, 1.0
        self._began_s, self._open_samples = now_s if counts else None, samples
        self._before_pause_s = None

    def discard(self) -> None:
        """Stop measuring the current turn without counting it."""
        self._began_s = self._before_pause_s = None

    def pause(self, now_s: float, share: float) -> None:
        """Stop counting time until `resume` is called.

        Args:
            now_s: the current time.
            share: the fraction of the turn's samples computed so far, 0 < share <= 1.
        """
        self._computed_share = share
        if self._began_s is not None:
            self._before_pause_s, self._began_s = now_s - self._began_s, None

    def resume(self, now_s: float) -> None:
        """Continue to count the time of a turn that `pause` has interrupted."""
        if self._before_pause_s is not None:
            self._began_s, self._before_pause_s = now_s - self._before_pause_s, None

    def end(self, now_s: float) -> bool:
        """Count the current turn, whose gradient is complete; return whether the figures have changed.

        Only the first call in a turn can change the figures.  Calls between `pause` and `resume` have no
        effect.
        """
        began_s, self._began_s = self._began_s, None
        if began_s is None:
            return False
        self._samples += self._open_samples
        self._seconds_s += now_s - began_s
        return True

    def turn_s(self, now_s: float) -> float:
        """Return the seconds since the current turn began, divided by the fraction of its samples that had
        been computed at the latest `pause`; by 1 if there was none.  The turn need not be a counted one."""
        return (now_s - self._turn_began_s) / self._computed_share

    def figures(self) -> dict[str, float]:
        """Return the figures for a heartbeat."""
        return {SAMPLES_FIGURE: float(self._samples), SECONDS_FIGURE: self._seconds_s}
