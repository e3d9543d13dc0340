"""Which replicas are found to have diverged, and how long they are notified."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain_coordinator.run.divergence import (
    MAX_OPEN_COMPARISONS,
    DigestComparison,
    DivergenceDetector,
    minority_ranks,
)
from gridtrain_coordinator.run.events import Send

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))


@pytest.mark.parametrize(
    ("digests", "minority"),
    [("xxx", []), ("xxy", [2]), ("yxx", [0]), ("xy", [1]), ("yyxx", [2, 3]), ("xyz", [1, 2])],
)
def test_the_largest_group_is_right_and_of_equal_groups_that_of_the_lowest_rank(
    digests: str, minority: list[int]
) -> None:
    assert minority_ranks({rank: letter.encode() for rank, letter in enumerate(digests)}) == minority


def test_a_step_is_decided_by_all_digests_or_by_a_majority_once_the_next_step_begins() -> None:
    group = DigestComparison((A, B, C, D, E))
    for peer in (A, B):
        assert group.add(peer, 10, b"x") == []
    assert group.add(E, 20, b"x") == [], "two of five are no majority"
    assert group.add(C, 10, b"y") == []
    assert group.add(E, 30, b"x") == [], "the two missing ones may agree with either"
    assert group.add(D, 10, b"x") == []
    assert group.add(E, 40, b"x") == [C]
    assert [group.add(peer, 30, b"x") for peer in (A, B, D)] == [[], [], []]
    assert group.add(C, 30, b"z") == [C]
    assert group.add(b"f" * 32, 30, b"z") == []


def test_a_late_digest_is_compared_with_the_agreed_one() -> None:
    group = DigestComparison((A, B, C))
    for step in (10, 20):
        assert [group.add(peer, step, b"x") for peer in (A, B)] == [[], []]
    assert group.add(C, 10, b"x") == [] and group.add(C, 20, b"y") == [C]
    assert group.add(A, 30, b"x") == [] and group.add(C, 20, b"y") == [C] and group.add(C, 20, b"x") == []


def test_half_of_the_members_are_no_majority() -> None:
    group = DigestComparison((A, B, C, D))
    group.add(A, 10, b"x")
    group.add(B, 10, b"y")
    assert group.add(A, 20, b"x") == []


def test_the_oldest_of_too_many_open_comparisons_is_abandoned() -> None:
    group = DigestComparison((A, B))
    for step in range(MAX_OPEN_COMPARISONS + 1):
        assert group.add(A, step, b"x") == []
    assert group.add(B, 0, b"y") == [], "its comparison restarts, and the next one is abandoned for it"
    assert [group.add(B, step, b"y") for step in range(2, MAX_OPEN_COMPARISONS + 1)] == [[B]] * 3


@pytest.mark.parametrize("invented", [range(1, 9), range(900, 990, 10)], ids=["earlier", "later"])
def test_invented_steps_hide_no_difference(invented: range) -> None:
    """A comparison with digests of several members stays open, whatever another member sends."""
    group = DigestComparison((A, B, C, D, E))
    assert group.add(A, 500, b"x") == group.add(C, 500, b"x") == []
    for step in invented:
        assert group.add(E, step, b"y") == []
    assert group.add(B, 500, b"z") == group.add(D, 500, b"x") == []
    assert group.add(A, 1000, b"x") == [B]


def test_a_notice_is_repeated_until_its_member_holds_a_later_state() -> None:
    detector = DivergenceDetector()
    detector.begin_generation([(A, B), (C,)])
    assert detector.add(D, 1, b"x") == [] == detector.resend(A)
    assert detector.add(A, 1, b"x") == [] and detector.add(B, 1, b"y") == [B]
    notice = m.ReplicaDiverged(1, 5, 1)
    assert detector.notify(B, notice) == Send(B, notice) and detector.divergence_count == 1
    report = m.FreezeReport(1, 5, True, 1, b"h", m.LedgerState(), None, b"", 0)
    for generation, is_synced in ((4, True), (5, False), (6, True)):
        checked = detector.without_diverged_state(B, replace(report, generation=generation))
        assert checked.is_synced is is_synced
    detector.clear_if_recovered(B, 5)
    assert detector.resend(B) == [Send(B, notice)], "its state of that generation is the diverged one"
    detector.clear_if_recovered(B, 6)
    assert detector.resend(B) == []
    detector.notify(B, notice)
    detector.forget(B)
    assert detector.resend(B) == []
