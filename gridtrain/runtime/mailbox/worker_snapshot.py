"""What the trainer may know of the run: one record, replaced as a whole whenever something changed.

Decides nothing.  The loop's thread makes it (`runtime.painter`), the trainer's thread reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io

_NO_LEDGER = m.LedgerState()


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What the trainer may know, replaced as a whole whenever something changed.

    Attributes:
        open_round: the round that the trainer may submit to now; None: wait.
        spans: this worker's positions in the open step; `total_samples`: everybody's.
        wanted_state: generation for which a joiner waits for our state (0: none), and whether for the whole.
        wanted_image: followers wait for a copy of our state after this step, or a later one.
        compares_next: after the open step all members compare their states.
        offered_work: this follower has an image to load, or updates to replay.
        shares: of the generation's members, in rank order.
        offered_state: the donor's state is complete and waits to be restored.
        inherited: residuals of members that have left wait to be added to this worker's.
        synced: this worker holds the state that `applied` and `history` name.
        touched: the model is not the one any more that the script made, or a checkpoint had.
        heir: this worker takes residuals over, or has acknowledged some that do not count yet.
        doomed: the round that the trainer has submitted to cannot be committed.
        reload: of a model in stages, this worker's checkpoint that is to be loaded.
        donor, due_digest: who gives this worker its state, and what it is known to be; empty: not known.
        wanted_kept: generation, and this worker's checkpoint that another member waits for.
        discard_after: checkpoints after this step are of no use any more.
        name: what the run calls this worker; "": it is in no generation yet.
        exchange: what the coordinator has chosen for this generation, if that is its to do.
        aside: the state in memory, which is to be written to the disk.
        cuts: of a model in stages, where the generation's stages begin, and the number of blocks.
        first_step: of this generation.
    """

    is_welcomed: bool = False
    phase: io.MemberPhase = io.MemberPhase.APART
    generation: int = 0
    rank: int = 0
    world_size: int = 0
    open_round: m.RoundId | None = None
    spans: tuple[m.Span, ...] = ()
    total_samples: int = 0
    shares: tuple[tuple[m.PeerId, int], ...] = ()
    applied: int = -1
    history: bytes = b""
    ledger: m.LedgerState = _NO_LEDGER
    is_finished: bool = False
    run_state: tuple[str, str] = ("", "")
    requested_state: tuple[int, bool] = (0, False)
    is_state_complete: bool = False
    requested_snapshot: int | None = None
    has_catch_up_work: bool = False
    compare_after_step: bool = False
    has_incoming_residuals: bool = False
    is_synced: bool = False
    is_modified: bool = False
    is_residual_recipient: bool = True
    failing_round: m.RoundId | None = None
    reload: io.LoadCheckpoints | None = None
    state_source: m.PeerId | None = None
    expected_digest: bytes = b""
    requested_checkpoint: tuple[int, m.CheckpointInfo] | None = None
    discard_after: int | None = None
    name: str = ""
    exchange: str = ""
    save_requested: m.CheckpointInfo | None = None
    stage_bounds: tuple[int, ...] = ()
    first_step: int = 0
