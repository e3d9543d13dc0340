"""A network in memory that loses messages, kills senders and breaks connections as a test plans it.

hub.disconnect(anna, bert)             until hub.reconnect(anna, bert)
hub.drop("Vote")                       loses all votes
hub.kill_sender("Data", after=3)       kills the sender instead of sending its 4th Data
"""

from __future__ import annotations

from collections import Counter

from gridtrain.core.messages import Message, PeerId
from gridtrain.network.transport.in_memory import EndpointKilled, MemoryConnection, MemoryHub, MemoryTransport
from gridtrain.network.transport.send_queue import QueuedMessage


class FaultyHub(MemoryHub):
    def __init__(self) -> None:
        super().__init__()
        self._disconnected: set[frozenset[PeerId]] = set()
        self._dropped = ""
        self._deadly: tuple[str, PeerId | None, int] = ("", None, 0)
        self._seen: Counter[tuple[PeerId, PeerId]] = Counter()

    def disconnect(self, a: PeerId, b: PeerId) -> None:
        """Break the connection between two peers until `reconnect`; both ends get `PeerDown`."""
        with self.lock:
            self._disconnected.add(frozenset((a, b)))
            for link in [link for end in self.endpoints.values() for link in end.connections_locked()]:
                if {link.initiator.me, link.acceptor.me} == {a, b}:
                    self.close_locked(link, "the connection was cut")

    def reconnect(self, a: PeerId, b: PeerId) -> None:
        """Undo `disconnect` and connect the two peers again if one of them dials the other."""
        with self.lock:
            self._disconnected.discard(frozenset((a, b)))
            self.retry_locked()

    def show(self, peer: PeerId) -> None:
        """Undo `hide` and connect the endpoints that dial this endpoint."""
        with self.lock:
            self._hidden.discard(peer)
            self.retry_locked()

    def drop(self, kind: str) -> None:
        """Lose all messages of this type."""
        self._dropped = kind

    def kill_sender(self, kind: str, *, source: PeerId | None = None, after: int = 0) -> None:
        """Kill a sender instead of sending a message of this type to a peer that has got `after` of them."""
        self._deadly = kind, source, after

    def reachable_locked(
        self, dialler: MemoryTransport, peer: PeerId, address: str
    ) -> MemoryTransport | None:
        if frozenset((dialler.me, peer)) in self._disconnected:
            return None
        return super().reachable_locked(dialler, peer, address)

    def deliver_locked(
        self, source: MemoryTransport, link: MemoryConnection, queued: QueuedMessage[Message]
    ) -> bool:
        kind, sender, after = self._deadly
        if queued.kind == kind and sender in (None, source.me):
            pair = (source.me, link.other_end(source).me)
            self._seen[pair] += 1
            if self._seen[pair] > after:
                self.kill_locked(source.me)
                raise EndpointKilled(f"endpoint {source.me.hex()[:8]} was killed by the test")
        return queued.kind == self._dropped or super().deliver_locked(source, link, queued)
