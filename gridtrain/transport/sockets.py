"""ZeroMQ sockets with every bound set, and one bounded message from or to one of them.

Decides the socket options and what is too big to parse.  Never touches who a peer is, nor what a
message means: that is `zeromq.py` and the codec.

    ROUTER  all connections that others made to us; a message begins with a routing id that libzmq
            invents for each connection (we set none: a set one can be stolen or squatted)
    DEALER  one connection that we made.  It never reconnects by itself: a new connection is a new
            socket, so nothing written for the old one can precede our Hello on the new one.
            IMMEDIATE stays off: with it, messages not yet read are thrown away on a disconnect

What libzmq does not bound: the number of frames of one message while it arrives (each is at most
`MAXMSGSIZE`).  A message beyond the codec's bounds is read frame by frame and thrown away.
"""

from __future__ import annotations

import errno
import math
import re
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gridtrain.errors import TransportError
from gridtrain.wire import codec

HIGH_WATER_MESSAGES = 32
"""Messages that libzmq holds per connection and direction, beyond our outbox and the kernel."""

CAPPED_RECEIVE_MESSAGES = 2
"""The same for receiving under a download cap.  A full queue stops libzmq from reading, pongs
included, until half of it is taken: the pause must stay well below `SILENCE_S`."""

HEARTBEAT_S = 5.0
SILENCE_S = 30.0
"""A connection silent for that long is dead.  Longer than one message takes on a slow line, as a
ping waits behind it; the loops' own deadlines are what notices a silent peer early."""

NEVER_MS = 24 * 3600 * 1000
"""For RECONNECT_IVL.  Its own word for never, -1, throws unread messages away when a connection ends."""

HANDSHAKE_S = 10.0
LINGER_S = 0.5
ZERO_COPY_BYTES = 64 * 1024

_ADDRESS = re.compile(r"tcp://[^/\s]+:(\d{1,5}|\*)")

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

Frames = list[bytes | memoryview]
Waitable = zmq.Socket[bytes] | int


@dataclass(frozen=True, slots=True)
class Incoming:
    """One multipart message.  `excess` says which bound it broke (`frames` is then empty).

    `fd` is the connection's file descriptor in this process, -1 if libzmq does not tell.
    """

    routing_id: bytes
    frames: Frames
    nbytes: int
    fd: int
    excess: str


def open_router(context: zmq.Context[zmq.Socket[bytes]], receive_messages: int) -> zmq.Socket[bytes]:
    router = _open(context, zmq.ROUTER, receive_messages)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it a message for nobody is "sent"
    router.setsockopt(zmq.BACKLOG, 512)
    return router


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], receive_messages: int) -> zmq.Socket[bytes]:
    dealer = _open(context, zmq.DEALER, receive_messages)
    dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, round(HANDSHAKE_S * 1000))
    return dealer


def open_monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    return socket.get_monitor_socket(zmq.EVENT_ALL)


def close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close both; what libzmq still holds is sent for at most `LINGER_S` in the background."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=round(LINGER_S * 1000))


