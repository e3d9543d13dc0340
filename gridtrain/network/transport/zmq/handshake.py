"""The start of a connection: CURVE's handshake (ZAP, RFC 27), then the first message, which must be Hello.

    stranger --handshake--> ROUTER --request: domain, mechanism, key--> ZapHandler --> access policy
             <---- 400 -----        <------- 200 and User-Id, or 400 ----------

    Hello --> well-formed? --> the key's own? --> access policy --> Connection of a peer
                  |                 |                 +-----------> Connection of a pending member, with a
                  |                 |                 |             name that we invent
                  +--- no: RemoteProtocolError        +-----------> None: a stranger

Without a ZAP handler libzmq admits every key.  So the handler is bound before the transport listens, in the
same context, and ZAP_ENFORCE_DOMAIN makes libzmq refuse all if there is none.
"""

from __future__ import annotations

import contextlib

import zmq

from gridtrain.core.messages import PROTOCOL_VERSION, Hello, Message, PeerId
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.transport import access_control
from gridtrain.network.transport.identity import KEY_BYTES
from gridtrain.network.transport.interface import (
    AccessPolicy,
    ConnectionRole,
    PeerUp,
    TrafficCounters,
    TransportViolation,
)
from gridtrain.network.transport.zmq import sockets
from gridtrain.network.transport.zmq.dialer import Connection
from gridtrain.network.transport.zmq.tcp_options import TcpConnection
from gridtrain.network.wire import codec

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
BATCH_REQUESTS = 256
"""Requests answered in one turn of the loop, so that messages are not delayed."""

_ZAP_VERSION = b"1.0"


def authenticate(policy: AccessPolicy, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> str:
    """The User-Id of a key that is admitted, which is the key in hexadecimal; empty: it is refused."""
    if domain != sockets.ZAP_DOMAIN or mechanism != b"CURVE" or len(credentials) != 1:
        return ""
    (key,) = credentials
    return key.hex() if len(key) == KEY_BYTES and access_control.is_admitted(policy, key) else ""


class ZapHandler:
    """Answers libzmq's question whether a key may finish its handshake.

    Raises `zmq.ZMQError` if the context has a handler already.
    """

    def __init__(self, context: sockets.Context, policy: AccessPolicy) -> None:
        self._policy = policy
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def handle_requests(self) -> None:
        """Answer the requests that are there, without waiting."""
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH_REQUESTS):
                self._handle_request(self.socket.recv_multipart(zmq.DONTWAIT))

    def close(self) -> None:
        self.socket.close(linger=0)

    def _handle_request(self, frames: list[bytes]) -> None:
        """Routing id, empty, version, request id, domain, address, identity, mechanism, credentials."""
        if len(frames) < 8 or frames[2] != _ZAP_VERSION:
            return  # not libzmq's; without an answer the handshake times out
        routing_id, _, version, request, domain, _, _, mechanism, *credentials = frames
        user_id = authenticate(self._policy, domain, mechanism, credentials)
        status = [b"200", b""] if user_id else [b"400", b"not admitted"]
        self.socket.send_multipart(
            [routing_id, b"", version, request, *status, user_id.encode(), b""], zmq.DONTWAIT, copy=True
        )


def decode_message(incoming: sockets.IncomingMessage, traffic: TrafficCounters) -> Message:
    """Any message; it is counted if it can be decoded.  Raises `RemoteProtocolError`."""
    if incoming.excess:
        raise RemoteProtocolError(incoming.excess)
    message = codec.decode(incoming.frames)
    traffic.count_received(type(message).__name__, incoming.nbytes)
    return message


def read_hello(incoming: sockets.IncomingMessage, traffic: TrafficCounters) -> Hello:
    """Raises `RemoteProtocolError` for any other message."""
    message = decode_message(incoming, traffic)
    if not isinstance(message, Hello):
        raise RemoteProtocolError(f"{type(message).__name__} before Hello")
    return message


def check_hello(hello: Hello, incoming: sockets.IncomingMessage, me: PeerId, *, encrypted: bool) -> None:
    """Check that Hello names the key which the connection has proven.  Raises `RemoteProtocolError`."""
    if not access_control.is_key_match(incoming.user_id, hello.peer.hex() if encrypted else ""):
        raise RemoteProtocolError(f"key {incoming.user_id[:8]} greets as {hello.peer.hex()[:8]}")
    if hello.peer == me:
        raise RemoteProtocolError("a peer greets with our own key")


def make_connection(
    hello: Hello,
    incoming: sockets.IncomingMessage,
    router: zmq.Socket[bytes],
    tcp: TcpConnection | None,
    policy: AccessPolicy,
) -> Connection | None:
    """The accepted connection of an admitted peer; None: it is not admitted."""
    is_pending = policy(hello.peer) is ConnectionRole.PENDING_MEMBER
    if not access_control.is_still_admitted(policy, hello.peer, is_pending):
        return None
    name = hello.peer
    if is_pending:
        name = access_control.pending_member_name(hello.peer, incoming.routing_id)
    return Connection(
        name,
        hello.peer,
        hello.software,
        router,
        routing_id=incoming.routing_id,
        user_id=incoming.user_id,
        accepted_tcp=tcp,
        host=incoming.host,
        is_pending=is_pending,
    )


def peer_up_event(connection: Connection) -> PeerUp:
    pending_key = connection.key if connection.is_pending else None
    return PeerUp(connection.peer, connection.software, connection.host, pending_key)


def version_mismatch(hello: Hello, peer: PeerId | None) -> TransportViolation:
    return TransportViolation(
        peer,
        f"peer speaks gridtrain protocol {hello.version}, this software speaks {PROTOCOL_VERSION} "
        f"(the peer runs {hello.software!r}) -> install the same version of gridtrain on both machines",
    )
