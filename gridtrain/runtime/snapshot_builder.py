"""What the trainer may know, made of what the core and the driver's parts say just now.

Decides what of it is offered to the trainer already.  Never wakes it (`runtime.meeting` does).
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.core.member.member import MemberCore
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.state_transfer.catch_up_session import CatchUpSession
from gridtrain.runtime.state_transfer.catch_up_source import CatchUpSource
from gridtrain.runtime.state_transfer.checkpoint_requests import CheckpointRequests
from gridtrain.runtime.state_transfer.residuals import ResidualExchange
from gridtrain.runtime.state_transfer.state_receiver import StateReceiver
from gridtrain.runtime.state_transfer.state_sender import StateSender


class SnapshotBuilder:
    """See the module's text.  Used from the loop's thread alone."""

    def __init__(
        self,
        giving: StateSender,
        taking: StateReceiver,
        donating: CatchUpSource,
        catching_up: CatchUpSession,
        residuals: ResidualExchange,
        disk: CheckpointRequests,
    ) -> None:
        self._state_sender, self._state_receiver = giving, taking
        self._catch_up_source, self._catch_up = donating, catching_up
        self._residuals, self._checkpoint_requests = residuals, disk
        self._assigned: tuple[m.RoundId | None, tuple[m.Span, ...], int] = (None, (), 0)

    def build(self, here: MemberCore) -> WorkerSnapshot:
        generation, seat, state = here.current_generation, here.rank_assignment, here.replica_state
        me = seat.members[seat.rank] if seat is not None else None
        spans, total = self._step_spans(here)
        reload = self._checkpoint_requests.pending_reload(here.term, here.generation, synced=here.is_synced)
        given = self._state_receiver.blobs.is_complete_for(here.generation) and not here.is_synced
        inheritance = self._residuals.incoming
        return WorkerSnapshot(
            is_welcomed=here.coordinator_link.is_welcomed,
            phase=here.phase,
            generation=here.generation,
            rank=seat.rank if seat is not None else 0,
            world_size=seat.world_size if seat is not None else 0,
            open_round=here.next_round,
            spans=spans,
            total_samples=total,
            shares=seat.shares if seat is not None else (),
            applied=here.applied,
            history=here.history,
            ledger=state.ledger,
            is_finished=here.is_finished and here.phase is io.MemberPhase.RUNNING,
            run_state=here.coordinator_link.run_state,
            requested_state=self._state_sender.requested_state,
            is_state_complete=(given and self._catch_up.can_load_checkpoint) or reload is not None,
            requested_snapshot=self._catch_up_source.snapshot_requested_after,
            has_catch_up_work=self._catch_up.has_work,
            compare_after_step=generation is not None and generation.is_comparison_due,
            has_incoming_residuals=bool(inheritance.confirmed),
            is_synced=here.is_synced,
            is_modified=state.is_modified,
            is_residual_recipient=not here.residual_transfer.is_refusing or inheritance.has_unconfirmed,
            failing_round=generation.doomed_round if generation is not None else None,
            reload=reload,
            state_source=generation.incoming_state.source if generation is not None else None,
            expected_digest=me.digest if me is not None else b"",
            requested_checkpoint=self._state_sender.requested_checkpoint,
            discard_after=self._checkpoint_requests.discard_after,
            name=me.name if me is not None else "",
            exchange=seat.exchange if seat is not None else "",
            save_requested=self._checkpoint_requests.save_requested,
            stage_bounds=seat.stage_bounds if seat is not None else (),
            first_step=generation.first_step if generation is not None else 0,
        )

    def _step_spans(self, here: MemberCore) -> tuple[tuple[m.Span, ...], int]:
        """This worker's in the open step, and everybody's samples: worked out once for each round."""
        open_round, generation = here.next_round, here.current_generation
        if open_round is None or generation is None:
            return (), 0
        if open_round != self._assigned[0]:
            self._assigned = (open_round, *generation.data_positions())
        return self._assigned[1:]
