"""Which checkpoints a member sends, and to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import DiscardCheckpoints, Send, SendCheckpoint
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.member_checkpoints import MemberCheckpoints
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.errors import RemoteProtocolError

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
LAYERS = m.Span(0, 2)
STATE = m.CheckpointInfo(4, b"h", m.LedgerState(step=5, cursor=20, consumed=20), LAYERS)


def checkpoints_of_a() -> tuple[MemberCheckpoints, RankAssignment]:
    """a has the checkpoint that b assembles its stage from."""
    replica = ReplicaState()
    replica.load_checkpoint(STATE)
    members = (
        m.Member(A, "a", "", 1, False),
        m.Member(B, "b", "", 1, True, pieces=((LAYERS, 0),), piece_digests=(b"",)),
    )
    found = MemberCheckpoints(replica, CoordinatorLink(b"0" * 32, m.Join("r", "a", "")))
    return found, RankAssignment(A, 1, 5, members, stages=2)


@pytest.mark.parametrize(("peer", "layers"), [(A, LAYERS), (B, m.Span(0, 1)), (C, LAYERS), (C, m.Span(0, 1))])
def test_nobody_gets_a_checkpoint_that_its_stage_is_not_assembled_from(peer: bytes, layers: m.Span) -> None:
    held, assignment = checkpoints_of_a()
    held.stored = (STATE,)
    with pytest.raises(RemoteProtocolError, match="is not its source"):
        held.serve(assignment, peer, m.CheckpointRequest(1, 5, layers))


def test_a_checkpoint_is_sent_at_once_or_waited_for() -> None:
    held, assignment = checkpoints_of_a()
    request = m.CheckpointRequest(1, 5, LAYERS)
    assert held.serve(assignment, B, request) == []
    held.stored = (STATE,)
    (sent,) = held.serve(assignment, B, request)
    assert sent == SendCheckpoint(B, 1, 5, STATE, is_awaited=True)


def test_a_report_names_the_generation_until_it_is_left() -> None:
    held, assignment = checkpoints_of_a()
    held.stored = (STATE,)
    link = held._coordinator_link
    link.accept_welcome(1)
    assert held.begin_generation(assignment, True, [A, B]) == []
    for generation in (5, 0):
        assert held.report() == [Send(link.coordinator, m.StageCheckpointList((STATE,), generation))]
        held.leave_generation()


def test_a_rollback_drops_later_checkpoints_and_says_so() -> None:
    held, _ = checkpoints_of_a()
    later = replace(STATE, applied=9)
    held.stored = (STATE, later)
    held._coordinator_link.accept_welcome(1)
    assert held.discard(9) == []
    discarded, report = held.discard(8)
    assert discarded == DiscardCheckpoints(8) and isinstance(report, Send)
    assert held.stored == (STATE,)


def test_what_was_to_be_loaded_and_is_gone_is_noticed() -> None:
    held, _ = checkpoints_of_a()
    assert held.update_stored((STATE,), None) == ([STATE], False)
    held.loading = (STATE,)
    assert held.update_stored((STATE,), None) == ([], False)
    assert held.update_stored((), None) == ([], True) and held.loading == ()
