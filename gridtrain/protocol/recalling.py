"""A coordinator whose journal is older than the run: it takes up the generation that its members tell of.

Decides whether what a worker tells is heeded, and which term and generation hold then (rule 11).  Never makes
a generation: the members of the one that is recalled are frozen and report, as after any restart.

    Seated(term 3, generation 9)  known here ------------------> nothing
                                  not credible ----------------> Strike
                                  of a later coordinator ------> nothing but a warning: that one decides
                                  of a journal that was lost --> a higher term, FREEZE of generation 9

`protocol.recall` weighs the tales.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gridtrain.protocol import messages as m
from gridtrain.protocol.freezing import Freezing
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import Effect, Note, RunPhase, Send, Strike
from gridtrain.protocol.recall import Raises, Recall, is_credible
from gridtrain.protocol.roll import Worker, workers
from gridtrain.protocol.run import Run


class Recalling:
    """See the module's text."""

    def __init__(self, run: Run, making: Making, freezing: Freezing, recall: Recall) -> None:
        self._run, self._making, self._freezing, self._recall = run, making, freezing, recall
        self._raises = Raises()

    @property
    def deadline_s(self) -> float:
        """When a higher term is due; infinite: none is."""
        return self._raises.deadline_s

    @property
    def _has_made(self) -> bool:
        """What this coordinator has made itself binds."""
        return self._making.made_s > -math.inf

    def seated(self, worker: Worker, seated: m.Seated, now_s: float) -> list[Effect]:
        """A term or a generation that this journal does not know: it is a backup's."""
        run, recall = self._run, self._recall
        latest = run.generation if self._has_made else recall.generation
        if seated.term <= run.term and seated.generation <= latest:
            return []
        if not is_credible(seated, run.term, latest) or not run.may_be_cut(seated.cuts):
            return [Strike(worker.peer, f"tells of term {seated.term}, generation {seated.generation}")]
        obeyed = worker.peer in run.accepted or (self._has_made and not self._has_most())
        if obeyed and seated.term > run.term:
            # Not from a backup: workers that were here have gone to a later coordinator, which alone decides.
            return [Note("warning", "superseded", {"name": worker.name, "term": seated.term})]
        effects: list[Effect] = []
        first = not recall.behind
        if not recall.tell(worker.peer, seated):
            return []
        if first or seated.term > run.term:
            known = worker.peer in recall.known
            self._raises.tell(max(run.term, seated.term), known=known, now_s=now_s)
            effects = self.raise_term(now_s)
        return effects if self._has_made else effects + self._take_up(now_s)

    def _take_up(self, now_s: float) -> list[Effect]:
        """The generation that most tell of, where that is another one than is waited for already."""
        run, making = self._run, self._making
        told = self._recall.leading(run.may_be_cut)
        if told in (None, (run.generation, tuple((x.peer, x.share) for x in run.roster), run.cuts)):
            return []
        assert told is not None
        run.generation, members, run.cuts = told
        run.roster = tuple(m.Member(p, run.named(p), "", share, False) for p, share in members)
        run.view, run.started = None, True
        making.change = "the coordinator was started from a backup"
        self._freezing.wait(now_s)
        size = len(members)
        reason = f"the journal is older than generation {run.generation}; waiting for its {workers(size)}"
        fields = {"generation": run.generation, "workers": size, "term": run.term}
        freeze = m.Freeze(run.term, run.generation, making.change, ())
        return [
            run.enter(RunPhase.PAUSED, reason),
            Note("warning", "recalled", fields),
            *(Send(peer, freeze) for peer in run.present),
        ]

    def raise_term(self, now_s: float) -> list[Effect]:
        """Above what was told, if its time has come."""
        run, making = self._run, self._making
        told = self._raises.due(now_s)
        if told is None:
            return []
        run.term = max(run.term, told) + 1
        if run.view is not None:
            run.view = replace(run.view, term=run.term)
        if self._has_made and run.roster:  # its members are in the lower one
            making.want("the coordinator's term was raised")
            if making.forming:
                making.rest()
        return [run.term_entry(), *(run.welcome(peer) for peer in run.workers)]

    def _has_most(self) -> bool:
        """More than half of the generation is connected here."""
        run = self._run
        here = [peer for peer in run.present if run.workers[peer].lost_s is None]
        return 2 * len(here) > len(run.roster)
