"""A snapshot from several sources: shared work, source sources, false tables, and limits."""

from __future__ import annotations

import math
import random
from collections import Counter, deque

import pytest

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


def snapshot(own: bytes = b"own", *, applied: int = 5, common: bytes = COMMON) -> StateSnapshot:
    return StateSnapshot.build(applied, HISTORY, own, common)


class Exchange:
    """Sources and one receiver; messages are delivered in the order sent, one block at a time."""

    def __init__(self, **snapshots: StateSnapshot) -> None:
        self.senders = {name.encode() * 32: SnapshotSender() for name in snapshots}
        for name, stored in snapshots.items():
            self.senders[name.encode() * 32].store(stored)
        self.receiver = SnapshotReceiver(1 << 30)
        self.requests: deque[tuple[m.PeerId, m.Message]] = deque()
        self.now_s = 0.0
        self.block_s: dict[m.PeerId, float] = {}  # of slow sources; infinite: sends its table and no block
        self.sent_s: dict[m.PeerId, float] = {}
        self.bytes_by_source: Counter[m.PeerId] = Counter()  # of the blocks that were stored
        for peer in self.senders:
            self.requests.extend(self.receiver.source_up(peer))

    def drop(self, peer: m.PeerId) -> None:
        del self.senders[peer]
        self.requests.extend(self.receiver.source_down(peer))

    def turn(self) -> None:
        while self.requests:
            peer, request = self.requests.popleft()
            if peer in self.senders:
                assert isinstance(request, m.SnapshotRequest | m.SnapshotBlocksRequest)
                for answer in self.senders[peer].handle_request(peer, request):
                    self.answer(peer, answer)
        for peer, sender in list(self.senders.items()):
            if self.now_s < self.sent_s.get(peer, 0.0) + self.block_s.get(peer, 0.0):
                continue
            block = sender.next_block(peer)
            if block is not None:
                self.sent_s[peer] = self.now_s
                self.answer(peer, block)
        self.now_s += 0.1
        self.requests.extend(self.receiver.tick(self.now_s))

    def answer(self, peer: m.PeerId, answer: m.Message) -> None:
        match answer:
            case m.SnapshotDigests():
                self.requests.extend(self.receiver.receive_table(peer, answer, self.now_s))
            case m.SnapshotBlock():
                before = self.receiver.progress[0]
                self.requests.extend(self.receiver.receive_block(peer, answer, self.now_s))
                if self.receiver.progress[0] > before:
                    self.bytes_by_source[peer] += len(answer.payload)
            case _:
                self.requests.extend(self.receiver.source_down(peer))

    def finish(self, turns: int = 200) -> None:
        for _ in range(turns):
            if self.receiver.is_complete:
                return
            self.turn()
        raise AssertionError(f"not complete: {self.receiver.progress}")


def test_sources_share_the_blocks() -> None:
    exchange = Exchange(a=snapshot(b"anna's"), b=snapshot(b"bert's"), c=snapshot(b"carl's"))
    exchange.finish()
    assert exchange.receiver.applied == 5 and exchange.receiver.history == HISTORY
    sent = exchange.bytes_by_source
    own, common = exchange.receiver.take_parts()
    assert (bytes(own), bytes(common)) == (b"anna's", COMMON)
    assert set(sent) == {A, B, C} and min(sent.values()) >= 2 * BLOCK_BYTES


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("source", [A, B])
def test_a_lost_source_is_replaced_and_no_block_is_requested_twice(source: bytes, turns: int) -> None:
    exchange = Exchange(a=snapshot(b"anna's"), b=snapshot(b"bert's own"))
    for _ in range(turns):
        exchange.turn()
    received_blocks = exchange.receiver.progress[0]
    exchange.drop(source)
    exchange.finish()
    own, common = exchange.receiver.take_parts()
    assert bytes(common) == COMMON and bytes(own) in (b"anna's", b"bert's own")
    if source == A:
        assert bytes(own) == b"bert's own" or received_blocks == 12
    assert sum(exchange.bytes_by_source.values()) <= len(COMMON) + 20


@pytest.mark.parametrize("source", [A, B])
@pytest.mark.parametrize("block_s", [math.inf, 60.0])
def test_a_very_slow_source_delays_a_snapshot_by_its_timeout(source: bytes, block_s: float) -> None:
    """Its blocks are then requested from other sources."""
    exchange = Exchange(a=snapshot(b"anna's"), b=snapshot(b"bert's"), c=snapshot(b"carl's"))
    exchange.block_s[source] = block_s
    exchange.finish(turns=150)
    assert exchange.now_s <= BLOCK_TIMEOUT_S + 4.0
    own, common = exchange.receiver.take_parts()
    assert bytes(common) == COMMON and bytes(own) == (b"bert's" if source == A else b"anna's")
    assert exchange.bytes_by_source.get(source, 0) <= BLOCK_BYTES


