"""Dials outgoing connections, waits before redialling (back-off), and limits the unread bytes.

OutgoingConnection   waiting --due--> resolving --address--> connecting --Hello answered--> established
                        ^-- back-off -----+--- lost, or no answer in time ---+-------------------+

Only host names are resolved (`name_lookup`).  An established connection has a `Connection`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import zmq

from gridtrain.core.messages import PeerId
from gridtrain.errors import TransportError
from gridtrain.network.transport.flood_detector import FloodDetector
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.zmq import sockets
from gridtrain.network.transport.zmq.name_lookup import DIAL_WAIT_S, names
from gridtrain.network.transport.zmq.tcp_options import TcpConnection

HELLO_TIMEOUT_S = 10.0
"""The time limit, in seconds, for the connection, the handshake and Hello; after it, the attempt is abandoned
and repeated."""

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0

REDIAL_S, STEADY_S = 0.01, 1.0
"""A connection that lasted at least `STEADY_S` is redialled within `REDIAL_S`, so that a running process has
reconnected before the coordinator concludes, from several broken connections, that the process has ended."""

MAX_UNREAD_BYTES = 192 * 2**20
"""The maximum number of bytes that may have arrived over one connection without being read.  libzmq limits
neither an arriving message of many frames nor its receive queue (`sockets.RECEIVE_MESSAGES`).  A correct peer
runs out of credit at a fraction of this number."""

MAX_UNREAD_OF_PENDING_BYTES = 2**20
_OVERHEAD = 1.05  # TCP bytes per counted byte, because of commands, the handshake and skipped frames


@dataclass(slots=True, eq=False)
class Connection:
    """A connection over which a peer has sent Hello, either dialled (`outgoing`) or accepted (`routing_id`).

    Attributes:
        peer: the peer's name; for a pending member, a generated name.
        key: the key with which the other side authenticated or, without encryption, the one that it claims.
        socket: the socket to write to; messages of an accepted connection begin with its routing id.
        user_id: the User-Id that the frames of an accepted, encrypted connection carry, otherwise "".
        accepted_tcp: the TCP connection if it was accepted and is known, otherwise None.
        state: the state of an accepted connection, assigned only by `Listener`: "silent" after `hang_up`;
            "replaced" after the peer has sent Hello over a newer connection; "shut" after the connection was
            closed, so messages that are still read from it are dropped.
        read_bytes: the number of bytes that arrived over the connection and were read.
        flood_detector: counts the messages that need no credit.
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
        """Return whether many more bytes have arrived over the connection than were read."""
        arrived_bytes = 0 if self.tcp is None else self.tcp.received_bytes()
        return exceeds_unread(arrived_bytes, self.read_bytes, is_pending=self.is_pending)


def exceeds_unread(arrived_bytes: int, read_bytes: int, *, is_pending: bool) -> bool:
    """Return whether more bytes are unread on a connection than a correct peer can have sent."""
    max_unread_bytes = MAX_UNREAD_OF_PENDING_BYTES if is_pending else MAX_UNREAD_BYTES
    return arrived_bytes > read_bytes * _OVERHEAD + max_unread_bytes


