"""ZeroMQ sockets with every bound set, and one bounded message from or to one of them.

Decides the socket options, CURVE's among them, and what is too big to parse.  Never touches who may
speak, nor what a message means: that is `zeromq.py` and the codec.

    ROUTER  all connections that others made to us; a message begins with a routing id that libzmq
            invents for each connection (we set none: a set one can be stolen or squatted)
    DEALER  one connection that we made.  It never reconnects by itself: a new connection is a new
            socket, so nothing written for the old one can precede our Hello on the new one.
            IMMEDIATE stays off: with it, messages not yet read are thrown away on a disconnect

Every frame that a ROUTER gives us carries the User-Id that `zap.py` gave to its connection: the key that
the other side proved to have.  A DEALER has proof of whom it talks to by the server's key.

What libzmq does not bound: the number of frames of one message while it arrives (each is at most
`MAXMSGSIZE`).  A message beyond the codec's bounds is read frame by frame and thrown away.
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
import zmq.utils.garbage  # now: its end at exit must come after that of a grid, which still sends then

from gridtrain.core.messages import PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.zmq import zap
from gridtrain.network.wire import codec

HIGH_WATER_MESSAGES = 8
"""Messages that libzmq holds per connection for sending, beyond our outbox and the kernel.  Control waits
behind them: 8 of 1 MiB take 3.4 s on a line of 20 Mbit/s."""

RECEIVE_MESSAGES = 0
"""No bound for receiving, because libzmq 4.3.5 dies of it (`!_io_error`, stream_engine_base.cpp): a full
queue stops its reading, and if the connection is then reset while a ZMTP ping is still to be answered or
sent, an assertion ends the process.  A peer could bring that about.  What a peer may have in here is bounded
by byte credits and, for everything else, by `limits.Flood`: who goes beyond is cut."""

HEARTBEAT_TIMEOUT_S = 25.0
"""A connection whose other end does not answer TCP's own probes is dead after about that long.  ZMTP's
heartbeats stay off, see above; the loops' own deadlines are what notices a silent peer early."""

RECONNECT_NEVER_MS = 24 * 3600 * 1000
"""For RECONNECT_IVL.  Its own word for never, -1, throws unread messages away when a connection ends."""

HANDSHAKE_S = 10.0
CURVE_FRAME_BYTES = 33
"""What CURVE adds to each frame: a command's name, a nonce, flags and the authenticator."""

LINGER_S = 0.5
ZERO_COPY_BYTES = 64 * 1024
KEPT_BYTES = 256 * 1024
"""From here on a frame is sent without a copy.  To let go of it afterwards wakes a thread of pyzmq's, which
takes the interpreter from whoever has it: dearer than to copy 120 KiB."""

READ, WRITE = int(zmq.POLLIN), int(zmq.POLLOUT)
"""What to wait for, as plain numbers: flags of an enum take longer to combine than a short frame to send."""

_NO_WAIT, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)

_monitors = itertools.count()
_EVENT = struct.Struct("=Hi")  # of a socket monitor: what happened, and a number
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
    """One multipart message.  `excess` says which bound it broke (`frames` is then empty).

    `user_id` is what ZAP gave to an accepted connection; empty: none.
    """

    routing_id: bytes
    frames: Frames
    nbytes: int
    excess: str
    user_id: str
    first: zmq.Frame

    @property
    def fd(self) -> int:
        """The connection's descriptor in this process (only for TCP; deprecated in libzmq); -1: not told."""
        try:
            return int(self.first.get(zmq.SRCFD))
        except (zmq.ZMQError, AttributeError, TypeError, ValueError):
            return -1

    @property
    def host(self) -> str:
        """Where the connection comes from; over IPv4 in that form, whatever the socket is open for."""
        return _connection_property(self.first, "Peer-Address").removeprefix("::ffff:")


