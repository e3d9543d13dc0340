"""Decides which peers a worker dials, accepts messages from, excludes after a violation, and disconnects.

                    Dial              PeerConnected
    not dialled ----------> dialled <--------------> connected     the I/O loop redials until Disconnect
         ^                     |    PeerDisconnected    |
         +---- Disconnect -----+------------------------+          the peer is excluded, or no longer known

A peer that violates the protocol is excluded until the next generation begins.  A peer that was announced
(ExpectProbes, Admitted) can measure its link to this worker without being a member.  It stays known during
the next generation, but not afterwards, unless it becomes a member.  `required_peers` determines which
members a generation requires.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtrain.core.group.member_events import Dial, Disconnect, LogEvent, MemberEffect
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.messages import PeerId, relay_of
from gridtrain.quantities import MAX_NAMES, list_first

MAX_EXPECTED = 512


class PeerLinks:
    """Connections of one worker.

    Attributes:
        connected: peers to which this worker is connected.
        lost: peers whose latest connection to this worker broke.
        excluded: peers that have violated the protocol or were removed in this generation; their messages
            are ignored.
    """

    def __init__(self, own_id: PeerId, coordinator: PeerId) -> None:
        self._own_id = own_id
        self._coordinator = coordinator
        self.connected: set[PeerId] = set()
        self.lost: set[PeerId] = set()
        self.excluded: set[PeerId] = set()
        self._dialled_addresses: dict[PeerId, str] = {}  # whether or not the peer is connected
        self._expected_since: dict[PeerId, int] = {}  # announced peers -> generation of the announcement

    def known_peers(self, assignment: RankAssignment | None, others: Collection[PeerId]) -> frozenset[PeerId]:
        """Return the peers whose messages are accepted.

        These are the coordinator, the members, the announced peers, and `others`.
        """
        members = {member.peer for member in assignment.members} if assignment is not None else set()
        return frozenset(({self._coordinator, *others} | members | set(self._expected_since)) - self.excluded)

    @property
    def expected_peers(self) -> Collection[PeerId]:
        """Peers that the coordinator has announced."""
        return self._expected_since.keys()

    def peer_connected(self, peer: PeerId) -> None:
        self.connected.add(peer)
        self.lost.discard(peer)

    def peer_disconnected(self, peer: PeerId) -> None:
        self.connected.discard(peer)
        self.lost.add(peer)

    def log_unreachable(self, names: Sequence[str]) -> LogEvent:
        """Return the event for the log if the peers with these names, or nobody at all, cannot be reached."""
        if not self.connected:
            return LogEvent("offline", {})
        return LogEvent("no_route", {"peers": list_first(names, MAX_NAMES)})

    def dial(self, peers: Sequence[tuple[PeerId, str]]) -> list[MemberEffect]:
        """Dial the peers, given as (peer, address) pairs; a peer with an empty address dials this worker.

        A connected peer is dialled again only if its connection goes through a relay and its address is new.
        """
        effects: list[MemberEffect] = []
        for peer, address in peers:
            known = self._dialled_addresses.get(peer, "")
            stays = peer in self.connected and (known == address or relay_of(known) is None)
            if address and peer not in (self._coordinator, self._own_id) and not stays:
                self._dialled_addresses[peer] = address
                effects.append(Dial(peer, address))
        return effects

    def dial_members(self, assignment: RankAssignment, needed: Collection[PeerId]) -> list[MemberEffect]:
        """Dial the members in `needed`, and the relays that their addresses name."""
        addresses = {member.peer: member.address for member in assignment.members}
        relays = {relay for peer in needed if (relay := relay_of(addresses[peer])) is not None}
        return self.dial([(peer, addresses.get(peer, "")) for peer in sorted({*needed, *relays})])

    def disconnect_strangers(self, known: Collection[PeerId]) -> list[MemberEffect]:
        """Disconnect all dialled peers that are not in `known`, the peers whose messages are accepted.

        A connection that the other peer dialled stays open until that peer closes it or sends a message,
        which the transport's access control then refuses.  If this worker closed the connection, the other
        peer would still consider it open, and would not dial again when it returned to the group.
        """
        strangers = set(self._dialled_addresses).difference(known)
        self._dialled_addresses = {
            peer: address for peer, address in self._dialled_addresses.items() if peer not in strangers
        }
        self.connected -= strangers
        self.lost.intersection_update(known)
        return [Disconnect(peer) for peer in sorted(strangers)]

    def expect(self, peers: Sequence[tuple[PeerId, str]], generation: int) -> list[MemberEffect]:
        """Accept messages from announced peers, which need not be members, to measure the links to them.

        The peers, given as (peer, address) pairs, are dialled if they have an address.  Only the latest
        `MAX_EXPECTED` announcements are remembered.
        """
        for peer, _ in peers:
            self._expected_since.pop(peer, None)
            self._expected_since[peer] = generation
        for peer in list(self._expected_since)[:-MAX_EXPECTED]:
            del self._expected_since[peer]
        return self.dial(peers)

    def exclude_peer(self, peer: PeerId) -> bool:
        """Exclude a peer that violated the protocol; return False if it was already excluded."""
        self.connected.discard(peer)
        self._dialled_addresses.pop(peer, None)
        if peer in self.excluded:
            return False
        self.excluded.add(peer)
        return True

    def exclude_removed(self, peers: Collection[PeerId]) -> None:
        """Exclude peers that the coordinator removed; they stay connected until `disconnect_strangers`."""
        self.excluded |= set(peers) - {self._own_id}

    def readmit_all(self) -> None:
        self.excluded.clear()

    def begin_generation(self, assignment: RankAssignment) -> None:
        """Readmit excluded peers, and drop announcements that are too old or whose peers are now members."""
        self._expected_since = {
            peer: since
            for peer, since in self._expected_since.items()
            if assignment.rank_of(peer) is None
            and since >= assignment.generation - 1  # may still be measuring
        }
        self.readmit_all()
