"""Decides which stage checkpoints a worker saves, loads, discards, requests, and sends to other members.

    MembershipView       SaveCheckpoint       writes the state in memory, if a new stage is assembled from it
                         StageCheckpointList  reports that a checkpoint expected on this disk is missing
                         LoadCheckpoints      if all checkpoints of this member's stage are on this disk
                         CheckpointRequest    otherwise, requests the missing checkpoints, one at a time
    CheckpointRequest    SendCheckpoint       sends the checkpoint as soon as it is on this disk
    new checkpoint       SendCheckpoint       sends the latest one to a member in the next stage, as a backup
    StartGeneration      DiscardCheckpoints   deletes checkpoints of steps that the group has rolled back

The I/O loop owns the files and lists them (`StageCheckpointsChanged`).  The member list determines which
member needs which checkpoint.  Checkpoints are transferred by `runtime.state_transfer.checkpoint_copy` and
stored by `training.checkpoint.stage_checkpoint_store`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import (
    DiscardCheckpoints,
    LoadCheckpoints,
    MemberEffect,
    SaveCheckpoint,
    Send,
    SendCheckpoint,
    StoreCheckpointBlock,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.errors import RemoteProtocolError


class MemberCheckpoints:
    """Stage checkpoints of one worker.

    Attributes:
        stored: all checkpoints on the disk.
        loading: the stored checkpoints that the trainer is loading.
    """

    def __init__(self, replica_state: ReplicaState, coordinator_link: CoordinatorLink) -> None:
        self._replica_state = replica_state
        self._coordinator_link = coordinator_link
        self.stored: tuple[m.CheckpointInfo, ...] = ()
        self.loading: tuple[m.CheckpointInfo, ...] = ()
        self._generation = 0  # the generation that reports name; 0 if there is none
        self._saving: m.CheckpointInfo | None = None  # the state in memory, while it is being written
        self._has_failed_write = False  # the state in memory cannot be written
        self._pending_requests: dict[m.PeerId, m.CheckpointRequest] = {}  # for checkpoints not stored yet

    def find(self, layers: m.Span) -> m.CheckpointInfo | None:
        """Return the stored checkpoint of these layers of the current state, or None if there is none."""
        position = self._replica_state.position
        return next((stored for stored in self.stored if stored.matches(layers, *position)), None)

    def report(self) -> list[MemberEffect]:
        """Send the list of stored checkpoints to the coordinator.

        Nothing is sent while the state in memory is being written, because otherwise the coordinator would
        plan the stages without that checkpoint.
        """
        if self._saving is not None and not self._has_failed_write:
            return []
        return self._coordinator_link.send(m.StageCheckpointList(self.stored, self._generation))

    def discard(self, applied: int) -> list[MemberEffect]:
        """Discard the checkpoints of steps after `applied`, because the group has rolled these steps back."""
        stored = tuple(checkpoint for checkpoint in self.stored if checkpoint.applied <= applied)
        if len(stored) == len(self.stored):
            return []
        self.stored = stored
        return [DiscardCheckpoints(applied), *self.report()]

    # -- a generation begins or ends -------------------------------------------------------------

    def begin_generation(
        self, assignment: RankAssignment, is_pipelined: bool, connected: Collection[m.PeerId]
    ) -> list[MemberEffect]:
        """Save the state that others need, report missing checkpoints, and load this member's stage."""
        self._pending_requests.clear()
        self.loading, self._generation = (), assignment.generation
        effects = self._save_memory(assignment) + self._report_missing(assignment)
        return effects + (self.load(assignment, connected) if is_pipelined else [])

    def enter_standby(self) -> None:
        """Stop loading and saving: as a standby, this worker holds no stage."""
        self.loading, self._saving = (), None

    def leave_generation(self) -> None:
        self._generation = 0

    def _save_memory(self, assignment: RankAssignment) -> list[MemberEffect]:
        """Write the state in memory to disk if a stage of the new partition is assembled from it."""
        layers, self._saving, self._has_failed_write = self._replica_state.memory_layers, None, False
        wanted = {source for member in assignment.members for source in member.pieces}
        if layers is None or (layers, assignment.rank) not in wanted or self.find(layers) is not None:
            return []
        self._saving = m.CheckpointInfo(*self._replica_state.position, self._replica_state.ledger, layers)
        return [SaveCheckpoint(self._saving)]

    def _report_missing(self, assignment: RankAssignment) -> list[MemberEffect]:
        """Report the stored checkpoints if one that the member list expects is missing.

        The coordinator then makes a new plan.
        """
        wanted = {layers for x in assignment.members for layers, rank in x.pieces if rank == assignment.rank}
        saving = self._saving.layers if self._saving is not None else None
        if all(layers == saving or self.find(layers) is not None for layers in wanted):
            return []
        return self.report()

    def load(self, assignment: RankAssignment, connected: Collection[m.PeerId]) -> list[MemberEffect]:
        """Load the stage if all of its checkpoints are stored; otherwise request the first missing one."""
        if self._replica_state.is_synced or self._saving is not None:
            return []
        wanted = assignment.checkpoint_sources or ((assignment.layers, assignment.rank),)
        found = [stored for layers, _ in wanted if (stored := self.find(layers)) is not None]
        term, generation = assignment.term, assignment.generation
        if len(found) == len(wanted):
            self.loading = tuple(found)
            self._replica_state.release_memory()
            return [LoadCheckpoints(term, generation, self.loading, assignment.layers)]
        for layers, rank in assignment.checkpoint_sources:
            is_member = rank < assignment.world_size
            peer = assignment.members[rank].peer if is_member else assignment.own_id
            if self.find(layers) is None and peer != assignment.own_id:
                request = Send(peer, m.CheckpointRequest(term, generation, layers))
                return [request] if peer in connected else []
        return []

    def finish_loading(self) -> None:
        """Record that the trainer has loaded the generation's state."""
        self.loading = ()

    # -- the disk --------------------------------------------------------------------------------

    def set_stored(self, stored: tuple[m.CheckpointInfo, ...]) -> None:
        """Record the checkpoints that the trainer found on the disk when it joined."""
        self.stored = stored

    def update_stored(
        self, stored: tuple[m.CheckpointInfo, ...], failed_write: m.CheckpointInfo | None
    ) -> tuple[list[m.CheckpointInfo], bool]:
        """Record the checkpoints that are now on the disk, and the one that could not be written, if any.

        Return the new checkpoints, and whether a checkpoint that was being loaded is gone.  In that case, the
        state may be requested from a state source instead.
        """
        self._has_failed_write = self._has_failed_write or (
            failed_write is not None and failed_write == self._saving
        )
        before, self.stored = self.stored, stored
        if self._saving is not None and self.find(self._saving.layers) is not None:
            self._saving = None
        is_lost = not set(self.loading) <= set(stored)
        if is_lost:
            self.loading = ()
        return [checkpoint for checkpoint in stored if checkpoint not in before], is_lost

    # -- other members ---------------------------------------------------------------------------

    def replicate(
        self, assignment: RankAssignment, new: Sequence[m.CheckpointInfo], connected: Collection[m.PeerId]
    ) -> list[MemberEffect]:
        """Send the latest new checkpoint of this member's stage to the backup member in the next stage."""
        applied = self._replica_state.applied
        own = [x for x in new if x.layers == assignment.layers and x.applied <= applied]
        if not own:
            return []
        backup = assignment.members[assignment.layout.backup_rank(assignment.rank)].peer
        latest = max(own, key=lambda checkpoint: checkpoint.applied)
        if backup not in connected:
            return []
        return [SendCheckpoint(backup, assignment.term, assignment.generation, latest)]

    def serve(
        self, assignment: RankAssignment, peer: m.PeerId, request: m.CheckpointRequest
    ) -> list[MemberEffect]:
        """Send a checkpoint from which another member assembles its stage, now or as soon as it is stored.

        Raises:
            RemoteProtocolError: the member list does not assign this checkpoint to that member.
        """
        rank = assignment.rank_of(peer)
        if rank is None or (request.layers, assignment.rank) not in assignment.members[rank].pieces:
            raise RemoteProtocolError(
                f"rank {rank} requested a checkpoint of {_describe_layers(request.layers)}, for which rank "
                f"{assignment.rank} is not its source"
            )
        stored = self.find(request.layers)
        if stored is None:
            self._pending_requests[peer] = request
            return []
        return [SendCheckpoint(peer, assignment.term, assignment.generation, stored, is_awaited=True)]

    def serve_pending(self, assignment: RankAssignment) -> list[MemberEffect]:
        """Answer the requests that arrived before their checkpoints were stored."""
        requests, self._pending_requests = self._pending_requests, {}
        return [effect for peer, x in requests.items() for effect in self.serve(assignment, peer, x)]

    def receive_block(
        self, assignment: RankAssignment, is_pipelined: bool, peer: m.PeerId, block: m.CheckpointBlock
    ) -> list[MemberEffect]:
        """Store a block of a checkpoint that this member needs for its stage, or that it backs up.

        Raises:
            RemoteProtocolError: the block belongs to any other checkpoint, the checkpoint's digest differs
                from the one in the member list, or its step cannot have been committed yet.
        """
        checkpoint, rank = block.checkpoint, assignment.rank_of(peer)
        position = (checkpoint.applied, checkpoint.history)
        if (
            rank is not None
            and (checkpoint.layers, rank) in assignment.checkpoint_sources
            and position == self._replica_state.position
        ):
            known = assignment.checkpoint_source_digest(checkpoint.layers, rank)
            if known and checkpoint.digest != known:
                raise RemoteProtocolError(
                    f"rank {rank} sent a checkpoint of {_describe_layers(checkpoint.layers)} with the digest "
                    f"{checkpoint.digest.hex()[:12]}; the member list has the digest {known.hex()[:12]}"
                )
            return [StoreCheckpointBlock(peer, block)]
        owner = assignment.layout.backed_up_rank(assignment.rank)
        layers = assignment.layers_of_stage(assignment.layout.stage_of(owner))
        if not is_pipelined or rank != owner or checkpoint.layers != layers:
            raise RemoteProtocolError(
                f"rank {rank} sent a checkpoint of {_describe_layers(checkpoint.layers)}; "
                f"rank {assignment.rank} stores only checkpoints of rank {owner}"
            )
        if checkpoint.applied > self._replica_state.applied + 1:
            raise RemoteProtocolError(
                f"rank {owner} sent a checkpoint of step {checkpoint.applied + 1}, but no step after "
                f"step {self._replica_state.applied + 2} can have been committed yet"
            )
        return [StoreCheckpointBlock(peer, block)]


def _describe_layers(layers: m.Span) -> str:
    return f"layers {layers.start} to {layers.stop - 1}"