def bind(router: zmq.Socket[bytes], address: str) -> str:
    """Bind and return the address with the port that was chosen.  Raises `TransportError`."""
    endpoint = f"{address[:-1]}0" if address.endswith(":*") else address
    try:
        _check_address(address)
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise _bind_error(address, error) from None
    return str(router.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def connect(dealer: zmq.Socket[bytes], address: str) -> None:
    """Begin to connect.  Raises `TransportError` if the address can never work."""
    try:
        _check_address(address)
        dealer.connect(address)
    except zmq.ZMQError as error:
        raise TransportError(
            f"cannot dial {address!r}: {error.strerror}", remedy='an address looks like "tcp://10.0.0.5:7000"'
        ) from None


def wait(interests: list[tuple[Waitable, int]], wait_s: float) -> dict[Waitable | None, int]:
    """Wait for any of (socket or descriptor, POLLIN | POLLOUT); returns what is ready, and for what."""
    untyped: Any = interests
    return dict(zmq.zmq_poll(untyped, math.ceil(wait_s * 1000)))


def read(socket: zmq.Socket[bytes]) -> Incoming | None:
    """The next message within the codec's bounds, or what made it too big; None: nothing there."""
    try:
        first = socket.recv(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None
    routing_id = b""
    frame, fd = first, _descriptor(first)
    if socket.type == zmq.ROUTER:
        routing_id = first.bytes
        if not first.more:
            return Incoming(routing_id, [], 0, fd, "a message without frames")
        frame = socket.recv(zmq.DONTWAIT, copy=False)
    frames: Frames = []
    count, content_bytes, wire = 0, 0, 0
    while True:
        count += 1
        content_bytes += len(frame)
        wire += wire_bytes(len(frame))
        if count <= codec.MAX_FRAMES and content_bytes <= codec.MAX_MESSAGE_BYTES:
            frames.append(frame.buffer if len(frame) >= ZERO_COPY_BYTES else frame.bytes)
        if not frame.more:
            break
        frame = socket.recv(zmq.DONTWAIT, copy=False)
    if count > codec.MAX_FRAMES:
        return Incoming(routing_id, [], wire, fd, f"{count} frames, at most {codec.MAX_FRAMES} are allowed")
    if content_bytes > codec.MAX_MESSAGE_BYTES:
        text = f"{content_bytes} bytes, at most {codec.MAX_MESSAGE_BYTES} are allowed"
        return Incoming(routing_id, [], wire, fd, text)
    return Incoming(routing_id, frames, wire, fd, "")


def write(socket: zmq.Socket[bytes], frames: Frames, routing_id: bytes = b"") -> bool:
    """Hand the message to libzmq, frames of 64 KiB and more without a copy.

    False: its queue is full, nothing was taken.  Raises `zmq.ZMQError` (EHOSTUNREACH) if the
    connection with this routing id is gone.
    """
    parts = [routing_id, *frames] if routing_id else frames
    try:
        socket.send_multipart(parts, zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return False
    return True


def monitor_events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """All (event, file descriptor or error number) that have happened."""
    events = []
    while monitor.poll(0):
        told: Any = recv_monitor_message(monitor, zmq.DONTWAIT)
        events.append((int(told["event"]), int(told["value"])))
    return events


def wire_bytes(frame_bytes: int) -> int:
    """A frame on the wire: ZMTP 3.1 puts 2 bytes before a short frame and 9 before a long one."""
    return frame_bytes + (2 if frame_bytes <= 255 else 9)


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int, receive_messages: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, round(LINGER_S * 1000)),
        (zmq.SNDTIMEO, 0),
        (zmq.SNDHWM, HIGH_WATER_MESSAGES),
        (zmq.RCVHWM, receive_messages),
        (zmq.MAXMSGSIZE, codec.MAX_PAYLOAD_BYTES),
        (zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000)),
        (zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1000)),
        (zmq.HEARTBEAT_TIMEOUT, round(SILENCE_S * 1000)),
        (zmq.HEARTBEAT_TTL, round(SILENCE_S * 1000)),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
    return socket


def _check_address(address: str) -> None:
    """Only TCP: libzmq has other transports, over which a lost peer would go unnoticed."""
    match = _ADDRESS.fullmatch(address)
    if match is None or (match[1] != "*" and int(match[1]) > 65535):
        raise zmq.ZMQError(errno.EINVAL)


def _descriptor(frame: zmq.Frame) -> int:
    """The connection's file descriptor: deprecated in libzmq and only for TCP, so never relied on."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, AttributeError, TypeError, ValueError):
        return -1


def _bind_error(address: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == errno.EADDRINUSE:
        return TransportError(
            f"cannot listen at {address}: the port is taken",
            remedy="stop the program that uses it, choose another port, or use port 0 for any free one",
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EAGAIN):
        return TransportError(
            f"cannot listen at {address}: no interface of this machine has that address",
            remedy='listen at "tcp://*:PORT" for all interfaces',
        )
    return TransportError(
        f"cannot listen at {address!r}: {error.strerror}",
        remedy='an address looks like "tcp://*:7000", with port 0 for any free one',
    )
