"""Chooses how two workers connect: one of them dials the other, or a relay forwards their messages.

    who can dial whom         who dials                          address of b in the member list for a
    only a can dial b         a                                  tcp://...
    only b can dial a         b                                  empty
    each can dial the other   the one with the larger key (*)    tcp://... if a dials, otherwise empty
    neither                   both dial a relay                  relay:<its key>

(*) If only one of the two addresses is verified, it is the one that is dialled.

A worker's claim is not enough: others receive its address only if the coordinator has reached the worker at
that address, or if they are behind the same router.

Workers that every worker can dial receive one common list with all their addresses, and tell from the keys
whom to dial.

A route over which a pair could not connect (`PeersUnreachable`) is not tried again.  The pair then uses the
next of these routes: the verified address, the address inside a shared network, a relay, the coordinator.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gridtrain.core.messages import RELAY_PREFIX, PeerId
from gridtrain_coordinator.run.recent_dict import RecentDict

_NUMERIC = re.compile(r"tcp://(\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d{1,5}|memory://.+")
"""Matches numeric addresses only, so that no worker resolves a host name claimed by another worker."""

_Blocked = tuple[PeerId, PeerId, str]
"""A failed route: the viewer, the other worker, and the address."""

MAX_BLOCKED = 100_000
MAX_LOST = 1024  # absent workers whose routes are kept for their return


@dataclass(frozen=True, slots=True)
class PeerLocation:
    """The addresses of a worker.

    Attributes:
        claimed_address: the address on which the worker claims to listen.
        host: the source address of its connection to the coordinator.
        verified_address: the address at which the coordinator reached it; empty if it is behind NAT.
        can_relay: whether it is willing to forward messages between other workers.
    """

    claimed_address: str
    host: str
    verified_address: str
    can_relay: bool = True


def dial_back_addresses(location: PeerLocation) -> tuple[str, ...]:
    """Return the addresses at which to dial a worker.

    These are the claimed address and the same port at the source address of the worker's connection.
    """
    claimed = location.claimed_address
    host, _, port = claimed.removeprefix("tcp://").rpartition(":")
    if not claimed.startswith("tcp://") or location.host in ("", host.strip("[]")):
        return (claimed,) if claimed else ()
    seen = f"[{location.host}]" if ":" in location.host else location.host
    return (claimed, f"tcp://{seen}:{port}")


class RouteTable:
    """The locations of all workers, and the failed routes; those of absent workers are kept apart.

    Args:
        coordinator: the coordinator's key; the coordinator is the relay of last resort.
    """

    def __init__(self, coordinator: PeerId) -> None:
        self._coordinator = coordinator
        self._locations: dict[PeerId, PeerLocation] = {}
        self._blocked: set[_Blocked] = set()
        self._blocked_ends: set[PeerId] = set()  # the workers in `_blocked`
        self._lost: RecentDict[PeerId, PeerLocation] = RecentDict(MAX_LOST)
        self._set_aside: set[_Blocked] = set()  # the failed routes to and from the workers in `_lost`
        self.version = 0  # increases whenever a location changes

    def location(self, peer: PeerId) -> PeerLocation | None:
        return self._locations.get(peer)

    def reachability_text(self, peer: PeerId) -> str:
        """Return "direct", "behind NAT" or, if not yet known, "?", for the status."""
        location = self._locations.get(peer)
        return "?" if location is None else "direct" if location.verified_address else "behind NAT"

    def is_directly_reachable(self, peer: PeerId) -> bool:
        """Return whether every worker can dial this one, and no route between workers has failed."""
        return bool(self.verified_address(peer)) and not self._blocked

    def set_location(self, peer: PeerId, location: PeerLocation) -> None:
        """Set a worker's location; if it has changed, discard the failed routes to and from the worker."""
        if self._locations.get(peer) != location:
            self.forget(peer)
            self._locations[peer] = location

    def set_aside_absent(self, present: Collection[PeerId]) -> None:
        """Keep the locations and failed routes of all workers except `present` apart until they return.

        Otherwise each pair of which one worker never returns would disable the common list.
        """
        for peer in [peer for peer in self._locations if peer not in present]:
            self._lost[peer] = self._locations.pop(peer)
        self._sort_routes()

    def restore(self, peer: PeerId) -> None:
        """Restore the location of a worker that returns, and its failed routes to the present workers."""
        if peer in self._lost:
            self._locations[peer] = self._lost.pop(peer)
            self._sort_routes()

    def forget(self, peer: PeerId) -> None:
        self._locations.pop(peer, None)
        self._lost.pop(peer, None)
        self._sort_routes()

    def _sort_routes(self) -> None:
        """Set the failed routes of absent workers aside, and drop those of forgotten ones."""
        self.version += 1
        at, lost = self._locations, self._lost
        routes = self._blocked | self._set_aside
        routes = {route for route in routes if all(end in at or end in lost for end in route[:2])}
        self._set_aside = {route for route in routes if not lost.keys().isdisjoint(route[:2])}
        self._blocked = routes - self._set_aside
        self._blocked_ends = {end for route in self._blocked for end in route[:2]}

    def block(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> str:
        """Give up the route over which `viewer` could not connect to `other`, and return that route."""
        route = self.address(viewer, other, relays)
        if route and self._has_room():
            self._blocked.add((viewer, other, route))
            self._blocked_ends |= {viewer, other}
            if route.startswith(RELAY_PREFIX):
                self._blocked.add((other, viewer, route))
        return route

    def block_direct(self, viewer: PeerId, other: PeerId) -> None:
        """Give up all addresses at which `viewer` can dial `other`."""
        while (route := self._direct(viewer, other)) and self._has_room():
            self._blocked.add((viewer, other, route.address))
            self._blocked_ends |= {viewer, other}

    def _has_room(self) -> bool:
        return len(self._blocked) + len(self._set_aside) < MAX_BLOCKED

    def follows_key_rule(self, viewer: PeerId) -> bool:
        """Return whether `viewer` dials the workers with a verified address and a smaller key, and no others.

        True if every worker can dial `viewer` and none of the routes of `viewer` has failed.
        """
        return bool(self.verified_address(viewer)) and viewer not in self._blocked_ends

    def verified_address(self, peer: PeerId) -> str:
        """Return the address at which the coordinator reached the worker; empty if it is not known."""
        location = self._locations.get(peer)
        return location.verified_address if location is not None else ""

    def address(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> str:
        """Return the address at which `viewer` reaches `other`; empty if `other` dials.

        The results for the two ends of a pair are consistent.

        Args:
            relays: the members that may serve as relays, in rank order.
        """
        here, there = self._locations.get(viewer), self._locations.get(other)
        if here and there and here.verified_address and there.verified_address and not self._blocked:
            # Equivalent to the code below, but fast enough for a million pairs.
            return there.verified_address if viewer > other else ""
        forward, backward = self._direct(viewer, other), self._direct(other, viewer)
        if forward and backward:
            better = (forward.is_verified, viewer) > (backward.is_verified, other)
            return forward.address if better else ""
        if forward:
            return forward.address
        return "" if backward else RELAY_PREFIX + self._relay(viewer, other, relays).hex()

    def relay_candidates(self, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        """Return those of `peers` that can serve as relays."""
        known = ((peer, self._locations.get(peer)) for peer in peers)
        return tuple(p for p, at in known if at is not None and at.verified_address and at.can_relay)

    def _direct(self, viewer: PeerId, other: PeerId) -> _Route | None:
        """Return the best address at which `viewer` can dial `other`; None if there is none."""
        here, there = self._locations.get(viewer), self._locations.get(other)
        if there is None:
            return None
        routes = [_Route(there.verified_address, True)] if there.verified_address else []
        is_near = here is not None and here.host == there.host  # behind the same router, or on one machine
        claimed = there.claimed_address
        if is_near and claimed != there.verified_address and _NUMERIC.fullmatch(claimed):
            routes.append(_Route(claimed, False))
        return next((route for route in routes if (viewer, other, route.address) not in self._blocked), None)

    def _relay(self, viewer: PeerId, other: PeerId, relays: Sequence[PeerId]) -> PeerId:
        """Return a member that both workers can dial, or the coordinator if there is no such member.

        The choice depends on the pair's keys, to spread the load.
        """
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
