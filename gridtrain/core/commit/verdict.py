"""What became of the open step, judged from the survivors' REPORTs (commit rule 6).

Decides the verdict on a step whose generation was frozen.  A pure function: the journal keeps its
result, and a journalled verdict never changes.

    S = who reported, A = the highest applied step among them
    at A - 1   prepared for A, and applies it
    at A       all of S prepared for one (round, digest) of step A + 1: COMMIT it, else ABORT

Safe, because whoever applied A + 1 had the YES of all members, so of all of S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import extend_history


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the next generation begins.

    Attributes:
        decided: the round that was committed; None for ABORT.
        applied, history, ledger: those after the verdict.
        holders: members that hold, or will hold by the verdict, the state these name.
    """

    verdict: m.Verdict
    decided_round: m.RoundId | None
    applied: int
    history: bytes
    ledger: m.LedgerState
    holders: frozenset[m.PeerId]


def decide_outcome(
    reports: Mapping[m.PeerId, m.FreezeReport],
    spec: m.LedgerSpec,
    shares: Sequence[tuple[m.PeerId, int]],
    *,
    in_stages: bool = False,
) -> Outcome:
    """The verdict, and what every member must hold after it.

    Args:
        reports: of the members that hold a state, at least one; the longest-serving first: where
            histories differ, the one of most members is the run's, and the others are sent the state.
        shares: of the frozen generation, in rank order.
        in_stages: the model has stages, so that a gradient is of all members of a pipeline: an aborted step
            is handed out anew as a whole, and computed anew.
    """
    applied = _highest_credible_step([report.applied for report in reports.values()])
    reports = {peer: report for peer, report in reports.items() if report.applied <= applied}
    first = _majority_report([report for report in reports.values() if report.applied == applied])
    history, state = first.history, first.ledger
    verdict, decided = m.Verdict.ABORT, None
    prepared = {(report.prepared, report.digest) for report in reports.values()}
    if len(prepared) == 1 and first.prepared is not None and first.prepared.step == applied + 1:
        verdict, decided, applied = m.Verdict.COMMIT, first.prepared, applied + 1
        history = extend_history(history, first.digest)
        state = data_ledger.commit(spec, state, data_ledger.assign(spec, state, shares), skipped=first.skip)
    elif not data_ledger.is_finished(spec, state):
        kept_by = () if in_stages else set(reports)
        state = data_ledger.reassign(spec, state, data_ledger.assign(spec, state, shares), kept_by)
        state = data_ledger.release_holders(spec, state) if in_stages else state
    holders = frozenset(peer for peer, report in reports.items() if _will_hold(report, applied, history))
    return Outcome(verdict, decided, applied, history, state, holders)


def _highest_credible_step(applied: Sequence[int]) -> int:
    """The highest step that can be true, the longest-serving member's claim first.

    A step takes the YES of all, so honest members of a generation are at most one step apart.  Who claims
    more than that above the middle one is not believed; of two members the longer-serving one is.
    """
    middle = applied[0] if len(applied) == 2 else sorted(applied)[(len(applied) - 1) // 2]
    return max(claim for claim in applied if claim <= middle + 1)


def _majority_report(reports: Sequence[m.FreezeReport]) -> m.FreezeReport:
    """The report whose history and ledger most members tell; the longest-serving one's among equals."""
    told = [(report.history, report.ledger) for report in reports]
    return max(reports, key=lambda report: told.count((report.history, report.ledger)))


def _will_hold(report: m.FreezeReport, applied: int, history: bytes) -> bool:
    """Will this member hold the state without being sent it?"""
    if report.applied == applied:
        return report.history == history
    return (
        report.applied == applied - 1
        and report.prepared is not None
        and extend_history(report.history, report.digest) == history
    )
