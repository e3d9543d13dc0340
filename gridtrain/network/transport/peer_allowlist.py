"""Whom a worker lets in: the coordinator, the members of its generation, and who was announced to it.

The loop replaces the set when the core says so; the transport asks at each handshake and message, in
the same thread.
"""

from __future__ import annotations

from collections.abc import Collection

from gridtrain.core.messages import PeerId
from gridtrain.network.transport.interface import ConnectionRole


class PeerAllowlist:
    """A `Gate` whose answers change with the generations.

    Args:
        coordinator: its key, always let in.
        relays: this worker is willing to pass on what others send one another.
    """

    def __init__(self, coordinator: PeerId, *, relays: bool = True) -> None:
        self._keys = frozenset((coordinator,))
        self._relays = relays

    def __call__(self, key: PeerId) -> ConnectionRole:
        return ConnectionRole.MEMBER if key in self._keys else ConnectionRole.STRANGER

    def replace(self, keys: Collection[PeerId]) -> None:
        self._keys = frozenset(keys)

    def may_relay(self, origin: PeerId, to: PeerId) -> bool:
        """Between members only."""
        return self._relays and origin in self._keys and to in self._keys
