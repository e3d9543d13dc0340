"""Checkpoints of stages on a worker's disk: which count, who gets one, and what a stage is put together from.

Decides that for one member of a model in stages.  Never reads or writes a checkpoint: it keeps book of what
the loop says is on the disk (`Keeping`), and never decides who needs what, which the VIEW says.

    VIEW      PutAside      what is in memory alone, and a stage of the new cut is put together from
              Kept          to the coordinator: a piece that is to come from here is not here
              Reload        all that our stage is put together from is here
              PieceAsk -->  or comes, one piece after the other
              <-- PieceAsk  SendCopy, as soon as it is here
    a step    SendCopy      our latest to the next stage's disk: a dead disk alone must not lose a stage
    START     Discard       what is of later steps: the group went back beyond it
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import (
    DiscardCheckpoints,
    LoadCheckpoints,
    MemberEffect,
    SaveCheckpoint,
    Send,
    SendCheckpoint,
    StoreCheckpointBlock,
)
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.errors import RemoteProtocolError


class MemberCheckpoints:
    """See the module's text.

    Args:
        holding: what is in memory.
        allegiance: the coordinator is told what is here.

    Attributes:
        generation: in which that is said; 0: in none.
        kept: on the disk.
        reloading: of these, what the trainer is to load.
    """

    def __init__(self, holding: ReplicaState, allegiance: CoordinatorLink) -> None:
        self.stored: tuple[m.CheckpointInfo, ...] = ()
        self.loading: tuple[m.CheckpointInfo, ...] = ()
        self._replica_state = holding
        self._coordinator_link = allegiance
        self.generation = 0
        self._saving: m.CheckpointInfo | None = None  # what of our memory is being written to the disk
        self._has_failed_write = (
            False  # and cannot be: it stays in memory until the coordinator has planned anew
        )
        self._pending_requests: dict[
            m.PeerId, m.CheckpointRequest
        ] = {}  # to be answered once it is on the disk

    def find(self, blocks: m.Span) -> m.CheckpointInfo | None:
        """Our checkpoint of these blocks of the state with which this generation begins."""
        at = self._replica_state.position
        return next((held for held in self.stored if held.matches(blocks, *at)), None)

    def report(self) -> list[MemberEffect]:
        """Not before it is known whether what is put aside is there: else it would be planned without."""
        if self._saving is not None and not self._has_failed_write:
            return []
        return self._coordinator_link.send(m.StageCheckpointList(self.stored, self.generation))

    def discard(self, applied: int) -> list[MemberEffect]:
        """Nothing after the last committed step is of this history: the group went back beyond it."""
        kept = tuple(held for held in self.stored if held.applied <= applied)
        if len(kept) == len(self.stored):
            return []
        self.stored = kept
        return [DiscardCheckpoints(applied), *self.report()]

    # -- a generation begins ---------------------------------------------------------------------

    def begin_generation(
        self, seat: RankAssignment, in_stages: bool, up: Collection[m.PeerId]
    ) -> list[MemberEffect]:
        """What others or we ourselves put stages together from; and our own."""
        self._pending_requests.clear()
        self.loading, self.generation = (), seat.generation
        return (
            self._save_memory(seat) + self._report_missing(seat) + (self.load(seat, up) if in_stages else [])
        )

    def enter_standby(self) -> None:
        """No stage is ours any more."""
        self.loading, self._saving = (), None

    def _save_memory(self, seat: RankAssignment) -> list[MemberEffect]:
        """What is in memory alone, and others or we ourselves put a stage of another cut together from."""
        blocks, self._saving, self._has_failed_write = self._replica_state.memory_layers, None, False
        wanted = {piece for member in seat.members for piece in member.pieces}
        if blocks is None or (blocks, seat.rank) not in wanted or self.find(blocks) is not None:
            return []
        self._saving = m.CheckpointInfo(*self._replica_state.position, self._replica_state.ledger, blocks)
        return [SaveCheckpoint(self._saving)]

    def _report_missing(self, seat: RankAssignment) -> list[MemberEffect]:
        """A piece that is to come from here is not here: the coordinator has to plan without it."""
        wanted = {blocks for x in seat.members for blocks, rank in x.pieces if rank == seat.rank}
        coming = self._saving.layers if self._saving is not None else None
        if all(blocks == coming or self.find(blocks) is not None for blocks in wanted):
            return []
        return self.report()

    def load(self, seat: RankAssignment, up: Collection[m.PeerId]) -> list[MemberEffect]:
        """Sent by nobody: it is on our disk, or comes there from those who have it, one after the other."""
        if self._replica_state.is_synced or self._saving is not None:
            return []
        wanted = seat.checkpoint_sources or ((seat.layers, seat.rank),)
        found = [held for blocks, _ in wanted if (held := self.find(blocks)) is not None]
        if len(found) == len(wanted):
            self.loading, self._replica_state.memory_layers = (
                tuple(found),
                None,
            )  # the trainer may have begun to load
            return [LoadCheckpoints(seat.term, seat.generation, self.loading, seat.layers)]
        for blocks, rank in seat.checkpoint_sources:
            peer = seat.members[rank].peer if rank < seat.world_size else seat.own_id
            if self.find(blocks) is None and peer != seat.own_id:
                asks = Send(peer, m.CheckpointRequest(seat.term, seat.generation, blocks))
                return [asks] if peer in up else []
        return []

    # -- the disk holds something else -----------------------------------------------------------

    def update_stored(
        self, states: tuple[m.CheckpointInfo, ...], unwritten: m.CheckpointInfo | None
    ) -> tuple[list[m.CheckpointInfo], bool]:
        """All that is on the disk now, and what cannot be put there.

        Returns what is new, and whether what was to be loaded is gone: then a donor may give it.
        """
        self._has_failed_write = self._has_failed_write or (
            unwritten is not None and unwritten == self._saving
        )
        before, self.stored = self.stored, states
        if self._saving is not None and self.find(self._saving.layers) is not None:
            self._saving = None
        lost = not set(self.loading) <= set(states)
        if lost:
            self.loading = ()
        return [held for held in states if held not in before], lost

    # -- others' disks, and ours for others ------------------------------------------------------

    def replicate(
        self, seat: RankAssignment, new: Sequence[m.CheckpointInfo], up: Collection[m.PeerId]
    ) -> list[MemberEffect]:
        """A dead disk alone must not lose a stage: our latest checkpoint goes to the next stage's too."""
        applied = self._replica_state.applied
        own = [held for held in new if held.layers == seat.layers and held.applied <= applied]
        if not own:
            return []
        keeper = seat.members[seat.layout.backup_rank(seat.rank)].peer
        latest = max(own, key=lambda held: held.applied)
        return [SendCheckpoint(keeper, seat.term, seat.generation, latest)] if keeper in up else []

    def serve(self, seat: RankAssignment, peer: m.PeerId, asked: m.CheckpointRequest) -> list[MemberEffect]:
        """A checkpoint that another member needs for its stage.  Raises `RemoteProtocolError`."""
        rank = seat.rank_of(peer)
        if rank is None or (asked.layers, seat.rank) not in seat.members[rank].pieces:
            raise RemoteProtocolError(
                f"rank {rank} asked for {_describe_layers(asked.layers)}, which it is to get elsewhere"
            )
        held = self.find(asked.layers)
        if held is None:
            self._pending_requests[peer] = asked
            return []
        return [SendCheckpoint(peer, seat.term, seat.generation, held, is_awaited=True)]

    def serve_pending(self, seat: RankAssignment) -> list[MemberEffect]:
        """To whom it was not given, as it was not here yet."""
        asked, self._pending_requests = self._pending_requests, {}
        return [effect for peer, piece in asked.items() for effect in self.serve(seat, peer, piece)]

    def receive_block(
        self, seat: RankAssignment, in_stages: bool, peer: m.PeerId, block: m.CheckpointBlock
    ) -> list[MemberEffect]:
        """Raises `RemoteProtocolError` for a stage that is not ours to keep."""
        owner, rank, held = seat.layout.backed_up_rank(seat.rank), seat.rank_of(peer), block.checkpoint
        is_piece = rank is not None and (held.layers, rank) in seat.checkpoint_sources
        if rank is not None and is_piece and (held.applied, held.history) == self._replica_state.position:
            known = seat.checkpoint_source_digest(held.layers, rank)
            if known and held.digest != known:
                raise RemoteProtocolError(
                    f"rank {rank} sent a checkpoint of {_describe_layers(held.layers)} with the digest "
                    f"{held.digest.hex()[:12]}, known is {known.hex()[:12]}"
                )
            return [StoreCheckpointBlock(peer, block)]
        blocks = seat.layers_of_stage(seat.layout.stage_of(owner))
        if not in_stages or rank != owner or held.layers != blocks:
            raise RemoteProtocolError(
                f"rank {rank} sent a checkpoint of {_describe_layers(held.layers)}; "
                f"rank {seat.rank} keeps those of rank {owner} alone"
            )
        if held.applied > self._replica_state.applied + 1:
            raise RemoteProtocolError(
                f"rank {owner} sent a checkpoint of step {held.applied + 1}; "
                f"{self._replica_state.applied + 1} is open here"
            )
        return [StoreCheckpointBlock(peer, block)]


def _describe_layers(blocks: m.Span) -> str:
    return f"blocks {blocks.start} to {blocks.stop - 1}"
