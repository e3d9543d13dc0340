"""Limits the upload rate (`upload_limit`), and parses rates.

A message is sent when its last byte would have left a link with the capped rate.  There are no bursts, so a
capped worker on a fast network behaves like a worker with a slow link.

    bulk A queued        bulk B queued
    |---- A's bytes ----|-------- B's bytes --------|
                        A is sent                   B is sent      -> time

`receive_queue.ReceiveQueue` implements the download cap; `flood_detector` limits incoming messages.
"""

from __future__ import annotations

import re

from gridtrain.errors import ConfigError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)(bit|B)(?:/s)?")
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

MAX_LATENESS_S = 0.02
"""The longest delay, in seconds, that a loop may make up for after it wakes late."""


def parse_rate(text: str, name: str = "") -> float:
    """Convert a rate such as "20Mbit", "1Gbit", "500kbit" or "2.5MB" to bytes per second.

    Prefixes are decimal.

    Args:
        name: the name of the setting, for the error message.

    Raises:
        ConfigError: the text is not a rate, or the rate is less than one byte per second.
    """
    remedy = 'write a number and a unit, such as "20Mbit", "1Gbit", "500kbit" or "2.5MB" (per second)'
    match = _RATE.fullmatch(text.strip())
    where = f"{name}: " if name else ""
    if match is None:
        raise ConfigError(f"{where}{text!r} is not a rate", remedy=remedy)
    number, prefix, unit = match.groups()
    rate_Bps = float(number) * _PREFIX[prefix.lower()] / (8 if unit == "bit" else 1)
    if rate_Bps < 1:
        raise ConfigError(f"{where}the rate {text!r} is less than one byte per second", remedy=remedy)
    return rate_Bps


class UploadLimiter:
    """The upload cap: a virtual link over which bulk messages are sent one after another.

    Control messages (votes, heartbeats), which are small, do not wait for bulk messages.  They are also
    subject to the cap, and their bytes delay later bulk messages, so that the cap holds for both together.

    Args:
        rate_Bps: the cap in bytes per second; None for no cap.  The cap may be changed from any thread;
            `apply_rate` applies the change.
    """

    def __init__(self, rate_Bps: float | None) -> None:
        self.rate_Bps = self._applied_Bps = rate_Bps
        self._bulk_free_s = float("-inf")
        self.control_free_s = float("-inf")
        """The time from which the next control message may be sent."""

    def apply_rate(self, release_s: float, now_s: float) -> float:
        """Apply a change in `rate_Bps` to the bytes that have not yet left the virtual link.

        Returns the new release time of a message that would have left the link at `release_s`.
        """
        before_Bps, after_Bps = self._applied_Bps, self.rate_Bps
        if after_Bps == before_Bps:
            return release_s
        self._applied_Bps = after_Bps
        factor = before_Bps / after_Bps if before_Bps and after_Bps else 0.0  # no cap: everything has left

        def moved_s(free_s: float) -> float:
            return min(free_s, now_s) + max(0.0, free_s - now_s) * factor

        self._bulk_free_s, self.control_free_s = moved_s(self._bulk_free_s), moved_s(self.control_free_s)
        return moved_s(release_s)

    def schedule_bulk(self, nbytes: int, queued_s: float, now_s: float) -> float:
        """Schedule the next bulk message; return the time at which its last byte leaves the virtual link.

        The message starts when it was queued or when the link became free, whichever is later, but at most
        `MAX_LATENESS_S` before `now_s`.
        """
        if self._applied_Bps is None:
            return now_s
        start_s = max(queued_s, self._bulk_free_s, now_s - MAX_LATENESS_S)
        self._bulk_free_s = start_s + nbytes / self._applied_Bps
        return self._bulk_free_s

    def charge_control(self, nbytes: int, now_s: float) -> None:
        """Account for a control message that is sent now."""
        if self._applied_Bps is not None:
            cost_s = nbytes / self._applied_Bps
            self.control_free_s = max(now_s, self.control_free_s) + cost_s
            self._bulk_free_s = max(now_s, self._bulk_free_s) + cost_s
