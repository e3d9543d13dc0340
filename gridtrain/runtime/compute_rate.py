"""Measures how fast this worker computes, from its samples and the seconds spent on their gradients.

From these two figures of each worker, the coordinator computes the workers' shares of the global batch
(`gridtrain.core.planning.batch_shares`).

    turn begins              step() is called       outcome known       next turn begins
         |---- reading, forward, backward ----|---- waiting, exchange ----|
                       counted                           not counted

With local steps, a turn is counted in parts, so that the speed is known before a long turn ends.
"""

from __future__ import annotations

from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE


class ComputeRate:
    """The samples and seconds of all counted turns, or parts of turns, since this worker joined.

    The first turn or part is not counted, because kernels are compiled and memory is allocated during it.
    Turns that were abandoned or interrupted by an evaluation are not counted either.
    """

    def __init__(self) -> None:
        self._is_warm = False
        self._turn_began_s, self._computed_share = 0.0, 1.0
        self._began_s: float | None = None
        self._before_pause_s: float | None = None
        self._open_samples, self._ended_share = 0, 0.0
        self._samples = 0.0
        self._seconds_s = 0.0

    def begin(self, now_s: float, samples: int) -> None:
        """Start measuring a turn.

        Args:
            now_s: the current time.
            samples: the number of samples in the turn's batch; 0 if this worker takes part without samples.
        """
        self._turn_began_s, self._computed_share = now_s, 1.0
        self._began_s = now_s if samples > 0 else None
        self._open_samples, self._ended_share = samples, 0.0
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

    def uncounted_s(self, now_s: float) -> float:
        """Return the seconds of the current turn that `end` would count now; 0.0 if there are none."""
        return 0.0 if self._began_s is None else now_s - self._began_s

    def end(self, now_s: float, share: float = 1.0) -> bool:
        """Count the current turn, or the part of it since the last call; return whether the figures have
        changed.

        Calls after the turn's end, and between `pause` and `resume`, have no effect.

        Args:
            now_s: the current time.
            share: the fraction of the turn's samples computed so far, 0 < share <= 1.
        """
        if self._began_s is None:
            return False
        seconds_s, self._began_s = self.uncounted_s(now_s), now_s if share < 1 else None
        samples, self._ended_share = self._open_samples * (share - self._ended_share), share
        if not self._is_warm:
            self._is_warm = True
            return False
        self._samples += samples
        self._seconds_s += seconds_s
        return True

    def turn_s(self, now_s: float) -> float:
        """Return the seconds since the current turn began, divided by the fraction of its samples that had
        been computed at the latest `pause`, if any.  This also works for a turn that is not counted."""
        return (now_s - self._turn_began_s) / self._computed_share

    def figures(self) -> dict[str, float]:
        """Return the figures for a heartbeat."""
        return {SAMPLES_FIGURE: self._samples, SECONDS_FIGURE: self._seconds_s}
