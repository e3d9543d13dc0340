"""Decides from the members' reports whether a step interrupted by a membership change was committed (rule 6).

    S = the members that reported, A = the highest credible step that any of them has applied
    a member at A - 1   is prepared for A, and applies it
    all of S at A       COMMIT if all are prepared for the same round of step A + 1 with the same digest and
                        flags; otherwise ABORT

This is safe, because a step is applied only after all members, including all of S, have voted YES.  The
coordinator's journal stores the verdict, which never changes afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import extend_history
from gridtrain.core.group.round_flags import absent_ranks, is_skipped


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state with which the next generation begins.

    Attributes:
        decided_round: for COMMIT, the round that is committed; for ABORT, the round in which step `applied`
            was committed (only its generation matters), or None if the generation is not known.
        applied, history, ledger: the state after the verdict.
        state_holders: members that hold this state, or will hold it once they have executed the verdict.
    """

    verdict: m.Verdict
    decided_round: m.RoundId | None
    applied: int
    history: bytes
    ledger: m.LedgerState
    state_holders: frozenset[m.PeerId]


def decide_outcome(
    reports: Mapping[m.PeerId, m.FreezeReport],
    spec: m.LedgerSpec,
    shares: Sequence[tuple[m.PeerId, int]],
    *,
    view: m.MembershipView | None = None,
    in_stages: bool = False,
) -> Outcome:
    """Decide whether the interrupted step is committed; return the state that all members must then hold.

    Args:
        reports: the reports of the members that hold a state; there is at least one, and the longest-serving
            member's comes first.  If the histories differ, the run continues with the history that most
            members have.
        shares: shares of the frozen generation's members, in rank order.
        view: the frozen generation's view; None if it is not known.
        in_stages: whether the model is partitioned into stages.  The members of a pipeline then share a
            gradient, so all samples of an aborted step are assigned again, and the step is recomputed.
    """
    applied = _highest_credible_step(list(reports.values()))
    reports = {peer: report for peer, report in reports.items() if report.applied <= applied}
    first = _majority_report([report for report in reports.values() if report.applied == applied])
    history, state = first.history, first.ledger
    verdict, decided = m.Verdict.ABORT, _round_of(applied, view)
    prepared = {(report.prepared, report.digest, report.flags) for report in reports.values()}
    if len(prepared) == 1 and first.prepared is not None and first.prepared.step == applied + 1:
        verdict, decided, applied = m.Verdict.COMMIT, first.prepared, applied + 1
        history = extend_history(history, first.digest)
        absent = {shares[rank][0] for rank in absent_ranks(first.flags) if rank < len(shares)}
        assignment, skipped = data_ledger.assign(spec, state, shares), is_skipped(first.flags)
        state = data_ledger.commit(spec, state, assignment, skipped=skipped, absent=absent)
    elif not data_ledger.is_finished(spec, state):
        survivors = () if in_stages else set(reports)
        state = data_ledger.reassign(spec, state, data_ledger.assign(spec, state, shares), survivors)
        state = data_ledger.release_holders(spec, state) if in_stages else state
    holding = frozenset(peer for peer, report in reports.items() if _will_hold(report, applied, history))
    return Outcome(verdict, decided, applied, history, state, holding)


def _round_of(applied: int, view: m.MembershipView | None) -> m.RoundId | None:
    """Return the round in which step `applied` was committed, with attempt 0, if its generation is known.

    Args:
        applied: the last step that was committed when the generation of `view` was frozen.
    """
    if view is None or applied < view.applied:
        return None
    if applied == view.applied:
        return view.decided_round
    return m.RoundId(view.term, view.generation, applied, 0)


def _highest_credible_step(reports: Sequence[m.FreezeReport]) -> int:
    """Return the highest credible step of the reports, which begin with the longest-serving member's.

    A step requires a YES from all members, so correct members of a generation are at most one step apart, and
    those behind are prepared for the step that the others have applied.  Therefore:

    - A step that exceeds the median by more than one is ignored.  Of two members, the longest-serving one's
      step takes the place of the median.
    - The highest remaining step is ignored if more members contradict than support it; in a tie, the
      longest-serving member decides.  Members one step behind support it if they are prepared for it, and
      contradict it otherwise.
    """
    applied = [report.applied for report in reports]
    usual = applied[0] if len(applied) == 2 else median_low(applied)
    highest = max(step for step in applied if step <= usual + 1)
    history = _majority_report([report for report in reports if report.applied == highest]).history
    behind = [report for report in reports if report.applied == highest - 1]
    doubters = [report for report in behind if not _will_hold(report, highest, history)]
    supporters = applied.count(highest) + len(behind) - len(doubters)
    if len(doubters) == supporters:
        return highest - 1 if reports[0] in doubters else highest
    return highest - 1 if len(doubters) > supporters else highest


def _majority_report(reports: Sequence[m.FreezeReport]) -> m.FreezeReport:
    """Return the report whose history and ledger most members share; ties go to the longer-serving member."""
    claims = [(report.history, report.ledger) for report in reports]
    counts = Counter(claims)
    return reports[max(range(len(reports)), key=lambda index: counts[claims[index]])]


def _will_hold(report: m.FreezeReport, applied: int, history: bytes) -> bool:
    """Return whether the member that sent this report holds the state after step `applied` with `history`, or
    will hold it after applying the update for which it is prepared."""
    if report.applied == applied:
        return report.history == history
    return (
        report.applied == applied - 1
        and report.prepared is not None
        and extend_history(report.history, report.digest) == history
    )
