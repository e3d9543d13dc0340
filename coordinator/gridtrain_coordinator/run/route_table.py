"""How each worker reaches each other one: directly, dialled by the other side, or through a relay.

    a reaches b at           who dials                      address of b in the member list for a
    b's verified address     a (both can: the larger key)   tcp://...
    nothing, but b reaches a b                              (empty: b dials)
    neither                  both, to a third               relay:<its key>

A worker's own word is not enough: an address is given to others only if the coordinator reached the worker
there, or to workers behind the same router.

A route on which a pair could not connect (`PeersUnreachable`) is not tried again.  The next one is used: the
verified address, then the address inside a common network, then relays, at last the coordinator itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gridtrain.core.messages import RELAY_PREFIX, PeerId

_NUMERIC = re.compile(r"tcp://(\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d{1,5}|memory://.+")
"""Only numeric addresses: a name is a worker's word, and would be looked up by the worker that dials."""

MAX_BLOCKED = 100_000


@dataclass(frozen=True, slots=True)
class PeerLocation:
    """Where a worker is.

    Attributes:
        claimed_address: at which it listens, by its own word.
        host: from where its connection to the coordinator comes.
        verified_address: at which the coordinator reached it; empty: at none, it is behind NAT.
        can_relay: it is willing to forward messages of others.
    """

    claimed_address: str
    host: str
    verified_address: str
    can_relay: bool = True


def dial_back_addresses(location: PeerLocation) -> tuple[str, ...]:
    """Addresses at which to dial a worker: the claimed one, and the same port at its connection's host."""
    host, _, port = location.claimed_address.removeprefix("tcp://").rpartition(":")
    if (
        not location.claimed_address.startswith("tcp://")
        or not location.host
        or host.strip("[]") == location.host
    ):
        return (location.claimed_address,) if location.claimed_address else ()
    seen = f"[{location.host}]" if ":" in location.host else location.host
    return (location.claimed_address, f"tcp://{seen}:{port}")


class RouteTable:
    """The locations of all workers, and the routes that failed.

    Args:
        coordinator: its key; the relay of last resort.
    """

    def __init__(self, coordinator: PeerId) -> None:
        self._coordinator = coordinator
        self._locations: dict[PeerId, PeerLocation] = {}
        self._blocked: set[tuple[PeerId, PeerId, str]] = set()

    def location(self, peer: PeerId) -> PeerLocation | None:
        return self._locations.get(peer)

    def reachability_text(self, peer: PeerId) -> str:
        """For the status: whether others can dial the worker."""
        location = self._locations.get(peer)
        return "?" if location is None else "direct" if location.verified_address else "behind NAT"

    def is_directly_reachable(self, peer: PeerId) -> bool:
        """Everybody can dial it, and no route has failed."""
        location = self._locations.get(peer)
        return location is not None and bool(location.verified_address) and not self._blocked

    def set_location(self, peer: PeerId, location: PeerLocation) -> None:
        """Set a worker's location; if it has changed, failed routes are forgotten."""
        if self._locations.get(peer) != location:
            self.forget(peer)
            self._locations[peer] = location

    def forget(self, peer: PeerId) -> None:
        self._locations.pop(peer, None)
        self._blocked = {route for route in self._blocked if peer not in route[:2]}

    def block(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> str:
        """`viewer` could not connect to `other` as it was told; returns the route that is given up."""
        route = self.address(viewer, other, relays)
        if route and len(self._blocked) < MAX_BLOCKED:
            self._blocked.add((viewer, other, route))
            if route.startswith(RELAY_PREFIX):
                self._blocked.add((other, viewer, route))
        return route

    def address(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> str:
        """What `viewer` is told about `other`; empty: `other` dials.  The answers for both sides match.

        Args:
            relays: members to choose from, in rank order.
        """
        here, there = self._locations.get(viewer), self._locations.get(other)
        if here and there and here.verified_address and there.verified_address and not self._blocked:
            return (
                there.verified_address if viewer > other else ""
            )  # as below, but fast enough for a million pairs
        forward, backward = self._direct(viewer, other), self._direct(other, viewer)
        if forward and backward:
            better = (forward.is_verified, viewer) > (backward.is_verified, other)
            return forward.address if better else ""
        if forward:
            return forward.address
        return "" if backward else RELAY_PREFIX + self._relay(viewer, other, relays).hex()

    def relay_candidates(self, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        """Those of `peers` that can serve as relays."""
        return tuple(
            p
            for p in peers
            if (location := self._locations.get(p)) and location.verified_address and location.can_relay
        )

    def _direct(self, viewer: PeerId, other: PeerId) -> _Route | None:
        """The best address at which `viewer` can dial `other`; None: there is none."""
        here, there = self._locations.get(viewer), self._locations.get(other)
        if there is None:
            return None
        routes = [_Route(there.verified_address, True)] if there.verified_address else []
        near = here is not None and here.host == there.host
        if (
            near
            and there.claimed_address != there.verified_address
            and _NUMERIC.fullmatch(there.claimed_address)
        ):
            routes.append(
                _Route(there.claimed_address, False)
            )  # behind the same router, or on the same machine
        return next((route for route in routes if (viewer, other, route.address) not in self._blocked), None)

    def _relay(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> PeerId:
        """A member that both can dial, chosen by the pair's keys to spread the load; else the coordinator."""
        pair = b"".join(sorted((viewer, other)))
        first = int.from_bytes(blake2b(pair, digest_size=4).digest(), "big")
        for i in range(len(relays)):
            relay = relays[(first + i) % len(relays)]
            if relay in (viewer, other) or (viewer, other, RELAY_PREFIX + relay.hex()) in self._blocked:
                continue
            if self._direct(viewer, relay) and self._direct(other, relay):
                return relay
        return self._coordinator


@dataclass(frozen=True, slots=True)
class _Route:
    address: str
    is_verified: bool