@pytest.mark.parametrize("source", [A, B])
def test_a_source_that_replaces_its_table_is_not_awaited(source: bytes) -> None:
    """The blocks requested from it would not arrive, and must be requested from others."""
    exchange = Exchange(a=snapshot(b"of a"), b=snapshot(b"of b"), c=snapshot(b"of c"))
    exchange.turn()
    exchange.senders[source].set_receivers(())  # it sends no block
    later = snapshot(b"later", applied=6)
    table = m.SnapshotDigests(6, HISTORY, later.table)
    exchange.requests.extend(exchange.receiver.receive_table(source, table, exchange.now_s))
    exchange.finish()
    _, common = exchange.receiver.take_parts()
    assert common == COMMON


def test_the_later_snapshot_of_an_only_source_is_used() -> None:
    exchange = Exchange(a=snapshot(b"of a"))
    exchange.turn()
    exchange.senders[A].store(snapshot(b"later", applied=6))
    exchange.requests = deque([(A, m.SnapshotRequest())])
    exchange.finish()
    assert exchange.receiver.applied == 6


def test_equally_slow_sources_are_awaited() -> None:
    """Each sends at a limited rate, perhaps to many receivers."""
    exchange = Exchange(a=snapshot(), b=snapshot())
    exchange.block_s = {A: 15.0, B: 20.0}
    exchange.finish(turns=2000)
    assert all(count > 3 * BLOCK_BYTES for count in exchange.bytes_by_source.values())


def test_the_only_remaining_source_is_used_however_slow_it_is() -> None:
    exchange = Exchange(a=snapshot(), b=snapshot())
    exchange.block_s[A] = 20.0
    while not exchange.receiver._sources[A].is_slow:
        exchange.turn()
        assert exchange.now_s < 20.0
    exchange.senders[B].set_receivers([])
    exchange.drop(B)
    exchange.finish(turns=3000)
    assert bytes(exchange.receiver.take_parts()[1]) == COMMON


def test_the_table_of_the_majority_is_used() -> None:
    other = bytearray(COMMON)
    other[3 * BLOCK_BYTES] ^= 1
    exchange = Exchange(a=snapshot(common=bytes(other)), b=snapshot(), c=snapshot())
    exchange.finish()
    assert bytes(exchange.receiver.take_parts()[1]) == COMMON
    assert A not in exchange.bytes_by_source


def test_of_two_steps_the_later_one_is_used() -> None:
    exchange = Exchange(a=snapshot(applied=5), b=snapshot(applied=6, common=b"later"))
    exchange.finish()
    assert exchange.receiver.applied == 6


def test_a_source_that_does_not_answer_is_awaited_for_a_limited_time() -> None:
    exchange = Exchange(a=snapshot())
    assert exchange.receiver.source_up(B) == [(B, m.SnapshotRequest())]
    exchange.turn()
    assert exchange.receiver.due_s == pytest.approx(SETTLE_S)
    exchange.finish(turns=400)


def test_a_false_table_that_arrives_first_is_not_used() -> None:
    """The false table arrives at once, while honest sources first take their snapshots."""
    exchange = Exchange(a=snapshot(common=b"a lie" * 1000))
    for peer in (B, C):
        exchange.receiver.source_up(peer)
    for _ in range(30):  # longer than SETTLE_S
        exchange.turn()
    for peer in (B, C):
        exchange.senders[peer] = SnapshotSender()
        exchange.senders[peer].store(snapshot())
        exchange.requests.append((peer, m.SnapshotRequest()))
    exchange.finish()
    assert bytes(exchange.receiver.take_parts()[1]) == COMMON


def test_repeated_requests_for_blocks_are_limited() -> None:
    sender = SnapshotSender()
    sender.store(snapshot())
    for _ in range(100):
        for answer in sender.handle_request(A, m.SnapshotBlocksRequest(5, (0,))):
            assert isinstance(answer, m.SnapshotUnavailable)
        sender.next_block(A)
    assert isinstance(sender.handle_request(A, m.SnapshotBlocksRequest(5, (0,)))[0], m.SnapshotUnavailable)


