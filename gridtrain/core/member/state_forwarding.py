"""Chain in which joining members forward the state to one another, each block as soon as it arrives.

    rank      0        1        2        3        4
              source   holds    joins    joins    joins
              blocks ---------> blocks -> blocks -> blocks      J members receive it in about the time of one
              digest ------------------> o -----> o             from the source itself, a few bytes

A block that did not come from the source counts only if the whole has the digest that the source sent.  A
forwarder that sends nothing for `BLOCK_TIMEOUT_S`, or violates the protocol, is bypassed: the source sends
the rest.  If the digest differs, the source sends everything again, as nobody knows who altered it.
"""

from __future__ import annotations

import math

from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.group.stall_detection import extend_start
from gridtrain.core.messages import PeerId

BLOCK_TIMEOUT_S = 10.0
"""Wait this long for a block before asking the source.  A block of 1 MiB takes 8 s at 1 Mbit/s."""

MAX_FIRST_BLOCK_TIMEOUT_S = 60.0
"""The first block passes all joining members before this one: `BLOCK_TIMEOUT_S` for each, up to this."""


class StateForwarding:
    """One member's position in the chain.

    Args:
        chained: this member receives the whole state of a model in one piece.

    Attributes:
        upstream: the member that forwards the state to this one; None: the source sends it.
        downstream: the member that this one forwards the state to; None: nobody.
    """

    def __init__(self, assignment: RankAssignment, *, chained: bool) -> None:
        self.upstream: PeerId | None = None
        self.downstream: PeerId | None = None
        self._last_progress_s = math.inf  # until the source has made its copy, nobody can send anything
        self._next_block = 0  # expected from upstream
        self._first_block_timeout_s = BLOCK_TIMEOUT_S
        joining = [member.peer for member in assignment.members if member.joining] if chained else []
        if assignment.own_id in joining:
            at = joining.index(assignment.own_id)
            self._first_block_timeout_s = min(BLOCK_TIMEOUT_S * max(1, at), MAX_FIRST_BLOCK_TIMEOUT_S)
            self.upstream = joining[at - 1] if at else None
            self.downstream = joining[at + 1] if at + 1 < len(joining) else None

    @property
    def adjacent_peers(self) -> frozenset[PeerId]:
        """Peers to connect to for forwarding, where possible."""
        return frozenset(peer for peer in (self.upstream, self.downstream) if peer is not None)

    @property
    def deadline_s(self) -> float:
        """When to bypass the upstream member."""
        timeout_s = BLOCK_TIMEOUT_S if self._next_block else self._first_block_timeout_s
        return self._last_progress_s + timeout_s if self.upstream is not None else math.inf

    def record_progress(self, now_s: float) -> None:
        self._last_progress_s = now_s

    def extend_timeouts(self, until_s: float) -> None:
        """Our own loop stalled: no timeout ends before `until_s`."""
        self._last_progress_s = extend_start(self._last_progress_s, BLOCK_TIMEOUT_S, until_s)

    def accept_block(self, peer: PeerId, index: int, now_s: float) -> bool:
        """Whether to store this block.  From upstream only the next one is accepted and counts as
        progress."""
        if peer == self.upstream:
            if index != self._next_block:
                return False
            self._next_block += 1
        self.record_progress(now_s)
        return True

    def bypass_upstream(self) -> None:
        """The source sends the rest."""
        self.upstream = None
