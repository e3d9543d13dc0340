"""`grid.mean`: requests, replies, repetition, and cancellation."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import DeliverMean, Send
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.scalar_means import (
    BEFORE_STEP_INDEX,
    KNOWN_INDEX,
    MAX_OPEN_MEANS,
    SUBMITTED_INDEX,
    WEIGHTS_INDEX,
    ScalarMeans,
)
from gridtrain.errors import RemoteProtocolError

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
MEMBERS = tuple(m.Member(peer, name, "", 1, False) for name, peer in (("anna", A), ("bob", B), ("carl", C)))


def means(
    me: m.PeerId, *joining: str, known: Mapping[tuple[int, int], float] = MappingProxyType({})
) -> ScalarMeans:
    members = tuple(replace(member, joining=member.name in joining) for member in MEMBERS)
    return ScalarMeans(RankAssignment(me, 1, 5, members), 7, known)


def ask(value: float, *, step: int = 7, generation: int = 5) -> m.MeanRequest:
    return m.MeanRequest(1, generation, step, 0, value)


def test_the_root_replies_to_all_once_all_have_asked() -> None:
    root, reply = means(A), m.MeanReply(1, 5, 7, 0, 2.0)
    assert root.receive(B, ask(3.0)) == []
    assert root.request((7, 0), 1.0) == []
    assert root.receive(C, ask(2.0)) == [DeliverMean(7, 0, 2.0), Send(B, reply), Send(C, reply)]


def test_a_member_asks_the_root_and_waits_for_its_answer() -> None:
    member = means(B)
    assert member.request((7, 0), 3.0) == [Send(A, ask(3.0))]
    assert member.receive(A, m.MeanReply(1, 5, 6, 0, 9.0)) == []  # of an earlier step
    assert member.receive(A, m.MeanReply(1, 4, 7, 0, 9.0)) == []  # of an earlier generation
    assert member.receive(A, m.MeanReply(1, 5, 7, 0, 2.0)) == [DeliverMean(7, 0, 2.0)]
    assert member.receive(A, m.MeanReply(1, 5, 7, 0, 2.0)) == []  # a repeated reply


def test_a_request_lost_with_the_connection_to_the_root_is_repeated() -> None:
    """If the request was lost, the root has nothing; if the reply was lost, it repeats the result."""
    member, root, reply = means(B), means(A), m.MeanReply(1, 5, 7, 0, 2.0)
    assert member.peer_connected(A) == [], "no reply is awaited"
    member.request((7, 0), 3.0)
    assert member.peer_connected(C) == []
    assert member.peer_connected(A) == [Send(A, ask(3.0))]
    for peer, value in ((B, 3.0), (C, 2.0)):
        root.receive(peer, ask(value))
    root.request((7, 0), 1.0)
    assert Send(B, reply) in root.receive(B, ask(3.0))
    member.receive(A, reply)
    assert member.peer_connected(A) == []


def test_the_end_of_a_generation_cancels_the_average() -> None:
    member = means(B)
    assert member.cancel() == []
    member.request((7, 0), 3.0)
    assert member.cancel() == [DeliverMean(7, 0, None)]


def test_an_average_that_a_member_knows_is_that_of_the_others_in_the_next_generation() -> None:
    bob, reply = means(B), m.MeanReply(1, 5, 7, 0, 2.0)
    bob.request((7, 0), 3.0)
    bob.receive(A, reply)
    assert bob.known == {(7, 0): 2.0}
    root, bob = means(A), means(B, known=bob.known)
    assert root.request((7, 0), 1.0) == [], "the root's average was cancelled"
    (request,) = bob.request((7, 0), 3.0)
    assert isinstance(request, Send) and request.message == m.MeanRequest(1, 5, 7, KNOWN_INDEX, 2.0)
    assert root.receive(B, request.message) == [DeliverMean(7, 0, 2.0), Send(B, reply)]
    assert root.receive(C, ask(8.0)) == [Send(C, reply)]
    liar = m.MeanRequest(1, 5, 7, KNOWN_INDEX, 9.0)
    assert means(A, known=root.known).receive(C, liar) == [Send(C, reply)], "the root knows better"
    knowing = means(A, known=root.known)
    assert knowing.request((7, 0), 1.0) == [DeliverMean(7, 0, 2.0)]
    assert knowing.receive(C, ask(8.0)) == [Send(C, reply)]


@pytest.mark.parametrize("stalled", [A, B], ids=["root", "member"])
def test_an_average_that_only_a_stalled_trainer_knows_is_that_of_the_others(stalled: m.PeerId) -> None:
    first, second = (7, BEFORE_STEP_INDEX), (7, BEFORE_STEP_INDEX + 1)
    member = means(stalled, known={second: 4.0, first: 2.0, (5, BEFORE_STEP_INDEX): 1.0})
    root = member if stalled == A else means(A)
    for effect in member.repeat_known():
        assert isinstance(effect, Send) and isinstance(effect.message, m.MeanRequest), effect
        root.receive(B, effect.message)
    for (step, index), value in ((first, 2.0), (second, 4.0)):
        request, reply = m.MeanRequest(1, 5, step, index, 9.0), m.MeanReply(1, 5, step, index, value)
        assert root.receive(C, request) == [Send(C, reply)]


def test_weights_are_not_those_of_an_earlier_generation_and_few_averages_are_known() -> None:
    bob = means(B)
    for step, index in [(7, WEIGHTS_INDEX), *((step, 0) for step in range(8, 8 + 2 * MAX_OPEN_MEANS))]:
        bob.request((step, index), 3.0)
        bob.receive(A, m.MeanReply(1, 5, step, index, 2.0))
    assert len(bob.known) == MAX_OPEN_MEANS and WEIGHTS_INDEX not in {index for _, index in bob.known}


def test_a_joining_member_is_awaited_from_its_first_step_on() -> None:
    root, before, after = means(A, "carl"), (7, BEFORE_STEP_INDEX), (7, 0)
    root.request(after, 1.0)
    assert root.receive(B, ask(3.0)) == [DeliverMean(*after, 2.0), Send(B, m.MeanReply(1, 5, *after, 2.0))]
    root.request(before, 1.0)
    assert root.receive(B, m.MeanRequest(1, 5, *before, 3.0)) == []
    reply = m.MeanReply(1, 5, *before, 3.0)
    asked = root.receive(C, m.MeanRequest(1, 5, *before, 5.0))
    assert asked == [DeliverMean(*before, 3.0), Send(B, reply), Send(C, reply)]
    later = (8, 0)
    root.request(later, 1.0)
    assert root.receive(B, m.MeanRequest(1, 5, *later, 3.0)) == []


def test_the_open_averages_at_the_root_are_bounded() -> None:
    root = means(A)
    for step in range(10 * MAX_OPEN_MEANS):
        root.receive(B, ask(1.0, step=step))
    assert len(root._values) == MAX_OPEN_MEANS
    assert root.receive(B, ask(1.0, generation=4)) == []


def test_many_requests_of_one_member_displace_no_other() -> None:
    root = means(A)
    root.receive(C, ask(2.0))
    for step in range(2**62, 2**62 + 10 * MAX_OPEN_MEANS):
        root.receive(B, ask(1.0, step=step))
    reply = m.MeanReply(1, 5, 7, 0, 1.5)
    assert root.request((7, 0), 1.0) == [DeliverMean(7, 0, 1.5), Send(C, reply)], "B has made later calls"
    assert root.receive(B, ask(3.0)) == [Send(B, reply)]
    assert len(root._values) <= MAX_OPEN_MEANS + 1


def test_a_member_that_has_made_a_later_call_is_not_awaited() -> None:
    root = means(A)
    root.request((7, 3), 1.0)
    root.receive(C, m.MeanRequest(1, 5, 7, 3, 2.0))
    earlier = m.MeanReply(1, 5, 7, 2, 9.0)
    assert root.receive(B, m.MeanRequest(1, 5, 7, 2, 9.0)) == [Send(B, earlier)], (
        "A and C have made later calls"
    )
    weights = m.MeanRequest(1, 5, 7, WEIGHTS_INDEX, 9.0)
    assert root.receive(B, weights) == [], "weights are announced before other calls of a step"
    reply = m.MeanReply(1, 5, 7, 3, 1.5)
    assert root.receive(B, ask(9.0, step=8)) == [DeliverMean(7, 3, 1.5), Send(C, reply)]


def test_a_member_that_has_submitted_the_step_without_the_call_is_not_awaited_but_named() -> None:
    """Until it has submitted, it may still call: an evaluation may take long."""
    bob, carl, root = means(B), means(C), means(A)
    (request,) = bob.request((7, 0), 3.0)
    assert isinstance(request, Send) and root.receive(B, request.message) == []  # type: ignore[arg-type]
    assert carl.trainer_submitted(6) == [], "the root has not asked"
    question = m.MeanReply(1, 5, 7, SUBMITTED_INDEX, 2.0)
    assert [root.ask_missing(), root.ask_missing()] == [[Send(C, question)], []]
    assert carl.receive(A, question) == []
    (report,) = carl.trainer_submitted(7)
    assert report == Send(A, m.MeanRequest(1, 5, 7, SUBMITTED_INDEX, 0.0))
    assert root.receive(C, report.message) == []  # type: ignore[union-attr, arg-type]
    assert root.trainer_submitted(6) == [], "the root has not submitted step 7"
    replies = root.trainer_submitted(7)
    named = [m.MeanReply(1, 5, 7, SUBMITTED_INDEX, rank) for rank in (0.0, 2.0)]
    assert replies == [Send(B, reply) for reply in (*named, m.MeanReply(1, 5, 7, 0, 3.0))]
    answers = [effect for reply in replies for effect in bob.receive(A, reply.message)]  # type: ignore[union-attr, arg-type]
    assert answers == [DeliverMean(7, 0, 3.0, ("anna", "carl"))]
    bob.request((8, 0), 5.0)
    assert bob.receive(A, m.MeanReply(1, 5, 8, 0, 4.0)) == [DeliverMean(8, 0, 4.0)], "all have called"


def test_a_question_that_is_lost_with_a_connection_is_repeated() -> None:
    root = means(A)
    root.request((7, 0), 1.0)
    both = root.ask_missing()
    assert [effect.peer for effect in both if isinstance(effect, Send)] == [B, C]
    assert root.peer_connected(C) == []
    assert root.ask_missing() == both[1:]


def test_weights_are_awaited_from_members_that_have_submitted() -> None:
    root = means(A)
    root.request((7, WEIGHTS_INDEX), 1.0)
    assert root.ask_missing() == []
    for peer in (B, C):
        assert root.receive(peer, m.MeanRequest(1, 5, 7, SUBMITTED_INDEX, 0.0)) == []


@pytest.mark.parametrize("rank", [-1.0, 0.5, 3.0, float("nan"), float("inf")])
def test_a_reply_about_an_unknown_rank_is_ignored(rank: float) -> None:
    bob = means(B)
    bob.request((7, 0), 3.0)
    assert bob.receive(A, m.MeanReply(1, 5, 7, SUBMITTED_INDEX, rank)) == []
    assert bob.receive(A, m.MeanReply(1, 5, 7, 0, 3.0)) == [DeliverMean(7, 0, 3.0)]


@pytest.mark.parametrize(
    ("me", "peer", "message", "words"),
    [
        (B, C, ask(1.0), "rank 2 sent MeanRequest to rank 1; only rank 0 receives requests for averages"),
        (B, C, m.MeanReply(1, 5, 7, 0, 9.0), "rank 2 sent MeanReply to rank 1"),
        (A, B, m.MeanReply(1, 5, 7, 0, 9.0), "rank 1 sent MeanReply to rank 0"),
    ],
    ids=["request to a member", "reply by a member", "reply to the root"],
)
def test_only_the_root_computes_averages(me: m.PeerId, peer: m.PeerId, message: Any, words: str) -> None:
    mine = means(me)
    mine.request((7, 0), 3.0)
    with pytest.raises(RemoteProtocolError, match=words):
        mine.receive(peer, message)
    assert mine.awaited_key == (7, 0)


def test_numbers_that_overflow_a_sum_still_have_a_finite_average() -> None:
    root, largest = means(A), sys.float_info.max
    root.request((7, 0), largest)
    root.receive(B, ask(largest))
    assert root.receive(C, ask(largest))[0] == DeliverMean(7, 0, largest)
    root = means(A)
    root.request((8, 0), largest)
    root.receive(B, ask(largest, step=8))
    (delivered, *_) = root.receive(C, ask(largest / 4, step=8))
    assert isinstance(delivered, DeliverMean) and delivered.value == pytest.approx(largest / 4 * 3)


@pytest.mark.parametrize(
    ("values", "average"),
    [
        ((1.0, math.nan, 2.0), math.nan),
        ((math.inf, 1.0, 2.0), math.inf),
        ((math.inf, -math.inf, 2.0), math.nan),
    ],
)
def test_a_number_that_is_not_finite_makes_the_average_so(values: tuple[float, ...], average: float) -> None:
    root = means(A)
    root.request((7, 0), values[0])
    root.receive(B, ask(values[1]))
    (delivered, *sent) = root.receive(C, ask(values[2]))
    assert isinstance(delivered, DeliverMean) and delivered.value == pytest.approx(average, nan_ok=True)
    assert len(sent) == 2


def test_an_average_does_not_wait_for_absent_ranks() -> None:
    root = means(A)
    root.absent = frozenset({2})
    assert root.request((7, 0), 1.0) == [] and root.awaited_ranks == {1, 2}
    assert root.receive(B, ask(3.0)) == [DeliverMean(7, 0, 2.0), Send(B, m.MeanReply(1, 5, 7, 0, 2.0))]
    assert root.awaited_ranks == frozenset()
    assert root.receive(C, ask(9.0)) == [Send(C, m.MeanReply(1, 5, 7, 0, 2.0))], "the result is sent again"


def test_the_root_completes_averages_that_no_other_member_requests() -> None:
    root = means(A)
    assert root.receive(C, ask(4.0)) == [] and root.awaited_ranks == {0, 1}
    assert root.complete() == [Send(C, m.MeanReply(1, 5, 7, 0, 4.0))]
    assert root.complete() == []
