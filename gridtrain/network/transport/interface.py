"""Defines `Transport`, the interface between the loops and a network, and its events.

    I/O loop, coordinator daemon -- dial/send/poll --> Transport -- memory | ZeroMQ --> peers

A transport is owned by one thread; only this thread may call its methods, except for `wake`.  A peer is named
by its public key (`PeerId`), never by an address or a routing id.  `send` never blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gridtrain.core.messages import Message, PeerId
from gridtrain.errors import TransportError

Frames = list[bytes | memoryview]
"""An encoded message: its header, and the payload if it has one."""


class ConnectionRole(Enum):
    """The role in which the owner of a key may connect."""

    STRANGER = "stranger"  # may not connect: the handshake is refused without an answer
    PENDING_MEMBER = "guest"  # holds an invitation; see `PeerUp.pending_key`
    MEMBER = "peer"


AccessPolicy = Callable[[PeerId], ConnectionRole]
"""Returns the role of a key.  The policy is called at every handshake and for every message, so that a change
takes effect immediately."""


def allow_all(key: PeerId) -> ConnectionRole:
    """Admit every key; this policy is used for groups within one process and for tests."""
    return ConnectionRole.MEMBER


@dataclass(frozen=True, slots=True)
class Received:
    """Event: a valid message has arrived from a peer that has sent Hello.

    Attributes:
        nbytes: the size of the message's frames, excluding the overhead of a transport or a relay.
    """

    peer: PeerId
    message: Message
    nbytes: int


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Event: both sides have sent Hello, so messages can be sent.  The event is repeated after a reconnect.

    Attributes:
        host: the IP address of the other end as this side sees it; empty if unknown.
        pending_key: the invitation's key if the other side authenticated only with that key, otherwise None.
            If it is set, `peer` is a name that the transport generates for the connection, because several
            peers may hold the same invitation.
    """

    peer: PeerId
    software: str = ""
    host: str = ""
    pending_key: PeerId | None = None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Event: the connection broke.  If this side dialled, the transport tries to reconnect."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TransportViolation:
    """Event: data that violated the protocol or exceeded a limit arrived and were dropped.

    Attributes:
        peer: the peer that sent the data; None if the sender is not known for certain.
    """

    peer: PeerId | None
    reason: str


@dataclass(frozen=True, slots=True)
class VersionMismatch(TransportViolation):
    """Event: a peer uses another version of the protocol; its connection was not accepted.

    Attributes:
        key: the peer's key, or that of its invitation.
        host: with an invitation, which several peers may hold: see `PeerUp`; otherwise empty.
        version: the version of the protocol that the peer uses.
        software: the peer's software.
    """

    key: PeerId
    host: str
    version: int
    software: str


@dataclass(frozen=True, slots=True)
class ConnectionDenied:
    """Event: the dialled peer does not admit our key.  The transport dials again after a back-off."""

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class ReachResult:
    """Event: the result of `Transport.reach`.

    Attributes:
        address: the first address at which the peer has answered; "" if it has answered at none.
    """

    peer: PeerId
    address: str


TransportEvent = Received | PeerUp | PeerDown | TransportViolation | ConnectionDenied | ReachResult


RELAYED_PIECE = "a piece of a message"


@dataclass(slots=True)
class TrafficCounters:
    """The bytes and messages sent and received through the socket, by message type ("Data", "Vote", ...).

    Bytes include framing.

    Attributes:
        relayed_sent_bytes, relayed_received_bytes: the bytes, without framing, of the messages that this peer
            itself exchanged through a relay, by the type of the message inside; packets that this peer
            forwards for others are not counted.  In addition, received pieces that do not yet
            complete a message are counted as `RELAYED_PIECE`.
    """

    sent_bytes: dict[str, int] = field(default_factory=dict)
    sent_messages: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    received_messages: dict[str, int] = field(default_factory=dict)
    relayed_sent_bytes: Counter[str] = field(default_factory=Counter)
    relayed_received_bytes: Counter[str] = field(default_factory=Counter)

    def count_sent(self, kind: str, nbytes: int) -> None:
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + nbytes
        self.sent_messages[kind] = self.sent_messages.get(kind, 0) + 1

    def count_received(self, kind: str, nbytes: int) -> None:
        self.received_bytes[kind] = self.received_bytes.get(kind, 0) + nbytes
        self.received_messages[kind] = self.received_messages.get(kind, 0) + 1


def not_connected_error(peer: PeerId) -> TransportError:
    return TransportError(
        f"peer {peer.hex()[:8]} is not connected", remedy="wait for the peer's PeerUp before sending"
    )


def own_key_error(address: str) -> TransportError:
    return TransportError(
        f"cannot dial {address}: the peer's key is our own key",
        remedy="remove this worker from the list of peers",
    )


class Transport(Protocol):
    """The connections to peers, owned by one thread; other threads may call only `wake`."""

    me: PeerId
    traffic: TrafficCounters

    def listen(self, address: str) -> str:
        """Accept connections at `address` ("tcp://host:port"; port 0 or "*" stands for any free port).

        Returns the address that peers can dial.  Raises `TransportError` if the address is taken or invalid,
        or is not allowed without encryption.
        """

    def dial(self, peer: PeerId, address: str) -> None:
        """Connect to `peer`, and reconnect with jittered back-off until `hang_up`.

        Only the holder of `peer`'s secret key can answer.  If a connection to `peer` exists, this method does
        nothing.  `PeerUp` follows when both sides have sent Hello, or `ConnectionDenied` if our key is not
        admitted.  Raises `TransportError` if `peer` is our own key, or the address cannot be used.
        """

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Check, by making new connections, whether `peer` can be dialled at one of these addresses.

        Exactly one `ReachResult` follows within `timeout_s`.  Existing connections are not affected."""

    def hang_up(self, peer: PeerId) -> None:
        """Close the connection if we dialled it, and drop the peer's messages until the next `PeerUp`.

        Control messages that are already queued are still sent.  If the peer dialled and the access policy no
        longer admits it, its next message closes the connection.  No `PeerDown` follows."""

    def connected(self, peer: PeerId) -> bool: ...

    def send(self, peer: PeerId, message: Message, frames: Frames | None = None) -> None:
        """Queue a message; `frames` is the encoded message if the caller has already encoded it.

        Raises `TransportError` if the peer is not connected or its queue is full; the caller should treat
        both cases as a failed connection.  Buffers in the message must not be written to until their round is
        over.

        Bulk messages (`send_queue.is_bulk`) arrive in the order in which they were sent, and so do control
        messages, but control messages may overtake bulk messages.  At `PeerDown`, messages that were queued
        or in transit may be lost."""

    def backlog_bytes(self, peer: PeerId) -> int:
        """Return the number of bytes queued for `peer` in this process."""

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """Wait at most `timeout_s` for events or a call to `wake`, and send the messages that are due.

        Returns the events.  The list may be empty, even before the timeout, if a layer of the transport has
        consumed everything that arrived.
        """

    def wake(self) -> None:
        """Make the current call to `poll`, or the next one, return immediately.  Thread-safe."""

    def close(self) -> None:
        """Send queued messages for a bounded time, then release all resources."""
