"""Where the making of the next generation stands: why it is wanted, and what has come in for it.

Decides when it may begin.  Never decides who is a member, and never sends.

           want(why)                 freeze                    form                      rest
    NONE ------------> NONE, wanted -------> FREEZING ----------------> FORMING ------------------> NONE
                                             REPORTs come in            READYs come in   all are READY, or
                                                                                         it is given up
"""

from __future__ import annotations

import math
from enum import StrEnum

from gridtrain.core import messages as m
from gridtrain_coordinator.run.run_state import RunState


class ViewChangePhase(StrEnum):
    IDLE = "none"
    FREEZING = "freezing"  # REPORTs are awaited
    FORMING = "forming"  # READYs are awaited


class ViewChange:
    """See the module's text.

    Attributes:
        until_s: so long whoever is awaited has time.
        change: why the next generation is wanted; empty: it is not.
        unrouted: the same of the one that forms, unless its members find a way all the same.
        made_s: when the latest was made; -inf: this coordinator has made none.
        reports, ready: by member, what came in for the one that is made; `ready`: its history.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.phase = ViewChangePhase.IDLE
        self.deadline_s = math.inf
        self.reason = ""
        self.unrouted_reason = ""
        self.last_installed_s = -math.inf
        self.reports: dict[m.PeerId, m.FreezeReport] = {}
        self.ready_histories: dict[m.PeerId, bytes] = {}

    @property
    def is_idle(self) -> bool:
        """Neither REPORTs nor READYs are awaited."""
        return self.phase is ViewChangePhase.IDLE

    @property
    def is_freezing(self) -> bool:
        return self.phase is ViewChangePhase.FREEZING

    @property
    def is_forming(self) -> bool:
        return self.phase is ViewChangePhase.FORMING

    def request(self, why: str) -> None:
        """The first reason is the one that is told."""
        self.reason = self.reason or why

    def begin_freezing(self, until_s: float) -> None:
        self.phase, self.deadline_s = ViewChangePhase.FREEZING, until_s
        self.reports.clear()

    def begin_forming(self, until_s: float, now_s: float) -> str:
        """The generation is made; why."""
        self.phase, self.deadline_s, self.last_installed_s = ViewChangePhase.FORMING, until_s, now_s
        self.unrouted_reason = ""
        self.ready_histories.clear()
        why, self.reason = self.reason, ""
        return why

    def reset(self) -> None:
        """Nobody is awaited any more."""
        self.phase, self.deadline_s = ViewChangePhase.IDLE, math.inf

    def earliest_begin_s(self) -> float:
        """At most one generation in `generation_gap_s`; workers that come together start together."""
        limits, workers = self._run.limits, self._run.workers
        if any(peer not in workers for peer in self._run.member_order):
            return self.last_installed_s  # somebody is lost: the others wait for nothing else
        newest_s = max((w.joined_s for w in workers.values()), default=-math.inf)
        unsettled = [w for w in workers.values() if not w.is_admitted and w.setup is not None]
        settled_s = min((w.probe_deadline_s for w in unsettled), default=newest_s + limits.settle_s)
        return max(self.last_installed_s + limits.generation_gap_s, settled_s)

    def freeze_message(self) -> m.Freeze:
        run = self._run
        return m.Freeze(run.term, run.generation, self.reason, tuple(sorted(run.departed_members)))
