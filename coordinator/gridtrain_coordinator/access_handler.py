"""Carries out access control's decisions on enrolments, kicks, bans and violations, in a safe order.

    pending member  Enrol -----------------> enrol ---------> JournalEntry, Send(Enrolled | Refused)
    operator        Invite, RemoveWorker --> handle_order, on a copy --> record --> apply_entry, removals
                    EndRun ----------------> Membership.ending_entries --> record --> Membership.end_run
    RecordViolation -----------------------> record_violation --> JournalEntry, removals
    once a second -------------------------> tick --------------> JournalEntry, removals

    removal: Membership.handle(WorkerRemoved)

A journal entry precedes all messages about the recorded change.  The entries of an operator's command are
durable before it changes anything, so that a command that cannot be recorded can be refused.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import ConnectionRole, PeerUp
from gridtrain.network.transport.zmq.half_open import address_range
from gridtrain_coordinator.access import authorization_limits
from gridtrain_coordinator.access.accusations import VIOLATIONS_BEFORE_REMOVAL
from gridtrain_coordinator.access.authorization import AccessRole, Authorization, ViolationOutcome
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run import events as ev

Order = m.Invite | m.RemoveWorker | m.Unban | m.EndRun
"""A command of the operator."""


@dataclass(slots=True, eq=False)
class AccessHandler:
    """Handles pending members, the operator's commands, and violations.

    Args:
        authorization: decides who has access.
        membership: the coordinator's state machine, which dismisses removed workers.
        wall: a function that returns wall-clock time in seconds; a monotonic clock does not suffice, because
            invitations remain valid when the coordinator restarts.
    """

    _authorization: Authorization
    _membership: Membership
    _wall: Callable[[], float] = time.time
    # pending member -> the invitation's key, host
    _pending_members: dict[m.PeerId, tuple[m.PeerId, str]] = field(default_factory=dict)

    def on_connected(self, event: PeerUp) -> bool:
        """Record a connection; return whether it belongs to a pending member.

        The caller does not pass pending members on to `Membership`.
        """
        if event.pending_key is not None:
            self._pending_members[event.peer] = (event.pending_key, event.host)
        return event.pending_key is not None

    def on_disconnected(self, peer: m.PeerId) -> bool:
        """Discard a connection; return whether it belonged to a pending member."""
        return self._pending_members.pop(peer, None) is not None

    def may_send(self, peer: m.PeerId) -> bool:
        """Return whether messages from this peer are currently accepted.

        Call it for each message just before handling the message, because an earlier message may have changed
        the result.
        """
        role = self._authorization.access_role(peer, self._wall())
        return role is AccessRole.PEER or peer in self._pending_members

    def is_pending(self, peer: m.PeerId) -> bool:
        return peer in self._pending_members

    def refuse_ended_invitation(self, peer: m.PeerId) -> list[ev.Effect] | None:
        """Refuse a message from a pending member whose invitation has expired, was withdrawn or is used up.

        Returns None if the invitation is valid, or if `peer` is not a pending member.
        """
        if peer not in self._pending_members:
            return None
        refusal = self._authorization.invitation_refusal(self._pending_members[peer][0], self._wall())
        if refusal is None:
            return None
        note = ev.LogEvent("info", "not_enrolled", {"reason": refusal.reason})
        return [note, ev.Send(peer, refusal), ev.Disconnect(peer)]

    def handle(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[ev.Effect] | None:
        """Handle a message that concerns access; return None if `Membership` has to handle the message.

        The caller passes the operator's commands to `execute_order` instead.
        """
        if peer in self._pending_members:
            return self._handle_pending(peer, message)
        match message:
            case m.Invite() | m.RemoveWorker() | m.Unban() | m.EndRun():
                return [ev.Send(peer, authorization_limits.NOT_OPERATOR)]
            case m.Join() if not self._authorization.allow_join(peer, now_s):
                return [ev.Send(peer, authorization_limits.TOO_MANY_JOINS), ev.Disconnect(peer)]
            case _ if self.is_operator(peer):
                text = f"a worker used the operator's key to send {type(message).__name__}"
                return [ev.Send(peer, m.Refused("operator", text, "join with an invitation"))]
        return None

    def execute_order(
        self, order: Order, now_s: float, record: Callable[[Sequence[ev.Effect]], None]
    ) -> tuple[list[ev.Effect], m.OperatorReply | m.Refused]:
        """Carry out a command from the operator or the dashboard; return the remaining effects and the reply.

        A removal records the worker's name, so that a ban can be lifted by name.

        Args:
            record: makes the command's journal entries durable; if it raises an exception, nothing has
                changed.
        """
        if isinstance(order, m.EndRun):
            entries = self._membership.ending_entries()
            record(entries)
            effects, reply = self._membership.end_run(now_s)
            return effects[len(entries) :], reply
        name = self._membership.worker_name(order.peer) if isinstance(order, m.RemoveWorker) else ""
        by = self._authorization.operator or b""
        # Decided on a copy: a decision changes who has access, which the transport may check at any time.
        answer = copy.deepcopy(self._authorization).handle_order(by, order, self._wall(), name)
        assert isinstance(answer.reply, m.OperatorReply | m.Refused)
        record(answer.entries)
        for entry in answer.entries:
            self._authorization.apply_entry(entry.kind, entry.body)
        is_ban = isinstance(order, m.RemoveWorker) and order.ban
        return self._remove_all(answer.removed, now_s, is_ban), answer.reply

    def record_violation(self, violation: ev.RecordViolation, now_s: float) -> list[ev.Effect]:
        """Record a violation; return the effects, among them the removals that it causes.

        The worker is removed from the generation or, after repeated violations, from the run.  An accusation
        that is not counted does not remove the accused worker.
        """
        outcome = self._authorization.record_violation(
            violation.peer, violation.reason, violation.accuser, now_s
        )
        effects = self._apply_outcome(outcome, now_s)
        removals = {peer for peer, _ in outcome.removed}
        if (outcome.is_counted or violation.accuser is None) and violation.peer not in removals:
            count = f"violation {outcome.violation_count} of {VIOLATIONS_BEFORE_REMOVAL}"
            text = f"broke the protocol ({count}): {violation.reason}"
            remedy = "run an unmodified version of gridtrain on this worker"
            effects += self._remove(violation.peer, "offence", text, remedy, now_s)
        return effects

    def tick(self, now_s: float) -> list[ev.Effect]:
        """Remove accusers whose accusations were not confirmed in time, and members with too many violations.

        Call once a second.
        """
        return self._apply_outcome(self._authorization.tick(now_s), now_s)

    def status(self) -> dict[str, Any]:
        """Return the part of the status for the operator that concerns access."""
        status = self._authorization.status(self._wall())
        status["removed"] = [{"peer": peer.hex()} for peer in self._authorization.removed_members()]
        for row in (*status["enrolled"], *status["removed"]):
            if name := self._membership.worker_name(bytes.fromhex(row["peer"])):
                row["name"] = name  # known even after the worker has left, so that it can be banned by name
        return status

    def violation_count(self, peer: m.PeerId) -> int:
        return self._authorization.violation_count(peer)

    def is_operator(self, peer: m.PeerId) -> bool:
        return self._authorization.is_operator(peer)

    # -- internal ----------------------------------------------------------------------------------

    def _handle_pending(self, peer: m.PeerId, message: m.Message) -> list[ev.Effect]:
        invitation, host = self._pending_members[peer]
        if not isinstance(message, m.Enrol):
            del self._pending_members[peer]
            reason = f"a pending member sent {type(message).__name__}"
            note = ev.LogEvent("warning", "violation", {"peer": "a pending member", "reason": reason})
            return [note, ev.Disconnect(peer)]
        answer = self._authorization.enrol(invitation, message.peer, address_range(host), self._wall())
        name = message.peer.hex()[:12]
        if isinstance(answer.reply, m.Refused):
            note = ev.LogEvent("info", "not_enrolled", {"peer": name, "reason": answer.reply.reason})
        else:
            note = ev.LogEvent("info", "enrolled", {"peer": name})
        return [*answer.entries, note, ev.Send(peer, answer.reply)]

    def _apply_outcome(self, outcome: ViolationOutcome, now_s: float) -> list[ev.Effect]:
        reason = "its accuser made false accusations"
        notes = [
            ev.LogEvent("info", "readmitted", {"peer": peer.hex()[:12], "reason": reason})
            for peer in outcome.restored
        ]
        return [*outcome.entries, *notes, *self._remove_all(outcome.removed, now_s)]

    def _remove_all(
        self, removed: Iterable[tuple[m.PeerId, str]], now_s: float, ban: bool = False
    ) -> list[ev.Effect]:
        effects: list[ev.Effect] = []
        for peer, reason in removed:
            remedy = authorization_limits.banned_remedy(peer) if ban else authorization_limits.REMOVED_REMEDY
            effects += self._remove(peer, "kicked", f"was removed from the run: {reason}", remedy, now_s)
        return effects

    def _remove(self, peer: m.PeerId, code: str, reason: str, remedy: str, now_s: float) -> list[ev.Effect]:
        return self._membership.handle(ev.WorkerRemoved(peer, code, reason, remedy), now_s)


def connection_gate(
    authorization: Authorization, wall: Callable[[], float]
) -> Callable[[m.PeerId], ConnectionRole]:
    """Return a function that maps a key to its role.

    The transport calls it at each handshake and for each message.
    """
    return lambda key: ConnectionRole(authorization.access_role(key, wall()).value)
