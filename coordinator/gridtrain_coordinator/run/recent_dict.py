"""A dictionary of limited size: the memory that peers can make the coordinator use is bounded.

most = 2    d[a] = 1, d[b] = 2, d[a] = 3    keys b, a
            d[c] = 4                        keys a, c: b was set least recently
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentDict(dict[Key, Value]):
    """The `most` items that were set most recently, in the order in which they were set."""

    def __init__(self, most: int, items: Iterable[tuple[Key, Value]] = ()) -> None:
        super().__init__()
        self._most = most
        for key, value in items:
            self[key] = value

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
