"""How each worker reaches each other one: directly, from the other side, or through a relay.

Decides for each pair, from what the coordinator has seen, who dials which address.  Never dials, and
never believes a worker's word alone: an address is given to others only if the coordinator got
through to it, or to neighbours behind the same router.

    a reaches b at           who dials                      the Roster's address of b, as told to a
    b's proven address       a (both can: the larger key)   tcp://...
    nothing, but b reaches a b                              (empty: it will come)
    neither                  both, to a third               relay:<its key>

Where a pair could not connect as it was told (`NoRoute`) that way is not tried again, and the next
one is taken: the proven address, then the one inside a common network, then relays, at last the
coordinator itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gridtrain.core.messages import RELAY_PREFIX, PeerId

_NUMERIC = re.compile(r"tcp://(\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d{1,5}|memory://.+")
"""A name would have to be looked up by whoever dials, and is no more than a worker's word."""

MAX_BLOCKED = 100_000


@dataclass(frozen=True, slots=True)
class PeerLocation:
    """Where a worker is.

    Attributes:
        claimed: the address that it listens at, by its own word.
        host: where its connection to the coordinator comes from.
        proven: an address at which the coordinator got through to it; empty: none, it is behind NAT.
        relays: it is willing to pass on what others send one another.
    """

    claimed_address: str
    host: str
    verified_address: str
    can_relay: bool = True


def dial_back_addresses(place: PeerLocation) -> tuple[str, ...]:
    """Addresses to call a worker back at: the one it claims, and the same port of where it came from."""
    host, _, port = place.claimed_address.removeprefix("tcp://").rpartition(":")
    if not place.claimed_address.startswith("tcp://") or not place.host or host.strip("[]") == place.host:
        return (place.claimed_address,) if place.claimed_address else ()
    seen = f"[{place.host}]" if ":" in place.host else place.host
    return (place.claimed_address, f"tcp://{seen}:{port}")


class RouteTable:
    """The places of all workers, and which ways were tried in vain.

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
        """For people: can others dial it?"""
        place = self._locations.get(peer)
        return "?" if place is None else "direct" if place.verified_address else "behind NAT"

    def is_directly_reachable(self, peer: PeerId) -> bool:
        """Everybody can dial it, and nobody has tried in vain."""
        place = self._locations.get(peer)
        return place is not None and bool(place.verified_address) and not self._blocked

    def set_location(self, peer: PeerId, place: PeerLocation) -> None:
        """The worker is there now; what was tried in vain with another place is forgotten."""
        if self._locations.get(peer) != place:
            self.forget(peer)
            self._locations[peer] = place

    def forget(self, peer: PeerId) -> None:
        self._locations.pop(peer, None)
        self._blocked = {way for way in self._blocked if peer not in way[:2]}

    def block(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> str:
        """`viewer` could not connect to `other` as it was told; returns the way that is given up."""
        way = self.address(viewer, other, relays)
        if way and len(self._blocked) < MAX_BLOCKED:
            self._blocked.add((viewer, other, way))
            if way.startswith(RELAY_PREFIX):
                self._blocked.add((other, viewer, way))
        return way

    def address(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> str:
        """What `viewer` is told about `other`; empty: wait for it.  Both sides' answers fit together.

        Args:
            relays: members to choose from, in the order of ranks.
        """
        here, there = self._locations.get(viewer), self._locations.get(other)
        if here and there and here.verified_address and there.verified_address and not self._blocked:
            return there.verified_address if viewer > other else ""  # as below, for a million pairs
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
            if (place := self._locations.get(p)) and place.verified_address and place.can_relay
        )

    def _direct(self, viewer: PeerId, other: PeerId) -> _Route | None:
        """The best address at which `viewer` can dial `other`."""
        here, there = self._locations.get(viewer), self._locations.get(other)
        if there is None:
            return None
        ways = [_Route(there.verified_address, True)] if there.verified_address else []
        near = here is not None and here.host == there.host
        if (
            near
            and there.claimed_address != there.verified_address
            and _NUMERIC.fullmatch(there.claimed_address)
        ):
            ways.append(
                _Route(there.claimed_address, False)
            )  # behind the same router, or on the same machine
        return next((way for way in ways if (viewer, other, way.address) not in self._blocked), None)

    def _relay(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> PeerId:
        """A member that both can dial, the pairs spread over all of them; else the coordinator."""
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
