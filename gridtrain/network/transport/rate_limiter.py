"""Rate caps: what a volunteer allows a transport to use of the line.

Decides when bytes may leave and when more may be read.  Never touches a socket, a clock (`now_s`
is passed in) or a message: it sees sizes only.

    upload     Pacer: a message leaves when its last byte would have left a line of that rate.
               Never a burst, so a capped worker on a fast machine behaves like a home line.

                 bulk A queued        bulk B queued
                 |---- A's bytes ----|-------- B's bytes --------|
                                     A leaves                    B leaves       -> time

    download   `arrivals.Arrivals` over sockets.  Here only the memory transport's Meter: a message that has
               arrived is delivered at once, then the time that the line would have needed for it is waited
               for before anything more is read.
"""

from __future__ import annotations

import re

from gridtrain.errors import ConfigError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)(bit|B)(?:/s)?")
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

MAX_LATENESS_S = 0.02
"""A loop that wakes late does not slow the line: this much lost time is made up for, and no more."""


def parse_rate(text: str) -> float:
    """Bytes per second from "20Mbit", "1Gbit", "500kbit", "2.5MB" (bit and B, decimal prefixes).

    Raises:
        ConfigError: the text is no rate, or it is zero.
    """
    remedy = 'write a number and a unit, such as "20Mbit", "1Gbit", "500kbit" or "2.5MB" (per second)'
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a rate", remedy=remedy)
    number, prefix, unit = match.groups()
    rate_Bps = float(number) * _PREFIX[prefix.lower()] / (8 if unit == "bit" else 1)
    if rate_Bps < 1:
        raise ConfigError(f"the rate {text!r} is less than one byte per second", remedy=remedy)
    return rate_Bps


class UploadLimiter:
    """The upload cap: a virtual line on which bulk messages are serialised one after the other.

    Control messages (votes, heartbeats: small) do not wait behind bulk.  Their bytes delay the bulk
    that comes after them, and among themselves they keep to the rate too, so that the sum holds.

    Args:
        rate_Bps: bytes per second; None: no cap, everything leaves at once.
    """

    def __init__(self, rate_Bps: float | None) -> None:
        self.rate_Bps = rate_Bps
        self._bulk_free_s = float("-inf")
        self.control_free_s = float("-inf")
        """The next control message may leave from then on."""

    def schedule_bulk(self, nbytes: int, queued_s: float, now_s: float) -> float:
        """Put the next bulk message on the line; returns when its last byte has left.

        The line turned to it when it was queued or when the line became free, whichever was later,
        even if the caller only comes now; but at most `LATENESS_S` are made up for.
        """
        if self.rate_Bps is None:
            return now_s
        start_s = max(queued_s, self._bulk_free_s, now_s - MAX_LATENESS_S)
        self._bulk_free_s = start_s + nbytes / self.rate_Bps
        return self._bulk_free_s

    def charge_control(self, nbytes: int, now_s: float) -> None:
        """Account for a control message that leaves now."""
        if self.rate_Bps is not None:
            cost_s = nbytes / self.rate_Bps
            self.control_free_s = max(now_s, self.control_free_s) + cost_s
            self._bulk_free_s = max(now_s, self._bulk_free_s) + cost_s


class DownloadLimiter:
    """The download cap: receive, then wait until the line would have been done.

    Args:
        rate_Bps: bytes per second; None: no cap.
    """

    def __init__(self, rate_Bps: float | None) -> None:
        self._rate_Bps = rate_Bps
        self.free_s = float("-inf")
        """Nothing more may be read before then."""

    def can_read(self, now_s: float) -> bool:
        return now_s >= self.free_s

    def charge(self, nbytes: int, now_s: float) -> None:
        """Account for bytes that were delivered now."""
        if self._rate_Bps is not None:
            start_s = max(self.free_s, now_s - MAX_LATENESS_S)
            self.free_s = start_s + nbytes / self._rate_Bps


FLOOD_MESSAGES, FLOOD_MESSAGES_per_s = 20_000, 2_000.0
FLOOD_BYTES, FLOOD_Bps = 64 * 2**20, 8.0 * 2**20
"""What one connection may say that needs no byte credit: so much at once, and so much a second on end.
A busy member sends some hundred votes, beats and the like a second, of some hundred bytes."""


def is_flood(messages: float, nbytes: float) -> bool:
    """The defence: what a bucket of a connection holds after a message."""
    return messages > FLOOD_MESSAGES or nbytes > FLOOD_BYTES


class FloodDetector:
    """Two leaky buckets for one connection, of messages and of bytes."""

    __slots__ = ("_at_s", "_bytes", "_messages")

    def __init__(self) -> None:
        self._messages = self._bytes = self._at_s = 0.0

    def add(self, nbytes: int, now_s: float) -> bool:
        """One more message; True: that is a flood."""
        passed_s = max(0.0, now_s - self._at_s)
        self._messages = max(0.0, self._messages - passed_s * FLOOD_MESSAGES_per_s) + 1
        self._bytes = max(0.0, self._bytes - passed_s * FLOOD_Bps) + nbytes
        self._at_s = now_s
        return is_flood(self._messages, self._bytes)
