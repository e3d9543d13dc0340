"""The vote on one attempt, as transcripts of events and effects."""

from __future__ import annotations

import math

import pytest

from gridtrain.core.commit.two_phase_commit import (
    AnnounceDecision,
    CastVote,
    CommitEffect,
    Decided,
    DecisionReceived,
    Failed,
    LaterStepSeen,
    Prepared,
    ProgressReceived,
    TwoPhaseCommit,
    VoteReceived,
)
from gridtrain.core.messages import RoundId, Verdict
from gridtrain.errors import LocalProtocolError, RemoteProtocolError

ID = RoundId(1, 1, 7, 0)
COMMIT, ABORT = Verdict.COMMIT, Verdict.ABORT


def round_of(rank: int, world_size: int = 3) -> TwoPhaseCommit:
    return TwoPhaseCommit(ID, rank, world_size, timeout_s=5.0, now_s=0.0)


def yes(rank: int, digest: bytes = b"u") -> VoteReceived:
    return VoteReceived(rank, True, digest, "")


def outcome(effects: list[CommitEffect]) -> tuple[Verdict, tuple[int, ...]]:
    (decided,) = [effect for effect in effects if isinstance(effect, Decided)]
    return decided.verdict, decided.suspects


def test_the_root_commits_when_all_have_voted_for_one_update() -> None:
    root = round_of(0)
    assert root.handle(yes(2), 1.0) == []
    assert root.handle(Prepared(b"u"), 1.1) == []
    reason = "3 of 3 voted YES"
    assert root.handle(yes(1), 1.2) == [AnnounceDecision(COMMIT, reason), Decided(COMMIT, reason)]


def test_a_lone_member_commits_a_prepared_update() -> None:
    assert outcome(round_of(0, world_size=1).handle(Prepared(b"u"), 1.0)) == (COMMIT, ())


def test_one_vote_of_no_aborts_at_once() -> None:
    root = round_of(0)
    effects = root.handle(VoteReceived(1, False, b"", "a payload is too long"), 1.0)
    assert effects[0] == AnnounceDecision(ABORT, "rank 1 voted NO: a payload is too long")
    assert root.handle(yes(2), 1.1) == []  # decided once


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
    root.handle(Prepared(digests[0]), 1.0)
    root.handle(yes(1, digests[1]), 1.0)
    assert outcome(root.handle(yes(2, digests[2]), 1.0)) == (ABORT, suspects)


def test_a_member_votes_once_and_waits() -> None:
    member = round_of(1)
    assert member.handle(Prepared(b"u"), 1.0) == [CastVote(True, b"u", "")]
    assert member.is_prepared
    assert member.handle(Failed("too late to fail"), 1.1) == []  # after a YES it does not abort by itself
    with pytest.raises(LocalProtocolError, match="voted twice"):
        member.handle(Prepared(b"v"), 1.2)
    assert outcome(member.handle(DecisionReceived(0, COMMIT, ""), 2.0)) == (COMMIT, ())
    assert not member.is_prepared


def test_a_message_of_the_next_step_proves_the_commit() -> None:
    member = round_of(1)
    member.handle(Prepared(b"u"), 1.0)
    assert outcome(member.handle(LaterStepSeen(), 2.0)) == (COMMIT, ())


def test_no_member_commits_without_a_yes() -> None:
    with pytest.raises(RemoteProtocolError, match="without a YES from rank 1"):
        round_of(1).handle(DecisionReceived(0, COMMIT, ""), 1.0)


@pytest.mark.parametrize(
    ("rank", "event", "error"),
    [
        (1, yes(2), "the root is rank 0"),
        (1, DecisionReceived(2, ABORT, ""), "only rank 0 decides"),
        (0, DecisionReceived(1, ABORT, ""), "only rank 0 decides"),
    ],
)
def test_only_the_root_counts_votes_and_decides(
    rank: int, event: VoteReceived | DecisionReceived, error: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        round_of(rank).handle(event, 1.0)


def test_two_different_votes_of_one_member_are_refused() -> None:
    root = round_of(0)
    root.handle(yes(1, b"u"), 1.0)
    assert root.handle(yes(1, b"u"), 1.1) == []  # repeated after a reconnection
    with pytest.raises(RemoteProtocolError, match="changed its vote"):
        root.handle(yes(1, b"v"), 1.2)


def test_the_root_times_out_members_without_progress_but_not_waiting_ones() -> None:
    root = round_of(0)
    root.handle(Prepared(b"u"), 0.0)
    root.handle(ProgressReceived(1, has_moved=True), 4.0)
    assert root.deadline_s == 5.0  # nothing from rank 2 since 0.0
    assert root.tick(4.9) == []
    effects = root.tick(5.0)
    assert outcome(effects) == (ABORT, (2,))
    assert effects[0] == AnnounceDecision(ABORT, "no vote and no progress from rank 2 for 5.0 s")
    assert root.deadline_s == math.inf


def test_the_root_aborts_when_no_member_makes_progress() -> None:
    """A payload was lost with a connection; all members wait for it, and none is suspected."""
    root = round_of(0)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        for rank in (0, 1, 2):
            root.handle(ProgressReceived(rank, has_moved=False), now_s)
    effects = root.tick(5.0)
    assert outcome(effects) == (ABORT, ())
    assert effects[0] == AnnounceDecision(ABORT, "no member made progress for 5.0 s")


def test_no_vote_is_cast_after_the_decision() -> None:
    root, member = round_of(0), round_of(1)
    root.handle(VoteReceived(2, False, b"", "no memory"), 1.0)
    member.handle(DecisionReceived(0, ABORT, "rank 2 voted NO"), 1.0)
    for late in (root, member):
        assert late.handle(Prepared(b"u"), 1.1) == [] and late.verdict is ABORT
