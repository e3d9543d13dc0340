"""Chooses a connection's TCP congestion control if the kernel's default is bbr (decisions 0037, 0049).

    connected --bbr, round trip <= 15 ms-> cubic --repeated losses--> bbr, for the rest of the connection
        +------ otherwise: the kernel's choice

bbr pauses for 0.2 s every 10 s to measure the round trip again, and underestimates a link on which payloads
have gaps between them.  cubic interprets each lost packet as a sign of a full queue.  If cubic itself fills
the queue, many packets are lost at once, every other second with several connections on one link, but the
window is then large.  On a link that loses a share p of its packets, the window remains at about 1.2 /
sqrt(p) segments (Mathis et al. 1997, equation 3).  Therefore losses are considered only while the window is
small, and the monitor counts the intervals of a quarter of a second in which such a loss occurred.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

SHORT_LINK_RTT_S = 0.015
"""The largest round trip for which cubic is chosen.  If such a link loses packets, cubic is slow for about 2
s, until the losses are detected."""

LOOKS, BAD_LOOKS = 20, 6
MIN_SEGMENTS = 200
"""The smallest number of segments between two observations; fewer segments do not characterize the link."""

FULL_QUEUE_SEGMENTS = 100
"""A window of at least this size means that the link loses less than one packet in 7,000."""

_INFO_BYTES = 192  # size of linux/tcp.h, tcp_info, which has the fields at the following offsets
_WINDOW_AT, _RETRANSMITTED_AT, _MIN_RTT_AT, _SEGMENTS_AT = 80, 100, 148, 156
_NUMBER = struct.Struct("=I")
_COUNTS = 1 << 32
"""The value at which the kernel's counters wrap around, which is after 6 TB, or half a day at 1 Gbit/s."""


@dataclass(slots=True)
class LossMonitor:
    """Detects repeated losses on a connection from the kernel's counters, read about four times a second."""

    segments: int = 0
    retransmitted: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def record(self, segments: int, retransmitted: int, window: int) -> bool:
        """Record the kernel's counters; return whether the link loses packets repeatedly.

        Args:
            segments: the kernel's count of segments sent.
            retransmitted: the kernel's count of segments retransmitted.
            window: the current congestion window in segments.
        """
        if (segments - self.segments) % _COUNTS < MIN_SEGMENTS:
            return False
        self.recent.append(retransmitted != self.retransmitted and window < FULL_QUEUE_SEGMENTS)
        self.segments, self.retransmitted = segments, retransmitted
        return sum(self.recent) >= BAD_LOOKS


def preferred_control(control: str, round_trip_s: float) -> str:
    """Return the congestion control to set at the start, or "" to keep the kernel's choice."""
    return "cubic" if control == "bbr" and round_trip_s <= SHORT_LINK_RTT_S else ""


def choose_control(connection: socket.socket) -> bool:
    """Choose the initial congestion control.

    Returns True if cubic was set instead of bbr, in which case losses should be watched.
    """
    with contextlib.suppress(OSError, AttributeError, struct.error):
        if control := preferred_control(control_of(connection), _read_info(connection, _MIN_RTT_AT)[0] / 1e6):
            _set_control(connection, control)
            return True
    return False


def watch_losses(connection: socket.socket, losses: LossMonitor) -> bool:
    """Switch back to bbr if the link loses packets repeatedly; return whether it was switched."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        if losses.record(*_read_info(connection, _SEGMENTS_AT, _RETRANSMITTED_AT, _WINDOW_AT)):
            _set_control(connection, "bbr")
            return True
    return False


def control_of(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.partition(b"\0")[0].decode()


def _set_control(connection: socket.socket, control: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())


def _read_info(connection: socket.socket, *offsets: int) -> list[int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return [_NUMBER.unpack_from(info, offset)[0] for offset in offsets]
