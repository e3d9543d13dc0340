"""Opens ZeroMQ sockets with limits and timeouts set, and reads and writes single messages of bounded size.

    ROUTER  all incoming connections; a message begins with a routing id that libzmq generates for each
            connection (clients cannot choose it, because they could choose the id of another client)
    DEALER  one outgoing connection.  It never reconnects by itself: a new connection uses a new socket, so
            nothing that was written for the old connection can precede our Hello on the new connection.
            IMMEDIATE is off, because with this option unread messages are dropped at a disconnect

Every frame from a ROUTER carries the User-Id that `handshake.ZapHandler` assigned to its connection, which is
the key with which the other side authenticated.  A DEALER connects only to the owner of the server's key.

While a message arrives, libzmq limits the size of each frame (`MAXMSGSIZE`), but not the number of frames.  A
message that exceeds the codec's limits is read frame by frame and dropped.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import math
import re
import struct
from dataclasses import dataclass
from socket import if_nameindex
from typing import Any

import zmq
import zmq.utils.garbage  # imported early, so that its exit handler runs after a Grid's, which still sends

from gridtrain.core.messages import PeerId
from gridtrain.errors import AddressTaken, TransportError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import Frames as Frames
from gridtrain.network.transport.zmq import name_lookup
from gridtrain.network.wire import codec

ZAP_DOMAIN = b"gridtrain"
HIGH_WATER_MESSAGES = 8
"""The number of messages that libzmq queues for sending on each connection, in addition to `SendQueue` and
the kernel's buffers.  Control waits behind these messages: 8 messages of 1 MiB take 3.4 s on a link of 20
Mbit/s."""

RECEIVE_MESSAGES = 0
"""The number of received messages that libzmq queues; 0 means no limit.  A limit can crash libzmq 4.3.5
(`!_io_error`, stream_engine_base.cpp): libzmq stops reading when the queue is full, and if the connection is
then reset while a ZMTP ping remains to be answered or sent, an assertion aborts the process.  A peer could
cause this crash.  Instead, flow control limits the bulk messages that a peer may have in this queue, and
`FloodDetector` limits all other messages; a connection that exceeds these limits is closed."""

HEARTBEAT_TIMEOUT_S = 6
"""The approximate time without an acknowledgement, of data or of TCP's keep-alive probes, after which a
connection is closed; so is the connection of a peer that reads nothing although its buffers are full.
ZMTP's heartbeats are off (see `RECEIVE_MESSAGES`).  A link that drops everything must be noticed before the
step stalls for the third time, because the coordinator then dismisses a member."""

ZERO_COPY_RECV = 10
"""The number of a context option that has no name in pyzmq.  The option is off: if it is on, a short
encrypted message that has not been read keeps the buffer in which it arrived, so that 37 bytes on the wire
take 2.5 kB of memory or more instead of 0.2 kB.  In both cases, the part of a long message that exceeds this
buffer of 8 kB is read directly into the message."""

_KEEPALIVE_PROBES = 3

RECONNECT_NEVER_MS = 24 * 3600 * 1000
"""The value of RECONNECT_IVL.  libzmq's "never", -1, drops unread messages when a connection ends."""

HANDSHAKE_S = 10.0
"""ZeroMQ's own limit for connecting and for the handshake; `half_open.HALF_OPEN_S` is shorter."""

CURVE_FRAME_BYTES = 33
"""The bytes that CURVE adds to each frame: a command's name, a nonce, flags and the authenticator."""

LISTEN_QUEUE = 4096
"""The number of connections that may wait to be accepted, unless `net.core.somaxconn` is smaller.  When the
queue is full, the kernel drops requests to connect; each is repeated after 1, 3 and 7 s."""

LINGER_S = 0.5
ZERO_COPY_RECEIVE_BYTES = 64 * 1024
ZERO_COPY_SEND_BYTES = 256 * 1024
"""Frames of at least this size are sent without a copy.  Releasing a frame that was not copied wakes a thread
of pyzmq, which takes the interpreter lock; this costs more than copying 120 KiB."""

