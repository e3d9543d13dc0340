"""Limits of access control, such as the number of uses of an invitation, and the refusals sent to workers.

The functions keep no state.  `authorization` looks each of them up in this module at every call, so that a
test can disable a rule and demonstrate the effect.
"""

from __future__ import annotations

from collections.abc import Container

from gridtrain.core import messages as m
from gridtrain.quantities import shorten

MAX_INVITATIONS = 1000  # valid invitations
MAX_ENDED_INVITATIONS = 1000
ENDED_KNOWN_S = 30 * 86_400.0
"""How long an ended invitation is remembered, so that its holder can learn how it ended."""

MAX_USES = 10_000
MAX_EXPIRES_S = 366 * 86_400.0
MAX_MEMBERS = 10_000
MAX_BANNED = 10_000
MAX_REMOVED = 10_000  # the oldest removals are dropped first; any valid invitation then admits those keys

MAX_ENROLS_PER_RANGE, ENROL_WINDOW_S = 64, 600.0
"""The maximum number of enrolments from one address range within `ENROL_WINDOW_S`."""

MAX_ENROLS = 4096  # from all ranges within the same time
MAX_JOINS_PER_WORKER, JOIN_WINDOW_S = 20, 60.0
"""The maximum number of joins by one key within `JOIN_WINDOW_S`.

The limit bounds the load caused by a worker that crashes at startup and is restarted repeatedly.
"""

MAX_JOINERS = 20_000
MAX_REASON_BYTES = 200
MAX_WALL_S = 1e12


# -- defences ----------------------------------------------------------------------------------------


def has_expired(until_s: float, wall_s: float) -> bool:
    return wall_s >= until_s


def is_forgotten(until_s: float, wall_s: float) -> bool:
    return wall_s >= until_s + ENDED_KNOWN_S


def is_used_up(used: int, uses: int) -> bool:
    return used >= uses


def is_banned(key: m.PeerId, banned: Container[m.PeerId]) -> bool:
    return key in banned


def predates_removal(invitation_serial: int, kicked_at_serial: int) -> bool:
    """Return whether the invitation was created before the removal; a removed key needs a later one."""
    return invitation_serial <= kicked_at_serial


def is_operator(key: m.PeerId, operator: m.PeerId | None) -> bool:
    return operator is not None and key == operator


def exceeds_enrolment_rate(enrolled_from_range: int) -> bool:
    return enrolled_from_range >= MAX_ENROLS_PER_RANGE


def clean_reason(reason: str) -> str:
    """Replace unprintable characters with spaces, and shorten the reason to `MAX_REASON_BYTES` bytes."""
    plain = "".join(letter if letter.isprintable() else " " for letter in reason)
    return shorten(plain.strip(), MAX_REASON_BYTES)


# -- refusals ----------------------------------------------------------------------------------------

_ASK = "ask the run's owner for a new one"
UNKNOWN_INVITATION = m.Refused("invitation", "this coordinator has no such invitation", _ASK)
EXPIRED_INVITATION = m.Refused("invitation", "this invitation has expired", _ASK)
WITHDRAWN_INVITATION = m.Refused("invitation", "this invitation was withdrawn by the run's owner", _ASK)
USED_UP_INVITATION = m.Refused(
    "invitation",
    "this invitation has no uses left",
    f"start a worker that it admitted before, under the same account on the same machine, or {_ASK}",
)
KEY_IN_USE = m.Refused("key", "this key is already in use", "start the worker with a different key")
NOT_OPERATOR = m.Refused(
    "operator", "only the run's owner may do that", "run the command on the coordinator's machine"
)
TOO_MANY_ENROLMENTS = m.Refused(
    "too-many",
    f"in the last {ENROL_WINDOW_S / 60:.0f} minutes {MAX_ENROLS_PER_RANGE} workers have enrolled from your "
    f"range of addresses, or {MAX_ENROLS:,} in total, which is the maximum",
    f"try again in {ENROL_WINDOW_S / 60:.0f} minutes",
)
TOO_MANY_MEMBERS = m.Refused(
    "too-many",
    f"this run has {MAX_MEMBERS:,} members, which is the maximum",
    "ask the run's owner to remove members that no longer train (gridtrain members, gridtrain kick)",
)
TOO_MANY_JOINS = m.Refused(
    "too-often",
    f"this worker joined {MAX_JOINS_PER_WORKER} times within {JOIN_WINDOW_S:.0f} s",
    "find the cause in the worker's output, then try again in a minute",
)


REMOVED_REMEDY = "ask the run's owner for a new invitation; earlier invitations no longer admit this worker"


def banned_remedy(key: m.PeerId) -> str:
    digits = key.hex()[:12]
    return f"ask the run's owner to lift the ban (gridtrain unban {digits}) and to send a new invitation"


def removed_refusal(reason: str) -> m.Refused:
    """Return the refusal for a removed key whose invitation is older than the removal."""
    return m.Refused("kicked", f"this worker was removed from the run: {reason}", REMOVED_REMEDY)


def banned_refusal(key: m.PeerId, reason: str) -> m.Refused:
    text = f"the run's owner has banned this worker's key {key.hex()[:12]}: {reason}"
    return m.Refused("banned", text, banned_remedy(key))


# -- parsing of journal entries: each function raises `TypeError` or `ValueError` ---------------------


def parse_key(text: object) -> bytes:
    key = bytes.fromhex(parse_text(text))
    if len(key) != 32:
        raise ValueError(f"a key is {len(key)} bytes long; it must be 32 bytes long")
    return key


def parse_text(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"got {text!r}; expected a string")
    return text


def parse_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a time is {value!r}; it must be a number of seconds")
    if not -MAX_WALL_S <= value <= MAX_WALL_S:  # also refuses NaN
        raise ValueError(f"a time is {value!r}; it must be between -1e12 and 1e12 s")
    return float(value)
