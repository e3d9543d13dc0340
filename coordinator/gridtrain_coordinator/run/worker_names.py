"""What workers are called, so that people can say which one they mean: `gridtrain kick anna-2`.

Decides who of several of one name gets a number, and that a worker which comes back is called as before.  A
name proves nothing: who may come in is decided by keys (`protocol.door`).

    "anna", key 1a..  -> anna            1a.. leaves and comes back          -> anna
    "anna", key 2b..  -> anna-2          2b.. comes back, 1a.. is not there  -> anna-2
"""

from __future__ import annotations

from collections.abc import Collection

from gridtrain.core import messages as m
from gridtrain_coordinator.run.events import LogEvent
from gridtrain_coordinator.run.registry import unique_name

MAX_REMEMBERED = 10_000


class WorkerNames:
    """See the module's text.  Kept in memory only; members say their given name when they join again."""

    def __init__(self) -> None:
        self._assigned: dict[
            m.PeerId, tuple[str, str]
        ] = {}  # what it asked to be called, and what it is called

    def assign(self, peer: m.PeerId, asked: str, taken: Collection[str]) -> str:
        """The name of `peer`, which is none of the `taken` ones: those of other workers."""
        before, name = self._assigned.pop(peer, ("", ""))
        if asked not in (before, name) or name in taken:
            before, name = asked, unique_name(asked, taken)
        self._assigned[peer] = (before, name)  # at the end: the first ones were not seen for longest
        if len(self._assigned) > MAX_REMEMBERED:
            del self._assigned[next(iter(self._assigned))]
        return name

    def rename_events(self, asked: str, name: str) -> list[LogEvent]:
        """For the owner's log, and for the events of `gridtrain status`."""
        if asked == name:
            return []
        reason = f"another worker is called {asked}"
        return [LogEvent("info", "renamed", {"name": name, "asked": asked, "reason": reason})]
