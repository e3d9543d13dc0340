"""Single rules of access control: bounds, limits, refusals, and the parsing of journal entries.

Each function answers one question without state.  `authorization` looks them up in this module at each use,
so that a test can disable one and show what happens without it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container

from gridtrain.core import messages as m

MAX_INVITATIONS = 1000  # valid ones
MAX_USES = 10_000
MAX_EXPIRES_S = 366 * 86_400.0
MAX_MEMBERS = 10_000
MAX_BANNED = 10_000
MAX_REMOVED = 10_000  # beyond it the oldest are forgotten, and any valid invitation admits them again

MAX_ENROLS_PER_RANGE, ENROL_WINDOW_S = 64, 600.0
"""Most enrolments from one range of addresses within that time."""

MAX_ENROLS = 4096  # from all ranges within that time
MAX_JOINS_PER_WORKER, JOIN_WINDOW_S = 20, 60.0
"""Most joins of one key within that time, so that a worker that crashes at its start does no harm."""

MAX_JOINERS = 20_000
MAX_REASON_BYTES = 200
MAX_WALL_S = 1e12


# -- defences ----------------------------------------------------------------------------------------


def has_expired(until_s: float, wall_s: float) -> bool:
    return wall_s >= until_s


def is_used_up(used: int, uses: int) -> bool:
    return used >= uses


def is_banned(key: m.PeerId, banned: Container[m.PeerId]) -> bool:
    return key in banned


def predates_removal(invitation_serial: int, kicked_at_serial: int) -> bool:
    """A kicked key needs an invitation that was made after the kick."""
    return invitation_serial <= kicked_at_serial


def is_operator(key: m.PeerId, operator: m.PeerId | None) -> bool:
    return operator is not None and key == operator


def exceeds_enrolment_rate(enrolled_from_range: int) -> bool:
    return enrolled_from_range >= MAX_ENROLS_PER_RANGE


def exceeds_join_rate(joins: int) -> bool:
    return joins >= MAX_JOINS_PER_WORKER


def address_range(host: str) -> str:
    """Roughly one connection or household: an IPv4 /24, an IPv6 /48, or `host` itself.

    Loopback is a range like any other; the limit is large enough for the workers of one machine.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


def clean_reason(reason: str) -> str:
    """The part of a reason that is stored and shown to others: printable, at most `MAX_REASON_BYTES`."""
    plain = "".join(letter if letter.isprintable() else " " for letter in reason)
    return plain.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore").strip()


# -- refusals ----------------------------------------------------------------------------------------

_ASK = "ask the run's owner for a new one"
INVALID_INVITATION = m.Refused("invitation", "this invitation is not valid (any more)", _ASK)
KEY_IN_USE = m.Refused("key", "this key belongs to somebody else", "start the worker with a key of its own")
NOT_OPERATOR = m.Refused("operator", "only the run's owner may do that", "use the machine of the coordinator")
TOO_MANY_ENROLMENTS = m.Refused(
    "too-many",
    f"too many workers enrolled from your range of addresses in the last {ENROL_WINDOW_S / 60:.0f} minutes, "
    "or there are too many in total",
    f"try again in {ENROL_WINDOW_S / 60:.0f} minutes",
)
TOO_MANY_JOINS = m.Refused(
    "too-often",
    f"this worker joined {MAX_JOINS_PER_WORKER} times within {JOIN_WINDOW_S:.0f} s",
    "look in its output for why it ends, then try again in a minute",
)


def removed_refusal(reason: str) -> m.Refused:
    """To a removed key whose invitation was made before it was removed."""
    return m.Refused(
        "kicked",
        f"this worker was removed from the run: {reason}",
        "ask the run's owner for a new invitation; an earlier one does not admit it again",
    )


def banned_refusal(key: m.PeerId, reason: str) -> m.Refused:
    digits = key.hex()[:12]
    return m.Refused(
        "banned",
        f"the run's owner has banned this worker's key {digits}: {reason}",
        f"ask the run's owner to lift it (gridtrain unban {digits}), and for a new invitation",
    )


# -- entries of the journal: each raises `TypeError` or `ValueError` ----------------------------------


def parse_key(text: object) -> bytes:
    key = bytes.fromhex(parse_text(text))
    if len(key) != 32:
        raise ValueError(f"a key of {len(key)} bytes")
    return key


def parse_text(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a text is {text!r}")
    return text


def parse_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a time is {value!r}")
    if not -MAX_WALL_S <= value <= MAX_WALL_S:  # NaN is refused as well
        raise ValueError(f"a time is {value!r}")
    return float(value)
