"""Finds the latest step from which a pipeline can continue, with all stages, or explains why there is none.

The layers that each worker has, in memory or on disk:

    step             10        20        23 (the last committed step)
    anna, stage 0    0, 1      0, 1      0
    bert, stage 1    1, 2      1         1
    clara, stage 2   2, 0      2, 0      2           clara is lost: no worker now has layer 2 of step 23 or 20
    dora, new        -         -         -           rollback to step 10: dora receives stage 2 from bert

A state in memory is used only if it is that of the last committed step.  States are recorded by layer, so
that a state from one partition can be used in another; in this table, each stage is one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gridtrain.core import messages as m
from gridtrain.core.commit.verdict import Outcome
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain.core.stages.repartition import overlap_layers, stage_spans, uncovered_spans
from gridtrain.quantities import format_count
from gridtrain_coordinator.stages.checkpoint_quorum import (
    CheckpointQuorum,
    ReportedCheckpoints,
    StateId,
    count_reports,
    majority_states,
    state_id,
)


def locate_state(
    outcome: Outcome, live: Mapping[m.PeerId, m.Span], reported: ReportedCheckpoints, bounds: Sequence[int]
) -> StateLocations:
    """Find the workers that hold each part of the state named by `outcome`.

    Args:
        live: by worker, the layers of the state that it holds in memory.
        reported: the checkpoints of all eligible workers, in joining order.
        bounds: the stage bounds to which the stage numbers in the result refer.
    """
    at = (outcome.applied, outcome.history)
    number = {span: stage for stage, span in enumerate(stage_spans(bounds))}
    own = {p: live[p] for p in reported if p in outcome.state_holders and p in live}
    in_memory = {p: number[span] for p, span in own.items() if span in number}
    on_disk = {
        p: [x.layers for x in theirs if (x.applied, x.history) == at] for p, theirs in reported.items()
    }
    stages_on_disk = {p: {number[span] for span in spans if span in number} for p, spans in on_disk.items()}
    held = {p: tuple(dict.fromkeys([*([own[p]] if p in own else []), *on_disk[p]])) for p in reported}
    is_initial = outcome.applied < 0
    locations = StateLocations(in_memory, stages_on_disk, held_spans=held, is_initial=is_initial)
    missing = set(number.values()) - locations.exact_stages
    return replace(locations, initial_stages=missing) if is_initial else locations


def missing_stages(locations: StateLocations, bounds: Sequence[int]) -> list[int]:
    """Return the stages with a layer that no worker holds, except those that a member can create."""
    lost = _incomplete_stages([span for spans in locations.held_spans.values() for span in spans], bounds)
    return [stage for stage in lost if stage not in locations.initial_stages]


def _incomplete_stages(spans: Sequence[m.Span], bounds: Sequence[int]) -> list[int]:
    """Return the stages with a layer that `spans` do not include."""
    gaps = uncovered_spans(spans, bounds[-1])
    return [n for n, span in enumerate(stage_spans(bounds)) if any(overlap_layers(span, gap) for gap in gaps)]


def latest_whole_state(
    spec: m.LedgerSpec,
    reported: ReportedCheckpoints,
    layers: int,
    before: int | None,
    history: bytes | None = None,
    quorum: CheckpointQuorum | None = None,
) -> Outcome | None:
    """Return the latest confirmed state for which these workers have checkpoints of all layers.

    Returns None if there is no such state.

    Args:
        layers: the number of layers in the model.
        before: the last committed step; later checkpoints belong to an abandoned history.  None if unknown.
        history: the history of step `before`; a checkpoint of that step with another history is not used.
        quorum: the quorum that confirms states; None if nothing is known about the run yet.
    """
    confirmed = quorum.confirmed_states if quorum is not None else majority_states
    candidates = confirmed(spec, reported)
    whole = []
    for at, spans in _reported_spans(spec, reported).items():
        is_kept = before is None or at[0] < before or (at[0] == before and history in (None, at[1]))
        if is_kept and at in candidates and not uncovered_spans(spans, layers):
            whole.append(at)
    if not whole:
        return None
    count = count_reports(spec, reported)
    applied, its_history, ledger = max(whole, key=lambda at: (at[0], count[at], at[1]))
    return Outcome(m.Verdict.ABORT, None, applied, its_history, ledger, frozenset())


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """The state with which the next generation starts.

    Attributes:
        outcome: the outcome that names the state; None if there is no state.
        reason: the reason why there is no state; empty if there is one.
        remedy: how the run can continue nevertheless; empty if there is a state.
        state_locations: the workers that hold the state.
        last_step_locations: the workers that hold the state of the last committed step.
    """

    outcome: Outcome | None
    state_locations: StateLocations
    reason: str = ""
    remedy: str = ""
    last_step_locations: StateLocations = field(default_factory=StateLocations)


def find_restart_point(
    spec: m.LedgerSpec,
    outcome: Outcome | None,
    last: int,
    live: Mapping[m.PeerId, m.Span],
    reported: ReportedCheckpoints,
    bounds: Sequence[int],
    quorum: CheckpointQuorum | None = None,
) -> RestartPoint:
    """Find the state from which the run continues, regardless of how many workers there are.

    Args:
        outcome: the outcome according to the members' reports; None if no worker holds a state in memory.
        last: the last step that is known to be committed; -1 if there is none.
        live, reported: see `locate_state`.
        bounds: the stage bounds to which the stage numbers in the result refer.
        quorum: see `latest_whole_state`.
    """
    locations = locate_state(outcome, live, reported, bounds) if outcome is not None else StateLocations()
    lost = missing_stages(locations, bounds)
    if outcome is not None and not lost:
        return RestartPoint(outcome, locations, last_step_locations=locations)
    before, history = (outcome.applied, outcome.history) if outcome is not None else (None, None)
    earlier = latest_whole_state(spec, reported, bounds[-1], before, history, quorum)
    if earlier is None:
        at = last
        if outcome is None:
            lost, at = most_complete_state(spec, reported, bounds, last)
        reason = missing_stages_reason(len(bounds) - 1, lost, at)
        remedy = REMEDY + unconfirmed_reason(spec, reported, bounds[-1], last)
        return RestartPoint(None, locations, reason, remedy, last_step_locations=locations)
    return RestartPoint(earlier, locate_state(earlier, {}, reported, bounds), last_step_locations=locations)


def too_few_reason(stages: int, here: int, locations: StateLocations) -> str:
    """Explain why the run waits for more workers."""
    held, present, missing = set(locations.in_memory.values()), _present_text(here), stages - here
    until = "one joins" if missing == 1 else f"{missing} join"
    if not held:
        return (
            f"the model has {format_count(stages, 'stage')}, and {present}; training continues when {until}"
        )
    empty = next((stage for stage in range(stages) if stage not in held), stages - 1)
    return (
        f"stage {empty} of {stages} has no worker: {present}, but {stages} are needed; "
        f"training continues when {until}"
    )


def _present_text(here: int) -> str:
    return f"{format_count(here, 'worker')} {'is' if here == 1 else 'are'} present"


def lost_state_reason(restart: RestartPoint, stages: int, here: int) -> str:
    """Explain why a run that has no state to continue from is waiting."""
    few = f"; {_present_text(here)}, but {stages} are needed" if here < stages else ""
    return f"{restart.reason}{few}; {restart.remedy}"


REMEDY = (
    "training continues when workers that hold what is missing, in memory or on disk, join: start the "
    "stopped workers again with the same command; only if their disks are lost, end this run with gridtrain "
    "finish, and start a new one with another --state"
)
"""How a run can continue if a stage of its state is missing."""

UNSAVED_REMEDY = (
    "no checkpoint of this run is known: the steps are lost, unless a worker rejoins that still holds what "
    "is missing, in memory or in a checkpoint that it wrote when it left; if they are lost, end this run "
    "with gridtrain finish, and start a new one with another --state"
)
"""The text that replaces `REMEDY` if no checkpoint of the run is known."""


def missing_stages_reason(stages: int, lost: Sequence[int], applied: int) -> str:
    """Explain that no connected worker holds these stages of the state after step `applied`.

    Args:
        stages: the number of stages in the partition.
        lost: the missing stages; not empty.
    """
    which = f"stage {lost[0]}" if len(lost) == 1 else "stages " + ", ".join(map(str, lost))
    return (
        f"no connected worker holds {which} of {stages} after step {applied + 1}, nor do the connected "
        "workers have all stages of an earlier step"
    )


EXPORT = "gridtrain export, given the state folders of all workers in one folder, writes"
EXPORT_LATEST = f"{EXPORT} the latest step for which they hold all stages, if there is one"


def end_reason(restart: RestartPoint, last: int, whole_disk: str = "") -> str:
    """Explain why no model is written if the owner ends the run at this point.

    Args:
        last: the last committed step.
        whole_disk: the name of a worker whose disk has all stages of the restart point; "" if there is none.
    """
    if restart.outcome is None:
        return f"{restart.reason}; {EXPORT_LATEST}"
    applied = restart.outcome.applied
    if applied < 0:
        return "no step was committed"
    cause = f"the connected workers could not continue from step {applied + 1}"
    if applied < last:
        cause = f"the connected workers do not hold all stages of step {last + 1}"
    export = f"gridtrain export, given the state folder of {whole_disk}, writes" if whole_disk else EXPORT
    return f"{cause}; {export} the model of step {applied + 1}"


def most_complete_state(
    spec: m.LedgerSpec, reported: ReportedCheckpoints, bounds: Sequence[int], last: int
) -> tuple[list[int], int]:
    """Find the incomplete state on disk that lacks the fewest stages.

    Returns the missing stages, and the last step in the state.  If there is no such state, returns all stages
    and `last`.

    Args:
        last: the last step that is known to be committed; states after it are not considered.
    """
    states = _reported_spans(spec, reported).items()
    lacking = [(_incomplete_stages(spans, bounds), at[0]) for at, spans in states if at[0] <= last]
    found = [(lost, step) for lost, step in lacking if lost]
    every = list(range(len(bounds) - 1))
    return min([*found, (every, last)], key=lambda each: (len(each[0]), -each[1]))


def _reported_spans(spec: m.LedgerSpec, reported: ReportedCheckpoints) -> dict[StateId, list[m.Span]]:
    spans: dict[StateId, list[m.Span]] = {}
    for checkpoints in reported.values():
        for x in checkpoints:
            spans.setdefault(state_id(spec, x), []).append(x.layers)
    return spans


def unconfirmed_reason(spec: m.LedgerSpec, reported: ReportedCheckpoints, layers: int, last: int) -> str:
    """Describe a whole state that has been reported but not confirmed; return "" if there is none."""
    spans = _reported_spans(spec, reported)
    steps = [at[0] + 1 for at, theirs in spans.items() if not uncovered_spans(theirs, layers)]
    step = max((step for step in steps if step <= last + 1), default=0)
    if not step:
        return ""
    return (
        f"; step {step} is reported, but neither the journal nor most of the connected workers confirm it; "
        "training continues when another worker reports a checkpoint of this step"
    )
