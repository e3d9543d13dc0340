"""Which congestion control a connection has, where the kernel would use bbr: see decisions 0037 and 0049.

Decides from the round trip at the start, and from losses later.  Never reads or writes data, raises nothing.

    connected --bbr, round trip <= 15 ms-> cubic --loses again and again--> bbr, for good
        +------ all others: as the kernel chose

bbr stops sending for 0.2 s every 10 s to measure the round trip anew, and takes a line for slower than it is
where payloads have pauses between them; cubic takes each lost frame for a full queue.  Its own full queues
lose frames, too, many at once and, with several connections on one line, every other second; but then it has
got far.  A line that loses a share p of all frames keeps the window at about 1.2 / sqrt(p) segments (Mathis
et al. 1997, equation 3), so a loss counts only where the window is small, and quarters of a second with a
loss are counted, not the losses.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

SHORT_LINK_RTT_S = 0.015
"""Where it loses frames, cubic is slow there only until that has been seen: 2 s."""

LOOKS, BAD_LOOKS = 20, 6
MIN_SEGMENTS = 200
"""Between two looks; with fewer nothing can be told of the line."""

FULL_QUEUE_SEGMENTS = 100
"""A window that gets beyond it is on a line that loses less than one frame in 7,000."""

_INFO_BYTES = 192  # linux/tcp.h, tcp_info: where what we need is in it
_WINDOW_AT, _RETRANSMITTED_AT, _MIN_RTT_AT, _SEGMENTS_AT = 80, 100, 148, 156
_NUMBER = struct.Struct("=I")
_COUNTS = 1 << 32
"""The kernel's counts begin anew there: after 6 TB, a day of a gigabit line."""


@dataclass(slots=True)
class LossMonitor:
    """Of one connection: `saw` is told the kernel's counts so far, about four times a second."""

    segments: int = 0
    retransmitted: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=LOOKS))

    def record(self, segments: int, retransmitted: int, window: int) -> bool:
        """Whether this is a line that loses again and again; `window`: in segments, now."""
        if (segments - self.segments) % _COUNTS < MIN_SEGMENTS:
            return False
        self.recent.append(retransmitted != self.retransmitted and window < FULL_QUEUE_SEGMENTS)
        self.segments, self.retransmitted = segments, retransmitted
        return sum(self.recent) >= BAD_LOOKS


def preferred_control(control: str, round_trip_s: float) -> str:
    """What to ask for at the start instead of the kernel's own choice; "": nothing."""
    return "cubic" if control == "bbr" and round_trip_s <= SHORT_LINK_RTT_S else ""


def choose_control(connection: socket.socket) -> bool:
    """At the start.  True: it has cubic now instead of bbr, and its losses are to be watched."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        if control := preferred_control(control_of(connection), _read_info(connection, _MIN_RTT_AT)[0] / 1e6):
            _set_control(connection, control)
            return True
    return False


def watch_losses(connection: socket.socket, losses: LossMonitor) -> bool:
    """True: it lost again and again, and has bbr from now on."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        if losses.record(*_read_info(connection, _SEGMENTS_AT, _RETRANSMITTED_AT, _WINDOW_AT)):
            _set_control(connection, "bbr")
            return True
    return False


def control_of(connection: socket.socket) -> str:
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return told.partition(b"\0")[0].decode()


def _set_control(connection: socket.socket, control: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())


def _read_info(connection: socket.socket, *places: int) -> list[int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return [_NUMBER.unpack_from(info, place)[0] for place in places]
