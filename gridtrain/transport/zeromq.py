"""The transport over TCP, with ZeroMQ.

Decides which connection serves a peer, and when an edge is up or down.  Never opens a payload, and
never takes a peer's word for more than its Hello says (authentication comes with CURVE).

    who dialled                                   who was dialled
    DEALER (one per connection) --- Hello ------> ROUTER (all connections)    routing id -> peer
        PeerUp <------------------- Hello ----        PeerUp
        both directions <=========================>   both directions

An edge is bidirectional, whichever side dialled.  If both dialled there are two connections: each
side sends over the one it had first (order is kept) and reads both; when either breaks, messages
may be lost, so `PeerDown` comes, and at once `PeerUp` again over the other.

A lost connection is noticed by libzmq's socket monitors: for a DEALER it is its own; the ROUTER's
gives a file descriptor, which is mapped to the peer that greeted over it.  What the peer sent
before the loss is delivered before `PeerDown`.
"""

from __future__ import annotations

import contextlib
import socket
import time

import zmq

from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.protocol.messages import PROTOCOL_VERSION, Hello, Message, PeerId
from gridtrain.transport import sockets
from gridtrain.transport.base import PeerDown, PeerUp, Received, Traffic, TransportEvent, Violation
from gridtrain.transport.limits import Meter, Pacer
from gridtrain.transport.links import GREET_S, Dial, Link
from gridtrain.transport.outbox import DEFAULT_LIMIT_BYTES, Outbox, Parcel, is_bulk
from gridtrain.wire import codec

BATCH_MESSAGES = 64
"""At most so many messages are read from one socket before the others have their turn."""

ROUTER_RETRY_S = 0.001
"""A ROUTER cannot say when a full queue of one connection has room again: it is tried."""

DRAIN_S = 0.1
CLOSE_S = 1.0
_WILDCARDS = ("*", "0.0.0.0", "[::]")


