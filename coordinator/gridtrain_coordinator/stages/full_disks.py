"""Members whose disk took nothing when the model was cut anew, and plans that lean on what it should have.

Decides who was to write down what it has in memory and has not, and whether a plan needs that of it again.
Never decides how the run goes on then: that is `protocol.in_stages`.

    VIEW, cut anew      anna, who has [0 3) in memory, puts it aside: others take their stages from there
    Kept without it     her disk is full.  Her memory has it still, so in the cut of before nobody needs her
                        disk; where that has a stage in nobody's hands the run goes back to what is on disks
    Kept with new ones  she can write again
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gridtrain.core import messages as m
from gridtrain.core.commit.verdict import Outcome
from gridtrain.core.stages.rank_placement import RankPlacement
from gridtrain.core.stages.repartition import stage_spans
from gridtrain_coordinator.stages.checkpoint_quorum import ReportedCheckpoints


def failed_to_write(
    view: m.MembershipView,
    roster: Sequence[m.Member],
    peer: m.PeerId,
    report: m.FreezeReport | None,
    kept: Collection[m.CheckpointInfo],
) -> bool:
    """Whether this member was to put its memory aside for `view`, and cannot.

    Args:
        report: what it said of its memory before the VIEW.
        kept: what it says of its disk since; it says nothing before that is written, or cannot be.
    """
    order = [member.peer for member in roster]
    if report is None or not report.is_synced or peer not in order:
        return False
    if any(held.matches(report.layers, view.applied, view.history) for held in kept):
        return False
    return any((report.layers, order.index(peer)) in member.pieces for member in roster)


def depends_on_unwritten(
    seated: RankPlacement,
    outcome: Outcome,
    full: Collection[m.PeerId],
    blocks_of: Mapping[m.PeerId, m.Span],
    disks: ReportedCheckpoints,
) -> bool:
    """Whether somebody puts its stage together from what one of `full` has in memory alone.

    Args:
        blocks_of: of which blocks the states in memory are; of a state that `outcome` names.
    """
    at = outcome.applied, outcome.history
    for blocks, rank in {piece for pieces in seated.pieces.values() for piece in pieces}:
        giver = seated.order[rank]
        written = any(held.matches(blocks, *at) for held in disks.get(giver, ()))
        if giver in full and blocks_of.get(giver) == blocks and not written:
            return True
    return False


def find_partition(blocks: Collection[m.Span], *cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The first of the cuts in which all these are stages; (): none."""
    return next((one for one in cuts if one and set(blocks) <= set(stage_spans(one))), ())
