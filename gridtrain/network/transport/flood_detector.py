"""Detects floods: limits the rate of incoming control messages, which a peer may send without credit.

`zmq.zeromq_transport` closes a connection that exceeds the limits.
"""

from __future__ import annotations

FLOOD_MESSAGES, FLOOD_MESSAGES_per_s = 20_000, 2_000.0
FLOOD_BYTES, FLOOD_Bps = 64 * 2**20, 8.0 * 2**20
"""Limits for the messages that one connection may send without credit: the size of a burst, and the sustained
rate per second.  A busy member sends a few hundred control messages per second, each of a few hundred
bytes."""


class FloodDetector:
    """Two leaky buckets for one connection, one for messages and one for bytes."""

    __slots__ = ("_at_s", "_bytes", "_messages")

    def __init__(self) -> None:
        self._messages = self._bytes = self._at_s = 0.0

    def add(self, nbytes: int, now_s: float) -> bool:
        """Count a message of `nbytes`; return whether the connection now exceeds the limits."""
        passed_s = max(0.0, now_s - self._at_s)
        self._messages = max(0.0, self._messages - passed_s * FLOOD_MESSAGES_per_s) + 1
        self._bytes = max(0.0, self._bytes - passed_s * FLOOD_Bps) + nbytes
        self._at_s = now_s
        return self._messages > FLOOD_MESSAGES or self._bytes > FLOOD_BYTES
