"""The flags of a round, which indicate whether its update is skipped and which members are absent.

    bit 0        the update is skipped, because a contribution is not finite
    bit 1 + r    rank r is absent: its contribution is empty, because its trainer has stalled

Every payload of a collective carries the flags of the contributions that it contains.  A complete collective
therefore has the flags of all members, and members that vote for the same digest have the same flags.
"""

from __future__ import annotations

SKIP = 1

MAX_RANKS = 62
"""Largest world size in which a member can be absent, because flags are sent as signed 64-bit integers."""


def absent_flag(rank: int) -> int:
    """Return the flag that marks this rank as absent."""
    return 2 << rank


def is_skipped(flags: int) -> bool:
    """Return whether the update of the round is skipped."""
    return bool(flags & SKIP)


def is_absent(flags: int, rank: int) -> bool:
    """Return whether this rank is absent from the round."""
    return bool(flags & absent_flag(rank))


def absent_ranks(flags: int) -> tuple[int, ...]:
    """Return the absent ranks in ascending order."""
    return tuple(rank for rank in range(flags.bit_length()) if is_absent(flags, rank))
