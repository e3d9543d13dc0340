"""Connections of the ZeroMQ transport: what is dialled, and over what a peer has greeted.

Decides when to dial again (back-off with jitter).  Never reads a message.

    Dial: one address        waiting --due--> connecting --Hello answered--> greeted (has a Link)
                                ^---- back-off ----+------- lost, or no answer in time ---+
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import zmq

from gridtrain.core.messages import PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.rate_limiter import FloodDetector
from gridtrain.network.transport.zmq import sockets, tcp_options
from gridtrain.network.transport.zmq.congestion_control import LossMonitor

HELLO_TIMEOUT_S = 10.0
"""Connect, handshake and Hello must be through by then, or the connection is tried anew."""

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0


@dataclass(slots=True, eq=False)
class OutgoingConnection:
    """An address we keep connecting to.  `due_s`: when to try again, or to give up the attempt."""

    peer: PeerId
    address: str
    due_s: float = 0.0
    attempt: int = 0
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    connection: Connection | None = None
    fd: int = -1  # of the connection, once there is one
    remote: tcp_options.RemoteAddress | None = None  # its other end; descriptors are reused

    def open(
        self, open_dealer: Callable[[PeerId], zmq.Socket[bytes]], hello: sockets.Frames, now_s: float
    ) -> None:
        """Begin to connect; `hello` leaves first.  Raises `TransportError` for an impossible address."""
        dealer = open_dealer(self.peer)
        monitor = sockets.open_monitor(dealer)
        try:
            sockets.connect(dealer, self.address)
        except TransportError:
            sockets.close(dealer, monitor)
            raise
        sockets.write(dealer, hello)
        self.socket, self.monitor, self.due_s = dealer, monitor, now_s + HELLO_TIMEOUT_S

    def mark_established(self, link: Connection) -> None:
        self.connection, self.due_s, self.attempt = link, math.inf, 0

    def close(self) -> None:
        if self.socket is not None and self.monitor is not None:
            sockets.close(self.socket, self.monitor)
        self.socket = self.monitor = None
        self.fd, self.remote = -1, None

    def retry_later(self, now_s: float) -> None:
        """This connection is over; the next attempt comes after a back-off."""
        self.close()
        longest_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.attempt, 16))
        self.due_s = now_s + longest_s * random.uniform(0.5, 1.0)  # not all peers at the same moment
        self.attempt += 1


@dataclass(slots=True, eq=False)
class Connection:
    """A connection over which a peer has greeted: dialled (`dial`) or accepted (`routing_id`).

    Attributes:
        peer: its name; of a guest one that we invented.
        key: what the other side proved to have (not encrypted: what it says to have).
        user_id: the same, as frames of an accepted encrypted connection carry it; else empty.
        fd: the connection's descriptor, by which an accepted one's loss is noticed; -1: unknown.
        state: "silent" after `hang_up`; "replaced" when the peer greeted over a newer connection;
            "shut" when it was cut, so whatever is still read from it is thrown away.
        read_bytes: of what came over it, so much has reached us.
        flood: what it says that needs no byte credit.
        losses: of a connection with another congestion control than the kernel's choice; None: it has that.
    """

    peer: PeerId
    key: PeerId
    software: str = ""
    outgoing: OutgoingConnection | None = None
    routing_id: bytes = b""
    user_id: str = ""
    fd: int = -1
    host: str = ""
    is_pending: bool = False
    state: Literal["up", "silent", "replaced", "shut"] = "up"
    read_bytes: int = 0
    flood_detector: FloodDetector = field(default_factory=FloodDetector)
    loss_monitor: LossMonitor | None = None
