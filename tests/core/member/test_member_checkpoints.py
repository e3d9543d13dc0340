"""Checkpoints that a member sends, and their receivers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import (
    DiscardCheckpoints,
    LoadCheckpoints,
    Send,
    SendCheckpoint,
    StoreCheckpointBlock,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.coordinator_link import CoordinatorLink
from gridtrain.core.member.member_checkpoints import MemberCheckpoints
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.errors import RemoteProtocolError

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
LAYERS = m.Span(0, 2)
STATE = m.CheckpointInfo(4, b"h", m.LedgerState(step=5, cursor=20, consumed=20), LAYERS)


def checkpoints_of_a() -> tuple[MemberCheckpoints, RankAssignment]:
    """Member a has the checkpoint from which b assembles its stage."""
    replica = ReplicaState()
    replica.load_checkpoint(STATE)
    members = (
        m.Member(A, "a", "", 1, False),
        m.Member(B, "b", "", 1, True, pieces=((LAYERS, 0),), piece_digests=(b"",)),
    )
    found = MemberCheckpoints(replica, CoordinatorLink(b"0" * 32, m.Join("r", "a", "")))
    return found, RankAssignment(A, 1, 5, members, stages=2)


@pytest.mark.parametrize(("peer", "layers"), [(A, LAYERS), (B, m.Span(0, 1)), (C, LAYERS), (C, m.Span(0, 1))])
def test_a_checkpoint_is_sent_only_to_a_member_that_assembles_its_stage_from_it(
    peer: bytes, layers: m.Span
) -> None:
    checkpoints, assignment = checkpoints_of_a()
    checkpoints.stored = (STATE,)
    with pytest.raises(RemoteProtocolError, match="is not its source"):
        checkpoints.serve(assignment, peer, m.CheckpointRequest(1, 5, layers))


def test_a_copy_is_of_the_open_step_or_an_earlier_one() -> None:
    """a stores copies of b's checkpoints; step 6 is open."""
    checkpoints, assignment = checkpoints_of_a()
    of_b = replace(STATE, layers=m.Span(1, 2))
    last, too_late = (
        m.CheckpointBlock(1, 5, replace(of_b, applied=applied), 0, 1, b"") for applied in (5, 6)
    )
    assert checkpoints.receive_block(assignment, True, B, last) == [StoreCheckpointBlock(B, last)]
    with pytest.raises(RemoteProtocolError, match="sent a checkpoint of step 7, but no step after step 6"):
        checkpoints.receive_block(assignment, True, B, too_late)


def test_a_checkpoint_is_sent_once_it_is_stored() -> None:
    checkpoints, assignment = checkpoints_of_a()
    request = m.CheckpointRequest(1, 5, LAYERS)
    assert checkpoints.serve(assignment, B, request) == []
    checkpoints.stored = (STATE,)
    (sent,) = checkpoints.serve(assignment, B, request)
    assert sent == SendCheckpoint(B, 1, 5, STATE, is_awaited=True)


def test_a_report_names_the_generation_until_it_is_left() -> None:
    checkpoints, assignment = checkpoints_of_a()
    checkpoints.stored = (STATE,)
    link = checkpoints._coordinator_link
    link.accept_welcome(1)
    assert checkpoints.begin_generation(assignment, True, [A, B]) == []
    for generation in (5, 0):
        assert checkpoints.report() == [Send(link.coordinator, m.StageCheckpointList((STATE,), generation))]
        checkpoints.leave_generation()


def test_a_rollback_discards_later_checkpoints_and_reports_it() -> None:
    checkpoints, _ = checkpoints_of_a()
    later = replace(STATE, applied=9)
    checkpoints.stored = (STATE, later)
    checkpoints._coordinator_link.accept_welcome(1)
    assert checkpoints.discard(9) == []
    discarded, report = checkpoints.discard(8)
    assert discarded == DiscardCheckpoints(8) and isinstance(report, Send)
    assert checkpoints.stored == (STATE,)


def test_a_missing_checkpoint_that_should_be_loaded_is_noticed() -> None:
    checkpoints, _ = checkpoints_of_a()
    assert checkpoints.update_stored((STATE,), None) == ([STATE], False)
    checkpoints.loading = (STATE,)
    assert checkpoints.update_stored((STATE,), None) == ([], False)
    assert checkpoints.update_stored((), None) == ([], True) and checkpoints.loading == ()


@pytest.mark.parametrize("connected", [(), (A,), (A, C)], ids=["to none", "to a", "to both"])
@pytest.mark.parametrize("stored", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
def test_the_first_missing_checkpoint_is_requested_or_all_are_loaded(
    stored: tuple[int, ...], connected: tuple[bytes, ...]
) -> None:
    """Member b assembles its stage from layers of a, its own and those of c."""
    pieces = tuple((m.Span(number, number + 1), number) for number in range(3))
    members = [m.Member(peer, "", "", 1, False) for peer in (A, B, C)]
    members[1] = replace(members[1], pieces=pieces)
    checkpoints = MemberCheckpoints(ReplicaState(), CoordinatorLink(b"0" * 32, m.Join("r", "b", "")))
    state = m.CheckpointInfo(*checkpoints._replica_state.position, m.LedgerState())
    found = tuple(replace(state, layers=pieces[number][0]) for number in stored)
    checkpoints.stored = found
    effects = checkpoints.load(RankAssignment(B, 1, 5, tuple(members), stages=3), connected)
    missing = [number for number in (0, 2) if number not in stored]
    requests = [Send(members[n].peer, m.CheckpointRequest(1, 5, pieces[n][0])) for n in missing[:1]]
    loaded = [LoadCheckpoints(1, 5, found, m.Span(1, 2))] if len(stored) == 3 else []
    assert effects == loaded + [request for request in requests if request.peer in connected]
