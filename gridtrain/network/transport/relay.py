"""Edges through a third peer, where neither end can be dialled; and being that third peer.

Decides over what an edge runs (direct or sealed through a relay), when a relayed edge is up or down, and
what is passed on for others.  Never opens what it passes on, and never blames a peer for bytes that
a relay may have made up: what is sealed and how is `sealed`'s.

    loop -- send/poll --> RelayingTransport -- Relay(to, sealed) --> inner ==> the relay
                                                                                 | may_relay?
    loop <- Received ---- RelayingTransport <- Relayed(origin, sealed) - inner <==

    a relayed edge   waiting for the relay -> calling --a session stands--> up --+
                          ^                      ^--- back-off, a new session ---+  RelayLost, a gap,
                          +--- the relay is gone ---------------------------------+  the other side hung up

Both sides dial "relay:" and the relay's key.  A direct connection, once there, is preferred.
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
    TrafficCounters,
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
"""An offer was answered: within this time something sealed must come, or it is tried anew."""

FORGED_LIMIT = 16
"""So many packets of one session may fail to open before the edge is given up and called anew."""

HANG_UP: Frames = [b""]  # no message has an empty header

_ADDRESS = re.compile(r"relay:([0-9a-f]{64})")
_NEVER_INSIDE = (Hello, RelayRequest, RelayedMessage, RelayFailed)


def relay_address(relay: PeerId) -> str:
    """The address of whatever is reached through `relay`."""
    return f"relay:{relay.hex()}"


@dataclass(slots=True, eq=False)
class _RelayedConnection:
    """One relayed edge.  `due_s`: when to call again while it is not up."""

    peer: PeerId
    relay: PeerId
    channel: SecureChannel
    is_up: bool = False
    due_s: float = -math.inf
    attempt: int = 0
    software: str = ""
    forged: int = 0
    nbytes: int = 0  # of the pieces so far

    def retry_later(self, now_s: float) -> None:
        longest_s = min(CALL_MAX_S, CALL_INITIAL_S * 2 ** min(self.attempt, 16))
        self.due_s = now_s + longest_s * random.uniform(0.5, 1.0)  # not both sides at the same moment
        self.attempt += 1


class RelayTransport:
    """Implements `Transport` over `inner`, and passes on for others as far as `may_relay` says.

    Args:
        inner: direct connections.
        identity: the same key pair as `inner`'s.
        may_relay: asked for each message: may `origin` send to `to` through us?
        software: our name and version, for the other end of a relayed edge.
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
        self.me = inner.me
        self.dropped_packets: Counter[str] = Counter()
        """Sealed packets that nobody is blamed for, by reason."""
        self._inner = inner
        self._identity = identity
        (hello,) = codec.encode(Hello(self.me, PROTOCOL_VERSION, software))
        self._software = bytes(hello)
        self._forwarder = RelayForwarder(inner, may_relay)
        self._relayed: dict[PeerId, _RelayedConnection] = {}
        self._dialed: set[PeerId] = set()  # directly
        self._events: list[TransportEvent] = []
        self._woken = False  # from any thread

    # -- the contract --------------------------------------------------------------------------

    @property
    def traffic(self) -> TrafficCounters:
        """`inner`'s: what is relayed counts as Relay and Relayed."""
        return self._inner.traffic

    @traffic.setter
    def traffic(self, traffic: TrafficCounters) -> None:
        self._inner.traffic = traffic

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def dial(self, peer: PeerId, address: str) -> None:
        """As the contract says.  Another relay than before, or a direct address, replaces a relayed edge.

        Raises `TransportError` for an address of neither kind, and for a relay that is one of the two ends.
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
        for edge in [edge for edge in self._relayed.values() if edge.relay == peer]:
            self._reset_connection(edge, f"we hung up on its relay {peer.hex()[:8]}", time.monotonic())

    def connected(self, peer: PeerId) -> bool:
        return self._up(peer) is not None or self._inner.connected(peer)

    def send(self, peer: PeerId, message: Message) -> None:
        edge = self._up(peer)
        if edge is None:
            self._inner.send(peer, message)
        else:
            self._post(edge, codec.encode(message), bulk=is_bulk(message))

    def backlog_bytes(self, peer: PeerId) -> int:
        """For a relayed peer: what waits for its relay, other edges' bytes included."""
        edge = self._up(peer)
        return self._inner.backlog_bytes(peer if edge is None else edge.relay)

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
            with contextlib.suppress(GridtrainError):  # what is below may be gone already
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
                edge = self._relayed.get(peer)
                if edge is not None:
                    self._reset_connection(edge, "a direct connection takes its place", now_s)
                self._events.append(event)
                for edge in self._relayed.values():
                    if edge.relay == peer:
                        edge.due_s, edge.attempt = now_s, 0
            case PeerDown(peer, reason):
                self._events.append(event)
                self._forwarder.peer_down(peer)
                for edge in self._relayed.values():
                    if edge.relay == peer:
                        self._reset_connection(edge, f"its relay {peer.hex()[:8]} is gone: {reason}", now_s)
            case _:
                self._events.append(event)

    def _handle_packet(
        self, relay: PeerId, origin: PeerId, packet: bytes | memoryview, nbytes: int, now_s: float
    ) -> None:
        edge = self._relayed.get(origin)
        if edge is None or edge.relay != relay or self._inner.connected(origin):
            self.dropped_packets["not expected"] += 1
            return
        try:
            if is_offer(packet):
                self._handle_offer(edge, packet, now_s)
                return
            frames = edge.channel.decrypt(packet)
            if packet[0] == ENCRYPTED_BULK:
                nbytes = edge.nbytes = edge.nbytes + nbytes
            if frames is not None:
                if packet[0] == ENCRYPTED_BULK:
                    edge.nbytes = 0
                self._handle_message(edge, frames, nbytes, now_s)
        except PacketRejected as problem:
            self._handle_rejected(edge, problem, now_s)
        except RemoteProtocolError as problem:
            self._events.append(TransportViolation(origin, str(problem)))

    def _handle_offer(self, edge: _RelayedConnection, offer: bytes | memoryview, now_s: float) -> None:
        before = edge.channel.session
        answer = edge.channel.handle_offer(offer)
        if answer.greeting is None:
            if edge.channel.session is not before:  # what had begun did not lead anywhere
                edge.due_s = now_s + CONFIRM_S
        else:
            self._mark_down(edge, "the other side opened a new session")
            edge.due_s, edge.forged, edge.nbytes = now_s + CONFIRM_S, 0, 0
            hello = codec.decode([answer.greeting])
            if not isinstance(hello, Hello) or hello.peer != edge.peer:
                raise RemoteProtocolError(f"a relayed peer greets with {type(hello).__name__} of another")
            if hello.version != PROTOCOL_VERSION:
                edge.channel.reset()
                raise RemoteProtocolError(
                    f"peer speaks gridtrain protocol {hello.version}, this software speaks "
                    f"{PROTOCOL_VERSION} (the peer runs {hello.software!r})",
                    remedy="install the same version of gridtrain on both machines",
                )
            edge.software = hello.software
        for packet in answer.packets:
            self._try_post(edge, packet)

    def _handle_message(self, edge: _RelayedConnection, frames: Frames, nbytes: int, now_s: float) -> None:
        if frames == HANG_UP:
            self._reset_connection(edge, "the other side hung up", now_s)
            return
        if not edge.is_up:
            edge.is_up, edge.attempt = True, 0
            self._events.append(PeerUp(edge.peer, edge.software))
        if frames:
            message = codec.decode(frames)
            if isinstance(message, _NEVER_INSIDE):
                raise RemoteProtocolError(f"{type(message).__name__} came sealed through a relay")
            self._events.append(Received(edge.peer, message, nbytes))

    def _handle_rejected(self, edge: _RelayedConnection, problem: PacketRejected, now_s: float) -> None:
        """Somebody altered, copied or lost something: perhaps the relay, so nobody is blamed."""
        self.dropped_packets[problem.reject_reason.value] += 1
        edge.forged += problem.reject_reason is RejectReason.FORGED
        if problem.reject_reason is RejectReason.LOST or edge.forged > FORGED_LIMIT:
            self._reset_connection(edge, f"through relay {edge.relay.hex()[:8]}: {problem.reason}", now_s)

    def _handle_relay_lost(self, relay: PeerId, to: PeerId, reason: str, now_s: float) -> None:
        edge = self._relayed.get(to)
        if edge is not None and edge.relay == relay:
            self._reset_connection(edge, f"relay {relay.hex()[:8]}: {reason}", now_s)
        else:
            self.dropped_packets["not expected"] += 1

    # -- relayed edges -------------------------------------------------------------------------

    def _up(self, peer: PeerId) -> _RelayedConnection | None:
        edge = self._relayed.get(peer)
        return edge if edge is not None and edge.is_up else None

    def _can_call(self, edge: _RelayedConnection) -> bool:
        return not edge.is_up and self._inner.connected(edge.relay) and not self._inner.connected(edge.peer)

    def _due_s(self) -> float:
        return min((edge.due_s for edge in self._relayed.values() if self._can_call(edge)), default=math.inf)

    def _call_due(self, now_s: float) -> None:
        for edge in self._relayed.values():
            if now_s >= edge.due_s and self._can_call(edge):
                edge.retry_later(now_s)
                self._try_post(edge, edge.channel.make_call())

    def _reset_connection(self, edge: _RelayedConnection, reason: str, now_s: float) -> None:
        """It is called anew later; `PeerDown` if it was up."""
        edge.channel.reset()
        edge.forged = edge.nbytes = 0
        edge.retry_later(now_s)
        self._mark_down(edge, reason)

    def _mark_down(self, edge: _RelayedConnection, reason: str) -> None:
        if edge.is_up:
            edge.is_up = False
            self._events.append(PeerDown(edge.peer, reason))

    def _give_up(self, peer: PeerId, reason: str) -> None:
        """Forget the relayed edge; the other side is told, and the loop if there is a reason to."""
        edge = self._relayed.pop(peer, None)
        if edge is not None and edge.is_up:
            with contextlib.suppress(TransportError):  # the relay is gone: so is the edge
                self._post(edge, HANG_UP, bulk=False)
            if reason:
                self._mark_down(edge, reason)

    def _post(self, edge: _RelayedConnection, frames: Frames, *, bulk: bool) -> None:
        """Seal and send.  Raises `TransportError`; the edge is then down, as a part may have left."""
        assert edge.channel.session is not None
        try:
            for packet in edge.channel.session.encrypt(frames, bulk=bulk):
                self._inner.send(edge.relay, RelayRequest(edge.peer, packet))
        except TransportError as error:
            self._reset_connection(edge, f"its relay takes no more: {error.reason}", time.monotonic())
            raise

    def _try_post(self, edge: _RelayedConnection, packet: bytes) -> None:
        with contextlib.suppress(TransportError):  # called again when it is due
            self._inner.send(edge.relay, RelayRequest(edge.peer, packet))

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
                remedy="see what the coordinator planned for this pair",
            )
        return relay
