"""An in-process transport, with endpoints that can be killed or hidden, for local groups and tests.

Messages pass through the codec, so that a message that could not be sent over a network also fails in memory.
Payloads are copied, so that a sender cannot change a received message.

    thread A: MemoryTransport --send--> send queue --flush--> MemoryHub --> B's mailbox
                                                                                |
    thread B: MemoryTransport <------------------- poll ------------------------+

Messages move from the bounded send queue to the peer's bounded mailbox as far as the upload cap and the free
space in the mailbox permit, so there are two queues with the same backpressure as over a socket.  A
connection is made immediately, or as soon as the other end listens.  A dialler that is not admitted retries
after a back-off.

The hub's lock protects all state of the hub and its endpoints; callers of methods named `*_locked` hold it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.messages import Message, PeerId
from gridtrain.errors import GridtrainError, TransportError
from gridtrain.network.transport import access_control
from gridtrain.network.transport.interface import (
    AccessPolicy,
    ConnectionDenied,
    Frames,
    PeerDown,
    PeerUp,
    ReachResult,
    Received,
    TrafficCounters,
    TransportEvent,
    allow_all,
    not_connected_error,
    own_key_error,
)
from gridtrain.network.transport.rate_limiter import UploadLimiter
from gridtrain.network.transport.send_queue import QueuedMessage, SendQueue, is_bulk
from gridtrain.network.wire import codec

SOFTWARE = "gridtrain"
MAX_ADDRESSES = 4
MAILBOX_BYTES = 16 * 2**20
"""The limit on the unread bytes from one sender in a mailbox; mailboxes stand in for sockets' buffers."""

CLOSE_S = 1.0
BACKOFF_FIRST_S = 0.01
BACKOFF_MAX_S = 2.0


class EndpointKilled(GridtrainError):
    """Raised in an endpoint that a fault has killed; its thread should end without sending anything."""


@dataclass(slots=True, eq=False)
class MemoryConnection:
    """A connection between two endpoints.

    Attributes:
        is_ignored: whether the acceptor has hung up and therefore ignores the connection.
    """

    initiator: MemoryTransport
    acceptor: MemoryTransport
    is_ignored: bool = False

    def other_end(self, me: MemoryTransport) -> MemoryTransport:
        return self.acceptor if me is self.initiator else self.initiator


