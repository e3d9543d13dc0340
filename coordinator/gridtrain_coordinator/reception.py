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

from gridtrain.protocol import door_rules
from gridtrain.protocol import membership_io as io
from gridtrain.protocol import messages as m
from gridtrain.protocol.door import Answer, Door, Judgement
from gridtrain.protocol.door import Standing as DoorStanding
from gridtrain.protocol.strikes import STRIKES
from gridtrain.transport.base import PeerUp, Standing

ASK_OWNER = "ask the run's owner for a new invitation; the one before does not let this worker in again"
ASK_PARDON = "ask the run's owner to lift the ban (gridtrain unban {digits}), and then for a new invitation"


class Core(Protocol):
    def handle(self, event: io.Event, now_s: float) -> list[io.Effect]: ...

    def name_of(self, peer: m.PeerId) -> str: ...


class Reception:
    """See the module's text.

    Args:
        door: who may come in.
        core: the membership; told who has to go.
        operator: the key that may give orders.
        wall: seconds of the wall clock, as invitations outlive a restart.
    """

    def __init__(self, door: Door, core: Core, operator: m.PeerId | None, wall: Callable[[], float]) -> None:
        self._door = door
        self._operator = operator
        self._core = core
        self._wall = wall
        self._guests: dict[m.PeerId, tuple[m.PeerId, str]] = {}  # name -> invitation's key, host

    def came(self, up: PeerUp) -> bool:
        """True: it is a guest, which is none of the membership's business."""
        if up.guest_of is not None:
            self._guests[up.peer] = (up.guest_of, up.host)
        return up.guest_of is not None

    def went(self, peer: m.PeerId) -> bool:
        """True: it was a guest."""
        return self._guests.pop(peer, None) is not None

    def may_speak(self, peer: m.PeerId) -> bool:
        """Asked for each message in its turn: what came before it may have changed the answer."""
        return peer in self._guests or self._door.standing(peer, self._wall()) is DoorStanding.PEER

    def is_guest(self, peer: m.PeerId) -> bool:
        return peer in self._guests

    def hear(self, peer: m.PeerId, message: m.Message, now_s: float) -> list[io.Effect] | None:
        """None: the message is for the membership."""
        if peer in self._guests:
            return self._hear_guest(peer, message)
        match message:
            case m.Invite() | m.Expel() | m.Pardon():
                return self._obeyed(peer, message, now_s)
            case m.Join() if not self._door.allow_join(peer, now_s):
                return [io.Send(peer, door_rules.TOO_OFTEN), io.Dismiss(peer)]
            case _ if self.is_operator(peer):
                text = f"the operator's key is no worker's; it sent {type(message).__name__}"
                return [io.Send(peer, m.Refused("operator", text, "join with an invitation"))]
        return None

    def obey(self, order: m.Expel | m.Pardon, now_s: float) -> tuple[list[io.Effect], m.Done | m.Refused]:
        """An order of the operator that came another way than over the wire; what to do, and the answer."""
        answer = self._ordered(self._operator or b"", order)
        assert isinstance(answer.reply, m.Done | m.Refused)
        return [*answer.entries, *self._out(answer.kicked, now_s, _is_ban(order))], answer.reply

    def strike(self, strike: io.Strike, now_s: float) -> list[io.Effect]:
        """Somebody broke the protocol: it is out of the generation, and at the last strike out of the run."""
        judgement = self._door.strike(strike.peer, strike.reason, strike.accuser, now_s)
        effects = self._judged(judgement, now_s)
        out = {peer for peer, _ in judgement.kicked}
        if (judgement.believed or strike.accuser is None) and strike.peer not in out:
            text = f"broke the protocol (strike {judgement.strikes} of {STRIKES}): {strike.reason}"
            effects += self._expel(
                strike.peer, "offence", text, "see that it runs an unchanged gridtrain", now_s
            )
        return effects

    def tick(self, now_s: float) -> list[io.Effect]:
        """To be called once a second."""
        return self._judged(self._door.tick(now_s), now_s)

    def picture(self) -> dict[str, Any]:
        """For the operator's eyes."""
        return self._door.picture(self._wall())

    def strikes(self, peer: m.PeerId) -> int:
        return self._door.strikes(peer)

    def is_operator(self, peer: m.PeerId) -> bool:
        return door_rules.may_order(peer, self._operator)

    # -- inside ------------------------------------------------------------------------------------

    def _hear_guest(self, peer: m.PeerId, message: m.Message) -> list[io.Effect]:
        invitation, host = self._guests[peer]
        if not isinstance(message, m.Enrol):
            del self._guests[peer]
            reason = f"a guest sent {type(message).__name__}"
            return [io.Note("warning", "violation", {"peer": "a guest", "reason": reason}), io.Dismiss(peer)]
        answer = self._door.enrol(invitation, message.peer, host, self._wall())
        let_in = isinstance(answer.reply, m.Enrolled)
        note = io.Note("info", "enrolled" if let_in else "not_enrolled", {"peer": message.peer.hex()[:12]})
        return [*answer.entries, note, io.Send(peer, answer.reply)]

    def _ordered(self, sender: m.PeerId, order: m.Invite | m.Expel | m.Pardon) -> Answer:
        """A ban is lifted by the name that it was given by: who is banned has none on any roll."""
        name = self._core.name_of(order.peer) if isinstance(order, m.Expel) else ""
        return self._door.order(sender, order, self._wall(), name)

    def _obeyed(self, peer: m.PeerId, order: m.Invite | m.Expel | m.Pardon, now_s: float) -> list[io.Effect]:
        answer = self._ordered(peer, order)
        out = self._out(answer.kicked, now_s, _is_ban(order))
        return [*answer.entries, *out, io.Send(peer, answer.reply)]

    def _judged(self, judgement: Judgement, now_s: float) -> list[io.Effect]:
        notes = [
            io.Note("info", "restored", {"peer": peer.hex()[:12], "reason": "who accused it was a liar"})
            for peer in judgement.restored
        ]
        return [*judgement.entries, *notes, *self._out(judgement.kicked, now_s)]

    def _out(
        self, kicked: Iterable[tuple[m.PeerId, str]], now_s: float, ban: bool = False
    ) -> list[io.Effect]:
        effects: list[io.Effect] = []
        for peer, reason in kicked:
            remedy = ASK_PARDON.format(digits=peer.hex()[:12]) if ban else ASK_OWNER
            effects += self._expel(peer, "kicked", f"was put out of the run: {reason}", remedy, now_s)
        return effects

    def _expel(self, peer: m.PeerId, code: str, reason: str, remedy: str, now_s: float) -> list[io.Effect]:
        return self._core.handle(io.Expelled(peer, code, reason, remedy), now_s)


def _is_ban(order: m.Message) -> bool:
    return isinstance(order, m.Expel) and order.ban


def gate_of(door: Door, wall: Callable[[], float]) -> Callable[[m.PeerId], Standing]:
    """The transport's gate: asked at each handshake and for each message."""
    return lambda key: Standing(door.standing(key, wall()).value)
