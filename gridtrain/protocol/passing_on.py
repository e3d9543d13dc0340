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

from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.messages import PeerId
from gridtrain.protocol.wakefulness import no_earlier

LATE_S = 10.0
"""So long nothing may come before the donor is asked.  A block of 1 MiB takes 8 s at 1 Mbit/s."""

MOST_LATE_S = 60.0
"""The first block passes all newcomers before this one: it has `LATE_S` for each, up to this."""


class PassingOn:
    """One member's place in it.

    Args:
        seat: None: it is in no generation.
        chained: this member gets the whole state, and it is in one piece.

    Attributes:
        giver: who passes the state on to this member; None: the donor does.
        next: to whom this member passes it on; None: to nobody.
    """

    def __init__(self, seat: Seat | None = None, *, chained: bool = False) -> None:
        self.giver: PeerId | None = None
        self.next: PeerId | None = None
        self._moved_s = math.inf  # until the donor has made its copy, nobody has anything to give
        self._due = 0  # the giver's next block
        self._first_s = LATE_S  # how long the first one may take
        if seat is None or not chained:
            return
        joining = [member.peer for member in seat.roster if member.joining]
        if seat.me in joining:
            at = joining.index(seat.me)
            self._first_s = min(LATE_S * max(1, at), MOST_LATE_S)
            self.giver = joining[at - 1] if at else None
            self.next = joining[at + 1] if at + 1 < len(joining) else None

    @property
    def near(self) -> frozenset[PeerId]:
        """To whom this member is to be connected for it, if it can."""
        return frozenset(peer for peer in (self.giver, self.next) if peer is not None)

    @property
    def deadline_s(self) -> float:
        """When to go round the giver."""
        late_s = LATE_S if self._due else self._first_s
        return self._moved_s + late_s if self.giver is not None else math.inf

    def moved(self, now_s: float) -> None:
        """Something came."""
        self._moved_s = now_s

    def second_chance(self, until_s: float) -> None:
        """This member slept: it waits until then at least."""
        self._moved_s = no_earlier(self._moved_s, LATE_S, until_s)

    def takes(self, peer: PeerId, index: int, now_s: float) -> bool:
        """A block came.  Of the giver another one than the next is of no use, and no sign that it gives."""
        if peer == self.giver:
            if index != self._due:
                return False
            self._due += 1
        self.moved(now_s)
        return True

    def go_round(self) -> None:
        """The donor gives what is lacking."""
        self.giver = None
