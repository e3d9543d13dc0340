"""Reports skipped steps, and whether this worker's gradient caused them, with few messages for many steps.

this worker's gradient      a warning, and a counter in the heartbeats, from which `gridtrain status` and
                            the dashboard show which worker causes skipped steps
another worker's gradient   a message at level INFO
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gridtrain.core.messages import OWN_SKIPPED_STEPS

log = logging.getLogger("gridtrain")


class SkipReport:
    """Counts committed steps that were skipped, and logs the 1st, 2nd, 4th, 8th, ..., separately for steps
    skipped because of this worker's gradient and because of another worker's.

    Args:
        report_figures: a function that is called with the number of steps that were skipped because of this
            worker's gradient.
    """

    def __init__(self, report_figures: Callable[[Mapping[str, float]], None]) -> None:
        self._report_figures = report_figures
        self._counts = {True: 0, False: 0}

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def record_skipped(self, step: int, *, is_own: bool) -> None:
        """Record a skipped step.

        Args:
            is_own: whether this worker's gradient caused it.
        """
        self._counts[is_own] += 1
        count = self._counts[is_own]
        if is_own:
            self._report_figures({OWN_SKIPPED_STEPS: float(count)})
        if count & (count - 1):
            return
        whose = "this worker's" if is_own else "another worker's"
        again = f" ({count} steps so far)" if count > 1 else ""
        own_remedy = "; check this worker's loss, learning rate and data"
        remedy = own_remedy if is_own else "; gridtrain status names that worker"
        log.log(
            logging.WARNING if is_own else logging.INFO,
            "all workers skipped step %d because %s gradient is not finite or is too large to be summed in "
            "float32%s%s",
            step + 1,
            whose,
            again,
            remedy,
        )
