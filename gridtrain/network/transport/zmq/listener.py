"""Manages incoming connections: opens the ROUTER socket, tracks descriptors, and closes connections.

              ZapHandler <--handshake--+
    peers ---------------------------ROUTER --messages--> ZeroMQTransport --Hello--> Connection
              HalfOpenConnections <--accepted, closed-- monitor                          |
                       +--too old, too many--> shut down <--violation, revoked, hang_up--+

A monitor event identifies a connection only by its file descriptor, and so does a frame (SRCFD).  Descriptors
are reused, so a descriptor is trusted only if its remote address is still the same as when the connection was
accepted.
"""

from __future__ import annotations

import math
import time

import zmq

from gridtrain.core.messages import PeerId
from gridtrain.network.transport import access_control
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import AccessPolicy
from gridtrain.network.transport.zmq import dialer, half_open, sockets, tcp_options
from gridtrain.network.transport.zmq.dialer import Connection
from gridtrain.network.transport.zmq.handshake import ZapHandler
from gridtrain.network.transport.zmq.tcp_options import TcpConnection

BATCH_EVENTS = 256
"""The maximum number of monitor events to read in a row, so that messages are not delayed."""

CLOSE_DELAY_S = 1.0
"""The delay between `hang_up` and the closing of a pending member's connection, so that the reply is sent."""

DRAIN_S = 0.1
"""The longest delay before a lost connection is reported while its earlier messages are still unread."""


