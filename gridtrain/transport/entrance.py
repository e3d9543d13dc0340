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

from gridtrain.protocol.messages import PeerId
from gridtrain.transport import admission, congestion, descriptors, doorway, sockets
from gridtrain.transport.base import Gate
from gridtrain.transport.curve import Identity
from gridtrain.transport.links import Link
from gridtrain.transport.zap import Zap

BATCH_EVENTS = 256
"""At most so many comings and goings are noted before messages have their turn."""

MOST_UNREAD_BYTES = 192 * 2**20
"""What a peer may have sent that we have not read: libzmq bounds neither a message of many frames while it
arrives nor, with us, what waits to be read.  An honest peer's credit ends at a fraction of this."""

MOST_UNREAD_OF_GUESTS_BYTES = 2**20
LOOK_S = 0.25
_OVERHEAD = 1.05  # what TCP carries for what we count: commands, handshake, frames that were skipped

FAREWELL_S = 1.0
"""A guest is cut that long after `hang_up`, so that the answer that it came for still leaves."""


class Entrance:
    """Everything that connects to us.

    Args:
        identity: whom we prove to be; None: nothing is encrypted.
    """

    def __init__(self, context: sockets.Context, gate: Gate, identity: Identity | None) -> None:
        self.zap = Zap(context, gate) if identity is not None else None  # before anybody can connect
        self.router = sockets.open_router(context, identity)
        self.monitor = sockets.open_monitor(self.router, sockets.ACCEPTED_EVENTS)
        self.links: dict[bytes, Link] = {}
        self._encrypted = identity is not None
        self._ports: set[int] = set()
        self._remotes: dict[int, descriptors.Remote] = {}  # every accepted connection
        self._by_fd: dict[int, Link] = {}
        self._doorway = doorway.Doorway()
        self._farewells: list[tuple[float, Link]] = []

    def listen(self, address: str) -> str:
        """Raises `TransportError`."""
        self._doorway.most_at_all = min(doorway.MOST_AT_ALL, descriptors.raise_descriptor_limit() // 2)
        bound = sockets.bind(self.router, address)
        self._ports.add(int(bound.rpartition(":")[2]))
        return bound

    def read(self) -> sockets.Incoming | None:
        return sockets.read(self.router, encrypted=self._encrypted, router=True)

    def read_monitor(self, now_s: float, *, until_fd: int = -1) -> list[Link]:
        """Take note of who came and went; returns greeted connections that were lost.

        At most `BATCH_EVENTS` are read, or with `until_fd` as many as it takes to know that connection.
        """
        lost: list[Link] = []
        while events := sockets.monitor_events(self.monitor, BATCH_EVENTS):
            for event, fd in events:
                self._note(event, fd, now_s, lost)
            if until_fd < 0 or self.is_open(until_fd):
                break
        return lost

    def _note(self, event: int, fd: int, now_s: float, lost: list[Link]) -> None:
        if fd in self._by_fd:
            lost.append(self._by_fd.pop(fd))
        self._doorway.left(fd)
        self._remotes.pop(fd, None)
        remote = descriptors.remote_of(fd, self._ports) if event == zmq.EVENT_ACCEPTED else None
        if remote is not None:  # None: it is closed again, as the monitor will say
            self._remotes[fd] = remote
            self._doorway.accepted(fd, remote[0], now_s)

    def is_open(self, fd: int) -> bool:
        """Whether this is a connection that we know of; yes if libzmq tells no descriptor."""
        return fd < 0 or (fd in self._remotes and descriptors.remote_of(fd, self._ports) == self._remotes[fd])

    def greeted(self, link: Link) -> Link | None:
        """Keep the link.  Returns one that had its descriptor before, and is lost without a word."""
        self.links[link.routing_id] = link
        older = self._by_fd.get(link.fd)
        if link.fd >= 0:
            self._by_fd[link.fd] = link
        self._doorway.left(link.fd)
        return older

    def ignore(self, incoming: sockets.Incoming) -> Link | None:
        """Nothing more is taken from this connection, which has not greeted; None: it is gone already."""
        fd = incoming.fd
        if fd not in self._remotes:
            return None
        link = Link(b"", b"", routing_id=incoming.routing_id, user_id=incoming.user_id, fd=fd, state="shut")
        self.links[link.routing_id] = self._by_fd[fd] = link  # until the monitor says that it is closed
        return link

    def of(self, key: PeerId) -> list[Link]:
        """The connections of a peer, the oldest first; not those of guests, nor those that were cut."""
        return [
            link
            for link in self.links.values()
            if link.key == key and not link.guest and link.state != "shut"
        ]

    def surplus_guests(self) -> list[Link]:
        """Those who came first, as far as there are too many."""
        guests = [link for link in self.links.values() if link.guest and link.state != "shut"]
        return guests[: max(0, len(guests) - admission.MOST_GUESTS)]

    def forget(self, link: Link) -> None:
        if self.links.get(link.routing_id) is link:
            del self.links[link.routing_id]

    def cut(self, link: Link) -> None:
        """Close this connection, and nobody else's."""
        link.state = "shut"
        if self._by_fd.get(link.fd) is link:
            self._cut(link.fd)

    def say_farewell(self, link: Link, now_s: float) -> None:
        """Cut it when what was sent to it has had time to leave."""
        self._farewells.append((now_s + FAREWELL_S, link))

    def due_s(self) -> float:
        """When `tend` has something to do."""
        return min(self._doorway.due_s(), *(due_s for due_s, _ in self._farewells), math.inf)

    def tend(self, heard_s: float, now_s: float) -> None:
        """Cut who has been too long or too many.  All that was said until `heard_s` has been read."""
        for fd in doorway.overstayers(self._doorway, heard_s, now_s):
            self._cut(fd)
        for due_s, link in self._farewells:
            if now_s >= due_s:
                self.cut(link)
        self._farewells = [(due_s, link) for due_s, link in self._farewells if now_s < due_s]

    def hoarders(self) -> list[Link | None]:
        """Those who send what never becomes a message, or far more than is read; None stands for one that has
        not greeted, and is cut already."""
        found: list[Link | None] = []
        for fd, remote in list(self._remotes.items()):
            link = self._by_fd.get(fd)
            if link is None and hoards(descriptors.received_bytes(fd, remote, self._ports), 0, guest=True):
                self._cut(fd)
                found.append(None)
            elif link is not None and self.is_hoarding(link):
                found.append(link)
        return found

    def is_hoarding(self, link: Link) -> bool:
        """The same of one connection, accepted or dialled."""
        remote, ports = self.ends_of(link)
        got_bytes = 0 if remote is None else descriptors.received_bytes(link.fd, remote, ports)
        return hoards(got_bytes, link.read_bytes, guest=link.guest)

    def ends_of(self, link: Link) -> tuple[descriptors.Remote | None, Set[int] | None]:
        """How its descriptor is known to be it still: the other end, and our ports if it was accepted."""
        return (self._remotes.get(link.fd), self._ports) if link.dial is None else (link.dial.remote, None)

    def choose_control(self, link: Link) -> None:
        """At the start of a connection, dialled or accepted; see `congestion`."""
        remote, ports = self.ends_of(link)
        if remote is not None and descriptors.choose_control(link.fd, remote, ports):
            link.losses = congestion.Losses()

    def watch_losses(self, link: Link) -> None:
        """Of one that `choose_control` has given another congestion control."""
        remote, ports = self.ends_of(link)
        if link.losses is None or remote is None:
            return
        if descriptors.watch_losses(link.fd, remote, link.losses, ports):
            link.losses = None

    def widen(self, link: Link) -> None:
        """An accepted one has greeted, and much may have to be sent over it."""
        if link.fd in self._remotes:
            descriptors.widen(link.fd, self._remotes[link.fd], self._ports)

    def close(self) -> None:
        sockets.close(self.router, self.monitor)
        if self.zap is not None:
            self.zap.close()

    def _cut(self, fd: int) -> None:
        if fd in self._remotes:
            descriptors.cut(fd, self._remotes[fd], self._ports)


def hoards(got_bytes: int, read_bytes: int, *, guest: bool) -> bool:
    """The defence: whether more has come over a connection than anybody needs to have under way."""
    most_bytes = MOST_UNREAD_OF_GUESTS_BYTES if guest else MOST_UNREAD_BYTES
    return got_bytes > read_bytes * _OVERHEAD + most_bytes
