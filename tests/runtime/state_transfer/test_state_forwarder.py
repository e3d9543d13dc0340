"""A state that newcomers forward to each other, or whose source is lost: reused and verified blocks."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import SendState
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


class Uplink:
    """One member's uplink, which sends one block in each tick."""

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
    """A source (the last of `uplinks`) and newcomers, each with a receiver and a forwarder."""

    def __init__(self, newcomers: int, *, chained: bool = True) -> None:
        self.source_sender = BlobSender()
        self.receivers = [BlobReceiver() for _ in range(newcomers)]
        self.forwarders = [StateForwarder(receiver) for receiver in self.receivers]
        self.uplinks = [Uplink() for _ in range(newcomers + 1)]
        self.ticks = 0
        for number in range(newcomers):
            self.source_sender.request(SendState(PEERS[number], 1, 5, digest_only=chained and number > 0))
            if chained and number:
                self.forwarders[number - 1].request(PEERS[number], 1, 5, 0)
        self.source_sender.store(5, BLOBS, state_digest(BLOBS))

    def tick(self) -> None:
        self.ticks += 1
        self.source_sender.send_pending(self.uplinks[-1])  # type: ignore[arg-type]
        for forwarder, uplink in zip(self.forwarders, self.uplinks, strict=False):
            forwarder.send_pending(uplink)  # type: ignore[arg-type]
        leaving = [
            (uplink is self.uplinks[-1], *uplink.queued.pop(0)) for uplink in self.uplinks if uplink.queued
        ]
        for from_source, peer, message in leaving:
            receiver = self.receivers[PEERS.index(peer)]
            if isinstance(message, m.StateDigest):
                receiver.set_expected_digest(message.generation, message.digest)
            else:
                receiver.receive(message, vouched=from_source, keep_blocks=True)

    def run(self) -> int:
        while not all(receiver.is_complete_for(5) for receiver in self.receivers):
            self.tick()
            assert self.ticks < 1000
        return self.ticks


def test_a_chain_takes_the_time_of_one_transfer_and_one_block_per_hop() -> None:
    six = Chain(6)
    assert six.run() <= BLOCKS + 6 + 6, "blocks, digests, and one block's time per hop"
    assert [receiver.take_blobs() for receiver in six.receivers] == [(1, 5, BLOBS)] * 6
    assert Chain(6, chained=False).run() >= 6 * BLOCKS, "one uplink sends to all"


def test_a_state_with_a_wrong_bit_is_not_loaded() -> None:
    chain = Chain(3)
    for _ in range(9):
        chain.tick()
    first = chain.receivers[0]
    assert first._buffer is not None
    first._buffer.parts[1][BLOCK_BYTES] ^= 1  # the first newcomer sends a wrong bit
    chain.forwarders[0].request(PEERS[1], 1, 5, 0)
    chain.receivers[1].clear()
    for _ in range(60):
        chain.tick()
    assert chain.receivers[1].is_digest_mismatch(5) and not chain.receivers[1].is_complete_for(5)
    with pytest.raises(LocalProtocolError):
        chain.receivers[1].take_blobs()
    chain.receivers[1].clear()
    chain.source_sender.request(SendState(PEERS[1], 1, 5))
    for _ in range(60):
        chain.tick()
    assert chain.receivers[1].take_blobs() == (1, 5, BLOBS), "from the source itself"


def test_forwarded_blocks_count_only_with_the_digest_of_the_source() -> None:
    receiver, sender, uplink = BlobReceiver(), BlobSender(), Uplink()
    sender.request(SendState(PEERS[0], 1, 5))
    sender.store(5, [b"own", b"common"], state_digest([b"own", b"common"]))
    messages = []
    while not receiver.received_blocks(5) or receiver.remaining_bytes(5):
        sender.send_pending(uplink)  # type: ignore[arg-type]
        messages.append(uplink.queued.pop(0)[1])
        if isinstance(messages[-1], m.StateBlock):
            receiver.receive(messages[-1], vouched=False, keep_blocks=True)
    digest = messages[0]
    assert (
        not receiver.is_complete_for(5) and not receiver.is_digest_mismatch(5) and receiver.is_unverified(5)
    )
    receiver.set_expected_digest(4, digest.digest)
    assert not receiver.is_complete_for(5), "this digest is of another generation"
    receiver.set_expected_digest(5, digest.digest)
    assert receiver.is_complete_for(5) and not receiver.is_unverified(5)


