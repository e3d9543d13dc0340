"""The vote on one attempt, as transcripts of events and effects."""

from __future__ import annotations

import math

import pytest

from gridtrain.core.commit.two_phase_commit import CommitEffect, Decided, TwoPhaseCommit
from gridtrain.core.messages import Decision, RoundId, Verdict, Vote
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

ID = RoundId(1, 1, 7, 0)
COMMIT, ABORT = Verdict.COMMIT, Verdict.ABORT


def round_of(rank: int, world_size: int = 3) -> TwoPhaseCommit:
    return TwoPhaseCommit(ID, rank, world_size, timeout_s=5.0, now_s=0.0)


def yes(digest: bytes = b"u") -> Vote:
    return Vote(ID, True, digest, "")


def no(reason: str) -> Vote:
    return Vote(ID, False, b"", reason)


def outcome(effects: list[CommitEffect]) -> tuple[Verdict, tuple[int, ...]]:
    (decided,) = [effect for effect in effects if isinstance(effect, Decided)]
    return decided.verdict, decided.suspects


def test_the_root_commits_when_all_have_voted_for_one_update() -> None:
    root = round_of(0)
    assert root.count_vote(2, yes(), 1.0) == []
    assert root.prepare(b"u", 1.1) == []
    reason = "3 of 3 voted YES"
    assert root.count_vote(1, yes(), 1.2) == [Decision(ID, COMMIT, reason), Decided(COMMIT, reason)]


def test_a_lone_member_commits_a_prepared_update() -> None:
    assert outcome(round_of(0, world_size=1).prepare(b"u", 1.0)) == (COMMIT, ())


def test_one_vote_of_no_aborts_at_once() -> None:
    root = round_of(0)
    effects = root.count_vote(1, no("a payload is too long"), 1.0)
    assert effects[0] == Decision(ID, ABORT, "rank 1 voted NO: a payload is too long")
    assert root.count_vote(2, yes(), 1.1) == []  # decided once


@pytest.mark.parametrize(
    ("digests", "suspects"),
    [
        ({0: b"u", 1: b"x", 2: b"u"}, (1,)),
        ({0: b"x", 1: b"u", 2: b"u"}, (0,)),
        ({0: b"u", 1: b"v", 2: b"w"}, (1, 2)),  # a tie goes to the lowest rank
    ],
)
def test_updates_that_differ_abort_and_the_minority_is_suspected(
    digests: dict[int, bytes], suspects: tuple[int, ...]
) -> None:
    root = round_of(0)
    root.prepare(digests[0], 1.0)
    root.count_vote(1, yes(digests[1]), 1.0)
    assert outcome(root.count_vote(2, yes(digests[2]), 1.0)) == (ABORT, suspects)


def test_a_member_votes_once_and_waits() -> None:
    member = round_of(1)
    assert member.prepare(b"u", 1.0) == [yes()]
    assert member.is_prepared
    assert member.fail("too late to fail", 1.1) == []  # after a YES it does not abort by itself
    with pytest.raises(LocalProtocolError, match="voted twice"):
        member.prepare(b"v", 1.2)
    assert outcome(member.accept_decision(0, Decision(ID, COMMIT, ""))) == (COMMIT, ())
    assert not member.is_prepared


def test_no_member_commits_without_a_yes() -> None:
    with pytest.raises(RemoteProtocolError, match="without a YES from rank 1"):
        round_of(1).accept_decision(0, Decision(ID, COMMIT, ""))


def test_only_the_root_counts_votes_and_decides() -> None:
    with pytest.raises(RemoteProtocolError, match="the root is rank 0"):
        round_of(1).count_vote(2, yes(), 1.0)
    for rank, sender in ((1, 2), (0, 1)):
        with pytest.raises(RemoteProtocolError, match="only rank 0 decides"):
            round_of(rank).accept_decision(sender, Decision(ID, ABORT, ""))


def test_two_different_votes_of_one_member_are_refused() -> None:
    root = round_of(0)
    root.count_vote(1, yes(b"u"), 1.0)
    assert root.count_vote(1, yes(b"u"), 1.1) == []  # repeated after a reconnection
    with pytest.raises(RemoteProtocolError, match="changed its vote"):
        root.count_vote(1, yes(b"v"), 1.2)


def test_a_decision_names_each_rank_so_that_names_can_replace_all_of_them() -> None:
    root = round_of(0)
    root.prepare(b"u", 0.0)
    reason = "no vote and no progress from rank 1, rank 2 for 5.0 s"
    assert root.tick(5.0)[0] == Decision(ID, ABORT, reason)
    root = round_of(0)
    root.prepare(b"u", 0.0)
    root.count_vote(1, yes(b"u"), 1.0)
    effects = root.count_vote(2, yes(b"v"), 1.0)
    assert effects[0] == Decision(ID, ABORT, "updates differ: rank 0, rank 1 agree, but not rank 2")


def test_the_root_times_out_members_without_progress_but_not_waiting_ones() -> None:
    root = round_of(0)
    root.prepare(b"u", 0.0)
    root.record_progress(1, has_moved=True, now_s=4.0)
    assert root.deadline_s == 5.0  # nothing from rank 2 since 0.0
    assert root.tick(4.9) == []
    effects = root.tick(5.0)
    assert outcome(effects) == (ABORT, (2,))
    assert effects[0] == Decision(ID, ABORT, "no vote and no progress from rank 2 for 5.0 s")
    assert root.deadline_s == math.inf


def test_a_reason_names_only_the_first_ranks() -> None:
    late = round_of(0, world_size=8)
    late.prepare(b"u", 0.0)
    expected = "no vote and no progress from rank 1, rank 2, rank 3 and 4 more for 5.0 s"
    assert late.tick(5.0)[0] == Decision(ID, ABORT, expected)


def test_the_root_aborts_when_no_member_makes_progress() -> None:
    """A payload was lost with a connection; all members wait for it, and none is suspected."""
    root = round_of(0)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        for rank in (0, 1, 2):
            root.record_progress(rank, has_moved=False, now_s=now_s)
    effects = root.tick(5.0)
    assert outcome(effects) == (ABORT, ())
    assert effects[0] == Decision(ID, ABORT, "no member made progress for 5.0 s")


def test_no_vote_is_cast_after_the_decision() -> None:
    root, member = round_of(0), round_of(1)
    root.count_vote(2, no("no memory"), 1.0)
    member.accept_decision(0, Decision(ID, ABORT, "rank 2 voted NO"))
    for late in (root, member):
        assert late.prepare(b"u", 1.1) == [] and late.verdict is ABORT
