"""With which state a model in stages goes on: the latest of which every stage is in somebody's hands.

Decides where a generation begins once it is known who reports and who keeps which checkpoints, and why it
cannot begin.  Never decides who sits where (`protocol.seating`), never reads a checkpoint.

    step             10        20        23 (the last committed one)
    anna, stage 0    0, 1      0, 1      0           (which blocks they have, in memory or on their disks)
    bert, stage 1    1, 2      1         1
    clara, stage 2   2, 0      2, 0      2           <- dies: nobody has stage 2 of step 23 or 20 any more
    dora, new        -         -         -           ROLLBACK to step 10: dora gets stage 2 from bert

In memory a state is that of the last committed step, or it counts for nothing.  What is held is told by
blocks, so that a state of one cut serves another (`protocol.recutting`); in the picture a stage is a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.core.commit.verdict import Outcome
from gridtrain.core.stages.rank_placement import StateLocations
from gridtrain.core.stages.repartition import overlap_layers, stage_spans, uncovered_spans
from gridtrain_coordinator.run.registry import worker_count_text
from gridtrain_coordinator.stages.checkpoint_quorum import (
    CheckpointQuorum,
    ReportedCheckpoints,
    ReporterMajority,
    StateId,
    count_reports,
    state_id,
)


def locate_state(
    outcome: Outcome, blocks_of: Mapping[m.PeerId, m.Span], disks: ReportedCheckpoints, cuts: Sequence[int]
) -> StateLocations:
    """Who of those with `disks` has what of the state that `outcome` names, and of which stages of `cuts`.

    Args:
        blocks_of: of which blocks each holder's state in memory is.
        disks: of all who may be members, in the order of joining, what they keep.
    """
    at = (outcome.applied, outcome.history)
    number = {span: stage for stage, span in enumerate(stage_spans(cuts))}
    mine = {p: blocks_of[p] for p in disks if p in outcome.holders and p in blocks_of}
    live = {p: number[span] for p, span in mine.items() if span in number}
    kept = {p: [h.layers for h in states if (h.applied, h.history) == at] for p, states in disks.items()}
    exact = {p: {number[span] for span in spans if span in number} for p, spans in kept.items()}
    holds = {p: tuple(dict.fromkeys([*([mine[p]] if p in mine else []), *kept[p]])) for p in disks}
    missing = set(number.values()) - set(live.values()) - {s for own in exact.values() for s in own}
    return StateLocations(live, exact, missing if outcome.applied < 0 else (), held_spans=holds)


def missing_stages(hands: StateLocations, cuts: Sequence[int]) -> list[int]:
    """Stages with a block that nobody has."""
    empty = uncovered_spans([span for spans in hands.held_spans.values() for span in spans], cuts[-1])
    lost = {n for n, span in enumerate(stage_spans(cuts)) if any(overlap_layers(span, gap) for gap in empty)}
    return sorted(lost - set(hands.initial_stages))


def latest_whole_state(
    spec: m.LedgerSpec,
    disks: ReportedCheckpoints,
    blocks: int,
    before: int | None,
    history: bytes | None = None,
    witnesses: CheckpointQuorum | None = None,
) -> Outcome | None:
    """The latest step of which those with `disks` have a checkpoint of every block; None: there is none.

    Args:
        before: the last committed step; a later one is of a history that was given up.  None: not known.
        history: that of `before`; whoever tells of another one tells of what was given up, or never was.
        witnesses: what the run has come by; what neither they nor most of those with `disks` bear out does
            not count.  None: nothing is known of the run yet.
    """
    borne_out = (witnesses or ReporterMajority()).confirmed_states(spec, disks)
    count = count_reports(spec, disks)
    of: dict[StateId, list[m.Span]] = {}
    for states in disks.values():
        for held in states:
            other = history is not None and held.applied == before and held.history != history
            if (before is None or held.applied <= before) and not other:
                of.setdefault(state_id(spec, held), []).append(held.layers)
    whole = [at for at, known in of.items() if not uncovered_spans(known, blocks) and at in borne_out]
    if not whole:
        return None
    applied, its_history, free = max(whole, key=lambda at: (at[0], count[at], at[1]))
    return Outcome(m.Verdict.ABORT, None, applied, its_history, free, frozenset())


@dataclass(frozen=True, slots=True)
class RestartPoint:
    """`outcome`: the state with which the next generation begins, None: there is none, and `reason` why.

    `hands`: who has that; `latest`: who has that of the last committed step.
    """

    outcome: Outcome | None
    state_locations: StateLocations
    reason: str = ""
    last_step_locations: StateLocations = field(default_factory=StateLocations)


def find_restart_point(
    spec: m.LedgerSpec,
    outcome: Outcome | None,
    last: int,
    blocks_of: Mapping[m.PeerId, m.Span],
    disks: ReportedCheckpoints,
    cuts: Sequence[int],
    witnesses: CheckpointQuorum | None = None,
) -> RestartPoint:
    """Where to go on, with any number of workers and any cut: `cuts` only say what `hands` are of.

    Args:
        outcome: what the members' reports say; None: nobody holds anything in memory.
        last: the last step that is known to be committed; -1: none.
        blocks_of, disks: see `held_by`.
        witnesses: see `latest`.
    """
    hands = locate_state(outcome, blocks_of, disks, cuts) if outcome is not None else StateLocations()
    lost = missing_stages(hands, cuts)
    if outcome is not None and not lost:
        return RestartPoint(outcome, hands, last_step_locations=hands)
    before, history = (outcome.applied, outcome.history) if outcome is not None else (None, None)
    back = latest_whole_state(spec, disks, cuts[-1], before, history, witnesses)
    if back is None:
        reason = missing_stages_reason(len(cuts) - 1, lost, last) + unconfirmed_reason(
            spec, disks, cuts[-1], last
        )
        return RestartPoint(None, hands, reason, last_step_locations=hands)
    return RestartPoint(back, locate_state(back, {}, disks, cuts), last_step_locations=hands)


def too_few_reason(stages: int, here: int, hands: StateLocations) -> str:
    """Why the run waits although somebody is here."""
    seated = set(hands.in_memory.values())
    if not seated:
        return f"the model has {stages} stages, and {worker_count_text(here)} {'is' if here == 1 else 'are'} here"
    empty = next((stage for stage in range(stages) if stage not in seated), stages - 1)
    return (
        f"stage {empty} of {stages} has nobody: {worker_count_text(here)} {'is' if here == 1 else 'are'} here, "
        f"{stages} are needed; training goes on when {_joins(stages - here)}"
    )


def missing_stages_reason(stages: int, lost: Sequence[int], applied: int) -> str:
    """Why the run waits although there are enough."""
    which = f"stage {lost[0]}" if len(lost) == 1 else "stages " + ", ".join(map(str, lost))
    return (
        f"nobody here holds {which} of {stages} after step {applied}, and of no earlier step every stage's "
        "checkpoint is here; training goes on when a worker that has it comes back"
    )


def unconfirmed_reason(spec: m.LedgerSpec, disks: ReportedCheckpoints, blocks: int, last: int) -> str:
    """What is told of and does not count, for people; empty: nothing."""
    of: dict[StateId, list[m.Span]] = {}
    for states in disks.values():
        for held in states:
            of.setdefault(state_id(spec, held), []).append(held.layers)
    steps = sorted(
        at[0] + 1 for at, known in of.items() if not uncovered_spans(known, blocks) and at[0] <= last
    )
    if not steps:
        return ""
    return (
        f"; step {steps[-1]} is told of, but neither the journal nor most of the workers here bear it out: "
        "a further worker with its checkpoint would"
    )


def _joins(count: int) -> str:
    return "one joins" if count == 1 else f"{count} join"
