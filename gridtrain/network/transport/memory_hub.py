"""The network of the memory transport: which endpoints live, and the edges between them.

Decides who can connect to whom, and the fate of each message as the fault plan says.  Never keeps a
message: those wait at the endpoints, in `memory.py`.

    endpoint A --dial--> [port taken? hidden? cut? gates?] --> Edge(A, B) --> PeerUp at both
    endpoint A --message--> [room at B? fault plan?] --> B's mailbox
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gridtrain.core.messages import Message, PeerId
from gridtrain.errors import GridtrainError
from gridtrain.network.transport import access_control
from gridtrain.network.transport.interface import ConnectionRole, PeerUp, Received
from gridtrain.network.transport.message_faults import FaultPlan
from gridtrain.network.transport.send_queue import QueuedMessage

if TYPE_CHECKING:
    from gridtrain.network.transport.in_memory import MemoryTransport


class EndpointKilled(GridtrainError):
    """The fault plan killed this endpoint: its thread should end without another word."""


@dataclass(slots=True, eq=False)
class MemoryConnection:
    """A connection.

    Attributes:
        name: how the acceptor calls the dialler: its key, or for a guest an invented name.
        deaf: the acceptor has hung up since.
    """

    initiator: MemoryTransport
    acceptor: MemoryTransport
    name: PeerId
    is_ignored: bool = False

    @property
    def is_pending(self) -> bool:
        return self.name != self.initiator.me

    def other_end(self, me: MemoryTransport) -> MemoryTransport:
        return self.acceptor if me is self.initiator else self.initiator

    def name_for(self, me: MemoryTransport) -> PeerId:
        """How `me` calls the other end."""
        return self.acceptor.me if me is self.initiator else self.name

    def keys(self) -> frozenset[PeerId]:
        return frozenset((self.initiator.me, self.acceptor.me))


class MemoryHub:
    """The network that the endpoints of one process share.  Thread-safe.

    Args:
        plan: faults to apply to messages; None: none.
    """

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self.lock = threading.Lock()
        self.ports: dict[str, MemoryTransport] = {}
        self._alive: list[MemoryTransport] = []
        self._disconnected: set[frozenset[PeerId]] = set()
        self._hidden: set[PeerId] = set()
        self._pending_numbers = itertools.count()

    @property
    def endpoints(self) -> dict[PeerId, MemoryTransport]:
        """Those that live, by key; of several with one key the latest."""
        return {endpoint.me: endpoint for endpoint in self._alive}

    # -- faults by hand, from any thread -------------------------------------------------------

    def disconnect(self, a: PeerId, b: PeerId) -> None:
        """Break the edge and keep it broken until `heal`; both ends see `PeerDown`."""
        with self.lock:
            self._disconnect_locked(a, b)

    def reconnect(self, a: PeerId, b: PeerId) -> None:
        """Whoever dialled is connected again."""
        with self.lock:
            self._disconnected.discard(frozenset((a, b)))
            self.retry_locked()

    def kill(self, peer: PeerId) -> None:
        """As SIGKILL: peers see `PeerDown`, the endpoint's own calls raise `EndpointKilled`."""
        with self.lock:
            self._kill_locked(peer)

    def hide(self, peer: PeerId) -> None:
        """As behind NAT: nobody can dial it until `show`, but it can dial others.  Edges stay."""
        with self.lock:
            self._hidden.add(peer)

    def show(self, peer: PeerId) -> None:
        """Whoever dialled it in the meantime is connected."""
        with self.lock:
            self._hidden.discard(peer)
            self.retry_locked()

    # -- for the endpoints, which hold the lock ------------------------------------------------

    def add_locked(self, endpoint: MemoryTransport) -> None:
        self._alive.append(endpoint)

    def remove_locked(self, endpoint: MemoryTransport, reason: str) -> None:
        """The endpoint is gone: its addresses are free, its edges break."""
        self.ports = {address: other for address, other in self.ports.items() if other is not endpoint}
        self._alive = [other for other in self._alive if other is not endpoint]
        for edge in endpoint.connections_locked():
            self.close_locked(edge, reason)

    def close_locked(
        self, edge: MemoryConnection, reason: str, *, silent: MemoryTransport | None = None
    ) -> None:
        """Both ends lose it; all but `silent` are told, and but the acceptor if it has hung up."""
        for end in (edge.initiator, edge.acceptor):
            quiet = end is silent or (end is edge.acceptor and edge.is_ignored)
            end.connection_lost_locked(edge, None if quiet else reason)

    def retry_locked(self) -> None:
        for endpoint in list(self._alive):
            endpoint.connect_locked(time.monotonic(), early=True)

    def reachable_locked(
        self, dialler: MemoryTransport, peer: PeerId, address: str
    ) -> MemoryTransport | None:
        """Who would answer the handshake; its gate has not been asked."""
        other = self.ports.get(address)
        if other is None or other.me != peer or other is dialler:
            return None
        cut = frozenset((dialler.me, peer)) in self._disconnected
        return None if cut or peer in self._hidden else other

    def connect_locked(self, dialler: MemoryTransport, acceptor: MemoryTransport) -> bool:
        """Connect; False: a gate does not let it happen."""
        if not access_control.is_admitted(acceptor.access_policy, dialler.me):
            return False
        guest = acceptor.access_policy(dialler.me) is ConnectionRole.PENDING_MEMBER
        admitted = access_control.is_still_admitted(acceptor.access_policy, dialler.me, guest)
        if not (admitted and access_control.is_still_admitted(dialler.access_policy, acceptor.me, False)):
            return False
        name = dialler.me
        if guest:
            name = access_control.pending_member_name(dialler.me, str(next(self._pending_numbers)).encode())
        edge = MemoryConnection(dialler, acceptor, name)
        dialler.connection_made_locked(edge, PeerUp(acceptor.me, acceptor.software))
        guest_of = dialler.me if guest else None
        acceptor.connection_made_locked(edge, PeerUp(name, dialler.software, dialler.host, guest_of))
        return True

    def deliver_locked(
        self, source: MemoryTransport, edge: MemoryConnection, parcel: QueuedMessage[Message], now_s: float
    ) -> bool:
        """Deliver, as the plan says; False: the mailbox is full, try again when it was emptied."""
        target = edge.other_end(source)
        if target.is_full_locked(edge, parcel.nbytes):
            return False
        fate = self.plan.next_outcome(source.me, target.me, parcel.kind)
        if fate.kill:
            self._kill_locked(source.me)
            raise EndpointKilled(f"endpoint {source.me.hex()[:8]} was killed by the fault plan")
        if fate.cut:
            self._disconnect_locked(source.me, target.me)
        for delay_s in fate.delays_s:
            event = Received(edge.name_for(target), parcel.body, parcel.nbytes)
            target.post_locked(event, now_s + delay_s, edge)
        return True

    # -- inside --------------------------------------------------------------------------------

    def _disconnect_locked(self, a: PeerId, b: PeerId) -> None:
        self._disconnected.add(frozenset((a, b)))
        for endpoint in list(self._alive):
            for edge in endpoint.connections_locked():
                if edge.keys() == frozenset((a, b)):
                    self.close_locked(edge, "the edge was cut")

    def _kill_locked(self, peer: PeerId) -> None:
        for endpoint in [endpoint for endpoint in self._alive if endpoint.me == peer]:
            self.remove_locked(endpoint, "the peer was killed")
            endpoint.stop_locked(killed=True)