def open_router(context: Context, identity: Identity | None) -> zmq.Socket[bytes]:
    """For connections that others make.  `identity` None: not encrypted."""
    router = _open_socket(context, zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it a message for nobody is "sent"
    router.setsockopt(zmq.BACKLOG, 512)
    if identity is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, identity.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, zap.DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no handler: nobody, instead of everybody
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
    """What happens to the socket's connections; see `monitor_events`.

    Of any number: libzmq's thread would wait for the reader at the usual bound of 1,000, with it all its
    connections, and `close` for that thread.  An event takes some 100 bytes until the loop's next turn.
    """
    address = f"inproc://monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


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
        _set_address_family(router, address)
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise _bind_error(address, error) from None
    return str(router.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def connect(dealer: zmq.Socket[bytes], address: str) -> None:
    """Begin to connect.  Raises `TransportError` if the address can never work."""
    try:
        _check_address(address)
        _set_address_family(dealer, address)
        dealer.connect(address)
    except zmq.ZMQError as error:
        raise TransportError(
            f"cannot dial {address!r}: {error.strerror}", remedy='an address looks like "tcp://10.0.0.5:7000"'
        ) from None


def wait(interests: list[tuple[Waitable, int]], wait_s: float) -> dict[Waitable | None, int]:
    """Wait for any of (socket or descriptor, READ | WRITE); returns what is ready, and for what."""
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
    """Whether no name has to be looked up, which libzmq does in the thread that serves all connections."""
    try:
        _check_address(address)
        return _host(address) == "localhost" or bool(ipaddress.ip_address(_host(address)))
    except (zmq.ZMQError, ValueError):
        return False


def read(socket: zmq.Socket[bytes], *, encrypted: bool, router: bool = False) -> IncomingMessage | None:
    """The next message within the codec's bounds, or what made it too big; None: nothing there.

    `router`: the socket is one, so a routing id comes first.
    """
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
            frames.append(frame.buffer if len(frame) >= ZERO_COPY_BYTES else frame.bytes)
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
    """Hand the message to libzmq, frames of 256 KiB and more without a copy.

    False: its queue is full, nothing was taken.  Raises `zmq.ZMQError` (EHOSTUNREACH) if the
    connection with this routing id is gone.
    """
    parts = [routing_id, *frames] if routing_id else frames
    last = len(parts) - 1
    try:
        for index, part in enumerate(parts):
            # Only the first can be refused.  A copy of a short frame is cheaper than an object that keeps it.
            socket.send(part, _NO_WAIT if index == last else _MORE, copy=len(part) < KEPT_BYTES)
    except zmq.Again:
        return False
    return True


def monitor_events(monitor: zmq.Socket[bytes], most: int = 1024) -> list[tuple[int, int]]:
    """At most so many (event, file descriptor or error number) that have happened, in their order."""
    events: list[tuple[int, int]] = []
    with contextlib.suppress(zmq.Again):
        while len(events) < most:
            told, _ = monitor.recv_multipart(zmq.DONTWAIT)
            events.append(_EVENT.unpack(told))
    return events


def wire_bytes(frame_bytes: int, *, encrypted: bool) -> int:
    """A frame on the wire: ZMTP 3.1 puts 2 bytes before a short frame and 9 before a long one."""
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
    """Only TCP: libzmq has other transports, over which a lost peer would go unnoticed."""
    match = _ADDRESS.fullmatch(address)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise zmq.ZMQError(errno.EINVAL)


def _set_address_family(socket: zmq.Socket[bytes], address: str) -> None:
    """libzmq speaks IPv6 only where it is told to.  Not for names: it would then take their IPv6 addresses
    first, where a coordinator may not listen."""
    if ":" in _host(address):
        socket.setsockopt(zmq.IPV6, 1)


def _host(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    return "" if match is None else match[1].removeprefix("[").removesuffix("]")


def _connection_property(frame: zmq.Frame, name: str) -> str:
    """What libzmq knows about the connection of a frame; empty if it does not."""
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
