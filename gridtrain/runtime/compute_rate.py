"""How fast this worker computes: samples, and the seconds from getting a batch to bringing its gradient.

Decides what counts as computing.  Never decides a share: that is `protocol.sharing`, from these figures.

    a turn begins            step() is called          decided          a turn begins
         |---- reading, forward, backward ----|---- waiting, exchange ----|
                       counted                           not counted
"""

from __future__ import annotations

from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE

WARM_UP_STEPS = 1
"""First batches, in which kernels are compiled and memory is found."""


class ComputeRate:
    """Totals over this worker's stay; a turn that is given up, or in which it evaluates, does not count."""

    def __init__(self) -> None:
        self._measured_steps = 0
        self._began_s: float | None = None
        self._open_samples = 0
        self._samples = 0
        self._seconds_s = 0.0

    def begin(self, now_s: float, samples: int) -> None:
        """A batch of so many samples is handed out; 0: a stand-in."""
        self._measured_steps += samples > 0
        counts = samples > 0 and self._measured_steps > WARM_UP_STEPS
        self._began_s, self._open_samples = now_s if counts else None, samples

    def discard(self) -> None:
        """What is measured just now is something else."""
        self._began_s = None

    def end(self, now_s: float) -> bool:
        """Its gradient is there.  Returns whether that has told something; only the first call does."""
        began_s, self._began_s = self._began_s, None
        if began_s is None:
            return False
        self._samples += self._open_samples
        self._seconds_s += now_s - began_s
        return True

    def figures(self) -> dict[str, float]:
        """For a beat."""
        return {SAMPLES_FIGURE: float(self._samples), SECONDS_FIGURE: self._seconds_s}
