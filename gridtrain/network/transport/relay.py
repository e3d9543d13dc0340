"""Connects, through a relay, peers that cannot dial each other (NAT): opens, restores and closes sessions.

    loop -- send/poll --> RelayTransport -- RelayRequest(to, packet) --> inner ==> the relay
                                                                                      | may_relay?
    loop <-- Received --- RelayTransport <-- RelayedMessage(origin, packet) - inner <==

    relayed connection   waiting for the relay -> calling --session confirmed--> up --+
                              ^                      ^--- back-off, new session ------+  RelayFailed, a gap,
                              +--- the relay has disconnected ------------------------+  hang-up of the peer

A call is an offer to begin an encrypted session; a gap means that packets were lost.  Packets are encrypted
end to end (`secure_channel`).  The peer is not accused of a violation for bytes that a relay may have forged.
Both sides dial "relay:" followed by the relay's key.  A direct connection is preferred as soon as it exists.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import Counter
from dataclasses import dataclass

from gridtrain.core.messages import (
    PROTOCOL_VERSION,
    RELAY_PREFIX,
    Hello,
    Message,
    PeerId,
    RelayedMessage,
    RelayFailed,
    RelayRequest,
    relay_of,
)
from gridtrain.errors import GridtrainError, LocalProtocolError, RemoteProtocolError, TransportError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import (
    RELAYED_PIECE,
    Frames,
    PeerDown,
    PeerUp,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.relay_forwarder import RelayForwarder, RelayPolicy, relay_for_nobody
from gridtrain.network.transport.secure_channel import (
    PacketRejected,
    RejectReason,
    SecureChannel,
    is_offer,
)
from gridtrain.network.transport.send_queue import is_bulk
from gridtrain.network.transport.wrapping_transport import WrappingTransport
from gridtrain.network.wire import codec

CALL_INITIAL_S = 0.25
CALL_MAX_S = 2.0
CONFIRM_S = 10.0
"""How long to wait for the first encrypted packet after answering an offer, before another call is made."""

FORGED_LIMIT = 16
"""The number of packets in a session that may fail to decrypt before the session is abandoned."""

HANG_UP: Frames = [b""]  # cannot be confused with a message, because no message has an empty header

_RELAY_MESSAGES = frozenset({RelayRequest, RelayedMessage, RelayFailed})
_NEVER_INSIDE = (Hello, RelayRequest, RelayedMessage, RelayFailed)


@dataclass(slots=True, eq=False)
class _RelayedConnection:
    """A relayed connection; while it is down, the next attempt to open a session is due at `due_s`."""

    peer: PeerId
    relay: PeerId
    channel: SecureChannel
    is_up: bool = False
    due_s: float = -math.inf
    attempt: int = 0
    software: str = ""
    forged: int = 0

    def retry_later(self, now_s: float) -> None:
        longest_s = min(CALL_MAX_S, CALL_INITIAL_S * 2 ** min(self.attempt, 16))
        self.due_s = now_s + longest_s * random.uniform(0.5, 1.0)  # so that the sides call at different times
        self.attempt += 1


class RelayTransport(WrappingTransport):
    """Implements `Transport` over `inner`, and relays between other peers if `may_relay` permits it.

    Args:
        inner: the transport with direct connections, which uses the same key pair.
        identity: our key pair.
        may_relay: returns whether `origin` may send to `to` through us; it is called for each message.
        software: the name and version of our software, which the other end of a relayed connection receives.
    """

    def __init__(
        self,
        inner: Transport,
        identity: Identity,
        *,
        may_relay: RelayPolicy = relay_for_nobody,
        software: str = "gridtrain",
    ) -> None:
        if identity.public != inner.me:
            raise LocalProtocolError(
                f"the identity has key {identity.public.hex()[:8]}, but the inner transport has key "
                f"{inner.me.hex()[:8]}",
                remedy="use the same identity for both",
            )
        super().__init__(inner)
        self.dropped_packets: Counter[str] = Counter()
        """The number of packets that were dropped without reporting a violation, by reason."""
        self._identity = identity
        (hello,) = codec.encode(Hello(self.me, PROTOCOL_VERSION, software))
        self._software = bytes(hello)
        self._forwarder = RelayForwarder(inner, may_relay)
        self._relayed: dict[PeerId, _RelayedConnection] = {}
        self._dialed: set[PeerId] = set()  # peers dialled directly
        self._events: list[TransportEvent] = []

    # -- Transport -----------------------------------------------------------------------------

    def dial(self, peer: PeerId, address: str) -> None:
        """See `Transport.dial`.  Dialling another relay or a direct address replaces a relayed connection.

        Raises:
            TransportError: the address is invalid, or the relay is one of the two ends.
        """
        if not address.startswith(RELAY_PREFIX):
            self._give_up(peer, "a direct connection is dialled instead")
            self._dialed.add(peer)
            self._inner.dial(peer, address)
            return
        relay = self._relay_in(address, peer)
        if peer in self._relayed and self._relayed[peer].relay == relay:
            return
        channel = SecureChannel(self._identity, peer, self._software)
        self._give_up(peer, f"the peer is now reached through {relay.hex()[:8]}")
        if peer in self._dialed and not self._inner.connected(peer):
            self._dialed.discard(peer)
            self._inner.hang_up(peer)
        self._relayed[peer] = _RelayedConnection(peer, relay, channel)
        self._call_due(time.monotonic())

    def hang_up(self, peer: PeerId) -> None:
        self._give_up(peer, "")
        self._dialed.discard(peer)
        self._inner.hang_up(peer)
        self._forwarder.peer_down(peer)
        self._events = [event for event in self._events if event.peer != peer]
        for link in [link for link in self._relayed.values() if link.relay == peer]:
            self._reset_connection(
                link, f"this worker closed its connection to the relay {peer.hex()[:8]}", time.monotonic()
            )

    def connected(self, peer: PeerId) -> bool:
        return self._up(peer) is not None or self._inner.connected(peer)

    def send(self, peer: PeerId, message: Message, frames: Frames | None = None) -> None:
        link = self._up(peer)
        if link is None:
            self._inner.send(peer, message, frames)
        else:
            frames = codec.encode(message) if frames is None else frames
            self._post(link, frames, bulk=is_bulk(message))
            self.traffic.relayed_sent_bytes[type(message).__name__] += sum(map(len, frames))

    def backlog_bytes(self, peer: PeerId) -> int:
        """Return the bytes queued for the peer; for a relayed peer, all bytes queued for the relay."""
        link = self._up(peer)
        return self._inner.backlog_bytes(peer if link is None else link.relay)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        if self._relayed:
            now_s = time.monotonic()
            self._call_due(now_s)
            timeout_s = 0.0 if self._events else min(timeout_s, max(0.0, self._due_s() - now_s))
        for event in self._inner.poll(timeout_s):
            if type(event) is Received and type(event.message) not in _RELAY_MESSAGES:
                self._events.append(event)
            else:
                self._handle(event, time.monotonic())
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for peer in list(self._relayed):
            with contextlib.suppress(GridtrainError):  # the inner transport may be closed already
                self._give_up(peer, "")
        self._inner.close()

    # -- events from below ---------------------------------------------------------------------

    def _handle(self, event: TransportEvent, now_s: float) -> None:
        match event:
            case Received(peer, RelayRequest(to, payload)):
                self._forwarder.forward(peer, to, payload, now_s)
            case Received(peer, RelayedMessage(origin, payload)):
                self._handle_packet(peer, origin, payload, now_s)
            case Received(peer, RelayFailed(to, reason)):
                self._handle_relay_lost(peer, to, reason, now_s)
            case PeerUp(peer):
                link = self._relayed.get(peer)
                if link is not None:
                    self._reset_connection(link, "a direct connection replaces it", now_s)
                self._events.append(event)
                for link in self._relayed.values():
                    if link.relay == peer:
                        link.due_s, link.attempt = now_s, 0
            case PeerDown(peer, reason):
                self._events.append(event)
                self._forwarder.peer_down(peer)
                for link in self._relayed.values():
                    if link.relay == peer:
                        self._reset_connection(link, f"relay {peer.hex()[:8]} disconnected: {reason}", now_s)
            case _:
                self._events.append(event)

    def _handle_packet(self, relay: PeerId, origin: PeerId, packet: bytes | memoryview, now_s: float) -> None:
        link = self._relayed.get(origin)
        if link is None or link.relay != relay or self._inner.connected(origin):
            self.dropped_packets["not expected"] += 1
            return
        try:
            if is_offer(packet):
                self._handle_offer(link, packet, now_s)
                return
            frames = link.channel.decrypt(packet)
            if frames is None:
                self.traffic.relayed_received_bytes[RELAYED_PIECE] += len(packet)
            else:
                self._handle_message(link, frames, now_s)
        except PacketRejected as problem:
            self._handle_rejected(link, problem, now_s)
        except RemoteProtocolError as problem:
            self._events.append(TransportViolation(origin, str(problem)))

    def _handle_offer(self, link: _RelayedConnection, offer: bytes | memoryview, now_s: float) -> None:
        before = link.channel.session
        answer = link.channel.handle_offer(offer)
        if answer.greeting is None:
            if link.channel.session is not before:  # the previous attempt has failed
                link.due_s = now_s + CONFIRM_S
        else:
            self._mark_down(link, "the other side opened a new session")
            link.due_s, link.forged = now_s + CONFIRM_S, 0
            hello = codec.decode([answer.greeting])
            if not isinstance(hello, Hello) or hello.peer != link.peer:
                raise RemoteProtocolError(
                    f"a relayed peer sent {type(hello).__name__} instead of its own Hello"
                )
            if hello.version != PROTOCOL_VERSION:
                link.channel.reset()
                raise RemoteProtocolError(
                    f"the peer uses protocol version {hello.version}, but this software uses version "
                    f"{PROTOCOL_VERSION} (the peer runs {hello.software!r})",
                    remedy="install the same version of gridtrain on both machines",
                )
            link.software = hello.software
        for packet in answer.packets:
            self._try_post(link, packet)

    def _handle_message(self, link: _RelayedConnection, frames: Frames, now_s: float) -> None:
        if frames == HANG_UP:
            self._reset_connection(link, "the other side hung up", now_s)
            return
        if not link.is_up:
            link.is_up, link.attempt = True, 0
            self._events.append(PeerUp(link.peer, link.software))
        if frames:
            message = codec.decode(frames)
            if isinstance(message, _NEVER_INSIDE):
                raise RemoteProtocolError(
                    f"{type(message).__name__} must not be sent encrypted through a relay"
                )
            nbytes = sum(map(len, frames))
            self.traffic.relayed_received_bytes[type(message).__name__] += nbytes
            self._events.append(Received(link.peer, message, nbytes))

    def _handle_rejected(self, link: _RelayedConnection, problem: PacketRejected, now_s: float) -> None:
        """Count a rejected packet; end the session if packets were lost or too many cannot be decrypted.

        No violation is reported, because the relay may be the cause.
        """
        self.dropped_packets[problem.reject_reason.value] += 1
        link.forged += problem.reject_reason is RejectReason.FORGED
        if problem.reject_reason is RejectReason.LOST or link.forged > FORGED_LIMIT:
            self._reset_connection(link, f"through relay {link.relay.hex()[:8]}: {problem.reason}", now_s)

    def _handle_relay_lost(self, relay: PeerId, to: PeerId, reason: str, now_s: float) -> None:
        link = self._relayed.get(to)
        if link is not None and link.relay == relay:
            self._reset_connection(link, f"relay {relay.hex()[:8]}: {reason}", now_s)
        else:
            self.dropped_packets["not expected"] += 1

    # -- relayed connections -------------------------------------------------------------------

    def _up(self, peer: PeerId) -> _RelayedConnection | None:
        link = self._relayed.get(peer)
        return link if link is not None and link.is_up else None

    def _can_call(self, link: _RelayedConnection) -> bool:
        return not link.is_up and self._inner.connected(link.relay) and not self._inner.connected(link.peer)

    def _due_s(self) -> float:
        return min((link.due_s for link in self._relayed.values() if self._can_call(link)), default=math.inf)

    def _call_due(self, now_s: float) -> None:
        for link in self._relayed.values():
            if now_s >= link.due_s and self._can_call(link):
                link.retry_later(now_s)
                self._try_post(link, link.channel.make_call())

    def _reset_connection(self, link: _RelayedConnection, reason: str, now_s: float) -> None:
        """End the session and schedule another call; report `PeerDown` if the connection was up."""
        link.channel.reset()
        link.forged = 0
        link.retry_later(now_s)
        self._mark_down(link, reason)

    def _mark_down(self, link: _RelayedConnection, reason: str) -> None:
        if link.is_up:
            link.is_up = False
            self._events.append(PeerDown(link.peer, reason))

    def _give_up(self, peer: PeerId, reason: str) -> None:
        """Discard the relayed connection and send a hang-up to the peer.

        If the connection was up and `reason` is not empty, `PeerDown` is reported.
        """
        link = self._relayed.pop(peer, None)
        if link is not None and link.is_up:
            with contextlib.suppress(TransportError):  # the relay has disconnected, so the peer was notified
                self._post(link, HANG_UP, bulk=False)
            if reason:
                self._mark_down(link, reason)

    def _post(self, link: _RelayedConnection, frames: Frames, *, bulk: bool) -> None:
        """Encrypt and send a message.

        Raises:
            TransportError: the message could not be sent completely.  The connection is then down.
        """
        assert link.channel.session is not None
        try:
            for packet in link.channel.session.encrypt(frames, bulk=bulk):
                self._inner.send(link.relay, RelayRequest(link.peer, packet))
        except TransportError as error:
            self._reset_connection(link, f"sending to the relay failed: {error.reason}", time.monotonic())
            raise

    def _try_post(self, link: _RelayedConnection, packet: bytes) -> None:
        with contextlib.suppress(TransportError):  # another call is made later
            self._inner.send(link.relay, RelayRequest(link.peer, packet))

    def _relay_in(self, address: str, peer: PeerId) -> PeerId:
        relay = relay_of(address)
        if relay is None:
            raise TransportError(
                f"cannot dial {address!r}: it is not the address of a relay",
                remedy='write "relay:" followed by the relay\'s key in 64 lower-case hexadecimal digits',
            )
        if relay in (peer, self.me) or peer == self.me:
            raise TransportError(
                f"{peer.hex()[:8]} cannot be reached through {relay.hex()[:8]}: "
                "the relay must be a third peer",
                remedy="check the addresses that the coordinator assigned to this pair",
            )
        return relay
