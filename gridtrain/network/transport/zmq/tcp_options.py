"""Sets options of libzmq's TCP connections, shuts connections down, and raises the limit on open files.

A connection is identified by its file descriptor.  libzmq owns the descriptors and closes them in its own
thread, and their numbers are reused.  Therefore, each access uses a duplicate of the descriptor, after
checking that both ends of the connection are as expected.  The duplicate has a reserved number, so that
connections can be closed even when no descriptor is free.  This module neither reads nor writes data.
Options that the system does not support are skipped.

Buffers:

    send() --> libzmq (8 messages) --> not sent yet (at most 2 MiB) | sent, not acknowledged --> network
                                       `------------------ SO_SNDBUF -------------------'

SO_SNDBUF limits the unacknowledged data.  Linux lets the buffer grow to 4 MiB, which after the kernel's
overhead holds 2.5 MB of data, enough for 0.5 Gbit/s at a round trip of 40 ms.  A fixed size may be larger if
`net.core.wmem_max` allows it.  The unsent part is limited separately (TCP_NOTSENT_LOWAT), so that control
messages do not wait behind a large buffer on a slow link.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import TypeVar

from gridtrain.network.transport.zmq import congestion_control

T = TypeVar("T")

MAX_UNSENT_BYTES = 2 * 2**20
BUFFER_BYTES = 8 * 2**20
"""The size of the send buffer, which is sufficient for 1 Gbit/s at a round trip of 40 ms."""

MAX_DESCRIPTORS = 65536
_BYTES_RECEIVED, _BYTES_RECEIVED_AT, _TCP_INFO_BYTES = struct.Struct("=Q"), 128, 192  # linux/tcp.h, tcp_info
_reserved_lock = threading.Lock()
_FREED_BYTES = 31 * 2**20
_WMEM_MAX = Path("/proc/sys/net/core/wmem_max")
_TCP_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")

RemoteAddress = tuple[str, int]
"""The numeric host address and the port of the other end."""


class TcpConnection:
    """A TCP connection, identified by its descriptor and verified by the addresses of its ends.

    Args:
        fd: the descriptor.
        remote: the address of the other end.
        ports: the ports on which we listen, if the connection was accepted; None if we dialled.
    """

    def __init__(self, fd: int, remote: RemoteAddress, ports: Set[int] | None = None) -> None:
        self.fd = fd
        self.remote = remote
        self._ports = ports
        self._send_monitor: congestion_control.SendMonitor | None = None

    @classmethod
    def identify(cls, fd: int, ports: Set[int] | None = None) -> TcpConnection | None:
        """Return the TCP connection of this descriptor; None if there is none, or if `ports` is given and the
        connection was not accepted at one of them."""
        with _duplicate_socket(fd) as duplicate:
            remote = None if duplicate is None else _remote_address(duplicate, ports)
        return None if remote is None else cls(fd, remote, ports)

    def is_current(self) -> bool:
        """Return whether the descriptor still belongs to this connection."""
        return self._with_socket(lambda _: True, otherwise=False)

    def shut_down(self) -> bool:
        """Shut the connection down in both directions; libzmq then closes the descriptor.

        Returns False if the connection is already closed.
        """
        return self._with_socket(_shut_down, otherwise=False)

    def received_bytes(self) -> int:
        """Return the number of bytes that have arrived, read or unread; 0 if unknown."""
        return self._with_socket(_received_bytes, otherwise=0)

    def enlarge_buffers(self) -> None:
        """Set buffer sizes that are suitable for a fast link with a long round trip."""
        self._with_socket(_enlarge_buffers, otherwise=None)

    def choose_congestion_control(self) -> None:
        """Choose the congestion control of a new connection; see `congestion_control`."""
        self._send_monitor = self._with_socket(congestion_control.choose_control, otherwise=None)

    def revise_congestion_control(self) -> None:
        """Revise the choice of `choose_congestion_control` if necessary.

        This method must be called several times a second.
        """
        if (monitor := self._send_monitor) is not None:
            self._with_socket(lambda each: congestion_control.revise_control(each, monitor), otherwise=None)

    def _with_socket(self, use: Callable[[socket.socket], T], otherwise: T) -> T:
        """Call `use` with a duplicate of the descriptor and return its result.

        Returns `otherwise` if the descriptor now belongs to another connection, if the connection is closed,
        or if the system does not support the options that `use` reads or sets.
        """
        with _duplicate_socket(self.fd) as duplicate:
            if duplicate is not None and _remote_address(duplicate, self._ports) == self.remote:
                with contextlib.suppress(OSError, AttributeError, struct.error):
                    return use(duplicate)
        return otherwise


def _shut_down(connection: socket.socket) -> bool:
    connection.shutdown(socket.SHUT_RDWR)
    return True


def _received_bytes(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])


def _enlarge_buffers(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    if (nbytes := buffer_bytes_to_request(*_system_limits())) > 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)


def buffer_bytes_to_request(wmem_max_bytes: int, grows_to_bytes: int) -> int:
    """Return the value for SO_SNDBUF, or 0 if the buffer grows to at least the same size by itself.

    Linux allocates twice the requested size, at most twice `wmem_max_bytes`, and no longer adapts a size that
    was requested.
    """
    requested_bytes = min(wmem_max_bytes, BUFFER_BYTES // 2)
    return requested_bytes if 2 * requested_bytes > grows_to_bytes else 0


def keep_freed_pages() -> None:
    """Let the C library reuse the memory of received messages and of merges.

    glibc returns each freed block above a threshold to the system, and the kernel then has to provide empty
    pages for the next block.  The 256 pages of each received slice take a tenth of the CPU time of a dense
    round, and the pages for merging 25,600 entries take longer than the merge itself.  The threshold
    is the size of the largest block that was freed in this way, at most 32 MiB (mallopt(3),
    M_MMAP_THRESHOLD), so this function allocates and frees one large block.  `bytes` gets zeroed pages from
    the system (calloc) and never writes to the block, so the block takes no memory.
    """
    block = bytes(_FREED_BYTES)
    del block


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files as far as the system allows, up to `MAX_DESCRIPTORS`.

    With a higher limit, idle connections take longer to exhaust the descriptors.  Returns the limit, at most
    `MAX_DESCRIPTORS`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems report a limit that they do not allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    with contextlib.suppress(OSError):
        _reserved_descriptors()  # before strangers can exhaust the descriptors
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


@contextlib.contextmanager
def _duplicate_socket(fd: int) -> Iterator[socket.socket | None]:
    """Yield a duplicate of the descriptor as a socket; None if it is not a socket, or if no descriptor could
    be reserved, because none was free."""
    with _reserved_lock:
        duplicate: socket.socket | None = None
        try:
            idle, reserved = _reserved_descriptors()
        except OSError:
            yield None
            return
        try:
            with contextlib.suppress(OSError):
                os.dup2(fd, reserved, inheritable=False)
                duplicate = socket.socket(fileno=reserved)
            yield duplicate
        finally:
            if duplicate is not None:
                duplicate.detach()
            os.dup2(idle, reserved, inheritable=False)


@functools.cache
def _reserved_descriptors() -> tuple[int, int]:
    """Return two reserved descriptors: one that stays open on /dev/null, and one whose number each duplicated
    socket reuses.

    Raises:
        OSError: no descriptor is free.
    """
    idle = os.open(os.devnull, os.O_RDONLY)
    try:
        return idle, os.dup(idle)
    except OSError:
        os.close(idle)
        raise


def _forget_reserved() -> None:
    """Discard the reserved descriptors in a forked process, which may reuse their numbers for other files."""
    global _reserved_lock
    _reserved_lock = threading.Lock()  # another thread may have held it
    _reserved_descriptors.cache_clear()


os.register_at_fork(after_in_child=_forget_reserved)


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
    """Return `net.core.wmem_max` and the maximum of `net.ipv4.tcp_wmem`; (0, 0) if they are unknown."""
    try:
        return int(_WMEM_MAX.read_text()), int(_TCP_WMEM.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 0, 0
