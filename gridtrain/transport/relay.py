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

from gridtrain.errors import GridtrainError, LocalProtocolError, RemoteProtocolError, TransportError
from gridtrain.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    PeerId,
    Relay,
    Relayed,
    RelayLost,
)
from gridtrain.transport.base import PeerDown, PeerUp, Received, Traffic, Transport, TransportEvent, Violation
from gridtrain.transport.curve import Identity
from gridtrain.transport.forwarder import Forwarder, MayRelay, nobody
from gridtrain.transport.outbox import SEALED_BULK, is_bulk
from gridtrain.transport.sealed import Channel, Frames, NotTaken, Why, is_offer
from gridtrain.wire import codec

CALL_FIRST_S = 0.25
CALL_MOST_S = 2.0
CONFIRM_S = 10.0
"""An offer was answered: within this time something sealed must come, or it is tried anew."""

FORGED_LIMIT = 16
"""So many packets of one session may fail to open before the edge is given up and called anew."""

HANG_UP: Frames = [b""]  # no message has an empty header

_ADDRESS = re.compile(r"relay:([0-9a-f]{64})")
_NEVER_INSIDE = (Hello, Relay, Relayed, RelayLost)


def relay_address(relay: PeerId) -> str:
    """The address of whatever is reached through `relay`."""
    return f"relay:{relay.hex()}"


@dataclass(slots=True, eq=False)
class _Edge:
    """One relayed edge.  `due_s`: when to call again while it is not up."""

    peer: PeerId
    relay: PeerId
    channel: Channel
    up: bool = False
    due_s: float = -math.inf
    attempt: int = 0
    software: str = ""
    forged: int = 0
    nbytes: int = 0  # of the pieces so far

    def call_later(self, now_s: float) -> None:
        longest_s = min(CALL_MOST_S, CALL_FIRST_S * 2 ** min(self.attempt, 16))
        self.due_s = now_s + longest_s * random.uniform(0.5, 1.0)  # not both sides at the same moment
        self.attempt += 1


