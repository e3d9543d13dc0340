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

from gridtrain.errors import TransportError
from gridtrain.protocol.messages import (
    Burst,
    Copy,
    Data,
    HandOver,
    ImageBlock,
    ImageTable,
    Message,
    PeerId,
    Relay,
    Relayed,
    StateBlock,
    Update,
)
from gridtrain.transport.limits import Pacer

DEFAULT_LIMIT_BYTES = 256 * 2**20
T = TypeVar("T")


SEALED_BULK = 3
"""First byte of a sealed payload whose inside is bulk (see `sealed`): all that a relay may know of it."""

MAX_SEALED_CONTROL_BYTES = 66 * 1024
"""No control message is longer when it is sealed; so nobody can make a relay send megabytes first."""


BULK = (Data, StateBlock, Copy, HandOver, ImageTable, ImageBlock, Update, Burst)


def is_bulk(message: Message) -> bool:
    """Bulk waits for the line; everything else is control and goes ahead of it."""
    if isinstance(message, BULK):
        return True
    if isinstance(message, (Relay, Relayed)):
        payload = message.payload
        return len(payload) > MAX_SEALED_CONTROL_BYTES or payload[:1] == bytes([SEALED_BULK])
    return False


@dataclass(frozen=True, slots=True)
class Parcel(Generic[T]):
    """One queued message: `body` is what the transport will write, `nbytes` its size on the wire."""

    peer: PeerId
    kind: str
    body: T
    nbytes: int
    bulk: bool
    queued_s: float


@dataclass(slots=True)
class _Lanes(Generic[T]):
    refused: deque[Parcel[T]] = field(default_factory=deque)
    control: deque[Parcel[T]] = field(default_factory=deque)
    bulk: deque[Parcel[T]] = field(default_factory=deque)
    nbytes: int = 0
    blocked: bool = False


class Outbox(Generic[T]):
    """All peers' queues behind one line.

    Args:
        pacer: the upload cap.
        limit_bytes: the most that may be queued for one peer.
    """

    def __init__(self, pacer: Pacer, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.pacer = pacer
        self._limit_bytes = limit_bytes
        self._lanes: dict[PeerId, _Lanes[T]] = {}  # only peers for which something is queued
        self._on_line: Parcel[T] | None = None
        self._release_s = 0.0

    def put(self, parcel: Parcel[T]) -> None:
        """Queue it.  Raises `TransportError` if the peer's queue would exceed its bound."""
        queued_bytes = self.backlog_bytes(parcel.peer)
        if queued_bytes + parcel.nbytes > self._limit_bytes:
            raise TransportError(
                f"the queue for peer {parcel.peer.hex()[:8]} is full: {queued_bytes} bytes wait, "
                f"{parcel.nbytes} more would exceed {self._limit_bytes}",
                remedy="the peer or the link is too slow for what is sent; treat the edge as failed",
            )
        lanes = self._lanes.setdefault(parcel.peer, _Lanes())
        (lanes.bulk if parcel.bulk else lanes.control).append(parcel)
        lanes.nbytes += parcel.nbytes

    def take(self, now_s: float) -> Parcel[T] | None:
        """The next message that may leave now, or None.  Write it, or give it to `refuse`."""
        parcel = self._take_refused() or self._take_control(now_s) or self._take_bulk(now_s)
        if parcel is not None:
            self._uncount(parcel)
        return parcel

    def refuse(self, parcel: Parcel[T]) -> None:
        """The socket would block: it stays first; nothing for this peer until `unblock`."""
        lanes = self._lanes.setdefault(parcel.peer, _Lanes())
        lanes.refused.appendleft(parcel)
        lanes.nbytes += parcel.nbytes
        lanes.blocked = True

    def unblock(self, peer: PeerId) -> None:
        if peer in self._lanes:
            self._lanes[peer].blocked = False

    def blocked(self) -> list[PeerId]:
        """Peers whose sockets are waited for."""
        return [peer for peer, lanes in self._lanes.items() if lanes.blocked]

    def drop(self, peer: PeerId) -> None:
        """Forget what is queued for `peer`."""
        self._lanes.pop(peer, None)
        if self._on_line is not None and self._on_line.peer == peer:
            self._on_line = None

    def last_words(self, peer: PeerId) -> list[Parcel[T]]:
        """Forget what is queued for `peer`, but for control messages: they are returned in their order."""
        lanes = self._lanes.get(peer)
        waiting = [] if lanes is None else [*lanes.refused, *lanes.control]
        self.drop(peer)
        return [parcel for parcel in waiting if not parcel.bulk]

    def backlog_bytes(self, peer: PeerId) -> int:
        return self._lanes[peer].nbytes if peer in self._lanes else 0

    def empty(self) -> bool:
        return not self._lanes

    def due_s(self) -> float:
        """When `take` will have something, as far as the cap decides it; infinite if it does not."""
        due_s = self._release_s if self._on_line is not None else float("inf")
        if any(lanes.control and not lanes.blocked for lanes in self._lanes.values()):
            due_s = min(due_s, self.pacer.control_free_s)
        return due_s

    # -- the lanes, in order of precedence -----------------------------------------------------

    def _take_refused(self) -> Parcel[T] | None:
        for lanes in self._lanes.values():
            if lanes.refused and not lanes.blocked:
                return lanes.refused.popleft()
        return None

    def _take_control(self, now_s: float) -> Parcel[T] | None:
        if now_s < self.pacer.control_free_s:
            return None
        for lanes in self._lanes.values():
            if lanes.control and not lanes.blocked:
                parcel = lanes.control.popleft()
                self.pacer.control(parcel.nbytes, now_s)
                return parcel
        return None

    def _take_bulk(self, now_s: float) -> Parcel[T] | None:
        """Serialise on the line; what comes off for a blocked peer waits among its refused."""
        while self._on_line is not None or self._load_line(now_s):
            assert self._on_line is not None
            if now_s < self._release_s:
                return None
            parcel, self._on_line = self._on_line, None
            lanes = self._lanes[parcel.peer]
            if not lanes.blocked:
                return parcel
            lanes.refused.append(parcel)
        return None

    def _load_line(self, now_s: float) -> bool:
        """Choose the next bulk message; its peer goes to the end of the turn."""
        for peer, lanes in self._lanes.items():
            if lanes.bulk and not lanes.blocked:
                self._on_line = lanes.bulk.popleft()
                self._release_s = self.pacer.bulk(self._on_line.nbytes, self._on_line.queued_s, now_s)
                self._lanes[peer] = self._lanes.pop(peer)
                return True
        return False

    def _uncount(self, parcel: Parcel[T]) -> None:
        lanes = self._lanes[parcel.peer]
        lanes.nbytes -= parcel.nbytes
        if lanes.nbytes == 0:
            del self._lanes[parcel.peer]
