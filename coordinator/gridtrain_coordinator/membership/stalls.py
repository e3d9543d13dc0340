"""A step that hangs again and again: who is at fault, as far as the coordinator can know.

Decides whom the next generation goes on without.  Never removes anybody, and never judges by the word of the
one who reports alone: a suspect that shows signs of life stays, at first.

    stall of step 7   suspects   showed a sign of life   gone
    1st               bert       no                      bert
    1st .. 2nd        clara      yes                     nobody
    3rd               clara      yes                     clara      she held it up three times
    6th               dora       yes                     erik       the youngest: somebody is at fault
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gridtrain.core import messages as m
from gridtrain_coordinator.run.registry import Worker

STALLS_BEFORE_REMOVAL, STALLS_BEFORE_REMOVING_NEWEST = 3, 6


class StalledStep:
    """Of the latest step that stalled: in how many generations, and in how many each was suspected."""

    def __init__(self, patience_floor_s: float) -> None:
        self._min_patience_s = patience_floor_s
        self._step = -1
        self._stall_count = 0
        self._suspicions: Counter[m.PeerId] = Counter()

    def record(self, step: int, members: Collection[m.PeerId], stalled: m.RoundStalled) -> int:
        """In how many generations the step has stalled by now."""
        if step != self._step:
            self._step, self._stall_count = step, 0
            self._suspicions.clear()
        self._stall_count += 1
        self._suspicions.update(set(members) & set(stalled.suspects))
        return self._stall_count

    def find_at_fault(
        self,
        stalled: m.RoundStalled,
        members: Collection[m.PeerId],
        workers: Mapping[m.PeerId, Worker],
        seniority: Callable[[m.PeerId], Any],
        now_s: float,
    ) -> dict[m.PeerId, str]:
        """Who goes, and why.

        Args:
            members: of the generation; `workers`: all who are here.
            seniority: sorts the longest-serving first.
        """
        here = set(members) & set(workers)
        step, reason = self._step, stalled.reason
        if self._stall_count >= STALLS_BEFORE_REMOVING_NEWEST and len(here) > 1:
            text = f"step {step} failed in {self._stall_count} generations, and who joined last goes first: {reason}"
            return {max(here, key=seniority): text}
        patience_s = max(stalled.silent_s, self._min_patience_s)
        found: dict[m.PeerId, str] = {}
        for peer in stalled.suspects:
            if peer not in workers:
                continue
            if stalled.silent_s > 0 and patience_s <= now_s - workers[peer].progressed_s:
                found[peer] = "showed no progress while others waited"
            elif self._suspicions[peer] >= STALLS_BEFORE_REMOVAL:
                found[peer] = f"held up step {step} {self._suspicions[peer]} times: {reason}"
        return found
