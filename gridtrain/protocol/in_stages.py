"""What only a run of a model in stages needs: every stage in somebody's hands, spares, whole steps.

Decides when such a run goes on, goes back or waits, once it is known who is here and what they hold.
Never decides where the model is cut and who sits where (`protocol.placing`), never judges a checkpoint.

    all REPORTs are here --> every stage in somebody's hands --------------> the next generation
                             no, but of an earlier step on disks ----------> ROLLBACK, the next generation
                             neither --------------------------------------> PAUSED, until somebody comes
    fewer workers than stages: PAUSED for `recut_s`, then a new cut over those who are here, if the model fits
    generation made -------> who has no seat is a spare, and is told why

See `protocol.copies` for which step, `protocol.on_disks` for what is told of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.copies import Begin, where
from gridtrain.protocol.generations import Generations, beginning
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import Effect, Note, RunPhase, Send
from gridtrain.protocol.on_disks import OnDisks
from gridtrain.protocol.partings import Partings
from gridtrain.protocol.placing import Live, Placed, Placing
from gridtrain.protocol.roll import Worker, workers
from gridtrain.protocol.run import Run
from gridtrain.protocol.seating import Hands
from gridtrain.protocol.seats import Seats
from gridtrain.protocol.verdict import Outcome, judge


class InStages:
    """See the module's text."""

    def __init__(
        self,
        run: Run,
        making: Making,
        partings: Partings,
        generations: Generations,
        placing: Placing,
        disks: OnDisks,
    ) -> None:
        self._run, self._making, self._partings = run, making, partings
        self._generations, self._placing, self._disks = generations, placing, disks

    # -- the next generation -----------------------------------------------------------------------

    def first(self, now_s: float) -> list[Effect]:
        """Nobody is a member.  Where steps were committed only checkpoints of all stages bring them back."""
        run = self._run
        begin = self._where(None, run.reached - 1, {}, known=run.reached > 0)
        if begin.outcome is None and not run.reached:
            begin = Begin(beginning(), Hands())
        found = self._placing.place(begin, {}, now_s)
        if isinstance(found, str) or begin.outcome is None:
            self._making.change = ""
            return self._block(str(found))
        back = self._roll_back(run.reached - 1, begin.outcome.applied, known=False)
        return back + self._make(begin.outcome, found, now_s)

    def go_on(self, reports: Mapping[m.PeerId, m.Report], patience_s: float, now_s: float) -> list[Effect]:
        """All who live have reported: go on where every stage is in somebody's hands, else pause.

        Args:
            reports: of those who hold a state.
            patience_s: so long members that are away are waited for where something is missing.
        """
        run = self._run
        assert run.reference is not None
        outcome: Outcome | None = None
        if reports:
            held = [(member.peer, member.share) for member in run.roster]
            eldest_first = {peer: reports[peer] for peer in run.eldest_first(reports.keys())}
            outcome = judge(eldest_first, run.reference.ledger, held, in_stages=True)
            if self._is_over(outcome):
                return self._finish_frozen(outcome)
        elif not run.started:
            outcome = beginning()
        live = {peer: report.blocks for peer, report in reports.items()}
        last = outcome.applied if outcome is not None else run.reached - 1
        begin = self._where(outcome, last, live)
        enough = len(run.taking_part()) >= run.stages
        certain = outcome is not None and begin.outcome is outcome and enough
        if not certain and now_s < patience_s:
            self._making.until_s = patience_s  # whoever has it may be on the way back
            return []
        begin, found = self._placed(outcome, begin, last, live, now_s)
        if isinstance(found, str) or begin.outcome is None:
            return self._block(str(found))
        as_it_is = outcome is not None and begin.outcome is outcome
        back = [] if as_it_is else self._roll_back(last, begin.outcome.applied, known=outcome is not None)
        self._making.rest()
        return back + self._make(begin.outcome, found, now_s)

    def _placed(
        self, outcome: Outcome | None, begin: Begin, last: int, live: Live, now_s: float
    ) -> tuple[Begin, Placed | str]:
        """Seats for the state to begin with; without what is only in the memory of those whose disks are full
        and others would need, where that can be."""
        in_memory = live if outcome is not None and begin.outcome is outcome else {}
        found = self._placing.place(begin, in_memory, now_s)
        if not self._leans_on_full_disks(found, begin, in_memory):
            return begin, found
        before = self._placing.as_before(begin, in_memory, now_s)
        if before is not None and not self._leans_on_full_disks(before, begin, in_memory):
            return begin, before
        written = {p: span for p, span in in_memory.items() if not self._run.workers[p].unwritten}
        begin = self._where(outcome, last, written)
        as_it_is = begin.outcome is outcome
        return begin, self._placing.place(begin, written if as_it_is else {}, now_s)

    def _leans_on_full_disks(self, found: Placed | str, begin: Begin, live: Live) -> bool:
        if isinstance(found, str) or begin.outcome is None:
            return False
        return self._disks.leans_on_full_disks(found[0], begin.outcome, live)

    def _where(self, outcome: Outcome | None, last: int, live: Live, *, known: bool = True) -> Begin:
        """See `copies.where`.  `known`: there were steps that tales could undo."""
        run = self._run
        assert run.reference is not None
        witnesses = self._disks.witnesses if known else None
        disks = self._disks.trusted()
        return where(run.reference.ledger, outcome, last, live, disks, run.cut, witnesses)

    def _make(self, outcome: Outcome, placed: Placed, now_s: float) -> list[Effect]:
        seated, cuts = placed
        self._placing.settle(cuts)
        seated = self._disks.with_digests(seated, outcome)
        made = self._generations.make(outcome, now_s, seated=seated)
        return made + self.spare(seated.spares)

    def _roll_back(self, last: int, applied: int, *, known: bool) -> list[Effect]:
        """Model and ledger together, journalled and shown; `known`: members have told what `last` is."""
        run, making = self._run, self._making
        run.reached = applied + 1
        self._disks.back_to(applied)
        if last <= applied:  # who could say how far it had come is gone, or it is the beginning
            return [Note("warning", "restored", {"step": applied + 1})] if applied >= 0 else []
        lost = {"from": last + 1, "to": applied + 1, "at_least": not known}
        reason = f"a stage of step {last + 1} is in nobody's hands any more; back to step {applied + 1}"
        making.change = f"{making.change}; {reason}" if making.change else reason
        return [run.entry(run.phase, reason, rollback=lost), Note("error", "rollback", lost)]

    def _block(self, reason: str) -> list[Effect]:
        """The run is paused until somebody comes; each message asks anew whether it can go on."""
        run = self._run
        if (run.phase, run.reason) == (RunPhase.PAUSED, reason):
            return []
        run.enter(RunPhase.PAUSED, reason)
        # Without members the journal says that it waits: then nobody is there who could come back to a seat.
        phase = RunPhase.PAUSED if run.roster else RunPhase.WAITING
        return [
            run.entry(phase, reason, reached=run.reached),
            Note("error", "paused", {"reason": reason}),
            *(run.told(peer) for peer in run.workers),
        ]

    # -- spares ------------------------------------------------------------------------------------

    def admit(self, newcomers: Sequence[Worker]) -> list[Effect] | None:
        """While the run trains: they are told once why they have no seat yet; None: they bring a generation
        about."""
        if self._placing.makes_a_replica(newcomers):
            return None
        return self.spare([worker.peer for worker in newcomers if not worker.spare])

    def spare(self, peers: Sequence[m.PeerId]) -> list[Effect]:
        run, view = self._run, self._run.view
        if view is None:
            return []
        seats = Seats.of(run.stages, len(run.roster))
        reason = (
            f"spare: {seats.stages} stages x {seats.replicas} are {workers(seats.world_size)}; it takes the "
            f"seat of whoever leaves, or one of a further replica when {seats.stages} are spare"
        )
        for peer in run.present:
            run.workers[peer].spare = ""
        for peer in peers:
            run.workers[peer].spare = reason
        told = m.Spared(run.term, run.generation, view.applied, view.history, view.ledger, reason)
        return [Send(peer, told) for peer in peers]

    # -- the end -----------------------------------------------------------------------------------

    def _is_over(self, outcome: Outcome) -> bool:
        """The last step is committed, and of each stage somebody has it, or had it when it said so."""
        run = self._run
        assert run.reference is not None
        if not ledger.finished(run.reference.ledger, outcome.ledger):
            return False
        done = {run.stage_of(peer) for peer in outcome.holders | run.finished}
        return done >= set(range(run.stages))

    def _finish_frozen(self, outcome: Outcome) -> list[Effect]:
        """Some have left at the end already, and the others need no generation any more to hear of it."""
        run, reason = self._run, "the run is over"
        told = m.Spared(
            run.term, run.generation + 1, outcome.applied, outcome.history, outcome.ledger, reason
        )
        self._making.rest()
        here = [peer for peer in self._making.reports if peer in run.workers]
        return [*(Send(peer, told) for peer in here), *self._partings.finish()]
