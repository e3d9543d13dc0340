"""Catch-up while the members train: a newcomer copies the state and later updates from some of the members.

    newcomer   CatchUpFrom(sources) --> BeginCatchUp, Dial, SourceConnected ..; then the sources' messages are
                 |                      delivered to the I/O loop until CaughtUp --> CatchUpReport
                 +-- no source connected for `route_s` --> PeersUnreachable --> CatchUpFrom, other addresses
    member     ServeCatchUp(receivers) --> TakeStateSnapshot; the receivers' requests go to the I/O loop

A worker that is catching up has no rank, so no member notices a missing connection to it; the worker itself
therefore reports sources that it cannot reach.  The coordinator decides which sources a worker uses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gridtrain.core import messages as m
from gridtrain.core.group.io_loop_stalls import extend_start
from gridtrain.core.group.member_events import (
    BeginCatchUp,
    DeliverCatchUpMessage,
    LogEvent,
    MemberEffect,
    SourceConnected,
    SourceDisconnected,
)
from gridtrain.core.member.peer_links import PeerLinks

MAX_UNREACHABLE = 1024
"""Maximum number of peers in one PeersUnreachable message."""

CatchUpRequest = m.SnapshotRequest | m.SnapshotBlocksRequest | m.UpdatesRequest
CatchUpMessage = (
    CatchUpRequest | m.SnapshotDigests | m.SnapshotBlock | m.UpdateLogEntry | m.SnapshotUnavailable
)


class WorkerCatchUp:
    """Catch-up of one worker.

    Args:
        route_s: time allowed for establishing a connection.

    Attributes:
        sources: peers from which this worker catches up.
        receivers: peers to which this worker serves its state.
        last_report: the latest CatchUpReport, which is repeated after a Welcome.
    """

    def __init__(self, peer_links: PeerLinks, route_s: float) -> None:
        self._peer_links = peer_links
        self._route_s = route_s
        self._unreachable_since_s = math.inf  # infinite: not waiting for a source, or already reported
        self.sources: tuple[m.PeerId, ...] = ()
        self.receivers: frozenset[m.PeerId] = frozenset()
        self.last_report: m.CatchUpReport | None = None

    @property
    def peers(self) -> frozenset[m.PeerId]:
        return self.receivers.union(self.sources)

    def receive(self, peer: m.PeerId, message: CatchUpMessage) -> list[MemberEffect]:
        """Deliver a receiver's request or a source's answer; ignore messages from other peers."""
        if peer in (self.receivers if isinstance(message, CatchUpRequest) else self.sources):
            return [DeliverCatchUpMessage(peer, message)]
        return [LogEvent("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]

    # -- serving ---------------------------------------------------------------------------------

    def serve(self, receivers: Collection[m.PeerId]) -> None:
        self.receivers = frozenset(receivers)

    # -- catching up -----------------------------------------------------------------------------

    def start(self, sources: Sequence[tuple[m.PeerId, str]], now_s: float) -> list[MemberEffect]:
        """Start to catch up from these (peer, address) pairs, which replace any current sources."""
        before, self.sources = self.sources, tuple(peer for peer, _ in sources)
        self._unreachable_since_s = now_s
        up = self._peer_links.connected
        effects: list[MemberEffect] = [] if before else [BeginCatchUp()]
        effects += self._peer_links.dial(sources)
        effects += [SourceDisconnected(peer) for peer in before if peer not in self.sources]
        return effects + [SourceConnected(p) for p in self.sources if p in up and p not in before]

    def peer_connected(self, peer: m.PeerId) -> list[MemberEffect]:
        return [SourceConnected(peer)] if peer in self.sources else []

    def peer_disconnected(self, peer: m.PeerId, now_s: float) -> list[MemberEffect]:
        """If a source was disconnected, restart the wait for a connection; the source may reconnect soon."""
        if peer in self.sources:
            self._unreachable_since_s = now_s
        return self.source_lost(peer)

    def source_lost(self, peer: m.PeerId) -> list[MemberEffect]:
        return [SourceDisconnected(peer)] if peer in self.sources else []

    def report(self, applied: int, history: bytes) -> m.CatchUpReport:
        """Return, and remember, a report that this worker holds the state after step `applied`."""
        self.last_report = m.CatchUpReport(applied, history)
        return self.last_report

    def fail(self) -> m.CatchUpReport:
        """Abandon catch-up; return a report that this worker holds no state and needs the whole state."""
        self.sources = ()
        return self.report(-1, b"")

    def already_synced(self) -> None:
        """End catch-up.  Called when this worker already holds the state of the generation that begins."""
        self.sources = ()

    def finish(self) -> None:
        """End catch-up and drop the report.  Called when the generation's state has been loaded."""
        self.sources, self.last_report = (), None

    # -- outside of a generation: sources that cannot be reached ---------------------------------

    @property
    def deadline_s(self) -> float:
        """The time at which to call `take_unreachable`; infinite while any source is connected."""
        if not self.sources or any(peer in self._peer_links.connected for peer in self.sources):
            return math.inf
        return self._unreachable_since_s + self._route_s

    def take_unreachable(self, now_s: float) -> tuple[m.PeerId, ...]:
        """Return the peers to report as unreachable when the wait for a connection is over; otherwise ().

        These are the sources, followed by announced peers, which could serve as relays; connected peers are
        omitted.  The peers are returned only once.
        """
        if now_s < self.deadline_s:
            return ()
        self._unreachable_since_s = math.inf
        links = self._peer_links
        peers = dict.fromkeys((*self.sources, *links.expected_peers))
        return tuple(peer for peer in peers if peer not in links.connected)[:MAX_UNREACHABLE]

    def extend_timeouts(self, until_s: float) -> None:
        """After a stall of this worker's loop, postpone the deadline to `until_s` or later."""
        self._unreachable_since_s = extend_start(self._unreachable_since_s, self._route_s, until_s)
