"""Where the door meets the loop: who may connect, who asks to be let in, who gives orders, who has to go.

Decides nothing by itself: `protocol.door` does.  Turns its answers into effects, in an order in which
what must be durable is written before anybody is told.

    guest     Enrol ---------------> Door.enrol --> Journal, Send(Enrolled | Refused), Dismiss
    operator  Invite Expel Pardon -> Door.order --> Journal, Send(Done | Refused), who has to go
    Strike, once a second ---------> Door.strike, .tick --> Journal, who has to go
                                                                 +--> Membership.handle(Expelled)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from gridtrain.core import messages as m
from gridtrain.network.transport.interface import ConnectionRole, PeerUp
from gridtrain_coordinator.access import authorization_rules
from gridtrain_coordinator.access.authorization import AccessReply, Authorization, ViolationOutcome
from gridtrain_coordinator.access.authorization import AccessRole as DoorStanding
from gridtrain_coordinator.access.violations import VIOLATIONS_BEFORE_REMOVAL
from gridtrain_coordinator.run import events as io

ASK_OWNER = "ask the run's owner for a new invitation; the one before does not let this worker in again"
ASK_PARDON = "ask the run's owner to lift the ban (gridtrain unban {digits}), and then for a new invitation"


class MembershipPort(Protocol):
    def handle(self, event: io.Event, now_s: float) -> list[io.Effect]: ...

    def worker_name(self, peer: m.PeerId) -> str: ...


class AccessHandler:
    """See the module's text.

    Args:
        door: who may come in.
        core: the membership; told who has to go.
        operator: the key that may give orders.
        wall: seconds of the wall clock, as invitations outlive a restart.
    """

    def __init__(
        self, door: Authorization, core: MembershipPort, operator: m.PeerId | None, wall: Callable[[], float]
    ) -> None:
        self._authorization = door
        self._operator = operator
        self._membership = core
        self._wall = wall
        self._pending_members: dict[m.PeerId, tuple[m.PeerId, str]] = {}  # name -> invitation's key, host

    def on_connected(self, up: PeerUp) -> bool:
        """True: it is a guest, which is none of the membership's business."""
        if up.pending_key is not None:
            self._pending_members[up.peer] = (up.pending_key, up.host)
        return up.pending_key is not None

    def on_disconnected(self, peer: m.PeerId) -> bool:
        """True: it was a guest."""
        return self._pending_members.pop(peer, None) is not None

    def may_send(self, peer: m.PeerId) -> bool:
        """Asked for each message in its turn: what came before it may have changed the answer."""
        return (
            peer in self._pending_members
            or self._authorization.access_role(peer, self._wall()) is DoorStanding.PEER
        )

    def is_pending(self, peer: m.PeerId) -> bool:
        return peer in self._pending_members

    def handle(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[io.Effect] | None:
        """None: the message is for the membership."""
        if peer in self._pending_members:
            return self._handle_pending(peer, message)
        match message:
            case m.Invite() | m.RemoveWorker() | m.Unban():
                return self._handle_order(peer, message, now_s)
            case m.Join() if not self._authorization.allow_join(peer, now_s):
                return [io.Send(peer, authorization_rules.TOO_MANY_JOINS), io.Disconnect(peer)]
            case _ if self.is_operator(peer):
                text = f"the operator's key is no worker's; it sent {type(message).__name__}"
                return [io.Send(peer, m.Refused("operator", text, "join with an invitation"))]
        return None

    def execute_order(
        self, order: m.RemoveWorker | m.Unban, now_s: float
    ) -> tuple[list[io.Effect], m.OperatorReply | m.Refused]:
        """An order of the operator that came another way than over the wire; what to do, and the answer."""
        answer = self._authorize_order(self._operator or b"", order)
        assert isinstance(answer.reply, m.OperatorReply | m.Refused)
        return [*answer.entries, *self._remove_all(answer.removed, now_s, _is_ban(order))], answer.reply

    def record_violation(self, strike: io.RecordViolation, now_s: float) -> list[io.Effect]:
        """Somebody broke the protocol: it is out of the generation, and at the last strike out of the run."""
        judgement = self._authorization.record_violation(strike.peer, strike.reason, strike.accuser, now_s)
        effects = self._apply_outcome(judgement, now_s)
        out = {peer for peer, _ in judgement.removed}
        if (judgement.is_counted or strike.accuser is None) and strike.peer not in out:
            count = f"violation {judgement.violation_count} of {VIOLATIONS_BEFORE_REMOVAL}"
            text = f"broke the protocol ({count}): {strike.reason}"
            effects += self._remove(
                strike.peer, "offence", text, "see that it runs an unchanged gridtrain", now_s
            )
        return effects

    def tick(self, now_s: float) -> list[io.Effect]:
        """To be called once a second."""
        return self._apply_outcome(self._authorization.tick(now_s), now_s)

    def status(self) -> dict[str, Any]:
        """For the operator's eyes."""
        return self._authorization.status(self._wall())

    def violation_count(self, peer: m.PeerId) -> int:
        return self._authorization.violation_count(peer)

    def is_operator(self, peer: m.PeerId) -> bool:
        return authorization_rules.is_operator(peer, self._operator)

    # -- inside ------------------------------------------------------------------------------------

    def _handle_pending(self, peer: m.PeerId, message: m.Message) -> list[io.Effect]:
        invitation, host = self._pending_members[peer]
        if not isinstance(message, m.Enrol):
            del self._pending_members[peer]
            reason = f"a guest sent {type(message).__name__}"
            return [
                io.LogEvent("warning", "violation", {"peer": "a guest", "reason": reason}),
                io.Disconnect(peer),
            ]
        answer = self._authorization.enrol(invitation, message.peer, host, self._wall())
        let_in = isinstance(answer.reply, m.Enrolled)
        note = io.LogEvent(
            "info", "enrolled" if let_in else "not_enrolled", {"peer": message.peer.hex()[:12]}
        )
        return [*answer.entries, note, io.Send(peer, answer.reply)]

    def _authorize_order(self, sender: m.PeerId, order: m.Invite | m.RemoveWorker | m.Unban) -> AccessReply:
        """A ban is lifted by the name that it was given by: who is banned has none on any roll."""
        name = self._membership.worker_name(order.peer) if isinstance(order, m.RemoveWorker) else ""
        return self._authorization.handle_order(sender, order, self._wall(), name)

    def _handle_order(
        self, peer: m.PeerId, order: m.Invite | m.RemoveWorker | m.Unban, now_s: float
    ) -> list[io.Effect]:
        answer = self._authorize_order(peer, order)
        out = self._remove_all(answer.removed, now_s, _is_ban(order))
        return [*answer.entries, *out, io.Send(peer, answer.reply)]

    def _apply_outcome(self, judgement: ViolationOutcome, now_s: float) -> list[io.Effect]:
        notes = [
            io.LogEvent("info", "restored", {"peer": peer.hex()[:12], "reason": "who accused it was a liar"})
            for peer in judgement.restored
        ]
        return [*judgement.entries, *notes, *self._remove_all(judgement.removed, now_s)]

    def _remove_all(
        self, kicked: Iterable[tuple[m.PeerId, str]], now_s: float, ban: bool = False
    ) -> list[io.Effect]:
        effects: list[io.Effect] = []
        for peer, reason in kicked:
            remedy = ASK_PARDON.format(digits=peer.hex()[:12]) if ban else ASK_OWNER
            effects += self._remove(peer, "kicked", f"was put out of the run: {reason}", remedy, now_s)
        return effects

    def _remove(self, peer: m.PeerId, code: str, reason: str, remedy: str, now_s: float) -> list[io.Effect]:
        return self._membership.handle(io.WorkerRemoved(peer, code, reason, remedy), now_s)


def _is_ban(order: m.Message) -> bool:
    return isinstance(order, m.RemoveWorker) and order.ban


def connection_gate(door: Authorization, wall: Callable[[], float]) -> Callable[[m.PeerId], ConnectionRole]:
    """The transport's gate: asked at each handshake and for each message."""
    return lambda key: ConnectionRole(door.access_role(key, wall()).value)
