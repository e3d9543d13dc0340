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

from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.member_io import Dial, Effect, HangUp
from gridtrain.protocol.messages import PeerId
from gridtrain.protocol.routes import relay_of

MAX_EXPECTED = 512


class Edges:
    """See the module's text.

    Attributes:
        up: who is connected.
        offenders: who has broken the protocol in this generation.
    """

    def __init__(self, me: PeerId, coordinator: PeerId) -> None:
        self._me = me
        self._coordinator = coordinator
        self.up: set[PeerId] = set()
        self.offenders: set[PeerId] = set()
        self._dialled: dict[PeerId, str] = {}  # connected or not, and at which address
        self._expected: dict[PeerId, int] = {}  # who may measure its link to us, since which generation

    def acquaintances(self, seat: Seat | None, others: Collection[PeerId]) -> frozenset[PeerId]:
        """Whom this worker deals with: the coordinator, the members, who was announced, and `others`."""
        members = {member.peer for member in seat.roster} if seat is not None else set()
        return frozenset(({self._coordinator, *others} | members | set(self._expected)) - self.offenders)

    @property
    def expected(self) -> Collection[PeerId]:
        """Who was announced."""
        return self._expected.keys()

    def dial(self, peers: Sequence[tuple[PeerId, str]]) -> list[Effect]:
        """Whoever has no address will come, or is reached through the coordinator.

        Who is connected stays so, but for a relay: there is a better one now, or none is needed.
        """
        effects: list[Effect] = []
        for peer, address in peers:
            known = self._dialled.get(peer, "")
            stays = peer in self.up and (known == address or relay_of(known) is None)
            if address and peer not in (self._coordinator, self._me) and not stays:
                self._dialled[peer] = address
                effects.append(Dial(peer, address))
        return effects

    def dial_members(self, seat: Seat, needed: Collection[PeerId]) -> list[Effect]:
        """The members that are needed, and the relays on the way to them."""
        ways = {member.peer: member.address for member in seat.roster}
        relays = {relay for peer in needed if (relay := relay_of(ways[peer])) is not None}
        return self.dial([(peer, ways.get(peer, "")) for peer in sorted({*needed, *relays})])

    def let_go(self, acquaintances: Collection[PeerId]) -> list[Effect]:
        """Of whom we do not deal with any more.

        A connection that was accepted stays until the other side lets go of it, or says something, which
        the transport's gate then cuts: closed from here alone, the other would believe in it and, back in
        the group, not dial again.
        """
        strangers = set(self._dialled).difference(acquaintances)
        self._dialled = {peer: way for peer, way in self._dialled.items() if peer not in strangers}
        self.up -= strangers
        return [HangUp(peer) for peer in sorted(strangers)]

    def expect(self, peers: Sequence[tuple[PeerId, str]], generation: int) -> list[Effect]:
        """Workers outside of the generation that measure their links, or whose links we measure."""
        for peer, _ in peers:
            self._expected.pop(peer, None)
            self._expected[peer] = generation
        for peer in list(self._expected)[:-MAX_EXPECTED]:
            del self._expected[peer]
        return self.dial(peers)

    def cut_off(self, peer: PeerId) -> bool:
        """It has broken the protocol.  False: it was known for that already."""
        self.up.discard(peer)
        self._dialled.pop(peer, None)
        if peer in self.offenders:
            return False
        self.offenders.add(peer)
        return True

    def viewed(self, seat: Seat) -> None:
        """A generation begins: offenders are let in again, who was announced is a member or had its time."""
        self._expected = {
            peer: since
            for peer, since in self._expected.items()
            if seat.rank_of(peer) is None and since >= seat.generation - 1  # it may still be measuring
        }
        self.offenders.clear()
