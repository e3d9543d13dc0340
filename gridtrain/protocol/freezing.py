"""Between FREEZE and the next generation: whose REPORT is waited for and how long (rules 5, 6 and 11).

Decides when enough is known to go on, and what a run does of which no member is left.  Never decides the
verdict (`protocol.verdict`), never makes the generation.

    TRAINING --another one is wanted--> FREEZE --all who live have reported, or time is up--> the next one
       |                                  ^                    nobody who reports holds a state --+
       |                                  | some are back,                                        |
       +--all members are away--> held back until `regather_s`  <---------------------------------+
          the coordinator restarted       | nobody came back, and others are here
                                          v
                                       WAITING: begins anew, from checkpoints or at step 0
"""

from __future__ import annotations

import math

from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.drift import Drifted
from gridtrain.protocol.generations import Generations
from gridtrain.protocol.in_stages import InStages
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import Effect, Note, RunPhase, Send, Strike
from gridtrain.protocol.partings import Partings
from gridtrain.protocol.recall import Recall
from gridtrain.protocol.roll import Worker
from gridtrain.protocol.run import Run


class Freezing:
    """See the module's text.

    Attributes:
        held_until_s: while members come back the FREEZE is held, until then; None: it is not.
    """

    def __init__(
        self,
        run: Run,
        making: Making,
        partings: Partings,
        generations: Generations,
        stages: InStages,
        drifted: Drifted,
        recall: Recall,
    ) -> None:
        self._run, self._making, self._partings = run, making, partings
        self._generations, self._stages = generations, stages
        self._drifted, self._recall = drifted, recall
        self.held_until_s: float | None = None
        self._regathering = False  # all members are away, and waited for
        self._regather_until_s = -math.inf
        self._waited = False  # those who are not back by now have had their time

    # -- how it begins -----------------------------------------------------------------------------

    def freeze(self, now_s: float) -> list[Effect]:
        """The members train, and are to stop."""
        run, making = self._run, self._making
        note, freeze = self._freeze(now_s), making.freeze_message()
        return [note, *(Send(peer, freeze) for peer in run.present)]

    def _freeze(self, now_s: float) -> Note:
        self.held_until_s = None
        self._making.freeze(now_s + self._run.limits.report_s)
        fields = {"generation": self._run.generation, "reason": self._making.change}
        return Note("info", "freeze", fields)

    def regather(self, now_s: float) -> list[Effect]:
        """All members are away.  Unless they left for good, or none had begun, they are waited for."""
        run = self._run
        if not run.started or run.members <= run.departed:
            return self._start_over()
        self.hold(now_s)
        reason = f"all {len(run.roster)} members are away; they are waited for"
        return [run.enter(RunPhase.PAUSED, reason), Note("error", "paused", {"reason": reason})]

    def hold(self, now_s: float) -> None:
        """The members are to come back, and are frozen when they have."""
        self.wait(now_s)
        self.held_until_s = math.inf

    def wait(self, now_s: float) -> None:
        """The members are to come back; those who are here are frozen at once."""
        self._making.freeze(now_s + self._run.limits.regather_s)
        self._regathering, self._regather_until_s = True, self._making.until_s
        self.held_until_s = None

    def _start_over(self) -> list[Effect]:
        """Nobody is left who holds the model: wait for workers, and begin from their checkpoints, or at 0."""
        run = self._run
        run.roster, run.view, run.started = (), None, False
        run.departed.clear()
        self._making.change = ""
        self._making.rest()
        self._regathering, self.held_until_s = False, None
        self._generations.forget()
        reason = (
            "all workers that held the model are gone; the next ones begin from a checkpoint, or at step 0"
        )
        return [
            run.enter(RunPhase.WAITING, reason, reached=run.reached),
            Note("error", "waiting", {"reason": reason}),
            *(run.told(peer) for peer in run.workers),
        ]

    # -- what comes in -----------------------------------------------------------------------------

    @property
    def _behind(self) -> bool:
        """Some have told of a later generation than the journal knows: others may, too."""
        return self._regathering and self._recall.behind

    def report(self, worker: Worker, report: m.Report, now_s: float) -> list[Effect]:
        """Where a member of the frozen generation stands; what cannot be so must not reach the ledger."""
        run, making = self._run, self._making
        if not making.freezing or report.generation != run.generation:
            return []
        if worker.peer not in run.members:
            return [Strike(worker.peer, "reported on a generation that it is no member of")]
        if worker.peer in run.departed:
            return []  # of another process with its key: what it has is on its disk, see `Setup`
        sound = ledger.is_sound(report.ledger, run.members) and report.ledger.step == report.applied + 1
        sound = sound and run.may_hold(report.blocks)
        least = run.view.applied if run.view is not None else -1
        if report.synced and (not sound or report.applied < least):
            return [Strike(worker.peer, "reported a step and a ledger that cannot be")]
        if report.synced and worker.setup is None:
            return []  # it was away: its set-up is on the way behind an answer to an older FREEZE
        report = self._drifted.judged(worker.peer, report)
        making.reports[worker.peer] = report
        if (
            report.synced and not self._behind
        ):  # it can decide: who is still away is not waited for any longer
            making.until_s = min(making.until_s, now_s + self._run.limits.silence_s)
        return []

    def stalled(self, generation: int, now_s: float) -> None:
        """Members wait for one that is away: the FREEZE is not held much longer."""
        if self.held_until_s is not None and generation == self._run.generation:
            self.held_until_s = min(self.held_until_s, now_s + self._run.limits.report_s)

    # -- how it ends -------------------------------------------------------------------------------

    def go_on(self, now_s: float) -> list[Effect]:
        """Once all who live have reported, or time is up, decide."""
        run, making = self._run, self._making
        if self._held_back(now_s):
            return []
        if self.held_until_s is not None:
            self._waited = True
            note = self._freeze(now_s)
            return [note, *(told for peer in run.present for told in self._generations.repeat(peer))]
        absent = self._absent()
        nobody = not any(report.synced for report in making.reports.values())
        all_of_them = self._behind or (self._regathering and (nobody or not self._waited))
        awaited = absent if all_of_them else absent & set(run.workers)
        if awaited and run.is_pipeline and making.until_s == math.inf:
            making.until_s = now_s + self._run.limits.report_s  # back while the run was paused
        if awaited and now_s < making.until_s:
            return []
        if self._unplaced():
            # `CalledBack` always comes, and without it there is no way to plan; who is admitted only after
            # the View would begin to measure its lines, and never be READY.
            making.until_s = max(making.until_s, now_s + self._run.limits.settle_s)
            return []
        if self._regathering and nobody and awaited and run.started and self._waits_on(absent, now_s):
            return []
        effects: list[Effect] = []
        for peer in sorted(awaited & set(run.workers)):
            effects += self._partings.lose(peer, f"did not report within {self._run.limits.report_s:.1f} s")
        return effects + self._decide(now_s)

    def _held_back(self, now_s: float) -> bool:
        """Members that come back train on until all are there: one FREEZE then stops all, and for a moment.

        Who does not come is not waited for long: by rule 6 those who report can decide without it.
        """
        if self.held_until_s is None:
            return False
        here = set(self._run.workers)
        awaited = self._run.members - self._run.departed
        if self._recall.behind:
            awaited |= self._recall.known  # they may tell another tale
        elif self.held_until_s == math.inf and awaited & here:
            self.held_until_s = now_s + self._run.limits.report_s + self._run.limits.regreet_s
        return not awaited <= here and now_s < min(self.held_until_s, self._making.until_s)

    def _absent(self) -> frozenset[m.PeerId]:
        """Who has not told yet what it knows."""
        run = self._run
        absent = run.members - set(self._making.reports) - run.departed
        if self._behind:
            arrived = {w.peer for w in run.workers.values() if w.setup is not None}
            absent |= self._recall.known - arrived  # they may tell another tale
        return absent

    def _unplaced(self) -> bool:
        """Of somebody who is to be seated it is not known yet how others reach it."""
        # Beside those who have reported: a member whose process is another one now.
        workers, seated = self._run.workers, {*self._making.reports, *self._run.taking_part()}
        return any(not workers[peer].placed for peer in seated if peer in workers)

    def _waits_on(self, absent: frozenset[m.PeerId], now_s: float) -> bool:
        """All who hold the model are away.  Without anybody who could begin anew there is no reason to give
        up what they hold."""
        self._waited = False
        if now_s < self._regather_until_s:
            self._making.until_s = self._regather_until_s
            return True
        if any(w.admitted and w.peer not in absent for w in self._run.workers.values()):
            return False
        self._making.until_s = self._regather_until_s = now_s + self._run.limits.regather_s
        return True

    def _decide(self, now_s: float) -> list[Effect]:
        run, making = self._run, self._making
        holders = {p: r for p, r in making.reports.items() if r.synced and p in run.workers}
        given_up = self._regathering
        if run.is_pipeline:
            patience_s = self._regather_until_s if self._regathering else -math.inf
            effects = self._stages.go_on(holders, patience_s, now_s)
            self._regathering = self._regathering and making.freezing
            return effects
        self._regathering = False
        making.rest()
        if holders:
            return self._generations.next(holders, now_s)
        return self._start_over() if given_up else self.regather(now_s)
