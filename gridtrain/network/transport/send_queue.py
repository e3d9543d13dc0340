"""Messages that wait to leave: bounded, fair between peers, in the order of the upload cap.

Decides which message leaves next.  Never touches a socket or a clock, and never opens a message.
Shared by the memory and the ZeroMQ transport.

                      +-- refused   the socket would not take it: first again, order kept
    put --> a peer's -+-- control   votes, heartbeats: before all bulk    --> take --> socket
            lanes     +-- bulk      Data, blocks of state, updates: peers in turn, one at a time on the line
                                    of the `Pacer`
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gridtrain.core.messages import (
    Burst,
    CheckpointBlock,
    Data,
    Message,
    PeerId,
    RelayedMessage,
    RelayRequest,
    ResidualBlock,
    SnapshotBlock,
    SnapshotDigests,
    StateBlock,
    UpdateLogEntry,
)
from gridtrain.errors import TransportError
from gridtrain.network.transport.rate_limiter import UploadLimiter

DEFAULT_LIMIT_BYTES = 256 * 2**20
T = TypeVar("T")


ENCRYPTED_BULK = 3
"""First byte of a sealed payload whose inside is bulk (see `sealed`): all that a relay may know of it."""

MAX_ENCRYPTED_CONTROL_BYTES = 66 * 1024
"""No control message is longer when it is sealed; so nobody can make a relay send megabytes first."""


BULK_MESSAGES = (
    Data,
    StateBlock,
    CheckpointBlock,
    ResidualBlock,
    SnapshotDigests,
    SnapshotBlock,
    UpdateLogEntry,
    Burst,
)


def is_bulk(message: Message) -> bool:
    """Bulk waits for the line; everything else is control and goes ahead of it."""
    if isinstance(message, BULK_MESSAGES):
        return True
    if isinstance(message, (RelayRequest, RelayedMessage)):
        payload = message.payload
        return len(payload) > MAX_ENCRYPTED_CONTROL_BYTES or payload[:1] == bytes([ENCRYPTED_BULK])
    return False


@dataclass(frozen=True, slots=True)
class QueuedMessage(Generic[T]):
    """One queued message: `body` is what the transport will write, `nbytes` its size on the wire."""

    peer: PeerId
    kind: str
    body: T
    nbytes: int
    is_bulk: bool
    queued_s: float


@dataclass(slots=True)
class _PeerQueues(Generic[T]):
    refused: deque[QueuedMessage[T]] = field(default_factory=deque)
    control: deque[QueuedMessage[T]] = field(default_factory=deque)
    bulk: deque[QueuedMessage[T]] = field(default_factory=deque)
    nbytes: int = 0
    is_blocked: bool = False


class SendQueue(Generic[T]):
    """All peers' queues behind one line.

    Args:
        pacer: the upload cap.
        limit_bytes: the most that may be queued for one peer.
    """

    def __init__(self, pacer: UploadLimiter, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limiter = pacer
        self._limit_bytes = limit_bytes
        self._queues: dict[PeerId, _PeerQueues[T]] = {}  # only peers for which something is queued
        self._in_transit: QueuedMessage[T] | None = None
        self._release_s = 0.0

    def put(self, parcel: QueuedMessage[T]) -> None:
        """Queue it.  Raises `TransportError` if the peer's queue would exceed its bound."""
        queued_bytes = self.backlog_bytes(parcel.peer)
        if queued_bytes + parcel.nbytes > self._limit_bytes:
            raise TransportError(
                f"the queue for peer {parcel.peer.hex()[:8]} is full: {queued_bytes} bytes wait, "
                f"{parcel.nbytes} more would exceed {self._limit_bytes}",
                remedy="the peer or the link is too slow for what is sent; treat the edge as failed",
            )
        lanes = self._queues.setdefault(parcel.peer, _PeerQueues())
        (lanes.bulk if parcel.is_bulk else lanes.control).append(parcel)
        lanes.nbytes += parcel.nbytes

    def take(self, now_s: float) -> QueuedMessage[T] | None:
        """The next message that may leave now, or None.  Write it, or give it to `refuse`."""
        parcel = self._take_refused() or self._take_control(now_s) or self._take_bulk(now_s)
        if parcel is not None:
            self._subtract_bytes(parcel)
        return parcel

    def put_back(self, parcel: QueuedMessage[T]) -> None:
        """The socket would block: it stays first; nothing for this peer until `unblock`."""
        lanes = self._queues.setdefault(parcel.peer, _PeerQueues())
        lanes.refused.appendleft(parcel)
        lanes.nbytes += parcel.nbytes
        lanes.is_blocked = True

    def unblock(self, peer: PeerId) -> None:
        if peer in self._queues:
            self._queues[peer].is_blocked = False

    def blocked_peers(self) -> list[PeerId]:
        """Peers whose sockets are waited for."""
        return [peer for peer, lanes in self._queues.items() if lanes.is_blocked]

    def clear_peer(self, peer: PeerId) -> None:
        """Forget what is queued for `peer`."""
        self._queues.pop(peer, None)
        if self._in_transit is not None and self._in_transit.peer == peer:
            self._in_transit = None

    def drain_control(self, peer: PeerId) -> list[QueuedMessage[T]]:
        """Forget what is queued for `peer`, but for control messages: they are returned in their order."""
        lanes = self._queues.get(peer)
        waiting = [] if lanes is None else [*lanes.refused, *lanes.control]
        self.clear_peer(peer)
        return [parcel for parcel in waiting if not parcel.is_bulk]

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._queues[peer].nbytes if peer in self._queues else 0

    def is_empty(self) -> bool:
        return not self._queues

    def due_s(self) -> float:
        """When `take` will have something, as far as the cap decides it; infinite if it does not."""
        due_s = self._release_s if self._in_transit is not None else float("inf")
        if any(lanes.control and not lanes.is_blocked for lanes in self._queues.values()):
            due_s = min(due_s, self.limiter.control_free_s)
        return due_s

    # -- the lanes, in order of precedence -----------------------------------------------------

    def _take_refused(self) -> QueuedMessage[T] | None:
        for lanes in self._queues.values():
            if lanes.refused and not lanes.is_blocked:
                return lanes.refused.popleft()
        return None

    def _take_control(self, now_s: float) -> QueuedMessage[T] | None:
        if now_s < self.limiter.control_free_s:
            return None
        for lanes in self._queues.values():
            if lanes.control and not lanes.is_blocked:
                parcel = lanes.control.popleft()
                self.limiter.charge_control(parcel.nbytes, now_s)
                return parcel
        return None

    def _take_bulk(self, now_s: float) -> QueuedMessage[T] | None:
        """Serialise on the line; what comes off for a blocked peer waits among its refused."""
        while self._in_transit is not None or self._start_next_bulk(now_s):
            assert self._in_transit is not None
            if now_s < self._release_s:
                return None
            parcel, self._in_transit = self._in_transit, None
            lanes = self._queues[parcel.peer]
            if not lanes.is_blocked:
                return parcel
            lanes.refused.append(parcel)
        return None

    def _start_next_bulk(self, now_s: float) -> bool:
        """Choose the next bulk message; its peer goes to the end of the turn."""
        for peer, lanes in self._queues.items():
            if lanes.bulk and not lanes.is_blocked:
                self._in_transit = lanes.bulk.popleft()
                self._release_s = self.limiter.schedule_bulk(
                    self._in_transit.nbytes, self._in_transit.queued_s, now_s
                )
                self._queues[peer] = self._queues.pop(peer)
                return True
        return False

    def _subtract_bytes(self, parcel: QueuedMessage[T]) -> None:
        lanes = self._queues[parcel.peer]
        lanes.nbytes -= parcel.nbytes
        if lanes.nbytes == 0:
            del self._queues[parcel.peer]
