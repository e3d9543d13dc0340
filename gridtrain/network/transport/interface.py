"""`Transport`, the interface between the loops and any network, and its events.

    I/O loop, coordinator daemon -- dial/send/poll --> Transport -- memory | ZeroMQ --> peers

A transport is owned by one thread, which alone calls every method except `wake`.  It names a peer by its
public key (`PeerId`), never by an address or a routing id, and `send` never blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gridtrain.core.messages import Message, PeerId


class ConnectionRole(Enum):
    """What the owner of a key may do."""

    STRANGER = "stranger"  # nothing: refused at the handshake, without an answer
    PENDING_MEMBER = "guest"  # holds an invitation, see `PeerUp.pending_key`
    MEMBER = "peer"


AccessPolicy = Callable[[PeerId], ConnectionRole]
"""Asked at every handshake and for every message, so that a change takes effect at once."""


def allow_all(key: PeerId) -> ConnectionRole:
    """Admits everybody: for groups within one process, and for tests."""
    return ConnectionRole.MEMBER


@dataclass(frozen=True, slots=True)
class Received:
    """A message within all bounds, from a peer that has greeted.  `nbytes`: of all of its frames."""

    peer: PeerId
    message: Message
    nbytes: int


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Both sides have greeted, and messages can be sent.  Repeated after a reconnect.

    Attributes:
        host: address of the other end, as seen from here; empty: we dialled.
        pending_key: the invitation's key, if the other side has proven nothing else.  `peer` is then a name
            that the transport invents for the connection, as several may hold one invitation.
    """

    peer: PeerId
    software: str = ""
    host: str = ""
    pending_key: PeerId | None = None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The connection broke.  The transport tries to reconnect if it dialled."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TransportViolation:
    """The peer sent something that is not a message; it was dropped.  `peer` None: it had not greeted."""

    peer: PeerId | None
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionDenied:
    """The dialled peer does not admit our key.  The transport retries with back-off."""

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class ReachResult:
    """Result of `Transport.reach`: the first address that answered with the peer's key; empty: none."""

    peer: PeerId
    address: str


TransportEvent = Received | PeerUp | PeerDown | TransportViolation | ConnectionDenied | ReachResult


@dataclass(slots=True)
class TrafficCounters:
    """Bytes and messages that entered or left the socket, by message type ("Data", "Vote", ...).

    Bytes include framing.
    """

    sent_bytes: dict[str, int] = field(default_factory=dict)
    sent_messages: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    received_messages: dict[str, int] = field(default_factory=dict)

    def count_sent(self, kind: str, nbytes: int) -> None:
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + nbytes
        self.sent_messages[kind] = self.sent_messages.get(kind, 0) + 1

    def count_received(self, kind: str, nbytes: int) -> None:
        self.received_bytes[kind] = self.received_bytes.get(kind, 0) + nbytes
        self.received_messages[kind] = self.received_messages.get(kind, 0) + 1


class Transport(Protocol):
    """Connections to peers, of one thread; only `wake` may be called by others."""

    me: PeerId
    traffic: TrafficCounters

    def listen(self, address: str) -> str:
        """Accept connections at `address` ("tcp://host:port", port 0 or "*": any free one).

        Returns the address that peers can dial.  Raises `TransportError` if it is taken or invalid.
        """
        ...

    def dial(self, peer: PeerId, address: str) -> None:
        """Connect, and reconnect with jittered back-off until `hang_up`.

        Only the holder of `peer`'s secret key can answer.  Does nothing if a connection to `peer` exists.
        `PeerUp` follows when both sides have greeted, `ConnectionDenied` if our key is not admitted.
        """
        ...

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Check with new connections whether `peer` can be dialled at one of these addresses.

        Exactly one `ReachResult` follows within `timeout_s`.  Existing connections are not affected."""
        ...

    def hang_up(self, peer: PeerId) -> None:
        """Close the connection that we dialled; drop what the peer sends until either side greets again.

        Messages that were sent before still leave.  If the access policy does not admit the peer any more,
        its next message closes the connection.  No `PeerDown` follows."""
        ...

    def connected(self, peer: PeerId) -> bool: ...

    def send(self, peer: PeerId, message: Message) -> None:
        """Queue a message.  Raises `TransportError` if the peer is not connected or its queue is full; the
        caller treats either as a failed connection.  Buffers in the message must not be written to until
        their round is over.

        Bulk (`send_queue.is_bulk`) arrives in the order sent, and so does control, but control may overtake
        bulk.  After `PeerDown` what was queued or under way may be lost."""
        ...

    def backlog_bytes(self, peer: PeerId) -> int:
        """Bytes queued for `peer` in this process."""
        ...

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """Wait at most `timeout_s` for events or a wake-up, and send what is due."""
        ...

    def wake(self) -> None:
        """Make a running or the next `poll` return at once.  Thread-safe."""
        ...

    def close(self) -> None:
        """Send what is queued for a bounded time, then release everything."""
        ...
