"""A state that goes from newcomer to newcomer: when it is there, and what of it is believed."""

from __future__ import annotations

from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.errors import LocalProtocolError, TransportError
from gridtrain.runtime.state_transfer.blobs import (
    BACKLOG_BYTES,
    BLOCK_BYTES,
    BlobReceiver,
    BlobSender,
    state_digest,
)
from gridtrain.runtime.state_transfer.state_forwarder import StateForwarder

BLOBS: list[bytes | memoryview] = [b"own", bytes(range(256)) * (BLOCK_BYTES // 256) * 11]
BLOCKS = 1 + 1 + 11
PEERS = [bytes([number]) * 32 for number in range(8)]


class Line:
    """One member's uplink: a block leaves it in each tick, whoever it is for."""

    def __init__(self) -> None:
        self.queued: list[tuple[m.PeerId, Any]] = []
        self.broken = False

    def backlog_bytes(self, peer: m.PeerId) -> int:
        return BACKLOG_BYTES if sum(to == peer for to, _ in self.queued) >= 2 else 0

    def send(self, peer: m.PeerId, message: Any) -> None:
        if self.broken:
            raise TransportError("gone", remedy="")
        self.queued.append((peer, message))


class Chain:
    """A donor (the last of `lines`) and newcomers, each with an intake and what it passes on."""

    def __init__(self, newcomers: int, *, chained: bool = True) -> None:
        self.donor = BlobSender()
        self.intakes = [BlobReceiver() for _ in range(newcomers)]
        self.outlets = [StateForwarder(intake) for intake in self.intakes]
        self.lines = [Line() for _ in range(newcomers + 1)]
        self.ticks = 0
        for number in range(newcomers):
            self.donor.request(PEERS[number], 1, 5, digest_only=chained and number > 0)
            if chained and number:
                self.outlets[number - 1].request(PEERS[number], 1, 5, 0)
        self.donor.store(5, BLOBS, state_digest(BLOBS))

    def tick(self) -> None:
        self.ticks += 1
        self.donor.send_pending(self.lines[-1])  # type: ignore[arg-type]
        for outlet, line in zip(self.outlets, self.lines, strict=False):
            outlet.send_pending(line)  # type: ignore[arg-type]
        leaving = [(line is self.lines[-1], *line.queued.pop(0)) for line in self.lines if line.queued]
        for of_donor, peer, message in leaving:
            intake = self.intakes[PEERS.index(peer)]
            if isinstance(message, m.StateDigest):
                intake.set_expected_digest(message.generation, message.digest)
            else:
                intake.receive(message, vouched=of_donor, keep_blocks=True)

    def run(self) -> int:
        while not all(intake.is_complete_for(5) for intake in self.intakes):
            self.tick()
            assert self.ticks < 1000
        return self.ticks


def test_a_chain_takes_the_time_of_one_and_a_block_more_for_each() -> None:
    six = Chain(6)
    assert six.run() <= BLOCKS + 6 + 6, "blocks, digests, and a block's time for each hop"
    assert [intake.take_blobs() for intake in six.intakes] == [(1, 5, BLOBS)] * 6
    assert Chain(6, chained=False).run() >= 6 * BLOCKS, "from one line to all"


def test_one_wrong_bit_and_nothing_is_loaded() -> None:
    chain = Chain(3)
    for _ in range(9):
        chain.tick()
    first = chain.intakes[0]
    first._blocks[3] = b"\1" + first._blocks[3][1:]  # the first newcomer lies
    chain.outlets[0].request(PEERS[1], 1, 5, 0)
    chain.intakes[1].clear()
    for _ in range(60):
        chain.tick()
    assert chain.intakes[1].is_digest_mismatch(5) and not chain.intakes[1].is_complete_for(5)
    with pytest.raises(LocalProtocolError):
        chain.intakes[1].take_blobs()
    chain.intakes[1].clear()
    chain.donor.request(PEERS[1], 1, 5)
    for _ in range(60):
        chain.tick()
    assert chain.intakes[1].take_blobs() == (1, 5, BLOBS), "from the donor itself"


def test_without_the_donors_word_nothing_that_was_passed_on_counts() -> None:
    intake, outlet, line = BlobReceiver(), BlobSender(), Line()
    outlet.request(PEERS[0], 1, 5)
    outlet.store(5, [b"own", b"common"], state_digest([b"own", b"common"]))
    came = []
    while not intake.received_blocks(5) or intake.remaining_bytes(5):
        outlet.send_pending(line)  # type: ignore[arg-type]
        came.append(line.queued.pop(0)[1])
        if isinstance(came[-1], m.StateBlock):
            intake.receive(came[-1], vouched=False, keep_blocks=True)
    digest = came[0]
    assert not intake.is_complete_for(5) and not intake.is_digest_mismatch(5) and intake.is_unverified(5)
    intake.set_expected_digest(4, digest.digest)
    assert not intake.is_complete_for(5), "that is of another generation"
    intake.set_expected_digest(5, digest.digest)
    assert intake.is_complete_for(5) and not intake.is_unverified(5)


def test_after_a_broken_connection_it_goes_on_where_it_was() -> None:
    chain = Chain(2)
    for _ in range(8):
        chain.tick()
    chain.lines[0].queued.clear()
    chain.lines[0].broken = True
    chain.tick()
    chain.lines[0].broken = False
    have = chain.intakes[1].received_blocks(5)
    assert 3 < have < BLOCKS and chain.intakes[1].remaining_bytes(5) > 0
    chain.outlets[0].request(PEERS[1], 1, 5, have)
    before = chain.ticks
    assert chain.run() - before <= BLOCKS - have + 4
    assert chain.intakes[1].take_blobs() == (1, 5, BLOBS)
    assert chain.intakes[1].received_blocks(5) == BLOCKS, "and nothing of it is asked for again"


def test_after_a_wrong_state_nothing_more_is_passed_on_in_its_place() -> None:
    """The right blocks behind a wrong table would make an honest member look like the liar."""
    chain = Chain(2)
    for _ in range(8):
        chain.tick()
    chain.outlets[0].stop()
    chain.outlets[0].request(PEERS[1], 1, 5, 0)
    have = chain.intakes[1].received_blocks(5)
    for _ in range(20):
        chain.tick()
    assert chain.intakes[1].received_blocks(5) <= have + 2, "only what was on the line"
    chain.outlets[0].clear()
    assert not chain.outlets[0].has_data(chain.lines[0])  # type: ignore[arg-type]


def test_what_was_read_is_passed_on_until_the_generation_starts() -> None:
    chain = Chain(1)
    chain.run()
    chain.intakes[0].take_blobs()
    assert chain.intakes[0].forwardable_block(5, BLOCKS - 1) is not None
    chain.outlets[0].clear()
    assert chain.intakes[0].forwardable_block(5, 0) is None


def test_asks_of_one_generation_do_not_count_in_the_next() -> None:
    """One that never started, or whose state was a wrong one, leaves nothing behind."""
    chain = Chain(1)
    chain.run()
    outlet, line = chain.outlets[0], chain.lines[0]
    for _ in range(40):
        outlet.request(PEERS[1], 1, 4, 0)
    outlet.stop()
    outlet.request(PEERS[1], 1, 4, 0)
    assert not outlet.has_data(line) and outlet.send_pending(line) == 0  # type: ignore[arg-type]
    outlet.request(PEERS[1], 1, 5, 0)
    assert outlet.send_pending(line) == 2  # type: ignore[arg-type]
