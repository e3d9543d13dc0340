"""Determines the address at which each worker is reached (dial-back), and the routes between workers.

    Join --DialBack--> (the coordinator dials back) --DialBackResult--> Reachability, addressable
    Setup, addressable ---> ExpectProbes to the others, Admitted with their addresses
    MembershipView -------> a member list for each viewer
    PeersUnreachable -----> the next view uses another route

The routes are chosen by `route_table`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from gridtrain.core import messages as m
from gridtrain.core.messages import RELAY_PREFIX, relay_of
from gridtrain_coordinator.run.events import DialBack, Effect, LogEvent, Send
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.route_table import PeerLocation, RouteTable, dial_back_addresses

MAX_LISTED = 32  # members whose relays the status shows


class AddressBook:
    """The addresses of all workers, and the routes between them.

    Args:
        coordinator: the coordinator's key; the coordinator is the relay of last resort.

    Attributes:
        route_table: the workers' locations, and the routes that failed.
    """

    def __init__(self, coordinator: m.PeerId) -> None:
        self.route_table = RouteTable(coordinator)
        self._hosts: dict[m.PeerId, str] = {}  # the source addresses of the open connections
        self._relays: tuple[m.PeerId, ...] = ()  # the relays of the generation
        self._blocked_pairs: set[frozenset[m.PeerId]] = set()  # pairs whose route in the generation failed
        self._address_cache: dict[
            tuple[m.PeerId, str], tuple[m.Member, m.Member]
        ] = {}  # for the generation: see `_with_address`
        self._shared: tuple[int, tuple[m.Member, ...], tuple[m.Member, ...]] = 0, (), ()  # see `shared_list`

    def on_connected(self, peer: m.PeerId, host: str) -> None:
        self._hosts[peer] = host

    def on_disconnected(self, peer: m.PeerId) -> None:
        self._hosts.pop(peer, None)

    def request_dial_back(self, worker: Worker, can_relay: bool) -> list[Effect]:
        """Request a dial-back, which determines whether other workers can reach the worker.

        If the worker's location has not changed since its last dial-back, no dial-back is requested.
        """
        current = PeerLocation(worker.address, self._hosts.get(worker.peer, ""), "", can_relay)
        self.route_table.restore(worker.peer)
        known = self.route_table.location(worker.peer)
        if known is not None and replace(known, verified_address="") == current:
            worker.mark_addressable(True)
            return []
        self.route_table.set_location(worker.peer, current)
        worker.mark_addressable(False)
        return [DialBack(worker.peer, dial_back_addresses(current))]

    def on_dial_back_result(self, worker: Worker, address: str) -> list[Effect]:
        """Record the result of a dial-back, unless it concerns an earlier address of the worker."""
        location = self.route_table.location(worker.peer)
        if (
            location is None
            or (worker.is_addressable and (not address or location.verified_address))
            or (address and address not in dial_back_addresses(location))
        ):
            return []  # in the last case, the worker has rejoined, and another result will follow
        self.route_table.set_location(worker.peer, replace(location, verified_address=address))
        worker.mark_addressable(True)
        shown = address or location.claimed_address
        fields = {"name": worker.name, "reachable": bool(address), "address": shown}
        return [LogEvent("info", "called_back", fields), Send(worker.peer, m.Reachability(address))]

    def introduce(self, newcomer: m.PeerId, others: Sequence[m.PeerId]) -> list[Effect]:
        """Return messages that ask the newcomer to probe the others, and the others to expect its probes."""
        relays = self.route_table.relay_candidates(others)
        effects: list[Effect] = []
        notices: dict[tuple[tuple[m.PeerId, str], ...], m.ExpectProbes] = {}  # most are equal: encoded once
        for other in others:
            route = self.route_table.address(other, newcomer, relays)
            relay = relay_of(route)
            expected: tuple[tuple[m.PeerId, str], ...] = ((newcomer, route),)
            if relay is not None and relay in others:
                expected += ((relay, self.route_table.address(other, relay, relays)),)
            effects.append(Send(other, notices.setdefault(expected, m.ExpectProbes(expected))))
        probe = tuple((other, self.route_table.address(newcomer, other, relays)) for other in others)
        return [*effects, Send(newcomer, m.Admitted(probe))]

    def introduce_pending_member(
        self, pending: m.PeerId, members: Sequence[m.PeerId], most: int
    ) -> tuple[list[Effect], tuple[tuple[m.PeerId, str], ...]]:
        """Choose up to `most` members to which a pending member may measure its links.

        Returns the messages that notify these members of the probes, and the members' keys and addresses.
        """
        addresses = ((peer, self.route_table.verified_address(peer)) for peer in members)
        probe = [(peer, address) for peer, address in addresses if address][:most]
        return [Send(peer, m.ExpectProbes(((pending, ""),))) for peer, _ in probe], tuple(probe)

    def address(self, viewer: m.PeerId, other: m.PeerId) -> str:
        """Return the address at which `viewer` reaches `other`, through a relay if necessary."""
        return self.route_table.address(viewer, other, self._relays)

    def relayed_pairs(self, members: Sequence[m.PeerId], most: int = MAX_LISTED) -> list[list[int]]:
        """Return [rank, other rank, rank of the relay] for each pair that uses a relay.

        Covers the first `most` members.  If the coordinator is the relay, its rank is given as -1.
        """
        shown = members[:most]
        if all(self.route_table.is_directly_reachable(peer) for peer in shown):
            return []
        rank_of = {peer: rank for rank, peer in enumerate(members)}
        pairs = combinations(range(len(shown)), 2)
        routes = [(a, b, relay_of(self.address(shown[a], shown[b]))) for a, b in pairs]
        return [[a, b, rank_of.get(relay, -1)] for a, b, relay in routes if relay is not None]

    def all_direct(self, members: Sequence[m.PeerId]) -> bool:
        """Return whether, as far as is known, any two of these members can connect without a relay."""
        pairs = combinations(members, 2)
        return all(relay_of(self.route_table.address(viewer, other, ())) is None for viewer, other in pairs)

    def begin_generation(self, members: Iterable[m.PeerId], present: Collection[m.PeerId]) -> None:
        """Choose the relays for a new generation of these members, and clear the last generation's caches.

        Args:
            present: all registered workers; the routes of others are kept apart until they return.
        """
        self.route_table.set_aside_absent(present)
        self._address_cache.clear()
        self._blocked_pairs.clear()
        self._relays = self.route_table.relay_candidates(members)

    def has_shared_list(self, viewer: m.PeerId) -> bool:
        """Return whether this viewer receives `shared_list` rather than a member list of its own."""
        return self.route_table.follows_key_rule(viewer)

    def shared_list(self, members: tuple[m.Member, ...]) -> tuple[m.Member, ...]:
        """Return the member list shared by the viewers that every worker can dial.

        Until the list changes, returns the same object.

        Each member, including the viewer, has the address at which others dial it (see `m.Member.address`).
        """
        version, listed, shared = self._shared
        if version != self.route_table.version or listed is not members:
            shared = tuple(self._with_address(x, self.route_table.verified_address(x.peer)) for x in members)
            self._shared = self.route_table.version, members, shared
        return shared

    def members_for(self, viewer: m.PeerId, members: Iterable[m.Member]) -> tuple[m.Member, ...]:
        """Return the member list with the addresses that `viewer` has to use."""
        return tuple(
            self._with_address(x, self.address(viewer, x.peer) if x.peer != viewer else "") for x in members
        )

    def _with_address(self, member: m.Member, address: str) -> m.Member:
        """Return a copy of the member with this address.

        Copies are cached, because each of N members receives a list of N members.  Copies with a relay's
        address are not cached, because different viewers rarely use the same relay.
        """
        if address == member.address:
            return member
        if address.startswith(RELAY_PREFIX):
            return replace(member, address=address)
        known = self._address_cache.get((member.peer, address))
        if known is None or known[0] is not member:
            known = self._address_cache[member.peer, address] = member, replace(member, address=address)
        return known[1]

    def reroute(self, newcomer: m.PeerId, others: Iterable[m.PeerId]) -> list[str]:
        """Give up the failed routes between a worker outside the generation and these members.

        Returns the routes that were given up.
        """
        block, relays = self.route_table.block, self._relays
        routes = [block(newcomer, other, relays) or block(other, newcomer, relays) for other in others]
        return list(dict.fromkeys(routes))

    def connect(self, newcomer: m.PeerId, others: Iterable[m.PeerId]) -> list[Effect]:
        """Return messages with the routes between these members and a worker outside the generation.

        The messages go to the members and to the relays on the routes.  The worker itself is sent only its
        routes to these relays; it receives its routes to the members separately.
        """
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

    def block_routes(
        self, viewer: m.PeerId, others: Iterable[m.PeerId], broken: Collection[m.PeerId] = ()
    ) -> list[str]:
        """Give up the routes over which `viewer` could not reach these members; return these routes.

        A pair gives up at most one route per generation, because its members learn the next route only from
        the next view.

        Args:
            broken: members to which `viewer` was connected until recently.  The links to them drop packets in
                both directions, so that these members need not try the links as well.
        """
        new = [other for other in others if frozenset((viewer, other)) not in self._blocked_pairs]
        self._blocked_pairs |= {frozenset((viewer, other)) for other in new}
        routes = [self.route_table.block(viewer, other, self._relays) for other in new]
        for other, route in zip(new, routes, strict=True):
            if other in broken and route and relay_of(route) is None:
                self.route_table.block_direct(other, viewer)
        return routes
