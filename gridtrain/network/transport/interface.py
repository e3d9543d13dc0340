"""The narrow waist between our loops and any network.

A `Transport` is owned by one thread, which alone calls every method except `wake`.  It names a
peer by its public key (`PeerId`), never by an address or a routing id, and never blocks in `send`.

    loop (driver, daemon) -- dial/send/poll --> Transport -- memory | ZeroMQ --> peers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gridtrain.core.messages import Message, PeerId


class ConnectionRole(Enum):
    """What a key that wants to connect may do."""

    STRANGER = "stranger"  # nothing: it is refused at the handshake, and learns nothing
    PENDING_MEMBER = "guest"  # it belongs to an invitation: see `PeerUp.guest_of`
    MEMBER = "peer"


AccessPolicy = Callable[[PeerId], ConnectionRole]
"""Asked at every handshake and for every message, so that an answer that changes works at once."""


def allow_all(key: PeerId) -> ConnectionRole:
    """Everybody is a peer: for groups within one process, and for tests."""
    return ConnectionRole.MEMBER


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded, bounds-checked message from a greeted peer.  `nbytes` counts all of its frames."""

    peer: PeerId
    message: Message
    nbytes: int


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Both sides have greeted; messages can flow.  Comes again after a reconnect.

    Attributes:
        host: where the connection comes from, as seen from here; empty: we dialled.
        guest_of: the invitation's key, if that is all that the other side could show.  `peer` is then
            a name that the transport invents for the connection, as many may hold one invitation.
    """

    peer: PeerId
    software: str = ""
    host: str = ""
    pending_key: PeerId | None = None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The connection broke.  Not a departure: the transport goes on reconnecting if it dialled."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TransportViolation:
    """The peer sent something that is no message; it was dropped.  peer None: it had not greeted."""

    peer: PeerId | None
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionDenied:
    """Whom we dialled does not let our key in.  The transport goes on trying, with back-off."""

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class ReachResult:
    """Answer to `Transport.reach`: the first address that answered with the peer's key; empty: none."""

    peer: PeerId
    address: str


TransportEvent = Received | PeerUp | PeerDown | TransportViolation | ConnectionDenied | ReachResult


@dataclass(slots=True)
class TrafficCounters:
    """Bytes and messages by kind, counted where they enter or leave the socket.

    Keys are message type names ("Data", "Vote", ...); bytes include framing.
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
    """See the module's text.  All methods but `wake` belong to the owning thread."""

    me: PeerId
    traffic: TrafficCounters

    def listen(self, address: str) -> str:
        """Accept connections at `address` ("tcp://host:port", port 0 or "*": any free one).

        Returns the address that peers can dial.  Raises `TransportError` if it is taken or invalid.
        """
        ...

    def dial(self, peer: PeerId, address: str) -> None:
        """Connect, and reconnect with jittered back-off until `hang_up`.

        Only whoever holds the secret key of `peer` can answer.  A no-op if a connection to `peer`
        exists.  `PeerUp` tells when both sides have greeted, `Denied` that we were not let in.
        """
        ...

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Find out over fresh connections whether `peer` can be dialled at one of these; exactly one
        `Reached` follows within `timeout_s`.  Connections to `peer` that exist are not touched."""
        ...

    def hang_up(self, peer: PeerId) -> None:
        """Forget the peer: close what we dialled, ignore what it sends until either side greets anew.

        What was sent to it before still leaves.  If the gate has turned it away, its next message
        closes the connection.  No `PeerDown` follows: the caller knows."""
        ...

    def connected(self, peer: PeerId) -> bool: ...

    def send(self, peer: PeerId, message: Message) -> None:
        """Queue a message.  Raises `TransportError` if the peer is not connected or its bounded
        queue is full; the caller treats either as a failed edge.  Buffers in the message must not
        be written to until the round they belong to is over.

        Order: bulk (Data, StateBlock, HandOver) arrives in the order sent, and so does everything else, but
        the latter may overtake bulk.  After a `PeerDown` what was queued or in flight may be lost."""
        ...

    def backlog_bytes(self, peer: PeerId) -> int:
        """Bytes queued for `peer` in this process."""
        ...

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        """Wait at most `timeout_s` for events, wake-ups or queued sends that became due."""
        ...

    def wake(self) -> None:
        """Thread-safe: make a running or the next `poll` return at once."""
        ...

    def close(self) -> None:
        """Send what is queued for at most a bounded time, then release everything."""
        ...
