"""What a worker keeps from one generation to the next, and what every part of its core may ask of that.

Decides nothing.  There is one of it; each `Generation` is lent it.

    Course --- Generation     seat, attempts, means, the state's way here               from VIEW to VIEW
                   |
                   v
               Lasting        edges, state, checkpoints, following, hand-over, pace     as long as it lives
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.config import Deadlines
from gridtrain.protocol import messages as m
from gridtrain.protocol.allegiance import Allegiance
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.checkpoints import Checkpoints
from gridtrain.protocol.edges import Edges
from gridtrain.protocol.following import Following
from gridtrain.protocol.handover import Handover
from gridtrain.protocol.holding import Holding
from gridtrain.protocol.member_io import Effect, Enter, HangUp, Note, Post
from gridtrain.protocol.pace import Pace


@dataclass(slots=True)
class Lasting:
    """See the module's text.  `entered`: what the trainer brought; None: it has not come yet."""

    me: m.PeerId
    deadlines: Deadlines
    allegiance: Allegiance
    edges: Edges
    holding: Holding
    checkpoints: Checkpoints
    following: Following
    handover: Handover
    pace: Pace
    entered: Enter | None = None

    @property
    def coordinator(self) -> m.PeerId:
        return self.allegiance.coordinator

    @property
    def setup(self) -> m.Setup | None:
        return self.entered.setup if self.entered is not None else None

    @property
    def in_stages(self) -> bool:
        return self.entered is not None and self.entered.in_stages

    @property
    def finished(self) -> bool:
        """The ledger has ended the run, as far as this worker has applied it."""
        return self.entered is not None and self.holding.finished(self.entered.setup.ledger)

    def introduction(self) -> list[Effect]:
        """What the trainer brought, for the coordinator."""
        return self.allegiance.introduction(self.entered, self.checkpoints.kept, self.holding.touched)

    def tell_finished(self) -> list[Effect]:
        """Nothing if there is more to do."""
        if not self.finished:
            return []
        return [Post(self.coordinator, m.Finished(*self.holding.at))]

    def acquaintances(self, seat: Seat | None) -> frozenset[m.PeerId]:
        """Whom this worker deals with: the coordinator, the members, and who was announced; nobody else."""
        return self.edges.acquaintances(seat, self.following.peers)

    def let_go(self, seat: Seat | None) -> list[Effect]:
        """Of whom it does not deal with any more."""
        return self.edges.let_go(self.acquaintances(seat))

    def cut_off(self, peer: m.PeerId, reason: str) -> list[Effect]:
        """It has broken the protocol."""
        if not self.edges.cut_off(peer):
            return [HangUp(peer)]
        note = Note("offence", {"peer": peer.hex()[:8], "reason": reason})
        return [note, HangUp(peer), *self.following.gone(peer)]
