"""The coordinator's door: whose key may come in, as what, and who has to go.

Decides by keys alone: a name proves nothing.  Never touches a socket, a clock or a disk: `wall_s` is the
wall clock, as invitations outlive a restart; `now_s` is any clock; what must be durable is returned as
`Journal` entries, to be written before anything that follows is sent.  `recover` reads them back.

    stranger --the run's owner invites--> guest --Enrol--> member --kick, third strike--> stranger
                  (a token, with uses and an end)             |                     (needs a new invitation)
                                                              +--ban--> banned --unban--> stranger

A member's key stays a member's over restarts of both sides.  What is kept of an invitation is a digest of
its public key, so that whoever reads the journal cannot come in with what stands there, nor recognise an
invitation on its way.  A guest whose invitation is not valid is told that much, whatever the cause; one whose
invitation is valid is told why the key that it names is not let in again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gridtrain.protocol import door_rules as rules
from gridtrain.protocol import messages as m
from gridtrain.protocol.membership_io import Journal
from gridtrain.protocol.strikes import Strike, StrikeBook, is_struck_out

MAX_LISTED = 1000
"""Of each kind in `picture`."""


class Standing(StrEnum):
    """The same words as `transport.base.Standing`, which a core must not import: `Standing(answer)`."""

    STRANGER = "stranger"
    GUEST = "guest"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Answer:
    """What to write down, then to whom else to say goodbye and why, then what to reply."""

    reply: m.Enrolled | m.Done | m.Refused
    entries: tuple[Journal, ...] = ()
    kicked: tuple[tuple[m.PeerId, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from a strike.

    Attributes:
        kicked: members that are none any more, and why; to be dismissed.
        restored: members that had been kicked by the word of a liar, and are members again.
        believed: the strike counts; False: its accuser is suspected, or has said enough.
        strikes: how many of the accused's count now.
    """

    entries: tuple[Journal, ...] = ()
    kicked: tuple[tuple[m.PeerId, str], ...] = ()
    restored: tuple[m.PeerId, ...] = ()
    believed: bool = False
    strikes: int = 0


@dataclass(slots=True)
class _Invitation:
    serial: int
    uses: int
    until_s: float
    used: int = 0


@dataclass(frozen=True, slots=True)
class _Kick:
    serial: int  # of the latest invitation at that time: only a later one lets the key in again
    by_strikes: bool
    reason: str


# -- the door ----------------------------------------------------------------------------------------


