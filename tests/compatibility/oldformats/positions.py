"""A value as plain JSON by position: no name of a class or a field is in it, so that names may change."""

from __future__ import annotations

from dataclasses import Field, fields, is_dataclass
from enum import Enum
from typing import Any

ADDED = {
    ("LedgerState", "late"),
    ("LedgerState", "pending"),
    ("LedgerState", "leases"),
    ("LedgerState", "restart_generation"),
    ("LedgerSpec", "delay"),
    ("LedgerSpec", "shards"),
    ("Member", "entries_share"),
    ("Auto", "computing"),
}
"""Fields that commit 330f465 did not have; in its data they have their defaults."""


def plain(value: Any) -> Any:
    """Dataclasses and tuples become lists, bytes become {"hex": ...}, enumerations their values."""
    if is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in fields(value) if not _is_added(value, field)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes | memoryview):
        return {"hex": bytes(value).hex()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    return value


def _is_added(value: Any, field: Field[Any]) -> bool:
    if (type(value).__name__, field.name) not in ADDED:
        return False
    assert getattr(value, field.name) == field.default
    return True


def keys_of(value: Any, path: str = "") -> set[str]:
    """All keys in nested JSON, as paths such as "members[].figures.loss"."""
    if isinstance(value, dict):
        found = {f"{path}.{key}".lstrip(".") for key in value}
        return found.union(*(keys_of(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()))
    if isinstance(value, list):
        return set().union(*(keys_of(item, f"{path}[]") for item in value))
    return set()
