"""TCP connections by their file descriptors, and the options that are set on them.

libzmq owns the descriptors and closes them in a thread of its own, and their numbers are reused.  So each
access goes through a duplicate of the descriptor, and only if both ends of the connection are the expected
ones.  No data is read or written here.  Options that the system lacks are left out.

Buffers:

    send() --> libzmq (8 messages) --> not sent yet (at most 2 MiB) | sent, not acknowledged --> network
                                       `------------------ SO_SNDBUF -------------------'

SO_SNDBUF bounds what is sent and not acknowledged.  Linux lets it grow to 4 MiB, which with the kernel's own
overhead is 2.5 MB of data: 0.5 Gbit/s at a round trip of 40 ms.  A fixed size may be larger where
`net.core.wmem_max` allows it.  The part that is not sent yet is bounded separately (TCP_NOTSENT_LOWAT), so
that control messages do not wait behind a large buffer on a slow link.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import struct
from collections.abc import Iterator, Set
from pathlib import Path

from gridtrain.network.transport.zmq import congestion_control

MAX_UNSENT_BYTES = 2 * 2**20
BUFFER_BYTES = 8 * 2**20
"""1 Gbit/s at a round trip of 40 ms."""

MAX_DESCRIPTORS = 65536
_BYTES_RECEIVED, _BYTES_RECEIVED_AT, _TCP_INFO_BYTES = struct.Struct("=Q"), 128, 192  # linux/tcp.h, tcp_info
_FREED_BYTES = 31 * 2**20
_WMEM_MAX = Path("/proc/sys/net/core/wmem_max")
_TCP_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")

RemoteAddress = tuple[str, int]
"""Host and port of the other end, as numbers."""


class TcpConnection:
    """A connection that was identified by its descriptor and is found again by both of its ends.

    Args:
        fd: the descriptor.
        remote: the other end.
        ports: of an accepted connection, the ports at which we listen; None: we dialled.
    """

    def __init__(self, fd: int, remote: RemoteAddress, ports: Set[int] | None = None) -> None:
        self.fd = fd
        self.remote = remote
        self._ports = ports
        self._loss_monitor: congestion_control.LossMonitor | None = None

    @classmethod
    def identify(cls, fd: int, ports: Set[int] | None = None) -> TcpConnection | None:
        """The connection of this descriptor; None if it is not one, or not to one of these ports."""
        with _duplicate_socket(fd) as duplicate:
            remote = None if duplicate is None else _remote_address(duplicate, ports)
        return None if remote is None else cls(fd, remote, ports)

    def is_current(self) -> bool:
        """Whether the descriptor still belongs to this connection."""
        with self._duplicate() as duplicate:
            return duplicate is not None

    def shut_down(self) -> bool:
        """Shut it down in both directions; libzmq then closes the descriptor.  False: it is gone."""
        with self._duplicate() as duplicate:
            if duplicate is None:
                return False
            with contextlib.suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)
            return True

    def received_bytes(self) -> int:
        """Bytes that have arrived, whether they were read or not; 0: not known."""
        with self._duplicate() as duplicate:
            if duplicate is not None:
                with contextlib.suppress(OSError, AttributeError, struct.error):  # Linux only
                    info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])
            return 0

    def enlarge_buffers(self) -> None:
        """Give it the buffers that a fast link with a long round trip needs."""
        with self._duplicate() as duplicate:
            if duplicate is not None:
                with contextlib.suppress(OSError, AttributeError):
                    duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
                    if (nbytes := buffer_bytes_to_request(*_system_limits())) > 0:
                        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def choose_congestion_control(self) -> None:
        """To be called when the connection is up; see `congestion_control`."""
        with self._duplicate() as duplicate:
            if duplicate is not None and congestion_control.choose_control(duplicate):
                self._loss_monitor = congestion_control.LossMonitor()

    def watch_losses(self) -> None:
        """To be called several times a second: may revise what `choose_congestion_control` has chosen."""
        if self._loss_monitor is None:
            return
        with self._duplicate() as duplicate:
            if duplicate is not None and congestion_control.watch_losses(duplicate, self._loss_monitor):
                self._loss_monitor = None

    @contextlib.contextmanager
    def _duplicate(self) -> Iterator[socket.socket | None]:
        """A duplicate of the descriptor; None if it belongs to another connection by now."""
        with _duplicate_socket(self.fd) as duplicate:
            is_same = duplicate is not None and _remote_address(duplicate, self._ports) == self.remote
            yield duplicate if is_same else None


def buffer_bytes_to_request(wmem_max_bytes: int, grows_to_bytes: int) -> int:
    """Value for SO_SNDBUF; 0: leave it, as the buffer grows to as much or more by itself.

    Linux gives twice the requested size, at most twice `wmem_max_bytes`, and a requested size stays fixed.
    """
    requested_bytes = min(wmem_max_bytes, BUFFER_BYTES // 2)
    return requested_bytes if 2 * requested_bytes > grows_to_bytes else 0


def keep_freed_pages() -> None:
    """Let the C library reuse the memory of received messages instead of returning it to the system.

    glibc returns each freed block above a threshold, and every received slice then costs the kernel 256
    empty pages: a tenth of the CPU time of a dense round.  The threshold is the size of the largest such
    block freed so far, at most 32 MiB (mallopt(3), M_MMAP_THRESHOLD).  This block is never written, so it
    takes no memory.
    """
    block = bytearray(_FREED_BYTES)
    del block


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as allowed, so that idle connections exhaust it late.

    Returns the limit, at most `MAX_DESCRIPTORS`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems report a limit that they do not allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


@contextlib.contextmanager
def _duplicate_socket(fd: int) -> Iterator[socket.socket | None]:
    """A duplicate of the descriptor as a socket; None if it is not a socket."""
    copy = -1
    try:
        copy = os.dup(fd)
        duplicate = socket.socket(fileno=copy)
    except OSError:
        if copy >= 0:
            os.close(copy)
        yield None
        return
    with duplicate:
        yield duplicate


def _remote_address(duplicate: socket.socket, ports: Set[int] | None) -> RemoteAddress | None:
    if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
        return None
    try:
        if ports is not None and duplicate.getsockname()[1] not in ports:
            return None
        host, port, *_ = duplicate.getpeername()
    except OSError:  # it was closed in the meantime
        return None
    return str(host), int(port)


@functools.cache
def _system_limits() -> tuple[int, int]:
    """`net.core.wmem_max` and the maximum of `net.ipv4.tcp_wmem`; (0, 0) where they are not known."""
    try:
        return int(_WMEM_MAX.read_text()), int(_TCP_WMEM.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 0, 0
