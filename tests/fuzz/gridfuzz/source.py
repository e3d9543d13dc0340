"""Bytes as a sequence of choices, from which the targets build messages and schedules.

Any bytes give valid choices, and a small change of the bytes is a small change of the message or schedule.
When the bytes are used up, every choice is the first, simplest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Source:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def empty(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        at, self._at = self._at, self._at + 1
        return self._data[at] if at < len(self._data) else 0

    def bytes(self, count: int) -> bytes:
        """Exactly `count` bytes, padded with zeros."""
        at, self._at = self._at, self._at + count
        return self._data[at : at + count].ljust(count, b"\0")

    def rest(self) -> bytes:
        at, self._at = self._at, len(self._data)
        return self._data[at:]

    def below(self, bound: int) -> int:
        """0 <= result < bound."""
        if bound <= 1:
            return 0
        width = (bound - 1).bit_length() + 7 >> 3
        return int.from_bytes(self.bytes(width), "little") % bound

    def one_in(self, chances: int) -> bool:
        """True for one in `n` values; False when the bytes are used up."""
        return self.byte() % chances == chances - 1

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def integer(self, low: int, high: int) -> int:
        """Mostly near the bounds or small, sometimes anything."""
        how = self.byte()
        if how < 96:
            return min(high, max(low, how % 12))
        if how < 160:
            return (low, high, low + 1, high - 1)[how % 4] if high > low else low
        if how < 224:  # close to a power of two
            return min(high, max(low, (1 << self.byte() % 64) + how % 3 - 1))
        return low + int.from_bytes(self.bytes(8), "little") % (high - low + 1)
