"""A leaving member's residual is added once, or not at all."""

from __future__ import annotations

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import (
    AddResidual,
    DropResidual,
    MemberEffect,
    ResidualTransferEnded,
    Send,
    StoreResidualBlock,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.peer_links import PeerLinks
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.core.member.residual_recipients import ResidualTransfer, residual_recipients
from gridtrain.errors import RemoteProtocolError

A, B, C, D = PEERS = tuple(letter * 32 for letter in (b"a", b"b", b"c", b"d"))
H5, H6 = b"five", b"six"


def assignment_of(me: m.PeerId, generation: int = 2, members: tuple[m.PeerId, ...] = PEERS) -> RankAssignment:
    return RankAssignment(
        me,
        1,
        generation,
        tuple(m.Member(peer, f"worker {peer[:1].decode()}", "", 1, False) for peer in members),
    )


def piece(
    index: int = 0, total: int = 1, *, applied: int = 5, history: bytes = H5, generation: int = 2
) -> m.ResidualBlock:
    return m.ResidualBlock(1, generation, applied, history, index, total, b"x")


class Transfer(ResidualTransfer):
    """The transfers of a member that is connected to all others, and holds the state after step 5."""

    def __init__(self, applied: int = 5, history: bytes = H5, *, is_synced: bool = True) -> None:
        self.state, self.links = ReplicaState(), PeerLinks(b"own" + bytes(29), b"boss" + bytes(28))
        self.set_state(applied, history, is_synced=is_synced)
        self.links.connected |= set(PEERS)
        super().__init__(self.state, self.links)

    def set_state(self, applied: int, history: bytes, *, is_synced: bool = True) -> None:
        self.state.applied, self.state.history, self.state.is_synced = applied, history, is_synced


def recipient_of_all() -> Transfer:
    """Member C, which has received B's residual after step 5."""
    recipient = Transfer()
    assert recipient.receive_block(assignment_of(C), B, piece()) == [StoreResidualBlock(B, piece(), 4)]
    assert recipient.mark_complete(assignment_of(C), B) == [Send(B, m.ResidualReply(1, 2, True, ""))]
    return recipient


def test_a_confirmed_residual_has_the_name_of_its_worker() -> None:
    recipient = recipient_of_all()
    after = assignment_of(C, 3, (A, C, D))
    assert recipient.begin_generation(after) == [AddResidual(B, "worker b")]


def kinds(effects: list[MemberEffect]) -> list[type]:
    return [type(effect) for effect in effects if isinstance(effect, AddResidual | DropResidual)]


@pytest.mark.parametrize(
    ("rank", "world_size", "recipients"),
    [(0, 1, ()), (0, 2, (1,)), (1, 2, (0,)), (2, 4, (3, 1)), (3, 4, (0, 2))],
)
def test_recipients_are_the_neighbours_in_the_ring(
    rank: int, world_size: int, recipients: tuple[int, ...]
) -> None:
    assert residual_recipients(rank, world_size) == recipients


# -- the leaving member --------------------------------------------------------------------------------


def test_the_second_recipient_is_asked_only_if_the_first_has_declined() -> None:
    leaving = Transfer()
    sent = leaving.begin(("p", "q"), assignment_of(B))
    assert sent == [Send(C, m.ResidualBlock(1, 2, 5, H5, i, 2, p)) for i, p in enumerate("pq")]
    assert leaving.is_leaving
    again = leaving.receive_reply(assignment_of(B), C, m.ResidualReply(1, 2, False, "it is also leaving"))
    assert [effect.peer for effect in again if isinstance(effect, Send)] == [A, A]
    assert leaving.receive_reply(assignment_of(B), D, m.ResidualReply(1, 2, True, "")) == [], (
        "D was not asked"
    )
    ended = leaving.receive_reply(assignment_of(B), A, m.ResidualReply(1, 2, False, "so do I"))
    assert ended == [ResidualTransferEnded(False, "worker a declined: so do I")]


def test_no_second_recipient_is_asked_if_the_first_is_lost() -> None:
    leaving = Transfer()
    leaving.begin(("p",), assignment_of(B))
    assert leaving.recipient_lost(A) == []
    assert leaving.recipient_lost(C) == [
        ResidualTransferEnded(None, "worker c was disconnected before it replied")
    ]
    assert leaving.receive_reply(assignment_of(B), C, m.ResidualReply(1, 2, False, "late")) == []


def test_without_a_connected_neighbour_no_recipient_is_asked() -> None:
    leaving = Transfer()
    leaving.links.connected.clear()
    assert leaving.begin(("p",), assignment_of(B)) == [
        ResidualTransferEnded(False, "no neighbour is connected")
    ]
    assert Transfer().begin(("p",), None) == [ResidualTransferEnded(False, "no generation is running")]


def test_a_member_about_to_leave_accepts_no_residual() -> None:
    recipient = Transfer()
    recipient.receive_block(assignment_of(C), B, piece())
    recipient.is_refusing = True
    why = "it is also leaving"
    assert recipient.mark_complete(assignment_of(C), B) == [
        DropResidual(B),
        Send(B, m.ResidualReply(1, 2, False, why)),
    ]
    assert recipient.receive_block(assignment_of(C), D, piece()) == [
        Send(D, m.ResidualReply(1, 2, False, why))
    ]


# -- the recipient ------------------------------------------------------------------------------------


def test_the_residual_is_added_once_and_not_while_the_sender_is_a_member() -> None:
    """The next generation may have been made because another worker joined."""
    recipient = recipient_of_all()
    assert recipient.begin_generation(assignment_of(C, 3)) == []
    assert kinds(recipient.begin_generation(assignment_of(C, 4, (A, C, D)))) == [AddResidual]
    assert recipient.begin_generation(assignment_of(C, 5, (A, C, D))) == [], "once"


def test_the_residual_is_dropped_when_the_sender_votes_again() -> None:
    recipient = recipient_of_all()
    recipient.set_state(6, H6)
    assert kinds(recipient.step_committed()) == [DropResidual]
    assert recipient.begin_generation(assignment_of(C, 3, (A, C, D))) == []


def test_the_commit_of_the_senders_last_step_changes_nothing() -> None:
    """The recipient receives the commit of step 5 after the sender."""
    recipient = Transfer(4)
    recipient.receive_block(assignment_of(C), B, piece())
    recipient.mark_complete(assignment_of(C), B)
    recipient.set_state(5, H5)
    assert recipient.step_committed() == []
    assert kinds(recipient.begin_generation(assignment_of(C, 3, (A, C, D)))) == [AddResidual]


@pytest.mark.parametrize(
    ("applied", "history", "synced"), [(6, H6, True), (5, H6, True), (4, H5, True), (5, H5, False)]
)
def test_the_residual_is_dropped_when_the_group_continues_from_another_state(
    applied: int, history: bytes, synced: bool
) -> None:
    recipient = recipient_of_all()
    recipient.set_state(applied, history, is_synced=synced)
    assert kinds(recipient.begin_generation(assignment_of(C, 3, (A, C, D)))) == [DropResidual]


def test_an_incomplete_residual_is_dropped() -> None:
    recipient = Transfer()
    recipient.receive_block(assignment_of(C), B, piece(0, 2))
    assert kinds(recipient.begin_generation(assignment_of(C, 3, (A, C, D)))) == [DropResidual]
    late = recipient.receive_block(assignment_of(C, 3, (A, C, D)), B, piece(1, 2))
    assert late == [], "of an earlier generation"
    assert recipient.mark_complete(assignment_of(C, 3, (A, C, D)), B) == [DropResidual(B)]


def test_a_leaving_member_and_one_at_another_step_decline() -> None:
    recipient = Transfer()
    recipient.begin((), None)
    (answer,) = recipient.receive_block(assignment_of(C), B, piece())
    assert answer == Send(B, m.ResidualReply(1, 2, False, "it is also leaving"))
    for applied, synced in ((3, True), (6, True), (5, False)):
        (answer,) = Transfer(applied, is_synced=synced).receive_block(assignment_of(C), B, piece())
        assert isinstance(answer, Send) and answer.message.is_accepted is False
    assert Transfer(3).receive_block(assignment_of(C), B, piece(0, 2)) == [], "one answer, to the last piece"


def test_only_a_neighbour_may_send_its_residual_and_only_once() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 0 sent its residual to rank 2 of 4"):
        Transfer().receive_block(assignment_of(C), A, piece())
    recipient = recipient_of_all()
    with pytest.raises(RemoteProtocolError, match="of generation 2 twice"):
        recipient.receive_block(assignment_of(C), B, piece())
    assert kinds(recipient.begin_generation(assignment_of(C, 3, (A, C, D)))) == [AddResidual], (
        "the first one still counts"
    )
