"""What workers are called, so that people can say which one they mean: `gridtrain kick anna-2`.

Decides who of several of one name gets a number, and that a worker which comes back is called as before.  A
name proves nothing: who may come in is decided by keys (`protocol.door`).

    "anna", key 1a..  -> anna            1a.. leaves and comes back          -> anna
    "anna", key 2b..  -> anna-2          2b.. comes back, 1a.. is not there  -> anna-2

The coordinator's half is `Names`; a member's is `spoken`, which reads its name in the generation's roster.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from gridtrain.protocol import member_io
from gridtrain.protocol import messages as m
from gridtrain.protocol.membership_io import Note
from gridtrain.protocol.roll import numbered

MOST_REMEMBERED = 10_000


class Names:
    """See the module's text.  Kept in memory only; members say their given name when they join again."""

    def __init__(self) -> None:
        self._given: dict[m.PeerId, tuple[str, str]] = {}  # what it asked to be called, and what it is called

    def given(self, peer: m.PeerId, asked: str, taken: Collection[str]) -> str:
        """The name of `peer`, which is none of the `taken` ones: those of other workers."""
        before, name = self._given.pop(peer, ("", ""))
        if asked not in (before, name) or name in taken:
            before, name = asked, numbered(asked, taken)
        self._given[peer] = (before, name)  # at the end: the first ones were not seen for longest
        if len(self._given) > MOST_REMEMBERED:
            del self._given[next(iter(self._given))]
        return name

    def renamed(self, asked: str, name: str) -> list[Note]:
        """For the owner's log, and for the events of `gridtrain status`."""
        if asked == name:
            return []
        reason = f"another worker is called {asked}"
        return [Note("info", "renamed", {"name": name, "asked": asked, "reason": reason})]


def spoken(
    asked: str, before: Sequence[m.Member], roster: Sequence[m.Member], rank: int
) -> list[member_io.Note]:
    """What a member says of its name, and of newcomers that wanted the same one.

    Args:
        asked: what it has called itself so far.
        before, roster: of the generation before, and of this one, in which it has `rank`.
    """
    own = roster[rank].name
    notes = [member_io.Note("named", {"name": own, "asked": asked})] if own != asked else []
    known = {member.peer for member in before}
    alike = re.compile(re.escape(own) + r"-[0-9]+")
    return notes + [
        member_io.Note("namesake", {"name": own, "other": member.name})
        for member in roster
        if member.peer not in known and alike.fullmatch(member.name)
    ]
