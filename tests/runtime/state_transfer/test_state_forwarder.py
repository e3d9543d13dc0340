"""A state that goes from newcomer to newcomer, or whose source is lost: what is there, what is believed."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.errors import LocalProtocolError, TransportError
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.blobs import (
    BACKLOG_BYTES,
    BlobReceiver,
    BlobSender,
    state_digest,
)
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES
from gridtrain.runtime.state_transfer.state_forwarder import StateForwarder
from gridtrain.runtime.state_transfer.state_receiver import StateReceiver

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
    assert first._buffer is not None
    first._buffer.parts[1][BLOCK_BYTES] ^= 1  # the first newcomer lies
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


# -- the source is lost ------------------------------------------------------------------------------

SHARED = random.Random(5).randbytes(11 * BLOCK_BYTES - 7)
AT: Any = (41, b"h" * 32)


class Receiver:
    """A newcomer with the requests that its loop makes of the core's, and the sources that answer them."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(lambda: None, lambda: False)
        self.state = StateReceiver(self.mailbox)
        self.received_bytes = 0
        self.asked: list[tuple[bool, int, bool]] = []  # is_whole, blocks_received, digest_only

    def transfer(
        self, generation: int, blobs: list[bytes], *, blocks: int = 1000, chain: Receiver | None = None
    ) -> bool:
        """One source, or one that vouches while `chain` forwards, until it is killed after so many blocks.

        Returns whether the state is complete.
        """
        self.blocks_left, self.source, self.line = blocks, BlobSender(), Line()
        self._request(generation, blobs, chain)
        for _ in range(200):
            if self.blocks_left <= 0 or self.state.blobs.is_complete_for(generation):
                break
            self.source.send_pending(self.line)  # type: ignore[arg-type]
            if chain is not None:
                chain.state.forwarder.send_pending(self.line)  # type: ignore[arg-type]
            for _, message in self.line.queued:
                self._receive(generation, message, blobs, chain)
            self.line.queued.clear()
        return self.state.blobs.is_complete_for(generation)

    def _request(self, generation: int, blobs: list[bytes], chain: Receiver | None) -> None:
        """What `IncomingState.request` leads to in the I/O loop."""
        ask = m.StateRequest(1, generation, digest_only=chain is not None)
        to_source = self.state.remaining_request(ask, AT, to_source=True)
        if to_source is not None:
            x = to_source
            self.asked.append((x.is_whole, x.blocks_received, x.digest_only))
            args = {"whole": x.is_whole, "blocks_received": x.blocks_received, "digest_only": x.digest_only}
            self.source.request(PEERS[0], 1, generation, **args)  # type: ignore[arg-type]
            self.source.store(generation, blobs, state_digest(blobs))
        if chain is None:
            return
        upstream = self.state.remaining_request(m.StateRequest(1, generation), AT, to_source=False)
        if upstream is not None:
            chain.state.forwarder.request(PEERS[0], 1, generation, upstream.blocks_received)

    def _receive(self, generation: int, message: Any, blobs: list[bytes], chain: Receiver | None) -> None:
        if isinstance(message, m.StateDigest):
            self.state.set_expected_digest(generation, message.digest)
        elif self.blocks_left > 0:
            self.received_bytes += len(message.payload)
            self.blocks_left -= 1
            vouched = chain is None or message.total == 2
            if self.state.receive_block(message, vouched=vouched, is_forwarding=True):
                self._request(generation, blobs, chain)
        if self.state.drop_if_mismatched(generation):
            self._request(generation, blobs, None)

    def take(self, generation: int) -> list[bytes]:
        taken = self.state.take_state(generation)
        assert taken is not None
        return [bytes(blob) for blob in taken[2]]