READ, WRITE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""Flags for `wait`.  They are plain integers because combining enum flags takes longer than sending a short
frame."""

_NO_WAIT, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)

_monitors = itertools.count()
_EVENT = struct.Struct("=Hi")  # a socket monitor's event: its number, and a descriptor or error number
_ADDRESS = re.compile(r"tcp://([^/\s;]+):(\d{1,5}|\*)")  # no ";": libzmq dials what follows it

LOST_EVENTS = frozenset(
    {
        zmq.EVENT_DISCONNECTED,
        zmq.EVENT_CLOSED,
        zmq.EVENT_CONNECT_RETRIED,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    }
)

ACCEPTED_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

Waitable = zmq.Socket[bytes] | int
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class IncomingMessage:
    """A multipart message that was read from a socket.

    Attributes:
        routing_id: the routing id of an accepted connection, otherwise empty.
        frames: the frames; empty if the message exceeds a bound.
        nbytes: the size of the frames in bytes.
        wire_bytes: the size of the frames on the wire, including what ZMTP and CURVE add to each frame.
        excess: a description of the limit that the message exceeds, or "".
        user_id: the User-Id from ZAP if the connection is accepted and encrypted, otherwise "".
        first: the first frame, from which libzmq reads properties of the connection.
    """

    routing_id: bytes
    frames: Frames
    nbytes: int
    wire_bytes: int
    excess: str
    user_id: str
    first: zmq.Frame

    @property
    def fd(self) -> int:
        """The connection's descriptor in this process (TCP only; deprecated in libzmq); -1 if unknown."""
        try:
            return int(self.first.get(zmq.SRCFD))
        except (zmq.ZMQError, AttributeError, TypeError, ValueError):
            return -1

    @property
    def host(self) -> str:
        """The address of the other end; an IPv4 address is in IPv4 form, even on an IPv6 socket."""
        return _connection_property(self.first, "Peer-Address").removeprefix("::ffff:")


def open_context() -> Context:
    """Open a context for one transport; pyzmq's global context does not survive a fork."""
    context: Context = zmq.Context()
    context.set(ZERO_COPY_RECV, 0)
    return context


def open_router(context: Context, identity: Identity | None) -> zmq.Socket[bytes]:
    """Open the socket for incoming connections, which are encrypted unless `identity` is None."""
    router = _open_socket(context, zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # do not silently drop messages to unknown routing ids
    router.setsockopt(zmq.BACKLOG, LISTEN_QUEUE)
    if identity is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, identity.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, refuse all keys
    return router


def open_dealer(context: Context, identity: Identity | None, peer: PeerId) -> zmq.Socket[bytes]:
    """Open the socket for a connection to `peer`, which is encrypted unless `identity` is None."""
    dealer = _open_socket(context, zmq.DEALER)
    dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_NEVER_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, round(HANDSHAKE_S * 1000))
    if identity is not None:
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, identity.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, identity.secret)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, peer)
    return dealer


def open_monitor(socket: zmq.Socket[bytes], events: int = zmq.EVENT_ALL) -> zmq.Socket[bytes]:
    """Return a socket from which `monitor_events` reads events about the connections of `socket`.

    The monitor's queue is not limited.  With the default limit of 1,000 events, libzmq's thread would wait
    for the reader; all connections would stop, and `close` would wait for that thread.  An unread event takes
    about 100 bytes.
    """
    address = f"inproc://monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close both sockets.  libzmq continues to send queued messages in the background, up to `LINGER_S`."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=round(LINGER_S * 1000))


