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

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.verdict import Outcome
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.stages.rank_placement import RankPlacement
from gridtrain.core.stages.repartition import defined_cuts, stage_spans
from gridtrain_coordinator.run.events import Effect, LogEvent, RecordViolation
from gridtrain_coordinator.run.journal_recovery import checkpoint_entry
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange
from gridtrain_coordinator.stages.checkpoint_quorum import CheckpointQuorum
from gridtrain_coordinator.stages.full_disks import depends_on_unwritten, failed_to_write


class CheckpointCatalog:
    """See the module's text.

    Args:
        witnesses: what the journal knows of them.
    """

    def __init__(self, run: RunState, making: ViewChange, witnesses: CheckpointQuorum) -> None:
        self._run, self._view_change, self.quorum = run, making, witnesses

    # -- what is told ------------------------------------------------------------------------------

    def update(self, worker: Worker, kept: m.StageCheckpointList) -> list[Effect]:
        """What is on its disk now; what cannot be so is an offence: it may decide where the run goes on."""
        told = kept.generation == self._run.generation  # else it crossed the View on its way
        for held in kept.checkpoints:
            if is_impossible(held, self._run.definition):
                reason = f"tells of a checkpoint of step {held.applied + 1} that cannot be"
                return [RecordViolation(worker.peer, reason), *self.replan_if_missing(worker, told=told)]
        if set(kept.checkpoints) - set(worker.checkpoints):
            worker.is_disk_full = False  # its disk takes something again
        worker.checkpoints = kept.checkpoints
        return [*self.journal_confirmed(), *self.replan_if_missing(worker, told=told)]

    def journal_confirmed(self) -> list[Effect]:
        """Of what most members tell the run has come by: that is journalled, for when they are gone."""
        run = self._run
        if run.definition is None or not run.is_pipeline:
            return []
        disks, spans = (
            {peer: worker.checkpoints for peer, worker in run.workers.items()},
            stage_spans(run.effective_partition),
        )
        seated = {peer: spans[run.stage_of(peer)] for peer in run.member_order}
        new = self.quorum.update(run.definition.ledger, run.generation, seated, disks)
        entries = [checkpoint_entry(state, digests) for state, digests in new]
        return [run.phase_entry(run.phase, run.reason, checkpoint=entry) for entry in entries]

    def roll_back(self, applied: int) -> None:
        """The run goes back: what came after counts for nothing."""
        self.quorum.roll_back(applied)
        for worker in self._run.workers.values():
            worker.step = min(worker.step, applied + 1)
            worker.checkpoints = tuple(held for held in worker.checkpoints if held.applied <= applied)

    # -- what a plan may count on ------------------------------------------------------------------

    def trusted_checkpoints(self) -> dict[m.PeerId, tuple[m.CheckpointInfo, ...]]:
        """Of all who may be members what they keep, but for what is known to be something else."""
        return {
            peer: tuple(held for held in self._run.workers[peer].checkpoints if self.quorum.is_trusted(held))
            for peer in self._run.eligible_workers()
        }

    def add_digests(self, seated: RankPlacement, outcome: Outcome) -> RankPlacement:
        """With those of the checkpoints that members are given, as who has them tells of them."""
        at = outcome.applied, outcome.history
        known = {
            (peer, held.layers): held.digest
            for peer, states in self.trusted_checkpoints().items()
            for held in reversed(states)
            if (held.applied, held.history) == at
        }
        pieces = {
            peer: tuple(known.get((seated.order[rank], blocks), b"") for blocks, rank in pieces)
            for peer, pieces in seated.pieces.items()
        }
        return replace(seated, digests=self._stage_digests(seated, outcome, known), piece_digests=pieces)

    def _stage_digests(
        self, seated: RankPlacement, outcome: Outcome, known: Mapping[tuple[m.PeerId, m.Span], bytes]
    ) -> dict[m.PeerId, bytes]:
        """Of whole stages; a state in memory has none."""
        order, spans = seated.order, stage_spans(self._run.effective_partition)
        seats, found = RankLayout.for_world_size(self._run.stage_count, len(order)), dict[m.PeerId, bytes]()
        for peer, donor in seated.state_sources.items():
            giver, blocks = order[donor], spans[seats.stage_of(order.index(peer))]
            report = self._view_change.reports.get(giver)
            live = giver in outcome.holders and report is not None and report.layers == blocks
            if (giver, blocks) in known and not live and peer not in seated.pieces:
                found[peer] = known[giver, blocks]
        return found

    # -- a plan that counted on too much -----------------------------------------------------------

    def replan_if_missing(self, worker: Worker, *, told: bool = False) -> list[Effect]:
        """Others wait for a checkpoint that is not, or not any more, on the disk which it is to come from.

        `told`: by the worker itself, in this generation.
        """
        making = self._view_change
        if not making.is_forming or not self._run.is_pipeline:
            return []
        if told:
            self._check_full_disk(worker)
        blocks = self._missing_checkpoint(worker)
        if blocks is None:
            return []
        ends = f"blocks {blocks.start} to {blocks.stop - 1}"
        making.request(f"{worker.name} has no checkpoint of {ends} that it was to give")
        making.reset()
        return [LogEvent("warning", "no_such_piece", {"name": worker.name, "blocks": ends})]

    def _check_full_disk(self, worker: Worker) -> None:
        view, roster = self._run.view, self._run.member_list
        if view is not None:
            report = self._view_change.reports.get(worker.peer)
            failed = failed_to_write(view, roster, worker.peer, report, worker.checkpoints)
            worker.is_disk_full = worker.is_disk_full or failed

    def _missing_checkpoint(self, worker: Worker) -> m.Span | None:
        """Of what members of the generation that forms, itself among them, are to get from this one: what it
        has not."""
        run, view = self._run, self._run.view
        if view is None or worker.peer not in run.member_order:
            return None
        at, mine = (view.applied, view.history), run.member_order.index(worker.peer)
        has = {held.layers for held in worker.checkpoints if (held.applied, held.history) == at}
        report = self._view_change.reports.get(worker.peer)
        if report is not None and report.is_synced and not worker.is_disk_full:
            has.add(report.layers)  # in memory: it comes to the disk for those who need it
        seats, spans = (
            RankLayout.for_world_size(run.stage_count, len(run.member_order)),
            stage_spans(run.effective_partition),
        )
        wanted = [blocks for member in run.member_list for blocks, rank in member.pieces if rank == mine]
        here = run.member_list[mine]
        if view.applied >= 0 and not (
            here.joining or here.pieces or worker.peer in self._view_change.ready_histories
        ):
            wanted.append(spans[seats.stage_of(mine)])
        for rank, member in enumerate(run.member_list):
            if member.donor == mine and seats.stage_of(rank) != seats.stage_of(mine):
                wanted.append(spans[seats.stage_of(rank)])
        return next((blocks for blocks in wanted if blocks not in has), None)

    def depends_on_full_disks(
        self, seated: RankPlacement, outcome: Outcome, live: Mapping[m.PeerId, m.Span]
    ) -> bool:
        """Somebody is to take what another one has in memory alone, and cannot write down."""
        full = {peer for peer, worker in self._run.workers.items() if worker.is_disk_full}
        return bool(full) and depends_on_unwritten(seated, outcome, full, live, self.trusted_checkpoints())


def is_impossible(held: m.CheckpointInfo, reference: m.Setup | None) -> bool:
    """It is no checkpoint of a run as `reference` defines it; None: nobody has, so nobody can have one."""
    if reference is None or not data_ledger.is_balanced(held.ledger):
        return True
    sound = data_ledger.is_sound(data_ledger.release_holders(reference.ledger, held.ledger), ())
    return not sound or held.ledger.step != held.applied + 1 or held.layers.stop > defined_cuts(reference)[-1]
