"""One hostile member among honest ones: its messages are refused where they arrive, and it alone is blamed.

This file tests cores, collectives and buffers.  Whole groups are in test_hostile_group.py, the codec's bounds
in tests/network/wire/test_limits.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from collective_group import Arrival, CollectiveGroup
from exchange_buffers import DENSE, ROUNDED, make_buffer

from gridtrain.core import messages as m
from gridtrain.core.collectives import butterfly
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    CollectiveEffect,
    SendTo,
)
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.collectives.tree import TreeExchange
from gridtrain.core.commit.attempts import Attempts, EarlyViolation
from gridtrain.core.group.member_events import ApplyToBuffer, Send, SendState
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.dense_payload import encode_slice, slice_bytes
from gridtrain.network.wire.sparse_payload import encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import (
    AllGatherBuffer,
    ButterflyBuffer,
    CollectiveBuffer,
    DenseRingBuffer,
)
from gridtrain.runtime.buffers.direct_buffer import SparseDirectBuffer
from gridtrain.runtime.buffers.rounded_buffers import largest_contribution
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer, SparseStarBuffer
from gridtrain.runtime.state_transfer.blobs import (
    MAX_BLOBS,
    MAX_STATE_REQUESTS,
    BlobReceiver,
    BlobSender,
    split_blocks,
)
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES

Seeds = Callable[[int], Iterator[int]]
KINDS = (
    "dense", "topk", "gtopk", "gtopk-direct", "tree", "star", "dense-star", "direct", "dense-int8",
    "direct-bf16", "dense-star-int8",
)  # fmt: skip
N, K = 48, 6


# -- a group of collectives, one rank of which is hostile ------------------------------------------


def buffers_of(kind: str, world_size: int, rng: np.random.Generator, scale: float) -> list[CollectiveBuffer]:
    """Contributions of all ranks, as large as `scale` times the largest of an honest member."""
    limit = scale * largest_contribution(world_size, ROUNDED.get(kind, ValueKind.FP32))
    made: list[CollectiveBuffer] = []
    for rank in range(world_size):
        if kind in DENSE:
            made.append(make_buffer(kind, rank, world_size, rng.uniform(-limit, limit, N)))
            continue
        indices = np.sort(rng.choice(N, K, replace=False))
        values = np.asarray(rng.choice([-limit, limit], K), np.float32)
        payload = encode(indices, values, n=N, kind=ValueKind.FP16)
        made.append(make_buffer(kind, rank, world_size, payload, n=N, k=K))
    return made


class HostileGroup(CollectiveGroup):
    """As the I/O loop: a payload that a buffer refuses ends the round there, and its sender is blamed."""

    def __init__(self, buffers: list[CollectiveBuffer], seed: int, hostile: int, spoil: Any) -> None:
        self.hostile, self.spoil = hostile, spoil
        self.blamed: set[int] = set()
        self.broken: set[int] = set()
        super().__init__(buffers, seed=seed)

    def _deliver(self, src: int, dst: int, message: Arrival) -> None:
        for copy in self.spoil(message) if src == self.hostile else [message]:
            if dst in self.broken or dst == self.hostile:
                return
            try:
                effects = self.cores[dst].handle(*copy)
            except RemoteProtocolError as error:
                assert f"rank {src} sent" in error.reason and error.remedy
                self.blamed.add(src)
                self.broken.add(dst)
                return
            self._execute(dst, effects)

    def _execute(self, rank: int, effects: Any) -> None:
        for effect in effects:
            before = state_of(self.buffers[rank])
            try:
                super()._execute(rank, [effect])
            except RemoteProtocolError as error:
                overflow = "a sum of sparse payloads overflows" in error.reason
                assert (overflow or f"rank {effect.provenance.rank}" in error.reason) and error.remedy
                assert state_of(self.buffers[rank]) == before, "no part of it was applied"
                self.blamed.add(effect.provenance.rank)
                self.broken.add(rank)
                return


def state_of(buffer: CollectiveBuffer) -> Any:
    match buffer:
        case DenseRingBuffer() | DenseStarBuffer():
            return (
                buffer.update.tobytes(),
                None if buffer.rest_N is None else buffer.rest_N.tobytes(),
            )
        case AllGatherBuffer():
            return [payload and bytes(payload) for payload in buffer._payloads]
        case SparseStarBuffer():
            return bytes(buffer._payload), len(buffer.truncated), sorted(buffer._parts)
        case SparseDirectBuffer():
            return len(buffer._addends), sorted(buffer._results), len(buffer.truncated)
        case ButterflyBuffer():
            return bytes(buffer.payload(m.PayloadSlot(m.CollectivePhase.SWAP))), len(buffer.truncated)
    raise AssertionError(type(buffer))


def with_payload(message: Arrival, payload: bytes) -> list[Arrival]:
    return [message._replace(payload=payload)]


def flipped(message: Arrival, random: Random) -> list[Arrival]:
    payload = bytearray(message.payload)
    for _ in range(random.randint(1, 4)):
        if payload:
            payload[random.randrange(len(payload))] ^= 1 << random.randrange(8)
    return with_payload(message, bytes(payload))


def damaged(kind: str, what: str, random: Random) -> Callable[[Arrival], list[Arrival]]:
    """How the hostile rank changes each message that it should send."""

    def spoil(message: Arrival) -> list[Arrival]:
        place = message.slot
        if random.random() < 0.5:
            return [message]  # not always, so that the exchange proceeds
        match what:
            case "flip":
                return flipped(message, random)
            case "cut":
                return with_payload(message, bytes(message.payload)[: -random.randint(1, 3)])
            case "long":
                return with_payload(message, bytes(message.payload) + bytes(random.randint(1, 5000)))
            case "twice":
                return [message, message]
            case "elsewhere":
                other = replace(place, **{random.choice(["hop", "segment", "slice"]): random.randrange(40)})
                return [message._replace(slot=other)]
            case "largest":
                return with_payload(message, largest(kind, message))
        raise AssertionError(what)

    return spoil


def largest(kind: str, message: Arrival) -> bytes:
    """Finite, well-formed, and as large as float32 allows."""
    if kind in DENSE:
        return dense_payload(kind, message, float(np.finfo(np.float32).max))
    values = np.full(K, 3.2e38, np.float32)
    return encode(np.arange(K), values, n=N, kind=ValueKind.FP16)


def dense_payload(kind: str, message: Arrival, value: float) -> bytes:
    """As long as the payload of `message`, with one value in all elements."""
    values = ROUNDED.get(kind, ValueKind.FP32)
    lengths = (slice_bytes(elements, values) for elements in range(N + 1))
    elements = next(n for n, nbytes in enumerate(lengths) if nbytes == len(message.payload))
    return encode_slice(np.full(elements, value, np.float32), values)[0]


@pytest.mark.parametrize("what", ["flip", "cut", "long", "twice", "elsewhere", "largest"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_hostile_rank_is_blamed(kind: str, what: str, seeds: Seeds) -> None:
    """All values are as large as honest ones can be, so that sums near the bound are common."""
    ran = caught = 0
    for seed in seeds(25):
        random, rng = Random(seed), np.random.default_rng(seed)
        world_size = random.randint(2, 9)
        hostile = random.randrange(world_size)
        scale = random.choice([1.0, 1e-30])
        made = buffers_of(kind, world_size, rng, scale)
        group = HostileGroup(made, seed, hostile, damaged(kind, what, random))
        group.run()
        assert group.blamed <= {hostile}, f"seed {seed}: {sorted(group.blamed)} blamed, not only {hostile}"
        ran, caught = ran + 1, caught + bool(group.blamed)
    # Most flipped bits of a dense slice give another honest value; in a tree or a star most ranks send once.
    enough = ran // (5 if kind in KINDS[:3] else 15)
    assert caught > enough or ran == 1 or (kind in DENSE and what == "flip")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error")
def test_no_rank_is_blamed_for_the_largest_honest_values(kind: str, seeds: Seeds) -> None:
    for seed in seeds(60, drawn=10):
        random = Random(seed)
        world_size = random.randint(1, 17)
        made = buffers_of(kind, world_size, np.random.default_rng(seed), 1.0)
        group = HostileGroup(made, seed, -1, None)
        group.run()
        assert not group.blamed and not group.broken, f"seed {seed}"
        assert len({buffer.compute_digest() for buffer in made}) == 1, f"seed {seed}"


@pytest.mark.parametrize("kind", KINDS)
def test_no_honest_rank_is_blamed_for_values_at_the_bound(kind: str, seeds: Seeds) -> None:
    """Just accepted values, so that the sum of the next rank is above its bound."""
    for seed in seeds(60, drawn=10):
        random = Random(seed)
        world_size = random.randint(3, 9)
        hostile = random.randrange(world_size)

        def just_accepted(message: Arrival, world_size: int = world_size) -> list[Arrival]:
            members = members_behind(kind, message, world_size)
            bound = members * largest_contribution(world_size, ROUNDED.get(kind, ValueKind.FP32))
            factor = 1 + 2.0**-21 if kind in DENSE else 1.0
            if kind in DENSE:
                return with_payload(message, dense_payload(kind, message, bound * factor))
            n, k = N, K
            if kind == "gtopk-direct":  # k / P entries of a part, whose last element may be beyond the vector
                n = -(-N // world_size)
                k = min(n - 1, -(-K // world_size))
            values = np.full(k, min(bound * factor, 3.3e38), np.float32)
            return with_payload(message, encode(np.arange(k), values, n=n, kind=ValueKind.FP16))

        made = buffers_of(kind, world_size, np.random.default_rng(seed), 1.0)
        group = HostileGroup(made, seed, hostile, just_accepted)
        group.run()
        assert not group.blamed, f"seed {seed}: {group.blamed} blamed for values within the bounds"


def members_behind(kind: str, message: Arrival, world_size: int) -> int:
    place = message.slot
    match place.phase:
        case m.CollectivePhase.REDUCE:
            return place.hop + 1
        case m.CollectivePhase.ALL_GATHER | m.CollectivePhase.FOLD:
            return 1
        case m.CollectivePhase.SWAP:
            partner = message.from_rank ^ (1 << place.hop)
            (hop,) = [hop for hop in butterfly.schedule(partner, world_size) if hop.slot == place]
            return hop.contributors
        case m.CollectivePhase.TO_ROOT if kind == "tree":
            return min(1 << place.hop, world_size - message.from_rank)
        case m.CollectivePhase.TO_ROOT:
            return 1
    return world_size


@pytest.mark.parametrize("core", [ButterflyExchange, TreeExchange])
@pytest.mark.parametrize("world_size", range(1, 40))
def test_each_hop_counts_the_members_that_were_merged(world_size: int, core: Any) -> None:
    """Counted by exchanging sets of ranks instead of payloads."""
    cores = [core(rank, world_size, 0) for rank in range(world_size)]
    mine = [{rank} for rank in range(world_size)]
    queue: list[tuple[int, CollectiveEffect]] = []
    for rank, core in enumerate(cores):
        queue += [(rank, effect) for effect in core.start()]
    while queue:
        rank, effect = queue.pop(0)
        match effect:
            case SendTo(to_rank, place, flags):
                effects = cores[to_rank].handle(rank, place, flags, set(mine[rank]))
                queue += [(to_rank, e) for e in effects]
            case CollectiveComplete():
                assert mine[rank] == set(range(world_size))
            case _:
                assert len(effect.payload) == effect.provenance.contributors  # type: ignore[union-attr]
                mine[rank] = mine[rank] | effect.payload  # type: ignore[union-attr]


# -- one member's attempts -------------------------------------------------------------------------

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))
ROSTER = tuple(m.Member(peer, "", "", 1, False) for peer in (A, B, C))
STEP = 7


def round_id(step: int = STEP, attempt: int = 0, generation: int = 5) -> m.RoundId:
    return m.RoundId(1, generation, step, attempt)


def attempts_of(me: m.PeerId, roster: tuple[m.Member, ...] = ROSTER) -> Attempts:
    return Attempts(RankAssignment(me, 1, 5, roster), STEP)


def begin(mine: Attempts) -> list[Any]:
    ring = RingAllReduce(mine.rank, mine.rank_assignment.world_size, 1, 0)
    return mine.submit(mine.next_round, {m.Channel(): ring}, 5.0, 0.0)


def reduce(segment: int, hop: int = 0, *, at: m.RoundId | None = None, channel: int = 0) -> m.Data:
    place = m.PayloadSlot(m.CollectivePhase.REDUCE, hop, segment)
    return m.Data(at or round_id(), m.Channel(index=channel), place, 0, b"")


REFUSED = [
    pytest.param(B, C, reduce(1), "rank 2 sent PayloadSlot", id="another's turn"),
    pytest.param(
        B, A, reduce(2), "rank 0 sent PayloadSlot.*expected PayloadSlot.*hop=1", id="a place that is not due"
    ),
    pytest.param(
        B,
        A,
        reduce(0, channel=9),
        "rank 0 sent data for Channel.*index=9.*not a channel of round",
        id="unknown channel",
    ),
    pytest.param(B, A, reduce(0, at=round_id(STEP + 2)), "rank 0 is at step 10", id="two steps ahead"),
    pytest.param(B, A, reduce(0, at=round_id(2**63 - 1)), "at step 9223372036854775808", id="absurd step"),
    pytest.param(B, A, reduce(0, at=round_id(attempt=2)), "attempt 3; no member", id="a third attempt"),
    pytest.param(B, C, m.Vote(round_id(), True, b"", ""), "rank 2 sent its vote", id="vote at a member"),
    pytest.param(
        B, C, m.Vote(round_id(STEP - 1), True, b"", ""), "rank 2 sent its vote", id="old vote at a member"
    ),
    pytest.param(
        B, C, m.Decision(round_id(), m.Verdict.ABORT, ""), "rank 2 sent a decision", id="a member decides"
    ),
    pytest.param(
        A,
        C,
        m.Decision(round_id(), m.Verdict.ABORT, ""),
        "rank 2 sent a decision to rank 0",
        id="to the root",
    ),
    pytest.param(
        B,
        A,
        m.Decision(round_id(), m.Verdict.COMMIT, ""),
        "without a YES from rank 1",
        id="COMMIT before YES",
    ),
]


@pytest.mark.parametrize(("me", "peer", "message", "words"), REFUSED)
def test_messages_that_no_honest_member_sends_are_refused(
    me: m.PeerId, peer: m.PeerId, message: Any, words: str
) -> None:
    mine = attempts_of(me)
    begin(mine)
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        mine.receive(peer, message, 100, 0.0)
    assert caught.value.remedy
    assert mine.open_attempt is not None and mine.open_attempt.vote is None and mine.early_bytes(peer) == 0


ROLES = [param for param in REFUSED if "vote" in str(param.id) or "decides" in str(param.id)]


@pytest.mark.parametrize(("me", "peer", "message", "words"), ROLES)
def test_a_message_of_another_role_is_refused_before_the_round_is_open(
    me: m.PeerId, peer: m.PeerId, message: Any, words: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        attempts_of(me).receive(peer, message, 100, 0.0)


HONEST_RACES = [
    pytest.param(reduce(0, at=round_id(STEP - 1)), id="of a round that is over"),
    pytest.param(reduce(0, at=round_id(generation=4)), id="of an earlier generation"),
    pytest.param(reduce(0, at=round_id(generation=6)), id="of a later generation"),
    pytest.param(m.Vote(round_id(generation=4), True, b"", ""), id="a vote, when it was the root"),
    pytest.param(m.Decision(round_id(generation=6), m.Verdict.COMMIT, ""), id="a decision, when it will be"),
]


@pytest.mark.parametrize("message", HONEST_RACES)
def test_late_messages_are_dropped_without_blame(message: Any) -> None:
    mine = attempts_of(B)
    begin(mine)
    assert mine.receive(C, message, 100, 0.0) == [] and mine.early_bytes(C) == 0


def test_the_sender_is_blamed_for_a_payload_that_is_merged_later() -> None:
    """Rank 1 of six waits for rank 5's fold; earlier payloads of ranks 0 and 3 are merged after it."""
    roster = tuple(m.Member(bytes([65 + rank]) * 32, "", "", 1, False) for rank in range(6))
    peers = [member.peer for member in roster]
    mine = Attempts(RankAssignment(peers[1], 1, 5, roster), STEP)

    def swap(phase: m.CollectivePhase, hop: int) -> m.Data:
        return m.Data(round_id(), m.Channel(), m.PayloadSlot(phase, hop), 0, b"")

    mine.receive(peers[0], swap(m.CollectivePhase.SWAP, 0), 100, 0.0)  # stored here, then by the butterfly
    mine.submit(mine.next_round, {m.Channel(): ButterflyExchange(1, 6, 0)}, 5.0, 0.0)
    mine.receive(peers[3], swap(m.CollectivePhase.SWAP, 1), 100, 0.0)
    effects = mine.receive(peers[5], swap(m.CollectivePhase.FOLD, 0), 100, 0.0)
    assert [e.peer for e in effects if isinstance(e, ApplyToBuffer)] == [peers[5], peers[0], peers[3]]


