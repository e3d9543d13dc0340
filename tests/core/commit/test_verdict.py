"""The verdict on an interrupted step, from the reports of the members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import extend_history
from gridtrain.core.commit.verdict import Outcome, decide_outcome

SPEC = m.LedgerSpec(1000, 0, epochs=1)
TRUE, FALSE = b"t" * 32, b"f" * 32


def report(applied: int, history: bytes = TRUE) -> m.FreezeReport:
    step = applied + 1
    ledger = m.LedgerState(step, 4 * step, (), 4 * step, 0, None)
    return m.FreezeReport(1, 1, True, applied, history, ledger, None, b"", 0)


def prepared(applied: int) -> m.FreezeReport:
    """The report of a member that has voted for the next step and waits for the decision."""
    return replace(report(applied), prepared=m.RoundId(1, 1, applied + 1, 0), digest=b"d" * 32)


def after(behind: m.FreezeReport) -> m.FreezeReport:
    """The report of a member that has applied the step that another one has prepared."""
    return report(behind.applied + 1, extend_history(behind.history, behind.digest))


def outcome_of(*reports: m.FreezeReport) -> Outcome:
    """The outcome of these reports, of members a, b, c ..., the longest-serving first."""
    by_peer = {bytes([97 + i]) * 32: one for i, one in enumerate(reports)}
    return decide_outcome(by_peer, SPEC, [(peer, 4) for peer in by_peer])


def holders(outcome: Outcome) -> str:
    return "".join(sorted(chr(peer[0]) for peer in outcome.state_holders))


def test_honest_members_are_one_step_apart_and_the_later_one_counts() -> None:
    behind = prepared(9)
    outcome = outcome_of(behind, after(behind), behind)
    assert (outcome.applied, holders(outcome)) == (10, "abc")


def test_the_round_of_the_last_committed_step_is_known_by_its_generation() -> None:
    earlier = m.RoundId(1, 5, 9, 1)
    view = m.MembershipView(1, 7, 1, m.Verdict.ABORT, earlier, 9, TRUE, m.LedgerState(), "")

    def round_of(one: m.FreezeReport, view: m.MembershipView | None) -> m.RoundId | None:
        return decide_outcome({b"a" * 32: one}, SPEC, [(b"a" * 32, 4)], view=view).decided_round

    assert round_of(report(9), view) == earlier, "the generation has committed no step"
    assert round_of(report(12), view) == m.RoundId(1, 7, 12, 0)
    assert round_of(report(9), None) is None
    assert round_of(prepared(9), view) == prepared(9).prepared


def test_a_claim_far_ahead_of_the_others_is_not_believed() -> None:
    outcome = outcome_of(report(9), report(50, FALSE), report(9))
    assert (outcome.applied, outcome.history, holders(outcome)) == (9, TRUE, "ac")
    outcome = outcome_of(report(2**62, FALSE), prepared(9), after(prepared(9)))
    assert (outcome.applied, holders(outcome)) == (10, "bc")


@pytest.mark.parametrize(("others", "applied"), [(report(9), 9), (prepared(9), 10)], ids=["idle", "prepared"])
def test_a_step_that_the_others_have_not_voted_for_is_not_believed(
    others: m.FreezeReport, applied: int
) -> None:
    outcome = outcome_of(report(10, FALSE), others, others)
    assert (outcome.applied, holders(outcome)) == (applied, "bc")
    assert outcome_of(others, report(10, FALSE)).history != FALSE
    assert outcome_of(report(10, FALSE), others).history == FALSE, (
        "of two, the longer-serving one is believed"
    )


def test_a_member_that_denies_its_vote_undoes_no_step() -> None:
    behind = prepared(9)
    outcome = outcome_of(report(9), after(behind), behind)
    assert (outcome.applied, holders(outcome)) == (10, "bc")


def test_the_majority_history_is_chosen() -> None:
    outcome = outcome_of(report(9, FALSE), report(9), report(9))
    assert (outcome.history, holders(outcome)) == (TRUE, "bc")


def test_of_two_members_the_longer_serving_one_is_believed() -> None:
    assert outcome_of(report(9), report(50, FALSE)).applied == 9
    assert outcome_of(report(50), report(9)).applied == 50  # the other one was absent
    assert outcome_of(report(9), report(9, FALSE)).history == TRUE


def test_a_member_that_was_absent_for_many_steps_does_not_hold_the_state() -> None:
    outcome = outcome_of(report(100), report(3), report(100))
    assert (outcome.applied, holders(outcome)) == (100, "ac")
