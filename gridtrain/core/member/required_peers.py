"""Whom a member needs by its side in a generation, and which of them gives it the state that it lacks.

Decides that from the member's seat alone: pure functions.  Never decides who gets which seat or who gives
to whom, which is the coordinator's plan, and never knows who is connected (`protocol.edges`).

    in one piece    the exchange's ranks, the root, the donor; these two need everybody
    in stages       the exchange's ranks, the root; in the pipeline, as a ring, the one before and the one
                    after; who gives us the state, or pieces of it, and to whom we give that

An edge is needed at both of its ends or at none.
"""

from __future__ import annotations

from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group.member_events import TrainerJoined


def choose_state_source(seat: RankAssignment, in_stages: bool) -> int | None:
    """The rank that the coordinator chose, else the lowest that holds the state (of our stage)."""
    if in_stages:
        mine = seat.members[seat.rank]
        if mine.pieces:
            return None
        group = seat.layout.stage_ranks(seat.stage)
        lowest = next((rank for rank in group if not seat.members[rank].joining), None)
        return mine.donor if 0 <= mine.donor < seat.world_size else lowest
    named = (member.donor for member in seat.members if member.joining)
    holders = (rank for rank, member in enumerate(seat.members) if not member.joining)
    return next((rank for rank in named if 0 <= rank < seat.world_size), next(holders, None))


def required_ranks(seat: RankAssignment, entered: TrainerJoined | None) -> frozenset[int]:
    """Ranks that this member must be connected to before it is ready, and in each step."""
    if entered is not None and entered.is_pipelined:
        return _required_in_pipeline(seat, entered)
    centres = {ROOT, choose_state_source(seat, in_stages=False)}
    if seat.rank in centres:
        return frozenset(range(seat.world_size)) - {seat.rank}
    edges = (
        entered.neighbours_by_exchange.get(seat.exchange, entered.neighbours)
        if entered is not None
        else _no_neighbours
    )
    return (edges(seat.rank, seat.world_size) | _without_none(centres)) - {seat.rank}


def _required_in_pipeline(seat: RankAssignment, entered: TrainerJoined) -> frozenset[int]:
    """The ends of the pipeline keep each other's checkpoints, so that it is a ring."""
    mine, here = seat.rank, seat.members[seat.rank]
    if mine == ROOT:
        return frozenset(range(seat.world_size)) - {ROOT}
    near: set[int | None] = {ROOT, seat.layout.backup_rank(mine), seat.layout.backed_up_rank(mine)}
    if here.joining:
        near.add(choose_state_source(seat, in_stages=True))
    near |= {rank for _, rank in here.pieces if rank < seat.world_size}
    for rank, member in enumerate(seat.members):
        if member.donor == mine or any(giver == mine for _, giver in member.pieces):
            near.add(rank)
    return (entered.neighbours(mine, seat.world_size, seat.stage_bounds) | _without_none(near)) - {mine}


def _without_none(ranks: set[int | None]) -> frozenset[int]:
    return frozenset(rank for rank in ranks if rank is not None)


def _no_neighbours(rank: int, world_size: int) -> frozenset[int]:
    return frozenset()