@pytest.mark.parametrize("killed_after", range(15))
def test_a_lost_source_costs_no_shared_block_twice(killed_after: int) -> None:
    """Whatever the source's own part is: table, 2 blocks of it, 11 shared blocks."""
    newcomer = Receiver()
    of_anna, of_bert = [b"a" * (BLOCK_BYTES + 5), SHARED], [b"b" * 7, SHARED]
    assert newcomer.transfer(1, of_anna, blocks=killed_after) == (killed_after == 14)
    before = newcomer.received_bytes
    assert newcomer.transfer(2, of_bert)
    assert newcomer.take(2) == of_bert
    kept_bytes = max(0, before - 16 - BLOCK_BYTES - 5)
    assert newcomer.received_bytes - before <= (len(SHARED) - kept_bytes) + 7 + 16 + 8
    if killed_after >= 4:
        rest = (True, 0, True) if killed_after == 14 else (True, killed_after - 1, False)
        assert newcomer.asked[1:] == [(False, 0, False), rest]


@pytest.mark.parametrize("kills", [(4, 3, 2), (14, 14, 14), (9, 2, 9)])
def test_several_sources_are_lost_one_after_the_other(kills: tuple[int, ...]) -> None:
    newcomer = Receiver()
    for generation, blocks in enumerate(kills, 1):
        newcomer.transfer(generation, [b"own %d" % generation, SHARED], blocks=blocks)
    assert newcomer.transfer(9, [b"last", SHARED])
    assert newcomer.take(9) == [b"last", SHARED]


@pytest.mark.parametrize(
    "lie", [SHARED[:-1], SHARED + b"x" * BLOCK_BYTES, b"x" * len(SHARED), SHARED[: 5 * BLOCK_BYTES]],
    ids=["a byte less", "a block more", "other bits", "shorter"],
)  # fmt: skip
@pytest.mark.parametrize("killed_after", [2, 4, 6])
def test_blocks_of_a_lost_liar_delay_and_harm_nobody(lie: bytes, killed_after: int) -> None:
    """Neither is the honest source blamed, nor is a wrong bit loaded: all is requested again."""
    newcomer = Receiver()
    newcomer.transfer(1, [b"own", lie], blocks=killed_after)
    assert newcomer.transfer(2, [b"own", SHARED])
    assert newcomer.take(2) == [b"own", SHARED]
    if killed_after > 2:
        assert newcomer.asked[-1] == (True, 0, False)


def test_a_member_further_down_the_chain_resumes_too() -> None:
    """Its own blocks stay, the source sends it the first blob, and its neighbour forwards the rest."""
    first, second = Receiver(), Receiver()
    first.transfer(1, [b"anna", SHARED], blocks=9)
    second.transfer(1, [b"anna", SHARED], blocks=5, chain=first)
    assert first.transfer(2, [b"bert", SHARED])
    before = second.received_bytes
    assert second.transfer(2, [b"bert", SHARED], chain=first)
    assert second.take(2) == [b"bert", SHARED] == first.take(2)
    assert second.received_bytes - before == 8 + 4 + len(SHARED) - 3 * BLOCK_BYTES
    assert second.asked[-1] == (True, 0, True), "of the source only the digest"


def test_another_state_begins_with_its_first_block() -> None:
    newcomer = Receiver()
    newcomer.transfer(1, [b"anna", SHARED], blocks=9)
    ask = m.StateRequest(1, 2)
    assert newcomer.state.remaining_request(ask, (42, b"i" * 32), to_source=True) == ask
    assert newcomer.state.blobs.held_bytes == 0
    newcomer.transfer(3, [b"anna", SHARED], blocks=9)
    assert newcomer.state.remaining_request(m.StateRequest(1, 4), None, to_source=True) == m.StateRequest(
        1, 4
    )


def test_a_state_that_is_forwarded_lies_in_memory_once() -> None:
    """Received, taken by the trainer and kept for others: the same bytes."""
    newcomer = Receiver()
    shared = bytes(8 * BLOCK_BYTES)
    tracemalloc.start()
    try:
        newcomer.transfer(1, [b"own", shared])
        taken = newcomer.state.take_state(1)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken is not None and newcomer.state.blobs.forwardable_block(1, 9) is not None
    assert len(shared) <= peak_bytes < 1.3 * len(shared)
    newcomer.state.forwarder.clear()
    assert newcomer.state.blobs.held_bytes == 0
