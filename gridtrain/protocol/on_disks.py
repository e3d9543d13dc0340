"""Checkpoints of stages on the workers' disks: what they tell of them, and what a plan may count on.

Decides which tales are impossible, what is journalled of them, and when somebody has not what others were to
get from it.  Never decides which step the run goes on from (`protocol.copies`), never reads a checkpoint.

    Setup, Kept --> possible? --> borne out by most? --> Journal         (`protocol.witnesses`)
                      |no               |
                      v                 +--> `trusted`: by worker, for `Placing`
                    Strike
    Kept, while a generation forms --> it lacks a piece, or could not write it --> another plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import Effect, Note, Strike
from gridtrain.protocol.recovery import checkpoint_entry
from gridtrain.protocol.recutting import cuts_of, spans_of
from gridtrain.protocol.roll import Worker
from gridtrain.protocol.run import Run
from gridtrain.protocol.seating import Seating
from gridtrain.protocol.seats import Seats
from gridtrain.protocol.unwritten import leans_on, not_written
from gridtrain.protocol.verdict import Outcome
from gridtrain.protocol.witnesses import Witnesses


class OnDisks:
    """See the module's text.

    Args:
        witnesses: what the journal knows of them.
    """

    def __init__(self, run: Run, making: Making, witnesses: Witnesses) -> None:
        self._run, self._making, self.witnesses = run, making, witnesses

    # -- what is told ------------------------------------------------------------------------------

    def keeps(self, worker: Worker, kept: m.Kept) -> list[Effect]:
        """What is on its disk now; what cannot be so is an offence: it may decide where the run goes on."""
        told = kept.generation == self._run.generation  # else it crossed the View on its way
        for held in kept.states:
            if impossible(held, self._run.reference):
                reason = f"tells of a checkpoint of step {held.applied + 1} that cannot be"
                return [Strike(worker.peer, reason), *self.plan_without(worker, told=told)]
        if set(kept.states) - set(worker.kept):
            worker.unwritten = False  # its disk takes something again
        worker.kept = kept.states
        return [*self.hear(), *self.plan_without(worker, told=told)]

    def hear(self) -> list[Effect]:
        """Of what most members tell the run has come by: that is journalled, for when they are gone."""
        run = self._run
        if run.reference is None or not run.is_pipeline:
            return []
        disks, spans = {peer: worker.kept for peer, worker in run.workers.items()}, spans_of(run.cut)
        seated = {peer: spans[run.stage_of(peer)] for peer in run.order}
        new = self.witnesses.hear(run.reference.ledger, run.generation, seated, disks)
        entries = [checkpoint_entry(state, digests) for state, digests in new]
        return [run.entry(run.phase, run.reason, checkpoint=entry) for entry in entries]

    def back_to(self, applied: int) -> None:
        """The run goes back: what came after counts for nothing."""
        self.witnesses.back_to(applied)
        for worker in self._run.workers.values():
            worker.step = min(worker.step, applied + 1)
            worker.kept = tuple(held for held in worker.kept if held.applied <= applied)

    # -- what a plan may count on ------------------------------------------------------------------

    def trusted(self) -> dict[m.PeerId, tuple[m.Held, ...]]:
        """Of all who may be members what they keep, but for what is known to be something else."""
        return {
            peer: tuple(held for held in self._run.workers[peer].kept if self.witnesses.trust(held))
            for peer in self._run.taking_part()
        }

    def with_digests(self, seated: Seating, outcome: Outcome) -> Seating:
        """With those of the checkpoints that members are given, as who has them tells of them."""
        at = outcome.applied, outcome.history
        known = {
            (peer, held.blocks): held.digest
            for peer, states in self.trusted().items()
            for held in reversed(states)
            if (held.applied, held.history) == at
        }
        pieces = {
            peer: tuple(known.get((seated.order[rank], blocks), b"") for blocks, rank in pieces)
            for peer, pieces in seated.pieces.items()
        }
        return replace(seated, digests=self._given(seated, outcome, known), piece_digests=pieces)

    def _given(
        self, seated: Seating, outcome: Outcome, known: Mapping[tuple[m.PeerId, m.Span], bytes]
    ) -> dict[m.PeerId, bytes]:
        """Of whole stages; a state in memory has none."""
        order, spans = seated.order, spans_of(self._run.cut)
        seats, found = Seats.of(self._run.stages, len(order)), dict[m.PeerId, bytes]()
        for peer, donor in seated.donors.items():
            giver, blocks = order[donor], spans[seats.stage_of(order.index(peer))]
            report = self._making.reports.get(giver)
            live = giver in outcome.holders and report is not None and report.blocks == blocks
            if (giver, blocks) in known and not live and peer not in seated.pieces:
                found[peer] = known[giver, blocks]
        return found

    # -- a plan that counted on too much -----------------------------------------------------------

    def plan_without(self, worker: Worker, *, told: bool = False) -> list[Effect]:
        """Others wait for a checkpoint that is not, or not any more, on the disk which it is to come from.

        `told`: by the worker itself, in this generation.
        """
        making = self._making
        if not making.forming or not self._run.is_pipeline:
            return []
        if told:
            self._mind_unwritten(worker)
        blocks = self._lacks(worker)
        if blocks is None:
            return []
        ends = f"blocks {blocks.start} to {blocks.stop - 1}"
        making.want(f"{worker.name} has no checkpoint of {ends} that it was to give")
        making.rest()
        return [Note("warning", "no_such_piece", {"name": worker.name, "blocks": ends})]

    def _mind_unwritten(self, worker: Worker) -> None:
        view, roster = self._run.view, self._run.roster
        if view is not None:
            report = self._making.reports.get(worker.peer)
            failed = not_written(view, roster, worker.peer, report, worker.kept)
            worker.unwritten = worker.unwritten or failed

    def _lacks(self, worker: Worker) -> m.Span | None:
        """Of what members of the generation that forms, itself among them, are to get from this one: what it
        has not."""
        run, view = self._run, self._run.view
        if view is None or worker.peer not in run.order:
            return None
        at, mine = (view.applied, view.history), run.order.index(worker.peer)
        has = {held.blocks for held in worker.kept if (held.applied, held.history) == at}
        report = self._making.reports.get(worker.peer)
        if report is not None and report.synced and not worker.unwritten:
            has.add(report.blocks)  # in memory: it comes to the disk for those who need it
        seats, spans = Seats.of(run.stages, len(run.order)), spans_of(run.cut)
        wanted = [blocks for member in run.roster for blocks, rank in member.pieces if rank == mine]
        here = run.roster[mine]
        if view.applied >= 0 and not (here.joining or here.pieces or worker.peer in self._making.ready):
            wanted.append(spans[seats.stage_of(mine)])
        for rank, member in enumerate(run.roster):
            if member.donor == mine and seats.stage_of(rank) != seats.stage_of(mine):
                wanted.append(spans[seats.stage_of(rank)])
        return next((blocks for blocks in wanted if blocks not in has), None)

    def leans_on_full_disks(self, seated: Seating, outcome: Outcome, live: Mapping[m.PeerId, m.Span]) -> bool:
        """Somebody is to take what another one has in memory alone, and cannot write down."""
        full = {peer for peer, worker in self._run.workers.items() if worker.unwritten}
        return bool(full) and leans_on(seated, outcome, full, live, self.trusted())


def impossible(held: m.Held, reference: m.Setup | None) -> bool:
    """It is no checkpoint of a run as `reference` defines it; None: nobody has, so nobody can have one."""
    if reference is None or not ledger.balances(held.ledger):
        return True
    sound = ledger.is_sound(ledger.released(reference.ledger, held.ledger), ())
    return not sound or held.ledger.step != held.applied + 1 or held.blocks.stop > cuts_of(reference)[-1]