def bind(router: zmq.Socket[bytes], address: str) -> str:
    """Bind the socket; return the address with the chosen port.

    Raises:
        TransportError: the address is taken or invalid, or too many files are open.
    """
    try:
        _check_address(address)
        endpoint, host = address, _host(address)
        if host != "*" and host not in (name for _, name in if_nameindex()):  # libzmq resolves these two
            endpoint = replace_host(address, name_lookup.names.resolve(host) or host)
        _set_address_family(router, endpoint)
        router.bind(f"{endpoint[:-1]}0" if endpoint.endswith(":*") else endpoint)
    except (zmq.ZMQError, OSError) as error:
        raise _bind_error(address, error) from None
    return str(router.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def connect(dealer: zmq.Socket[bytes], address: str) -> None:
    """Start connecting to an address for which `is_numeric` is true.

    Raises:
        TransportError: the address is invalid, or has a host name; libzmq would resolve a name in the thread
            that handles all connections.
    """
    try:
        host = name_lookup.numeric_host(dialled_host(address))
        if not host:
            raise zmq.ZMQError(errno.EINVAL)
        endpoint = replace_host(address, host)
        _set_address_family(dealer, endpoint)
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        raise _dial_error(address, error) from None


def dialled_host(address: str) -> str:
    """Return the host of an address to dial; raise `TransportError` if the address is invalid."""
    try:
        _check_address(address)
        if address.endswith(":*"):
            raise zmq.ZMQError(errno.EINVAL)
    except zmq.ZMQError as error:
        raise _dial_error(address, error) from None
    return _host(address)


def replace_host(address: str, host: str) -> str:
    """Return the address with this IP address instead of its host."""
    port = address.rpartition(":")[2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def wait(interests: list[tuple[Waitable, int]], wait_s: float) -> dict[Waitable | None, int]:
    """Wait until a socket or descriptor is ready for reading or writing, as its flags request.

    Returns the sockets and descriptors that are ready, each with the flags for which it is ready.
    """
    untyped: Any = interests
    return dict(zmq.zmq_poll(untyped, math.ceil(wait_s * 1000)))


def is_loopback(address: str) -> bool:
    """Return whether connections to this address stay on this machine."""
    host = _host(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_numeric(address: str) -> bool:
    """Return whether the address can be dialled without resolving a name."""
    try:
        return bool(name_lookup.numeric_host(dialled_host(address)))
    except TransportError:
        return False


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether `read` would return a message; faster than a call to `read` that finds no message."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & READ)


def read(socket: zmq.Socket[bytes], *, encrypted: bool, router: bool = False) -> IncomingMessage | None:
    """Read the next message; return None if there is none.

    Args:
        socket: the socket to read from.
        encrypted: whether the socket's connections are encrypted.
        router: whether the socket is a ROUTER, whose messages begin with a routing id.
    """
    try:
        first = socket.recv(_NO_WAIT, copy=False)
    except zmq.Again:
        return None
    routing_id, user_id, frame = b"", "", first
    if router:
        routing_id, user_id = first.bytes, _connection_property(first, "User-Id") if encrypted else ""
        if not first.more:
            return IncomingMessage(routing_id, [], 0, 0, "a message has no frames", user_id, first)
        frame = socket.recv(_NO_WAIT, copy=False)
    frames: Frames = []
    count, content_bytes, wire = 0, 0, 0
    while True:
        nbytes = len(frame)
        count += 1
        content_bytes += nbytes
        wire += wire_bytes(nbytes, encrypted=encrypted)
        if count <= codec.MAX_FRAMES and content_bytes <= codec.MAX_MESSAGE_BYTES:
            frames.append(frame.buffer if nbytes >= ZERO_COPY_RECEIVE_BYTES else frame.bytes)
        if not frame.more:
            break
        frame = socket.recv(_NO_WAIT, copy=False)
    excess = ""
    if count > codec.MAX_FRAMES:
        excess = f"a message has {count} frames; at most {codec.MAX_FRAMES} are allowed"
    elif content_bytes > codec.MAX_MESSAGE_BYTES:
        excess = f"a message is {content_bytes} bytes long; at most {codec.MAX_MESSAGE_BYTES} are allowed"
    return IncomingMessage(routing_id, [] if excess else frames, content_bytes, wire, excess, user_id, first)


def write(socket: zmq.Socket[bytes], frames: Frames, routing_id: bytes = b"") -> bool:
    """Pass the message to libzmq; frames of 256 KiB or more are not copied.

    Returns False if libzmq's queue is full, in which case nothing was queued.

    Raises:
        zmq.ZMQError: the connection with this routing id is closed (EHOSTUNREACH).
    """
    parts = [routing_id, *frames] if routing_id else frames
    last = len(parts) - 1
    try:
        for index, part in enumerate(parts):
            # Only the first frame can be refused.
            socket.send(part, _NO_WAIT if index == last else _MORE, copy=len(part) < ZERO_COPY_SEND_BYTES)
    except zmq.Again:
        return False
    return True


def monitor_events(monitor: zmq.Socket[bytes], max_events: int = 1024) -> list[tuple[int, int]]:
    """Return the pending events in order, each with a file descriptor or an error number."""
    events: list[tuple[int, int]] = []
    with contextlib.suppress(zmq.Again):
        while len(events) < max_events:
            event, _ = monitor.recv_multipart(zmq.DONTWAIT)
            events.append(_EVENT.unpack(event))
    return events


def wire_bytes(frame_bytes: int, *, encrypted: bool) -> int:
    """Return the size of a frame on the wire.

    ZMTP 3.1 adds a header of 2 bytes to a short frame and a header of 9 bytes to a long frame.
    """
    nbytes = frame_bytes + (CURVE_FRAME_BYTES if encrypted else 0)
    return nbytes + (2 if nbytes <= 255 else 9)


def _open_socket(context: Context, kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, round(LINGER_S * 1000)),
        (zmq.SNDTIMEO, 0),
        (zmq.SNDHWM, HIGH_WATER_MESSAGES),
        (zmq.RCVHWM, RECEIVE_MESSAGES),
        (zmq.MAXMSGSIZE, codec.MAX_PAYLOAD_BYTES + CURVE_FRAME_BYTES),
        (zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000)),
        (zmq.HEARTBEAT_IVL, 0),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, HEARTBEAT_TIMEOUT_S - _KEEPALIVE_PROBES),
        (zmq.TCP_KEEPALIVE_INTVL, 1),
        (zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES),
        (zmq.TCP_MAXRT, HEARTBEAT_TIMEOUT_S * 1000),
    ):
        socket.setsockopt(option, value)
    return socket


