"""Both sides of following, of one worker: it takes over the state while the others train on, or gives it.

Decides from whom what belongs to that is taken, and what the loop is told of its donors.  Never decides who
follows whom (`protocol.followers`, the coordinator's) and opens nothing of what comes.

    Fetch(donors) --> Follow, Dial, DonorUp ..   Feed <-- image and updates      CaughtUp --> Caught
    Donate(to)    --> Donating                   Feed <-- what followers ask for
"""

from __future__ import annotations

from collections.abc import Sequence

from gridtrain.protocol import messages as m
from gridtrain.protocol.edges import Edges
from gridtrain.protocol.member_io import DonorDown, DonorUp, Effect, Feed, Follow, Note

OF_FOLLOWERS = (m.ImageAsk, m.BlocksAsk, m.UpdatesAsk)
OF_DONORS = (m.ImageTable, m.ImageBlock, m.Update, m.NoImage)

OfFollowing = m.ImageAsk | m.BlocksAsk | m.UpdatesAsk | m.ImageTable | m.ImageBlock | m.Update | m.NoImage


class Following:
    """See the module's text.

    Attributes:
        donors: this worker follows them.
        followers: to whom it gives.
        caught: what it has told the coordinator of that, and would tell again.
    """

    def __init__(self) -> None:
        self.donors: tuple[m.PeerId, ...] = ()
        self.followers: frozenset[m.PeerId] = frozenset()
        self.caught: m.Caught | None = None

    @property
    def peers(self) -> frozenset[m.PeerId]:
        """With whom this worker deals for it."""
        return self.followers.union(self.donors)

    def heard(self, peer: m.PeerId, message: OfFollowing) -> list[Effect]:
        """Of who has no part in it nothing is taken."""
        asked = peer in (self.followers if isinstance(message, OF_FOLLOWERS) else self.donors)
        if asked:
            return [Feed(peer, message)]
        return [Note("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]

    def follow(self, donors: Sequence[tuple[m.PeerId, str]], edges: Edges) -> list[Effect]:
        """From now on these; who was one before and is none now is told as one that is gone."""
        before, self.donors = self.donors, tuple(peer for peer, _ in donors)
        effects: list[Effect] = [] if before else [Follow()]
        effects += edges.dial(donors)
        effects += [DonorDown(peer) for peer in before if peer not in self.donors]
        return effects + [DonorUp(p) for p in self.donors if p in edges.up and p not in before]

    def edge_up(self, peer: m.PeerId) -> list[Effect]:
        return [DonorUp(peer)] if peer in self.donors else []

    def edge_down(self, peer: m.PeerId) -> list[Effect]:
        return [DonorDown(peer)] if peer in self.donors else []

    def strayed(self) -> m.Caught:
        """It cannot follow: what it lacks it gets in a generation."""
        self.donors, self.caught = (), m.Caught(-1, b"")
        return self.caught

    def ended(self) -> None:
        """It holds a generation's state."""
        self.donors, self.caught = (), None
