"""How much a connection's kernel buffers may hold: enough for a long fat line, no more than that.

Decides two options of a TCP socket, and that received memory is used again.  Never reads or writes data, and
raises nothing: a connection works as well without them, only slower on lines that hold more than 2 MiB in a
round trip.

    ours --> libzmq (8 messages) --> not sent yet (at most 2 MiB) | under way, unacknowledged --> line
                                     `----------------- SO_SNDBUF ------------------'

No more is under way than the buffer holds.  Linux lets it grow to 4 MiB by itself, which with the kernel's
own book-keeping is 2.5 MB of data: 0.5 Gbit/s at a round trip of 40 ms.  A fixed one may be larger where
`net.core.wmem_max` allows it.  What is only waiting is bounded on its own, so that control does not wait
behind a large buffer on a slow line.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from pathlib import Path

MAX_UNSENT_BYTES = 2 * 2**20
BUFFER_BYTES = 8 * 2**20
"""1 Gbit/s at a round trip of 40 ms."""

_FREED_BYTES = 31 * 2**20
_WMEM_MAX = Path("/proc/sys/net/core/wmem_max")
_TCP_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")


def keep_freed_pages() -> None:
    """Let the C library keep the memory of messages that were dealt with, instead of asking for it anew.

    glibc gives each freed block above a threshold back to the system, and each received slice then costs the
    kernel 256 empty pages, a tenth of all processor time of a dense round.  The threshold is the size of the
    largest such block that was freed so far, at most 32 MiB (mallopt(3), M_MMAP_THRESHOLD); most training
    scripts have long freed one.  Nothing is written to this one, so it takes no memory.
    """
    block = bytearray(_FREED_BYTES)
    del block


def enlarge_buffers(connection: socket.socket) -> None:
    """Set both options, as far as this system has them."""
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        if (nbytes := buffer_bytes_to_request(*_system_limits())) > 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)


def buffer_bytes_to_request(wmem_max_bytes: int, grows_to_bytes: int) -> int:
    """What to ask for; 0: nothing, as the buffer by itself grows to as much or more.

    Linux gives twice of what is asked for, at most twice `wmem_max_bytes`; and a buffer that was asked for
    grows no more.
    """
    asked_bytes = min(wmem_max_bytes, BUFFER_BYTES // 2)
    return asked_bytes if 2 * asked_bytes > grows_to_bytes else 0


@functools.cache
def _system_limits() -> tuple[int, int]:
    """(0, 0) where the system does not tell."""
    try:
        return int(_WMEM_MAX.read_text()), int(_TCP_WMEM.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 0, 0
