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

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import LogEvent, MemberEffect, Send, Stop, TrainerJoined
from gridtrain.errors import JoinRefused

_CARRIES_TERM = (m.Welcome, m.Freeze, m.MemberListPage, m.MembershipView, m.StartGeneration)
"""Of an old coordinator these are seen to be old by themselves; all else counts by its last Welcome."""


class CoordinatorLink:
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
        self.is_welcomed = False
        self.run_state = ("", "")
        self.reachable_address: str | None = None
        self._join = join
        self._is_fenced = False  # whoever answers for the coordinator does so in a term that is over

    @property
    def name(self) -> str:
        return self._join.name

    def set_name(self, name: str) -> None:
        """As the run calls this worker, should it join anew."""
        self._join = replace(self._join, name=name)

    # -- what it says ----------------------------------------------------------------------------

    def is_outdated(self, message: m.Message) -> bool:
        """Whatever it says, it is not the coordinator any more."""
        return self._is_fenced and not isinstance(message, _CARRIES_TERM)

    def coordinator_connected(self, generation: int) -> list[MemberEffect]:
        self._is_fenced = False  # until it says its term
        return [self._join_message(generation)]

    def coordinator_disconnected(self, reason: str) -> list[MemberEffect]:
        self.is_welcomed = False
        if self.run_state[0] == "finished":
            return [LogEvent("coordinator_ended", {"reason": reason})]
        return [LogEvent("coordinator_away", {"reason": reason})]

    def accept_welcome(self, term: int) -> bool:
        """False: its term is over."""
        self._is_fenced = term < self.term
        if self._is_fenced:
            return False
        self.term, self.is_welcomed = term, True
        return True

    def rejoin(self, reason: str, generation: int) -> list[MemberEffect]:
        if not self.is_welcomed:
            return []  # the Join is on its way
        self.is_welcomed = False
        return [LogEvent("rejoin", {"reason": reason}), self._join_message(generation)]

    def receive(self, message: m.Refused | m.Reachability | m.RunStateUpdate) -> list[MemberEffect]:
        """What concerns no generation."""
        match message:
            case m.Refused(code, reason, remedy):
                return [Stop(JoinRefused(code, reason, remedy=remedy))]
            case m.Reachability(address):
                self.reachable_address = address
                return [LogEvent("reach", {"address": address})]
            case m.RunStateUpdate(state, reason):
                self.run_state = (state, reason)
                return [LogEvent("run_state", {"state": state, "reason": reason})]

    # -- what it is told -------------------------------------------------------------------------

    def send(self, message: m.Message) -> list[MemberEffect]:
        """If it listens; else it is told with the next Welcome."""
        return [Send(self.coordinator, message)] if self.is_welcomed else []

    def _join_message(self, generation: int) -> Send:
        return Send(self.coordinator, replace(self._join, is_rejoin=self.term > 0, generation=generation))

    def introduce(
        self, entered: TrainerJoined | None, kept: tuple[m.CheckpointInfo, ...], touched: bool
    ) -> list[MemberEffect]:
        """What the trainer brought, with what has changed since."""
        if entered is None:
            return []
        setup = replace(
            entered.setup,
            stage_checkpoints=kept,
            initial_state_digest=b"" if touched else entered.setup.initial_state_digest,
        )
        told = (entered.worker_info, setup) if entered.worker_info is not None else (setup,)
        return [Send(self.coordinator, message) for message in told]

    def report_generation(self, seat: RankAssignment | None) -> list[MemberEffect]:
        """Where this worker is, for a coordinator whose journal may be older than that (rule 11)."""
        if not self.term:
            return []
        if seat is None:  # the term alone may be news
            return [Send(self.coordinator, m.CurrentGeneration(self.term, 0, (), ()))]
        members = tuple((member.peer, member.share) for member in seat.members)
        return [
            Send(
                self.coordinator, m.CurrentGeneration(self.term, seat.generation, members, seat.stage_bounds)
            )
        ]