class ZeroMQTransport:
    """Implements `Transport` over "tcp://host:port".

    Args:
        me: our key, in our Hello.
        software: our name and version, in our Hello.
        upload_Bps, download_Bps: rate caps in bytes per second; None: none.
        outbox_bytes: the most that may be queued for one peer (libzmq holds a little more).
        advertise_host: the host that peers should dial when we listen on all interfaces.
    """

    def __init__(
        self,
        me: PeerId,
        software: str,
        *,
        upload_Bps: float | None = None,
        download_Bps: float | None = None,
        outbox_bytes: int = DEFAULT_LIMIT_BYTES,
        advertise_host: str = "127.0.0.1",
    ) -> None:
        self.me = me
        self.traffic = Traffic()
        self._hello = codec.encode(Hello(me, PROTOCOL_VERSION, software))
        self._advertise_host = advertise_host
        self._outbox: Outbox[sockets.Frames] = Outbox(Pacer(upload_Bps), outbox_bytes)
        self._meter = Meter(download_Bps)
        self._receive_messages = (
            sockets.HIGH_WATER_MESSAGES if download_Bps is None else sockets.CAPPED_RECEIVE_MESSAGES
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # our own: safe under spawn
        self._router = sockets.open_router(self._context, self._receive_messages)
        self._router_monitor = sockets.open_monitor(self._router)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._events: list[TransportEvent] = []
        self._dials: list[Dial] = []
        self._edges: dict[PeerId, list[Link]] = {}  # the first is the one we send over
        self._accepted: dict[bytes, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._lost: list[tuple[Link, float]] = []  # accepted ones, and since when
        self._closed = False

    # -- the contract --------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        bound = sockets.bind(self._router, address)
        host, _, port = bound.removeprefix("tcp://").rpartition(":")
        return f"tcp://{self._advertise_host}:{port}" if host in _WILDCARDS else bound

    def dial(self, peer: PeerId | None, address: str) -> None:
        if peer == self.me:
            raise TransportError(f"{address} was to be dialled with our own key", remedy="leave yourself out")
        if peer is not None and (peer in self._edges or self._revive(peer)):
            return
        for dial in list(self._dials):
            if dial.address == address and peer in (None, dial.peer):
                return
            if peer is not None and dial.peer == peer:  # it moved
                self._drop_dial(dial)
        dial = Dial(peer, address)
        self._open(dial, time.monotonic())
        self._dials.append(dial)

    def hang_up(self, peer: PeerId) -> None:
        for dial in [dial for dial in self._dials if dial.peer == peer]:
            self._drop_dial(dial)
        for link in self._edges.pop(peer, []):
            link.state = "silent"
        self._outbox.drop(peer)
        self._events = [event for event in self._events if event.peer != peer]

    def connected(self, peer: PeerId) -> bool:
        return peer in self._edges

    def send(self, peer: PeerId, message: Message) -> None:
        if peer not in self._edges:
            raise TransportError(
                f"peer {peer.hex()[:8]} is not connected", remedy="wait for its PeerUp before sending"
            )
        frames, now_s = codec.encode(message), time.monotonic()
        nbytes = sum(sockets.wire_bytes(len(frame)) for frame in frames)
        self._outbox.put(
            Parcel(peer, type(message).__name__, frames, nbytes, is_bulk(message), now_s),
        )
        self._flush(now_s)

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._outbox.backlog_bytes(peer)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            self._tend_dials(now_s)
            self._flush(now_s)
            until_s = now_s if self._events else min(deadline_s, self._due_s(now_s))
            woken = self._turn(max(0.0, until_s - now_s))
            now_s = time.monotonic()
            self._flush(now_s)
            if self._events or woken or now_s >= deadline_s:
                events, self._events = self._events, []
                return events

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody sleeps
            self._wake_out.send(b"\0")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for dial in [dial for dial in self._dials if dial.link is None]:
            self._drop_dial(dial)
        deadline_s = time.monotonic() + CLOSE_S
        while not self._outbox.empty() and (now_s := time.monotonic()) < deadline_s:
            self._turn(max(0.0, min(deadline_s, self._due_s(now_s)) - now_s))
            self._flush(time.monotonic())
        for dial in list(self._dials):
            self._drop_dial(dial)
        sockets.close(self._router, self._router_monitor)
        self._context.term()  # waits for at most sockets.LINGER_S
        self._wake_in.close()
        self._wake_out.close()

    # -- one turn of the loop ------------------------------------------------------------------

    def _due_s(self, now_s: float) -> float:
        """When there is something to do although no socket says so."""
        if self._lost:
            return now_s
        due_s = min([self._outbox.due_s(), *(dial.due_s for dial in self._dials)])
        if not self._meter.may_read(now_s):
            due_s = min(due_s, self._meter.free_s)
        if any(self._edges[peer][0].dial is None for peer in self._outbox.blocked()):
            due_s = min(due_s, now_s + ROUTER_RETRY_S)
        return due_s

    def _turn(self, wait_s: float) -> bool:
        """Wait once, then do what is possible.  True: `wake` was called."""
        reading = self._meter.may_read(time.monotonic())
        ready = sockets.wait(self._interests(reading), wait_s)
        if self._router_monitor in ready:
            self._read_router_monitor()
        for dial in list(self._dials):
            flags = ready.get(dial.socket, 0)
            if flags & zmq.POLLOUT and dial.link is not None:
                self._outbox.unblock(dial.link.peer)
            if flags & zmq.POLLIN:
                self._read_batch(dial)
            if dial.monitor in ready:
                self._read_dial_monitor(dial)
        for peer in self._outbox.blocked():
            if self._edges[peer][0].dial is None:
                self._outbox.unblock(peer)
        if self._router in ready or self._lost:
            self._finish_lost(drained=self._read_batch(None, in_debt=bool(self._lost)))
        return self._wake_in.fileno() in ready and self._slept()

    def _interests(self, reading: bool) -> list[tuple[sockets.Waitable, int]]:
        """What to wait for.  Under download debt the data sockets are left alone."""
        blocked = {self._edges[peer][0].dial for peer in self._outbox.blocked()}
        interests: list[tuple[sockets.Waitable, int]] = [
            (self._wake_in.fileno(), zmq.POLLIN),
            (self._router_monitor, zmq.POLLIN),
        ]
        if reading:
            interests.append((self._router, zmq.POLLIN))
        for dial in self._dials:
            if dial.socket is not None and dial.monitor is not None:
                interests.append((dial.monitor, zmq.POLLIN))
                flags = (zmq.POLLIN if reading else 0) | (zmq.POLLOUT if dial in blocked else 0)
                if flags:
                    interests.append((dial.socket, flags))
        return interests

    def _slept(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        return True

    def _flush(self, now_s: float) -> None:
        while (parcel := self._outbox.take(now_s)) is not None:
            link = self._edges[parcel.peer][0]
            try:
                if link.dial is not None:
                    assert link.dial.socket is not None
                    taken = sockets.write(link.dial.socket, parcel.body)
                else:
                    taken = sockets.write(self._router, parcel.body, link.routing_id)
            except zmq.ZMQError:  # EHOSTUNREACH: the ROUTER knows before its monitor is read
                self._outbox.drop(parcel.peer)
                self._lose(link)
                continue
            if taken:
                self.traffic.count_sent(parcel.kind, parcel.nbytes)
            else:
                self._outbox.refuse(parcel)

    # -- reading -------------------------------------------------------------------------------

    def _read_batch(self, dial: Dial | None, *, in_debt: bool = False) -> bool:
        """Read at most a batch from the dialled socket or the ROUTER.  True: nothing more is there.

        `in_debt`: read although the download cap says to wait; for what a lost connection left.
        """
        source = self._router if dial is None else dial.socket
        for _ in range(BATCH_MESSAGES):
            if source is None:
                return True
            now_s = time.monotonic()
            if not (in_debt or self._meter.may_read(now_s)):
                return False
            incoming = sockets.read(source)
            if incoming is None:
                return True
            self._meter.charge(incoming.nbytes, now_s)
            self._handle(incoming, dial)
            if dial is not None:
                source = dial.socket  # None: it was not whom we dialled, and is closed
        return False

    def _handle(self, incoming: sockets.Incoming, dial: Dial | None) -> None:
        link = self._accepted.get(incoming.routing_id) if dial is None else dial.link
        if link is not None and link.state != "up":
            return
        peer = None if link is None else link.peer
        try:
            if incoming.excess:
                raise RemoteProtocolError(incoming.excess)
            message = codec.decode(incoming.frames)
            kind = type(message).__name__
            if isinstance(message, Hello) == (link is not None):
                raise RemoteProtocolError(
                    "a second Hello on a connection" if link else f"{kind} before Hello"
                )
        except RemoteProtocolError as error:
            self._events.append(Violation(peer, str(error)))
            return
        self.traffic.count_received(kind, incoming.nbytes)
        if not isinstance(message, Hello):
            assert link is not None
            self._events.append(Received(link.peer, message, incoming.nbytes))
        elif dial is None:
            self._accept(message, incoming)
        else:
            self._answered(message, dial)

    # -- connections that we made --------------------------------------------------------------

    def _tend_dials(self, now_s: float) -> None:
        for dial in self._dials:
            if now_s >= dial.due_s:
                if dial.socket is None:
                    self._open(dial, now_s)
                else:
                    self._redial(dial, f"no greeting within {GREET_S:g} s")

    def _open(self, dial: Dial, now_s: float) -> None:
        dial.open(self._context, self._receive_messages, self._hello, now_s)

    def _answered(self, hello: Hello, dial: Dial) -> None:
        self._count_hello()  # the one it answers; those of failed attempts never left
        if hello.version != PROTOCOL_VERSION:
            self._events.append(_mismatch(hello))
            self._drop_dial(dial)  # the same software will give the same answer
        elif hello.peer == self.me or dial.peer not in (None, hello.peer):
            text = f"{dial.address} answers with key {hello.peer.hex()[:8]}"
            self._events.append(Violation(dial.peer, text))
            self._redial(dial, text)
        else:
            link = Link(hello.peer, hello.software, dial=dial)
            dial.greeted(link)
            self._link_up(link)

    def _read_dial_monitor(self, dial: Dial) -> None:
        if dial.monitor is None:
            return
        for event, _ in sockets.monitor_events(dial.monitor):
            if event in sockets.LOST_EVENTS:
                while not self._read_batch(dial, in_debt=True):
                    pass  # bounded: what libzmq holds, nothing more can come
                if dial.socket is not None:
                    self._redial(dial, f"connection to {dial.address} lost")
                return

    def _redial(self, dial: Dial, reason: str) -> None:
        dial.retry_later(time.monotonic())
        if dial.link is not None:
            link, dial.link = dial.link, None
            self._link_down(link, reason)

    def _drop_dial(self, dial: Dial) -> None:
        dial.shut()
        self._dials.remove(dial)

    # -- connections that others made ----------------------------------------------------------

    def _accept(self, hello: Hello, incoming: sockets.Incoming) -> None:
        # Descriptors are reused: what the monitor still has to say is about an older connection.
        self._read_router_monitor()
        with contextlib.suppress(zmq.ZMQError):  # it is gone again, as the monitor will say
            if sockets.write(self._router, self._hello, incoming.routing_id):
                self._count_hello()
        if hello.version != PROTOCOL_VERSION:
            self._events.append(_mismatch(hello))
            return
        if hello.peer == self.me:
            self._events.append(Violation(None, "a peer greets with our own key"))
            return
        for old in [link for link in self._accepted.values() if link.peer == hello.peer]:
            if old.state == "replaced":
                del self._accepted[old.routing_id]
            old.state = "replaced"
            self._link_down(old, "replaced by a newer connection of the same peer")
        link = Link(hello.peer, hello.software, routing_id=incoming.routing_id, fd=incoming.fd)
        self._accepted[link.routing_id] = link
        if link.fd >= 0:
            self._by_fd[link.fd] = link
        self._link_up(link)

    def _read_router_monitor(self) -> None:
        for event, fd in sockets.monitor_events(self._router_monitor):
            if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED) and fd in self._by_fd:
                self._lose(self._by_fd.pop(fd))

    def _lose(self, link: Link) -> None:
        if all(link is not lost for lost, _ in self._lost):
            self._lost.append((link, time.monotonic()))

    def _finish_lost(self, drained: bool) -> None:
        """Report losses once everything that came before them was read (or after a bounded time)."""
        now_s = time.monotonic()
        waiting: list[tuple[Link, float]] = []
        for link, since_s in self._lost:
            if drained or now_s >= since_s + DRAIN_S:
                self._accepted.pop(link.routing_id, None)
                self._link_down(link, "connection closed by the peer or the network")
            else:
                waiting.append((link, since_s))
        self._lost = waiting

    def _revive(self, peer: PeerId) -> bool:
        """After `hang_up` its connection to us still stands: use it again."""
        lost = [link for link, _ in self._lost]
        for link in self._accepted.values():
            if link.peer == peer and link.state == "silent" and link not in lost:
                link.state = "up"
                self._link_up(link)
                return True
        return False

    # -- edges ---------------------------------------------------------------------------------

    def _link_up(self, link: Link) -> None:
        links = self._edges.setdefault(link.peer, [])
        links.append(link)
        if len(links) == 1:
            self._events.append(PeerUp(link.peer, link.software))

    def _link_down(self, link: Link, reason: str) -> None:
        links = self._edges.get(link.peer, [])
        if link not in links:
            return
        links.remove(link)
        self._outbox.drop(link.peer)
        self._events.append(PeerDown(link.peer, reason))
        if links:
            self._events.append(PeerUp(link.peer, links[0].software))
        else:
            del self._edges[link.peer]

    def _count_hello(self) -> None:
        self.traffic.count_sent("Hello", sum(sockets.wire_bytes(len(frame)) for frame in self._hello))


def _mismatch(hello: Hello) -> Violation:
    return Violation(
        hello.peer,
        f"peer speaks gridtrain protocol {hello.version}, this software speaks {PROTOCOL_VERSION} "
        f"(the peer runs {hello.software!r}) -> install the same version of gridtrain on both machines",
    )
