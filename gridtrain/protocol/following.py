"""Both sides of following, of one worker: it takes over the state while the others train on, or gives it.

Decides from whom what belongs to that is taken, what the loop is told of its donors, and what the coordinator
of those that cannot be reached.  Never decides who follows whom (`protocol.followers`, the coordinator's) and
opens nothing of what comes.

    Fetch(donors) --> Follow, Dial, DonorUp ..   Feed <-- image and updates      CaughtUp --> Caught
    Donate(to)    --> Donating                   Feed <-- what followers ask for
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtrain.protocol import messages as m
from gridtrain.protocol.edges import Edges
from gridtrain.protocol.member_io import DonorDown, DonorUp, Effect, Feed, Follow, Note
from gridtrain.protocol.unmet import Unmet

OF_FOLLOWERS = (m.ImageAsk, m.BlocksAsk, m.UpdatesAsk)
OF_DONORS = (m.ImageTable, m.ImageBlock, m.Update, m.NoImage)

OfFollowing = m.ImageAsk | m.BlocksAsk | m.UpdatesAsk | m.ImageTable | m.ImageBlock | m.Update | m.NoImage


class Following:
    """See the module's text.

    Args:
        route_s: how long an edge may take to come up.

    Attributes:
        donors: this worker follows them.
        followers: to whom it gives.
        caught: what it has told the coordinator of that, and would tell again.
    """

    def __init__(self, route_s: float) -> None:
        self._unmet = Unmet(route_s)
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

    def follow(self, donors: Sequence[tuple[m.PeerId, str]], edges: Edges, now_s: float) -> list[Effect]:
        """From now on these; who was one before and is none now is told as one that is gone."""
        before, self.donors = self.donors, tuple(peer for peer, _ in donors)
        self._unmet.told(now_s)
        effects: list[Effect] = [] if before else [Follow()]
        effects += edges.dial(donors)
        effects += [DonorDown(peer) for peer in before if peer not in self.donors]
        return effects + [DonorUp(p) for p in self.donors if p in edges.up and p not in before]

    def edge_up(self, peer: m.PeerId) -> list[Effect]:
        return [DonorUp(peer)] if peer in self.donors else []

    def edge_down(self, peer: m.PeerId, now_s: float) -> list[Effect]:
        if peer in self.donors:
            self._unmet.told(now_s)
        return self.gone(peer)

    def gone(self, peer: m.PeerId) -> list[Effect]:
        return [DonorDown(peer)] if peer in self.donors else []

    # -- in no generation: of a member it is seen by its edges who cannot be reached ------------------

    def deadline_s(self, up: Collection[m.PeerId]) -> float:
        """When `unmet` has something to say."""
        return self._unmet.deadline_s(self.donors, up)

    def unmet(self, edges: Edges, now_s: float) -> tuple[m.PeerId, ...]:
        """No donor could be reached: who else could not, as there may be another way; (): nothing to say."""
        return self._unmet.named(self.donors, edges.expected, edges.up, now_s)

    def second_chance(self, until_s: float) -> None:
        """This worker slept: it waits until then at least."""
        self._unmet.second_chance(until_s)

    # -- how it ends -----------------------------------------------------------------------------------

    def strayed(self) -> m.Caught:
        """It cannot follow: what it lacks it gets in a generation."""
        self.donors, self.caught = (), m.Caught(-1, b"")
        return self.caught

    def ended(self) -> None:
        """It holds a generation's state."""
        self.donors, self.caught = (), None
