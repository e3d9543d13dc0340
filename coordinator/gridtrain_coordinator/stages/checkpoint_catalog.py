"""Decides which stage checkpoints on workers' disks may be used, and detects that a disk is full.

    Setup, StageCheckpointList --> possible? --> confirmed by most members? --> journal  (`CheckpointQuorum`)
                                      |no               |
                                      v                 +--> trusted checkpoints, for `StagePlacement`
                                   violation
    StageCheckpointList while a generation forms --> a needed checkpoint is missing --> another generation

Example: a disk is full when the model is repartitioned.

    the view repartitions         anna holds layers [0 3) in memory.  She has to write them to disk, so that
                                  other workers can fetch their new stages from these checkpoints.
    her list lacks [0 3)          Her disk is full.  The run returns to the previous partition, in which no
                                  other worker needs these layers from her disk; if a stage of that partition
                                  is missing, the run returns to checkpoints.
    her list has new entries      Her disk can be written again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from gridtrain_coordinator.stages.checkpoint_quorum import CheckpointQuorum, ReportedCheckpoints


class CheckpointCatalog:
    """The stage checkpoints of all workers.

    Args:
        quorum: the record of confirmed checkpoints, initially those in the journal.
    """

    def __init__(self, run: RunState, quorum: CheckpointQuorum) -> None:
        self._run, self.quorum = run, quorum

    # -- reports -----------------------------------------------------------------------------------

    def update(self, worker: Worker, message: m.StageCheckpointList) -> list[Effect]:
        """Record the checkpoints that a worker reports, or a violation if one of them is impossible."""
        is_current = message.generation == self._run.generation  # if not, it was sent before the view arrived
        for checkpoint in message.checkpoints:
            if is_impossible(checkpoint, self._run.definition):
                reason = f"reported an impossible checkpoint of step {checkpoint.applied + 1}"
                missing = self.replan_if_missing(worker, is_current=is_current)
                return [RecordViolation(worker.peer, reason), *missing]
        if set(message.checkpoints) - set(worker.checkpoints):
            worker.is_disk_full = False  # its disk can be written again
        worker.record_checkpoints(message.checkpoints)
        return [*self.journal_confirmed(), *self.replan_if_missing(worker, is_current=is_current)]

    def journal_confirmed(self) -> list[Effect]:
        """Return journal entries for states that are newly confirmed or for which new digests are known.

        Because of these entries, a state remains confirmed after the members that reported it have left.
        """
        run = self._run
        if run.definition is None or not run.partition.is_pipeline:
            return []
        reported = {peer: worker.checkpoints for peer, worker in run.workers.items()}
        spans = stage_spans(run.partition.bounds)
        stages = {peer: spans[run.stage_of(peer)] for peer in run.member_order}
        new = self.quorum.update(run.definition.ledger, run.generation, stages, reported)
        entries = [checkpoint_entry(state, digests) for state, digests in new]
        return [run.phase_entry(run.phase, run.reason, checkpoint=entry) for entry in entries]

    def roll_back(self, applied: int) -> None:
        """Discard the checkpoints of steps after step `applied`."""
        self.quorum.roll_back(applied)
        for worker in self._run.workers.values():
            worker.roll_back(applied)

    # -- checkpoints for a placement ---------------------------------------------------------------

    def trusted_checkpoints(self) -> dict[m.PeerId, tuple[m.CheckpointInfo, ...]]:
        """Map each eligible worker to those of its checkpoints that `CheckpointQuorum.is_trusted` accepts."""
        return {
            peer: tuple(x for x in self._run.workers[peer].checkpoints if self.quorum.is_trusted(x))
            for peer in self._run.eligible_workers()
        }

    def add_digests(self, placement: RankPlacement, outcome: Outcome) -> RankPlacement:
        """Return the placement with the digests of the checkpoints that members receive.

        The digests are those that the workers with these checkpoints report.
        """
        at = outcome.applied, outcome.history
        known = {
            (peer, x.layers): x.digest
            for peer, checkpoints in self.trusted_checkpoints().items()
            for x in reversed(checkpoints)
            if (x.applied, x.history) == at
        }
        pieces = {
            peer: tuple(known.get((placement.order[rank], layers), b"") for layers, rank in pieces)
            for peer, pieces in placement.pieces.items()
        }
        digests = self._stage_digests(placement, outcome, known)
        return replace(placement, digests=digests, piece_digests=pieces)

    def _stage_digests(
        self, placement: RankPlacement, outcome: Outcome, known: Mapping[tuple[m.PeerId, m.Span], bytes]
    ) -> dict[m.PeerId, bytes]:
        """Map each member that receives its stage from one checkpoint to the checkpoint's digest.

        A stage that is sent from memory has no digest.

        Args:
            known: the reported digests, by worker and layers.
        """
        order, spans = placement.order, stage_spans(self._run.partition.bounds)
        layout = RankLayout.for_world_size(self._run.partition.stage_count, len(order))
        digests: dict[m.PeerId, bytes] = {}
        for peer, rank in placement.state_sources.items():
            source, layers = order[rank], spans[layout.stage_of(order.index(peer))]
            report = self._run.view_change.freeze_reports.get(source)
            is_live = source in outcome.state_holders and report is not None and report.layers == layers
            if (source, layers) in known and not is_live and peer not in placement.pieces:
                digests[peer] = known[source, layers]
        return digests

    # -- a placement that relied on a missing checkpoint -------------------------------------------

    def replan_if_missing(self, worker: Worker, *, is_current: bool = False) -> list[Effect]:
        """Request another generation if the one that is forming needs a checkpoint that this worker lacks.

        Args:
            is_current: whether the worker reported its checkpoints in this generation.
        """
        run = self._run
        if not run.view_change.is_forming or not run.partition.is_pipeline:
            return []
        if is_current and run.view is not None:
            report = run.view_change.freeze_reports.get(worker.peer)
            has_failed = failed_to_write(run.view, run.member_list, worker.peer, report, worker.checkpoints)
            worker.is_disk_full = worker.is_disk_full or has_failed
        layers = self._missing_checkpoint(worker)
        if layers is None:
            return []
        ends = f"layers {layers.start} to {layers.stop - 1}"
        run.view_change.request(f"{worker.name} has no checkpoint of {ends}, which the pipeline needs")
        run.view_change.reset()
        return [LogEvent("warning", "no_such_piece", {"name": worker.name, "blocks": ends})]

    def _missing_checkpoint(self, worker: Worker) -> m.Span | None:
        """Return the first layers that the view requires of this member but that it does not have.

        Returns None if it has all of them.
        """
        run, view = self._run, self._run.view
        if view is None or worker.peer not in run.member_order:
            return None
        at, own_rank = (view.applied, view.history), run.member_order.index(worker.peer)
        available = {x.layers for x in worker.checkpoints if (x.applied, x.history) == at}
        report = run.view_change.freeze_reports.get(worker.peer)
        if report is not None and report.is_synced and not worker.is_disk_full:
            available.add(report.layers)  # in memory: the worker writes it to disk for its receivers
        layout = RankLayout.for_world_size(run.partition.stage_count, len(run.member_order))
        spans = stage_spans(run.partition.bounds)
        wanted = [layers for member in run.member_list for layers, rank in member.pieces if rank == own_rank]
        own = run.member_list[own_rank]
        is_ready = worker.peer in run.view_change.ready_histories
        if view.applied >= 0 and not (own.joining or own.pieces or is_ready):
            wanted.append(spans[layout.stage_of(own_rank)])
        for rank, member in enumerate(run.member_list):
            if member.donor == own_rank and layout.stage_of(rank) != layout.stage_of(own_rank):
                wanted.append(spans[layout.stage_of(rank)])
        return next((layers for layers in wanted if layers not in available), None)


def is_impossible(checkpoint: m.CheckpointInfo, definition: m.Setup | None) -> bool:
    """Return whether a checkpoint cannot belong to this run.

    Args:
        definition: the run's definition; if it is None, every checkpoint is considered impossible.
    """
    return definition is None or (
        not data_ledger.is_sound_when_released(definition.ledger, checkpoint.ledger)
        or checkpoint.ledger.step != checkpoint.applied + 1
        or checkpoint.layers.stop > defined_cuts(definition)[-1]
    )


def failed_to_write(
    view: m.MembershipView,
    members: Sequence[m.Member],
    peer: m.PeerId,
    report: m.FreezeReport | None,
    checkpoints: Collection[m.CheckpointInfo],
) -> bool:
    """Return whether this member failed to write the state in its memory to disk as `view` requires.

    Args:
        report: the member's report before this view, which names the layers in its memory.
        checkpoints: the checkpoints that the member has reported since it received the view.  It reports
            them after it has written its state, or has failed to write it.
    """
    order = [member.peer for member in members]
    if report is None or not report.is_synced or peer not in order:
        return False
    if any(x.matches(report.layers, view.applied, view.history) for x in checkpoints):
        return False
    return any((report.layers, order.index(peer)) in member.pieces for member in members)


def depends_on_unwritten(
    placement: RankPlacement,
    outcome: Outcome,
    full: Collection[m.PeerId],
    live: Mapping[m.PeerId, m.Span],
    checkpoints: ReportedCheckpoints,
) -> bool:
    """Return whether a member's stage is assembled from a state that a worker in `full` has only in memory.

    Args:
        full: the workers whose disks are full.
        live: by worker, the layers of its state in memory at the step of `outcome`.
    """
    at = outcome.applied, outcome.history
    for layers, rank in {piece for pieces in placement.pieces.values() for piece in pieces}:
        source = placement.order[rank]
        is_written = any(x.matches(layers, *at) for x in checkpoints.get(source, ()))
        if source in full and live.get(source) == layers and not is_written:
            return True
    return False