@dataclass(slots=True, eq=False)
class OutgoingConnection:
    """An address that is dialled until the dialler gives up.

    Attributes:
        due_s: the time at which to try again, to use an earlier address of the host, or to abandon the
            current attempt.
        is_resolving: whether the attempt is waiting for a lookup of the host name.
        connection: the connection, or None until the peer has sent Hello.
        established_s: the time at which the peer last sent Hello.
    """

    peer: PeerId
    address: str
    due_s: float = 0.0
    attempt: int = 0
    is_resolving: bool = False
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    connection: Connection | None = None
    established_s: float = 0.0
    tcp: TcpConnection | None = None

    def open(self, dealer: zmq.Socket[bytes], hello: sockets.Frames, host: str, now_s: float) -> None:
        """Start connecting to the host's IP address and queue `hello` as the first message.

        Raises:
            TransportError: the address is invalid.
        """
        monitor = sockets.open_monitor(dealer)
        try:
            sockets.connect(dealer, sockets.replace_host(self.address, host))
        except TransportError:
            sockets.close(dealer, monitor)
            raise
        sockets.write(dealer, hello)
        self.socket, self.monitor, self.due_s = dealer, monitor, now_s + HELLO_TIMEOUT_S

    def read_monitor(self) -> int | None:
        """Process the monitor's events; return the event that reports the connection's loss, or None."""
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

    def establish(self, software: str, host: str, now_s: float) -> Connection:
        """Create the `Connection` after the peer has answered our Hello from the IP address `host`."""
        assert self.socket is not None
        self.due_s, self.attempt, self.established_s = math.inf, 0, now_s
        if self.tcp is not None:
            self.tcp.choose_congestion_control()
        self.connection = Connection(self.peer, self.peer, software, self.socket, outgoing=self, host=host)
        return self.connection

    def close(self) -> None:
        if self.socket is not None and self.monitor is not None:
            sockets.close(self.socket, self.monitor)
        self.socket = self.monitor = self.tcp = None

    def retry_later(self, now_s: float) -> Connection | None:
        """Close the socket and schedule another attempt; return the lost connection, or None."""
        self.close()
        lost, self.connection = self.connection, None
        if lost is not None:
            names.clear_problem(sockets.dialled_host(self.address))
        was_steady = lost is not None and now_s >= self.established_s + STEADY_S
        if was_steady:
            longest_s = REDIAL_S
        else:
            longest_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.attempt, 16))
            self.attempt += 1
        self.due_s = now_s + longest_s * random.uniform(0.5, 1.0)  # so that peers retry at different times
        return lost


class Dialer:
    """Establishes and maintains the outgoing connections.

    Args:
        context: the ZeroMQ context of all sockets.
        identity: our key pair; None if connections are not encrypted.
        hello: the frames of our Hello.
        wake: makes the loop call `retry_due`.  Thread-safe.
    """

    def __init__(
        self,
        context: sockets.Context,
        identity: Identity | None,
        hello: sockets.Frames,
        wake: Callable[[], None],
    ) -> None:
        self._context = context
        self._identity = identity
        self._hello = hello
        self._wake = wake
        self._outgoing: list[OutgoingConnection] = []

    def __iter__(self) -> Iterator[OutgoingConnection]:
        return iter(list(self._outgoing))

    def open_socket(self, peer: PeerId) -> zmq.Socket[bytes]:
        """Open a socket that connects only to the holder of `peer`'s secret key."""
        return sockets.open_dealer(self._context, self._identity, peer)

    def dial(self, peer: PeerId, address: str, now_s: float) -> None:
        """Dial this address for `peer` and stop dialling other addresses for this peer.

        Raises:
            TransportError: the address is invalid.
        """
        if any(dial.peer == peer and dial.address == address for dial in self._outgoing):
            return
        self.give_up(peer)
        dial = OutgoingConnection(peer, address)
        self._attempt(dial, now_s)
        self._outgoing.append(dial)

    def give_up(self, peer: PeerId) -> None:
        for dial in self:
            if dial.peer == peer:
                self.close(dial)

    def close(self, dial: OutgoingConnection) -> None:
        dial.close()
        self._outgoing.remove(dial)

    def retry_due(self, now_s: float) -> None:
        """Dial the addresses whose back-off has ended and abandon attempts that got no answer in time."""
        for dial in self._outgoing:
            if dial.is_resolving or (dial.socket is None and now_s >= dial.due_s):
                self._attempt(dial, now_s)
            elif now_s >= dial.due_s:
                dial.retry_later(now_s)

    def _attempt(self, dial: OutgoingConnection, now_s: float) -> None:
        """Open the connection.  If the host is a name, look it up first, for at most `DIAL_WAIT_S`.

        Raises:
            TransportError: the address is invalid.
        """
        host = sockets.dialled_host(dial.address)
        if not dial.is_resolving:
            dial.is_resolving, dial.due_s = names.begin(host, self._wake), now_s + DIAL_WAIT_S
        if dial.is_resolving and now_s < dial.due_s and names.is_running(host):
            return
        dial.is_resolving = False
        if address := names.address(host):
            dial.open(self.open_socket(dial.peer), self._hello, address, now_s)
        else:
            dial.retry_later(now_s)

    def due_s(self) -> float:
        """Return the time from which `retry_due` must be called; infinity if no call is necessary."""
        return min((dial.due_s for dial in self._outgoing), default=math.inf)
