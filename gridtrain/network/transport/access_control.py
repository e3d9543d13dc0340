"""Checks whether a key may connect and send, and defines the limit on connections of pending members.

A stranger holds a key that may not connect.  A pending member authenticated only with an invitation's key.

    handshake   is_admitted           a stranger gets no answer, not even our Hello
    Hello       is_still_admitted     Hello must also name the key that the connection authenticated
    message     is_still_admitted     a key that the policy no longer admits is disconnected

`PeerAllowlist` is the access policy of a worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from gridtrain.core.messages import PeerId
from gridtrain.network.transport.interface import AccessPolicy, ConnectionRole

MAX_PENDING_MEMBERS = 64
"""The maximum number of simultaneous connections of pending members.  Beyond it, the oldest connections are
closed, because a pending member sends only one message."""


def is_admitted(policy: AccessPolicy, key: PeerId) -> bool:
    """Return whether the policy admits this key, in whatever role."""
    return policy(key) is not ConnectionRole.STRANGER


def is_still_admitted(policy: AccessPolicy, key: PeerId, is_pending: bool) -> bool:
    """Return whether the policy still admits a connection in the role in which it was admitted."""
    return policy(key) is (ConnectionRole.PENDING_MEMBER if is_pending else ConnectionRole.MEMBER)


def pending_member_name(key: PeerId, connection: bytes) -> PeerId:
    """Return a name for one connection of a pending member.

    A name is needed because several connections may share an invitation's key.  The name has the form of a
    public key, but is not one.
    """
    return hashlib.blake2b(connection, key=key, digest_size=32, person=b"gridtrain guest").digest()


class PeerAllowlist:
    """A worker's `AccessPolicy`: admits the coordinator, and the peers that the worker's core knows (members
    of its generation, workers that the coordinator has announced, and state sources or newcomers).

    The I/O loop replaces the set of admitted keys when the core requests this; it does so in the thread in
    which the transport calls the policy.

    Args:
        coordinator: the coordinator's key, which is admitted from the beginning.
        relays: whether this worker is willing to relay between other peers.
    """

    def __init__(self, coordinator: PeerId, *, relays: bool = True) -> None:
        self._keys = frozenset((coordinator,))
        self._relays = relays

    def __call__(self, key: PeerId) -> ConnectionRole:
        return ConnectionRole.MEMBER if key in self._keys else ConnectionRole.STRANGER

    def replace(self, keys: Collection[PeerId]) -> None:
        self._keys = frozenset(keys)

    def may_relay(self, origin: PeerId, to: PeerId) -> bool:
        """Return whether to relay from `origin` to `to`; both keys must be admitted."""
        return self._relays and origin in self._keys and to in self._keys
