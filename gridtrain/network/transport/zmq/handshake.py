"""The start of a connection: CURVE and keys (ZAP, RFC 27), Hello, and the check of protocol versions.

    stranger --handshake--> ROUTER --request: domain, mechanism, key--> ZapHandler --> access policy
             <---- 400 -----        <------- 200 and User-Id, or 400 ----------

    Hello --> well-formed? --> authenticated key? -> access policy --> Connection of a peer
                  |                 |                    +-----------> Connection of a pending member, with a
                  |                 |                    |             generated name
                  +--- no: RemoteProtocolError           +-----------> None for a stranger

Without a ZAP handler, libzmq admits every key.  Therefore, the handler is bound before the transport listens,
in the same context, and ZAP_ENFORCE_DOMAIN makes libzmq refuse all keys if there is no handler.
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
    VersionMismatch,
)
from gridtrain.network.transport.zmq import sockets
from gridtrain.network.transport.zmq.dialer import Connection
from gridtrain.network.transport.zmq.tcp_options import TcpConnection
from gridtrain.network.wire import codec

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
BATCH_REQUESTS = 256
"""The maximum number of requests to answer in one iteration of the loop, so that messages are not delayed."""

_ZAP_VERSION = b"1.0"


def authenticate(policy: AccessPolicy, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> str:
    """Return the User-Id of an admitted key, which is the key in hexadecimal; "" if the key is refused."""
    if domain != sockets.ZAP_DOMAIN or mechanism != b"CURVE" or len(credentials) != 1:
        return ""
    (key,) = credentials
    return key.hex() if len(key) == KEY_BYTES and access_control.is_admitted(policy, key) else ""


class ZapHandler:
    """Answers libzmq's ZAP requests, which ask whether the owner of a key may complete the handshake.

    Raises:
        zmq.ZMQError: the context already has a handler.
    """

    def __init__(self, context: sockets.Context, policy: AccessPolicy) -> None:
        self._policy = policy
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def handle_requests(self) -> None:
        """Answer the pending requests without waiting for further requests."""
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH_REQUESTS):
                self._handle_request(self.socket.recv_multipart(zmq.DONTWAIT))

    def close(self) -> None:
        self.socket.close(linger=0)

    def _handle_request(self, frames: list[bytes]) -> None:
        """Answer one request.

        The request's frames are routing id, empty, version, request id, domain, address, identity, mechanism
        and credentials.
        """
        if len(frames) < 8 or frames[2] != _ZAP_VERSION:
            return  # not a request from libzmq; without an answer the handshake times out
        routing_id, _, version, request, domain, _, _, mechanism, *credentials = frames
        user_id = authenticate(self._policy, domain, mechanism, credentials)
        status = [b"200", b""] if user_id else [b"400", b"not admitted"]
        self.socket.send_multipart(
            [routing_id, b"", version, request, *status, user_id.encode(), b""], zmq.DONTWAIT, copy=True
        )


def decode_message(incoming: sockets.IncomingMessage, traffic: TrafficCounters) -> Message:
    """Decode a message and count its bytes in `traffic`; raise `RemoteProtocolError` if it is invalid."""
    if incoming.excess:
        raise RemoteProtocolError(incoming.excess)
    message = codec.decode(incoming.frames)
    traffic.count_received(type(message).__name__, incoming.wire_bytes)
    return message


def read_hello(incoming: sockets.IncomingMessage, traffic: TrafficCounters) -> Hello:
    """Decode the first message of a connection; raise `RemoteProtocolError` if it is not a valid Hello."""
    message = decode_message(incoming, traffic)
    if not isinstance(message, Hello):
        raise RemoteProtocolError(f"{type(message).__name__} arrived before Hello")
    return message


def check_hello(hello: Hello, incoming: sockets.IncomingMessage, me: PeerId, *, encrypted: bool) -> None:
    """Raise `RemoteProtocolError` if Hello names our key or one that the connection did not authenticated.

    Without encryption, a connection authenticates no key, and only our own key is refused.
    """
    if incoming.user_id != (hello.peer.hex() if encrypted else ""):
        raise RemoteProtocolError(f"key {incoming.user_id[:8]} sent a Hello as key {hello.peer.hex()[:8]}")
    if hello.peer == me:
        raise RemoteProtocolError("a peer sent a Hello for our own key")


def make_connection(
    hello: Hello,
    incoming: sockets.IncomingMessage,
    router: zmq.Socket[bytes],
    tcp: TcpConnection | None,
    policy: AccessPolicy,
) -> Connection | None:
    """Return the connection over which `hello` arrived, or None if the access policy refuses its key."""
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


def version_mismatch(hello: Hello, peer: PeerId | None, host: str = "") -> VersionMismatch:
    reason = (
        f"the peer uses protocol version {hello.version}, but this software uses version {PROTOCOL_VERSION} "
        f"(the peer runs {hello.software!r}) -> install the same version of gridtrain on both machines"
    )
    return VersionMismatch(peer, reason, hello.peer, host, hello.version, hello.software)
