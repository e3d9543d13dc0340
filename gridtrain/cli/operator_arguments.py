"""Shared by the operator's commands: the coordinator to use, members by name or key, durations.

kick WHO     a member's name, or the first 6 or more digits of its key
unban WHO    a banned member's name, or the first 6 or more digits of its key
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gridtrain.errors import ConfigError

if TYPE_CHECKING:
    from gridtrain.runtime.client.operator_client import OperatorClient

MIN_KEY_DIGITS = 6
SHOWN_KEY_DIGITS = 12
KEY_DIGITS = 64
MAX_CANDIDATES = 10
NO_NAME = "(away)"
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


def parse_duration(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """Callback of an option: seconds from "90s", "15m", "12h" or "7d"."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration; write for instance 90s, 15m, 12h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


def format_duration(seconds: float) -> str:
    """The two largest units: "6 d 23 h"."""
    minutes, left_s = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (left_s, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"


def operator_for(run: str, state: Path | None, wait_s: float = 0.0) -> OperatorClient:
    """A client of the coordinator on this machine.  Raises `ConfigError` if this user runs none."""
    from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient

    return OperatorClient(CoordinatorEndpoint.find(run, state, wait_s=wait_s))


def with_member_name(peer: bytes, known: Mapping[str, str], told: str) -> str:
    """The coordinator's answer, with the member's name in front."""
    name = known.get(peer.hex(), NO_NAME)
    return told if name == NO_NAME else f"{name}: {told}"


# -- whom a word means -------------------------------------------------------------------------------


def known_keys(status: Mapping[str, Any], *, banned: bool = False) -> dict[str, str]:
    """Key (64 digits) -> name of all known members, or of the banned ones."""
    access = status.get("door")
    lines = _lines(access, "banned") if banned else [*_lines(access, "enrolled"), *_lines(status, "members")]
    known: dict[str, str] = {}
    for line in lines:
        key = line.get("peer")
        if isinstance(key, str) and len(key) == KEY_DIGITS and not set(key) - set(string.hexdigits):
            known[key] = str(line.get("name", NO_NAME))
    return known


def resolve_member(who: str, known: Mapping[str, str], *, any_key: bool = False) -> bytes:
    """The key of the member that `who` names, by its name or the beginning of its key.

    Args:
        any_key: accept a whole key that is not known.

    Raises:
        ConfigError: `who` matches no member, or several.
    """
    digits = who.lower()
    is_key = not set(digits) - set(string.hexdigits) and MIN_KEY_DIGITS <= len(digits) <= KEY_DIGITS
    meant = {key for key, name in known.items() if name == who and name != NO_NAME}
    meant |= {key for key in known if is_key and key.startswith(digits)}
    if not meant and any_key and is_key and len(digits) == KEY_DIGITS:
        meant = {digits}
    if len(meant) == 1:
        return bytes.fromhex(meant.pop())
    candidates = ", ".join(_candidates(known, meant or set(known)))
    if meant:
        raise ConfigError(
            f"{who!r} matches {len(meant)} members: {candidates}", remedy="give more digits of the key"
        )
    raise ConfigError(
        f"{who!r} matches no member; there is {candidates or 'none'}",
        remedy=f"give a name, or at least {MIN_KEY_DIGITS} digits of a key; `gridtrain members` lists them",
    )


def _candidates(known: Mapping[str, str], keys: set[str]) -> Iterator[str]:
    for number, key in enumerate(sorted(keys)):
        if number == MAX_CANDIDATES:
            yield f"and {len(keys) - MAX_CANDIDATES} more"
            return
        yield f"{known[key]} {key[:SHOWN_KEY_DIGITS]}"


def _lines(place: Any, name: str) -> list[Mapping[str, Any]]:
    lines = place.get(name) if isinstance(place, dict) else None
    return [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []
