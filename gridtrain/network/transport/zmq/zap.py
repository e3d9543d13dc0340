"""The doorman: answers libzmq's question whether a key may finish its handshake (ZAP, RFC 27).

Decides yes or no, by the gate.  Never touches a message of a peer.  Without a handler libzmq lets in every
key there is; so the transport binds this one before it listens, in its own context, and asks libzmq to
refuse everybody should it be missing (ZAP_ENFORCE_DOMAIN).

    stranger --handshake--> ROUTER --request: domain, address, CURVE, key--> Zap --> gate
             <----400------        <------- 200 and User-Id, or 400 --------
"""

from __future__ import annotations

import contextlib

import zmq

from gridtrain.network.transport import access_control
from gridtrain.network.transport.identity import KEY_BYTES
from gridtrain.network.transport.interface import AccessPolicy

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"gridtrain"
BATCH_REQUESTS = 256
"""At most so many are answered before messages have their turn."""

_VERSION = b"1.0"


def authenticate(gate: AccessPolicy, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> str:
    """The User-Id of whoever asks, which is its key in hexadecimal; empty: it is refused."""
    if domain != DOMAIN or mechanism != b"CURVE" or len(credentials) != 1:
        return ""
    (key,) = credentials
    return key.hex() if len(key) == KEY_BYTES and access_control.is_admitted(gate, key) else ""


class ZapHandler:
    """The handler of one context.  Raises `zmq.ZMQError` if the context has one already."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], gate: AccessPolicy) -> None:
        self._gate = gate
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def handle_requests(self) -> None:
        """Answer what was asked, without waiting."""
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH_REQUESTS):
                self._handle_request(self.socket.recv_multipart(zmq.DONTWAIT))

    def close(self) -> None:
        self.socket.close(linger=0)

    def _handle_request(self, frames: list[bytes]) -> None:
        """Routing id, empty, version, the request's id, domain, address, identity, mechanism, credentials."""
        if len(frames) < 8 or frames[2] != _VERSION:
            return  # libzmq asks no such thing; unanswered, the handshake ends by its time limit
        asker, _, version, request, domain, _, _, mechanism, *credentials = frames
        user_id = authenticate(self._gate, domain, mechanism, credentials)
        status = [b"200", b""] if user_id else [b"400", b"not admitted"]
        self.socket.send_multipart(
            [asker, b"", version, request, *status, user_id.encode(), b""], zmq.DONTWAIT, copy=True
        )
