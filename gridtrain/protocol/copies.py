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

from gridtrain.protocol import messages as m
from gridtrain.protocol.recutting import gaps, overlap, spans_of
from gridtrain.protocol.roll import workers
from gridtrain.protocol.seating import Hands
from gridtrain.protocol.verdict import Outcome
from gridtrain.protocol.witnesses import Disks, Nothing, State, Witnesses, state_of, told


def held_by(
    outcome: Outcome, blocks_of: Mapping[m.PeerId, m.Span], disks: Disks, cuts: Sequence[int]
) -> Hands:
    """Who of those with `disks` has what of the state that `outcome` names, and of which stages of `cuts`.

    Args:
        blocks_of: of which blocks each holder's state in memory is.
        disks: of all who may be members, in the order of joining, what they keep.
    """
    at = (outcome.applied, outcome.history)
    number = {span: stage for stage, span in enumerate(spans_of(cuts))}
    mine = {p: blocks_of[p] for p in disks if p in outcome.holders and p in blocks_of}
    live = {p: number[span] for p, span in mine.items() if span in number}
    kept = {p: [h.blocks for h in states if (h.applied, h.history) == at] for p, states in disks.items()}
    exact = {p: {number[span] for span in spans if span in number} for p, spans in kept.items()}
    holds = {p: tuple(dict.fromkeys([*([mine[p]] if p in mine else []), *kept[p]])) for p in disks}
    missing = set(number.values()) - set(live.values()) - {s for own in exact.values() for s in own}
    return Hands(live, exact, missing if outcome.applied < 0 else (), holds=holds)


def lacking(hands: Hands, cuts: Sequence[int]) -> list[int]:
    """Stages with a block that nobody has."""
    empty = gaps([span for spans in hands.holds.values() for span in spans], cuts[-1])
    lost = {n for n, span in enumerate(spans_of(cuts)) if any(overlap(span, gap) for gap in empty)}
    return sorted(lost - set(hands.begins))


def latest(
    spec: m.LedgerSpec,
    disks: Disks,
    blocks: int,
    before: int | None,
    history: bytes | None = None,
    witnesses: Witnesses | None = None,
) -> Outcome | None:
    """The latest step of which those with `disks` have a checkpoint of every block; None: there is none.

    Args:
        before: the last committed step; a later one is of a history that was given up.  None: not known.
        history: that of `before`; whoever tells of another one tells of what was given up, or never was.
        witnesses: what the run has come by; what neither they nor most of those with `disks` bear out does
            not count.  None: nothing is known of the run yet.
    """
    borne_out = (witnesses or Nothing()).bear_out(spec, disks)
    count = told(spec, disks)
    of: dict[State, list[m.Span]] = {}
    for states in disks.values():
        for held in states:
            other = history is not None and held.applied == before and held.history != history
            if (before is None or held.applied <= before) and not other:
                of.setdefault(state_of(spec, held), []).append(held.blocks)
    whole = [at for at, known in of.items() if not gaps(known, blocks) and at in borne_out]
    if not whole:
        return None
    applied, its_history, free = max(whole, key=lambda at: (at[0], count[at], at[1]))
    return Outcome(m.Verdict.ABORT, None, applied, its_history, free, frozenset())


@dataclass(frozen=True, slots=True)
class Begin:
    """`outcome`: the state with which the next generation begins, None: there is none, and `reason` why.

    `hands`: who has that; `latest`: who has that of the last committed step.
    """

    outcome: Outcome | None
    hands: Hands
    reason: str = ""
    latest: Hands = field(default_factory=Hands)


def where(
    spec: m.LedgerSpec,
    outcome: Outcome | None,
    last: int,
    blocks_of: Mapping[m.PeerId, m.Span],
    disks: Disks,
    cuts: Sequence[int],
    witnesses: Witnesses | None = None,
) -> Begin:
    """Where to go on, with any number of workers and any cut: `cuts` only say what `hands` are of.

    Args:
        outcome: what the members' reports say; None: nobody holds anything in memory.
        last: the last step that is known to be committed; -1: none.
        blocks_of, disks: see `held_by`.
        witnesses: see `latest`.
    """
    hands = held_by(outcome, blocks_of, disks, cuts) if outcome is not None else Hands()
    lost = lacking(hands, cuts)
    if outcome is not None and not lost:
        return Begin(outcome, hands, latest=hands)
    before, history = (outcome.applied, outcome.history) if outcome is not None else (None, None)
    back = latest(spec, disks, cuts[-1], before, history, witnesses)
    if back is None:
        reason = nobody_has(len(cuts) - 1, lost, last) + unproven(spec, disks, cuts[-1], last)
        return Begin(None, hands, reason, latest=hands)
    return Begin(back, held_by(back, {}, disks, cuts), latest=hands)


def too_few(stages: int, here: int, hands: Hands) -> str:
    """Why the run waits although somebody is here."""
    seated = set(hands.live.values())
    if not seated:
        return f"the model has {stages} stages, and {workers(here)} {'is' if here == 1 else 'are'} here"
    empty = next((stage for stage in range(stages) if stage not in seated), stages - 1)
    return (
        f"stage {empty} of {stages} has nobody: {workers(here)} {'is' if here == 1 else 'are'} here, "
        f"{stages} are needed; training goes on when {_joins(stages - here)}"
    )


def nobody_has(stages: int, lost: Sequence[int], applied: int) -> str:
    """Why the run waits although there are enough."""
    which = f"stage {lost[0]}" if len(lost) == 1 else "stages " + ", ".join(map(str, lost))
    return (
        f"nobody here holds {which} of {stages} after step {applied}, and of no earlier step every stage's "
        "checkpoint is here; training goes on when a worker that has it comes back"
    )


def unproven(spec: m.LedgerSpec, disks: Disks, blocks: int, last: int) -> str:
    """What is told of and does not count, for people; empty: nothing."""
    of: dict[State, list[m.Span]] = {}
    for states in disks.values():
        for held in states:
            of.setdefault(state_of(spec, held), []).append(held.blocks)
    steps = sorted(at[0] + 1 for at, known in of.items() if not gaps(known, blocks) and at[0] <= last)
    if not steps:
        return ""
    return (
        f"; step {steps[-1]} is told of, but neither the journal nor most of the workers here bear it out: "
        "a further worker with its checkpoint would"
    )


def _joins(count: int) -> str:
    return "one joins" if count == 1 else f"{count} join"
