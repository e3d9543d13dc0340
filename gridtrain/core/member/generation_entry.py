"""A VIEW has come: which seat it gives this worker, and what the worker is and lacks in that generation.

Decides that once for each VIEW, and makes the `Generation`.  Never decides whether the VIEW counts
(`protocol.course`), and nothing that happens in the generation later.

    roster, cuts --> Seat           raises where no honest coordinator would have made it
    verdict      --> applied here, given up, or the state is lacking
    state        --> as it is in memory | put together from checkpoints | on its way from a donor | as built
                     a model that has followed since is none to begin with: Stop
    edges        --> let go, dial
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import LogEvent, MemberEffect, SetCatchUpTarget, Stop, TrainerJoined
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.generation import Generation
from gridtrain.core.stages.repartition import defined_cuts
from gridtrain.errors import JoinRefused, RemoteProtocolError


def make_rank_assignment(
    me: m.PeerId, view: m.MembershipView, pages: Sequence[m.MemberListPage], entered: TrainerJoined | None
) -> RankAssignment:
    """Raises `RemoteProtocolError`."""
    roster = tuple(member for page in pages for member in page.members)
    cuts = _stage_bounds(view, entered)
    seat = RankAssignment(me, view.term, view.generation, roster, max(1, len(cuts) - 1), view.exchange, cuts)
    choices = entered.neighbours_by_exchange if entered is not None else {}
    if len(roster) != view.world_size or seat.rank_of(me) is None:
        raise RemoteProtocolError(f"VIEW of {view.world_size} came with a roster of {len(roster)}")
    if view.exchange and view.exchange not in choices:
        raise RemoteProtocolError(f"VIEW with the exchange {view.exchange!r}, which is none to choose")
    if len(roster) % seat.stages:
        raise RemoteProtocolError(f"VIEW of {len(roster)} members of a model in {seat.stages} stages")
    return seat


def _stage_bounds(view: m.MembershipView, entered: TrainerJoined | None) -> tuple[int, ...]:
    """Where this generation's stages begin; (): it is in one piece.  Raises `RemoteProtocolError`."""
    if entered is None or not entered.is_pipelined:
        return ()
    defined = defined_cuts(entered.setup)
    cuts = view.stage_bounds or defined
    ascending = cuts[0] == 0 and all(a < b for a, b in pairwise(cuts))
    if len(cuts) < 2 or not ascending or cuts[-1] != defined[-1]:
        raise RemoteProtocolError(f"VIEW of a model of {defined[-1]} blocks, cut at {list(cuts)[:8]}")
    return cuts


def enter_generation(
    view: m.MembershipView,
    seat: RankAssignment,
    lasting: MemberContext,
    before: Generation | None,
    now_s: float,
) -> tuple[Generation | None, list[MemberEffect]]:
    """The generation, and what its VIEW leads to before anybody speaks in it; None: this worker stops.

    Args:
        before: the generation that it was in.
    """
    holding, setup, mine = lasting.replica_state, lasting.setup, seat.members[seat.rank]
    old = before.rank_assignment if before is not None else None
    was_synced, at = holding.is_synced, holding.position
    known = old.members if old is not None else ()
    effects: list[MemberEffect] = [
        *own_name_events(lasting.coordinator_link.name, known, seat.members, seat.rank)
    ]
    lasting.coordinator_link.set_name(mine.name)
    if before is not None:
        effects += before.end(view)
    else:
        holding.apply_verdict(view, None)
    holding.begin_generation(seat.layers, may_recall=at == (view.applied, view.history))
    if _is_model_stale(view, mine, lasting, was_in_none=before is None):
        return None, [*effects, Stop(_stale_model_error())]
    missed_some = old is not None and old.generation + 1 < view.generation
    left_behind = missed_some and was_synced and not holding.is_synced
    lasting.coordinator_link.term, holding.ledger = view.term, view.ledger
    lasting.step_pace.step_interrupted()
    if not holding.is_synced:
        # The first generation starts from the state of the member that is not `joining`.
        begins = view.applied < 0 and not mine.joining
        holding.await_state(view, seat.layers, begins and setup is not None and setup.checkpoint is None)
    follows = setup is not None and setup.can_catch_up and view.applied >= 0
    chained = not (lasting.is_pipelined or follows or holding.is_synced)
    generation = Generation(seat, view.applied + 1, lasting, now_s, chained=chained)
    effects += lasting.checkpoints.begin_generation(seat, lasting.is_pipelined, lasting.peer_links.connected)
    effects += lasting.residual_transfer.begin_generation(seat, view.applied, view.history, holding.is_synced)
    fields = {
        "generation": view.generation, "rank": seat.rank, "of": seat.world_size, "reason": view.reason,
    }  # fmt: skip
    effects.append(LogEvent("view", fields))
    if left_behind:
        effects.append(LogEvent("left_behind", {"step": view.applied}))
    lasting.peer_links.begin_generation(seat)
    if holding.is_synced:
        lasting.catch_up.sources = ()
    elif lasting.catch_up.sources:
        effects.append(SetCatchUpTarget(view.applied, view.history))
    return generation, [*effects, *lasting.disconnect_strangers(seat), *generation.dial_members()]


def _is_model_stale(
    view: m.MembershipView, mine: m.Member, lasting: MemberContext, was_in_none: bool
) -> bool:
    """Whether it is named for the model that its script made, or for the checkpoint with which it came, and
    the model has followed since.  A stage is built anew."""
    if mine.joining or lasting.is_pipelined or not lasting.replica_state.is_modified:
        return False
    return was_in_none if view.applied >= 0 else not lasting.replica_state.is_synced


def _stale_model_error() -> JoinRefused:
    return JoinRefused(
        "stale-model",
        "nobody holds the run's state any more, and this worker's model is of steps that are gone",
        remedy="restart this worker: it begins from its latest checkpoint, or as the script does",
    )


def own_name_events(
    asked: str, before: Sequence[m.Member], roster: Sequence[m.Member], rank: int
) -> list[LogEvent]:
    """What a member says of its name, and of newcomers that wanted the same one.

    Args:
        asked: what it has called itself so far.
        before, roster: of the generation before, and of this one, in which it has `rank`.
    """
    own = roster[rank].name
    notes = [LogEvent("named", {"name": own, "asked": asked})] if own != asked else []
    known = {member.peer for member in before}
    alike = re.compile(re.escape(own) + r"-[0-9]+")
    return notes + [
        LogEvent("namesake", {"name": own, "other": member.name})
        for member in roster
        if member.peer not in known and alike.fullmatch(member.name)
    ]
