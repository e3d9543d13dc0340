"""Finds the worker to which an operator's command refers, by name or the key's first digits; removes it.

kick WHO     a member's name, or the first 6 or more digits of its key
ban WHO      the same, or the complete key of an unknown worker
unban WHO    a banned member's name, or the first 6 or more digits of its key
"""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gridtrain.cli.output import wrap_text
from gridtrain.errors import ConfigError
from gridtrain.quantities import list_first
from gridtrain.status_fields import rows

if TYPE_CHECKING:
    from gridtrain.runtime.client.operator_client import OperatorClient

MIN_KEY_DIGITS = 6
SHOWN_KEY_DIGITS = 12
KEY_DIGITS = 64
MAX_CANDIDATES = 10
NO_NAME = "(away)"


def operator_for(run: str, state: Path | None, wait_s: float = 0.0) -> OperatorClient:
    """Return an operator client for the coordinator that runs `run` on this machine.

    Waits up to `wait_s` for a coordinator that is starting.  Raises the same errors as
    `CoordinatorEndpoint.find`.
    """
    from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient

    def say(text: str) -> None:
        click.echo(f"gridtrain: {text}", err=True)

    return OperatorClient(CoordinatorEndpoint.find(run, state, wait_s=wait_s, say=say))


def with_member_name(peer: bytes, known: Mapping[str, str], told: str) -> str:
    """Return the coordinator's answer `told`, preceded by the name of the member `peer` if it is known."""
    name = known.get(peer.hex(), NO_NAME)
    return told if name == NO_NAME else f"{name}: {told}"


def remove_member(who: str, reason: str, run: str, state: Path | None, *, ban: bool) -> None:
    """Order the coordinator to remove the member `who` and, with `ban`, to refuse its key from then on.

    With `ban`, `who` may also be the complete key of an unknown worker.
    """
    from gridtrain.core.messages import RemoveWorker
    from gridtrain_coordinator.access.authorization_limits import clean_reason

    operator = operator_for(run, state)
    status = operator.status()
    known = known_keys(status)
    connected = {str(line.get("peer")) for line in rows(status, "members")}
    peer = resolve_member(who, known, present=connected, any_key=ban)
    told = operator.order(RemoveWorker(peer, ban, clean_reason(reason)))
    click.echo(wrap_text(with_member_name(peer, known, told)))


# -- finding a member by name or key -----------------------------------------------------------------


def known_keys(status: Mapping[str, Any], *, banned: bool = False) -> dict[str, str]:
    """Return the names of all members, including removed ones, by key (64 hexadecimal digits).

    With `banned`, return those of the banned workers instead.
    """
    access = status.get("door")
    known: dict[str, str] = {}
    admitted = [*rows(access, "removed"), *rows(access, "enrolled"), *rows(status, "members")]
    for line in rows(access, "banned") if banned else admitted:
        key = line.get("peer")
        if isinstance(key, str) and len(key) == KEY_DIGITS and not set(key) - set(string.hexdigits):
            known[key] = str(line.get("name", NO_NAME))
    return known


def resolve_member(
    who: str,
    known: Mapping[str, str],
    *,
    present: Collection[str] = (),
    any_key: bool = False,
    kind: str = "",
) -> bytes:
    """Return the key of the member whose name is `who`, or whose key begins with `who`.

    Args:
        known: the names of the members to search, by key.
        present: the keys of connected members; they take precedence over members that left and have the same
            name.
        any_key: whether `who` may be a complete key that is not in `known`.
        kind: an adjective for the known members in the error: "banned " or "".

    Raises:
        ConfigError: `who` matches no member, or several members.
    """
    digits = who.lower()
    is_key = not set(digits) - set(string.hexdigits) and MIN_KEY_DIGITS <= len(digits) <= KEY_DIGITS
    meant = {key for key, name in known.items() if name == who and name != NO_NAME}
    meant = meant.intersection(present) or meant
    meant |= {key for key in known if is_key and key.startswith(digits)}
    if not meant and any_key and is_key and len(digits) == KEY_DIGITS:
        meant = {digits}
    if len(meant) == 1:
        return bytes.fromhex(meant.pop())
    named = [f"{known[key]} {key[:SHOWN_KEY_DIGITS]}" for key in sorted(meant or known)]
    candidates = list_first(named, MAX_CANDIDATES)
    if meant:
        raise ConfigError(
            f"{who!r} matches {len(meant)} members: {candidates}", remedy="specify more digits of the key"
        )
    raise ConfigError(
        f"{who!r} matches no member; known {kind}members: {candidates or 'none'}",
        remedy=f"specify a name, or at least the first {MIN_KEY_DIGITS} digits of a key; `gridtrain "
        "members` lists them",
    )