def _check_address(address: str) -> None:
    """Raise `zmq.ZMQError` unless this is a TCP address.

    Over libzmq's other transports, the loss of a peer would not be detected.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise zmq.ZMQError(errno.EINVAL)


def _set_address_family(socket: zmq.Socket[bytes], address: str) -> None:
    """Enable IPv6 for the next use of the socket if the address is an IPv6 address; otherwise disable it,
    because a socket with IPv6 listens on IPv4 addresses in their IPv6 form."""
    socket.setsockopt(zmq.IPV6, int(":" in _host(address)))


def _host(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    return "" if match is None else match[1].removeprefix("[").removesuffix("]")


def _connection_property(frame: zmq.Frame, name: str) -> str:
    """Return a property of the connection from which libzmq read the frame; "" if the property is unknown."""
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


def _dial_error(address: str, error: zmq.ZMQError) -> TransportError:
    return TransportError(
        f"cannot dial {address!r}: {error.strerror}",
        remedy='use an address such as "tcp://10.0.0.5:7000"',
    )


def _bind_error(address: str, error: zmq.ZMQError | OSError) -> TransportError:
    if error.errno == errno.EADDRINUSE:
        return AddressTaken(
            f"cannot listen on {address}: the port is taken",
            remedy="stop the program that uses the port, choose another port, or use port 0 for any free "
            "port",
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EAGAIN):
        return TransportError(
            f"cannot listen on {address}: no interface of this machine has that address",
            remedy='listen on "tcp://0.0.0.0:PORT" for all interfaces',
        )
    if error.errno == errno.EMFILE:
        return TransportError(
            f"cannot listen on {address}: {error.strerror}",
            remedy="raise the limit on open files (ulimit -n)",
        )
    return TransportError(
        f"cannot listen on {address!r}: {error.strerror}",
        remedy='use an address such as "tcp://0.0.0.0:7000"; port 0 stands for any free port',
    )
