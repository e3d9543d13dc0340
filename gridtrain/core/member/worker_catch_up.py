"""Both sides of following, of one worker: it takes over the state while the others train on, or gives it.

Decides from whom what belongs to that is taken, what the loop is told of its donors, and what the coordinator
of those that cannot be reached.  Never decides who follows whom (`protocol.followers`, the coordinator's) and
opens nothing of what comes.

    Fetch(donors) --> Follow, Dial, DonorUp ..   Feed <-- image and updates      CaughtUp --> Caught
    Donate(to)    --> Donating                   Feed <-- what followers ask for
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import (
    BeginCatchUp,
    DeliverCatchUpMessage,
    LogEvent,
    MemberEffect,
    SourceConnected,
    SourceDisconnected,
)
from gridtrain.core.member.peer_links import PeerLinks
from gridtrain.core.member.unreachable_sources import UnreachableSources

RECEIVER_MESSAGES = (m.SnapshotRequest, m.SnapshotBlocksRequest, m.UpdatesRequest)
SOURCE_MESSAGES = (m.SnapshotDigests, m.SnapshotBlock, m.UpdateLogEntry, m.SnapshotUnavailable)

CatchUpMessage = (
    m.SnapshotRequest
    | m.SnapshotBlocksRequest
    | m.UpdatesRequest
    | m.SnapshotDigests
    | m.SnapshotBlock
    | m.UpdateLogEntry
    | m.SnapshotUnavailable
)


class WorkerCatchUp:
    """See the module's text.

    Args:
        route_s: how long an edge may take to come up.

    Attributes:
        donors: this worker follows them.
        followers: to whom it gives.
        caught: what it has told the coordinator of that, and would tell again.
    """

    def __init__(self, route_s: float) -> None:
        self._unreachable_sources = UnreachableSources(route_s)
        self.sources: tuple[m.PeerId, ...] = ()
        self.receivers: frozenset[m.PeerId] = frozenset()
        self.last_report: m.CatchUpReport | None = None

    @property
    def peers(self) -> frozenset[m.PeerId]:
        """With whom this worker deals for it."""
        return self.receivers.union(self.sources)

    def receive(self, peer: m.PeerId, message: CatchUpMessage) -> list[MemberEffect]:
        """Of who has no part in it nothing is taken."""
        asked = peer in (self.receivers if isinstance(message, RECEIVER_MESSAGES) else self.sources)
        if asked:
            return [DeliverCatchUpMessage(peer, message)]
        return [LogEvent("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]

    def start(
        self, donors: Sequence[tuple[m.PeerId, str]], edges: PeerLinks, now_s: float
    ) -> list[MemberEffect]:
        """From now on these; who was one before and is none now is told as one that is gone."""
        before, self.sources = self.sources, tuple(peer for peer, _ in donors)
        self._unreachable_sources.restart(now_s)
        effects: list[MemberEffect] = [] if before else [BeginCatchUp()]
        effects += edges.dial(donors)
        effects += [SourceDisconnected(peer) for peer in before if peer not in self.sources]
        return effects + [
            SourceConnected(p) for p in self.sources if p in edges.connected and p not in before
        ]

    def peer_connected(self, peer: m.PeerId) -> list[MemberEffect]:
        return [SourceConnected(peer)] if peer in self.sources else []

    def peer_disconnected(self, peer: m.PeerId, now_s: float) -> list[MemberEffect]:
        if peer in self.sources:
            self._unreachable_sources.restart(now_s)
        return self.source_lost(peer)

    def source_lost(self, peer: m.PeerId) -> list[MemberEffect]:
        return [SourceDisconnected(peer)] if peer in self.sources else []

    # -- in no generation: of a member it is seen by its edges who cannot be reached ------------------

    def deadline_s(self, up: Collection[m.PeerId]) -> float:
        """When `unmet` has something to say."""
        return self._unreachable_sources.deadline_s(self.sources, up)

    def take_unreachable(self, edges: PeerLinks, now_s: float) -> tuple[m.PeerId, ...]:
        """No donor could be reached: who else could not, as there may be another way; (): nothing to say."""
        return self._unreachable_sources.take_unreachable(
            self.sources, edges.expected_peers, edges.connected, now_s
        )

    def extend_timeouts(self, until_s: float) -> None:
        """This worker slept: it waits until then at least."""
        self._unreachable_sources.extend_timeouts(until_s)

    # -- how it ends -----------------------------------------------------------------------------------

    def fail(self) -> m.CatchUpReport:
        """It cannot follow: what it lacks it gets in a generation."""
        self.sources, self.last_report = (), m.CatchUpReport(-1, b"")
        return self.last_report

    def finish(self) -> None:
        """It holds a generation's state."""
        self.sources, self.last_report = (), None
