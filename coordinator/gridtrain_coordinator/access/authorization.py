"""Decides which keys may connect and in which role, from invitations, enrolments, kicks, bans and removals.

    stranger --the operator invites--> pending member --Enrol--> member --kick, violations--> stranger
            (for a number of uses and a limited time)               |             (needs a new invitation)
                                                                    +--ban--> banned --unban--> stranger

A stranger's key has no access.  A pending member has connected with the key of an invitation, and has not
enrolled its own key yet.  Access depends on keys alone: a name proves nothing.  A member's key keeps its
access when the worker or the coordinator restarts.  Only the digest of an invitation's public key is stored,
so that nobody who reads the journal can use or recognize an invitation.  A peer that connects with the key of
an ended invitation learns only how the invitation ended; a peer with an unknown invitation is a stranger and
receives no reply.

`wall_s` is wall-clock time, because invitations remain valid when the coordinator restarts; `now_s` may come
from any clock.  Durable changes are returned as journal entries, which the caller writes before sending any
reply; the next start passes these entries to `Authorization`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from gridtrain.core import messages as m
from gridtrain.core.group.invitation import invitation_digest
from gridtrain.quantities import format_count
from gridtrain_coordinator.access import authorization_limits as limits
from gridtrain_coordinator.access.accusations import ViolationLog, ViolationRecord, exceeds_limit
from gridtrain_coordinator.access.request_rate import RequestRate
from gridtrain_coordinator.run.events import JournalEntry
from gridtrain_coordinator.run.recent_dict import RecentDict

MAX_LISTED = 1000
"""The maximum number of rows of each kind from `status`, and of keys from `removed_members`."""


class AccessRole(StrEnum):
    """The role of a key: none (STRANGER), an invitation's (GUEST), or a member's or the operator's (PEER).

    The values equal those of `ConnectionRole`, which is not imported, to keep this package free of I/O.
    """

    STRANGER = "stranger"
    GUEST = "guest"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class AccessReply:
    """A reply, the journal entries to write before it is sent, and the members to remove, with reasons."""

    reply: m.Enrolled | m.OperatorReply | m.Refused
    entries: tuple[JournalEntry, ...] = ()
    removed: tuple[tuple[m.PeerId, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ViolationOutcome:
    """The consequences of a violation.

    Attributes:
        entries: journal entries to write.
        removed: members to remove, with reasons.
        restored: members that were removed because of a false accusation, and are members again.
        is_counted: whether the violation is counted; False if it was not recorded, or if its accuser is
            suspected of false accusations.
        violation_count: the number of the accused member's violations that are currently counted.
    """

    entries: tuple[JournalEntry, ...] = ()
    removed: tuple[tuple[m.PeerId, str], ...] = ()
    restored: tuple[m.PeerId, ...] = ()
    is_counted: bool = False
    violation_count: int = 0


@dataclass(slots=True)
class _Invitation:
    serial: int
    uses: int
    until_s: float
    used: int = 0
    is_withdrawn: bool = False

    def refusal(self, wall_s: float) -> m.Refused | None:
        """Return the refusal if this invitation has ended; None if it is valid."""
        if self.is_withdrawn:
            return limits.WITHDRAWN_INVITATION
        if limits.is_used_up(self.used, self.uses):
            return limits.USED_UP_INVITATION
        if limits.has_expired(self.until_s, wall_s):
            return limits.EXPIRED_INVITATION
        return None


@dataclass(frozen=True, slots=True)
class _Removal:
    serial: int  # of the latest invitation before the removal; only later invitations admit the key again
    is_for_violations: bool
    reason: str


class _Ban(NamedTuple):
    reason: str
    name: str  # the worker's name; "" if it is not known


# -- access control ----------------------------------------------------------------------------------


class Authorization:
    """Decides which keys may connect, and in which role.

    Args:
        run: the run's name, which is included in replies.
        operator: the key that authorizes commands; None if there is none.
        coordinator: the coordinator's own key, which no worker may use.
        open_to_all: whether every key that has not been removed or banned has the role PEER; for groups
            within one process.
        entries: the journal's entries, from which the earlier state is recovered.  The counts of recent joins
            and enrolments restart at zero.

    Raises `KeyError`, `TypeError` or `ValueError` if an entry is invalid.
    """

    def __init__(
        self,
        open_to_all: bool = False,
        *,
        run: str = "default",
        operator: m.PeerId | None = None,
        coordinator: m.PeerId | None = None,
        entries: Iterable[tuple[str, Mapping[str, Any]]] = (),
    ) -> None:
        self._run = run
        self._open_to_all = open_to_all
        self.operator = operator
        self._reserved_keys = {operator, coordinator}
        self._invitations: dict[str, _Invitation] = {}
        self._serial = 0
        self._members: dict[m.PeerId, str] = {}  # with the ids of the invitations that they used
        self._banned: dict[m.PeerId, _Ban] = {}
        self._removed: RecentDict[m.PeerId, _Removal] = RecentDict(limits.MAX_REMOVED)
        self._violations = ViolationLog()
        self._recent_enrolments: list[tuple[float, str]] = []  # (time, address range)
        self._joins = RequestRate(limits.JOIN_WINDOW_S, limits.MAX_JOINERS)
        for kind, body in entries:
            self.apply_entry(kind, body)

    def access_role(self, key: m.PeerId, wall_s: float) -> AccessRole:
        """Return the current role of `key`; called at each handshake and for each message.

        The key of an ended invitation also has the role GUEST, so that its holder can be told how the
        invitation ended.
        """
        if self.is_operator(key) or self._is_member(key):
            return AccessRole.PEER
        invitation = self._invitations.get(invitation_digest(key))
        if invitation is not None and not limits.is_forgotten(invitation.until_s, wall_s):
            return AccessRole.GUEST
        return AccessRole.STRANGER

    def invitation_refusal(self, invitation_key: m.PeerId, wall_s: float) -> m.Refused | None:
        """Return the refusal if the invitation is unknown or has ended; None if it is valid."""
        invitation = self._invitations.get(invitation_digest(invitation_key))
        return limits.UNKNOWN_INVITATION if invitation is None else invitation.refusal(wall_s)

    def is_operator(self, key: m.PeerId) -> bool:
        return limits.is_operator(key, self.operator)

    # -- pending and enrolled members --------------------------------------------------------------------

    def enrol(
        self, invitation_key: m.PeerId, peer: m.PeerId, address_range: str, wall_s: float
    ) -> AccessReply:
        """Handle `Enrol`: make `peer` a member through the invitation `invitation_key`, or refuse `peer`.

        Enrolling a key that already belongs to a member does not count as a use of the invitation.

        Args:
            address_range: the range that contains the connection's source address.  The number of keys
                enrolled per range is limited.
        """
        name = invitation_digest(invitation_key)
        invitation = self._invitations.get(name)
        removal = self._removed.get(peer)
        if invitation is None:
            return AccessReply(limits.UNKNOWN_INVITATION)
        if (refusal := invitation.refusal(wall_s)) is not None:
            return AccessReply(refusal)
        if limits.is_banned(peer, self._banned):
            return AccessReply(limits.banned_refusal(peer, self._banned[peer].reason))
        if peer in self._members:
            return AccessReply(m.Enrolled(self._run))
        if removal is not None and limits.predates_removal(invitation.serial, removal.serial):
            return AccessReply(limits.removed_refusal(removal.reason))
        is_invitation = peer == invitation_key or invitation_digest(peer) in self._invitations
        if is_invitation or peer in self._reserved_keys:
            return AccessReply(limits.KEY_IN_USE)
        if len(self._members) >= limits.MAX_MEMBERS:
            return AccessReply(limits.TOO_MANY_MEMBERS)
        if self._exceeds_enrolment_rate(address_range, wall_s):
            return AccessReply(limits.TOO_MANY_ENROLMENTS)
        self._recent_enrolments.append((wall_s, address_range))
        entry = self._apply_and_journal("enrolled", peer=peer.hex(), invitation=name)
        return AccessReply(m.Enrolled(self._run), (entry,))

    def allow_join(self, peer: m.PeerId, now_s: float) -> bool:
        """Return whether the worker may join now; if so, count this join.

        If it may not join, the caller refuses it with `TOO_MANY_JOINS`.
        """
        return self._joins.allow(peer, now_s, limits.MAX_JOINS_PER_WORKER)

    def _is_member(self, key: m.PeerId) -> bool:
        if limits.is_banned(key, self._banned):
            return False
        return key in self._members or (
            self._open_to_all and key not in self._removed and key not in self._reserved_keys
        )

    def _exceeds_enrolment_rate(self, where: str, wall_s: float) -> bool:
        """Return whether too many keys were enrolled recently, from this address range or in total.

        Times in the future, recorded before the wall clock was set back, are ignored.
        """
        self._recent_enrolments = [
            entry for entry in self._recent_enrolments if 0 <= wall_s - entry[0] < limits.ENROL_WINDOW_S
        ]
        return (
            limits.exceeds_enrolment_rate(sum(entry[1] == where for entry in self._recent_enrolments))
            or len(self._recent_enrolments) >= limits.MAX_ENROLS
        )

    # -- commands of the run's owner -----------------------------------------------------------

    def handle_order(
        self, sender: m.PeerId, message: m.Invite | m.RemoveWorker | m.Unban, wall_s: float, name: str = ""
    ) -> AccessReply:
        """Carry out a command if the operator sent it; otherwise refuse it.

        Args:
            name: the name of the worker to remove; "" if it is not known.
        """
        if not self.is_operator(sender):
            return AccessReply(limits.NOT_OPERATOR)
        match message:
            case m.Invite(key, uses, expires_s):
                return self.invite(key, uses, expires_s, wall_s)
            case m.RemoveWorker(peer, ban, reason):
                return self.expel(peer, ban, reason, name)
            case m.Unban(peer):
                return self.pardon(peer)

    def invite(self, key: m.PeerId, uses: int, expires_s: float, wall_s: float) -> AccessReply:
        """Create the invitation with the key `key`, for at most `uses` uses within `expires_s` seconds.

        If `expires_s` is 0 or less, withdraws the invitation that has this key instead.
        """
        name = invitation_digest(key)
        if expires_s <= 0:
            if self.invitation_refusal(key, wall_s) is not None:
                return _refused(
                    "unknown",
                    "this run has no valid invitation with this key",
                    "check that the invitation has not expired and belongs to this run",
                )
            entry = self._apply_and_journal("invitation", key=name, uses=uses, until_s=wall_s, at_s=wall_s)
            return _accepted(
                "the invitation is withdrawn; workers that it has admitted stay, and may return until they "
                "are kicked (gridtrain kick)",
                entry,
            )
        if uses > limits.MAX_USES or expires_s > limits.MAX_EXPIRES_S:
            return _refused(
                "bounds",
                f"the invitation has {format_count(uses, 'use')} and lasts {expires_s / 86_400:.4g} days; "
                f"the limits are {limits.MAX_USES} uses and {limits.MAX_EXPIRES_S / 86_400:.0f} days",
                "stay within these limits, and create further invitations later",
            )
        if name in self._invitations or key in self._members or key in self._reserved_keys:
            return _refused("known", "this key is in use", "run `gridtrain invite`, which creates a new key")
        if len(self._valid_invitations(wall_s)) >= limits.MAX_INVITATIONS:
            return _refused(
                "too-many",
                f"{limits.MAX_INVITATIONS} invitations are open",
                "create one invitation with more uses (--uses), or wait until some have expired",
            )
        until_s = wall_s + expires_s
        entry = self._apply_and_journal("invitation", key=name, uses=uses, until_s=until_s, at_s=wall_s)
        times = "once" if uses == 1 else f"{uses} times"
        return _accepted(f"the invitation {name[:8]} can be used {times}", entry)

    def _valid_invitations(self, wall_s: float) -> list[tuple[str, _Invitation]]:
        return [(name, known) for name, known in self._invitations.items() if known.refusal(wall_s) is None]

    def expel(self, peer: m.PeerId, ban: bool, reason: str, name: str = "") -> AccessReply:
        """Kick the member `peer`; or, with `ban`, ban this key, even if it does not belong to a member."""
        reason = limits.clean_reason(reason) or "no reason was given"
        if peer in self._reserved_keys:
            return _refused("ours", "this is the coordinator's or your own key", "specify a worker's key")
        if limits.is_banned(peer, self._banned):
            return _accepted(f"{_short(peer)} is already banned: {self._banned[peer].reason}")
        if not ban and not self._is_member(peer):
            return _refused(
                "unknown",
                f"{_short(peer)} is not a member",
                "list the members with `gridtrain members`, or ban the key",
            )
        if ban and len(self._banned) >= limits.MAX_BANNED:
            return _refused("too-many", f"{limits.MAX_BANNED} keys are banned", "unban some keys")
        cause = "liar" if self._violations.is_suspected(peer) else "order"
        entries, _ = self._remove(peer, ban, reason, cause, limits.clean_reason(name) if ban else "")
        done = "is banned until you unban it" if ban else "is removed; it needs a new invitation to rejoin"
        return AccessReply(m.OperatorReply(f"{_short(peer)} {done}"), tuple(entries), ((peer, reason),))

    def pardon(self, peer: m.PeerId) -> AccessReply:
        """Lift a ban; with `open_to_all`, also undo a kick."""
        if peer not in self._banned and not (self._open_to_all and peer in self._removed):
            return _refused(
                "unknown", f"{_short(peer)} is not banned", "list banned keys with `gridtrain members`"
            )
        entry = self._apply_and_journal("pardoned", peer=peer.hex())
        then = "it can rejoin" if self._open_to_all else "it can rejoin with a new invitation"
        return _accepted(f"{_short(peer)} is no longer banned; {then}", entry)

    # -- violations ----------------------------------------------------------------------------

    def record_violation(
        self, peer: m.PeerId, reason: str, accuser: m.PeerId | None, now_s: float
    ) -> ViolationOutcome:
        """Record that `peer` broke the protocol; return the consequences.

        Args:
            accuser: the member that reports it; None if the coordinator itself detected it.
        """
        violation = ViolationRecord(accuser, limits.clean_reason(reason))
        if not self._is_member(peer) or not self._violations.add(peer, violation):
            return ViolationOutcome(violation_count=self._violations.count(peer))
        accuser_text = accuser.hex() if accuser is not None else ""
        body = {"peer": peer.hex(), "accuser": accuser_text, "reason": violation.reason}
        entry = JournalEntry("strike", body)
        return self._evaluate_violations([entry], now_s, peer, accuser)

    def tick(self, now_s: float) -> ViolationOutcome:
        """Remove accusers whose accusations were not confirmed in time, and members with too many violations.

        Call once a second.
        """
        return self._evaluate_violations([], now_s, None, None)

    def _evaluate_violations(
        self, entries: list[JournalEntry], now_s: float, peer: m.PeerId | None, accuser: m.PeerId | None
    ) -> ViolationOutcome:
        removed_members: list[tuple[m.PeerId, str]] = []
        restored: list[m.PeerId] = []
        for liar in self._violations.review_suspects(now_s):
            count = len(self._violations.accused_by(liar))
            reason = f"accused {count} members, and no other member confirmed the accusations"
            removed_members += [(liar, reason)] if self._is_member(liar) else []
            removal_entries, reinstated = self._remove(liar, False, reason, "liar")
            entries += removal_entries
            restored += reinstated
        for accused in self._violations.members_over_limit():
            if self._is_member(accused):
                violations = self._violations.records_of(accused)
                reason = f"{len(violations)} violations, the latest: {violations[-1].reason}"
                removed_members.append((accused, reason))
                entries += self._remove(accused, False, reason, "strikes")[0]
        return ViolationOutcome(
            tuple(entries),
            tuple(removed_members),
            tuple(restored),
            is_counted=peer is not None and not self._violations.is_suspected(accuser),
            violation_count=self._violations.count(peer) if peer is not None else 0,
        )

    def _remove(
        self, peer: m.PeerId, ban: bool, reason: str, cause: str, name: str = ""
    ) -> tuple[list[JournalEntry], list[m.PeerId]]:
        """Remove a member; return the journal entries and the restored members.

        If the cause is "liar", the members that were removed because of this member's false accusations are
        restored.
        """
        victims = self._violations.accused_by(peer) if cause == "liar" else []
        named = {"name": name} if name else {}
        body = {"peer": peer.hex(), "ban": ban, "reason": reason, "cause": cause, **named}
        removal = self._apply_and_journal("expelled", **body)
        innocent = [victim for victim in victims if self._was_removed_in_error(victim)]
        readmissions = [self._apply_and_journal("enrolled", peer=x.hex(), invitation="") for x in innocent]
        return [removal, *readmissions], innocent

    def _was_removed_in_error(self, victim: m.PeerId) -> bool:
        removal, count = self._removed.get(victim), len(self._violations.records_of(victim))
        return removal is not None and removal.is_for_violations and not exceeds_limit(count)

    # -- journal entries -----------------------------------------------------------------------

    def _apply_and_journal(self, kind: str, **body: Any) -> JournalEntry:
        self.apply_entry(kind, body)
        return JournalEntry(kind, body)

    def apply_entry(self, kind: str, body: Mapping[str, Any]) -> None:
        """Apply a journal entry if it concerns access control; ignore it otherwise.

        Raises `KeyError`, `TypeError` or `ValueError` for an invalid entry.
        """
        match kind:
            case "invitation":
                self._apply_invitation(body)
            case "enrolled":
                self._apply_enrolled(limits.parse_key(body["peer"]), limits.parse_text(body["invitation"]))
            case "expelled":
                peer, name = limits.parse_key(body["peer"]), limits.parse_text(body.get("name", ""))
                reason = limits.parse_text(body["reason"])
                self._apply_expelled(peer, body["ban"], reason, body["cause"], name)
            case "pardoned":
                peer = limits.parse_key(body["peer"])
                self._banned.pop(peer, None)
                self._removed.pop(peer, None)
                if not self._open_to_all:
                    reason = "it was banned, and has not been invited since the ban was lifted"
                    self._removed[peer] = _Removal(self._serial, False, reason)
            case "strike":
                accuser_text = limits.parse_text(body["accuser"])
                accuser = limits.parse_key(accuser_text) if accuser_text else None
                violation = ViolationRecord(accuser, limits.parse_text(body["reason"]))
                self._violations.add(limits.parse_key(body["peer"]), violation)

    def _apply_invitation(self, body: Mapping[str, Any]) -> None:
        name, uses = limits.parse_key(body["key"]).hex(), body["uses"]
        until_s, at_s = limits.parse_seconds(body["until_s"]), limits.parse_seconds(body["at_s"])
        if type(uses) is not int or not 1 <= uses < 2**31:
            raise ValueError(f"uses is {uses!r}; it must be an integer between 1 and 2147483647")
        earlier = self._invitations.pop(name, None)
        self._serial += 1
        if until_s > at_s:
            self._invitations[name] = _Invitation(self._serial, uses, until_s)
        elif earlier is not None:
            self._invitations[name] = replace(earlier, until_s=until_s, is_withdrawn=True)
        self._forget_ended_invitations(at_s)

    def _forget_ended_invitations(self, wall_s: float) -> None:
        """Forget ended invitations that are too old or too many.

        At most `MAX_ENDED_INVITATIONS` ended invitations are kept.  Those that were created or withdrawn
        first are forgotten first.
        """
        ended = [name for name, known in self._invitations.items() if known.refusal(wall_s) is not None]
        surplus = set(ended[: max(0, len(ended) - limits.MAX_ENDED_INVITATIONS)])
        self._invitations = {
            name: known
            for name, known in self._invitations.items()
            if name not in surplus and not limits.is_forgotten(known.until_s, wall_s)
        }

    def _apply_enrolled(self, peer: m.PeerId, invitation: str) -> None:
        """Make `peer` a member.

        Args:
            invitation: the id of the invitation; empty if the member is restored after a false accusation.
        """
        if invitation:
            self._violations.clear(peer)
        if invitation in self._invitations:
            self._invitations[invitation].used += 1
        self._members[peer] = invitation
        self._removed.pop(peer, None)

    def _apply_expelled(self, peer: m.PeerId, ban: object, reason: str, cause: object, name: str) -> None:
        if type(ban) is not bool or cause not in ("order", "strikes", "liar"):
            raise ValueError(f"ban is {ban!r} and cause is {cause!r}, which no coordinator writes")
        self._members.pop(peer, None)
        self._removed[peer] = _Removal(self._serial, cause == "strikes", reason)
        if ban:
            self._banned[peer] = _Ban(reason, name)
        if cause == "liar":
            self._violations.withdraw_accusations(peer)

    # -- status --------------------------------------------------------------------------------

    def status(self, wall_s: float) -> dict[str, Any]:
        """Return the data for `gridtrain members` as a JSON-serializable dictionary.

        Its size is limited, and it contains no secrets.
        """
        valid = self._valid_invitations(wall_s)
        members, banned = list(self._members)[-MAX_LISTED:], list(self._banned.items())[-MAX_LISTED:]
        return {
            "open_to_all": self._open_to_all,
            "invitations": [
                {
                    "id": name[:8],
                    "uses": invitation.uses,
                    "used": invitation.used,
                    "left_s": round(invitation.until_s - wall_s, 1),
                }
                for name, invitation in valid[-MAX_LISTED:]
            ],
            "enrolled_total": len(self._members),
            "enrolled": [
                {
                    "peer": peer.hex(),
                    "invitation": self._members[peer][:8],
                    "strikes": self._violations.count(peer),
                }
                for peer in members
            ],
            "banned": [
                {"peer": peer.hex(), **({"name": ban.name} if ban.name else {}), "reason": ban.reason}
                for peer, ban in banned
            ],
            "strikes": [
                self._violations_row(peer) for peer in self._violations.accused_members()[-MAX_LISTED:]
            ],
        }

    def removed_members(self) -> list[m.PeerId]:
        """Return the most recently removed members, except those that are banned or were admitted again."""
        return [peer for peer in self._removed if peer not in self._banned][-MAX_LISTED:]

    def violation_count(self, peer: m.PeerId) -> int:
        """Return how many violations currently count against this peer."""
        return self._violations.count(peer)

    def _violations_row(self, peer: m.PeerId) -> dict[str, Any]:
        violations = self._violations.records_of(peer)[-10:]
        accusations = [
            {"by": _short(x.accuser) if x.accuser is not None else "coordinator", "reason": x.reason}
            for x in violations
        ]
        return {"peer": peer.hex(), "strikes": self._violations.count(peer), "said": accusations}


def _refused(code: str, reason: str, remedy: str) -> AccessReply:
    return AccessReply(m.Refused(code, reason, remedy))


def _accepted(text: str, *entries: JournalEntry) -> AccessReply:
    return AccessReply(m.OperatorReply(text), entries)


def _short(key: m.PeerId) -> str:
    return key.hex()[:12]
