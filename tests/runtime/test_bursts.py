"""Bursts between workers: what they tell, in virtual time, and what a peer may not do with them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from gridtrain.errors import TransportError
from gridtrain.protocol.messages import BURST_BYTES, BURSTS, Burst, Landed, PeerId
from gridtrain.runtime.bursts import FRESH_S, MOST_TARGETS, MOST_TRAINS, TRAINS_S, Bursts

FULL = bytes(BURST_BYTES)
ANNA, BERT = b"a" * 32, b"b" * 32


class Sent:
    """Takes what is sent; a peer in `broken` cannot be sent anything."""

    def __init__(self) -> None:
        self.messages: list[tuple[PeerId, Burst]] = []
        self.broken: set[PeerId] = set()

    def send(self, peer: PeerId, message: Any) -> None:
        if peer in self.broken:
            raise TransportError("gone")
        self.messages.append((peer, message))


def test_both_ends_find_the_rate_of_the_line() -> None:
    """A line of 1 MB/s and 10 ms each way: 256 KiB land after 10 + 262 ms, and the answer takes 10 more."""
    line_Bps, one_way_s = 1e6, 0.010
    sender, receiver, wire = Bursts(Random(1)), Bursts(Random(2)), Sent()
    sender.begin({BERT: 2 * one_way_s}, until_s=100.0, now_s=0.0)
    assert sender.turn(wire, 0.0)  # type: ignore[arg-type]
    assert [peer for peer, _ in wire.messages] == [BERT] * BURSTS
    answers = []
    for index, (_, burst) in enumerate(wire.messages):
        there_s = one_way_s + (index + 1) * BURST_BYTES / line_Bps
        answers.append(receiver.came(ANNA, burst, there_s))
    assert answers == [None] * (BURSTS - 1) + [Landed(1)]
    assert sender.news() is None
    sender.landed(BERT, 1, there_s + one_way_s)
    assert not sender.turn(wire, 1.0)  # type: ignore[arg-type]
    assert sender.news() == ((BERT, pytest.approx(line_Bps), 0.0),)
    assert receiver.news() == ((ANNA, 0.0, pytest.approx(line_Bps)),)
    assert sender.news() is None and receiver.news() is None


def test_one_burst_at_a_time_and_no_more_than_a_sample() -> None:
    peers = {bytes([i]) * 32: 0.001 for i in range(40)}
    bursts, wire = Bursts(Random(3)), Sent()
    bursts.begin(peers, until_s=100.0, now_s=0.0)
    asked = []
    while bursts.turn(wire, 0.0):  # type: ignore[arg-type]
        assert len(wire.messages) == BURSTS
        peer, burst = wire.messages[-1]
        asked.append(peer)
        bursts.landed(peer, burst.nonce, 0.5)
        wire.messages.clear()
    assert len(asked) == len(set(asked)) == MOST_TARGETS
    other = Bursts(Random(4))
    other.begin(peers, until_s=100.0, now_s=0.0)
    other.turn(wire, 0.0)  # type: ignore[arg-type]
    assert wire.messages[0][0] != asked[0], "workers that join together begin with different peers"


def test_time_is_bounded_and_a_broken_peer_is_left_out() -> None:
    bursts, wire = Bursts(Random(5)), Sent()
    wire.broken = {ANNA}
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=1.0, now_s=0.0)
    assert bursts.turn(wire, 0.0)  # type: ignore[arg-type]
    assert {peer for peer, _ in wire.messages} == {BERT}
    assert not bursts.turn(wire, 1.0)  # type: ignore[arg-type]
    bursts.begin({BERT: 0.0}, until_s=9.0, now_s=1.0)
    assert bursts.turn(wire, 2.0)  # type: ignore[arg-type]
    bursts.forget(BERT)
    assert not bursts.turn(wire, 2.1)  # type: ignore[arg-type]


def test_who_is_admitted_anew_tells_again_and_measures_what_is_new() -> None:
    """A coordinator that restarts knows no rates, and its workers are admitted every few seconds."""
    bursts, wire = Bursts(Random(5)), Sent()
    bursts.begin({ANNA: 0.0}, until_s=9.0, now_s=0.0)
    bursts.turn(wire, 0.0)  # type: ignore[arg-type]
    bursts.landed(ANNA, 1, 0.5)
    (told,) = bursts.news() or ()
    wire.messages.clear()
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=9.0, now_s=3.0)
    assert bursts.turn(wire, 3.0)  # type: ignore[arg-type]
    assert {peer for peer, _ in wire.messages} == {BERT}
    bursts.landed(BERT, 2, 4.0)
    assert [peer for peer, *_ in bursts.news() or ()] == [ANNA, BERT]
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=9.0, now_s=5.0)
    assert not bursts.turn(wire, 5.0)  # type: ignore[arg-type]
    assert told in (bursts.news() or ())
    bursts.begin({ANNA: 0.0}, until_s=999.0, now_s=FRESH_S + 1.0)
    assert bursts.turn(wire, FRESH_S + 1.0)  # type: ignore[arg-type]


def test_what_is_not_awaited_tells_nothing() -> None:
    bursts = Bursts(Random(6))
    bursts.landed(ANNA, 1, 0.1)
    assert bursts.came(ANNA, Burst(7, BURSTS - 1, FULL), 0.0) is None  # it never began
    bursts.came(ANNA, Burst(8, 0, FULL), 0.0)
    assert bursts.came(ANNA, Burst(9, BURSTS - 1, FULL), 0.1) is None  # another one began
    assert bursts.news() is None


def test_a_peer_that_floods_is_named() -> None:
    bursts = Bursts(Random(7))
    for i in range(MOST_TRAINS * BURSTS):
        assert not isinstance(bursts.came(ANNA, Burst(i // BURSTS, i % BURSTS, FULL), 0.0), str)
    assert bursts.came(ANNA, Burst(9, 0, FULL), 1.0) == "sent more than 1024 Bursts in 60 s"
    assert not isinstance(bursts.came(BERT, Burst(9, 0, FULL), 1.0), str)
    assert not isinstance(bursts.came(ANNA, Burst(9, 0, FULL), TRAINS_S), str)


def test_a_burst_of_another_length_is_named() -> None:
    says = Bursts(Random(8)).came(ANNA, Burst(1, 0, b"short"), 0.0)
    assert says == "sent a Burst of 5 bytes, must be 16384"
