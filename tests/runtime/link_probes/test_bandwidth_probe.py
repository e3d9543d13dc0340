"""Bursts between workers: what they tell, in virtual time, and what a peer may not do with them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from gridtrain.core.messages import BURST_MESSAGE_BYTES, BURST_MESSAGES, Burst, BurstReceived, PeerId
from gridtrain.errors import TransportError
from gridtrain.runtime.link_probes.bandwidth_probe import (
    BURST_WINDOW_S,
    MOST_BURSTS,
    MOST_TARGETS,
    RATE_LIFETIME_S,
    BandwidthProbe,
)

FULL = bytes(BURST_MESSAGE_BYTES)
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


def answer_to(wire: Sent) -> BurstReceived:
    """To the last burst that was sent."""
    _, last = wire.messages[-1]
    return BurstReceived(last.nonce, last.payload[-8:])


def test_both_ends_find_the_rate_of_the_line() -> None:
    """A line of 1 MB/s and 10 ms each way: 256 KiB land after 10 + 262 ms, and the answer takes 10 more."""
    line_Bps, one_way_s = 1e6, 0.010
    sender, receiver, wire = BandwidthProbe(Random(1)), BandwidthProbe(Random(2)), Sent()
    sender.begin({BERT: 2 * one_way_s}, until_s=100.0, now_s=0.0)
    assert sender.advance(wire, 0.0)  # type: ignore[arg-type]
    assert [peer for peer, _ in wire.messages] == [BERT] * BURST_MESSAGES
    answers = []
    for index, (_, burst) in enumerate(wire.messages):
        there_s = one_way_s + (index + 1) * BURST_MESSAGE_BYTES / line_Bps
        answers.append(receiver.handle_burst(ANNA, burst, there_s))
    assert answers[:-1] == [None] * (BURST_MESSAGES - 1)
    answer = answers[-1]
    assert isinstance(answer, BurstReceived)
    assert answer == answer_to(wire)
    assert sender.take_new_rates() is None
    sender.handle_acknowledgement(BERT, answer, there_s + one_way_s)
    assert not sender.advance(wire, 1.0)  # type: ignore[arg-type]
    assert sender.take_new_rates() == ((BERT, pytest.approx(line_Bps), 0.0),)
    assert receiver.take_new_rates() == ((ANNA, 0.0, pytest.approx(line_Bps)),)
    assert sender.take_new_rates() is None and receiver.take_new_rates() is None


def test_a_round_trip_that_a_busy_loop_lengthened_makes_no_line_endlessly_fast() -> None:
    """Pings took 20 ms, as both ends' loops were busy; the burst of 100 Mbit/s is answered after 19 ms."""
    sender, wire = BandwidthProbe(Random(1)), Sent()
    sender.begin({BERT: 0.020}, until_s=100.0, now_s=0.0)
    sender.advance(wire, 0.0)  # type: ignore[arg-type]
    sender.handle_acknowledgement(BERT, answer_to(wire), 0.019)
    ((_, told_Bps, _),) = sender.take_new_rates() or ()
    assert told_Bps <= 4 * BURST_MESSAGES * BURST_MESSAGE_BYTES / 0.019, "and not 26 GB/s"


def test_one_burst_at_a_time_and_no_more_than_a_sample() -> None:
    peers = {bytes([i]) * 32: 0.001 for i in range(40)}
    bursts, wire = BandwidthProbe(Random(3)), Sent()
    bursts.begin(peers, until_s=100.0, now_s=0.0)
    asked = []
    while bursts.advance(wire, 0.0):  # type: ignore[arg-type]
        assert len(wire.messages) == BURST_MESSAGES
        peer, _ = wire.messages[-1]
        asked.append(peer)
        bursts.handle_acknowledgement(peer, answer_to(wire), 0.5)
        wire.messages.clear()
    assert len(asked) == len(set(asked)) == MOST_TARGETS and asked == sorted(asked), "in the order given"
    other = BandwidthProbe(Random(4))
    other.begin(peers, until_s=100.0, now_s=0.0)
    other.advance(wire, 0.0)  # type: ignore[arg-type]
    assert wire.messages[0][0] != asked[0], "another worker draws others"


def test_time_is_bounded_and_a_broken_peer_is_left_out() -> None:
    bursts, wire = BandwidthProbe(Random(5)), Sent()
    wire.broken = {ANNA}
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=1.0, now_s=0.0)
    assert bursts.advance(wire, 0.0)  # type: ignore[arg-type]
    assert {peer for peer, _ in wire.messages} == {BERT}
    assert not bursts.advance(wire, 1.0)  # type: ignore[arg-type]
    bursts.begin({BERT: 0.0}, until_s=9.0, now_s=1.0)
    assert bursts.advance(wire, 2.0)  # type: ignore[arg-type]
    bursts.remove_peer(BERT)
    assert not bursts.advance(wire, 2.1)  # type: ignore[arg-type]