class RelayingTransport:
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
        may_relay: MayRelay = nobody,
        software: str = "gridtrain",
    ) -> None:
        if identity.public != inner.me:
            raise LocalProtocolError(
                f"key {identity.public.hex()[:8]} for the transport of {inner.me.hex()[:8]}",
                remedy="give both the same identity",
            )
        self.me = inner.me
        self.dropped: Counter[str] = Counter()
        """Sealed packets that nobody is blamed for, by reason."""
        self._inner = inner
        self._identity = identity
        (hello,) = codec.encode(Hello(self.me, PROTOCOL_VERSION, software))
        self._greeting = bytes(hello)
        self._forwarder = Forwarder(inner, may_relay)
        self._edges: dict[PeerId, _Edge] = {}
        self._dialled: set[PeerId] = set()  # directly
        self._events: list[TransportEvent] = []
        self._woken = False  # from any thread

    # -- the contract --------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """`inner`'s: what is relayed counts as Relay and Relayed."""
        return self._inner.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._inner.traffic = traffic

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def dial(self, peer: PeerId, address: str) -> None:
        """As the contract says.  Another relay than before, or a direct address, replaces a relayed edge.

        Raises `TransportError` for an address of neither kind, and for a relay that is one of the two ends.
        """
        if not address.startswith("relay:"):
            self._give_up(peer, "a direct connection is made instead")
            self._dialled.add(peer)
            self._inner.dial(peer, address)
            return
        relay = self._relay_in(address, peer)
        if peer in self._edges and self._edges[peer].relay == relay:
            return
        channel = Channel(self._identity, peer, self._greeting)
        self._give_up(peer, f"it is reached through {relay.hex()[:8]} now")
        if peer in self._dialled and not self._inner.connected(peer):
            self._dialled.discard(peer)
            self._inner.hang_up(peer)
        self._edges[peer] = _Edge(peer, relay, channel)
        self._tend(time.monotonic())

    def reach(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        self._inner.reach(peer, addresses, timeout_s)

    def hang_up(self, peer: PeerId) -> None:
        self._give_up(peer, "")
        self._dialled.discard(peer)
        self._inner.hang_up(peer)
        self._forwarder.gone(peer)
        self._events = [event for event in self._events if event.peer != peer]
        for edge in [edge for edge in self._edges.values() if edge.relay == peer]:
            self._break(edge, f"we hung up on its relay {peer.hex()[:8]}", time.monotonic())

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
            self._tend(now_s)
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
        for peer in list(self._edges):
            with contextlib.suppress(GridtrainError):  # what is below may be gone already
                self._give_up(peer, "")
        self._inner.close()

    # -- events from below ---------------------------------------------------------------------

    def _handle(self, event: TransportEvent, now_s: float) -> None:
        match event:
            case Received(peer, Relay(to, payload)):
                self._forwarder.forward(peer, to, payload, now_s)
            case Received(peer, Relayed(origin, payload), nbytes):
                self._arrived(peer, origin, payload, nbytes, now_s)
            case Received(peer, RelayLost(to, reason)):
                self._lost(peer, to, reason, now_s)
            case PeerUp(peer):
                edge = self._edges.get(peer)
                if edge is not None:
                    self._break(edge, "a direct connection takes its place", now_s)
                self._events.append(event)
                for edge in self._edges.values():
                    if edge.relay == peer:
                        edge.due_s, edge.attempt = now_s, 0
            case PeerDown(peer, reason):
                self._events.append(event)
                self._forwarder.gone(peer)
                for edge in self._edges.values():
                    if edge.relay == peer:
                        self._break(edge, f"its relay {peer.hex()[:8]} is gone: {reason}", now_s)
            case _:
                self._events.append(event)

    def _arrived(
        self, relay: PeerId, origin: PeerId, packet: bytes | memoryview, nbytes: int, now_s: float
    ) -> None:
        edge = self._edges.get(origin)
        if edge is None or edge.relay != relay or self._inner.connected(origin):
            self.dropped["not expected"] += 1
            return
        try:
            if is_offer(packet):
                self._offered(edge, packet, now_s)
                return
            frames = edge.channel.open(packet)
            if packet[0] == SEALED_BULK:
                nbytes = edge.nbytes = edge.nbytes + nbytes
            if frames is not None:
                if packet[0] == SEALED_BULK:
                    edge.nbytes = 0
                self._opened(edge, frames, nbytes, now_s)
        except NotTaken as problem:
            self._not_taken(edge, problem, now_s)
        except RemoteProtocolError as problem:
            self._events.append(Violation(origin, str(problem)))

    def _offered(self, edge: _Edge, offer: bytes | memoryview, now_s: float) -> None:
        before = edge.channel.session
        answer = edge.channel.answer(offer)
        if answer.greeting is None:
            if edge.channel.session is not before:  # what had begun did not lead anywhere
                edge.due_s = now_s + CONFIRM_S
        else:
            self._down(edge, "the other side opened a new session")
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

    def _opened(self, edge: _Edge, frames: Frames, nbytes: int, now_s: float) -> None:
        if frames == HANG_UP:
            self._break(edge, "the other side hung up", now_s)
            return
        if not edge.up:
            edge.up, edge.attempt = True, 0
            self._events.append(PeerUp(edge.peer, edge.software))
        if frames:
            message = codec.decode(frames)
            if isinstance(message, _NEVER_INSIDE):
                raise RemoteProtocolError(f"{type(message).__name__} came sealed through a relay")
            self._events.append(Received(edge.peer, message, nbytes))

    def _not_taken(self, edge: _Edge, problem: NotTaken, now_s: float) -> None:
        """Somebody altered, copied or lost something: perhaps the relay, so nobody is blamed."""
        self.dropped[problem.why.value] += 1
        edge.forged += problem.why is Why.FORGED
        if problem.why is Why.LOST or edge.forged > FORGED_LIMIT:
            self._break(edge, f"through relay {edge.relay.hex()[:8]}: {problem.reason}", now_s)

    def _lost(self, relay: PeerId, to: PeerId, reason: str, now_s: float) -> None:
        edge = self._edges.get(to)
        if edge is not None and edge.relay == relay:
            self._break(edge, f"relay {relay.hex()[:8]}: {reason}", now_s)
        else:
            self.dropped["not expected"] += 1

    # -- relayed edges -------------------------------------------------------------------------

    def _up(self, peer: PeerId) -> _Edge | None:
        edge = self._edges.get(peer)
        return edge if edge is not None and edge.up else None

    def _callable(self, edge: _Edge) -> bool:
        return not edge.up and self._inner.connected(edge.relay) and not self._inner.connected(edge.peer)

    def _due_s(self) -> float:
        return min((edge.due_s for edge in self._edges.values() if self._callable(edge)), default=math.inf)

    def _tend(self, now_s: float) -> None:
        for edge in self._edges.values():
            if now_s >= edge.due_s and self._callable(edge):
                edge.call_later(now_s)
                self._try_post(edge, edge.channel.call())

    def _break(self, edge: _Edge, reason: str, now_s: float) -> None:
        """It is called anew later; `PeerDown` if it was up."""
        edge.channel.reset()
        edge.forged = edge.nbytes = 0
        edge.call_later(now_s)
        self._down(edge, reason)

    def _down(self, edge: _Edge, reason: str) -> None:
        if edge.up:
            edge.up = False
            self._events.append(PeerDown(edge.peer, reason))

    def _give_up(self, peer: PeerId, reason: str) -> None:
        """Forget the relayed edge; the other side is told, and the loop if there is a reason to."""
        edge = self._edges.pop(peer, None)
        if edge is not None and edge.up:
            with contextlib.suppress(TransportError):  # the relay is gone: so is the edge
                self._post(edge, HANG_UP, bulk=False)
            if reason:
                self._down(edge, reason)

    def _post(self, edge: _Edge, frames: Frames, *, bulk: bool) -> None:
        """Seal and send.  Raises `TransportError`; the edge is then down, as a part may have left."""
        assert edge.channel.session is not None
        try:
            for packet in edge.channel.session.seal(frames, bulk=bulk):
                self._inner.send(edge.relay, Relay(edge.peer, packet))
        except TransportError as error:
            self._break(edge, f"its relay takes no more: {error.reason}", time.monotonic())
            raise

    def _try_post(self, edge: _Edge, packet: bytes) -> None:
        with contextlib.suppress(TransportError):  # called again when it is due
            self._inner.send(edge.relay, Relay(edge.peer, packet))

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
