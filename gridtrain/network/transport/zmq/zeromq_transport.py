"""The transport over TCP, with ZeroMQ, encrypted with CURVE.

Decides which connection serves a peer, and when an edge is up or down.  Never opens a payload, and never
takes a peer's word for who it is: that is the key that its connection was made with.

    who dialled                                   who was dialled
    DEALER (one per connection) --- Hello ------> ROUTER (all connections)    routing id -> link
        PeerUp <------------------- Hello ----        PeerUp
        both directions <=========================>   both directions

An edge is bidirectional, whichever side dialled.  If both dialled there are two connections: each
side sends over the one it had first (order is kept) and reads both; when either breaks, messages
may be lost, so `PeerDown` comes, and at once `PeerUp` again over the other.

A lost connection is noticed by libzmq's socket monitors: for a DEALER it is its own; the ROUTER's
gives a file descriptor, which is mapped to the peer that greeted over it.  What the peer sent
before the loss is delivered before `PeerDown`.

The gate is asked at the handshake (`zap.py`), which a stranger does not survive, and again for every
message that is read: a key that it admits no more is cut with its next word.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Sequence

import zmq

from gridtrain.core.messages import PROTOCOL_VERSION, Hello, Message, PeerId
from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.network.transport import access_control
from gridtrain.network.transport.identity import Identity, require_curve
from gridtrain.network.transport.interface import (
    AccessPolicy,
    ConnectionDenied,
    PeerDown,
    ReachResult,
    Received,
    TrafficCounters,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.rate_limiter import FLOOD_BYTES, FLOOD_MESSAGES, UploadLimiter
from gridtrain.network.transport.receive_queue import ReceiveQueue
from gridtrain.network.transport.send_queue import DEFAULT_LIMIT_BYTES, QueuedMessage, SendQueue, is_bulk
from gridtrain.network.transport.zmq import handshake, listener, sockets, tcp_options
from gridtrain.network.transport.zmq.dialer import HELLO_TIMEOUT_S, Connection, OutgoingConnection
from gridtrain.network.transport.zmq.listener import Listener
from gridtrain.network.transport.zmq.reachability import PROBE_SOFTWARE, ReachabilityCheck
from gridtrain.network.wire import codec

BATCH_MESSAGES = 64
"""At most so many messages are read from one socket before the others have their turn."""

ROUTER_RETRY_S = (0.001, 0.1)
"""A ROUTER cannot say when a full queue of one connection has room again: it is tried, each time after half
of the time for which it has been full, within these.  libzmq has room again when half of the queue has left,
so the other half bridges what that is late."""

DRAIN_S = 0.1
CLOSE_S = 1.0
_WILDCARDS = ("*", "0.0.0.0", "[::]")


class ZeroMQTransport:
    """Implements `Transport` over "tcp://host:port".

    Args:
        identity: our key pair; we can be dialled, and dial, under its public key alone.
        software: our name and version, in our Hello.
        gate: who may connect, and speak.
        encrypted: False: a peer is whoever its Hello says, and anybody on the way can read and alter.
            Such a transport stays on loopback addresses, unless `plain_anywhere`, for benchmarks.
        upload_Bps, download_Bps: rate caps in bytes per second; None: none.
        outbox_bytes: the most that may be queued for one peer (libzmq holds a little more).
        advertise_host: the host that peers should dial when we listen on all interfaces.

    Raises:
        ConfigError: libzmq cannot encrypt, or is too old to be trusted with it.
    """

    def __init__(
        self,
        identity: Identity,
        software: str,
        *,
        gate: AccessPolicy,
        encrypted: bool = True,
        plain_anywhere: bool = False,
        upload_Bps: float | None = None,
        download_Bps: float | None = None,
        outbox_bytes: int = DEFAULT_LIMIT_BYTES,
        advertise_host: str = "127.0.0.1",
    ) -> None:
        if encrypted:
            require_curve()
        self.me = identity.public
        self.traffic = TrafficCounters()
        self._access_policy = gate
        self._identity = identity if encrypted else None
        self._is_any_address_allowed = encrypted or plain_anywhere
        self._hello = codec.encode(Hello(self.me, PROTOCOL_VERSION, software))
        self._advertise_host = advertise_host
        self._send_queue: SendQueue[sockets.Frames] = SendQueue(UploadLimiter(upload_Bps), outbox_bytes)
        self._receive_queue: ReceiveQueue[Connection, TransportEvent] = ReceiveQueue(download_Bps)
        self._context: sockets.Context = zmq.Context()  # our own: safe under spawn
        self._listener = Listener(self._context, gate, self._identity)
        probe = None if encrypted else codec.encode(Hello(self.me, PROTOCOL_VERSION, PROBE_SOFTWARE))
        self._reachability = ReachabilityCheck(self._open_dealer, probe, self._can_use)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._events: list[TransportEvent] = []
        self._outgoing: list[OutgoingConnection] = []
        self._connections: dict[PeerId, list[Connection]] = {}  # the first is the one we send over
        self._lost: list[tuple[Connection, float]] = []  # accepted ones, and since when
        self._last_drained_s = time.monotonic()  # the ROUTER was empty then
        self._router_full_s = math.inf  # since when
        self._next_check_s = 0.0  # who sends more than is read
        self._closed = False

    # -- the contract --------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        self._require_encryption("listen at", address)
        bound = self._listener.listen(address)
        host, _, port = bound.removeprefix("tcp://").rpartition(":")
        return f"tcp://{self._advertise_host}:{port}" if host in _WILDCARDS else bound

    def dial(self, peer: PeerId, address: str) -> None:
        if peer == self.me:
            raise TransportError(f"{address} was to be dialled with our own key", remedy="leave yourself out")
        self._require_encryption("dial", address)
        if peer in self._connections or self._revive(peer):
            return
        for dial in [dial for dial in self._outgoing if dial.peer == peer]:
            if dial.address == address:
                return
            self._close_outgoing(dial)  # it moved
        dial = OutgoingConnection(peer, address)
        self._open_outgoing(dial, time.monotonic())
        self._outgoing.append(dial)

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """See `Transport.reach`.  At most four addresses are tried, and host names are not looked up:
        an address is what a peer says of itself, and a slow name server would stop all connections."""
        self._reachability.start(peer, addresses, time.monotonic() + timeout_s)

    def hang_up(self, peer: PeerId) -> None:
        """See `Transport.hang_up`.  Bulk that is still queued here is thrown away; the rest leaves now."""
        links = self._connections.get(peer, [])
        self._router_full_s = math.inf  # it may have been this one alone
        for parcel in self._send_queue.drain_control(peer):
            if not (links and self._write(links[0], parcel)):
                break  # a peer that does not read has no more to be told
        for dial in [dial for dial in self._outgoing if dial.peer == peer]:
            self._close_outgoing(dial)
        for link in self._connections.pop(peer, []):
            self._receive_queue.remove_sender(link, link.peer, time.monotonic())
            link.state = "silent"
            if link.is_pending:
                self._listener.close_later(link, time.monotonic())
        self._events = [
            event for event in self._events if event.peer != peer or isinstance(event, ReachResult)
        ]

    def connected(self, peer: PeerId) -> bool:
        return peer in self._connections

    def send(self, peer: PeerId, message: Message) -> None:
        if peer not in self._connections:
            raise TransportError(
                f"peer {peer.hex()[:8]} is not connected", remedy="wait for its PeerUp before sending"
            )
        frames, now_s = codec.encode(message), time.monotonic()
        nbytes = self._wire_bytes(frames)
        parcel = QueuedMessage(peer, type(message).__name__, frames, nbytes, is_bulk(message), now_s)
        at_once = self._send_queue.limiter.rate_Bps is None and self._send_queue.is_empty()
        if at_once and self._try_write(self._connections[peer][0], parcel, now_s):
            return  # what most do: nothing is queued, and the socket takes it
        self._send_queue.put(parcel)
        self._flush(now_s)

    def set_rate_limits(self, upload_Bps: float | None, download_Bps: float | None) -> None:
        """Other rate caps from now on.  May be called from any thread."""
        self._send_queue.limiter.rate_Bps = upload_Bps
        self._receive_queue.rate_Bps = download_Bps
        self.wake()

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._send_queue.backlog_bytes(peer)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            self._retry_outgoing(now_s)
            self._events += self._reachability.poll(now_s)
            self._flush(now_s)
            until_s = now_s if self._events else min(deadline_s, self._due_s(now_s))
            woken = self._poll_once(max(0.0, until_s - now_s))
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
        self._reachability.close()
        for dial in [dial for dial in self._outgoing if dial.connection is None]:
            self._close_outgoing(dial)
        deadline_s = time.monotonic() + CLOSE_S
        while not self._send_queue.is_empty() and (now_s := time.monotonic()) < deadline_s:
            self._poll_once(max(0.0, min(deadline_s, self._due_s(now_s)) - now_s))
            self._flush(time.monotonic())
        for dial in list(self._outgoing):
            self._close_outgoing(dial)
        self._listener.close()
        self._context.term()  # waits for at most sockets.LINGER_S
        self._wake_in.close()
        self._wake_out.close()

    # -- one turn of the loop ------------------------------------------------------------------

    def _due_s(self, now_s: float) -> float:
        """When there is something to do although no socket says so."""
        if self._lost:
            return now_s
        due_s = min(
            [self._send_queue.due_s(), self._reachability.due_s(), *(dial.due_s for dial in self._outgoing)]
        )
        due_s = min(due_s, self._listener.due_s(), self._receive_queue.due_s())
        if any(self._connections[peer][0].outgoing is None for peer in self._send_queue.blocked_peers()):
            least_s, most_s = ROUTER_RETRY_S
            due_s = min(due_s, now_s + min(most_s, max(least_s, (now_s - self._router_full_s) / 2)))
        return due_s

    def _poll_once(self, wait_s: float) -> bool:
        """Wait once, then do what is possible.  True: `wake` was called."""
        ready = sockets.wait(self._interests(), wait_s)
        if self._listener.authenticator is not None and self._listener.authenticator.socket in ready:
            self._listener.authenticator.handle_requests()
        if self._listener.monitor in ready:
            self._read_router_monitor()
        for dial in list(self._outgoing):
            flags = ready.get(dial.socket, 0)
            if flags & sockets.WRITE and dial.connection is not None:
                self._send_queue.unblock(dial.connection.peer)
            if flags & sockets.READ:
                self._read_batch(dial)
            if dial.monitor in ready:
                self._read_dial_monitor(dial)
        for peer in self._send_queue.blocked_peers():
            if self._connections[peer][0].outgoing is None:
                self._send_queue.unblock(peer)
        drained = True
        if self._listener.router in ready or self._lost:
            drained = self._read_batch(None)
            self._report_lost(drained)
        now_s = time.monotonic()
        if drained:
            self._last_drained_s = now_s
        self._events += self._receive_queue.take_due(now_s)
        self._listener.close_overdue(self._last_drained_s, now_s)
        for link in self._find_hoarders(now_s):
            self._is_hoarding(link)
        return self._wake_in.fileno() in ready and self._drain_wakeups()

    def _find_hoarders(self, now_s: float) -> list[Connection | None]:
        """Over whose connection far more came than was read; None: one that had not greeted, cut already.

        And on which lines much is lost: both are looked at now and then.
        """
        if now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + listener.CHECK_INTERVAL_S
        for link in [
            link for links in self._connections.values() for link in links if link.loss_monitor is not None
        ]:
            self._listener.watch_losses(link)
        dialled = [
            x.connection
            for x in self._outgoing
            if x.connection is not None and self._listener.is_hoarding(x.connection)
        ]
        return [*dialled, *self._listener.find_hoarders()]

    def _is_hoarding(self, link: Connection | None) -> None:
        text = "it sends far more than is read, or never ends a message"
        if link is None or link.state == "up":
            self._events.append(TransportViolation(None if link is None else link.peer, text))
        if link is not None:
            self._close_connection(link, "it fills the memory")

    def _interests(self) -> list[tuple[sockets.Waitable, int]]:
        """What to wait for."""
        blocked = {self._connections[peer][0].outgoing for peer in self._send_queue.blocked_peers()}
        interests: list[tuple[sockets.Waitable, int]] = [
            (self._wake_in.fileno(), sockets.READ),
            (self._listener.monitor, sockets.READ),
            (self._listener.router, sockets.READ),
            *self._reachability.interests(),
        ]
        if self._listener.authenticator is not None:
            interests.append((self._listener.authenticator.socket, sockets.READ))
        for dial in self._outgoing:
            if dial.socket is not None and dial.monitor is not None:
                interests.append((dial.monitor, sockets.READ))
                interests.append((dial.socket, sockets.READ | (sockets.WRITE if dial in blocked else 0)))
        return interests

    def _drain_wakeups(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        return True

    def _flush(self, now_s: float) -> None:
        while (parcel := self._send_queue.take(now_s)) is not None:
            if not self._try_write(self._connections[parcel.peer][0], parcel, now_s):
                self._send_queue.put_back(parcel)

    def _try_write(self, link: Connection, parcel: QueuedMessage[sockets.Frames], now_s: float) -> bool:
        """As `_write`, and note since when the ROUTER has been full, if it is."""
        taken = self._write(link, parcel)
        if link.outgoing is None:
            self._router_full_s = math.inf if taken else min(now_s, self._router_full_s)
        return taken

    def _write(self, link: Connection, parcel: QueuedMessage[sockets.Frames]) -> bool:
        """False: the socket is full.  If the connection is gone, everything for the peer is dropped."""
        try:
            if link.outgoing is not None:
                assert link.outgoing.socket is not None
                taken = sockets.write(link.outgoing.socket, parcel.body)
            else:
                taken = sockets.write(self._listener.router, parcel.body, link.routing_id)
        except zmq.ZMQError:  # EHOSTUNREACH: the ROUTER knows before its monitor is read
            self._send_queue.clear_peer(parcel.peer)
            self._mark_lost(link)
            return True
        if taken:
            self.traffic.count_sent(parcel.kind, parcel.nbytes)
        return taken

    # -- reading -------------------------------------------------------------------------------

    def _read_batch(self, dial: OutgoingConnection | None) -> bool:
        """Read at most a batch from the dialled socket or the ROUTER.  True: nothing more is there."""
        for _ in range(BATCH_MESSAGES):
            if dial is not None and dial.socket is None:
                return True  # it is closed
            if dial is None:
                incoming = self._listener.read()
            else:
                assert dial.socket is not None
                incoming = sockets.read(dial.socket, encrypted=self._identity is not None)
            if incoming is None:
                return True
            link = self._listener.connections.get(incoming.routing_id) if dial is None else dial.connection
            if link is not None:
                link.read_bytes += incoming.nbytes
                self._handle_incoming(link, incoming)
            elif dial is not None:
                self._handle_hello_reply(dial, incoming)
            else:
                self._read_router_monitor(until_fd=incoming.fd)
                self._handle_hello(incoming)
        return False

    def _handle_incoming(self, link: Connection, incoming: sockets.IncomingMessage) -> None:
        """A message from a peer that has greeted."""
        if link.state == "shut":
            return
        if not access_control.is_key_match(incoming.user_id, link.user_id):
            self._events.append(
                TransportViolation(None, f"a message came under the name of {link.key.hex()[:8]}")
            )
            self._close_connection(link, "another key spoke in its name")
        elif not access_control.is_still_admitted(self._access_policy, link.key, link.is_pending):
            self._close_connection(link, "its key is not admitted any more")
        elif link.state == "up":
            try:
                message = handshake.decode_message(incoming, self.traffic)
                if isinstance(message, Hello):
                    raise RemoteProtocolError("a second Hello on a connection")
            except RemoteProtocolError as error:
                self._events.append(TransportViolation(link.peer, str(error)))
            else:
                self._enqueue_event(link, Received(link.peer, message, incoming.nbytes))

    def _enqueue_event(self, link: Connection, event: Received) -> None:
        """Control is handed on at once; bulk when the download cap says so."""
        now_s = time.monotonic()
        if is_bulk(event.message) and self._receive_queue.is_idle:
            self._events.append(event)
        elif is_bulk(event.message):
            self._receive_queue.put(link, event, event.nbytes, now_s)
            self._events += self._receive_queue.take_due(now_s)
            if listener.is_hoarding(self._receive_queue.waiting_bytes(link), 0, guest=link.is_pending):
                self._is_hoarding(link)
            elif (fullest := self._receive_queue.find_overfull_sender()) is not None:
                self._close_connection(
                    fullest, "too much waits for the download limit, and most of it is from there"
                )
        elif link.flood_detector.add(event.nbytes, now_s):
            self._is_flooding(link)
        else:
            self._receive_queue.charge(link, event.nbytes, now_s)
            self._events.append(event)

    def _is_flooding(self, link: Connection) -> None:
        """It is cut before its owner hears of it: what it has sent meanwhile would fill the memory."""
        text = f"more than {FLOOD_MESSAGES} messages, or {FLOOD_BYTES} bytes, that need no credit, and no end"
        self._events.append(TransportViolation(link.peer, text))
        self._close_connection(link, "it floods this connection")

    # -- connections that we made --------------------------------------------------------------

    def _open_dealer(self, peer: PeerId) -> zmq.Socket[bytes]:
        return sockets.open_dealer(self._context, self._identity, peer)

    def _open_outgoing(self, dial: OutgoingConnection, now_s: float) -> None:
        dial.open(self._open_dealer, self._hello, now_s)

    def _retry_outgoing(self, now_s: float) -> None:
        for dial in self._outgoing:
            if now_s >= dial.due_s:
                if dial.socket is None:
                    self._open_outgoing(dial, now_s)
                else:
                    self._redial(dial, f"no greeting within {HELLO_TIMEOUT_S:g} s")

    def _handle_hello_reply(self, dial: OutgoingConnection, incoming: sockets.IncomingMessage) -> None:
        """The first message over a connection that we made."""
        try:
            hello = handshake.read_hello(incoming, self.traffic)
            if hello.peer != dial.peer:
                raise RemoteProtocolError(f"{dial.address} answers with key {hello.peer.hex()[:8]}")
        except RemoteProtocolError as error:
            self._events.append(TransportViolation(None, str(error)))
            self._redial(dial, str(error))
            return
        self._count_hello()  # the one it answers; those of failed attempts never left
        if hello.version != PROTOCOL_VERSION:
            self._events.append(handshake.hello_mismatch(hello, dial.peer))
            self._close_outgoing(dial)  # the same software will give the same answer
        elif not access_control.is_still_admitted(self._access_policy, dial.peer, guest=False):
            self._redial(dial, "its key is not admitted")
        else:
            link = Connection(dial.peer, dial.peer, hello.software, outgoing=dial, fd=dial.fd)
            dial.mark_established(link)
            self._listener.choose_control(link)
            self._connection_up(link)

    def _read_dial_monitor(self, dial: OutgoingConnection) -> None:
        if dial.monitor is None:
            return
        for event, number in sockets.monitor_events(dial.monitor):
            if event == zmq.EVENT_CONNECTED:
                dial.fd, dial.remote = number, tcp_options.remote_address(number)
                if dial.remote is not None:
                    tcp_options.enlarge_buffers(number, dial.remote)
            if event in sockets.LOST_EVENTS:
                while not self._read_batch(dial):
                    pass  # bounded: what libzmq holds, nothing more can come
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or self._handle_disconnect(dial, event):
                    self._events.append(ConnectionDenied(dial.peer, dial.address))
                if dial.socket is not None:
                    self._redial(dial, f"connection to {dial.address} lost")
                return

    def _handle_disconnect(self, dial: OutgoingConnection, event: int) -> bool:
        """Without encryption nobody says 400: who was there, and ended it before a greeting, denies us."""
        return self._identity is None and dial.connection is None and event == zmq.EVENT_DISCONNECTED

    def _redial(self, dial: OutgoingConnection, reason: str) -> None:
        dial.retry_later(time.monotonic())
        if dial.connection is not None:
            link, dial.connection = dial.connection, None
            self._connection_down(link, reason)

    def _close_outgoing(self, dial: OutgoingConnection) -> None:
        dial.close()
        self._outgoing.remove(dial)

    # -- connections that others made ----------------------------------------------------------

    def _handle_hello(self, incoming: sockets.IncomingMessage) -> None:
        """The first message over a connection that was made to us."""
        if not self._listener.is_open(incoming.fd):
            return
        encrypted = self._identity is not None
        try:
            hello = handshake.read_hello(incoming, self.traffic)
            handshake.check_hello(hello, incoming, self.me, encrypted=encrypted)
        except RemoteProtocolError as error:
            self._events.append(TransportViolation(None, str(error)))
            self._reject(incoming)
            return
        link = handshake.make_connection(hello, incoming, self._access_policy)
        if link is None:
            self._reject(incoming)  # without a word
            return
        with contextlib.suppress(zmq.ZMQError):  # it is gone again, as the monitor will say
            if sockets.write(self._listener.router, self._hello, incoming.routing_id):
                self._count_hello()
        if hello.version != PROTOCOL_VERSION:
            self._events.append(handshake.hello_mismatch(hello, None))  # old software is no offence
            self._listener.ignore_connection(incoming)
        elif encrypted or hello.software != PROBE_SOFTWARE:
            self._send_hello(link)

    def _send_hello(self, link: Connection) -> None:
        for old in [] if link.is_pending else self._listener.connections_of(link.key):
            if old.state == "replaced":
                self._close_connection(old, "")
            else:
                old.state = "replaced"  # not cut yet: whoever has the same key would come back at once
                self._connection_down(old, "replaced by a newer connection of the same peer")
        if (stale := self._listener.add_connection(link)) is not None:
            self._mark_lost(stale)
        if not link.is_pending:
            self._listener.enlarge_buffers(link)
            self._listener.choose_control(link)
        self._connection_up(link)
        for surplus in self._listener.surplus_pending_members():
            self._close_connection(surplus, f"more than {access_control.MOST_GUESTS} guests")

    def _reject(self, incoming: sockets.IncomingMessage) -> None:
        """It has not greeted, and will not."""
        link = self._listener.ignore_connection(incoming)
        if link is not None:
            self._listener.close_connection(link)

    def _close_connection(self, link: Connection, reason: str) -> None:
        """End this connection now, dialled or accepted; what waits of it is not wanted."""
        self._receive_queue.remove_sender(link, link.peer, time.monotonic())
        if link.outgoing is not None:
            self._redial(link.outgoing, reason)
        else:
            self._listener.close_connection(link)
            self._connection_down(link, reason)

    def _read_router_monitor(self, until_fd: int = -1) -> None:
        for link in self._listener.read_monitor(time.monotonic(), until_fd=until_fd):
            self._mark_lost(link)

    def _mark_lost(self, link: Connection) -> None:
        if all(link is not lost for lost, _ in self._lost):
            self._lost.append((link, time.monotonic()))

    def _report_lost(self, drained: bool) -> None:
        """Report losses once everything that came before them was read (or after a bounded time)."""
        now_s = time.monotonic()
        waiting: list[tuple[Connection, float]] = []
        for link, since_s in self._lost:
            if drained or now_s >= since_s + DRAIN_S:
                self._listener.remove_connection(link)
                self._connection_down(link, "connection closed by the peer or the network")
            else:
                waiting.append((link, since_s))
        self._lost = waiting

    def _revive(self, peer: PeerId) -> bool:
        """After `hang_up` its connection to us still stands: use it again."""
        lost = [link for link, _ in self._lost]
        for link in self._listener.connections_of(peer):
            admitted = access_control.is_still_admitted(self._access_policy, peer, guest=False)
            if admitted and link.state == "silent" and link not in lost:
                link.state = "up"
                self._connection_up(link)
                return True
        return False

    # -- edges ---------------------------------------------------------------------------------

    def _connection_up(self, link: Connection) -> None:
        links = self._connections.setdefault(link.peer, [])
        links.append(link)
        self._receive_queue.add_sender(link, link.peer, time.monotonic())
        if len(links) == 1:
            self._events.append(handshake.peer_up_event(link))

    def _connection_down(self, link: Connection, reason: str) -> None:
        links = self._connections.get(link.peer, [])
        if link not in links:
            return
        links.remove(link)
        self._send_queue.clear_peer(link.peer)
        self._router_full_s = math.inf
        self._events += self._receive_queue.remove_sender(link, link.peer, time.monotonic())
        self._events.append(PeerDown(link.peer, reason))
        if links:
            self._events.append(handshake.peer_up_event(links[0]))
        else:
            del self._connections[link.peer]

    def _count_hello(self) -> None:
        self.traffic.count_sent("Hello", self._wire_bytes(self._hello))

    def _wire_bytes(self, frames: sockets.Frames) -> int:
        encrypted = self._identity is not None
        return sum(sockets.wire_bytes(len(frame), encrypted=encrypted) for frame in frames)

    # -- without encryption --------------------------------------------------------------------

    def _can_use(self, address: str) -> bool:
        return self._is_any_address_allowed or sockets.is_loopback(address)

    def _require_encryption(self, what: str, address: str) -> None:
        if not self._can_use(address):
            raise TransportError(
                f"cannot {what} {address!r} without encryption: everybody on the way could read and alter",
                remedy='switch encryption on, or stay on this machine: "tcp://127.0.0.1:PORT"',
            )
