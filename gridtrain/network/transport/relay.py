"""Connections through a third peer, where neither end can be dialled; and being that third peer.

    loop -- send/poll --> RelayTransport -- RelayRequest(to, packet) --> inner ==> the relay
                                                                                      | may_relay?
    loop <-- Received --- RelayTransport <-- RelayedMessage(origin, packet) - inner <==

    relayed connection   waiting for the relay -> calling --session confirmed--> up --+
                              ^                      ^--- back-off, new session ------+  RelayFailed, a gap,
                              +--- the relay is gone ---------------------------------+  hang-up of the peer

Packets are encrypted end to end (`secure_channel`), so no peer is blamed for bytes that its relay may have
forged.  Both sides dial "relay:" and the relay's key.  A direct connection, once there, is preferred.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    PeerId,
    RelayedMessage,
    RelayFailed,
    RelayRequest,
)
from gridtrain.errors import GridtrainError, LocalProtocolError, RemoteProtocolError, TransportError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import (
    PeerDown,
    PeerUp,
    Received,
    Transport,
    TransportEvent,
    TransportViolation,
)
from gridtrain.network.transport.relay_forwarder import RelayForwarder, RelayPolicy, relay_for_nobody
from gridtrain.network.transport.secure_channel import (
    Frames,
    PacketRejected,
    RejectReason,
    SecureChannel,
    is_offer,
)
from gridtrain.network.transport.send_queue import ENCRYPTED_BULK, is_bulk
from gridtrain.network.wire import codec

CALL_INITIAL_S = 0.25
CALL_MAX_S = 2.0
CONFIRM_S = 10.0
"""Time between the answer to an offer and the first encrypted packet; after that another call is made."""

FORGED_LIMIT = 16
"""Packets of one session that may fail to decrypt before the session is abandoned."""

HANG_UP: Frames = [b""]  # not a message, as none has an empty header

_ADDRESS = re.compile(r"relay:([0-9a-f]{64})")
_NEVER_INSIDE = (Hello, RelayRequest, RelayedMessage, RelayFailed)


def relay_address(relay: PeerId) -> str:
    """The address of a peer that is reached through `relay`."""
    return f"relay:{relay.hex()}"


@dataclass(slots=True, eq=False)
class _RelayedConnection:
    """One relayed connection.  `due_s`: when to call again while it is not up."""

    peer: PeerId
    relay: PeerId
    channel: SecureChannel
    is_up: bool = False
    due_s: float = -math.inf
    attempt: int = 0
    software: str = ""
    forged: int = 0
    nbytes: int = 0  # of the pieces of a message so far

    def retry_later(self, now_s: float) -> None:
        longest_s = min(CALL_MAX_S, CALL_INITIAL_S * 2 ** min(self.attempt, 16))
        self.due_s = now_s + longest_s * random.uniform(0.5, 1.0)  # both sides should not call simultaneously
        self.attempt += 1


class RelayTransport:
    """Implements `Transport` over `inner`, and relays for others as far as `may_relay` permits.

    Args:
        inner: direct connections, with the same key pair.
        identity: our key pair.
        may_relay: whether `origin` may send to `to` through us; asked for each message.
        software: our name and version, for the other end of a relayed connection.
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
                f"key {identity.public.hex()[:8]} for the transport of {inner.me.hex()[:8]}",
                remedy="give both the same identity",
            )
        self.me, self.traffic = inner.me, inner.traffic
        self.dropped_packets: Counter[str] = Counter()
        """Packets that were dropped without blaming a peer, by reason."""
        self._inner = inner
        self._identity = identity
        (hello,) = codec.encode(Hello(self.me, PROTOCOL_VERSION, software))
        self._software = bytes(hello)
        self._forwarder = RelayForwarder(inner, may_relay)
        self._relayed: dict[PeerId, _RelayedConnection] = {}
        self._dialed: set[PeerId] = set()  # directly
        self._events: list[TransportEvent] = []
        self._woken = False  # from any thread

    # -- Transport -----------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def dial(self, peer: PeerId, address: str) -> None:
        """As `Transport.dial`.  Another relay, or a direct address, replaces a relayed connection.

        Raises `TransportError` for an invalid address, and for a relay that is one of the two ends.
        """
        if not address.startswith("relay:"):
            self._give_up(peer, "a direct connection is made instead")
            self._dialed.add(peer)
            self._inner.dial(peer, address)
            return
        relay = self._relay_in(address, peer)
        if peer in self._relayed and self._relayed[peer].relay == relay:
            return
        channel = SecureChannel(self._identity, peer, self._software)
        self._give_up(peer, f"it is reached through {relay.hex()[:8]} now")
        if peer in self._dialed and not self._inner.connected(peer):
            self._dialed.discard(peer)
            self._inner.hang_up(peer)
        self._relayed[peer] = _RelayedConnection(peer, relay, channel)
        self._call_due(time.monotonic())

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        self._inner.reach(peer, addresses, timeout_s)

    def hang_up(self, peer: PeerId) -> None:
        self._give_up(peer, "")
        self._dialed.discard(peer)
        self._inner.hang_up(peer)
        self._forwarder.peer_down(peer)
        self._events = [event for event in self._events if event.peer != peer]
        for link in [link for link in self._relayed.values() if link.relay == peer]:
            self._reset_connection(link, f"we hung up on its relay {peer.hex()[:8]}", time.monotonic())

    def connected(self, peer: PeerId) -> bool:
        return self._up(peer) is not None or self._inner.connected(peer)

    def send(self, peer: PeerId, message: Message) -> None:
        link = self._up(peer)
        if link is None:
            self._inner.send(peer, message)
        else:
            self._post(link, codec.encode(message), bulk=is_bulk(message))

    def backlog_bytes(self, peer: PeerId) -> int:
        """For a relayed peer: all bytes queued for its relay."""
        link = self._up(peer)
        return self._inner.backlog_bytes(peer if link is None else link.relay)

    def poll(self, timeout_s: float) -> list[TransportEvent]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            self._call_due(now_s)
            until_s = now_s if self._events else min(deadline_s, self._due_s())
            for event in self._inner.poll(max(0.0, until_s - now_s)):
                self._handle(event, time.monotonic())
            if self._events or self._woken or time.monotonic() >= deadline_s:
                self._woken = False
                events, self._events = self._events, []
                return events

    def wake(self) -> None:
        self._woken = True
        self._inner.wake()

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
            case Received(peer, RelayedMessage(origin, payload), nbytes):
                self._handle_packet(peer, origin, payload, nbytes, now_s)
            case Received(peer, RelayFailed(to, reason)):
                self._handle_relay_lost(peer, to, reason, now_s)
            case PeerUp(peer):
                link = self._relayed.get(peer)
                if link is not None:
                    self._reset_connection(link, "a direct connection takes its place", now_s)
                self._events.append(event)
                for link in self._relayed.values():
                    if link.relay == peer:
                        link.due_s, link.attempt = now_s, 0
            case PeerDown(peer, reason):
                self._events.append(event)
                self._forwarder.peer_down(peer)
                for link in self._relayed.values():
                    if link.relay == peer:
                        self._reset_connection(link, f"its relay {peer.hex()[:8]} is gone: {reason}", now_s)
            case _:
                self._events.append(event)

    def _handle_packet(
        self, relay: PeerId, origin: PeerId, packet: bytes | memoryview, nbytes: int, now_s: float
    ) -> None:
        link = self._relayed.get(origin)
        if link is None or link.relay != relay or self._inner.connected(origin):
            self.dropped_packets["not expected"] += 1
            return
        try:
            if is_offer(packet):
                self._handle_offer(link, packet, now_s)
                return
            frames = link.channel.decrypt(packet)
            if packet[0] == ENCRYPTED_BULK:
                nbytes = link.nbytes = link.nbytes + nbytes
            if frames is not None:
                if packet[0] == ENCRYPTED_BULK:
                    link.nbytes = 0
                self._handle_message(link, frames, nbytes, now_s)
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
            link.due_s, link.forged, link.nbytes = now_s + CONFIRM_S, 0, 0
            hello = codec.decode([answer.greeting])
            if not isinstance(hello, Hello) or hello.peer != link.peer:
                raise RemoteProtocolError(
                    f"a relayed peer sends {type(hello).__name__} instead of its own Hello"
                )
            if hello.version != PROTOCOL_VERSION:
                link.channel.reset()
                raise RemoteProtocolError(
                    f"peer speaks gridtrain protocol {hello.version}, this software speaks "
                    f"{PROTOCOL_VERSION} (the peer runs {hello.software!r})",
                    remedy="install the same version of gridtrain on both machines",
                )
            link.software = hello.software
        for packet in answer.packets:
            self._try_post(link, packet)

    def _handle_message(self, link: _RelayedConnection, frames: Frames, nbytes: int, now_s: float) -> None:
        if frames == HANG_UP:
            self._reset_connection(link, "the other side hung up", now_s)
            return
        if not link.is_up:
            link.is_up, link.attempt = True, 0
            self._events.append(PeerUp(link.peer, link.software))
        if frames:
            message = codec.decode(frames)
            if isinstance(message, _NEVER_INSIDE):
                raise RemoteProtocolError(f"{type(message).__name__} came encrypted through a relay")
            self._events.append(Received(link.peer, message, nbytes))

    def _handle_rejected(self, link: _RelayedConnection, problem: PacketRejected, now_s: float) -> None:
        """A packet was altered, repeated or lost.  It may have been the relay, so the peer is not blamed."""
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
        """End the session, and call again later; `PeerDown` if it was up."""
        link.channel.reset()
        link.forged = link.nbytes = 0
        link.retry_later(now_s)
        self._mark_down(link, reason)

    def _mark_down(self, link: _RelayedConnection, reason: str) -> None:
        if link.is_up:
            link.is_up = False
            self._events.append(PeerDown(link.peer, reason))

    def _give_up(self, peer: PeerId, reason: str) -> None:
        """Forget the relayed connection and tell the peer; `PeerDown` if there is a reason."""
        link = self._relayed.pop(peer, None)
        if link is not None and link.is_up:
            with contextlib.suppress(TransportError):  # the relay is gone, and the connection with it
                self._post(link, HANG_UP, bulk=False)
            if reason:
                self._mark_down(link, reason)

    def _post(self, link: _RelayedConnection, frames: Frames, *, bulk: bool) -> None:
        """Encrypt and send.  Raises `TransportError`; the connection is then down, as a part may be sent."""
        assert link.channel.session is not None
        try:
            for packet in link.channel.session.encrypt(frames, bulk=bulk):
                self._inner.send(link.relay, RelayRequest(link.peer, packet))
        except TransportError as error:
            self._reset_connection(link, f"the queue for its relay is full: {error.reason}", time.monotonic())
            raise

    def _try_post(self, link: _RelayedConnection, packet: bytes) -> None:
        with contextlib.suppress(TransportError):  # it is called again later
            self._inner.send(link.relay, RelayRequest(link.peer, packet))

    def _relay_in(self, address: str, peer: PeerId) -> PeerId:
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise TransportError(
                f"cannot dial {address!r}", remedy='a relay\'s address is "relay:" and its key, 64 hex digits'
            )
        relay = bytes.fromhex(match[1])
        if relay in (peer, self.me) or peer == self.me:
            raise TransportError(
                f"{peer.hex()[:8]} cannot be reached through {relay.hex()[:8]}: a relay is a third peer",
                remedy="check the addresses that the coordinator gave to this pair",
            )
        return relay
