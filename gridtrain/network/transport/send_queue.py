"""Bounded queues of messages to send: control before bulk, peers in turn, within the upload limit.

Pure: uses no socket; times are passed as arguments.  Used by the in-memory transport and the ZeroMQ
transport.

                       +-- refused   the socket was full: sent first, in order
    put --> queues of -+-- control   votes, heartbeats: sent before all bulk   --> take --> socket
            each peer  +-- bulk      Data, blocks of state, updates: one message at a time, peers in turn, as
                                     the `UploadLimiter` permits
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

QUEUE_LIMIT_BYTES = 256 * 2**20
"""The maximum number of bytes that may be queued for one peer, not counting libzmq's queue."""
T = TypeVar("T")


ENCRYPTED_BULK = 3
"""The first byte of an encrypted packet with a bulk message; a relay learns nothing else of the content."""

MAX_ENCRYPTED_CONTROL_BYTES = 130 * 1024
"""The maximum size of an encrypted control packet.  Larger packets count as bulk messages, so that no peer
can make a relay send megabytes as control."""


BULK_MESSAGES = frozenset(
    {
        Data,
        StateBlock,
        CheckpointBlock,
        ResidualBlock,
        SnapshotDigests,
        SnapshotBlock,
        UpdateLogEntry,
        Burst,
    }
)


def is_bulk(message: Message) -> bool:
    """Return whether this is a bulk message, which waits for the rate cap and for control messages."""
    if type(message) in BULK_MESSAGES:
        return True
    if isinstance(message, (RelayRequest, RelayedMessage)):
        payload = message.payload
        return len(payload) > MAX_ENCRYPTED_CONTROL_BYTES or payload[:1] == bytes([ENCRYPTED_BULK])
    return False


@dataclass(frozen=True, slots=True)
class QueuedMessage(Generic[T]):
    """A message in the queue.

    Attributes:
        kind: the name of the message type, for the traffic counters.
        body: the message in the form that the transport writes.
        nbytes: the size of the message on the wire; in the in-memory transport, the size of its frames.
        queued_s: the time at which the message was queued.
    """

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
    """The queues of all peers, which share one rate cap.

    Args:
        limiter: the upload cap.
    """

    def __init__(self, limiter: UploadLimiter) -> None:
        self.limiter = limiter
        self._queues: dict[PeerId, _PeerQueues[T]] = {}  # only peers with queued messages
        self._in_transit: QueuedMessage[T] | None = None
        self._release_s = 0.0

    def put(self, message: QueuedMessage[T]) -> None:
        """Queue a message; raise `TransportError` if the peer's queue would exceed its limit."""
        queued_bytes = self.backlog_bytes(message.peer)
        if queued_bytes + message.nbytes > QUEUE_LIMIT_BYTES:
            raise TransportError(
                f"the queue for peer {message.peer.hex()[:8]} is full: {queued_bytes} bytes wait, and "
                f"{message.nbytes} more would exceed the limit of {QUEUE_LIMIT_BYTES}",
                remedy="treat the connection as failed, because the peer or the link is too slow",
            )
        queues = self._queues.setdefault(message.peer, _PeerQueues())
        (queues.bulk if message.is_bulk else queues.control).append(message)
        queues.nbytes += message.nbytes

    def take(self, now_s: float) -> QueuedMessage[T] | None:
        """Remove and return the next message that may be sent now, or None if there is no such message.

        The caller must write the message to the socket or return it with `put_back`.
        """
        self._release_s = self.limiter.apply_rate(self._release_s, now_s)
        message = self._take_refused() or self._take_control(now_s) or self._take_bulk(now_s)
        if message is not None:
            self._subtract_bytes(message)
        return message

    def put_back(self, message: QueuedMessage[T]) -> None:
        """Return a message to the head of its queue, because the socket is full and has refused it.

        No message is sent to this peer until `unblock` is called.
        """
        queues = self._queues.setdefault(message.peer, _PeerQueues())
        queues.refused.appendleft(message)
        queues.nbytes += message.nbytes
        queues.is_blocked = True

    def unblock(self, peer: PeerId) -> None:
        if peer in self._queues:
            self._queues[peer].is_blocked = False

    def blocked_peers(self) -> list[PeerId]:
        """Return the peers whose sockets are full."""
        return [peer for peer, queues in self._queues.items() if queues.is_blocked]

    def clear_peer(self, peer: PeerId) -> None:
        """Drop all messages that are queued for `peer`."""
        self._queues.pop(peer, None)
        if self._in_transit is not None and self._in_transit.peer == peer:
            self._in_transit = None

    def drain_control(self, peer: PeerId) -> list[QueuedMessage[T]]:
        """Drop all messages that are queued for `peer`; return its control messages in order."""
        queues = self._queues.get(peer)
        waiting = [] if queues is None else [*queues.refused, *queues.control]
        self.clear_peer(peer)
        return [message for message in waiting if not message.is_bulk]

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._queues[peer].nbytes if peer in self._queues else 0

    def is_empty(self) -> bool:
        return not self._queues

    def due_s(self) -> float:
        """Return the time at which the cap permits the next message; infinity if no message is waiting."""
        due_s = self._release_s if self._in_transit is not None else float("inf")
        if any(queues.control and not queues.is_blocked for queues in self._queues.values()):
            due_s = min(due_s, self.limiter.control_free_s)
        return due_s

    # -- in order of precedence -----------------------------------------------------------------

    def _take_refused(self) -> QueuedMessage[T] | None:
        for queues in self._queues.values():
            if queues.refused and not queues.is_blocked:
                return queues.refused.popleft()
        return None

    def _take_control(self, now_s: float) -> QueuedMessage[T] | None:
        if now_s < self.limiter.control_free_s:
            return None
        for queues in self._queues.values():
            if queues.control and not queues.is_blocked:
                message = queues.control.popleft()
                self.limiter.charge_control(message.nbytes, now_s)
                return message
        return None

    def _take_bulk(self, now_s: float) -> QueuedMessage[T] | None:
        """Return the next bulk message that is due, or None if no message is due.

        Bulk messages are sent one at a time.  If the peer of a message that is due is blocked, the message is
        moved to the refused messages of that peer.
        """
        while self._in_transit is not None or self._start_next_bulk(now_s):
            assert self._in_transit is not None
            if now_s < self._release_s:
                return None
            message, self._in_transit = self._in_transit, None
            queues = self._queues[message.peer]
            if not queues.is_blocked:
                return message
            queues.refused.append(message)
        return None

    def _start_next_bulk(self, now_s: float) -> bool:
        """Choose the next bulk message and move its peer to the end of the rotation.

        Returns False if there is no message to choose.
        """
        for peer, queues in self._queues.items():
            if queues.bulk and not queues.is_blocked:
                self._in_transit = queues.bulk.popleft()
                self._release_s = self.limiter.schedule_bulk(
                    self._in_transit.nbytes, self._in_transit.queued_s, now_s
                )
                self._queues[peer] = self._queues.pop(peer)
                return True
        return False

    def _subtract_bytes(self, message: QueuedMessage[T]) -> None:
        queues = self._queues[message.peer]
        queues.nbytes -= message.nbytes
        if queues.nbytes == 0:
            del self._queues[message.peer]
