"""Where the workers are, and what each is told about the others.

Decides when it is known how a worker can be reached, and turns `protocol.routes` into what is sent.
Never decides who is a member.

    Join --CallBack--> (the loop dials back) --CalledBack--> Reach, placed
    Setup, placed ---> Expect to those that are there, Admitted with their addresses
    VIEW ------------> a Roster for each viewer
    NoRoute ---------> the next VIEW takes another way
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
    """See the module's text.

    Args:
        coordinator: its key; the relay of last resort.
    """

    def __init__(self, coordinator: m.PeerId) -> None:
        self._route_table = RouteTable(coordinator)
        self._hosts: dict[m.PeerId, str] = {}  # where the connections that stand come from
        self._relays: tuple[m.PeerId, ...] = ()  # of the generation
        self._blocked_pairs: set[frozenset[m.PeerId]] = (
            set()
        )  # pairs whose way of the generation does not work
        self._address_cache: dict[
            tuple[m.PeerId, str], tuple[m.Member, m.Member]
        ] = {}  # of it, too: see _with

    def on_connected(self, peer: m.PeerId, host: str) -> None:
        self._hosts[peer] = host

    def on_disconnected(self, peer: m.PeerId) -> None:
        self._hosts.pop(peer, None)

    def forget(self, peer: m.PeerId) -> None:
        self._route_table.forget(peer)

    def reachability_text(self, peer: m.PeerId) -> str:
        """For people: can others dial it?"""
        return self._route_table.reachability_text(peer)

    def request_dial_back(self, worker: Worker, relays: bool) -> list[Effect]:
        """Call back, to learn whether others can reach the worker; nothing if it is where it was."""
        here = PeerLocation(worker.address, self._hosts.get(worker.peer, ""), "", relays)
        known = self._route_table.location(worker.peer)
        if known is not None and replace(known, verified_address="") == here:
            worker.is_addressable = True
            return []
        self._route_table.set_location(worker.peer, here)
        worker.is_addressable = False
        return [DialBack(worker.peer, dial_back_addresses(here))]

    def on_dial_back_result(self, worker: Worker, address: str) -> list[Effect]:
        """The answer; nothing if it is about a place where the worker is no more."""
        place = self._route_table.location(worker.peer)
        if place is None or worker.is_addressable or (address and address not in dial_back_addresses(place)):
            return []  # in the last case it has joined again from elsewhere, and another answer follows
        self._route_table.set_location(worker.peer, replace(place, verified_address=address))
        worker.is_addressable = True
        fields = {
            "name": worker.name,
            "reachable": bool(address),
            "address": address or place.claimed_address,
        }
        return [LogEvent("info", "called_back", fields), Send(worker.peer, m.Reachability(address))]

    def introduce(self, newcomer: m.PeerId, others: Sequence[m.PeerId]) -> list[Effect]:
        """The newcomer measures its links to the others, which are told to expect it."""
        relays = self._route_table.relay_candidates(others)
        effects: list[Effect] = []
        for other in others:
            way = self._route_table.address(other, newcomer, relays)
            relay = relay_of(way)
            expected = [(newcomer, way)]
            if relay is not None and relay in others:
                expected.append((relay, self._route_table.address(other, relay, relays)))
            effects.append(Send(other, m.ExpectProbes(tuple(expected))))
        probe = tuple((other, self._route_table.address(newcomer, other, relays)) for other in others)
        return [*effects, Send(newcomer, m.Admitted(probe))]

    def introduce_pending_member(
        self, guest: m.PeerId, members: Sequence[m.PeerId], most: int
    ) -> tuple[list[Effect], tuple[tuple[m.PeerId, str], ...]]:
        """Some members expect a guest that wants to measure its line to them; they need not dial it."""
        places = ((peer, self._route_table.location(peer)) for peer in members)
        probe = [
            (peer, place.verified_address)
            for peer, place in places
            if place is not None and place.verified_address
        ][:most]
        return [Send(peer, m.ExpectProbes(((guest, ""),))) for peer, _ in probe], tuple(probe)

    def address(self, viewer: m.PeerId, other: m.PeerId) -> str:
        """How the one reaches the other, over the relays of the generation if it has to be."""
        return self._route_table.address(viewer, other, self._relays)

    def relayed_pairs(self, roster: Sequence[m.PeerId]) -> list[list[int]]:
        """For people: [rank, other rank, rank of the relay or -1: the coordinator] of the first members."""
        shown = roster[:MAX_LISTED]
        if all(self._route_table.is_directly_reachable(peer) for peer in shown):
            return []
        rank_of = {peer: rank for rank, peer in enumerate(roster)}
        ways = [
            (a, b, relay_of(self._route_table.address(shown[a], shown[b], self._relays)))
            for a in range(len(shown))
            for b in range(a + 1, len(shown))
        ]
        return [[a, b, rank_of.get(relay, -1)] for a, b, relay in ways if relay is not None]

    def all_direct(self, members: Sequence[m.PeerId]) -> bool:
        """Any two of them can connect without a third, as far as is known."""
        pairs = combinations(members, 2)
        return all(relay_of(self._route_table.address(viewer, other, ())) is None for viewer, other in pairs)

    def begin_generation(self, members: Iterable[m.PeerId]) -> None:
        """A generation of these is being made."""
        self._address_cache.clear()
        self._blocked_pairs.clear()
        self._relays = self._route_table.relay_candidates(members)

    def members_for(self, viewer: m.PeerId, roster: Iterable[m.Member]) -> tuple[m.Member, ...]:
        """The roster with each member's address as `viewer` is to use it."""
        return tuple(
            self._with_address(
                x, self._route_table.address(viewer, x.peer, self._relays) if x.peer != viewer else ""
            )
            for x in roster
        )

    def _with_address(self, member: m.Member, address: str) -> m.Member:
        """The member with this address, made once: of N members N are told.  Over a relay hardly two of them
        are told the same."""
        if address.startswith(RELAY_PREFIX):
            return replace(member, address=address)
        known = self._address_cache.get((member.peer, address))
        if known is None or known[0] is not member:
            known = self._address_cache[member.peer, address] = member, replace(member, address=address)
        return known[1]

    def reroute(self, newcomer: m.PeerId, others: Iterable[m.PeerId]) -> list[str]:
        """A worker outside of the generation is connected with none of these, whoever of the two was to dial;
        returns the ways that are not taken again."""
        pairs = ((newcomer, other) for other in others)
        ways = [
            self._route_table.block(*pair, self._relays) or self._route_table.block(*pair[::-1], self._relays)
            for pair in pairs
        ]
        return list(dict.fromkeys(ways))

    def connect(self, newcomer: m.PeerId, others: Iterable[m.PeerId]) -> list[Effect]:
        """These are told how to connect with a worker outside of the generation, which is told the rest."""
        told: dict[m.PeerId, dict[m.PeerId, str]] = {}
        for other in others:
            way = self.address(other, newcomer)
            ends = [(other, newcomer)]
            relay = relay_of(way)
            if relay is not None and relay in self._relays:
                ends += [(relay, other), (other, relay), (relay, newcomer), (newcomer, relay)]
            for viewer, seen in ends:
                told.setdefault(viewer, {})[seen] = self.address(viewer, seen)
        return [Send(viewer, m.ExpectProbes(tuple(ways.items()))) for viewer, ways in told.items()]

    def block_routes(self, viewer: m.PeerId, others: Iterable[m.PeerId]) -> list[str]:
        """These could not be reached as planned; returns the ways that are not taken again.

        Once for each pair in a generation: the way after that one nobody was told yet.
        """
        new = [other for other in others if frozenset((viewer, other)) not in self._blocked_pairs]
        self._blocked_pairs |= {frozenset((viewer, other)) for other in new}
        return [self._route_table.block(viewer, other, self._relays) for other in new]
