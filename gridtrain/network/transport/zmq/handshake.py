"""The first message of a connection: who greets, and as what it may stay.

Decides from the message, the key that the connection was made with, and the gate.  Never touches a socket.

    Hello --> well-formed? --> the key's own? --> gate --> Link, as a peer
                  |                 |              +-----> Link, as a guest, with a name of our making
                  +--- no: RemoteProtocolError     +-----> None: a stranger
"""

from __future__ import annotations

from gridtrain.core.messages import PROTOCOL_VERSION, Hello, Message, PeerId
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.transport import access_control
from gridtrain.network.transport.interface import (
    AccessPolicy,
    ConnectionRole,
    PeerUp,
    TrafficCounters,
    TransportViolation,
)
from gridtrain.network.transport.zmq.dialer import Connection
from gridtrain.network.transport.zmq.sockets import IncomingMessage
from gridtrain.network.wire import codec


def decode_message(incoming: IncomingMessage, traffic: TrafficCounters) -> Message:
    """Any message; what could be read is counted.  Raises `RemoteProtocolError`."""
    if incoming.excess:
        raise RemoteProtocolError(incoming.excess)
    message = codec.decode(incoming.frames)
    traffic.count_received(type(message).__name__, incoming.nbytes)
    return message


def read_hello(incoming: IncomingMessage, traffic: TrafficCounters) -> Hello:
    """Raises `RemoteProtocolError`."""
    message = decode_message(incoming, traffic)
    if not isinstance(message, Hello):
        raise RemoteProtocolError(f"{type(message).__name__} before Hello")
    return message


def check_hello(hello: Hello, incoming: IncomingMessage, me: PeerId, *, encrypted: bool) -> None:
    """Whoever connected to us names the key that it has proved.  Raises `RemoteProtocolError`."""
    if not access_control.is_key_match(incoming.user_id, hello.peer.hex() if encrypted else ""):
        raise RemoteProtocolError(f"key {incoming.user_id[:8]} greets as {hello.peer.hex()[:8]}")
    if hello.peer == me:
        raise RemoteProtocolError("a peer greets with our own key")


def make_connection(hello: Hello, incoming: IncomingMessage, gate: AccessPolicy) -> Connection | None:
    """The connection as the gate lets it stay; None: it does not."""
    guest = gate(hello.peer) is ConnectionRole.PENDING_MEMBER
    if not access_control.is_still_admitted(gate, hello.peer, guest):
        return None
    return Connection(
        access_control.pending_member_name(hello.peer, incoming.routing_id) if guest else hello.peer,
        hello.peer,
        hello.software,
        routing_id=incoming.routing_id,
        user_id=incoming.user_id,
        fd=incoming.fd,
        host=incoming.host,
        is_pending=guest,
    )


def peer_up_event(link: Connection) -> PeerUp:
    return PeerUp(link.peer, link.software, link.host, link.key if link.is_pending else None)


def hello_mismatch(hello: Hello, name: PeerId | None) -> TransportViolation:
    return TransportViolation(
        name,
        f"peer speaks gridtrain protocol {hello.version}, this software speaks {PROTOCOL_VERSION} "
        f"(the peer runs {hello.software!r}) -> install the same version of gridtrain on both machines",
    )