class MemoryHub:
    """The network that the endpoints in one process share.  Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ports: dict[str, MemoryTransport] = {}
        self._alive: list[MemoryTransport] = []
        self._hidden: set[PeerId] = set()

    @property
    def endpoints(self) -> dict[PeerId, MemoryTransport]:
        """The running endpoints by key; of several endpoints with the same key, only the latest."""
        return {endpoint.me: endpoint for endpoint in self._alive}

    # -- faults, from any thread ---------------------------------------------------------------

    def kill(self, peer: PeerId) -> None:
        """Stop an endpoint as if by SIGKILL: peers get `PeerDown`, and its methods raise `EndpointKilled`."""
        with self.lock:
            self.kill_locked(peer)

    def hide(self, peer: PeerId) -> None:
        """Simulate NAT: no peer can dial this endpoint; existing connections remain."""
        with self.lock:
            self._hidden.add(peer)

    # -- for the endpoints ---------------------------------------------------------------------

    def add_locked(self, endpoint: MemoryTransport) -> None:
        self._alive.append(endpoint)

    def remove_locked(self, endpoint: MemoryTransport, reason: str) -> None:
        """Remove the endpoint, free its addresses and close its connections."""
        self.ports = {address: other for address, other in self.ports.items() if other is not endpoint}
        self._alive = [other for other in self._alive if other is not endpoint]
        for link in endpoint.connections_locked():
            self.close_locked(link, reason)

    def close_locked(
        self, link: MemoryConnection, reason: str, *, silent: MemoryTransport | None = None
    ) -> None:
        """Close a connection.  Each end gets `PeerDown`, except `silent` and an acceptor that has hung up."""
        for end in (link.initiator, link.acceptor):
            quiet = end is silent or (end is link.acceptor and link.is_ignored)
            end.connection_lost_locked(link, None if quiet else reason)

    def retry_locked(self) -> None:
        for endpoint in list(self._alive):
            endpoint.connect_locked(time.monotonic(), early=True)

    def reachable_locked(
        self, dialler: MemoryTransport, peer: PeerId, address: str
    ) -> MemoryTransport | None:
        """Return the endpoint that can be dialled at this address, or None.  Access is not checked."""
        other = self.ports.get(address)
        if other is None or other.me != peer or other is dialler or peer in self._hidden:
            return None
        return other

    def connect_locked(self, dialler: MemoryTransport, acceptor: MemoryTransport) -> bool:
        """Connect two endpoints; return False if the access policy of either does not admit the other."""
        if not (
            access_control.is_still_admitted(acceptor.access_policy, dialler.me, False)
            and access_control.is_still_admitted(dialler.access_policy, acceptor.me, False)
        ):
            return False
        link = MemoryConnection(dialler, acceptor)
        dialler.connection_made_locked(link, PeerUp(acceptor.me, SOFTWARE, acceptor.host))
        acceptor.connection_made_locked(link, PeerUp(dialler.me, SOFTWARE, dialler.host))
        return True

    def deliver_locked(
        self, source: MemoryTransport, link: MemoryConnection, queued: QueuedMessage[Message]
    ) -> bool:
        """Deliver a message.

        Returns False if the receiver's mailbox is full; the sender must then try again when the receiver has
        read from the mailbox.
        """
        target = link.other_end(source)
        if target.is_full_locked(link, queued.nbytes):
            return False
        target.post_locked(Received(source.me, queued.body, queued.nbytes), link)
        return True

    def kill_locked(self, peer: PeerId) -> None:
        for endpoint in [endpoint for endpoint in self._alive if endpoint.me == peer]:
            self.remove_locked(endpoint, "the peer was killed")
            endpoint.stop_locked(killed=True)


_QueuedEvent = tuple[TransportEvent, MemoryConnection | None]
"""An event, and the connection over which it arrived if it is a message, otherwise None."""


@dataclass(slots=True)
class _DialedAddress:
    """An address that an endpoint dials; `due_s` is the time of the next attempt after a refusal."""

    peer: PeerId
    due_s: float = float("-inf")
    attempt: int = 0

    def retry_later(self, now_s: float) -> None:
        self.due_s = now_s + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.attempt, 16))
        self.attempt += 1


class MemoryTransport:
    """An in-memory endpoint; implements `Transport`.  Addresses are "memory://name".

    Args:
        me: this endpoint's key.
        hub: the network shared with the other endpoints.
        gate: the access policy.  The threads of other endpoints also call the policy, while they hold the
            hub's lock, so the policy must be fast and must not call a transport.
        host: the address that other endpoints see as the origin of this endpoint's connections.
        upload_Bps: the upload cap in bytes per second; None for no cap.
    """

    def __init__(
        self,
        me: PeerId,
        hub: MemoryHub,
        *,
        gate: AccessPolicy = allow_all,
        host: str = "memory",
        upload_Bps: float | None = None,
    ) -> None:
        self.me = me
        self.access_policy = gate
        self.host = host
        self.traffic = TrafficCounters()
        self._hub = hub
        self._changed = threading.Condition(hub.lock)
        self._send_queue: SendQueue[Message] = SendQueue(UploadLimiter(upload_Bps))
        self._dialed: dict[str, _DialedAddress] = {}  # by address
        self._connections: dict[PeerId, MemoryConnection] = {}  # by the key of the other end
        self._mailbox: deque[_QueuedEvent] = deque()
        self._unread_bytes: dict[PeerId, int] = {}
        self._refused: set[PeerId] = set()  # senders waiting for space in the mailbox
        self._woken = self._closed = self._killed = False
        with hub.lock:
            hub.add_locked(self)

    # -- Transport -----------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        if not address.startswith("memory://") or address == "memory://":
            raise TransportError(f"{address!r} is not an in-memory address", remedy='use "memory://name"')
        with self._locked_alive():
            if address in self._hub.ports:
                raise TransportError(f"{address} is already in use", remedy="choose another name")
            self._hub.ports[address] = self
            self._hub.retry_locked()
        return address

    def dial(self, peer: PeerId, address: str) -> None:
        if peer == self.me:
            raise own_key_error(address)
        with self._locked_alive():
            if self._connected_locked(peer) or self._revive_locked(peer):
                return
            if address not in self._dialed or self._dialed[address].peer != peer:
                remaining = {
                    other: dialled for other, dialled in self._dialed.items() if dialled.peer != peer
                }
                self._dialed = {**remaining, address: _DialedAddress(peer)}
            self.connect_locked(time.monotonic())

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        with self._locked_alive():
            answer = ""
            for address in addresses[:MAX_ADDRESSES]:
                other = self._hub.reachable_locked(self, peer, address)
                if (
                    not answer
                    and other is not None
                    and access_control.is_admitted(other.access_policy, self.me)
                ):
                    answer = address
            self.post_locked(ReachResult(peer, answer))

    def hang_up(self, peer: PeerId) -> None:
        with self._locked_alive():
            self._dialed = {a: dialled for a, dialled in self._dialed.items() if dialled.peer != peer}
            link = self._connections.get(peer)
            for queued in self._send_queue.drain_control(peer):
                if link is None or not self._hub.deliver_locked(self, link, queued):
                    break
                self.traffic.count_sent(queued.kind, queued.nbytes)
            if link is not None and link.initiator is self:
                self._hub.close_locked(link, "the peer hung up", silent=self)
            elif link is not None:
                link.is_ignored = True
            self._forget_locked(peer)

    def connected(self, peer: PeerId) -> bool:
        with self._hub.lock:
            return self._connected_locked(peer)

    def send(self, peer: PeerId, message: Message, frames: Frames | None = None) -> None:
        message, nbytes = _decode_copy(codec.encode(message) if frames is None else frames)
        with self._locked_alive():
            if not self._connected_locked(peer):
                raise not_connected_error(peer)
            now_s = time.monotonic()
            kind = type(message).__name__
            self._send_queue.put(QueuedMessage(peer, kind, message, nbytes, is_bulk(message), now_s))
            self._flush_locked(now_s)

    def backlog_bytes(self, peer: PeerId) -> int:
        with self._hub.lock:
            return self._send_queue.backlog_bytes(peer)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        deadline_s = time.monotonic() + timeout_s
        with self._locked_alive():
            while True:
                now_s = time.monotonic()
                self.connect_locked(now_s)
                self._flush_locked(now_s)
                events = self._take_locked()
                if events or self._woken or now_s >= deadline_s:
                    self._woken = False
                    return events
                self._changed.wait(max(0.0, min(deadline_s, self._due_locked(now_s)) - now_s))
                self._check_alive()

    def wake(self) -> None:
        with self._hub.lock:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        deadline_s = time.monotonic() + CLOSE_S
        with self._hub.lock, contextlib.suppress(EndpointKilled):
            while not self._closed and not self._send_queue.is_empty() and time.monotonic() < deadline_s:
                self._flush_locked(time.monotonic())
                if not self._send_queue.is_empty():
                    wait_s = min(deadline_s, self._send_queue.due_s()) - time.monotonic()
                    self._changed.wait(max(0.0, wait_s))
            if not self._closed:
                self._hub.remove_locked(self, "the peer closed")
                self.stop_locked(killed=False)

    # -- called by the hub and by other endpoints ----------------------------------------------

    def connections_locked(self) -> list[MemoryConnection]:
        return list(self._connections.values())

    def post_locked(self, event: TransportEvent, link: MemoryConnection | None = None) -> None:
        if isinstance(event, Received):
            unread_bytes = self._unread_bytes.get(event.peer, 0)
            self._unread_bytes[event.peer] = unread_bytes + event.nbytes
        self._mailbox.append((event, link))
        self._changed.notify_all()

    def is_full_locked(self, link: MemoryConnection, nbytes: int) -> bool:
        source = link.other_end(self).me
        unread_bytes = self._unread_bytes.get(source, 0)
        full = unread_bytes > 0 and unread_bytes + nbytes > MAILBOX_BYTES
        if full:
            self._refused.add(source)
        return full

    def connect_locked(self, now_s: float, *, early: bool = False) -> None:
        """Connect to the dialled addresses that are due; with `early`, to all dialled addresses."""
        for address, dialled in self._dialed.items():
            if self._connections.get(dialled.peer) is not None or (now_s < dialled.due_s and not early):
                continue
            other = self._hub.reachable_locked(self, dialled.peer, address)
            if other is None:
                continue
            if self._hub.connect_locked(self, other):
                dialled.due_s, dialled.attempt = float("-inf"), 0
            else:
                dialled.retry_later(now_s)
                if not access_control.is_admitted(other.access_policy, self.me):
                    self.post_locked(ConnectionDenied(dialled.peer, address))

    def mailbox_freed_locked(self, peer: PeerId) -> None:
        """Resume sending to `peer`, whose mailbox has free space again."""
        self._send_queue.unblock(peer)
        self._changed.notify_all()

    def connection_made_locked(self, link: MemoryConnection, event: PeerUp) -> None:
        older = self._connections.get(event.peer)
        if older is not None:
            self._hub.close_locked(older, "replaced by a newer connection of the same peer")
        self._connections[event.peer] = link
        self.post_locked(event)

    def connection_lost_locked(self, link: MemoryConnection, reason: str | None) -> None:
        """Drop the connection and the messages queued for it.

        `PeerDown` is posted unless `reason` is None, which means that this endpoint has hung up.
        """
        peer, now_s = link.other_end(self).me, time.monotonic()
        if self._connections.get(peer) is not link:
            return
        del self._connections[peer]
        for dialled in self._dialed.values():
            if dialled.peer == peer:
                dialled.retry_later(now_s)
        self._send_queue.clear_peer(peer)
        if reason is not None:
            self.post_locked(PeerDown(peer, reason))

    def stop_locked(self, *, killed: bool) -> None:
        self._closed, self._killed = True, killed
        self._mailbox.clear()
        self._changed.notify_all()

    # -- internal ------------------------------------------------------------------------------

    def _locked_alive(self) -> threading.Condition:
        """Return the lock as a context manager.

        Raises:
            TransportError: the endpoint is closed.
            EndpointKilled: the endpoint was killed.
        """
        self._check_alive()
        return self._changed

    def _check_alive(self) -> None:
        if self._killed:
            raise EndpointKilled(f"endpoint {self.me.hex()[:8]} was killed")
        if self._closed:
            raise TransportError(f"endpoint {self.me.hex()[:8]} is closed")

    def _connected_locked(self, peer: PeerId) -> bool:
        link = self._connections.get(peer)
        return link is not None and not (link.is_ignored and link.acceptor is self)

    def _revive_locked(self, peer: PeerId) -> bool:
        """Resume using the peer's connection that `hang_up` left open.

        Returns False if there is no such connection, or if the peer is not admitted.
        """
        link = self._connections.get(peer)
        if link is None or not access_control.is_still_admitted(self.access_policy, peer, False):
            return False
        link.is_ignored = False
        self.post_locked(PeerUp(peer, SOFTWARE, link.initiator.host))
        return True

    def _flush_locked(self, now_s: float) -> None:
        while (queued := self._send_queue.take(now_s)) is not None:
            link = self._connections.get(queued.peer)  # if None, the message is lost with its connection
            if link is None or self._hub.deliver_locked(self, link, queued):
                self.traffic.count_sent(queued.kind, queued.nbytes)
            else:
                self._send_queue.put_back(queued)

    def _take_locked(self) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        while self._mailbox:
            event, link = self._mailbox.popleft()
            if isinstance(event, Received):
                self._read_locked(event)
                if link is not None and not self._is_still_admitted_locked(link):
                    continue
                self.traffic.count_received(type(event.message).__name__, event.nbytes)
            events.append(event)
        return events

    def _is_still_admitted_locked(self, link: MemoryConnection) -> bool:
        """Return whether the other end may still send; close the connection if its key is no longer
        admitted."""
        if not access_control.is_still_admitted(self.access_policy, link.other_end(self).me, False):
            self._hub.close_locked(link, "the peer's key is no longer admitted")
            return False
        return not (link.is_ignored and link.acceptor is self)

    def _read_locked(self, event: Received) -> None:
        self._unread_bytes[event.peer] -= event.nbytes
        if event.peer in self._refused:
            self._refused.discard(event.peer)
            if (link := self._connections.get(event.peer)) is not None:
                link.other_end(self).mailbox_freed_locked(self.me)

    def _due_locked(self, now_s: float) -> float:
        due_s = self._send_queue.due_s()
        for dialled in self._dialed.values():
            if dialled.peer not in self._connections and dialled.due_s > now_s:
                due_s = min(due_s, dialled.due_s)
        return due_s

    def _forget_locked(self, peer: PeerId) -> None:
        """Drop the messages queued for the peer, and its events in our mailbox except `ReachResult`."""
        self._send_queue.clear_peer(peer)
        remaining: deque[_QueuedEvent] = deque()
        for event, link in self._mailbox:
            if event.peer != peer or isinstance(event, ReachResult):
                remaining.append((event, link))
            elif isinstance(event, Received):
                self._read_locked(event)
        self._mailbox = remaining


def _decode_copy(frames: Frames) -> tuple[Message, int]:
    """Return the message as its receiver decodes it, with a copied payload, and the size of its frames in
    bytes."""
    header, *payload = frames
    return codec.decode([header, *map(bytes, payload)]), sum(map(len, frames))