def test_after_the_loss_of_all_sources_a_new_source_is_used() -> None:
    exchange = Exchange(a=snapshot())
    exchange.turn()
    exchange.drop(A)
    exchange.senders[B] = SnapshotSender()
    exchange.senders[B].store(snapshot(applied=9, common=b"of another step"))
    exchange.requests.extend(exchange.receiver.source_up(B))
    exchange.finish()
    assert exchange.receiver.applied == 9


@pytest.mark.parametrize("turns", [0, 1, 5, 9])
def test_after_the_loss_of_all_sources_only_differing_blocks_are_requested_again(turns: int) -> None:
    """The same step from another source, and a later step in which two blocks have changed."""
    later = bytearray(COMMON)
    later[4 * BLOCK_BYTES], later[7 * BLOCK_BYTES] = later[4 * BLOCK_BYTES] ^ 1, later[7 * BLOCK_BYTES] ^ 1
    for applied, common, changed in ((5, COMMON, ()), (9, bytes(later), (4, 7))):
        exchange = Exchange(a=snapshot(b"anna's"))
        for _ in range(turns):
            exchange.turn()
        reused = exchange.receiver._buffer.received - set(changed)
        exchange.drop(A)
        exchange.senders[B] = SnapshotSender()
        exchange.senders[B].store(snapshot(b"bert's", applied=applied, common=common))
        exchange.requests.extend(exchange.receiver.source_up(B))
        exchange.finish()
        own, received = exchange.receiver.take_parts()
        assert (bytes(own), bytes(received), exchange.receiver.applied) == (b"bert's", common, applied)
        lengths = [exchange.receiver._buffer.layout.place(index).nbytes for index in reused]
        assert exchange.bytes_by_source[B] == len(COMMON) + 6 - sum(lengths)


@pytest.mark.parametrize("common", [COMMON[: 3 * BLOCK_BYTES + 5], COMMON + bytes(BLOCK_BYTES), b""])
def test_equal_blocks_of_a_state_of_another_length_are_reused(common: bytes) -> None:
    exchange = Exchange(a=snapshot())
    for _ in range(6):
        exchange.turn()
    exchange.drop(A)
    exchange.senders[B] = SnapshotSender()
    exchange.senders[B].store(snapshot(b"", applied=9, common=common))
    exchange.requests.extend(exchange.receiver.source_up(B))
    exchange.finish()
    assert bytes(exchange.receiver.take_parts()[1]) == common
    if common:
        assert exchange.bytes_by_source[B] <= max(0, len(common) - 3 * BLOCK_BYTES)


def test_a_block_that_differs_from_the_table_is_refused() -> None:
    exchange = Exchange(a=snapshot(), b=snapshot())
    exchange.turn()
    exchange.turn()
    index = min(exchange.receiver._sources[A].requested)
    with pytest.raises(RemoteProtocolError, match=f"block {index} of the snapshot of step 6"):
        exchange.receiver.receive_block(A, m.SnapshotBlock(5, index, bytes(BLOCK_BYTES)), 0.0)
    exchange.drop(A)  # as the I/O loop does after a violation
    exchange.finish()
    assert bytes(exchange.receiver.take_parts()[1]) == COMMON


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"short", "table is 5 bytes"),
        (
            StateSnapshot.build(1, b"", b"", bytes(2000)).table,
            "a snapshot has 2000 bytes; this worker accepts at most 1000",
        ),
        (StateSnapshot.build(1, b"", b"x", b"y").table + b"z", "does not match its parts of 1 and 1"),
    ],
)
def test_impossible_tables_are_refused(payload: bytes, words: str) -> None:
    receiver = SnapshotReceiver(1000)
    receiver.source_up(A)
    with pytest.raises(RemoteProtocolError, match=words):
        receiver.receive_table(A, m.SnapshotDigests(1, b"", payload), 0.0)


def test_a_worker_that_is_no_longer_a_receiver_gets_no_blocks() -> None:
    sender = SnapshotSender()
    assert sender.handle_request(A, m.SnapshotRequest()) == []
    assert [peer for peer, _ in sender.store(snapshot())] == [A]
    sender.handle_request(A, m.SnapshotBlocksRequest(5, (0, 1, 99)))
    assert isinstance(sender.next_block(A), m.SnapshotBlock)
    assert isinstance(sender.next_block(A), m.SnapshotBlock)
    assert isinstance(sender.next_block(A), m.SnapshotUnavailable)
    sender.handle_request(A, m.SnapshotBlocksRequest(5, (0, 1)))
    sender.set_receivers([])
    assert sender.next_block(A) is None and sender.snapshot is None
    assert isinstance(sender.handle_request(A, m.SnapshotBlocksRequest(5, (0,)))[0], m.SnapshotUnavailable)
