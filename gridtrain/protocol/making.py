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

from gridtrain.protocol import messages as m
from gridtrain.protocol.run import Run


class Standing(StrEnum):
    NONE = "none"
    FREEZING = "freezing"  # REPORTs are awaited
    FORMING = "forming"  # READYs are awaited


class Making:
    """See the module's text.

    Attributes:
        until_s: so long whoever is awaited has time.
        change: why the next generation is wanted; empty: it is not.
        unrouted: the same of the one that forms, unless its members find a way all the same.
        made_s: when the latest was made; -inf: this coordinator has made none.
        reports, ready: by member, what came in for the one that is made; `ready`: its history.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.standing = Standing.NONE
        self.until_s = math.inf
        self.change = ""
        self.unrouted = ""
        self.made_s = -math.inf
        self.reports: dict[m.PeerId, m.Report] = {}
        self.ready: dict[m.PeerId, bytes] = {}

    @property
    def resting(self) -> bool:
        """Neither REPORTs nor READYs are awaited."""
        return self.standing is Standing.NONE

    @property
    def freezing(self) -> bool:
        return self.standing is Standing.FREEZING

    @property
    def forming(self) -> bool:
        return self.standing is Standing.FORMING

    def want(self, why: str) -> None:
        """The first reason is the one that is told."""
        self.change = self.change or why

    def freeze(self, until_s: float) -> None:
        self.standing, self.until_s = Standing.FREEZING, until_s
        self.reports.clear()

    def form(self, until_s: float, now_s: float) -> str:
        """The generation is made; why."""
        self.standing, self.until_s, self.made_s = Standing.FORMING, until_s, now_s
        self.unrouted = ""
        self.ready.clear()
        why, self.change = self.change, ""
        return why

    def rest(self) -> None:
        """Nobody is awaited any more."""
        self.standing, self.until_s = Standing.NONE, math.inf

    def may_begin_at_s(self) -> float:
        """At most one generation in `generation_gap_s`; workers that come together start together."""
        limits, workers = self._run.limits, self._run.workers
        if any(peer not in workers for peer in self._run.order):
            return self.made_s  # somebody is lost: the others wait for nothing else
        newest_s = max((w.joined_s for w in workers.values()), default=-math.inf)
        unsettled = [w for w in workers.values() if not w.admitted and w.setup is not None]
        settled_s = min((w.probe_until_s for w in unsettled), default=newest_s + limits.settle_s)
        return max(self.made_s + limits.generation_gap_s, settled_s)

    def freeze_message(self) -> m.Freeze:
        run = self._run
        return m.Freeze(run.term, run.generation, self.change, tuple(sorted(run.departed)))