def test_a_wrong_early_payload_ends_the_round_and_names_its_sender() -> None:
    mine = attempts_of(B)
    mine.receive(C, reduce(1), 100, 0.0)  # not its turn, which is detected only now
    mine.receive(C, reduce(0, at=round_id(STEP + 1)), 100, 0.0)
    effects = begin(mine)
    (offended,) = [effect for effect in effects if isinstance(effect, EarlyViolation)]
    assert offended.peer == C and "rank 2 sent" in offended.reason
    (vote,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.Vote)]
    assert not vote.yes and vote.reason.startswith("rank 2 violated the protocol: ")
    assert mine.early_bytes(C) == 0  # its other messages are dropped, too


def test_only_the_roots_next_step_proves_a_commit() -> None:
    """Rank 2 may lie, and rank 1 would apply alone; the root decides, so its next step is proof."""
    mine = attempts_of(B)
    begin(mine)
    mine.prepare(b"u", 0.0)
    mine.receive(C, reduce(0, at=round_id(STEP + 1)), 100, 0.0)
    assert mine.prepared_attempt is not None
    mine.receive(A, reduce(0, at=round_id(STEP + 1)), 100, 0.0)
    assert mine.prepared_attempt is None and mine.next_round == round_id(STEP + 1)


def test_stored_early_messages_are_released_when_their_round_opens() -> None:
    mine = attempts_of(B)
    mine.receive(A, reduce(0), 1000, 0.0)
    mine.receive(A, reduce(0, at=round_id(STEP + 1)), 500, 0.0)
    assert mine.early_bytes(A) == 1500
    begin(mine)
    assert mine.early_bytes(A) == 500