def test_who_is_admitted_anew_tells_again_and_measures_what_is_new() -> None:
    """A coordinator that restarts knows no rates, and its workers are admitted every few seconds."""
    bursts, wire = BandwidthProbe(Random(5)), Sent()
    bursts.begin({ANNA: 0.0}, until_s=9.0, now_s=0.0)
    bursts.advance(wire, 0.0)  # type: ignore[arg-type]
    bursts.handle_acknowledgement(ANNA, answer_to(wire), 0.5)
    (told,) = bursts.take_new_rates() or ()
    wire.messages.clear()
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=9.0, now_s=3.0)
    assert bursts.advance(wire, 3.0)  # type: ignore[arg-type]
    assert {peer for peer, _ in wire.messages} == {BERT}
    bursts.handle_acknowledgement(BERT, answer_to(wire), 4.0)
    assert [peer for peer, *_ in bursts.take_new_rates() or ()] == [ANNA, BERT]
    bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=9.0, now_s=5.0)
    assert not bursts.advance(wire, 5.0)  # type: ignore[arg-type]
    assert told in (bursts.take_new_rates() or ())
    bursts.begin({ANNA: 0.0}, until_s=999.0, now_s=RATE_LIFETIME_S + 1.0)
    assert bursts.advance(wire, RATE_LIFETIME_S + 1.0)  # type: ignore[arg-type]


def test_what_is_not_awaited_tells_nothing() -> None:
    bursts = BandwidthProbe(Random(6))
    bursts.handle_acknowledgement(ANNA, BurstReceived(1, bytes(8)), 0.1)
    assert bursts.handle_burst(ANNA, Burst(7, BURST_MESSAGES - 1, FULL), 0.0) is None  # it never began
    bursts.handle_burst(ANNA, Burst(8, 0, FULL), 0.0)
    assert bursts.handle_burst(ANNA, Burst(9, BURST_MESSAGES - 1, FULL), 0.1) is None  # another one began
    assert bursts.take_new_rates() is None


@pytest.mark.parametrize(
    "indices",
    [
        [0, 15],  # 14 left out
        [*range(14), 15],
        [1, *range(1, 16)],  # the first left out
        [*range(8), *range(7, 16)],  # one twice
        [*range(7), 8, 7, *range(9, 16)],
    ],
)
def test_a_burst_with_gaps_is_not_answered(indices: list[int]) -> None:
    bursts = BandwidthProbe(Random(6))
    assert [bursts.handle_burst(ANNA, Burst(5, index, FULL), 0.001) for index in indices] == [None] * len(
        indices
    )
    assert bursts.take_new_rates() is None


def test_an_answer_before_the_last_message_is_there_tells_nothing() -> None:
    """Whoever sees the first message knows the nonce, but not how the last one ends."""
    bursts, wire = BandwidthProbe(Random(7)), Sent()
    bursts.begin({ANNA: 0.05}, until_s=100.0, now_s=0.0)
    bursts.advance(wire, 0.0)  # type: ignore[arg-type]
    _, first = wire.messages[0]
    bursts.handle_acknowledgement(ANNA, BurstReceived(first.nonce, first.payload[-8:]), 0.05)
    bursts.handle_acknowledgement(BERT, answer_to(wire), 0.05)
    assert bursts.take_new_rates() is None and bursts.advance(wire, 0.06)  # type: ignore[arg-type]
    bursts.handle_acknowledgement(ANNA, answer_to(wire), 0.1)
    assert bursts.take_new_rates() is not None


def test_nonces_cannot_be_foretold() -> None:
    nonces = set()
    for seed in range(20):
        bursts, wire = BandwidthProbe(Random(seed)), Sent()
        bursts.begin({ANNA: 0.0, BERT: 0.0}, until_s=100.0, now_s=0.0)
        bursts.advance(wire, 0.0)  # type: ignore[arg-type]
        bursts.remove_peer(wire.messages[-1][0])
        bursts.advance(wire, 0.0)  # type: ignore[arg-type]
        nonces |= {burst.nonce for _, burst in wire.messages}
    assert len(nonces) == 40


def test_who_never_answers_leaves_the_others_their_time() -> None:
    """8 peers and 40 s: the silent first one has 5 s of them, and all others are measured."""
    bursts, wire = BandwidthProbe(Random(9)), Sent()
    bursts.begin({bytes([i]) * 32: 0.0 for i in range(8)}, until_s=40.0, now_s=0.0)
    bursts.advance(wire, 0.0)  # type: ignore[arg-type]
    silent, late = wire.messages[-1][0], answer_to(wire)
    bursts.advance(wire, 4.9)  # type: ignore[arg-type]
    assert {peer for peer, _ in wire.messages} == {silent}
    now_s, heard = 5.0, set()
    while bursts.advance(wire, now_s):  # type: ignore[arg-type]
        bursts.handle_acknowledgement(silent, late, now_s)  # too late: another one is under way
        peer, _ = wire.messages[-1]
        now_s += 0.5
        bursts.handle_acknowledgement(peer, answer_to(wire), now_s)
        heard.add(peer)
    assert len(heard) == 7 and silent not in heard
    assert {peer for peer, *_ in bursts.take_new_rates() or ()} == heard


def test_a_peer_that_floods_is_named() -> None:
    bursts = BandwidthProbe(Random(7))
    for i in range(MOST_BURSTS * BURST_MESSAGES):
        assert not isinstance(
            bursts.handle_burst(ANNA, Burst(i // BURST_MESSAGES, i % BURST_MESSAGES, FULL), 0.0), str
        )
    assert bursts.handle_burst(ANNA, Burst(9, 0, FULL), 1.0) == "sent more than 1024 Bursts in 60 s"
    assert not isinstance(bursts.handle_burst(BERT, Burst(9, 0, FULL), 1.0), str)
    assert not isinstance(bursts.handle_burst(ANNA, Burst(9, 0, FULL), BURST_WINDOW_S), str)


def test_a_burst_of_another_length_is_named() -> None:
    says = BandwidthProbe(Random(8)).handle_burst(ANNA, Burst(1, 0, b"short"), 0.0)
    assert says == "sent a Burst of 5 bytes; it must have 16384 bytes"
