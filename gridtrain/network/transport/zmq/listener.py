"""Connections that others made to us: the ROUTER, its doorman, and which descriptor is which connection.

Decides which accepted connection is cut, and when one was lost.  Never opens a message, and never decides
who is admitted: that is `admission.py`.

              Zap <--handshake--+
    others --------------------ROUTER --messages--> zeromq.py --greeted--> Link
              Doorway <--accepted, closed-- monitor                          |
                 +--too old, too many--> cut <--violation, revoked, farewell-+

A monitor event carries a file descriptor and nothing else, and so does a frame (SRCFD).  Descriptors are
reused, so a descriptor is believed only if the other end is still the one that it had when it was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Set

import zmq

from gridtrain.core.messages import PeerId
from gridtrain.network.transport import access_control
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import AccessPolicy
from gridtrain.network.transport.zmq import congestion_control, half_open, sockets, tcp_options
from gridtrain.network.transport.zmq.dialer import Connection
from gridtrain.network.transport.zmq.zap import ZapHandler

BATCH_EVENTS = 256
"""At most so many comings and goings are noted before messages have their turn."""

MOST_UNREAD_BYTES = 192 * 2**20
"""What a peer may have sent that we have not read: libzmq bounds neither a message of many frames while it
arrives nor, with us, what waits to be read.  An honest peer's credit ends at a fraction of this."""

MOST_UNREAD_OF_GUESTS_BYTES = 2**20
CHECK_INTERVAL_S = 0.25
_OVERHEAD = 1.05  # what TCP carries for what we count: commands, handshake, frames that were skipped

CLOSE_DELAY_S = 1.0
"""A guest is cut that long after `hang_up`, so that the answer that it came for still leaves."""