class Door:
    """See the module's text.

    Args:
        run: the run's name, for replies.
        operator: the key that may give orders; None: nobody may.
        coordinator: our own key, which nobody else can have.
        open_to_all: every key is a peer unless it was kicked or banned; for groups within one process.
    """

    def __init__(
        self,
        open_to_all: bool = False,
        *,
        run: str = "default",
        operator: m.PeerId | None = None,
        coordinator: m.PeerId | None = None,
    ) -> None:
        self._run = run
        self._open_to_all = open_to_all
        self._operator = operator
        self._ours = {operator, coordinator}
        self._invitations: dict[str, _Invitation] = {}
        self._serial = 0
        self._members: dict[m.PeerId, str] = {}  # and the id of the invitation that they came with
        self._banned: dict[m.PeerId, str] = {}  # and why
        self._banned_names: dict[m.PeerId, str] = {}  # by which people knew them, where they did
        self._kicked: dict[m.PeerId, _Kick] = {}
        self._book = StrikeBook()
        self._enrols: list[tuple[float, str]] = []  # when, and from which range
        self._joins: dict[m.PeerId, deque[float]] = {}

    def standing(self, key: m.PeerId, wall_s: float) -> Standing:
        """What `key` may do now: asked at each handshake and for each message."""
        if self.is_operator(key) or self._is_member(key):
            return Standing.PEER
        invitation = self._invitations.get(rules.stored_form(key))
        if invitation is not None and _is_valid(invitation, wall_s):
            return Standing.GUEST
        return Standing.STRANGER

    def is_operator(self, key: m.PeerId) -> bool:
        return rules.may_order(key, self._operator)

    # -- guests and members --------------------------------------------------------------------

    def enrol(self, invitation_key: m.PeerId, peer: m.PeerId, host: str, wall_s: float) -> Answer:
        """`Enrol`: let `peer` in, if the invitation by whose key the guest is connected is valid.

        `host` is where the connection comes from.  A key that is a member's already costs no use.
        """
        name = rules.stored_form(invitation_key)
        invitation = self._invitations.get(name)
        kick = self._kicked.get(peer)
        if invitation is None or not _is_valid(invitation, wall_s):
            return Answer(rules.NOT_VALID)
        if rules.is_banned(peer, self._banned):
            return Answer(rules.banned(peer, self._banned[peer]))
        if peer in self._members:
            return Answer(m.Enrolled(self._run))
        if kick is not None and rules.is_too_old(invitation.serial, kick.serial):
            return Answer(rules.kicked(kick.reason))
        if peer in self._ours or peer == invitation_key or rules.stored_form(peer) in self._invitations:
            return Answer(rules.NOT_YOURS)
        if self._is_crowded(rules.address_range(host), wall_s) or len(self._members) >= rules.MAX_MEMBERS:
            return Answer(rules.TOO_MANY)
        self._enrols.append((wall_s, rules.address_range(host)))
        return Answer(m.Enrolled(self._run), (self._do("enrolled", peer=peer.hex(), invitation=name),))

    def allow_join(self, peer: m.PeerId, now_s: float) -> bool:
        """Counts this attempt.  False: answer `door_rules.TOO_OFTEN`."""
        joins = self._joins.pop(peer, None) or deque(maxlen=rules.JOINS)
        while joins and joins[0] <= now_s - rules.JOINS_IN_S:
            joins.popleft()
        allowed = not rules.joins_too_often(len(joins))
        if allowed:
            joins.append(now_s)
        self._joins[peer] = joins  # at the end: the first ones have been quiet for longest
        if len(self._joins) > rules.MAX_JOINERS:
            del self._joins[next(iter(self._joins))]
        return allowed

    def _is_member(self, key: m.PeerId) -> bool:
        if rules.is_banned(key, self._banned):
            return False
        return key in self._members or (
            self._open_to_all and key not in self._kicked and key not in self._ours
        )

    def _is_crowded(self, where: str, wall_s: float) -> bool:
        """Times to come are those before the wall clock was set back."""
        self._enrols = [line for line in self._enrols if 0 <= wall_s - line[0] < rules.ENROLS_IN_S]
        return (
            rules.is_crowded(sum(line[1] == where for line in self._enrols))
            or len(self._enrols) >= rules.MAX_ENROLS
        )

    # -- the run's owner -----------------------------------------------------------------------

    def order(
        self, sender: m.PeerId, message: m.Invite | m.Expel | m.Pardon, wall_s: float, name: str = ""
    ) -> Answer:
        """An order, from whomever it comes; `name`: of the worker that is expelled, if it is known."""
        if not self.is_operator(sender):
            return Answer(rules.NOT_OPERATOR)
        match message:
            case m.Invite(key, uses, expires_s):
                return self.invite(key, uses, expires_s, wall_s)
            case m.Expel(peer, ban, reason):
                return self.expel(peer, ban, reason, name)
            case m.Pardon(peer):
                return self.pardon(peer)

    def invite(self, key: m.PeerId, uses: int, expires_s: float, wall_s: float) -> Answer:
        """Make `key` an invitation's; `expires_s` 0: withdraw it, whoever holds it."""
        name = rules.stored_form(key)
        if expires_s <= 0:
            if name not in self._invitations:
                return _refused(
                    "unknown", "there is no such invitation", "it has ended, or is of another run"
                )
            entry = self._do("invitation", key=name, uses=uses, until_s=wall_s, at_s=wall_s)
            return Answer(m.Done("the invitation is withdrawn; who came in with it stays"), (entry,))
        if uses > rules.MAX_USES or expires_s > rules.MAX_EXPIRES_S:
            return _refused(
                "bounds",
                f"an invitation of {uses} uses and {expires_s / 86_400:.4g} days is over the bounds "
                f"of {rules.MAX_USES} uses and {rules.MAX_EXPIRES_S / 86_400:.0f} days",
                "make it smaller; another one can follow",
            )
        if name in self._invitations or key in self._members or key in self._ours:
            return _refused("known", "this key is in use", "let `gridtrain invite` make a new one")
        if sum(_is_valid(known, wall_s) for known in self._invitations.values()) >= rules.MAX_INVITATIONS:
            return _refused(
                "too-many",
                f"{rules.MAX_INVITATIONS} invitations are open",
                "make one with more uses (--uses), or wait until some have ended",
            )
        entry = self._do("invitation", key=name, uses=uses, until_s=wall_s + expires_s, at_s=wall_s)
        times = "once" if uses == 1 else f"{uses} times"
        return Answer(m.Done(f"the invitation {name[:8]} can be used {times}"), (entry,))

    def expel(self, peer: m.PeerId, ban: bool, reason: str, name: str = "") -> Answer:
        """Kick a member, or ban a key, member or not."""
        reason = rules.tidy(reason) or "the run's owner decided so"
        if peer in self._ours:
            return _refused("ours", "this is the coordinator's or your own key", "name a worker")
        if rules.is_banned(peer, self._banned):
            return Answer(m.Done(f"{_short(peer)} is banned already: {self._banned[peer]}"))
        if not ban and not self._is_member(peer):
            return _refused(
                "unknown", f"{_short(peer)} is no member", "`gridtrain members` lists them; ban takes any key"
            )
        if ban and len(self._banned) >= rules.MAX_BANNED:
            return _refused("too-many", f"{rules.MAX_BANNED} keys are banned", "unban some")
        cause = "liar" if self._book.suspected(peer) else "order"
        entries, _ = self._expelled(peer, ban, reason, cause, rules.tidy(name) if ban else "")
        done = "is banned until you unban it" if ban else "is out; it needs a new invitation to come back"
        return Answer(m.Done(f"{_short(peer)} {done}"), tuple(entries), ((peer, reason),))

    def pardon(self, peer: m.PeerId) -> Answer:
        """Lift a ban; where everybody may come in, also undo a kick."""
        if peer not in self._banned and not (self._open_to_all and peer in self._kicked):
            return _refused(
                "unknown", f"{_short(peer)} is not banned", "`gridtrain members` lists the banned"
            )
        entry = self._do("pardoned", peer=peer.hex())
        then = "it can come back" if self._open_to_all else "with a new invitation it can come back"
        return Answer(m.Done(f"{_short(peer)} is not banned any more; {then}"), (entry,))

    # -- strikes -------------------------------------------------------------------------------

    def strike(self, peer: m.PeerId, reason: str, accuser: m.PeerId | None, now_s: float) -> Judgement:
        """`peer` broke the protocol, says `accuser`; None: we have seen it ourselves."""
        strike = Strike(accuser, rules.tidy(reason))
        if not self._is_member(peer) or not self._book.add(peer, strike):
            return Judgement(strikes=self._book.count(peer))
        said_by = accuser.hex() if accuser is not None else ""
        entry = Journal("strike", {"peer": peer.hex(), "accuser": said_by, "reason": strike.reason})
        return self._judge([entry], now_s, peer, accuser)

    def tick(self, now_s: float) -> Judgement:
        """To be called once a second: accusers that nobody has confirmed in time have to go."""
        return self._judge([], now_s, None, None)

    def _judge(
        self, entries: list[Journal], now_s: float, peer: m.PeerId | None, accuser: m.PeerId | None
    ) -> Judgement:
        kicked: list[tuple[m.PeerId, str]] = []
        restored: list[m.PeerId] = []
        for liar in self._book.judge(now_s):
            told = len(self._book.accused_by(liar))
            reason = f"accused {told} members, and nobody else had seen anything of the kind"
            kicked += [(liar, reason)] if self._is_member(liar) else []
            written, again = self._expelled(liar, False, reason, "liar")
            entries += written
            restored += again
        for accused in self._book.struck_out():
            if self._is_member(accused):
                strikes = self._book.of(accused)
                reason = f"{len(strikes)} strikes, the last one: {strikes[-1].reason}"
                kicked.append((accused, reason))
                entries += self._expelled(accused, False, reason, "strikes")[0]
        return Judgement(
            tuple(entries),
            tuple(kicked),
            tuple(restored),
            believed=peer is not None and not self._book.suspected(accuser),
            strikes=self._book.count(peer) if peer is not None else 0,
        )

    def _expelled(
        self, peer: m.PeerId, ban: bool, reason: str, cause: str, name: str = ""
    ) -> tuple[list[Journal], list[m.PeerId]]:
        """What to write down, and who is a member again because it was kicked by the word of this liar."""
        victims = self._book.accused_by(peer) if cause == "liar" else []
        named = {"name": name} if name else {}
        entries = [self._do("expelled", peer=peer.hex(), ban=ban, reason=reason, cause=cause, **named)]
        innocent = [victim for victim in victims if self._kicked_in_error(victim)]
        entries += [self._do("enrolled", peer=victim.hex(), invitation="") for victim in innocent]
        return entries, innocent

    def _kicked_in_error(self, victim: m.PeerId) -> bool:
        kick = self._kicked.get(victim)
        return kick is not None and kick.by_strikes and not is_struck_out(len(self._book.of(victim)))

    # -- what is written down, and read back ---------------------------------------------------

    def _do(self, kind: str, **body: Any) -> Journal:
        self.apply(kind, body)
        return Journal(kind, body)

    def apply(self, kind: str, body: Mapping[str, Any]) -> None:
        """Do what a journal's entry says; other kinds are other people's.

        Raises `KeyError`, `TypeError` or `ValueError` for an entry that no door wrote.
        """
        match kind:
            case "invitation":
                self._apply_invitation(body)
            case "enrolled":
                self._apply_enrolled(rules.key_of(body["peer"]), rules.text_of(body["invitation"]))
            case "expelled":
                peer, name = rules.key_of(body["peer"]), rules.text_of(body.get("name", ""))
                self._apply_expelled(peer, body["ban"], rules.text_of(body["reason"]), body["cause"])
                if body["ban"] and name:
                    self._banned_names[peer] = name
            case "pardoned":
                peer = rules.key_of(body["peer"])
                self._banned.pop(peer, None)
                self._banned_names.pop(peer, None)
                self._kicked.pop(peer, None)
                if not self._open_to_all:
                    self._kicked[peer] = _Kick(
                        self._serial, False, "it was banned, and has not come in since that was lifted"
                    )
            case "strike":
                said_by = rules.text_of(body["accuser"])
                strike = Strike(rules.key_of(said_by) if said_by else None, rules.text_of(body["reason"]))
                self._book.add(rules.key_of(body["peer"]), strike)

    def _apply_invitation(self, body: Mapping[str, Any]) -> None:
        name, uses = rules.key_of(body["key"]).hex(), body["uses"]
        until_s, at_s = rules.seconds_of(body["until_s"]), rules.seconds_of(body["at_s"])
        if type(uses) is not int or not 1 <= uses < 2**31:
            raise ValueError(f"{uses!r} uses")
        self._invitations = {
            key: known
            for key, known in self._invitations.items()
            if key != name
            and not rules.has_expired(known.until_s, at_s)
            and not rules.is_used_up(known.used, known.uses)
        }
        self._serial += 1
        if until_s > at_s:
            self._invitations[name] = _Invitation(self._serial, uses, until_s)

    def _apply_enrolled(self, peer: m.PeerId, invitation: str) -> None:
        """An invitation of no name: nobody used one, it is a member again."""
        if invitation:
            self._book.forgive(peer)
        if invitation in self._invitations:
            self._invitations[invitation].used += 1
        self._members[peer] = invitation
        self._kicked.pop(peer, None)

    def _apply_expelled(self, peer: m.PeerId, ban: object, reason: str, cause: object) -> None:
        if type(ban) is not bool or cause not in ("order", "strikes", "liar"):
            raise ValueError(f"expelled with ban {ban!r} and cause {cause!r}")
        self._members.pop(peer, None)
        self._kicked.pop(peer, None)
        self._kicked[peer] = _Kick(self._serial, cause == "strikes", reason)
        if len(self._kicked) > rules.MAX_KICKED:
            del self._kicked[next(iter(self._kicked))]
        if ban:
            self._banned[peer] = reason
        if cause == "liar":
            self._book.withdraw(peer)

    # -- what is seen from outside -------------------------------------------------------------

    def picture(self, wall_s: float) -> dict[str, Any]:
        """For `gridtrain members`; JSON-able, bounded, and of no use to come in with."""
        valid = [(name, one) for name, one in self._invitations.items() if _is_valid(one, wall_s)]
        members, banned = list(self._members)[-MAX_LISTED:], list(self._banned.items())[-MAX_LISTED:]
        return {
            "open_to_all": self._open_to_all,
            "invitations": [
                {"id": name[:8], "uses": one.uses, "used": one.used, "left_s": round(one.until_s - wall_s, 1)}
                for name, one in valid[-MAX_LISTED:]
            ],
            "enrolled_total": len(self._members),
            "enrolled": [
                {"peer": peer.hex(), "invitation": self._members[peer][:8], "strikes": self._book.count(peer)}
                for peer in members
            ],
            "banned": [self._banned_line(peer, reason) for peer, reason in banned],
            "strikes": [self._strikes_line(peer) for peer in self._book.accused()[-MAX_LISTED:]],
        }

    def strikes(self, peer: m.PeerId) -> int:
        """How many count against it now."""
        return self._book.count(peer)

    def _banned_line(self, peer: m.PeerId, reason: str) -> dict[str, Any]:
        name = self._banned_names.get(peer, "")
        return {"peer": peer.hex(), **({"name": name} if name else {}), "reason": reason}

    def _strikes_line(self, peer: m.PeerId) -> dict[str, Any]:
        strikes = self._book.of(peer)[-10:]
        said = [
            {"by": _short(one.accuser) if one.accuser is not None else "coordinator", "reason": one.reason}
            for one in strikes
        ]
        return {"peer": peer.hex(), "strikes": self._book.count(peer), "said": said}


def recover(
    entries: Iterable[tuple[str, Mapping[str, Any]]],
    open_to_all: bool = False,
    *,
    run: str = "default",
    operator: m.PeerId | None = None,
    coordinator: m.PeerId | None = None,
) -> Door:
    """The door as the journal left it; the counts of joins and enrolments of the last minutes begin anew.

    Raises `KeyError`, `TypeError` or `ValueError` for entries that no coordinator wrote.
    """
    door = Door(open_to_all, run=run, operator=operator, coordinator=coordinator)
    for kind, body in entries:
        door.apply(kind, body)
    return door


def _is_valid(invitation: _Invitation, wall_s: float) -> bool:
    expired = rules.has_expired(invitation.until_s, wall_s)
    return not expired and not rules.is_used_up(invitation.used, invitation.uses)


def _refused(code: str, reason: str, remedy: str) -> Answer:
    return Answer(m.Refused(code, reason, remedy))


def _short(key: m.PeerId) -> str:
    return key.hex()[:12]
