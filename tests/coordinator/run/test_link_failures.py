"""Which member is at fault for broken connections."""

from __future__ import annotations

from gridtrain_coordinator.run.link_failures import (
    FAILURES_BEFORE_AVOIDING,
    REMEMBERED_S,
    WINDOW_S,
    LinkFailures,
)

ROOT, *MEMBERS = (letter.encode() * 32 for letter in "rabcdefg")


def record_failures(failures: LinkFailures, one: bytes, other: bytes, now_s: float) -> None:
    for _ in range(FAILURES_BEFORE_AVOIDING):
        failures.record(one, other, now_s)


def test_three_reporters_name_a_member() -> None:
    failures = LinkFailures()
    for other in MEMBERS[1:3]:
        record_failures(failures, MEMBERS[0], other, 1.0)
    assert failures.common_endpoint(1.0, 8) is None
    record_failures(failures, MEMBERS[0], MEMBERS[3], 2.0)
    assert failures.common_endpoint(2.0, 8) == MEMBERS[0]


def test_the_centre_of_a_star_is_not_at_fault_for_three_bad_links() -> None:
    """Every bad link of a star names its centre, so more than half of them have to fail."""
    failures = LinkFailures()
    for member in MEMBERS[:3]:
        record_failures(failures, ROOT, member, 1.0)
    assert failures.common_endpoint(1.0, 8, centre=ROOT) is None
    record_failures(failures, ROOT, MEMBERS[3], 2.0)
    assert failures.common_endpoint(2.0, 8, centre=ROOT) == ROOT


def test_only_recent_failures_count_among_three_members() -> None:
    """Each member has two links, and failures at different times may have different causes."""
    for members, expected in ((3, None), (4, MEMBERS[0])):
        failures = LinkFailures()
        for number, other in enumerate(MEMBERS[1:4]):
            record_failures(failures, MEMBERS[0], other, 1.0 + number)
        assert failures.common_endpoint(3.0, members) == MEMBERS[0]
        assert failures.common_endpoint(4.0 + WINDOW_S, members) == expected


def test_pairs_are_avoided_once_and_not_among_three_members() -> None:
    for members, avoided in ((3, None), (4, MEMBERS[0])):
        failures = LinkFailures()
        record_failures(failures, MEMBERS[0], MEMBERS[1], 1.0)
        assert failures.next_to_avoid(1.0, members) is None, "one pair"
        record_failures(failures, MEMBERS[0], MEMBERS[2], 1.0)
        assert failures.next_to_avoid(1.0, members) == avoided
        assert failures.begin_avoiding(2.0) == {(MEMBERS[0], MEMBERS[1]), (MEMBERS[0], MEMBERS[2])}
        assert failures.next_to_avoid(2.0, members) is None, "avoided already"


def test_failures_count_within_the_window_and_pairs_are_avoided_for_a_time() -> None:
    for last_s, is_bad in ((1.0 + WINDOW_S, True), (1.1 + WINDOW_S, False)):
        failures = LinkFailures()
        for now_s in (1.0, 2.0, 3.0, last_s):
            failures.record(ROOT, MEMBERS[0], now_s)
        assert failures.begin_avoiding(last_s) == ({(MEMBERS[0], ROOT)} if is_bad else set())
        if is_bad:
            assert failures.avoided_pairs(last_s + REMEMBERED_S) == {(MEMBERS[0], ROOT)}
            assert failures.avoided_pairs(last_s + REMEMBERED_S + 0.1) == set()


def test_of_two_members_with_equally_many_broken_pairs_the_larger_key_is_named() -> None:
    failures = LinkFailures()
    for one in MEMBERS[:2]:
        for other in MEMBERS[2:5]:
            record_failures(failures, one, other, 1.0)
    assert failures.common_endpoint(1.0, 8) == MEMBERS[1]
    failures.forget(MEMBERS[1])
    assert failures.common_endpoint(1.0, 8) == MEMBERS[0]
