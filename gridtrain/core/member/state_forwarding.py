"""The chain along which newcomers forward the state, and the rule for bypassing a slow member of the chain.

    rank      0         1         2         3         4
              source    member    joining   joining   joining
              blocks -----------> blocks -> blocks -> blocks    about as fast for many members as for one
              digest ---------------------> digest    digest    sent to each member by the source itself

A forwarded state is accepted only if it has the digest that the source sent.  If a forwarder sends nothing
for `BLOCK_TIMEOUT_S`, or violates the protocol, it is bypassed, and the source sends the rest.  If the digest
differs, the source sends everything again, because it is unknown which member altered the state.
"""

from __future__ import annotations

import math

from gridtrain.core.group.io_loop_stalls import extend_start
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.messages import PeerId

BLOCK_TIMEOUT_S = 10.0
"""Time to wait for a block before asking the source.  A block of 1 MiB takes 8 s at 1 Mbit/s."""

MAX_FIRST_BLOCK_TIMEOUT_S = 60.0
"""Longest time to wait for the first block, which all joining members before this member forward.

A member waits `BLOCK_TIMEOUT_S` for each of these members, but not longer than this limit.
"""


class StateForwarding:
    """One member's position in the chain.

    Args:
        chained: whether the joining members form a chain, as for the whole state of an unpartitioned model.

    Attributes:
        upstream: the member that forwards the state to this member; None if the source sends it.
        downstream: the member to which this member forwards the state; None if there is none.
    """

    def __init__(self, assignment: RankAssignment, *, chained: bool) -> None:
        self.upstream: PeerId | None = None
        self.downstream: PeerId | None = None
        self._last_progress_s = math.inf  # no block can arrive until the source has made its copy
        self._next_block = 0  # index after the latest block from upstream
        self._first_block_timeout_s = BLOCK_TIMEOUT_S
        joining = [member.peer for member in assignment.members if member.joining] if chained else []
        if assignment.own_id in joining:
            at = joining.index(assignment.own_id)
            self._first_block_timeout_s = min(BLOCK_TIMEOUT_S * max(1, at), MAX_FIRST_BLOCK_TIMEOUT_S)
            self.upstream = joining[at - 1] if at else None
            self.downstream = joining[at + 1] if at + 1 < len(joining) else None

    @property
    def adjacent_peers(self) -> frozenset[PeerId]:
        """The neighbours in the chain, to which this member tries to connect."""
        return frozenset(peer for peer in (self.upstream, self.downstream) if peer is not None)

    @property
    def deadline_s(self) -> float:
        """The time at which to bypass the upstream member; infinite if there is none."""
        return self._last_progress_s + self._timeout_s if self.upstream is not None else math.inf

    @property
    def _timeout_s(self) -> float:
        return BLOCK_TIMEOUT_S if self._next_block else self._first_block_timeout_s

    def record_progress(self, now_s: float) -> None:
        self._last_progress_s = now_s

    def extend_timeouts(self, until_s: float) -> None:
        """After a stall of this worker's loop, postpone the deadline to `until_s` or later."""
        self._last_progress_s = extend_start(self._last_progress_s, self._timeout_s, until_s)

    def record_block(self, peer: PeerId, index: int, now_s: float) -> None:
        """Record that a block arrived; ignore blocks from upstream that have arrived before.

        After a connection is lost, blocks may arrive twice, because those in transit are requested again.
        """
        if peer == self.upstream:
            if index < self._next_block:
                return
            self._next_block = index + 1
        self.record_progress(now_s)

    def bypass_upstream(self) -> None:
        """Receive the rest from the source instead of the upstream member."""
        self.upstream = None