class Listener:
    """Everything that connects to us.

    Args:
        identity: whom we prove to be; None: nothing is encrypted.
    """

    def __init__(self, context: sockets.Context, gate: AccessPolicy, identity: Identity | None) -> None:
        self.authenticator = (
            ZapHandler(context, gate) if identity is not None else None
        )  # before anybody can connect
        self.router = sockets.open_router(context, identity)
        self.monitor = sockets.open_monitor(self.router, sockets.ACCEPTED_EVENTS)
        self.connections: dict[bytes, Connection] = {}
        self._encrypted = identity is not None
        self._ports: set[int] = set()
        self._remotes: dict[int, tcp_options.RemoteAddress] = {}  # every accepted connection
        self._by_fd: dict[int, Connection] = {}
        self._half_open = half_open.HalfOpenConnections()
        self._closing: list[tuple[float, Connection]] = []

    def listen(self, address: str) -> str:
        """Raises `TransportError`."""
        self._half_open.max_total = min(half_open.MOST_AT_ALL, tcp_options.raise_descriptor_limit() // 2)
        bound = sockets.bind(self.router, address)
        self._ports.add(int(bound.rpartition(":")[2]))
        return bound

    def read(self) -> sockets.IncomingMessage | None:
        return sockets.read(self.router, encrypted=self._encrypted, router=True)

    def read_monitor(self, now_s: float, *, until_fd: int = -1) -> list[Connection]:
        """Take note of who came and went; returns greeted connections that were lost.

        At most `BATCH_EVENTS` are read, or with `until_fd` as many as it takes to know that connection.
        """
        lost: list[Connection] = []
        while events := sockets.monitor_events(self.monitor, BATCH_EVENTS):
            for event, fd in events:
                self._handle_event(event, fd, now_s, lost)
            if until_fd < 0 or self.is_open(until_fd):
                break
        return lost

    def _handle_event(self, event: int, fd: int, now_s: float, lost: list[Connection]) -> None:
        if fd in self._by_fd:
            lost.append(self._by_fd.pop(fd))
        self._half_open.remove(fd)
        self._remotes.pop(fd, None)
        remote = tcp_options.remote_address(fd, self._ports) if event == zmq.EVENT_ACCEPTED else None
        if remote is not None:  # None: it is closed again, as the monitor will say
            self._remotes[fd] = remote
            self._half_open.add(fd, remote[0], now_s)

    def is_open(self, fd: int) -> bool:
        """Whether this is a connection that we know of; yes if libzmq tells no descriptor."""
        return fd < 0 or (
            fd in self._remotes and tcp_options.remote_address(fd, self._ports) == self._remotes[fd]
        )

    def add_connection(self, link: Connection) -> Connection | None:
        """Keep the link.  Returns one that had its descriptor before, and is lost without a word."""
        self.connections[link.routing_id] = link
        older = self._by_fd.get(link.fd)
        if link.fd >= 0:
            self._by_fd[link.fd] = link
        self._half_open.remove(link.fd)
        return older

    def ignore_connection(self, incoming: sockets.IncomingMessage) -> Connection | None:
        """Nothing more is taken from this connection, which has not greeted; None: it is gone already."""
        fd = incoming.fd
        if fd not in self._remotes:
            return None
        link = Connection(
            b"", b"", routing_id=incoming.routing_id, user_id=incoming.user_id, fd=fd, state="shut"
        )
        self.connections[link.routing_id] = self._by_fd[fd] = link  # until the monitor says that it is closed
        return link

    def connections_of(self, key: PeerId) -> list[Connection]:
        """The connections of a peer, the oldest first; not those of guests, nor those that were cut."""
        return [
            link
            for link in self.connections.values()
            if link.key == key and not link.is_pending and link.state != "shut"
        ]

    def surplus_pending_members(self) -> list[Connection]:
        """Those who came first, as far as there are too many."""
        guests = [link for link in self.connections.values() if link.is_pending and link.state != "shut"]
        return guests[: max(0, len(guests) - access_control.MOST_GUESTS)]

    def remove_connection(self, link: Connection) -> None:
        if self.connections.get(link.routing_id) is link:
            del self.connections[link.routing_id]

    def close_connection(self, link: Connection) -> None:
        """Close this connection, and nobody else's."""
        link.state = "shut"
        if self._by_fd.get(link.fd) is link:
            self._shut_down(link.fd)

    def close_later(self, link: Connection, now_s: float) -> None:
        """Cut it when what was sent to it has had time to leave."""
        self._closing.append((now_s + CLOSE_DELAY_S, link))

    def due_s(self) -> float:
        """When `tend` has something to do."""
        return min(self._half_open.due_s(), *(due_s for due_s, _ in self._closing), math.inf)

    def close_overdue(self, heard_s: float, now_s: float) -> None:
        """Cut who has been too long or too many.  All that was said until `heard_s` has been read."""
        for fd in half_open.connections_to_cut(self._half_open, heard_s, now_s):
            self._shut_down(fd)
        for due_s, link in self._closing:
            if now_s >= due_s:
                self.close_connection(link)
        self._closing = [(due_s, link) for due_s, link in self._closing if now_s < due_s]

    def find_hoarders(self) -> list[Connection | None]:
        """Those who send what never becomes a message, or far more than is read; None stands for one that has
        not greeted, and is cut already."""
        found: list[Connection | None] = []
        for fd, remote in list(self._remotes.items()):
            link = self._by_fd.get(fd)
            if link is None and is_hoarding(
                tcp_options.received_bytes(fd, remote, self._ports), 0, guest=True
            ):
                self._shut_down(fd)
                found.append(None)
            elif link is not None and self.is_hoarding(link):
                found.append(link)
        return found

    def is_hoarding(self, link: Connection) -> bool:
        """The same of one connection, accepted or dialled."""
        remote, ports = self.remote_and_ports(link)
        got_bytes = 0 if remote is None else tcp_options.received_bytes(link.fd, remote, ports)
        return is_hoarding(got_bytes, link.read_bytes, guest=link.is_pending)

    def remote_and_ports(self, link: Connection) -> tuple[tcp_options.RemoteAddress | None, Set[int] | None]:
        """How its descriptor is known to be it still: the other end, and our ports if it was accepted."""
        return (
            (self._remotes.get(link.fd), self._ports)
            if link.outgoing is None
            else (link.outgoing.remote, None)
        )

    def choose_control(self, link: Connection) -> None:
        """At the start of a connection, dialled or accepted; see `congestion`."""
        remote, ports = self.remote_and_ports(link)
        if remote is not None and tcp_options.choose_control(link.fd, remote, ports):
            link.loss_monitor = congestion_control.LossMonitor()

    def watch_losses(self, link: Connection) -> None:
        """Of one that `choose_control` has given another congestion control."""
        remote, ports = self.remote_and_ports(link)
        if link.loss_monitor is None or remote is None:
            return
        if tcp_options.watch_losses(link.fd, remote, link.loss_monitor, ports):
            link.loss_monitor = None

    def enlarge_buffers(self, link: Connection) -> None:
        """An accepted one has greeted, and much may have to be sent over it."""
        if link.fd in self._remotes:
            tcp_options.enlarge_buffers(link.fd, self._remotes[link.fd], self._ports)

    def close(self) -> None:
        sockets.close(self.router, self.monitor)
        if self.authenticator is not None:
            self.authenticator.close()

    def _shut_down(self, fd: int) -> None:
        if fd in self._remotes:
            tcp_options.shut_down(fd, self._remotes[fd], self._ports)


def is_hoarding(got_bytes: int, read_bytes: int, *, guest: bool) -> bool:
    """The defence: whether more has come over a connection than anybody needs to have under way."""
    most_bytes = MOST_UNREAD_OF_GUESTS_BYTES if guest else MOST_UNREAD_BYTES
    return got_bytes > read_bytes * _OVERHEAD + most_bytes
