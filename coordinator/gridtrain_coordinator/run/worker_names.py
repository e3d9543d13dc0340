"""Names of workers, unique within the run, so that people can tell them apart: `gridtrain kick anna-2`.

A name proves nothing: access is decided by keys (`access.authorization`).
"""

from __future__ import annotations

from collections.abc import Collection

from gridtrain.core import messages as m
from gridtrain_coordinator.run.events import LogEvent

MAX_NAME_BYTES = 64
MAX_REMEMBERED = 10_000


class WorkerNames:
    """Numbers workers of one name, and gives a worker that comes back the name it had.

        "anna", key 1a..  -> anna            1a.. leaves and comes back          -> anna
        "anna", key 2b..  -> anna-2          2b.. comes back, 1a.. is not there  -> anna-2

    Stored in memory only; members send their assigned name when they join again.
    """

    def __init__(self) -> None:
        self._assigned: dict[m.PeerId, tuple[str, str]] = {}  # (requested, assigned)

    def assign(self, peer: m.PeerId, requested: str, taken: Collection[str]) -> str:
        """The name of `peer`, which is none of the `taken` names of other workers."""
        before, name = self._assigned.pop(peer, ("", ""))
        if requested not in (before, name) or name in taken:
            before, name = requested, unique_name(requested, taken)
        self._assigned[peer] = (before, name)  # reinserted last: the first entries are the oldest
        if len(self._assigned) > MAX_REMEMBERED:
            del self._assigned[next(iter(self._assigned))]
        return name


def rename_events(requested: str, name: str) -> list[LogEvent]:
    """For the log and the events of `gridtrain status`; empty: the worker has the name it asked for."""
    if requested == name:
        return []
    reason = f"another worker is called {requested}"
    return [LogEvent("info", "renamed", {"name": name, "asked": requested, "reason": reason})]


def unique_name(name: str, taken: Collection[str]) -> str:
    """The name, with a number where it is taken: "anna", "anna-2", "anna-3"; at most `MAX_NAME_BYTES`."""
    free, number = name, 1
    while free in taken:
        number += 1
        end = f"-{number}"
        free = name.encode()[: MAX_NAME_BYTES - len(end)].decode(errors="ignore") + end
    return free
