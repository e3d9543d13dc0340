"""Which member is to blame for broken connections."""

from __future__ import annotations

from gridtrain_coordinator.run.link_failures import (
    FAILURES_BEFORE_AVOIDING,
    REMEMBERED_S,
    WINDOW_S,
    LinkFailures,
)

ROOT, *MEMBERS = (letter.encode() * 32 for letter in "rabcdefg")


def broken(breaks: LinkFailures, one: bytes, other: bytes, now_s: float) -> None:
    for _ in range(FAILURES_BEFORE_AVOIDING):
        breaks.record(one, other, now_s)


def test_three_voices_put_a_member_out() -> None:
    breaks = LinkFailures()
    for other in MEMBERS[1:3]:
        broken(breaks, MEMBERS[0], other, 1.0)
    assert breaks.common_endpoint(1.0, 8) is None
    broken(breaks, MEMBERS[0], MEMBERS[3], 2.0)
    assert breaks.common_endpoint(2.0, 8) == MEMBERS[0]


def test_the_centre_of_a_star_is_not_to_blame_for_three_bad_lines() -> None:
    """All connections of a star lead to it, so every bad link names it: more than half of them are needed."""
    breaks = LinkFailures()
    for member in MEMBERS[:3]:
        broken(breaks, ROOT, member, 1.0)
    assert breaks.common_endpoint(1.0, 8, centre=ROOT) is None
    broken(breaks, ROOT, MEMBERS[3], 2.0)
    assert breaks.common_endpoint(2.0, 8, centre=ROOT) == ROOT


def test_of_three_members_only_what_broke_lately_counts() -> None:
    """Each has two links: failures at different times may have different causes."""
    for members, blamed in ((3, None), (4, MEMBERS[0])):
        breaks = LinkFailures()
        for number, other in enumerate(MEMBERS[1:4]):
            broken(breaks, MEMBERS[0], other, 1.0 + number)
        assert breaks.common_endpoint(3.0, members) == MEMBERS[0]
        assert breaks.common_endpoint(4.0 + WINDOW_S, members) == blamed


def test_three_members_have_only_one_ring_and_four_avoid_pairs_once() -> None:
    for members, avoided in ((3, None), (4, MEMBERS[0])):
        breaks = LinkFailures()
        broken(breaks, MEMBERS[0], MEMBERS[1], 1.0)
        assert breaks.next_to_avoid(1.0, members) is None, "one pair"
        broken(breaks, MEMBERS[0], MEMBERS[2], 1.0)
        assert breaks.next_to_avoid(1.0, members) == avoided
        assert breaks.begin_avoiding(2.0) == {(MEMBERS[0], MEMBERS[1]), (MEMBERS[0], MEMBERS[2])}
        assert breaks.next_to_avoid(2.0, members) is None, "avoided already"


def test_failures_count_within_half_a_minute_and_are_remembered_for_ten() -> None:
    for last_s, is_bad in ((1.0 + WINDOW_S, True), (1.1 + WINDOW_S, False)):
        breaks = LinkFailures()
        for now_s in (1.0, 2.0, 3.0, last_s):
            breaks.record(ROOT, MEMBERS[0], now_s)
        assert breaks.begin_avoiding(last_s) == ({(MEMBERS[0], ROOT)} if is_bad else set())
        if is_bad:
            assert breaks.avoided_pairs(last_s + REMEMBERED_S) == {(MEMBERS[0], ROOT)}
            assert breaks.avoided_pairs(last_s + REMEMBERED_S + 0.1) == set()


def test_of_two_with_as_many_broken_pairs_the_larger_key_is_named() -> None:
    breaks = LinkFailures()
    for one in MEMBERS[:2]:
        for other in MEMBERS[2:5]:
            broken(breaks, one, other, 1.0)
    assert breaks.common_endpoint(1.0, 8) == MEMBERS[1]
    breaks.forget(MEMBERS[1])
    assert breaks.common_endpoint(1.0, 8) == MEMBERS[0]
