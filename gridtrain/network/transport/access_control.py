"""Who may connect, and who may still speak.

Decides from a key and a gate alone, for the memory and the ZeroMQ transport alike.  Never touches a
socket.  Each question is a function of its own, looked up when it is asked, so that a test can take one
away and show what it is for.

    handshake   lets_in         a stranger gets nothing, not even our Hello
    Hello       speaks_for      the key that it names is the one that the connection was made with
    message     speaks_for, still_admitted      what the gate has changed its mind about ends at once
"""

from __future__ import annotations

import hashlib

from gridtrain.core.messages import PeerId
from gridtrain.network.transport.interface import AccessPolicy, ConnectionRole

MOST_GUESTS = 64
"""Guests at a time; one more, and the one that came first is cut: none has more to say than one message."""


def is_admitted(gate: AccessPolicy, key: PeerId) -> bool:
    """Whether a connection with this key may be made at all."""
    return gate(key) is not ConnectionRole.STRANGER


def is_key_match(proved: str, named: str) -> bool:
    """Whether the key that the connection proved to have is the one whose words these should be."""
    return proved == named


def is_still_admitted(gate: AccessPolicy, key: PeerId, guest: bool) -> bool:
    """Whether a connection that was let in as a guest or as a peer would be let in as the same now."""
    return gate(key) is (ConnectionRole.PENDING_MEMBER if guest else ConnectionRole.MEMBER)


def pending_member_name(key: PeerId, connection: bytes) -> PeerId:
    """A name for one connection of those who share an invitation's key; nobody has its secret key."""
    return hashlib.blake2b(connection, key=key, digest_size=32, person=b"gridtrain guest").digest()
