"""Which member is to blame for broken connections."""

from __future__ import annotations

from gridtrain_coordinator.run.link_failures import FAILURES_BEFORE_AVOIDING, LinkFailures

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
