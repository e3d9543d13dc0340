"""A follower's image from several donors: shared work, vanished donors, liars, and what is out of bounds."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from defences import disable_defences

from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES
from gridtrain.runtime.state_transfer.state_snapshot import (
    BLOCK_TIMEOUT_S,
    SETTLE_S,
    SnapshotReceiver,
    SnapshotSender,
    StateSnapshot,
)

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
COMMON = random.Random(7).randbytes(10 * BLOCK_BYTES + 123)
HISTORY = b"h" * 32


def image(own: bytes = b"own", *, applied: int = 5, common: bytes = COMMON) -> StateSnapshot:
    return StateSnapshot.build(applied, HISTORY, own, common)


class Exchange:
    """Donors and one follower; messages are delivered in the order sent, one donor's block at a time."""

    def __init__(self, **images: StateSnapshot) -> None:
        self.outlets = {name.encode() * 32: SnapshotSender() for name in images}
        for name, it in images.items():
            self.outlets[name.encode() * 32].store(it)
        self.intake = SnapshotReceiver(1 << 30)
        self.asks: deque[tuple[m.PeerId, m.Message]] = deque()
        self.now_s = 0.0
        self.block_s: dict[m.PeerId, float] = {}  # of slow ones; infinite: it sends its table and no block
        self.sent_s: dict[m.PeerId, float] = {}
        for peer in self.outlets:
            self.asks.extend(self.intake.source_up(peer))

    def drop(self, peer: m.PeerId) -> None:
        del self.outlets[peer]
        self.asks.extend(self.intake.source_down(peer))

    def turn(self) -> None:
        while self.asks:
            peer, ask = self.asks.popleft()
            if peer in self.outlets:
                assert isinstance(ask, m.SnapshotRequest | m.SnapshotBlocksRequest)
                for answer in self.outlets[peer].handle_request(peer, ask):
                    self.answer(peer, answer)
        for peer, outlet in list(self.outlets.items()):
            if self.now_s < self.sent_s.get(peer, 0.0) + self.block_s.get(peer, 0.0):
                continue
            block = outlet.next_block(peer)
            if block is not None:
                self.sent_s[peer] = self.now_s
                self.answer(peer, block)
        self.now_s += 0.1
        self.asks.extend(self.intake.tick(self.now_s))

    def answer(self, peer: m.PeerId, answer: m.Message) -> None:
        match answer:
            case m.SnapshotDigests():
                self.asks.extend(self.intake.receive_table(peer, answer, self.now_s))
            case m.SnapshotBlock():
                self.asks.extend(self.intake.receive_block(peer, answer, self.now_s))
            case _:
                self.asks.extend(self.intake.source_down(peer))

    def finish(self, turns: int = 200) -> None:
        for _ in range(turns):
            if self.intake.is_complete:
                return
            self.turn()
        raise AssertionError(f"not complete: {self.intake.progress}")


def test_donors_share_the_blocks() -> None:
    exchange = Exchange(a=image(b"anna's"), b=image(b"bert's"), c=image(b"carl's"))
    exchange.finish()
    assert exchange.intake.applied == 5 and exchange.intake.history == HISTORY
    given = exchange.intake.bytes_by_source
    own, common = exchange.intake.take_parts()
    assert (bytes(own), bytes(common)) == (b"anna's", COMMON)
    assert set(given) == {A, B, C} and min(given.values()) >= 2 * BLOCK_BYTES


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("who", [A, B])
def test_a_donor_that_vanishes_is_replaced_and_nothing_is_fetched_twice(who: bytes, when: int) -> None:
    exchange = Exchange(a=image(b"anna's"), b=image(b"bert's own"))
    for _ in range(when):
        exchange.turn()
    had = exchange.intake.progress[0]
    exchange.drop(who)
    exchange.finish()
    own, common = exchange.intake.take_parts()
    assert bytes(common) == COMMON and bytes(own) in (b"anna's", b"bert's own")
    if who == A:
        assert bytes(own) == b"bert's own" or had == 12
    assert sum(exchange.intake.bytes_by_source.values()) <= len(COMMON) + 20


@pytest.mark.parametrize("who", [A, B])
@pytest.mark.parametrize("block_s", [math.inf, 60.0])
def test_a_source_that_hardly_sends_delays_a_snapshot_by_its_timeout(who: bytes, block_s: float) -> None:
    """It held its blocks, and with them the snapshot, for as long as it liked."""
    exchange = Exchange(a=image(b"anna's"), b=image(b"bert's"), c=image(b"carl's"))
    exchange.block_s[who] = block_s
    exchange.finish(turns=150)
    assert exchange.now_s <= BLOCK_TIMEOUT_S + 4.0
    own, common = exchange.intake.take_parts()
    assert bytes(common) == COMMON and bytes(own) == (b"bert's" if who == A else b"anna's")
    assert exchange.intake.bytes_by_source.get(who, 0) <= BLOCK_BYTES


