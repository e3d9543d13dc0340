"""A state that several members lack goes from one to the next, each block as soon as it has come.

Decides who gives it to whom in one generation, and when a member asks the donor itself instead.  Never looks
into a block: what came from another than the donor counts when it has the digest that the donor tells.

    rank      0        1        2        3        4
              donor    holds    joins    joins    joins
              blocks ---------> blocks -> blocks -> blocks      J members in the time of one, and J - 1 blocks
              digest ------------------> o -----> o             from the donor itself, a few bytes

A member of which nothing comes for `LATE_S`, or that breaks the protocol, is gone round: the donor gives the
rest.  So does it from the start where what came has another digest, as nobody knows whose fault that is.
"""

from __future__ import annotations

import math

from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.stall_detection import extend_start
from gridtrain.core.messages import PeerId

BLOCK_TIMEOUT_S = 10.0
"""So long nothing may come before the donor is asked.  A block of 1 MiB takes 8 s at 1 Mbit/s."""

MAX_FIRST_BLOCK_TIMEOUT_S = 60.0
"""The first block passes all newcomers before this one: it has `LATE_S` for each, up to this."""


class StateForwarding:
    """One member's place in it.

    Args:
        seat: None: it is in no generation.
        chained: this member gets the whole state, and it is in one piece.

    Attributes:
        giver: who passes the state on to this member; None: the donor does.
        next: to whom this member passes it on; None: to nobody.
    """

    def __init__(self, seat: RankAssignment | None = None, *, chained: bool = False) -> None:
        self.upstream: PeerId | None = None
        self.downstream: PeerId | None = None
        self._last_progress_s = math.inf  # until the donor has made its copy, nobody has anything to give
        self._next_block = 0  # the giver's next block
        self._first_block_timeout_s = BLOCK_TIMEOUT_S  # how long the first one may take
        if seat is None or not chained:
            return
        joining = [member.peer for member in seat.members if member.joining]
        if seat.own_id in joining:
            at = joining.index(seat.own_id)
            self._first_block_timeout_s = min(BLOCK_TIMEOUT_S * max(1, at), MAX_FIRST_BLOCK_TIMEOUT_S)
            self.upstream = joining[at - 1] if at else None
            self.downstream = joining[at + 1] if at + 1 < len(joining) else None

    @property
    def adjacent_peers(self) -> frozenset[PeerId]:
        """To whom this member is to be connected for it, if it can."""
        return frozenset(peer for peer in (self.upstream, self.downstream) if peer is not None)

    @property
    def deadline_s(self) -> float:
        """When to go round the giver."""
        late_s = BLOCK_TIMEOUT_S if self._next_block else self._first_block_timeout_s
        return self._last_progress_s + late_s if self.upstream is not None else math.inf

    def record_progress(self, now_s: float) -> None:
        """Something came."""
        self._last_progress_s = now_s

    def extend_timeouts(self, until_s: float) -> None:
        """This member slept: it waits until then at least."""
        self._last_progress_s = extend_start(self._last_progress_s, BLOCK_TIMEOUT_S, until_s)

    def accept_block(self, peer: PeerId, index: int, now_s: float) -> bool:
        """A block came.  Of the giver another one than the next is of no use, and no sign that it gives."""
        if peer == self.upstream:
            if index != self._next_block:
                return False
            self._next_block += 1
        self.record_progress(now_s)
        return True

    def bypass_upstream(self) -> None:
        """The donor gives what is lacking."""
        self.upstream = None
