"""Which coordinator a worker obeys, and what that one is told of the worker as often as they meet.

Decides whether what the coordinator's key says counts: a coordinator whose term is over is not obeyed, and
nobody else is.  Never decides what follows from it (`protocol.course`).

    EdgeUp --> Join        Welcome, term t >= ours   welcomed: Setup, and what may have been missed
                           Welcome, term t < ours    fenced: Seated tells it our term, nothing else is done
                           Rejoin                    Join, once
                           Refused                   Stop
"""

from __future__ import annotations

from dataclasses import replace

from gridtrain.errors import JoinRefused
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.member_io import Effect, Enter, Note, Post, Stop

_SAYS_ITS_TERM = (m.Welcome, m.Freeze, m.Roster, m.View, m.Start)
"""Of an old coordinator these are seen to be old by themselves; all else counts by its last Welcome."""


class Allegiance:
    """See the module's text.

    Args:
        coordinator: its key.
        join: the Join message to introduce ourselves with.

    Attributes:
        term: the highest one that was heard of; 0: none.
        welcomed: in this connection.
        run_state: what the coordinator last said of the run, and why.
        reach: an address at which it got through to us; empty: nobody from outside can; None: not said yet.
    """

    def __init__(self, coordinator: m.PeerId, join: m.Join) -> None:
        self.coordinator = coordinator
        self.term = 0
        self.welcomed = False
        self.run_state = ("", "")
        self.reach: str | None = None
        self._join = join
        self._fenced = False  # whoever answers for the coordinator does so in a term that is over

    @property
    def name(self) -> str:
        return self._join.name

    def called(self, name: str) -> None:
        """As the run calls this worker, should it join anew."""
        self._join = replace(self._join, name=name)

    # -- what it says ----------------------------------------------------------------------------

    def is_over(self, message: m.Message) -> bool:
        """Whatever it says, it is not the coordinator any more."""
        return self._fenced and not isinstance(message, _SAYS_ITS_TERM)

    def connected(self, generation: int) -> list[Effect]:
        self._fenced = False  # until it says its term
        return [self._joins(generation)]

    def lost(self, reason: str) -> list[Effect]:
        self.welcomed = False
        return [Note("coordinator_away", {"reason": reason})]

    def welcome(self, term: int) -> bool:
        """False: its term is over."""
        self._fenced = term < self.term
        if self._fenced:
            return False
        self.term, self.welcomed = term, True
        return True

    def rejoin(self, reason: str, generation: int) -> list[Effect]:
        if not self.welcomed:
            return []  # the Join is on its way
        self.welcomed = False
        return [Note("rejoin", {"reason": reason}), self._joins(generation)]

    def told(self, message: m.Refused | m.Reach | m.RunState) -> list[Effect]:
        """What concerns no generation."""
        match message:
            case m.Refused(code, reason, remedy):
                return [Stop(JoinRefused(code, reason, remedy=remedy))]
            case m.Reach(address):
                self.reach = address
                return [Note("reach", {"address": address})]
            case m.RunState(state, reason):
                self.run_state = (state, reason)
                return [Note("run_state", {"state": state, "reason": reason})]

    # -- what it is told -------------------------------------------------------------------------

    def tell(self, message: m.Message) -> list[Effect]:
        """If it listens; else it is told with the next Welcome."""
        return [Post(self.coordinator, message)] if self.welcomed else []

    def _joins(self, generation: int) -> Post:
        return Post(self.coordinator, replace(self._join, again=self.term > 0, generation=generation))

    def introduction(self, entered: Enter | None, kept: tuple[m.Held, ...], touched: bool) -> list[Effect]:
        """What the trainer brought, with what has changed since."""
        if entered is None:
            return []
        setup = replace(entered.setup, kept=kept, begins=b"" if touched else entered.setup.begins)
        told = (entered.about, setup) if entered.about is not None else (setup,)
        return [Post(self.coordinator, message) for message in told]

    def seated(self, seat: Seat | None) -> list[Effect]:
        """Where this worker is, for a coordinator whose journal may be older than that (rule 11)."""
        if not self.term:
            return []
        if seat is None:  # the term alone may be news
            return [Post(self.coordinator, m.Seated(self.term, 0, (), ()))]
        members = tuple((member.peer, member.share) for member in seat.roster)
        return [Post(self.coordinator, m.Seated(self.term, seat.generation, members, seat.cuts))]
