"""The transport inside one process: for `gridtrain.local` groups and for tests, with faults.

Decides nothing about messages.  Never opens a socket.  A message goes through the codec all the same,
so that what could not travel fails here as it would there; payload buffers are copied to bytes, so that
a sender cannot change what was received.

    thread A: MemoryTransport --send--> outbox --flush--> [MemoryHub: faults] --> B's mailbox
                                                                                    |
    thread B: MemoryTransport <-------------------- poll ---------------------------+

An outbox (bounded) empties into the peer's mailbox (bounded) as far as the upload cap and the room
there allow: the same two queues, and the same backpressure, as over a socket.  Connections come up
at once or, when the other end is absent or the edge is cut, when that changes: no timers.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gridtrain.errors import GridtrainError, TransportError
from gridtrain.protocol.messages import Message, PeerId
from gridtrain.transport.base import PeerDown, PeerUp, Received, Traffic, TransportEvent, Violation
from gridtrain.transport.faults import Fault, FaultPlan
from gridtrain.transport.limits import Meter, Pacer
from gridtrain.transport.outbox import DEFAULT_LIMIT_BYTES, Outbox, Parcel, is_bulk
from gridtrain.wire import codec

__all__ = ["EndpointKilled", "Fault", "FaultPlan", "MemoryHub", "MemoryTransport"]

MAILBOX_BYTES = 16 * 2**20
"""What one peer may have lying unread in another's mailbox, as a socket's buffers would."""

CLOSE_S = 1.0


class EndpointKilled(GridtrainError):
    """The fault plan killed this endpoint: its thread should end without another word."""


@dataclass(slots=True)
class _Edge:
    """A connection.  `deaf`: who accepted it and has hung up since."""

    dialler: PeerId
    deaf: set[PeerId] = field(default_factory=set)


class MemoryHub:
    """The network that the endpoints of one process share.  Thread-safe.

    Args:
        plan: faults to apply to messages; None: none.
    """

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self.lock = threading.Lock()
        self.endpoints: dict[PeerId, MemoryTransport] = {}
        self.ports: dict[str, MemoryTransport] = {}
        self._edges: dict[frozenset[PeerId], _Edge] = {}
        self._cuts: set[frozenset[PeerId]] = set()

    # -- faults by hand, from any thread -------------------------------------------------------

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Break the edge and keep it broken until `heal`; both ends see `PeerDown`."""
        with self.lock:
            self.cut_locked(a, b)

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Whoever dialled is connected again."""
        with self.lock:
            self._cuts.discard(frozenset((a, b)))
            self.retry_locked()

    def kill(self, peer: PeerId) -> None:
        """As SIGKILL: peers see `PeerDown`, the endpoint's own calls raise `EndpointKilled`."""
        with self.lock:
            self.kill_locked(peer)

    # -- for the endpoints, which hold the lock ------------------------------------------------

    def edge_locked(self, a: PeerId, b: PeerId) -> _Edge | None:
        return self._edges.get(frozenset((a, b)))

    def cut_locked(self, a: PeerId, b: PeerId) -> None:
        self._cuts.add(frozenset((a, b)))
        self.break_locked(a, b, "the edge was cut")

    def kill_locked(self, peer: PeerId) -> None:
        endpoint = self.endpoints.get(peer)
        if endpoint is not None:
            self.remove_locked(endpoint, "the peer was killed")
            endpoint.stop_locked(killed=True)

    def remove_locked(self, endpoint: MemoryTransport, reason: str) -> None:
        """The endpoint is gone: its addresses are free, its edges break."""
        self.ports = {address: other for address, other in self.ports.items() if other is not endpoint}
        if self.endpoints.get(endpoint.me) is endpoint:
            del self.endpoints[endpoint.me]
            for pair in [pair for pair in self._edges if endpoint.me in pair]:
                (other,) = pair - {endpoint.me}
                self.break_locked(endpoint.me, other, reason)

    def break_locked(self, a: PeerId, b: PeerId, reason: str) -> None:
        edge = self._edges.pop(frozenset((a, b)), None)
        if edge is not None:
            for me, peer in ((a, b), (b, a)):
                if me in self.endpoints:
                    self.endpoints[me].edge_lost_locked(peer, None if me in edge.deaf else reason)

    def retry_locked(self) -> None:
        for endpoint in list(self.endpoints.values()):
            endpoint.connect_locked()

    def join_locked(self, dialler: MemoryTransport, peer: PeerId | None, address: str) -> PeerId | None:
        """Connect if it is possible now; returns the key of whoever is there."""
        other = self.ports.get(address)
        if other is None or frozenset((dialler.me, other.me)) in self._cuts:
            return peer
        if peer not in (None, other.me) or other is dialler:
            dialler.post_locked(Violation(peer, f"{address} answers with key {other.me.hex()[:8]}"))
            return peer
        edge = self.edge_locked(dialler.me, other.me)
        if edge is None:
            self._edges[frozenset((dialler.me, other.me))] = _Edge(dialler.me)
            dialler.post_locked(PeerUp(other.me, other.software))
            other.post_locked(PeerUp(dialler.me, dialler.software))
        elif dialler.me in edge.deaf:
            edge.deaf.discard(dialler.me)
            dialler.post_locked(PeerUp(other.me, other.software))
        return other.me

    def carry_locked(self, source: MemoryTransport, parcel: Parcel[Message], now_s: float) -> bool:
        """Deliver, as the plan says; False: the mailbox is full, try again when it was emptied."""
        edge = self.edge_locked(source.me, parcel.peer)
        target = self.endpoints.get(parcel.peer)
        if edge is None or target is None:
            return True  # lost with its edge, as `PeerDown` tells the sender
        if target.full_locked(source.me, parcel.nbytes):
            return False
        fate = self.plan.fate(source.me, parcel.peer, parcel.kind)
        if fate.kill:
            self.kill_locked(source.me)
            raise EndpointKilled(f"endpoint {source.me.hex()[:8]} was killed by the fault plan")
        if fate.cut:
            self.cut_locked(source.me, parcel.peer)
        if target.me not in edge.deaf:
            for delay_s in fate.delays_s:
                event = Received(source.me, parcel.body, parcel.nbytes)
                target.post_locked(event, now_s + delay_s)
        return True


