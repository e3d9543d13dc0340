"""Connections that we make: addresses to dial, with retries, and the connection once a peer has greeted.

OutgoingConnection   waiting --due--> connecting --Hello answered--> established (has a Connection)
                        ^---- back-off ----+------- lost, or no answer in time ---+
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import zmq

from gridtrain.core.messages import PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.rate_limiter import FloodDetector
from gridtrain.network.transport.zmq import sockets
from gridtrain.network.transport.zmq.tcp_options import TcpConnection

HELLO_TIMEOUT_S = 10.0
"""Connecting, handshake and Hello must be finished by then, or another connection is tried."""

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0

MAX_UNREAD_BYTES = 192 * 2**20
"""Bytes of one connection that have arrived and were not read: libzmq bounds neither a message of many
frames while it arrives nor, as we configure it, its receive queue.  The credit of an honest peer ends at a
fraction of this."""

MAX_UNREAD_OF_PENDING_BYTES = 2**20
_OVERHEAD = 1.05  # TCP bytes for each counted byte: commands, handshake, frames that were skipped


@dataclass(slots=True, eq=False)
class Connection:
    """A connection over which a peer has greeted, dialled (`outgoing`) or accepted (`routing_id`).

    Attributes:
        peer: its name; of a pending member one that we invented.
        key: the key that the other side has proven (without encryption: claimed).
        socket: what to write to, with the routing id of an accepted connection.
        user_id: of an accepted encrypted connection: the key as its frames carry it; else empty.
        accepted_tcp: of an accepted connection; None: not known.
        state: of an accepted connection, assigned by `Listener` alone: "silent" after `hang_up`; "replaced"
            when the peer greeted over a newer connection; "shut" when it was closed, so that whatever is
            still read from it is dropped.
        read_bytes: bytes that arrived over it and were read.
        flood_detector: of messages that need no credit.
    """

    peer: PeerId
    key: PeerId
    software: str
    socket: zmq.Socket[bytes]
    outgoing: OutgoingConnection | None = None
    routing_id: bytes = b""
    user_id: str = ""
    accepted_tcp: TcpConnection | None = None
    host: str = ""
    is_pending: bool = False
    state: Literal["up", "silent", "replaced", "shut"] = "up"
    read_bytes: int = 0
    flood_detector: FloodDetector = field(default_factory=FloodDetector)

    @property
    def tcp(self) -> TcpConnection | None:
        return self.accepted_tcp if self.outgoing is None else self.outgoing.tcp

    def is_hoarding(self) -> bool:
        """Whether the peer has sent far more than was read."""
        arrived_bytes = 0 if self.tcp is None else self.tcp.received_bytes()
        return exceeds_unread(arrived_bytes, self.read_bytes, is_pending=self.is_pending)


def exceeds_unread(arrived_bytes: int, read_bytes: int, *, is_pending: bool) -> bool:
    """The defence: whether more has arrived over a connection than an honest peer has under way."""
    max_unread_bytes = MAX_UNREAD_OF_PENDING_BYTES if is_pending else MAX_UNREAD_BYTES
    return arrived_bytes > read_bytes * _OVERHEAD + max_unread_bytes


@dataclass(slots=True, eq=False)
class OutgoingConnection:
    """An address that is dialled until it is given up.

    Attributes:
        due_s: when to try again, or to abandon the attempt.
        connection: once the peer has greeted.
    """

    peer: PeerId
    address: str
    due_s: float = 0.0
    attempt: int = 0
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    connection: Connection | None = None
    tcp: TcpConnection | None = None

    def open(self, dealer: zmq.Socket[bytes], hello: sockets.Frames, now_s: float) -> None:
        """Begin to connect; `hello` is sent first.  Raises `TransportError` for an invalid address."""
        monitor = sockets.open_monitor(dealer)
        try:
            sockets.connect(dealer, self.address)
        except TransportError:
            sockets.close(dealer, monitor)
            raise
        sockets.write(dealer, hello)
        self.socket, self.monitor, self.due_s = dealer, monitor, now_s + HELLO_TIMEOUT_S

    def read_monitor(self) -> int | None:
        """Process what happened to the TCP connection; returns the event that says it is lost, if any."""
        assert self.monitor is not None
        for event, number in sockets.monitor_events(self.monitor):
            if event == zmq.EVENT_CONNECTED:
                self.tcp = TcpConnection.identify(number)
                if self.tcp is not None:
                    self.tcp.enlarge_buffers()
                    if self.connection is not None:  # the answer to our Hello was read before this event
                        self.tcp.choose_congestion_control()
            if event in sockets.LOST_EVENTS:
                return event
        return None

    def establish(self, software: str) -> Connection:
        """The peer has answered our Hello."""
        assert self.socket is not None
        self.due_s, self.attempt = math.inf, 0
        if self.tcp is not None:
            self.tcp.choose_congestion_control()
        self.connection = Connection(self.peer, self.peer, software, self.socket, outgoing=self)
        return self.connection

    def close(self) -> None:
        if self.socket is not None and self.monitor is not None:
            sockets.close(self.socket, self.monitor)
        self.socket = self.monitor = self.tcp = None

    def retry_later(self, now_s: float) -> Connection | None:
        """Close the socket, and try again after a back-off.  Returns the connection that is lost by that."""
        self.close()
        longest_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.attempt, 16))
        self.due_s = now_s + longest_s * random.uniform(0.5, 1.0)  # peers should not retry simultaneously
        self.attempt += 1
        lost, self.connection = self.connection, None
        return lost


class Dialer:
    """All addresses that are dialled.

    Args:
        identity: None: connections are not encrypted.
        hello: the frames of our Hello.
    """

    def __init__(self, context: sockets.Context, identity: Identity | None, hello: sockets.Frames) -> None:
        self._context = context
        self._identity = identity
        self._hello = hello
        self._outgoing: list[OutgoingConnection] = []

    def __iter__(self) -> Iterator[OutgoingConnection]:
        return iter(list(self._outgoing))

    def open_socket(self, peer: PeerId) -> zmq.Socket[bytes]:
        """A socket that connects to nobody but `peer`."""
        return sockets.open_dealer(self._context, self._identity, peer)

    def dial(self, peer: PeerId, address: str, now_s: float) -> None:
        """Dial this address, and no other one, for `peer`.  Raises `TransportError` if it is invalid."""
        if any(dial.peer == peer and dial.address == address for dial in self._outgoing):
            return
        self.give_up(peer)
        dial = OutgoingConnection(peer, address)
        dial.open(self.open_socket(peer), self._hello, now_s)
        self._outgoing.append(dial)

    def give_up(self, peer: PeerId) -> None:
        for dial in self:
            if dial.peer == peer:
                self.close(dial)

    def close(self, dial: OutgoingConnection) -> None:
        dial.close()
        self._outgoing.remove(dial)

    def retry_due(self, now_s: float) -> None:
        """Open what waited for its back-off; abandon attempts without an answer in time."""
        for dial in self._outgoing:
            if now_s >= dial.due_s:
                if dial.socket is None:
                    dial.open(self.open_socket(dial.peer), self._hello, now_s)
                else:
                    dial.retry_later(now_s)

    def due_s(self) -> float:
        """When `retry_due` has something to do."""
        return min((dial.due_s for dial in self._outgoing), default=math.inf)