class Listener:
    """Accepts and manages the incoming connections.

    Args:
        context: the ZeroMQ context of all sockets.
        policy: the access policy, which decides which keys may connect.
        identity: our key pair; None if connections are not encrypted.
    """

    def __init__(self, context: sockets.Context, policy: AccessPolicy, identity: Identity | None) -> None:
        # The handler must exist before the ROUTER listens.
        self.zap_handler = ZapHandler(context, policy) if identity is not None else None
        self.router = sockets.open_router(context, identity)
        self.monitor = sockets.open_monitor(self.router, sockets.ACCEPTED_EVENTS)
        self._policy = policy
        self._encrypted = identity is not None
        self._ports: set[int] = set()
        self._connections: dict[bytes, Connection] = {}  # by routing id; refused connections are "shut"
        self._accepted: dict[int, TcpConnection] = {}  # all accepted connections, by descriptor
        self._by_fd: dict[int, Connection] = {}
        self._half_open = half_open.HalfOpenConnections()
        self._lost: list[tuple[Connection, float]] = []  # lost connections, and when they were lost
        self._closing: list[tuple[float, Connection]] = []

    def listen(self, address: str) -> str:
        """Bind the ROUTER; return the address with the chosen port.

        Raises:
            TransportError: the address is taken or invalid.
        """
        self._half_open.max_total = min(half_open.MAX_TOTAL, tcp_options.raise_descriptor_limit() // 2)
        bound = sockets.bind(self.router, address)
        self._ports.add(int(bound.rpartition(":")[2]))
        return bound

    def close(self) -> None:
        sockets.close(self.router, self.monitor)
        if self.zap_handler is not None:
            self.zap_handler.close()

    def read(self) -> sockets.IncomingMessage | None:
        return sockets.read(self.router, encrypted=self._encrypted, router=True)

    def connection_of(self, incoming: sockets.IncomingMessage) -> Connection | None:
        """Return the connection of a message, or None if no Hello has arrived over the connection."""
        return self._connections.get(incoming.routing_id)

    # -- before Hello --------------------------------------------------------------------------

    def read_monitor(self, *, until_fd: int = -1) -> None:
        """Process the monitor's events about accepted and closed connections.

        Without `until_fd`, at most one batch of `BATCH_EVENTS` events is read; with `until_fd`, batches are
        read until the connection with this descriptor is known.
        """
        now_s = time.monotonic()
        while events := sockets.monitor_events(self.monitor, BATCH_EVENTS):
            for event, fd in events:
                self._handle_event(event, fd, now_s)
            if until_fd < 0 or self.is_open(until_fd):
                break

    def is_open(self, fd: int) -> bool:
        """Return whether this descriptor belongs to a known connection; True for -1, which means unknown."""
        return fd < 0 or (fd in self._accepted and self._accepted[fd].is_current())

    def accepted(self, fd: int) -> TcpConnection | None:
        return self._accepted.get(fd)

    def refuse(self, incoming: sockets.IncomingMessage) -> None:
        """Close a connection over which no valid Hello has arrived, and drop all its messages."""
        if (connection := self.ignore(incoming)) is not None:
            self.shut(connection)

    def ignore(self, incoming: sockets.IncomingMessage) -> Connection | None:
        """Drop all messages of a connection over which no valid Hello has arrived.

        Returns the connection, or None if it is already closed.
        """
        fd = incoming.fd
        if fd not in self._accepted:
            return None
        connection = Connection(
            b"",
            b"",
            "",
            self.router,
            routing_id=incoming.routing_id,
            user_id=incoming.user_id,
            accepted_tcp=self._accepted[fd],
            state="shut",
        )
        # Both entries remain until the monitor reports that the connection is closed.
        self._connections[connection.routing_id] = self._by_fd[fd] = connection
        return connection

    # -- after Hello ---------------------------------------------------------------------------

    def add(self, connection: Connection) -> list[Connection]:
        """Add the connection of a peer that has sent Hello.

        Returns the peer's older connections, which must be reported as down.
        """
        replaced = []
        for old in [] if connection.is_pending else self._connections_of(connection.key):
            if old.state == "replaced":
                self.shut(old)
            else:
                old.state = "replaced"  # stays open: another process with this key would reconnect at once
                replaced.append(old)
        self._connections[connection.routing_id] = connection
        if connection.tcp is not None:
            fd = connection.tcp.fd
            if (stale := self._by_fd.get(fd)) is not None:  # the monitor has not reported its loss yet
                self.mark_lost(stale)
            self._by_fd[fd] = connection
            self._half_open.remove(fd)
        return replaced

    def surplus_pending_members(self) -> list[Connection]:
        """Return the oldest connections of pending members in excess of `MAX_PENDING_MEMBERS`."""
        pending = [one for one in self._connections.values() if one.is_pending and one.state != "shut"]
        return pending[: max(0, len(pending) - access_control.MAX_PENDING_MEMBERS)]

    def silence(self, connection: Connection) -> None:
        """Drop the messages that arrive from now on.  A pending member's connection is closed after
        `CLOSE_DELAY_S`."""
        connection.state = "silent"
        if connection.is_pending:
            self._closing.append((time.monotonic() + CLOSE_DELAY_S, connection))

    def revive(self, peer: PeerId) -> Connection | None:
        """Resume using a connection of this peer that `silence` left open; return it, or None."""
        lost = [connection for connection, _ in self._lost]
        for connection in self._connections_of(peer):
            is_admitted = access_control.is_still_admitted(self._policy, peer, is_pending=False)
            if is_admitted and connection.state == "silent" and connection not in lost:
                connection.state = "up"
                return connection
        return None

    def shut(self, connection: Connection) -> None:
        """Close this connection; messages that are still read from the connection are dropped."""
        connection.state = "shut"
        if connection.tcp is not None and self._by_fd.get(connection.tcp.fd) is connection:
            connection.tcp.shut_down()

    # -- over time -----------------------------------------------------------------------------

    def mark_lost(self, connection: Connection) -> None:
        if all(connection is not lost for lost, _ in self._lost):
            self._lost.append((connection, time.monotonic()))

    @property
    def has_lost(self) -> bool:
        return bool(self._lost)

    def take_lost(self, *, drained: bool) -> list[Connection]:
        """Remove and return the lost connections that can be reported as down.

        Args:
            drained: whether the ROUTER is empty; if so, no message from a lost connection is unread.  If it
                is not empty, only connections that were lost at least `DRAIN_S` ago are returned.
        """
        now_s = time.monotonic()
        taken, waiting = [], []
        for connection, since_s in self._lost:
            if drained or now_s >= since_s + DRAIN_S:
                if self._connections.get(connection.routing_id) is connection:
                    del self._connections[connection.routing_id]
                self._shut_replaced(connection.key)
                taken.append(connection)
            else:
                waiting.append((connection, since_s))
        self._lost = waiting
        return taken

    def _shut_replaced(self, key: PeerId) -> None:
        """Shut a replaced connection if the one that replaced it is lost, so that the peer connects again.

        If the Hello of a stale connection was delayed, it has replaced the one that the peer uses.
        """
        others = self._connections_of(key)
        if all(one.state == "replaced" for one in others):
            for one in others:
                self.shut(one)

    def due_s(self) -> float:
        """Return the earliest time at which `close_overdue` must be called; infinity if no call is needed."""
        return min(self._half_open.due_s(), *(due_s for due_s, _ in self._closing), math.inf)

    def close_overdue(self, drained_s: float, now_s: float) -> None:
        """Close surplus and expired half-open connections, and the connections that `silence` has scheduled.

        Args:
            drained_s: the time at which all received data had been read.
        """
        for fd in half_open.connections_to_close(self._half_open, drained_s, now_s):
            self._shut_down(fd)
        for due_s, connection in self._closing:
            if now_s >= due_s:
                self.shut(connection)
        self._closing = [(due_s, connection) for due_s, connection in self._closing if now_s < due_s]

    def find_hoarders(self) -> list[Connection | None]:
        """Return the connections over which many more bytes have arrived than have been read.

        Connections over which no Hello has arrived are closed, and None is returned for each of them.
        """
        found: list[Connection | None] = []
        for fd, tcp in list(self._accepted.items()):
            connection = self._by_fd.get(fd)
            if connection is None:  # once only, because libzmq closes the descriptor later
                if fd in self._half_open and dialer.exceeds_unread(tcp.received_bytes(), 0, is_pending=True):
                    self._half_open.remove(fd)
                    tcp.shut_down()
                    found.append(None)
            elif connection.is_hoarding():
                found.append(connection)
        return found

    def _handle_event(self, event: int, fd: int, now_s: float) -> None:
        if fd in self._by_fd:
            self.mark_lost(self._by_fd.pop(fd))
        self._half_open.remove(fd)
        self._accepted.pop(fd, None)
        tcp = TcpConnection.identify(fd, self._ports) if event == zmq.EVENT_ACCEPTED else None
        if tcp is not None:  # otherwise it is already closed, which the monitor will report
            self._accepted[fd] = tcp
            self._half_open.add(fd, tcp.remote[0], now_s)

    def _connections_of(self, key: PeerId) -> list[Connection]:
        """Return the connections of a member that are not shut."""
        found = [one for one in self._connections.values() if one.key == key]
        return [one for one in found if not one.is_pending and one.state != "shut"]

    def _shut_down(self, fd: int) -> None:
        if fd in self._accepted:
            self._accepted[fd].shut_down()
