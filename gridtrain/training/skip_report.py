"""Log lines about skipped steps: whose gradient was the reason, without a line for each of many in a row."""

from __future__ import annotations

import logging

log = logging.getLogger("gridtrain")


class SkipReport:
    """Counts committed steps that were skipped, and logs the 1st, 2nd, 4th, 8th, ... in a row."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0

    def record_applied(self) -> None:
        self._in_a_row = 0

    def record_skipped(self, step: int, *, is_own: bool) -> None:
        """`is_own`: this worker's gradient is the reason."""
        self.total += 1
        self._in_a_row += 1
        if self._in_a_row & (self._in_a_row - 1):
            return
        whose = "this worker's" if is_own else "another worker's"
        again = f" ({self._in_a_row} steps in a row)" if self._in_a_row > 1 else ""
        remedy = "; check its loss, learning rate and data" if is_own else ""
        log.log(
            logging.WARNING if is_own else logging.INFO,
            "step %d is skipped by all workers%s: %s gradient is not finite, or too large to be summed%s",
            step,
            again,
            whose,
            remedy,
        )