def test_a_transfer_resumes_after_a_broken_connection() -> None:
    chain = Chain(2)
    for _ in range(8):
        chain.tick()
    chain.uplinks[0].queued.clear()
    chain.uplinks[0].broken = True
    chain.tick()
    chain.uplinks[0].broken = False
    have = chain.receivers[1].received_blocks(5)
    assert 3 < have < BLOCKS and chain.receivers[1].remaining_bytes(5) > 0
    chain.forwarders[0].request(PEERS[1], 1, 5, have)
    before = chain.ticks
    assert chain.run() - before <= BLOCKS - have + 4
    assert chain.receivers[1].take_blobs() == (1, 5, BLOBS)
    assert chain.receivers[1].received_blocks(5) == BLOCKS, "no block is requested again"


def test_after_a_wrong_state_no_blocks_are_forwarded_in_its_place() -> None:
    """Right blocks after a wrong table would make an honest member look like the liar."""
    chain = Chain(2)
    for _ in range(8):
        chain.tick()
    chain.forwarders[0].stop()
    chain.forwarders[0].request(PEERS[1], 1, 5, 0)
    have = chain.receivers[1].received_blocks(5)
    for _ in range(20):
        chain.tick()
    assert chain.receivers[1].received_blocks(5) <= have + 2, "only blocks in flight"
    chain.forwarders[0].clear()
    assert not chain.forwarders[0].has_data(chain.uplinks[0])  # type: ignore[arg-type]


def test_loaded_blocks_are_forwarded_until_the_generation_starts() -> None:
    chain = Chain(1)
    chain.run()
    chain.receivers[0].take_blobs()
    assert chain.receivers[0].forwardable_block(5, BLOCKS - 1) is not None
    chain.forwarders[0].clear()
    assert chain.receivers[0].forwardable_block(5, 0) is None


def test_requests_of_one_generation_do_not_count_in_the_next() -> None:
    """A generation that did not start, or had a wrong state, has no effect on the next one."""
    chain = Chain(1)
    chain.run()
    forwarder, uplink = chain.forwarders[0], chain.uplinks[0]
    for _ in range(40):
        forwarder.request(PEERS[1], 1, 4, 0)
    forwarder.stop()
    forwarder.request(PEERS[1], 1, 4, 0)
    assert not forwarder.has_data(uplink) and forwarder.send_pending(uplink) == 0  # type: ignore[arg-type]
    forwarder.request(PEERS[1], 1, 5, 0)
    assert forwarder.send_pending(uplink) == 2  # type: ignore[arg-type]


# -- the source is lost ------------------------------------------------------------------------------

SHARED = random.Random(5).randbytes(11 * BLOCK_BYTES - 7)
AT: Any = (41, b"h" * 32)


