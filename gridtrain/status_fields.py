"""Reads the fields of a run's status, which comes from workers over the network and may contain anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def rows(place: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the objects of the list `place[name]`; [] if there is no such list."""
    found = mapping(place).get(name)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def by_rank(member: Mapping[str, Any]) -> tuple[bool, int]:
    """Return a sort key: members in rank order, then workers without a rank."""
    rank = member.get("rank")
    return (False, rank) if isinstance(rank, int) else (True, 0)


def count(value: Any) -> str:
    """Format an integer; return "-" if `value` is not an integer."""
    return str(value) if isinstance(value, int) else "-"


def number(value: Any, form: Callable[[float], str]) -> str:
    """Format a number with `form`; return "-" if `value` is not a number."""
    return form(value) if isinstance(value, int | float) else "-"
