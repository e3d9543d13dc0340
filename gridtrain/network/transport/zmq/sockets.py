"""ZeroMQ sockets with every bound set, and reading and writing of one bounded message.

    ROUTER  all connections that others made to us; a message begins with a routing id that libzmq
            generates for each connection (clients set none: a chosen one could be taken from another)
    DEALER  one connection that we made.  It never reconnects by itself: a new connection is a new
            socket, so nothing written for the old one can precede our Hello on the new one.
            IMMEDIATE stays off: with it, messages that were not read are dropped at a disconnect

Every frame from a ROUTER carries the User-Id that `handshake.ZapHandler` gave to its connection: the key that
the other side has proven.  A DEALER knows whom it talks to by the server's key.

libzmq does not bound the number of frames of one message while it arrives (each has at most `MAXMSGSIZE`).
A message beyond the codec's bounds is read frame by frame and dropped.
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
from typing import Any

import zmq
import zmq.utils.garbage  # imported early, so that its exit handler runs after that of a Grid, which sends

from gridtrain.core.messages import PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.wire import codec

ZAP_DOMAIN = b"gridtrain"
HIGH_WATER_MESSAGES = 8
"""Messages that libzmq holds per connection for sending, beyond `SendQueue` and the kernel.  Control waits
behind them: 8 of 1 MiB take 3.4 s on a link of 20 Mbit/s."""

RECEIVE_MESSAGES = 0
"""No bound for receiving, because it can crash libzmq 4.3.5 (`!_io_error`, stream_engine_base.cpp): a full
queue stops its reading, and if the connection is then reset while a ZMTP ping is still to be answered or
sent, an assertion ends the process.  A peer could cause that.  What a peer may have in this queue is bounded
by flow control and, for everything else, by `FloodDetector`: beyond that its connection is closed."""

HEARTBEAT_TIMEOUT_S = 25.0
"""After about that long without an answer to TCP's keep-alive probes a connection is closed.  ZMTP's
heartbeats stay off, see above; the deadlines of the loops detect a silent peer earlier."""

RECONNECT_NEVER_MS = 24 * 3600 * 1000
"""For RECONNECT_IVL.  libzmq's value for never, -1, drops unread messages when a connection ends."""

HANDSHAKE_S = 10.0
CURVE_FRAME_BYTES = 33
"""Added to each frame by CURVE: a command's name, a nonce, flags and the authenticator."""

LINGER_S = 0.5
ZERO_COPY_RECEIVE_BYTES = 64 * 1024
ZERO_COPY_SEND_BYTES = 256 * 1024
"""From this size on a frame is sent without a copy.  Releasing it afterwards wakes a thread of pyzmq, which
takes the interpreter lock: that costs more than copying 120 KiB."""

READ, WRITE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""What to wait for, as plain numbers: combining enum flags takes longer than sending a short frame."""

_NO_WAIT, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)

_monitors = itertools.count()
_EVENT = struct.Struct("=Hi")  # of a socket monitor: event, and a descriptor or error number
_ADDRESS = re.compile(r"tcp://([^/\s]+):(\d{1,5}|\*)")

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

Frames = list[bytes | memoryview]
Waitable = zmq.Socket[bytes] | int
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class IncomingMessage:
    """One multipart message.

    Attributes:
        frames: empty if the message exceeds a bound.
        nbytes: on the wire.
        excess: the bound that it exceeds; empty: none.
        user_id: from ZAP, of an accepted connection; empty: none.
        first: its first frame, by which libzmq tells properties of the connection.
    """

    routing_id: bytes
    frames: Frames
    nbytes: int
    excess: str
    user_id: str
    first: zmq.Frame

    @property
    def fd(self) -> int:
        """The connection's descriptor in this process (TCP only; deprecated in libzmq); -1: not known."""
        try:
            return int(self.first.get(zmq.SRCFD))
        except (zmq.ZMQError, AttributeError, TypeError, ValueError):
            return -1

    @property
    def host(self) -> str:
        """The address of the other end; an IPv4 address in IPv4 form, even on an IPv6 socket."""
        return _connection_property(self.first, "Peer-Address").removeprefix("::ffff:")


def open_router(context: Context, identity: Identity | None) -> zmq.Socket[bytes]:
    """For connections that others make.  `identity` None: not encrypted."""
    router = _open_socket(context, zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else a message to an unknown routing id is dropped silently
    router.setsockopt(zmq.BACKLOG, 512)
    if identity is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, identity.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler refuse all, instead of admitting all
    return router


def open_dealer(context: Context, identity: Identity | None, peer: PeerId) -> zmq.Socket[bytes]:
    """For a connection to `peer`.  `identity` None: not encrypted."""
    dealer = _open_socket(context, zmq.DEALER)
    dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_NEVER_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, round(HANDSHAKE_S * 1000))
    if identity is not None:
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, identity.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, identity.secret)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, peer)
    return dealer


def open_monitor(socket: zmq.Socket[bytes], events: int = zmq.EVENT_ALL) -> zmq.Socket[bytes]:
    """A socket from which `monitor_events` reads what happens to the socket's connections.

    Its queue has no bound: at the usual one of 1,000 libzmq's thread would wait for the reader, all its
    connections with it, and `close` for that thread.  An event takes some 100 bytes until it is read.
    """
    address = f"inproc://monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close both; libzmq goes on sending what it holds for at most `LINGER_S` in the background."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=round(LINGER_S * 1000))


