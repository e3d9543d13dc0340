"""How the state comes to a member that joins a generation, and what a member gives to those that join.

Decides whom a member asks, what it takes of what comes, and with what it answers others that ask.  Never
opens a block: the loop sends and takes them.  Who gives to whom is the VIEW's plan (`protocol.neighbours`),
or goes from one newcomer to the next (`protocol.passing_on`).

    joins     StateRequest --> donor (or who passes on)  --StateBlock ..-->  TakeBlock ..  Restored
                                                         nothing comes:      the donor is asked itself
    holds     <-- StateRequest      GiveState, at once or when it has a state itself
"""

from __future__ import annotations

from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.lasting import Lasting
from gridtrain.protocol.member_io import Effect, GiveState, Note, PassOn, Post, TakeBlock, TakeDigest
from gridtrain.protocol.neighbours import donor_of
from gridtrain.protocol.passing_on import PassingOn


class StateTransfer:
    """Both sides of it, of one member in one generation.

    Args:
        chained: newcomers pass on to each other what comes.
    """

    def __init__(self, seat: Seat, lasting: Lasting, *, chained: bool) -> None:
        self.passing = PassingOn(seat, chained=chained)
        self._seat = seat
        self._lasting = lasting
        self._holding = lasting.holding
        self._asked: dict[m.PeerId, m.StateRequest] = {}  # to be answered once it is synced

    # -- of the state that is lacking here ---------------------------------------------------------

    @property
    def donor(self) -> m.PeerId | None:
        """Who gives this member the state that it lacks."""
        rank = donor_of(self._seat, self._lasting.in_stages) if not self._holding.synced else None
        return self._seat.roster[rank].peer if rank is not None else None

    def ask(self, of: m.PeerId | None = None) -> list[Effect]:
        """`of`: this one alone has just been connected.  The loop says how much is here already."""
        seat, donor, giver = self._seat, self.donor, self.passing.giver
        if self._holding.synced or self._lasting.checkpoints.reloading:
            return []
        whole = not self._lasting.following.donors  # a follower has the rest, or will have it
        asks: list[tuple[m.PeerId | None, m.StateRequest]] = [
            (donor, m.StateRequest(seat.term, seat.generation, whole, digest=whole and giver is not None))
        ]
        asks += [(giver, m.StateRequest(seat.term, seat.generation))] if whole else []
        up = self._lasting.edges.up
        return [Post(peer, ask) for peer, ask in asks if peer in up and of in (None, peer) and peer]

    def go_round(self, reason: str) -> list[Effect]:
        """Whoever was to pass the state on to this member does not: the donor gives it."""
        giver = self.passing.giver
        self.passing.go_round()
        fields = {"peer": giver.hex()[:8] if giver is not None else "", "reason": reason}
        return [Note("not_passed_on", fields), *self.ask()]

    def block(self, peer: m.PeerId, block: m.StateBlock, now_s: float) -> list[Effect]:
        if self._holding.synced or peer not in (self.donor, self.passing.giver):
            return []
        if not self.passing.takes(peer, block.index, now_s):
            return []
        if block.index == block.total - 1:
            self._holding.loading()
        return [TakeBlock(peer, block)]

    def digest(self, peer: m.PeerId, told: m.StateDigest, now_s: float) -> list[Effect]:
        if peer != self.donor:
            return []
        self.passing.moved(now_s)
        return [TakeDigest(told.generation, told.digest)]

    # -- of the state that is here -----------------------------------------------------------------

    def give(self, peer: m.PeerId, asked: m.StateRequest) -> list[Effect]:
        """What a joining member needs: our state, later if we have none yet, or a checkpoint of its stage."""
        seat, checkpoints = self._seat, self._lasting.checkpoints
        rank = seat.rank_of(peer)
        stage = seat.seats.stage_of(rank) if rank is not None else 0
        kept = checkpoints.on_disk(seat.blocks_of(stage)) if stage != seat.stage else None
        if stage != seat.stage and kept is None:
            note = Note("no_such_stage", {"stage": stage, "peer": peer.hex()[:8]})
            return [note, *checkpoints.tell()]
        if peer == self.passing.next and not asked.digest and seat.roster[seat.rank].joining:
            return [PassOn(peer, seat.term, seat.generation, asked.have)]
        if kept is None and not self._holding.synced:
            self._asked[peer] = asked
            return []
        return [GiveState(peer, seat.term, seat.generation, asked.whole, kept, asked.have, asked.digest)]

    def give_late(self) -> list[Effect]:
        """To whom it was not given, as it was not here yet."""
        asked, self._asked = self._asked, {}
        if not self._lasting.in_stages:
            return []
        return [effect for peer, request in asked.items() for effect in self.give(peer, request)]