@pytest.mark.parametrize("who", [A, B])
def test_a_source_that_replaces_its_table_is_not_waited_for(who: bytes) -> None:
    """Of what was requested from it nothing would come, and nobody else would be asked for it."""
    exchange = Exchange(a=image(b"of a"), b=image(b"of b"), c=image(b"of c"))
    exchange.turn()
    exchange.outlets[who].set_receivers(())  # it sends no block
    later = image(b"later", applied=6)
    table = m.SnapshotDigests(6, HISTORY, later.table)
    exchange.asks.extend(exchange.intake.receive_table(who, table, exchange.now_s))
    exchange.finish()
    _, common = exchange.intake.take_parts()
    assert common == COMMON


def test_of_an_only_source_the_later_snapshot_is_taken() -> None:
    exchange = Exchange(a=image(b"of a"))
    exchange.turn()
    exchange.outlets[A].store(image(b"later", applied=6))
    exchange.asks = deque([(A, m.SnapshotRequest())])
    exchange.finish()
    assert exchange.intake.applied == 6


def test_sources_that_are_slow_alike_are_waited_for() -> None:
    """Each sends at a limited rate, perhaps to many receivers."""
    exchange = Exchange(a=image(), b=image())
    exchange.block_s = {A: 15.0, B: 20.0}
    exchange.finish(turns=2000)
    assert all(count > 3 * BLOCK_BYTES for count in exchange.intake.bytes_by_source.values())


def test_the_only_source_that_is_left_is_asked_however_slow_it_is() -> None:
    exchange = Exchange(a=image(), b=image())
    exchange.block_s[A] = 20.0
    while not exchange.intake._sources[A].is_slow:
        exchange.turn()
        assert exchange.now_s < 20.0
    exchange.outlets[B].set_receivers([])
    exchange.drop(B)
    exchange.finish(turns=3000)
    assert bytes(exchange.intake.take_parts()[1]) == COMMON


def test_the_table_that_most_have_is_believed() -> None:
    other = bytearray(COMMON)
    other[3 * BLOCK_BYTES] ^= 1
    exchange = Exchange(a=image(common=bytes(other)), b=image(), c=image())
    exchange.finish()
    assert bytes(exchange.intake.take_parts()[1]) == COMMON
    assert A not in exchange.intake.bytes_by_source


def test_of_two_steps_the_later_one_is_taken() -> None:
    exchange = Exchange(a=image(applied=5), b=image(applied=6, common=b"later"))
    exchange.finish()
    assert exchange.intake.applied == 6


def test_a_donor_without_an_answer_is_not_waited_for_for_ever() -> None:
    exchange = Exchange(a=image())
    assert exchange.intake.source_up(B) == [(B, m.SnapshotRequest())]
    exchange.turn()
    assert exchange.intake.due_s == pytest.approx(SETTLE_S)
    exchange.finish(turns=400)


def test_one_that_is_quick_to_lie_is_not_alone_with_its_tale() -> None:
    """Its table comes at once; honest ones take their images first."""
    exchange = Exchange(a=image(common=b"a lie" * 1000))
    for peer in (B, C):
        exchange.intake.source_up(peer)
    for _ in range(30):  # longer than SETTLE_S
        exchange.turn()
    for peer in (B, C):
        exchange.outlets[peer] = SnapshotSender()
        exchange.outlets[peer].store(image())
        exchange.asks.append((peer, m.SnapshotRequest()))
    exchange.finish()
    assert bytes(exchange.intake.take_parts()[1]) == COMMON


def test_blocks_are_not_given_again_and_again() -> None:
    outlet = SnapshotSender()
    outlet.store(image())
    for _ in range(100):
        for answer in outlet.handle_request(A, m.SnapshotBlocksRequest(5, (0,))):
            assert isinstance(answer, m.SnapshotUnavailable)
        outlet.next_block(A)
    assert isinstance(outlet.handle_request(A, m.SnapshotBlocksRequest(5, (0,)))[0], m.SnapshotUnavailable)
    with disable_defences("image-asks"):
        assert outlet.handle_request(A, m.SnapshotBlocksRequest(5, (0,))) == []