class MemoryTransport:
    """One endpoint; implements `Transport`.  Addresses are "memory://name".

    Args:
        me: this endpoint's key.
        hub: the network, shared with the other endpoints.
        upload_Bps, download_Bps: rate caps in bytes per second; None: none.
        outbox_bytes: the most that may be queued for one peer.
    """

    def __init__(
        self,
        me: PeerId,
        hub: MemoryHub,
        *,
        software: str = "gridtrain",
        upload_Bps: float | None = None,
        download_Bps: float | None = None,
        outbox_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> None:
        self.me = me
        self.software = software
        self.traffic = Traffic()
        self._hub = hub
        self._changed = threading.Condition(hub.lock)
        self._outbox: Outbox[Message] = Outbox(Pacer(upload_Bps), outbox_bytes)
        self._meter = Meter(download_Bps)
        self._dialled: dict[str, PeerId | None] = {}
        self._mailbox: list[tuple[float, int, TransportEvent]] = []  # a heap: due, order, event
        self._order = itertools.count()
        self._unread_bytes: dict[PeerId, int] = {}
        self._refused: set[PeerId] = set()  # senders to be told when there is room
        self._woken = self._closed = self._killed = False
        with hub.lock:
            hub.endpoints[me] = self

    # -- the contract --------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        if not address.startswith("memory://") or address == "memory://":
            raise TransportError(f"{address!r} is no memory address", remedy='write "memory://name"')
        with self._alive():
            if address in self._hub.ports:
                raise TransportError(f"{address} is taken", remedy="choose another name")
            self._hub.ports[address] = self
            self._hub.retry_locked()
        return address

    def dial(self, peer: PeerId | None, address: str) -> None:
        with self._alive():
            if peer is None or not self._connected_locked(peer):
                kept = {other: key for other, key in self._dialled.items() if peer is None or key != peer}
                self._dialled = {**kept, address: peer}
                self.connect_locked()

    def hang_up(self, peer: PeerId) -> None:
        with self._alive():
            self._dialled = {address: key for address, key in self._dialled.items() if key != peer}
            edge = self._hub.edge_locked(self.me, peer)
            if edge is not None:
                edge.deaf.add(self.me)
                if edge.dialler == self.me:
                    self._hub.break_locked(self.me, peer, "the peer hung up")
            self._forget_locked(peer, lambda due_s: True)

    def connected(self, peer: PeerId) -> bool:
        with self._hub.lock:
            return self._connected_locked(peer)

    def send(self, peer: PeerId, message: Message) -> None:
        message, nbytes = _through_the_codec(message)
        with self._alive():
            if not self._connected_locked(peer):
                raise TransportError(
                    f"peer {peer.hex()[:8]} is not connected", remedy="wait for its PeerUp before sending"
                )
            now_s = time.monotonic()
            kind = type(message).__name__
            self._outbox.put(Parcel(peer, kind, message, nbytes, is_bulk(message), now_s))
            self._flush_locked(now_s)

    def backlog_bytes(self, peer: PeerId) -> int:
        with self._hub.lock:
            return self._outbox.backlog_bytes(peer)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        deadline_s = time.monotonic() + timeout_s
        with self._alive():
            while True:
                now_s = time.monotonic()
                self._flush_locked(now_s)
                events = self._take_locked(now_s)
                if events or self._woken or now_s >= deadline_s:
                    self._woken = False
                    return events
                self._changed.wait(max(0.0, min(deadline_s, self._due_locked()) - now_s))
                self._check_alive()

    def wake(self) -> None:
        with self._hub.lock:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        deadline_s = time.monotonic() + CLOSE_S
        with self._hub.lock, contextlib.suppress(EndpointKilled):
            while not self._closed and not self._outbox.empty() and time.monotonic() < deadline_s:
                self._flush_locked(time.monotonic())
                if not self._outbox.empty():
                    wait_s = min(deadline_s, self._outbox.due_s()) - time.monotonic()
                    self._changed.wait(max(0.0, wait_s))
            if not self._closed:
                self._hub.remove_locked(self, "the peer closed")
                self.stop_locked(killed=False)

    # -- called by the hub, under its lock -----------------------------------------------------

    def post_locked(self, event: TransportEvent, due_s: float = float("-inf")) -> None:
        if isinstance(event, Received):
            unread_bytes = self._unread_bytes.get(event.peer, 0)
            self._unread_bytes[event.peer] = unread_bytes + event.nbytes
        due_s = max(due_s, time.monotonic())
        heapq.heappush(self._mailbox, (due_s, next(self._order), event))
        self._changed.notify_all()

    def full_locked(self, source: PeerId, nbytes: int) -> bool:
        unread_bytes = self._unread_bytes.get(source, 0)
        full = unread_bytes > 0 and unread_bytes + nbytes > MAILBOX_BYTES
        if full:
            self._refused.add(source)
        return full

    def connect_locked(self) -> None:
        for address, peer in list(self._dialled.items()):
            self._dialled[address] = self._hub.join_locked(self, peer, address)

    def room_locked(self, peer: PeerId) -> None:
        """`peer` has read from its mailbox."""
        self._outbox.unblock(peer)
        self._changed.notify_all()

    def edge_lost_locked(self, peer: PeerId, reason: str | None) -> None:
        """What was still on its way is lost; `reason` None: we had hung up, nobody is told."""
        now_s = time.monotonic()
        self._forget_locked(peer, lambda due_s: due_s > now_s)
        if reason is not None:
            self.post_locked(PeerDown(peer, reason))

    def stop_locked(self, *, killed: bool) -> None:
        self._closed, self._killed = True, killed
        self._mailbox.clear()
        self._changed.notify_all()

    # -- inside --------------------------------------------------------------------------------

    def _alive(self) -> threading.Condition:
        """The lock, for a call of an endpoint that is neither closed nor killed."""
        self._check_alive()
        return self._changed

    def _check_alive(self) -> None:
        if self._killed:
            raise EndpointKilled(f"endpoint {self.me.hex()[:8]} was killed")
        if self._closed:
            raise TransportError(f"endpoint {self.me.hex()[:8]} is closed")

    def _connected_locked(self, peer: PeerId) -> bool:
        edge = self._hub.edge_locked(self.me, peer)
        return edge is not None and self.me not in edge.deaf

    def _flush_locked(self, now_s: float) -> None:
        while (parcel := self._outbox.take(now_s)) is not None:
            if self._hub.carry_locked(self, parcel, now_s):
                self.traffic.count_sent(parcel.kind, parcel.nbytes)
            else:
                self._outbox.refuse(parcel)

    def _take_locked(self, now_s: float) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        while self._mailbox and self._mailbox[0][0] <= now_s and self._meter.may_read(now_s):
            event = heapq.heappop(self._mailbox)[2]
            events.append(event)
            if isinstance(event, Received):
                self.traffic.count_received(type(event.message).__name__, event.nbytes)
                self._meter.charge(event.nbytes, now_s)
                self._read_locked(event)
        return events

    def _read_locked(self, event: Received) -> None:
        self._unread_bytes[event.peer] -= event.nbytes
        if event.peer in self._refused:
            self._refused.discard(event.peer)
            if event.peer in self._hub.endpoints:
                self._hub.endpoints[event.peer].room_locked(self.me)

    def _due_locked(self) -> float:
        due_s = self._outbox.due_s()
        if self._mailbox:
            due_s = min(due_s, max(self._mailbox[0][0], self._meter.free_s))
        return due_s

    def _forget_locked(self, peer: PeerId, lost: Callable[[float], bool]) -> None:
        """Drop what is queued for the peer, and its undelivered messages whose due time is `lost`."""
        self._outbox.drop(peer)
        kept = []
        for due_s, order, event in self._mailbox:
            if event.peer == peer and lost(due_s):
                if isinstance(event, Received):
                    self._read_locked(event)
            else:
                kept.append((due_s, order, event))
        heapq.heapify(kept)
        self._mailbox = kept


def _through_the_codec(message: Message) -> tuple[Message, int]:
    """The message as its receiver will read it, with a payload of its own, and its size without framing.

    Raises `LocalProtocolError` if it is out of bounds.
    """
    header, *payload = codec.encode(message)
    frames = [header, *map(bytes, payload)]
    return codec.decode(frames), sum(map(len, frames))
