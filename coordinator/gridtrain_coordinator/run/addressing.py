"""How workers reach each other: what the coordinator finds out, and what it tells each of them.

    Join --DialBack--> (the coordinator dials back) --DialBackResult--> Reachability, addressable
    Setup, addressable ---> ExpectProbes to the others, Admitted with their addresses
    MembershipView -------> a member list for each viewer
    PeersUnreachable -----> the next view uses another route

The routes are chosen by `route_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from gridtrain.core import messages as m
from gridtrain.core.messages import RELAY_PREFIX, relay_of
from gridtrain_coordinator.run.events import DialBack, Effect, LogEvent, Send
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.route_table import PeerLocation, RouteTable, dial_back_addresses

MAX_LISTED = 32  # members whose relays the status shows


class AddressBook:
    """Addresses and routes of all workers.

    Args:
        coordinator: its key; the relay of last resort.
    """

    def __init__(self, coordinator: m.PeerId) -> None:
        self._route_table = RouteTable(coordinator)
        self._hosts: dict[m.PeerId, str] = {}  # from where the open connections come
        self._relays: tuple[m.PeerId, ...] = ()  # of the generation
        self._blocked_pairs: set[frozenset[m.PeerId]] = set()  # whose route of the generation does not work
        self._address_cache: dict[
            tuple[m.PeerId, str], tuple[m.Member, m.Member]
        ] = {}  # of the generation: see `_with_address`

    def on_connected(self, peer: m.PeerId, host: str) -> None:
        self._hosts[peer] = host

    def on_disconnected(self, peer: m.PeerId) -> None:
        self._hosts.pop(peer, None)

    def forget(self, peer: m.PeerId) -> None:
        self._route_table.forget(peer)

    def reachability_text(self, peer: m.PeerId) -> str:
        """For the status: whether others can dial the worker."""
        return self._route_table.reachability_text(peer)

    def request_dial_back(self, worker: Worker, can_relay: bool) -> list[Effect]:
        """Dial back, to learn whether others can reach the worker; not needed if nothing has changed."""
        current = PeerLocation(worker.address, self._hosts.get(worker.peer, ""), "", can_relay)
        known = self._route_table.location(worker.peer)
        if known is not None and replace(known, verified_address="") == current:
            worker.is_addressable = True
            return []
        self._route_table.set_location(worker.peer, current)
        worker.is_addressable = False
        return [DialBack(worker.peer, dial_back_addresses(current))]

    def on_dial_back_result(self, worker: Worker, address: str) -> list[Effect]:
        """Handle the answer, unless it is about an earlier address of the worker."""
        location = self._route_table.location(worker.peer)
        if (
            location is None
            or worker.is_addressable
            or (address and address not in dial_back_addresses(location))
        ):
            return []  # in the last case it has joined again, and another answer follows
        self._route_table.set_location(worker.peer, replace(location, verified_address=address))
        worker.is_addressable = True
        fields = {
            "name": worker.name,
            "reachable": bool(address),
            "address": address or location.claimed_address,
        }
        return [LogEvent("info", "called_back", fields), Send(worker.peer, m.Reachability(address))]

    def introduce(self, newcomer: m.PeerId, others: Sequence[m.PeerId]) -> list[Effect]:
        """Ask the newcomer to measure its links to the others, which are addresses to expect it."""
        relays = self._route_table.relay_candidates(others)
        effects: list[Effect] = []
        for other in others:
            route = self._route_table.address(other, newcomer, relays)
            relay = relay_of(route)
            expected = [(newcomer, route)]
            if relay is not None and relay in others:
                expected.append((relay, self._route_table.address(other, relay, relays)))
            effects.append(Send(other, m.ExpectProbes(tuple(expected))))
        probe = tuple((other, self._route_table.address(newcomer, other, relays)) for other in others)
        return [*effects, Send(newcomer, m.Admitted(probe))]

    def introduce_pending_member(
        self, pending: m.PeerId, members: Sequence[m.PeerId], most: int
    ) -> tuple[list[Effect], tuple[tuple[m.PeerId, str], ...]]:
        """Members to which a pending member may measure its links, with their addresses."""
        locations = ((peer, self._route_table.location(peer)) for peer in members)
        probe = [
            (peer, location.verified_address)
            for peer, location in locations
            if location is not None and location.verified_address
        ][:most]
        return [Send(peer, m.ExpectProbes(((pending, ""),))) for peer, _ in probe], tuple(probe)

    def address(self, viewer: m.PeerId, other: m.PeerId) -> str:
        """How `viewer` reaches `other`, over the relays of the generation if necessary."""
        return self._route_table.address(viewer, other, self._relays)

    def relayed_pairs(self, members: Sequence[m.PeerId]) -> list[list[int]]:
        """For the status: [rank, other rank, rank of the relay; -1: the coordinator] of the first members."""
        shown = members[:MAX_LISTED]
        if all(self._route_table.is_directly_reachable(peer) for peer in shown):
            return []
        rank_of = {peer: rank for rank, peer in enumerate(members)}
        routes = [
            (a, b, relay_of(self._route_table.address(shown[a], shown[b], self._relays)))
            for a in range(len(shown))
            for b in range(a + 1, len(shown))
        ]
        return [[a, b, rank_of.get(relay, -1)] for a, b, relay in routes if relay is not None]

    def all_direct(self, members: Sequence[m.PeerId]) -> bool:
        """Any two of them can connect without a relay, as far as is known."""
        pairs = combinations(members, 2)
        return all(relay_of(self._route_table.address(viewer, other, ())) is None for viewer, other in pairs)

    def begin_generation(self, members: Iterable[m.PeerId]) -> None:
        """A generation of these members is being made."""
        self._address_cache.clear()
        self._blocked_pairs.clear()
        self._relays = self._route_table.relay_candidates(members)

    def members_for(self, viewer: m.PeerId, members: Iterable[m.Member]) -> tuple[m.Member, ...]:
        """The member list with each member's address as `viewer` is to use it."""
        return tuple(
            self._with_address(
                x, self._route_table.address(viewer, x.peer, self._relays) if x.peer != viewer else ""
            )
            for x in members
        )

    def _with_address(self, member: m.Member, address: str) -> m.Member:
        """The member with this address; cached, as N members each receive N of them.

        Addresses over relays are not cached: hardly two viewers use the same.
        """
        if address.startswith(RELAY_PREFIX):
            return replace(member, address=address)
        known = self._address_cache.get((member.peer, address))
        if known is None or known[0] is not member:
            known = self._address_cache[member.peer, address] = member, replace(member, address=address)
        return known[1]

    def reroute(self, newcomer: m.PeerId, others: Iterable[m.PeerId]) -> list[str]:
        """A worker outside the generation is connected with none of these, whichever side was to dial.

        Returns the routes that are not used again.
        """
        pairs = ((newcomer, other) for other in others)
        routes = [
            self._route_table.block(*pair, self._relays) or self._route_table.block(*pair[::-1], self._relays)
            for pair in pairs
        ]
        return list(dict.fromkeys(routes))

    def connect(self, newcomer: m.PeerId, others: Iterable[m.PeerId]) -> list[Effect]:
        """Tell these how to connect with a worker outside the generation; it is told separately."""
        addresses: dict[m.PeerId, dict[m.PeerId, str]] = {}
        for other in others:
            route = self.address(other, newcomer)
            ends = [(other, newcomer)]
            relay = relay_of(route)
            if relay is not None and relay in self._relays:
                ends += [(relay, other), (other, relay), (relay, newcomer), (newcomer, relay)]
            for viewer, seen in ends:
                addresses.setdefault(viewer, {})[seen] = self.address(viewer, seen)
        return [Send(viewer, m.ExpectProbes(tuple(routes.items()))) for viewer, routes in addresses.items()]

    def block_routes(self, viewer: m.PeerId, others: Iterable[m.PeerId]) -> list[str]:
        """`viewer` could not reach these as planned; returns the routes that are not used again.

        Blocks a pair once in a generation, as nobody has been told the route after that one yet.
        """
        new = [other for other in others if frozenset((viewer, other)) not in self._blocked_pairs]
        self._blocked_pairs |= {frozenset((viewer, other)) for other in new}
        return [self._route_table.block(viewer, other, self._relays) for other in new]
