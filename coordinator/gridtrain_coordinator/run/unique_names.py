"""Makes workers' names unique within the run (anna-2), so that `gridtrain kick anna-2` is unambiguous.

A name proves nothing, because access depends on keys (`access.authorization`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from gridtrain.core import messages as m
from gridtrain_coordinator.run.events import LogEvent
from gridtrain_coordinator.run.recent_dict import RecentDict

MAX_NAME_BYTES = 64
MAX_REMEMBERED = 10_000


class WorkerNames:
    """Numbers workers that share a name, and gives a returning worker its previous name.

        "anna", key 1a..  -> anna            1a.. leaves and comes back          -> anna
        "anna", key 2b..  -> anna-2          2b.. comes back, 1a.. is absent     -> anna-2

    Args:
        recovered: the names in the journal, which records only workers that have been members.  Members send
            their assigned names when they rejoin.
    """

    def __init__(self, recovered: Mapping[m.PeerId, str] = MappingProxyType({})) -> None:
        known = ((peer, (name, name)) for peer, name in recovered.items())  # (requested, assigned)
        self._assigned = RecentDict(MAX_REMEMBERED, known)

    def name(self, peer: m.PeerId) -> str:
        """Return the latest name of the worker with this key, even if it has left; empty if none is known."""
        return self._assigned.get(peer, ("", ""))[1]

    def assign(self, peer: m.PeerId, requested: str, taken: Collection[str]) -> str:
        """Assign `peer` a name that is not in `taken`, and return it."""
        before, name = self._assigned.get(peer, ("", ""))
        if requested not in (before, name) or name in taken:
            before, name = requested, unique_name(requested, taken)
        self._assigned[peer] = before, name
        return name


def rename_events(requested: str, name: str) -> list[LogEvent]:
    """Return log events about a changed name; empty if the worker has the name that it requested."""
    if requested == name:
        return []
    reason = f"another worker is called {requested}"
    return [LogEvent("info", "renamed", {"name": name, "asked": requested, "reason": reason})]


def unique_name(name: str, taken: Collection[str]) -> str:
    """Return the name, numbered if taken ("anna", "anna-2", "anna-3"), in at most `MAX_NAME_BYTES` bytes."""
    free, number = name, 1
    while free in taken:
        number += 1
        end = f"-{number}"
        free = name.encode()[: MAX_NAME_BYTES - len(end)].decode(errors="ignore") + end
    return free