def bind(router: zmq.Socket[bytes], address: str) -> str:
    """Bind, and return the address with the port that was chosen.  Raises `TransportError`."""
    endpoint = f"{address[:-1]}0" if address.endswith(":*") else address
    try:
        _check_address(address)
        _set_address_family(router, address)
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise _bind_error(address, error) from None
    return str(router.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def connect(dealer: zmq.Socket[bytes], address: str) -> None:
    """Begin to connect.  Raises `TransportError` if the address is invalid."""
    try:
        _check_address(address)
        _set_address_family(dealer, address)
        dealer.connect(address)
    except zmq.ZMQError as error:
        raise TransportError(
            f"cannot dial {address!r}: {error.strerror}", remedy='an address looks like "tcp://10.0.0.5:7000"'
        ) from None


def wait(interests: list[tuple[Waitable, int]], wait_s: float) -> dict[Waitable | None, int]:
    """Wait for any of (socket or descriptor, READ | WRITE); returns what is ready, with its flags."""
    untyped: Any = interests
    return dict(zmq.zmq_poll(untyped, math.ceil(wait_s * 1000)))


def is_loopback(address: str) -> bool:
    """Whether the address never leaves this machine."""
    host = _host(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_numeric(address: str) -> bool:
    """Whether no name must be resolved, which libzmq does in the thread that serves all connections."""
    try:
        _check_address(address)
        return _host(address) == "localhost" or bool(ipaddress.ip_address(_host(address)))
    except (zmq.ZMQError, ValueError):
        return False


def read(socket: zmq.Socket[bytes], *, encrypted: bool, router: bool = False) -> IncomingMessage | None:
    """The next message; None: there is none.  `router`: messages begin with a routing id."""
    try:
        first = socket.recv(_NO_WAIT, copy=False)
    except zmq.Again:
        return None
    routing_id, user_id, frame = b"", "", first
    if router:
        routing_id, user_id = first.bytes, _connection_property(first, "User-Id") if encrypted else ""
        if not first.more:
            return IncomingMessage(routing_id, [], 0, "a message without frames", user_id, first)
        frame = socket.recv(_NO_WAIT, copy=False)
    frames: Frames = []
    count, content_bytes, wire = 0, 0, 0
    while True:
        count += 1
        content_bytes += len(frame)
        wire += wire_bytes(len(frame), encrypted=encrypted)
        if count <= codec.MAX_FRAMES and content_bytes <= codec.MAX_MESSAGE_BYTES:
            frames.append(frame.buffer if len(frame) >= ZERO_COPY_RECEIVE_BYTES else frame.bytes)
        if not frame.more:
            break
        frame = socket.recv(_NO_WAIT, copy=False)
    excess = ""
    if count > codec.MAX_FRAMES:
        excess = f"{count} frames, at most {codec.MAX_FRAMES} are allowed"
    elif content_bytes > codec.MAX_MESSAGE_BYTES:
        excess = f"{content_bytes} bytes, at most {codec.MAX_MESSAGE_BYTES} are allowed"
    return IncomingMessage(routing_id, [] if excess else frames, wire, excess, user_id, first)


def write(socket: zmq.Socket[bytes], frames: Frames, routing_id: bytes = b"") -> bool:
    """Give the message to libzmq, frames of 256 KiB and more without a copy.

    False: its queue is full, and nothing was taken.  Raises `zmq.ZMQError` (EHOSTUNREACH) if the
    connection with this routing id is gone.
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
    """Events in their order, each with a file descriptor or an error number."""
    events: list[tuple[int, int]] = []
    with contextlib.suppress(zmq.Again):
        while len(events) < max_events:
            event, _ = monitor.recv_multipart(zmq.DONTWAIT)
            events.append(_EVENT.unpack(event))
    return events


def wire_bytes(frame_bytes: int, *, encrypted: bool) -> int:
    """Size of a frame on the wire: ZMTP 3.1 puts 2 bytes before a short frame and 9 before a long one."""
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
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
        (zmq.TCP_MAXRT, round(HEARTBEAT_TIMEOUT_S * 1000)),
    ):
        socket.setsockopt(option, value)
    return socket


def _check_address(address: str) -> None:
    """TCP only: over libzmq's other transports a lost peer would not be detected."""
    match = _ADDRESS.fullmatch(address)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise zmq.ZMQError(errno.EINVAL)


def _set_address_family(socket: zmq.Socket[bytes], address: str) -> None:
    """Enable IPv6 for an IPv6 address.  Not for names: libzmq would then prefer their IPv6 addresses, at
    which a coordinator may not listen."""
    if ":" in _host(address):
        socket.setsockopt(zmq.IPV6, 1)


def _host(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    return "" if match is None else match[1].removeprefix("[").removesuffix("]")


def _connection_property(frame: zmq.Frame, name: str) -> str:
    """A property that libzmq knows of the connection of a frame; empty: not known."""
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


def _bind_error(address: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == errno.EADDRINUSE:
        return TransportError(
            f"cannot listen at {address}: the port is taken",
            remedy="stop the program that uses it, choose another port, or use port 0 for any free one",
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EAGAIN):
        return TransportError(
            f"cannot listen at {address}: no interface of this machine has that address",
            remedy='listen at "tcp://0.0.0.0:PORT" for all interfaces',
        )
    return TransportError(
        f"cannot listen at {address!r}: {error.strerror}",
        remedy='an address looks like "tcp://0.0.0.0:7000", with port 0 for any free one',
    )
