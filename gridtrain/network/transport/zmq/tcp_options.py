"""TCP connections by their file descriptors: libzmq's ROUTER cannot close one of them, we can.

Decides whether a descriptor is still the connection that it was.  Never reads or writes data.  libzmq
owns the descriptors and closes them in a thread of its own, and numbers are reused; so each look goes
through a duplicate, and a connection is cut only if both of its ends are the expected ones.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Iterator, Set

from gridtrain.network.transport.zmq import congestion_control, socket_buffers

MOST_DESCRIPTORS = 65536
_BYTES_RECEIVED, _BYTES_RECEIVED_AT, _TCP_INFO_BYTES = struct.Struct("=Q"), 128, 192  # linux/tcp.h, tcp_info
RemoteAddress = tuple[str, int]
"""The host and port of the other end, as numbers."""


def remote_address(fd: int, ports: Set[int] | None = None) -> RemoteAddress | None:
    """The other end of a connection, to one of our ports if named; None: it is no such one."""
    with _duplicate_socket(fd) as connection:
        return None if connection is None else _remote_if_on_ports(connection, ports)


def shut_down(fd: int, remote: RemoteAddress, ports: Set[int]) -> bool:
    """Shut the connection with `remote` down, both ways.  False: the descriptor is not it any more."""
    with _duplicate_socket(fd) as connection:
        if connection is None or _remote_if_on_ports(connection, ports) != remote:
            return False
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        return True


def received_bytes(fd: int, remote: RemoteAddress, ports: Set[int] | None = None) -> int:
    """What has come over the connection with `remote` so far, read by anybody or not; 0: not known."""
    with _duplicate_socket(fd) as connection:
        if connection is None or _remote_if_on_ports(connection, ports) != remote:
            return 0
        with contextlib.suppress(OSError, AttributeError, struct.error):  # only Linux tells
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return int(_BYTES_RECEIVED.unpack_from(told, _BYTES_RECEIVED_AT)[0])
        return 0


def enlarge_buffers(fd: int, remote: RemoteAddress, ports: Set[int] | None = None) -> None:
    """Give the connection with `remote` the buffers that a long fat line needs; see `buffering`."""
    with _duplicate_socket(fd) as connection:
        if connection is not None and _remote_if_on_ports(connection, ports) == remote:
            socket_buffers.enlarge_buffers(connection)


def choose_control(fd: int, remote: RemoteAddress, ports: Set[int] | None = None) -> bool:
    """See `congestion.choose`, of the connection with `remote`."""
    with _duplicate_socket(fd) as connection:
        ours = connection is not None and _remote_if_on_ports(connection, ports) == remote
        return ours and connection is not None and congestion_control.choose_control(connection)


def watch_losses(
    fd: int, remote: RemoteAddress, losses: congestion_control.LossMonitor, ports: Set[int] | None = None
) -> bool:
    """See `congestion.watch`, of the connection with `remote`."""
    with _duplicate_socket(fd) as connection:
        ours = connection is not None and _remote_if_on_ports(connection, ports) == remote
        return ours and connection is not None and congestion_control.watch_losses(connection, losses)


def raise_descriptor_limit() -> int:
    """Allow this process as many descriptors as it may allow itself, so that idle ones are no attack.

    Returns how many these are, at most `MOST_DESCRIPTORS`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems name a limit that they do not allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS)


@contextlib.contextmanager
def _duplicate_socket(fd: int) -> Iterator[socket.socket | None]:
    """A duplicate of the descriptor as a socket; None if it is none."""
    copy = -1
    try:
        copy = os.dup(fd)
        connection = socket.socket(fileno=copy)
    except OSError:
        if copy >= 0:
            os.close(copy)
        yield None
        return
    with connection:
        yield connection


def _remote_if_on_ports(connection: socket.socket, ports: Set[int] | None) -> RemoteAddress | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        if ports is not None and connection.getsockname()[1] not in ports:
            return None
        host, port, *_ = connection.getpeername()
    except OSError:  # it was closed in the meantime
        return None
    return str(host), int(port)
