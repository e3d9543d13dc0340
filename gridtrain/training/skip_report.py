"""Reports skipped steps, and whether this worker's gradient caused them, with few messages for many steps.

this worker's gradient      a warning, and a counter in the heartbeats, so that `gridtrain status` and
                            the dashboard can show which worker causes skipped steps
another worker's gradient   a message at level INFO
either, with a GradScaler   a message at level INFO, because the scaler reduces its scale; from the 10th
                            skipped step within 100 steps on, as without a scaler
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping

from gridtrain.core.messages import OWN_SKIPPED_STEPS
from gridtrain.quantities import ALERT_SKIPS

log = logging.getLogger("gridtrain")

ROUTINE_STEPS = 100
"""Fewer than `ALERT_SKIPS` skipped steps among this many are usual while a GradScaler adapts its scale."""


class SkipReport:
    """Counts committed steps that were skipped, and logs the 1st, 2nd, 4th, 8th, ... of each kind: caused by
    this worker's gradient or by another worker's, and handled by a scaler or not.

    Args:
        report_figures: a function that is called with the number of steps that were skipped because of this
            worker's gradient and were not handled by a scaler.
    """

    def __init__(self, report_figures: Callable[[Mapping[str, float]], None]) -> None:
        self._report_figures = report_figures
        self._counts: Counter[tuple[bool, bool]] = Counter()
        self._latest: deque[int] = deque(maxlen=ALERT_SKIPS)

    @property
    def total(self) -> int:
        return self._counts.total()

    def record_skipped(self, step: int, *, is_own: bool, is_scaled: bool = False) -> None:
        """Record a skipped step.

        Args:
            is_own: whether this worker's gradient caused it.
            is_scaled: whether a GradScaler scales the loss, and reduces its scale after this step.
        """
        self._latest.append(step)
        is_frequent = len(self._latest) == ALERT_SKIPS and 0 <= step - self._latest[0] < ROUTINE_STEPS
        is_routine = is_scaled and not is_frequent
        self._counts[is_own, is_routine] += 1
        count = self._counts[is_own, is_routine]
        if is_own and not is_routine:
            self._report_figures({OWN_SKIPPED_STEPS: float(count)})
        if count & (count - 1):
            return
        whose = "this worker's" if is_own else "another worker's"
        again = f" ({count} steps so far)" if count > 1 else ""
        if is_routine:
            remedy = "; the GradScaler reduces the scale of the loss, and nothing needs to be done"
        elif is_own:
            remedy = "; check this worker's loss, learning rate and data"
        else:
            remedy = "; gridtrain status names that worker"
        log.log(
            logging.WARNING if is_own and not is_routine else logging.INFO,
            "all workers skipped step %d because %s gradient is not finite or is too large to be summed in "
            "float32%s%s",
            step + 1,
            whose,
            again,
            remedy,
        )