def test_progress_that_goes_back_and_forth_does_not_count() -> None:
    """Otherwise a member that counts 1, 2, 1, 2 could keep a round open for ever."""
    mine = attempts_of(A)
    begin(mine)
    for now_s in range(1, 20):
        mine.record_progress(B, m.RoundProgress(round_id(), now_s % 2 + 1), float(now_s))
        mine.record_progress(C, m.RoundProgress(round_id(), 1), float(now_s))
    assert mine.open_attempt is not None and mine.open_attempt._last_movement_s < 3.0


# -- local bugs ------------------------------------------------------------------------------------


class Buggy:
    """A collective that fails by a local bug, not by a peer's fault."""

    complete = False

    def start(self) -> list[CollectiveEffect]:
        return []

    def handle(self, from_rank: int, slot: m.PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        raise LocalProtocolError("a local bug")

    def waiting_for(self) -> frozenset[int]:
        return frozenset()


@pytest.mark.parametrize("early", [False, True])
def test_no_peer_is_blamed_for_a_local_bug(early: bool) -> None:
    mine = attempts_of(B)
    if early:
        mine.receive(A, reduce(0), 100, 0.0)
    with pytest.raises(LocalProtocolError, match="a local bug"):
        mine.submit(mine.next_round, {m.Channel(): Buggy()}, 5.0, 0.0)
        mine.receive(A, reduce(0), 100, 0.0)


# -- a newcomer's state ----------------------------------------------------------------------------


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def blocks_of(*blobs: bytes, generation: int = 5, total: int | None = None) -> list[m.StateBlock]:
    blocks = split_blocks(blobs)
    return [m.StateBlock(1, generation, i, total or len(blocks), block) for i, block in enumerate(blocks)]


BLOBS = (b"first", b"", bytes(BLOCK_BYTES + 3), b"x" * BLOCK_BYTES)


def test_an_honest_state_arrives() -> None:
    intake = BlobReceiver()
    for block in blocks_of(*BLOBS):
        assert not intake.is_complete_for(5)
        intake.receive(block)
    assert intake.is_complete_for(5) and not intake.is_complete_for(6)
    assert intake.take_blobs() == (1, 5, list(BLOBS))
    assert intake.held_bytes == 0


def test_a_broken_connection_is_no_violation() -> None:
    """0 1 | 3 of the old connection, the table again, and all blocks; then some of them twice."""
    intake, blocks = BlobReceiver(), blocks_of(*BLOBS)
    for block in (blocks[0], blocks[1], blocks[3], *blocks, blocks[0], blocks[2]):
        intake.receive(block)
    assert intake.take_blobs() == (1, 5, list(BLOBS))


def test_a_table_without_blocks_takes_no_memory() -> None:
    """A few bytes that announce a large state, which is never sent."""
    intake, lengths = BlobReceiver(), (10, 2 << 30)
    before = resident_bytes()
    for generation in range(1, 20):
        intake.receive(m.StateBlock(1, generation, 0, 2 + (lengths[1] >> 20), struct.pack("<2Q", *lengths)))
    assert resident_bytes() - before < 256 << 20


def test_only_the_state_source_may_start_over() -> None:
    """Otherwise a forwarding member could discard the source's blocks as often as it likes."""
    intake, blocks = BlobReceiver(), blocks_of(*BLOBS)
    for block in blocks[:3]:
        intake.receive(block)
    intake.receive(blocks[0], vouched=False)
    assert intake.received_blocks(5) == 3
    intake.receive(blocks[0])
    assert intake.received_blocks(5) == 1


def test_a_block_without_its_table_is_dropped() -> None:
    intake, blocks = BlobReceiver(), blocks_of(*BLOBS)
    intake.receive(blocks[2])
    assert intake.held_bytes == 0 and not intake.is_complete_for(5)


def test_a_state_of_a_newer_generation_replaces_the_old_one() -> None:
    intake = BlobReceiver()
    intake.receive(blocks_of(*BLOBS)[0])
    for block in blocks_of(b"new", generation=6):
        intake.receive(block)
    intake.receive(blocks_of(*BLOBS)[1])  # of the old generation, late
    assert intake.take_blobs() == (1, 6, [b"new"])


LIES = [
    pytest.param(
        [blocks_of(bytes(2000))[0]],
        "the state has 2000 bytes; this worker accepts at most 1000",
        id="too large",
    ),
    pytest.param(
        [m.StateBlock(1, 5, 0, 2, struct.pack("<2Q", 2**63, 2**63))], "at most 1000", id="absurd lengths"
    ),
    pytest.param([m.StateBlock(1, 5, 0, 2, b"1234567")], "table of lengths is 7 bytes", id="half a length"),
    pytest.param(
        [m.StateBlock(1, 5, 0, 2, bytes(8 * MAX_BLOBS + 8))], "table of lengths is 32776", id="many blobs"
    ),
    pytest.param(
        blocks_of(b"abc", total=9), "the state has 9 blocks; .* have 2", id="more blocks than bytes"
    ),
    pytest.param(
        [blocks_of(b"abc")[0], m.StateBlock(1, 5, 1, 7, b"abc")], "the state has 7 blocks", id="another total"
    ),
    pytest.param(
        [blocks_of(b"abc")[0], m.StateBlock(1, 5, 1, 2, b"abcd")],
        "block 1 of a state is 4 bytes",
        id="longer",
    ),
    pytest.param(
        [blocks_of(b"abc")[0], m.StateBlock(1, 5, 1, 2, b"")], "block 1 of a state is 0 bytes", id="empty"
    ),
]


@pytest.mark.parametrize(("blocks", "words"), LIES)
def test_a_state_with_false_sizes_is_refused(blocks: list[m.StateBlock], words: str) -> None:
    intake = BlobReceiver(max_bytes=1000)
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        for block in blocks:
            intake.receive(block)
    assert caught.value.remedy and intake.held_bytes <= 16 and not intake.is_complete_for(5)


def test_the_states_that_one_worker_requests_are_bounded() -> None:
    """A request has 60 bytes, and its answer may be as large as the model."""
    sender, sent = BlobSender(), []
    transport: Any = SimpleNamespace(
        backlog_bytes=lambda peer: 0, send=lambda peer, message: sent.append(message)
    )
    sender.store(5, [b"own", bytes(1000)])
    for _ in range(10 * MAX_STATE_REQUESTS):
        sender.request(SendState(C, 1, 5))
        sender.send_pending(transport)
    assert MAX_STATE_REQUESTS <= len(sent) <= 3 * MAX_STATE_REQUESTS


def test_a_missing_state_cannot_be_read() -> None:
    with pytest.raises(LocalProtocolError, match="taken before"):
        BlobReceiver().take_blobs()
