"""Report skipped steps and the worker whose gradient was the reason, with few lines for a long sequence of
steps.

own gradient      --> warning, and a counter in the heartbeats, from which `gridtrain status` and the
                      dashboard name the worker
another worker's  --> info
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gridtrain.core.messages import OWN_SKIPPED_STEPS

log = logging.getLogger("gridtrain")


class SkipReport:
    """Counts committed steps that were skipped, and logs the 1st, 2nd, 4th, 8th, ... of consecutive skipped
    steps.

    Args:
        report_figures: a function that is called with the number of steps that were skipped because of this
            worker's gradient.
    """

    def __init__(self, report_figures: Callable[[Mapping[str, float]], None]) -> None:
        self._report_figures = report_figures
        self.total = 0
        self._own_total = 0
        self._in_a_row = 0

    def record_applied(self) -> None:
        self._in_a_row = 0

    def record_skipped(self, step: int, *, is_own: bool) -> None:
        """Record a skipped step; `is_own` is set if this worker's gradient was the reason."""
        self.total += 1
        self._in_a_row += 1
        if is_own:
            self._own_total += 1
            self._report_figures({OWN_SKIPPED_STEPS: float(self._own_total)})
        if self._in_a_row & (self._in_a_row - 1):
            return
        whose = "this worker's" if is_own else "another worker's"
        again = f" ({self._in_a_row} steps in a row)" if self._in_a_row > 1 else ""
        remedy = "; check its loss, learning rate and data" if is_own else "; gridtrain status names it"
        log.log(
            logging.WARNING if is_own else logging.INFO,
            "step %d is skipped by all workers%s: %s gradient is not finite, or too large to be summed%s",
            step,
            again,
            whose,
            remedy,
        )
