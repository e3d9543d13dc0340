"""A worker's edges: with whom it deals, whom its loop is told to dial, and of whom it lets go.

Decides that, and keeps who is connected.  Never decides whom a generation needs (`protocol.neighbours`) nor
what a broken edge means for the open step, and never opens a connection: what it decides are effects.

                    Dial                EdgeUp
    not dialled ----------> dialled <------------> up        the loop keeps trying until HangUp
         ^                     |      EdgeDown      |
         +------ HangUp -------+--------------------+        no acquaintance any more, or an offender

An offender is cut off until the next generation begins.  Who was announced (Expect, Admitted) may measure its
link to us without being a member, until the generation after the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import Dial, Disconnect, MemberEffect
from gridtrain.core.messages import PeerId, relay_of

MAX_EXPECTED = 512


class PeerLinks:
    """See the module's text.

    Attributes:
        up: who is connected.
        offenders: who has broken the protocol in this generation.
    """

    def __init__(self, me: PeerId, coordinator: PeerId) -> None:
        self._own_id = me
        self._coordinator = coordinator
        self.connected: set[PeerId] = set()
        self.excluded: set[PeerId] = set()
        self._dialled_addresses: dict[PeerId, str] = {}  # connected or not, and at which address
        self._expected_since: dict[PeerId, int] = {}  # who may measure its link to us, since which generation

    def known_peers(self, seat: RankAssignment | None, others: Collection[PeerId]) -> frozenset[PeerId]:
        """Whom this worker deals with: the coordinator, the members, who was announced, and `others`."""
        members = {member.peer for member in seat.members} if seat is not None else set()
        return frozenset(({self._coordinator, *others} | members | set(self._expected_since)) - self.excluded)

    @property
    def expected_peers(self) -> Collection[PeerId]:
        """Who was announced."""
        return self._expected_since.keys()

    def dial(self, peers: Sequence[tuple[PeerId, str]]) -> list[MemberEffect]:
        """Whoever has no address will come, or is reached through the coordinator.

        Who is connected stays so, but for a relay: there is a better one now, or none is needed.
        """
        effects: list[MemberEffect] = []
        for peer, address in peers:
            known = self._dialled_addresses.get(peer, "")
            stays = peer in self.connected and (known == address or relay_of(known) is None)
            if address and peer not in (self._coordinator, self._own_id) and not stays:
                self._dialled_addresses[peer] = address
                effects.append(Dial(peer, address))
        return effects

    def dial_members(self, seat: RankAssignment, needed: Collection[PeerId]) -> list[MemberEffect]:
        """The members that are needed, and the relays on the way to them."""
        ways = {member.peer: member.address for member in seat.members}
        relays = {relay for peer in needed if (relay := relay_of(ways[peer])) is not None}
        return self.dial([(peer, ways.get(peer, "")) for peer in sorted({*needed, *relays})])

    def disconnect_strangers(self, acquaintances: Collection[PeerId]) -> list[MemberEffect]:
        """Of whom we do not deal with any more.

        A connection that was accepted stays until the other side lets go of it, or says something, which
        the transport's gate then cuts: closed from here alone, the other would believe in it and, back in
        the group, not dial again.
        """
        strangers = set(self._dialled_addresses).difference(acquaintances)
        self._dialled_addresses = {
            peer: way for peer, way in self._dialled_addresses.items() if peer not in strangers
        }
        self.connected -= strangers
        return [Disconnect(peer) for peer in sorted(strangers)]

    def expect(self, peers: Sequence[tuple[PeerId, str]], generation: int) -> list[MemberEffect]:
        """Workers outside of the generation that measure their links, or whose links we measure."""
        for peer, _ in peers:
            self._expected_since.pop(peer, None)
            self._expected_since[peer] = generation
        for peer in list(self._expected_since)[:-MAX_EXPECTED]:
            del self._expected_since[peer]
        return self.dial(peers)

    def exclude_peer(self, peer: PeerId) -> bool:
        """It has broken the protocol.  False: it was known for that already."""
        self.connected.discard(peer)
        self._dialled_addresses.pop(peer, None)
        if peer in self.excluded:
            return False
        self.excluded.add(peer)
        return True

    def begin_generation(self, seat: RankAssignment) -> None:
        """A generation begins: offenders are let in again, who was announced is a member or had its time."""
        self._expected_since = {
            peer: since
            for peer, since in self._expected_since.items()
            if seat.rank_of(peer) is None and since >= seat.generation - 1  # it may still be measuring
        }
        self.excluded.clear()