def test_if_all_go_it_begins_anew_with_whoever_comes() -> None:
    exchange = Exchange(a=image())
    exchange.turn()
    exchange.drop(A)
    exchange.outlets[B] = SnapshotSender()
    exchange.outlets[B].store(image(applied=9, common=b"of another step"))
    exchange.asks.extend(exchange.intake.source_up(B))
    exchange.finish()
    assert exchange.intake.applied == 9


@pytest.mark.parametrize("turns", [0, 1, 5, 9])
def test_if_all_go_only_the_blocks_that_differ_are_requested_again(turns: int) -> None:
    """The same step from others, and a later step in which two blocks have changed."""
    later = bytearray(COMMON)
    later[4 * BLOCK_BYTES], later[7 * BLOCK_BYTES] = later[4 * BLOCK_BYTES] ^ 1, later[7 * BLOCK_BYTES] ^ 1
    for applied, common, changed in ((5, COMMON, ()), (9, bytes(later), (4, 7))):
        exchange = Exchange(a=image(b"anna's"))
        for _ in range(turns):
            exchange.turn()
        kept = exchange.intake._buffer.received - set(changed)
        exchange.drop(A)
        exchange.outlets[B] = SnapshotSender()
        exchange.outlets[B].store(image(b"bert's", applied=applied, common=common))
        exchange.asks.extend(exchange.intake.source_up(B))
        exchange.finish()
        own, received = exchange.intake.take_parts()
        assert (bytes(own), bytes(received), exchange.intake.applied) == (b"bert's", common, applied)
        lengths = [exchange.intake._buffer.layout.place(index).nbytes for index in kept]
        assert exchange.intake.bytes_by_source[B] == len(COMMON) + 6 - sum(lengths)


@pytest.mark.parametrize("common", [COMMON[: 3 * BLOCK_BYTES + 5], COMMON + bytes(BLOCK_BYTES), b""])
def test_a_state_of_another_length_has_blocks_in_common(common: bytes) -> None:
    exchange = Exchange(a=image())
    for _ in range(6):
        exchange.turn()
    exchange.drop(A)
    exchange.outlets[B] = SnapshotSender()
    exchange.outlets[B].store(image(b"", applied=9, common=common))
    exchange.asks.extend(exchange.intake.source_up(B))
    exchange.finish()
    assert bytes(exchange.intake.take_parts()[1]) == common
    if common:
        assert exchange.intake.bytes_by_source[B] <= max(0, len(common) - 3 * BLOCK_BYTES)


def test_a_block_that_is_not_what_the_table_says() -> None:
    exchange = Exchange(a=image(), b=image())
    exchange.turn()
    exchange.turn()
    index = min(exchange.intake._sources[A].requested)
    with pytest.raises(RemoteProtocolError, match=f"block {index} of the snapshot of step 5"):
        exchange.intake.receive_block(A, m.SnapshotBlock(5, index, bytes(BLOCK_BYTES)), 0.0)
    exchange.drop(A)  # as the loop does with whoever breaks the protocol
    exchange.finish()
    assert bytes(exchange.intake.take_parts()[1]) == COMMON


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"short", "table has 5 bytes"),
        (
            StateSnapshot.build(1, b"", b"", bytes(2000)).table,
            "a snapshot has 2000 bytes; this worker accepts at most 1000",
        ),
        (StateSnapshot.build(1, b"", b"x", b"y").table + b"z", "does not match its parts of 1 and 1"),
    ],
)
def test_tables_that_cannot_be(payload: bytes, words: str) -> None:
    intake = SnapshotReceiver(1000)
    intake.source_up(A)
    with pytest.raises(RemoteProtocolError, match=words):
        intake.receive_table(A, m.SnapshotDigests(1, b"", payload), 0.0)


def test_a_follower_that_is_none_any_more_gets_nothing() -> None:
    outlet = SnapshotSender()
    assert outlet.handle_request(A, m.SnapshotRequest()) == []
    assert [peer for peer, _ in outlet.store(image())] == [A]
    outlet.handle_request(A, m.SnapshotBlocksRequest(5, (0, 1, 99)))
    assert isinstance(outlet.next_block(A), m.SnapshotBlock)
    assert isinstance(outlet.next_block(A), m.SnapshotBlock)
    assert isinstance(outlet.next_block(A), m.SnapshotUnavailable)
    outlet.handle_request(A, m.SnapshotBlocksRequest(5, (0, 1)))
    outlet.set_receivers([])
    assert outlet.next_block(A) is None and outlet.snapshot is None
    assert isinstance(outlet.handle_request(A, m.SnapshotBlocksRequest(5, (0,)))[0], m.SnapshotUnavailable)
