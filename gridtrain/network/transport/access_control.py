"""Who may connect, and who may still send: checks of a key against an access policy, for every transport.

    handshake   is_admitted                         a stranger gets nothing, not even our Hello
    Hello       is_key_match                        it must name the key that the connection has proven
    message     is_key_match, is_still_admitted     a key that the policy no longer admits is cut off at once

Each check is a module function that callers look up by name, so that tests can replace one and show what it
is for.  `PeerAllowlist` is the access policy of a worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from gridtrain.core.messages import PeerId
from gridtrain.network.transport.interface import AccessPolicy, ConnectionRole

MAX_PENDING_MEMBERS = 64
"""Connections of pending members at a time.  One more, and the oldest is closed: none sends more than one
message."""


def is_admitted(policy: AccessPolicy, key: PeerId) -> bool:
    """Whether a connection with this key may be made at all."""
    return policy(key) is not ConnectionRole.STRANGER


def is_key_match(proven: str, named: str) -> bool:
    """Whether the key that the connection has proven is the one in whose name it sends."""
    return proven == named


def is_still_admitted(policy: AccessPolicy, key: PeerId, is_pending: bool) -> bool:
    """Whether a connection that was admitted as a pending member or as a member still would be."""
    return policy(key) is (ConnectionRole.PENDING_MEMBER if is_pending else ConnectionRole.MEMBER)


def pending_member_name(key: PeerId, connection: bytes) -> PeerId:
    """A name for one connection among those that share an invitation's key; it is nobody's public key."""
    return hashlib.blake2b(connection, key=key, digest_size=32, person=b"gridtrain guest").digest()


class PeerAllowlist:
    """A worker's `AccessPolicy`: the coordinator, the members of its generation, and announced workers.

    The I/O loop replaces the set when its core says so; the transport asks in the same thread.

    Args:
        coordinator: its key, admitted from the beginning.
        relays: whether this worker is willing to relay between others.
    """

    def __init__(self, coordinator: PeerId, *, relays: bool = True) -> None:
        self._keys = frozenset((coordinator,))
        self._relays = relays

    def __call__(self, key: PeerId) -> ConnectionRole:
        return ConnectionRole.MEMBER if key in self._keys else ConnectionRole.STRANGER

    def replace(self, keys: Collection[PeerId]) -> None:
        self._keys = frozenset(keys)

    def may_relay(self, origin: PeerId, to: PeerId) -> bool:
        """Whether to relay from `origin` to `to`: between admitted keys only."""
        return self._relays and origin in self._keys and to in self._keys
