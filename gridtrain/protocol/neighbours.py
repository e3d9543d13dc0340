"""Whom a member needs by its side in a generation, and which of them gives it the state that it lacks.

Decides that from the member's seat alone: pure functions.  Never decides who gets which seat or who gives
to whom, which is the coordinator's plan, and never knows who is connected (`protocol.edges`).

    in one piece    the exchange's ranks, the root, the donor; these two need everybody
    in stages       the exchange's ranks, the root; in the pipeline, as a ring, the one before and the one
                    after; who gives us the state, or pieces of it, and to whom we give that

An edge is needed at both of its ends or at none.
"""

from __future__ import annotations

from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.member_io import Enter
from gridtrain.protocol.round import ROOT


def donor_of(seat: Seat, in_stages: bool) -> int | None:
    """The rank that the coordinator chose, else the lowest that holds the state (of our stage)."""
    if in_stages:
        mine = seat.roster[seat.rank]
        if mine.pieces:
            return None
        group = seat.seats.group(seat.stage)
        lowest = next((rank for rank in group if not seat.roster[rank].joining), None)
        return mine.donor if 0 <= mine.donor < seat.world_size else lowest
    named = (member.donor for member in seat.roster if member.joining)
    holders = (rank for rank, member in enumerate(seat.roster) if not member.joining)
    return next((rank for rank in named if 0 <= rank < seat.world_size), next(holders, None))


def needed(seat: Seat, entered: Enter | None) -> frozenset[int]:
    """Ranks that this member must be connected to before it is ready, and in each step."""
    if entered is not None and entered.in_stages:
        return _needed_in_stages(seat, entered)
    centres = {ROOT, donor_of(seat, in_stages=False)}
    if seat.rank in centres:
        return frozenset(range(seat.world_size)) - {seat.rank}
    edges = entered.choices.get(seat.exchange, entered.edges) if entered is not None else _nobody
    return (edges(seat.rank, seat.world_size) | _known(centres)) - {seat.rank}


def _needed_in_stages(seat: Seat, entered: Enter) -> frozenset[int]:
    """The ends of the pipeline keep each other's checkpoints, so that it is a ring."""
    mine, here = seat.rank, seat.roster[seat.rank]
    if mine == ROOT:
        return frozenset(range(seat.world_size)) - {ROOT}
    near: set[int | None] = {ROOT, seat.seats.keeper(mine), seat.seats.kept_for(mine)}
    if here.joining:
        near.add(donor_of(seat, in_stages=True))
    near |= {rank for _, rank in here.pieces if rank < seat.world_size}
    for rank, member in enumerate(seat.roster):
        if member.donor == mine or any(giver == mine for _, giver in member.pieces):
            near.add(rank)
    return (entered.edges(mine, seat.world_size, seat.cuts) | _known(near)) - {mine}


def _known(ranks: set[int | None]) -> frozenset[int]:
    return frozenset(rank for rank in ranks if rank is not None)


def _nobody(rank: int, world_size: int) -> frozenset[int]:
    return frozenset()