class Receiver:
    """A newcomer with the requests of its I/O loop, and the sources that answer them."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(lambda: None, lambda: False)
        self.state = StateReceiver(self.mailbox)
        self.received_bytes = 0
        self.requests: list[tuple[bool, int, bool]] = []  # is_whole, blocks_received, digest_only

    def transfer(
        self, generation: int, blobs: list[bytes], *, blocks: int = 1000, chain: Receiver | None = None
    ) -> bool:
        """One source, or one that vouches while `chain` forwards, until it is killed after so many blocks.

        Returns whether the state is complete.
        """
        self.blocks_left, self.source, self.uplink = blocks, BlobSender(), Uplink()
        self._request(generation, blobs, chain)
        for _ in range(200):
            if self.blocks_left <= 0 or self.state.blobs.is_complete_for(generation):
                break
            self.source.send_pending(self.uplink)  # type: ignore[arg-type]
            if chain is not None:
                chain.state.forwarder.send_pending(self.uplink)  # type: ignore[arg-type]
            for _, message in self.uplink.queued:
                self._receive(generation, message, blobs, chain)
            self.uplink.queued.clear()
        return self.state.blobs.is_complete_for(generation)

    def _request(self, generation: int, blobs: list[bytes], chain: Receiver | None) -> None:
        """Requests the state as the I/O loop does for `IncomingState.request`."""
        request = m.StateRequest(1, generation, digest_only=chain is not None)
        to_source = self.state.remaining_request(request, AT, to_source=True)
        if to_source is not None:
            x = to_source
            self.requests.append((x.is_whole, x.blocks_received, x.digest_only))
            have, digest_only = x.blocks_received, x.digest_only
            self.source.request(SendState(PEERS[0], 1, generation, x.is_whole, None, have, digest_only))
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
    """A table, 2 blocks of the source's own part, 11 shared blocks, whichever of them have arrived."""
    newcomer = Receiver()
    of_anna, of_bert = [b"a" * (BLOCK_BYTES + 5), SHARED], [b"b" * 7, SHARED]
    assert newcomer.transfer(1, of_anna, blocks=killed_after) == (killed_after == 14)
    before = newcomer.received_bytes
    assert newcomer.transfer(2, of_bert)
    assert newcomer.take(2) == of_bert
    reused_bytes = max(0, before - 16 - BLOCK_BYTES - 5)
    assert newcomer.received_bytes - before <= (len(SHARED) - reused_bytes) + 7 + 16 + 8
    if killed_after >= 4:
        remaining = (True, 0, True) if killed_after == 14 else (True, killed_after - 1, False)
        assert newcomer.requests[1:] == [(False, 0, False), remaining]


@pytest.mark.parametrize("kills", [(4, 3, 2), (14, 14, 14), (9, 2, 9)])
def test_several_sources_are_lost_one_after_the_other(kills: tuple[int, ...]) -> None:
    newcomer = Receiver()
    for generation, blocks in enumerate(kills, 1):
        newcomer.transfer(generation, [b"own %d" % generation, SHARED], blocks=blocks)
    assert newcomer.transfer(9, [b"last", SHARED])
    assert newcomer.take(9) == [b"last", SHARED]


@pytest.mark.parametrize(
    "wrong", [SHARED[:-1], SHARED + b"x" * BLOCK_BYTES, b"x" * len(SHARED), SHARED[: 5 * BLOCK_BYTES]],
    ids=["a byte less", "a block more", "other bits", "shorter"],
)  # fmt: skip
@pytest.mark.parametrize("killed_after", [2, 4, 6])
def test_wrong_blocks_of_a_lost_source_are_requested_again(wrong: bytes, killed_after: int) -> None:
    """The honest source is not blamed, and no wrong bit is loaded."""
    newcomer = Receiver()
    newcomer.transfer(1, [b"own", wrong], blocks=killed_after)
    assert newcomer.transfer(2, [b"own", SHARED])
    assert newcomer.take(2) == [b"own", SHARED]
    if killed_after > 2:
        assert newcomer.requests[-1] == (True, 0, False)


def test_a_later_member_of_the_chain_resumes_too() -> None:
    """Its blocks stay, the source sends the first blob, and its neighbour forwards the remaining blocks."""
    first, second = Receiver(), Receiver()
    first.transfer(1, [b"anna", SHARED], blocks=9)
    second.transfer(1, [b"anna", SHARED], blocks=5, chain=first)
    assert first.transfer(2, [b"bert", SHARED])
    before = second.received_bytes
    assert second.transfer(2, [b"bert", SHARED], chain=first)
    assert second.take(2) == [b"bert", SHARED] == first.take(2)
    assert second.received_bytes - before == 8 + 4 + len(SHARED) - 3 * BLOCK_BYTES
    assert second.requests[-1] == (True, 0, True), "only the digest from the source"


def test_another_state_is_requested_from_its_first_block() -> None:
    newcomer = Receiver()
    newcomer.transfer(1, [b"anna", SHARED], blocks=9)
    request = m.StateRequest(1, 2)
    assert newcomer.state.remaining_request(request, (42, b"i" * 32), to_source=True) == request
    assert newcomer.state.blobs.held_bytes == 0
    newcomer.transfer(3, [b"anna", SHARED], blocks=9)
    assert newcomer.state.remaining_request(m.StateRequest(1, 4), None, to_source=True) == m.StateRequest(
        1, 4
    )


def test_a_forwarded_state_is_in_memory_once() -> None:
    """The same bytes are received, taken by the trainer and stored for others."""
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
