"""A worker's link to the coordinator: sends Join and Setup, and ignores a coordinator with an outdated term.

After connecting, the worker sends Join.  It then handles the coordinator's messages as follows:

    Welcome, term >= own term   the worker is welcomed: it sends Setup, and repeats what may have been lost
    Welcome, term < own term    the coordinator is ignored; CurrentGeneration tells it the newer term
    Rejoin                      the worker sends Join again, unless a Join is still unanswered
    Refused                     the worker stops
"""

from __future__ import annotations

from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import LogEvent, MemberEffect, Send, Stop, TrainerJoined
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.errors import DISMISSED, STALLED, JoinRefused

_CARRIES_TERM = (
    m.Welcome,
    m.Freeze,
    m.MemberListPage,
    m.MemberListChanges,
    m.MembershipView,
    m.StartGeneration,
)
"""Messages that contain the sender's term, which determines whether they are outdated.

The term of the last Welcome determines whether any other message is outdated.
"""


class CoordinatorLink:
    """State of the link to the coordinator.

    Args:
        coordinator: public key of the coordinator.
        join: the Join message that introduces this worker.

    Attributes:
        term: the highest known term; 0 if none is known.  The handlers of MembershipView and StandbyNotice
            update it.
        is_welcomed: whether a Welcome with a valid term has arrived on this connection.
        is_fenced: whether the coordinator's last Welcome has an outdated term; if so, the coordinator is
            ignored.
        run_state: the last (state, reason) that the coordinator sent.
    """

    def __init__(self, coordinator: m.PeerId, join: m.Join) -> None:
        self.coordinator = coordinator
        self.term = 0
        self.is_welcomed = False
        self.run_state = ("", "")
        self._join = join
        self.is_fenced = False

    @property
    def name(self) -> str:
        return self._join.name

    def set_name(self, name: str) -> None:
        """Record the name that the coordinator gave this worker, for use in the next Join."""
        self._join = replace(self._join, name=name)

    def set_address(self, address: str) -> None:
        """Record the address on which this worker now listens, for use in the next Join."""
        self._join = replace(self._join, address=address)

    # -- received --------------------------------------------------------------------------------

    def is_outdated(self, message: m.Message) -> bool:
        """Return whether to ignore `message`, because the coordinator's last Welcome has an outdated term.

        Handlers of messages that contain a term check that term themselves.
        """
        return self.is_fenced and not isinstance(message, _CARRIES_TERM)

    def connected(self, generation: int) -> list[MemberEffect]:
        self.is_fenced = False  # until the coordinator announces its term
        return [self._join_message(generation)]

    def disconnected(self, reason: str) -> list[MemberEffect]:
        self.is_welcomed = False
        if self.run_state[0] == "finished":
            return [LogEvent("coordinator_ended", {"reason": reason})]
        return [LogEvent("coordinator_away", {"reason": reason})]

    def accept_welcome(self, term: int) -> bool:
        """Accept a Welcome and its term, and return True.

        If the term is outdated, return False instead and ignore the coordinator from now on.
        """
        self.is_fenced = term < self.term
        if self.is_fenced:
            return False
        self.term, self.is_welcomed = term, True
        return True

    def rejoin(self, reason: str, generation: int) -> list[MemberEffect]:
        if not self.is_welcomed:
            return []  # a Join has already been sent
        self.is_welcomed = False
        return [LogEvent("rejoin", {"reason": reason}), self._join_message(generation)]

    def receive(self, message: m.Refused | m.Reachability | m.RunStateUpdate) -> list[MemberEffect]:
        """Handle a message that does not concern a generation."""
        match message:
            case m.Refused(code, reason, remedy):
                event = {DISMISSED: "dismissed", STALLED: "left_out"}.get(code)
                told = [LogEvent(event, {"reason": reason})] if event is not None else []
                reason = f"this worker {reason}" if reason.startswith("was ") else reason
                return [*told, Stop(JoinRefused(code, reason, remedy=remedy))]
            case m.Reachability(address):
                return [LogEvent("reach", {"address": address})]
            case m.RunStateUpdate(state, reason):
                before, reason_before = self.run_state
                is_learning = not reason.startswith(m.NOTHING_LEARNED)
                had_stopped = before == "paused" or reason_before.startswith(m.NOTHING_LEARNED)
                event = "run_state" if is_learning else "not_learning"
                if state == "training" and had_stopped and is_learning:
                    event = "resumed"
                self.run_state = (state, reason)
                return [LogEvent(event, {"state": state, "reason": reason})]

    # -- sent ------------------------------------------------------------------------------------

    def send(self, message: m.Message) -> list[MemberEffect]:
        """Send `message` if this worker is welcomed.

        Otherwise `message` is dropped, because this worker reports its current state after the next Welcome.
        """
        return [Send(self.coordinator, message)] if self.is_welcomed else []

    def _join_message(self, generation: int) -> Send:
        return Send(self.coordinator, replace(self._join, is_rejoin=self.term > 0, generation=generation))

    def introduce(
        self, trainer: TrainerJoined | None, stored: tuple[m.CheckpointInfo, ...], is_modified: bool
    ) -> list[MemberEffect]:
        """Send WorkerInfo and the current Setup, if the trainer has joined."""
        if trainer is None:
            return []
        setup = replace(
            trainer.setup,
            stage_checkpoints=stored,
            initial_state_digest=b"" if is_modified else trainer.setup.initial_state_digest,
        )
        messages = (trainer.worker_info, setup) if trainer.worker_info is not None else (setup,)
        return [Send(self.coordinator, message) for message in messages]

    def report_generation(self, assignment: RankAssignment | None) -> list[MemberEffect]:
        """Send this worker's generation to the coordinator, whose journal may lack it (commit rule 11).

        Nothing is sent if this worker does not know any term.
        """
        if not self.term:
            return []
        if assignment is None:  # even the term may be unknown to the coordinator
            return [Send(self.coordinator, m.CurrentGeneration(self.term, 0, (), ()))]
        members = tuple((member.peer, member.share) for member in assignment.members)
        current = m.CurrentGeneration(self.term, assignment.generation, members, assignment.stage_bounds)
        return [Send(self.coordinator, current)]
