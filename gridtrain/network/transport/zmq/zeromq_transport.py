"""The transport over TCP with ZeroMQ, encrypted with CURVE; manages the connections of each peer.

    dialling side                                 accepting side
    DEALER (one per connection) --- Hello ------> ROUTER (all connections)    routing id -> Connection
        PeerUp <------------------- Hello ----        PeerUp
        both directions <=========================>   both directions

A peer may have several connections, for example if both sides have dialled.  Each side sends over its oldest
connection, so that messages stay in order, and reads from all connections.  When a connection breaks,
messages may be lost; therefore the transport reports `PeerDown`, followed by `PeerUp` if another connection
remains.

libzmq's socket monitors report the loss of a connection.  The monitor of a DEALER reports on its only
connection; the monitor of the ROUTER reports a file descriptor, which identifies the connection of a peer
that has sent Hello.  Messages that the peer sent before the loss are delivered before `PeerDown`.

The access policy is consulted during the handshake (`handshake`), and again for every message: a connection
whose key is no longer admitted is closed at its next message.

    `Dialer`     outgoing connections            `Listener`            incoming connections
    `SendQueue`  messages to be sent             `ReceiveQueue`        messages waiting for the download cap
    `sockets`    libzmq, with all limits set     `ReachabilityCheck`   checks whether a peer can be dialled
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
from gridtrain.network.transport.flood_detector import FLOOD_BYTES, FLOOD_MESSAGES
from gridtrain.network.transport.identity import Identity, require_curve
from gridtrain.network.transport.interface import (
    AccessPolicy,
    ConnectionDenied,
    ConnectionRole,
    Frames,
    PeerDown,
    ReachResult,
    Received,
    TrafficCounters,
    TransportEvent,
    TransportViolation,
    not_connected_error,
    own_key_error,
)
from gridtrain.network.transport.rate_limiter import UploadLimiter
from gridtrain.network.transport.receive_queue import ReceiveQueue
from gridtrain.network.transport.send_queue import QueuedMessage, SendQueue, is_bulk
from gridtrain.network.transport.zmq import dialer, handshake, sockets
from gridtrain.network.transport.zmq.dialer import Connection, Dialer, OutgoingConnection
from gridtrain.network.transport.zmq.listener import Listener
from gridtrain.network.transport.zmq.reachability import PROBE_SOFTWARE, ReachabilityCheck
from gridtrain.network.wire import codec

BATCH_MESSAGES = 64
"""The maximum number of messages to read from one socket before the next socket is read."""

ROUTER_RETRY_S = (0.001, 0.1)
"""The bounds, in seconds, of the delay before another attempt to write to a ROUTER.  A ROUTER does not report
when the full queue of a connection has room again, so the delay is half the time for which the queue has been
full.  libzmq accepts messages again when half of its queue has been sent; it sends the other half during the
delay."""

CHECK_INTERVAL_S = 0.25
"""The interval between two checks for unread bytes and packet losses."""

CLOSE_S = 1.0
_WILDCARDS = ("*", "0.0.0.0", "[::]")


class ZeroMQTransport:
    """Implements `Transport` over "tcp://host:port".

    Args:
        identity: our key pair.
        software: the name and version of our software, for Hello.
        gate: the access policy.
        encrypted: whether to encrypt connections.  Without encryption, the key in a peer's Hello is not
            verified and anyone on the network path can read and alter messages, so only loopback addresses
            are allowed.
        plain_anywhere: whether to allow all addresses without encryption, for benchmarks.
        upload_Bps, download_Bps: rate caps in bytes per second; None for no cap.
        advertise_host: the host that peers should dial if we listen on all interfaces.

    Raises:
        ConfigError: libzmq cannot encrypt or has known vulnerabilities.
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
        advertise_host: str = "127.0.0.1",
    ) -> None:
        if encrypted:
            require_curve()
        self.me = identity.public
        self.traffic = TrafficCounters()
        self._access_policy = gate
        self._encrypted = encrypted
        self._is_any_address_allowed = encrypted or plain_anywhere
        self._hello = codec.encode(Hello(self.me, PROTOCOL_VERSION, software))
        self._advertise_host = advertise_host
        self._send_queue: SendQueue[Frames] = SendQueue(UploadLimiter(upload_Bps))
        self._receive_queue: ReceiveQueue[Connection, TransportEvent] = ReceiveQueue(download_Bps)
        self._context = sockets.open_context()
        curve_identity = identity if encrypted else None
        self._listener = Listener(self._context, gate, curve_identity)
        self._dialer = Dialer(self._context, curve_identity, self._hello, self.wake)
        probe = None if encrypted else codec.encode(Hello(self.me, PROTOCOL_VERSION, PROBE_SOFTWARE))
        self._reachability = ReachabilityCheck(self._dialer.open_socket, probe, self._can_use)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._events: list[TransportEvent] = []
        self._connections: dict[PeerId, list[Connection]] = {}  # we send over the first connection
        self._last_drained_s = time.monotonic()  # when the ROUTER was last empty
        self._router_full_s = math.inf  # when a ROUTER's queue became full
        self._next_check_s = 0.0
        self._closed = False

    # -- Transport -----------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        self._require_encryption("listen on", address)
        bound = self._listener.listen(address)
        host, _, port = bound.removeprefix("tcp://").rpartition(":")
        return f"tcp://{self._advertise_host}:{port}" if host in _WILDCARDS else bound

    def dial(self, peer: PeerId, address: str) -> None:
        if peer == self.me:
            raise own_key_error(address)
        self._require_encryption("dial", address)
        if peer in self._connections:
            return
        if (connection := self._listener.revive(peer)) is not None:
            self._connection_up(connection)
        else:
            self._dialer.dial(peer, address, time.monotonic())

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """See `Transport.reach`.  At most four addresses are tried.  Host names are not resolved, because a
        peer chooses these addresses."""
        self._reachability.start(peer, addresses, time.monotonic() + timeout_s)

    def hang_up(self, peer: PeerId) -> None:
        """See `Transport.hang_up`.  Queued bulk messages are dropped; control messages are sent now."""
        connections = self._connections.get(peer, [])
        self._router_full_s = math.inf  # the full queue may have been this connection's
        for queued in self._send_queue.drain_control(peer):
            if not (connections and self._write(connections[0], queued.kind, queued.body, queued.nbytes)):
                break  # the peer does not read
        self._dialer.give_up(peer)
        for connection in self._connections.pop(peer, []):
            self._receive_queue.remove_sender(connection, connection.peer, time.monotonic())
            if connection.outgoing is None:
                self._listener.silence(connection)
        self._receive_queue.forget_departed(lambda owner: owner == peer)
        self._events = [
            event for event in self._events if event.peer != peer or isinstance(event, ReachResult)
        ]

    def connected(self, peer: PeerId) -> bool:
        return peer in self._connections

    def send(self, peer: PeerId, message: Message, frames: Frames | None = None) -> None:
        if peer not in self._connections:
            raise not_connected_error(peer)
        frames = codec.encode(message) if frames is None else frames
        kind, nbytes, now_s = type(message).__name__, self._wire_bytes(frames), time.monotonic()
        can_bypass = self._send_queue.limiter.rate_Bps is None and self._send_queue.is_empty()
        if can_bypass and self._try_write(self._connections[peer][0], kind, frames, nbytes, now_s):
            return  # the usual case
        self._send_queue.put(QueuedMessage(peer, kind, frames, nbytes, is_bulk(message), now_s))
        self._flush(now_s)

    def set_rate_limits(self, upload_Bps: float | None, download_Bps: float | None) -> None:
        """Change the rate caps.  Thread-safe."""
        self._send_queue.limiter.rate_Bps = upload_Bps
        self._receive_queue.rate_Bps = download_Bps
        self.wake()

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._send_queue.backlog_bytes(peer)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            self._dialer.retry_due(now_s)
            if self._reachability.is_busy:
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
        with contextlib.suppress(OSError):  # full: already woken; closed: no thread waits
            self._wake_out.send(b"\0")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reachability.close()
        for dial in self._dialer:
            if dial.connection is None:
                self._dialer.close(dial)
        deadline_s = time.monotonic() + CLOSE_S
        while not self._send_queue.is_empty() and (now_s := time.monotonic()) < deadline_s:
            self._poll_once(max(0.0, min(deadline_s, self._due_s(now_s)) - now_s))
            self._flush(time.monotonic())
        for dial in self._dialer:
            self._dialer.close(dial)
        self._listener.close()
        self._context.term()  # waits for at most sockets.LINGER_S
        self._wake_in.close()
        self._wake_out.close()

    # -- one iteration of the loop -------------------------------------------------------------

    def _due_s(self, now_s: float) -> float:
        """Return the time at which the transport must act even if no socket is ready."""
        if self._listener.has_lost:
            return now_s
        due_s = min(self._receive_queue.due_s(), self._dialer.due_s(), self._listener.due_s())
        if self._reachability.is_busy:
            due_s = min(due_s, self._reachability.due_s())
        if self._send_queue.is_empty():
            return due_s
        due_s = min(due_s, self._send_queue.due_s())
        if any(connection.outgoing is None for connection in self._blocked_connections()):
            least_s, most_s = ROUTER_RETRY_S
            due_s = min(due_s, now_s + min(most_s, max(least_s, (now_s - self._router_full_s) / 2)))
        return due_s

    def _poll_once(self, wait_s: float) -> bool:
        """Wait once, then process the sockets that are ready; return whether `wake` was called."""
        ready = sockets.wait(self._interests(), wait_s)
        zap_handler = self._listener.zap_handler
        if zap_handler is not None and zap_handler.socket in ready:
            zap_handler.handle_requests()
        if self._listener.monitor in ready:
            self._listener.read_monitor()
        for dial in self._dialer:
            flags = ready.get(dial.socket, 0)
            if flags & sockets.WRITE and dial.connection is not None:
                self._send_queue.unblock(dial.connection.peer)
            if flags & sockets.READ:
                self._read_outgoing(dial)
            if dial.monitor in ready:
                self._read_dial_monitor(dial)
        if not self._send_queue.is_empty():
            for connection in self._blocked_connections():
                if connection.outgoing is None:
                    self._send_queue.unblock(connection.peer)
        drained = True
        if self._listener.router in ready or self._listener.has_lost:
            drained = self._read_router()
            for connection in self._listener.take_lost(drained=drained):
                self._connection_down(connection, "connection closed by the peer or the network")
        now_s = time.monotonic()
        if drained:
            self._last_drained_s = now_s
        if not self._receive_queue.is_idle:
            self._events += self._receive_queue.take_due(now_s)
        self._listener.close_overdue(self._last_drained_s, now_s)
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._check_connections()
        return self._wake_in.fileno() in ready and self._drain_wakeups()

    def _interests(self) -> list[tuple[sockets.Waitable, int]]:
        """Return the sockets and descriptors to wait for, each with its flags (READ | WRITE)."""
        interests: list[tuple[sockets.Waitable, int]] = [
            (self._wake_in.fileno(), sockets.READ),
            (self._listener.monitor, sockets.READ),
            (self._listener.router, sockets.READ),
        ]
        if self._reachability.is_busy:
            interests += self._reachability.interests()
        blocked: set[OutgoingConnection | None] = set()
        if not self._send_queue.is_empty():
            blocked = {connection.outgoing for connection in self._blocked_connections()}
        if self._listener.zap_handler is not None:
            interests.append((self._listener.zap_handler.socket, sockets.READ))
        for dial in self._dialer:
            if dial.socket is not None and dial.monitor is not None:
                interests.append((dial.monitor, sockets.READ))
                interests.append((dial.socket, sockets.READ | (sockets.WRITE if dial in blocked else 0)))
        return interests

    def _blocked_connections(self) -> list[Connection]:
        """Return the connections whose queues in libzmq are full."""
        return [self._connections[peer][0] for peer in self._send_queue.blocked_peers()]

    def _check_connections(self) -> None:
        """Revise the congestion control of all connections, and close those with too many unread bytes.

        Also discard the debts, under the download cap, of peers that may no longer connect.
        """
        self._receive_queue.forget_departed(lambda peer: self._access_policy(peer) is ConnectionRole.STRANGER)
        for connections in self._connections.values():
            for connection in connections:
                if connection.tcp is not None:
                    connection.tcp.revise_congestion_control()
        dialled = [dial.connection for dial in self._dialer if dial.connection is not None]
        hoarders: list[Connection | None] = [one for one in dialled if one.is_hoarding()]
        for hoarder in [*hoarders, *self._listener.find_hoarders()]:
            self._close_hoarder(hoarder)

    def _drain_wakeups(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
        return True

    # -- sending -------------------------------------------------------------------------------

    def _flush(self, now_s: float) -> None:
        if self._send_queue.is_empty():
            return
        while (queued := self._send_queue.take(now_s)) is not None:
            connection = self._connections[queued.peer][0]
            if not self._try_write(connection, queued.kind, queued.body, queued.nbytes, now_s):
                self._send_queue.put_back(queued)

    def _try_write(
        self, connection: Connection, kind: str, frames: Frames, nbytes: int, now_s: float
    ) -> bool:
        """Write a message with `_write`, return its result, and record when a ROUTER's queue became full."""
        taken = self._write(connection, kind, frames, nbytes)
        if connection.outgoing is None:
            self._router_full_s = math.inf if taken else min(now_s, self._router_full_s)
        return taken

    def _write(self, connection: Connection, kind: str, frames: Frames, nbytes: int) -> bool:
        """Write a message; return False if libzmq's queue is full.

        If the connection is closed, all messages queued for the peer are dropped, and True is returned.
        """
        try:
            taken = sockets.write(connection.socket, frames, connection.routing_id)
        except zmq.ZMQError:  # EHOSTUNREACH: the connection is closed; its monitor has not been read yet
            self._send_queue.clear_peer(connection.peer)
            self._listener.mark_lost(connection)
            return True
        if taken:
            self.traffic.count_sent(kind, nbytes)
        return taken

    # -- receiving -----------------------------------------------------------------------------

    def _read_router(self) -> bool:
        """Read at most one batch from all accepted connections; return whether no message is left."""
        for count in range(BATCH_MESSAGES):
            is_ready = not count or sockets.is_readable(self._listener.router)  # `wait` reported the first
            incoming = self._listener.read() if is_ready else None
            if incoming is None:
                return True
            connection = self._listener.connection_of(incoming)
            if connection is not None:
                self._handle_incoming(connection, incoming)
            else:
                self._listener.read_monitor(until_fd=incoming.fd)
                self._handle_hello(incoming)
        return False

    def _read_outgoing(self, dial: OutgoingConnection) -> bool:
        """Read at most one batch from an outgoing connection; return whether no message is left."""
        for count in range(BATCH_MESSAGES):
            if dial.socket is None:
                return True  # the connection was closed while messages were handled
            incoming = None
            if not count or sockets.is_readable(dial.socket):  # `wait` reported the first
                incoming = sockets.read(dial.socket, encrypted=self._encrypted)
            if incoming is None:
                return True
            if dial.connection is not None:
                self._handle_incoming(dial.connection, incoming)
            else:
                self._handle_hello_reply(dial, incoming)
        return False

    def _handle_incoming(self, connection: Connection, incoming: sockets.IncomingMessage) -> None:
        """Handle a message from a peer that has sent Hello."""
        connection.read_bytes += incoming.wire_bytes
        if connection.state == "shut":
            return
        if incoming.user_id != connection.user_id:
            text = f"a message was sent in the name of {connection.key.hex()[:8]}"
            self._events.append(TransportViolation(None, text))
            self._close_connection(connection, "another key sent a message in the peer's name")
        elif not access_control.is_still_admitted(self._access_policy, connection.key, connection.is_pending):
            self._close_connection(connection, "the peer's key is no longer admitted")
        elif connection.state == "up":
            try:
                message = handshake.decode_message(incoming, self.traffic)
                if isinstance(message, Hello):
                    raise RemoteProtocolError("a second Hello arrived over a connection")
            except RemoteProtocolError as error:
                self._events.append(TransportViolation(connection.peer, str(error)))
            else:
                received = Received(connection.peer, message, incoming.nbytes)
                self._deliver(connection, received, incoming.wire_bytes)

    def _deliver(self, connection: Connection, event: Received, wire_bytes: int) -> None:
        """Deliver control messages immediately, and bulk messages when the download cap permits."""
        is_bulk_message = is_bulk(event.message)
        if is_bulk_message and self._receive_queue.is_idle:
            self._events.append(event)
            return
        now_s = time.monotonic()
        if is_bulk_message:
            self._receive_queue.put(connection, event, wire_bytes, now_s)
            self._events += self._receive_queue.take_due(now_s)
            waiting_bytes = self._receive_queue.waiting_bytes(connection)
            if dialer.exceeds_unread(waiting_bytes, 0, is_pending=connection.is_pending):
                self._close_hoarder(connection)
            elif (fullest := self._receive_queue.find_overfull_sender()) is not None:
                self._close_connection(
                    fullest, "too many bytes wait for the download limit, and this peer has sent most of them"
                )
        elif connection.flood_detector.add(wire_bytes, now_s):
            # The connection is closed before the loop reads the event, because messages that arrive in the
            # meantime would fill the memory.
            text = f"a peer sent more than {FLOOD_MESSAGES} messages or {FLOOD_BYTES} bytes without credit"
            self._events.append(TransportViolation(connection.peer, text))
            self._close_connection(connection, "the peer is flooding this connection")
        else:
            self._receive_queue.charge(connection, wire_bytes, now_s)
            self._events.append(event)

    def _close_hoarder(self, connection: Connection | None) -> None:
        """Report a connection over which many more bytes have arrived than were read, and close it.

        None stands for a connection over which no Hello has arrived; this connection has already been closed.
        """
        text = "a peer sends far more than this process reads, or never completes a message"
        if connection is None or connection.state == "up":
            self._events.append(TransportViolation(None if connection is None else connection.peer, text))
        if connection is not None:
            self._close_connection(connection, "the peer is filling this process's memory")

    # -- Hello ---------------------------------------------------------------------------------

    def _handle_hello_reply(self, dial: OutgoingConnection, incoming: sockets.IncomingMessage) -> None:
        """Handle the first message of an outgoing connection."""
        try:
            hello = handshake.read_hello(incoming, self.traffic)
            if hello.peer != dial.peer:
                keys = f"key {hello.peer.hex()[:8]} instead of {dial.peer.hex()[:8]}"
                raise RemoteProtocolError(f"{dial.address} answered with {keys}")
        except RemoteProtocolError as error:
            self._events.append(TransportViolation(None, str(error)))
            self._redial(dial, str(error))
            return
        self._count_hello()  # only the Hello that was answered; a failed attempt sends none
        if hello.version != PROTOCOL_VERSION:
            self._events.append(handshake.version_mismatch(hello, dial.peer))
            self._dialer.close(dial)  # a retry would fail in the same way
        elif not access_control.is_still_admitted(self._access_policy, dial.peer, is_pending=False):
            self._redial(dial, "the peer's key is not admitted")
        else:
            self._connection_up(dial.establish(hello.software, incoming.host, time.monotonic()))

    def _handle_hello(self, incoming: sockets.IncomingMessage) -> None:
        """Handle the first message of an accepted connection."""
        fd = incoming.fd
        if not self._listener.is_open(fd):
            return
        try:
            hello = handshake.read_hello(incoming, self.traffic)
            handshake.check_hello(hello, incoming, self.me, encrypted=self._encrypted)
        except RemoteProtocolError as error:
            self._events.append(TransportViolation(None, str(error)))
            self._listener.refuse(incoming)
            return
        connection = handshake.make_connection(
            hello, incoming, self._listener.router, self._listener.accepted(fd), self._access_policy
        )
        if connection is None:
            self._listener.refuse(incoming)  # without an answer
            return
        with contextlib.suppress(zmq.ZMQError):  # the connection is already closed; the monitor reports it
            if sockets.write(self._listener.router, self._hello, incoming.routing_id):
                self._count_hello()
        if hello.version != PROTOCOL_VERSION:
            # Old software is not a violation.
            host = connection.host if connection.is_pending else ""
            self._events.append(handshake.version_mismatch(hello, None, host))
            self._listener.ignore(incoming)
        elif self._encrypted or hello.software != PROBE_SOFTWARE:
            self._accept(connection)

    def _accept(self, connection: Connection) -> None:
        for old in self._listener.add(connection):
            self._connection_down(old, "replaced by a newer connection of the same peer")
        if connection.tcp is not None and not connection.is_pending:
            connection.tcp.enlarge_buffers()
            connection.tcp.choose_congestion_control()
        self._connection_up(connection)
        for surplus in self._listener.surplus_pending_members():
            text = f"there are more than {access_control.MAX_PENDING_MEMBERS} connections with invitations"
            self._close_connection(surplus, text)

    # -- connections made and lost -------------------------------------------------------------

    def _read_dial_monitor(self, dial: OutgoingConnection) -> None:
        if dial.monitor is None or (event := dial.read_monitor()) is None:
            return
        while not self._read_outgoing(dial):
            pass  # bounded by libzmq's queue, because no more messages can arrive
        # Without encryption there is no status 400: a connection that ends before Hello was denied.
        closed_early = not self._encrypted and dial.connection is None and event == zmq.EVENT_DISCONNECTED
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or closed_early:
            self._events.append(ConnectionDenied(dial.peer, dial.address))
        if dial.socket is not None:
            self._redial(dial, f"the connection to {dial.address} was lost")

    def _redial(self, dial: OutgoingConnection, reason: str) -> None:
        if (connection := dial.retry_later(time.monotonic())) is not None:
            self._connection_down(connection, reason)

    def _close_connection(self, connection: Connection, reason: str) -> None:
        """Close a connection immediately; its messages that are waiting to be delivered are dropped."""
        self._receive_queue.remove_sender(connection, connection.peer, time.monotonic())
        if connection.outgoing is not None:
            self._redial(connection.outgoing, reason)
        else:
            self._listener.shut(connection)
            self._connection_down(connection, reason)

    def _connection_up(self, connection: Connection) -> None:
        connections = self._connections.setdefault(connection.peer, [])
        connections.append(connection)
        self._receive_queue.add_sender(connection, connection.peer, time.monotonic())
        if len(connections) == 1:
            self._events.append(handshake.peer_up_event(connection))

    def _connection_down(self, connection: Connection, reason: str) -> None:
        peer, now_s = connection.peer, time.monotonic()
        connections = self._connections.get(peer, [])
        if connection not in connections:
            return
        connections.remove(connection)
        self._send_queue.clear_peer(peer)
        self._router_full_s = math.inf
        self._events += self._receive_queue.remove_sender(connection, peer, now_s)
        self._events.append(PeerDown(peer, reason))
        if connections:
            self._events.append(handshake.peer_up_event(connections[0]))
        else:
            del self._connections[peer]

    def _count_hello(self) -> None:
        self.traffic.count_sent("Hello", self._wire_bytes(self._hello))

    def _wire_bytes(self, frames: Frames) -> int:
        return sum(sockets.wire_bytes(len(frame), encrypted=self._encrypted) for frame in frames)

    # -- addresses -----------------------------------------------------------------------------

    def _can_use(self, address: str) -> bool:
        return self._is_any_address_allowed or sockets.is_loopback(address)

    def _require_encryption(self, what: str, address: str) -> None:
        if not self._can_use(address):
            raise TransportError(
                f"cannot {what} {address!r} without encryption, because anyone on the network path could "
                "alter messages",
                remedy='enable encryption, or use a loopback address: "tcp://127.0.0.1:PORT"',
            )
