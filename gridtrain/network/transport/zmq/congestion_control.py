"""Chooses TCP congestion control (bbr or cubic) if the kernel's default is bbr (decisions 0037, 0049, 0092).

    connected --bbr, round trip <= 15 ms--> cubic --a pause--> bbr --1 s without a pause--> cubic ...
        |                                     `--repeated losses--> bbr, for the rest of the connection
        `------ otherwise: the kernel's choice

A pause is a quarter of a second in which this side sends almost nothing.

bbr stops sending for 0.2 s every 10 s to measure the round trip again, and underestimates the rate of a link
on which short gaps separate the payloads.  With cubic, a pause resets the window: after about 0.25 s without
data the kernel starts again with 10 segments (net.ipv4.tcp_slow_start_after_idle, RFC 2861), so a sparse
payload after each computation takes several round trips.  In addition, cubic interprets each lost packet as a
sign of a full queue.  If cubic itself fills the queue, many packets are lost at once (every other second with
several connections on one link), but the window is then large.  On a link that loses a share p of its
packets, the window stays at about 1.2 / sqrt(p) segments (Mathis et al. 1997, equation 3).  Therefore,
losses are considered only while the window is small, and the monitor counts the quarter-second intervals in
which such a loss occurred.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

SHORT_LINK_RTT_S = 0.015
"""The largest round trip for which cubic is chosen.  If a link with such a round trip loses packets,
cubic is slow for about 2 s, until the losses are detected."""

LOOKS, BAD_LOOKS = 20, 6
MIN_SEGMENTS = 200
"""The smallest number of segments between two observations; fewer segments do not characterize the link."""

PAUSE_SEGMENTS = 10
"""Fewer segments than this between two observations count as a pause.  After a pause, the kernel starts again
with a window of this size."""

BUSY_LOOKS = 4
"""The number of observations without a pause after which cubic is chosen again."""

FULL_QUEUE_SEGMENTS = 100
"""A window of at least this size means that the link loses less than one packet in 7,000."""

_INFO_BYTES = 192  # size of linux/tcp.h, tcp_info, which has the fields at the following offsets
_WINDOW_AT, _RETRANSMITTED_AT, _MIN_RTT_AT, _SEGMENTS_AT = 80, 100, 148, 156
_NUMBER = struct.Struct("=I")
_COUNTS = 1 << 32
"""The value at which the kernel's counters wrap around, which is after 6 TB, or half a day at 1 Gbit/s."""


_SETTINGS = Path("/proc/sys/net/ipv4")


@dataclass(slots=True)
class SendMonitor:
    """Chooses between cubic and bbr from the kernel's counters, read about four times a second.

    Args:
        restarts: whether the kernel resets cubic's window in a pause.
    """

    restarts: bool = True
    control: str = "cubic"
    counted: int = 0
    segments: int = 0
    retransmitted: int = 0
    busy_looks: int = BUSY_LOOKS
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def record(self, segments: int, retransmitted: int, window: int) -> str:
        """Record the kernel's counters; return the congestion control that suits the connection.

        Args:
            segments: the kernel's count of segments sent.
            retransmitted: the kernel's count of segments retransmitted.
            window: the current congestion window in segments.
        """
        has_paused = (segments - self.segments) % _COUNTS < PAUSE_SEGMENTS
        self.busy_looks, self.segments = 0 if has_paused else self.busy_looks + 1, segments
        if (segments - self.counted) % _COUNTS >= MIN_SEGMENTS:
            if self.control == "cubic":
                self.recent.append(retransmitted != self.retransmitted and window < FULL_QUEUE_SEGMENTS)
            self.counted, self.retransmitted = segments, retransmitted
        is_lossy = sum(self.recent) >= BAD_LOOKS  # stays true, because nothing more is recorded
        is_bursty = self.restarts and self.busy_looks < BUSY_LOOKS
        self.control = "bbr" if is_lossy or is_bursty else "cubic"
        return self.control


def preferred_control(control: str, round_trip_s: float) -> str:
    """Return the congestion control to set at the start, or "" to keep the kernel's choice."""
    return "cubic" if control == "bbr" and round_trip_s <= SHORT_LINK_RTT_S else ""


def choose_control(connection: socket.socket) -> SendMonitor | None:
    """Choose the initial congestion control; return a monitor if cubic replaced bbr, otherwise None.

    This function and `revise_control` raise `OSError`, `AttributeError` or `struct.error` if the connection
    is closed, or the system does not support the options.
    """
    if control := preferred_control(control_of(connection), _read_info(connection, _MIN_RTT_AT)[0] / 1e6):
        _set_control(connection, control)
        return SendMonitor(restarts=restarts_after_idle() is not False)
    return None


def revise_control(connection: socket.socket, monitor: SendMonitor) -> None:
    """Observe the connection, and set the congestion control that suits it now."""
    control = monitor.record(*_read_info(connection, _SEGMENTS_AT, _RETRANSMITTED_AT, _WINDOW_AT))
    if control != control_of(connection):
        _set_control(connection, control)


def restarts_after_idle(settings: Path = _SETTINGS) -> bool | None:
    """Return whether the kernel starts again with a small window after a pause; None if unknown."""
    with contextlib.suppress(OSError):
        return (settings / "tcp_slow_start_after_idle").read_text().strip() != "0"
    return None


def slow_restart(settings: Path = _SETTINGS) -> str:
    """Return the name of the kernel's default congestion control if a pause resets its window.

    Returns "" if a pause does not reset the window, if this is unknown, and for bbr, which keeps its
    estimate of the link.
    """
    with contextlib.suppress(OSError):
        control = (settings / "tcp_congestion_control").read_text().strip()
        return control if restarts_after_idle(settings) and not control.startswith("bbr") else ""
    return ""


def control_of(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.partition(b"\0")[0].decode()


def _set_control(connection: socket.socket, control: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())


def _read_info(connection: socket.socket, *offsets: int) -> list[int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return [_NUMBER.unpack_from(info, offset)[0] for offset in offsets]
