"""Handles a new MembershipView: the worker's rank and stage, and whether its state and model are up to date.

    member list, partition --> RankAssignment; an error if a correct coordinator would not have sent them
    verdict                --> the open step is applied or aborted, or the member lacks the required state
    state                  --> in memory | from checkpoints | from a state source | as the script built it
                               Stop if the model has changed since it was built, and none of these is possible
    connections            --> disconnect unknown peers, dial members

`view_changes` decides whether a MembershipView is valid or outdated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gridtrain.core import messages as m
from gridtrain.core.commit.data_ledger import is_sound
from gridtrain.core.group.member_events import LogEvent, MemberEffect, SetCatchUpTarget, Stop, TrainerJoined
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.generation import Generation
from gridtrain.core.member.scalar_means import MeanKey
from gridtrain.core.stages.repartition import defined_cuts
from gridtrain.errors import JoinRefused, RemoteProtocolError


def make_rank_assignment(
    own_id: m.PeerId, view: m.MembershipView, listed: Sequence[m.Member], trainer: TrainerJoined | None
) -> RankAssignment:
    """Return the rank assignment of a MembershipView, whose member list is `listed`.

    Raises:
        RemoteProtocolError: the member list, the exchange, the partition or the ledger is not valid for this
            worker.
    """
    members = with_own_addresses(own_id, listed)
    bounds = _stage_bounds(view, trainer)
    stages = max(1, len(bounds) - 1)
    assignment = RankAssignment(own_id, view.term, view.generation, members, stages, view.exchange, bounds)
    choices = trainer.neighbours_by_exchange if trainer is not None else {}
    if len(members) != view.world_size or assignment.rank_of(own_id) is None:
        raise RemoteProtocolError(
            f"the member list from the coordinator has {len(members)} entries; it must have "
            f"{view.world_size} entries and contain this worker"
        )
    if view.exchange and view.exchange not in choices:
        raise RemoteProtocolError(
            f"the coordinator chose the exchange {view.exchange!r}, which the script does not offer"
        )
    if len(members) % stages:
        raise RemoteProtocolError(
            f"the member list from the coordinator has {len(members)} entries; this number must be a "
            f"multiple of the number of stages ({stages})"
        )
    peers = {member.peer for member in members}
    is_possible = trainer is None or is_sound(trainer.setup.ledger, view.ledger, peers)
    if not is_possible or view.ledger.step != view.applied + 1:
        raise RemoteProtocolError(
            f"the ledger from the coordinator is impossible after step {view.applied}: {view.ledger!r:.200}"
        )
    return assignment


def with_own_addresses(own_id: m.PeerId, members: Sequence[m.Member]) -> tuple[m.Member, ...]:
    """Return the members with the addresses that this worker dials.

    The address of a member that dials this worker is "".  If this worker itself has an address in the list,
    the keys determine which of two members dials (see `m.Member.address`).
    """
    has_address = any(member.peer == own_id and member.address for member in members)
    return tuple(
        replace(member, address="") if has_address and member.address and member.peer >= own_id else member
        for member in members
    )


def _stage_bounds(view: m.MembershipView, trainer: TrainerJoined | None) -> tuple[int, ...]:
    """Return the first layer of each stage, then the number of layers; () for an unpartitioned model.

    Raises:
        RemoteProtocolError: the MembershipView's partition is not valid for this model.
    """
    if trainer is None or not trainer.is_pipelined:
        return ()
    defined = defined_cuts(trainer.setup)
    bounds = view.stage_bounds or defined
    is_ascending = bounds[0] == 0 and all(a < b for a, b in pairwise(bounds))
    if len(bounds) < 2 or not is_ascending or bounds[-1] != defined[-1]:
        raise RemoteProtocolError(
            f"the coordinator divides a model of {defined[-1]} layers at {list(bounds)[:8]}; the bounds must "
            "ascend from 0 to the number of layers"
        )
    return bounds


def enter_generation(
    view: m.MembershipView,
    assignment: RankAssignment,
    context: MemberContext,
    before: Generation | None,
    now_s: float,
) -> tuple[Generation | None, list[MemberEffect]]:
    """End the generation `before`, and create the next one.

    Return the new generation, or None if this worker must stop, and the effects to be executed before the
    generation handles any message.
    """
    state, setup, own = context.replica_state, context.setup, assignment.members[assignment.rank]
    old = before.rank_assignment if before is not None else None
    was_synced, position = state.is_synced, state.position
    link, catch_up, links = context.coordinator_link, context.catch_up, context.peer_links
    known = old.members if old is not None else ()
    effects: list[MemberEffect] = [*own_name_events(link.name, known, assignment.members, assignment.rank)]
    link.set_name(own.name)
    known_means: Mapping[MeanKey, float] = {}
    if before is not None:
        effects += before.end(view, must_know_round=own.joining)
        known_means = before.known_means if state.is_synced else {}  # steps may be repeated
    else:
        state.apply_verdict(view, None)
    state.begin_generation(assignment.layers, may_recall=position == (view.applied, view.history))
    if _is_model_stale(view, own, context, was_outside=before is None):
        return None, [*effects, Stop(_stale_model_error())]
    missed_some = old is not None and old.generation + 1 < view.generation
    is_left_behind = missed_some and was_synced and not state.is_synced
    link.term = view.term
    context.step_pace.step_interrupted()
    # A member that is not `joining` holds the state that the run starts from.
    as_built = not own.joining and _starts_as_built(view, context)
    state.accept_view(view, assignment.layers, as_built=as_built)
    can_catch_up = setup is not None and setup.can_catch_up and view.applied >= 0
    chained = not (context.is_pipelined or can_catch_up or state.is_synced)
    first_step = view.applied + 1
    generation = Generation(assignment, first_step, context, now_s, known_means=known_means, chained=chained)
    effects += context.checkpoints.begin_generation(assignment, context.is_pipelined, links.connected)
    effects += context.residual_transfer.begin_generation(assignment)
    rank, world_size = assignment.rank, assignment.world_size
    fields = {"generation": view.generation, "rank": rank, "of": world_size, "reason": view.reason}
    effects.append(LogEvent("view", fields))
    if is_left_behind:
        event = "set_back" if first_step <= position[0] else "left_behind"
        effects.append(LogEvent(event, {"step": position[0] + 1, "to": first_step}))
    links.begin_generation(assignment)
    if state.is_synced:
        catch_up.already_synced()
    elif catch_up.sources:
        effects.append(SetCatchUpTarget(view.applied, view.history))
    return generation, [*effects, *context.disconnect_strangers(assignment), *generation.dial_members()]


def _starts_as_built(view: m.MembershipView, context: MemberContext) -> bool:
    """Return whether `view` starts from the model that the script built or loaded from its checkpoint.

    The worker may have been in another generation that ended before its state arrived; in that case the model
    is still unchanged.
    """
    if context.setup is None:
        return False
    stored = context.setup.checkpoint
    if stored is None:
        return view.applied < 0
    is_at_checkpoint = (view.applied, view.history) == (stored.applied, stored.history)
    return is_at_checkpoint and not context.replica_state.is_modified


def _is_model_stale(
    view: m.MembershipView, own: m.Member, context: MemberContext, *, was_outside: bool
) -> bool:
    """Return whether `view` expects the model that the script built or loaded, but the model has changed.

    Catch-up or an earlier generation may have changed the model.  A stage is never stale, because it is
    rebuilt.
    """
    if own.joining or context.is_pipelined or not context.replica_state.is_modified:
        return False
    return (was_outside and view.applied >= 0) or not context.replica_state.is_synced


def _stale_model_error() -> JoinRefused:
    return JoinRefused(
        "stale-model",
        "the run continues from a state that this worker no longer has in memory",
        remedy="restart this worker, as the agent does with --restarts; it then begins from its latest "
        "checkpoint, from another worker's state, or from the initial model",
    )


def own_name_events(
    requested: str, before: Sequence[m.Member], members: Sequence[m.Member], rank: int
) -> list[LogEvent]:
    """Return log events about a new name of this member, and about newcomers that requested the same name.

    Args:
        requested: the name that this member requested or, if the coordinator has already named it, its
            current name.
        before: the members of the previous generation.
        members: the members of this generation, in which this member has rank `rank`.
    """
    own = members[rank].name
    events = [LogEvent("named", {"name": own, "asked": requested})] if own != requested else []
    known = {member.peer for member in before}
    numbered = re.compile(re.escape(own) + r"-[0-9]+")
    return events + [
        LogEvent("namesake", {"name": own, "other": member.name})
        for member in members
        if member.peer not in known and numbered.fullmatch(member.name)
    ]
