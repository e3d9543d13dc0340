"""Activation transfers, collectives in subgroups, and rounds that stay open for further collectives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from collective_group import Arrival

from gridtrain.core import messages as m
from gridtrain.core.collectives import ring
from gridtrain.core.collectives.activation_transfer import (
    MAX_PIECES,
    ActivationReceiver,
    ActivationSender,
    stage_channel,
)
from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.collective import CollectiveComplete, SendTo, StoreSlice
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.collectives.subgroup import Subgroup, neighbours_within
from gridtrain.core.commit.attempts import Attempts, StepCommitted
from gridtrain.core.group.member_events import (
    AddCollectives,
    CollectiveCompleted,
    ComputeDigest,
    ResolveRound,
    Send,
)
from gridtrain.core.group.rank_layout import RankAssignment, RankLayout
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import LocalProtocolError, RemoteProtocolError
from gridtrain.runtime.activation_buffers import (
    MAX_BUFFERS,
    MAX_JOINED_BYTES,
    PIECE_BYTES,
    ActivationReceiveBuffer,
    ActivationSendBuffer,
    StageSummary,
    StageSummaryBuffer,
)


def transfer(buffers: list[bytes], limit_bytes: int = 1 << 30, seed: int = 0) -> list[bytes]:
    """Sends the slices from one buffer to another, in any order."""
    sender, receiver = (
        ActivationSendBuffer([memoryview(b) for b in buffers]),
        ActivationReceiveBuffer(limit_bytes),
    )
    collective = receiver.make_receive(1, 0, 2)
    sends = [e for e in sender.make_send(0, 1).start() if isinstance(e, SendTo)]
    random.Random(seed).shuffle(sends)
    for send in sends:
        for effect in collective.handle(0, send.slot, 0, sender.payload(send.slot)):
            if isinstance(effect, StoreSlice):
                receiver.apply(effect)
    assert collective.complete
    return [bytes(buffer) for buffer in receiver.take_buffers()]


@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0], [1], [5, 0, 7], [PIECE_BYTES], [PIECE_BYTES + 1, 3], [3 * PIECE_BYTES - 1]]
)
def test_buffers_arrive_as_they_were_sent(lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    buffers = [rng.bytes(length) for length in lengths]
    for seed in range(3):
        assert transfer(buffers, seed=seed) == buffers


def test_a_sent_buffer_may_be_overwritten_at_once() -> None:
    """A module may reuse a small buffer for the next micro-batch."""
    own = bytearray(b"now")
    buffer = ActivationSendBuffer([memoryview(own)])
    own[:] = b"own"
    assert bytes(buffer.payload(PayloadSlot(CollectivePhase.ACTIVATION, hop=1))).endswith(b"now")


def test_a_payload_over_the_limit_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="the transfer must have at most 100 bytes"):
        transfer([bytes(200)], limit_bytes=100)


@pytest.mark.parametrize(
    ("table", "pieces"),
    [
        (np.array([3], "<u8").tobytes(), [b"four"]),
        (np.array([2**63], "<u8").tobytes(), [b"x"]),
        (np.array([1], "<u8").tobytes(), []),
        (b"odd", []),
        (b"", [b"x"]),
    ],
)
def test_slices_that_do_not_match_the_header_are_refused(table: bytes, pieces: list[bytes]) -> None:
    buffer = ActivationReceiveBuffer(1 << 20)
    collective = buffer.make_receive(1, 0, 2)
    payloads = [table, *pieces]
    with pytest.raises(RemoteProtocolError, match="rank 0 sent"):
        for i, payload in enumerate(payloads):
            slot = PayloadSlot(CollectivePhase.ACTIVATION, hop=len(payloads), slice=i)
            for effect in collective.handle(0, slot, 0, payload):
                if isinstance(effect, StoreSlice):
                    buffer.apply(effect)


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        b"short",
        np.array([1], "<u8").tobytes(),  # one buffer, and no table
        np.array([1, 4], "<u8").tobytes() + b"abc",  # the buffer is shorter than announced
        np.array([1, 2], "<u8").tobytes() + b"abc",  # and longer
        np.array([2, 2**63, 2**63 + 3], "<u8").tobytes() + b"abc",
        np.array([2**61], "<u8").tobytes(),  # a table that wraps around 64 bits
        np.array([5000, *[0] * 5000], "<u8").tobytes(),
    ],
)
def test_a_single_slice_with_a_wrong_header_is_refused(piece: bytes) -> None:
    buffer = ActivationReceiveBuffer(1 << 20)
    effects = buffer.make_receive(1, 0, 2).handle(0, PayloadSlot(CollectivePhase.ACTIVATION, hop=1), 0, piece)
    with pytest.raises(RemoteProtocolError, match="rank 0 sent"):
        for effect in effects:
            if isinstance(effect, StoreSlice):
                buffer.apply(effect)


@pytest.mark.parametrize(
    ("lengths", "messages"),
    [([], 1), ([125_000], 1), ([MAX_JOINED_BYTES - 24, 8], 1), ([MAX_JOINED_BYTES], 2)],
)
def test_small_buffers_are_one_message(lengths: list[int], messages: int) -> None:
    sends = ActivationSendBuffer([memoryview(bytes(n)) for n in lengths]).make_send(0, 1).start()
    assert len([effect for effect in sends if isinstance(effect, SendTo)]) == messages


def test_a_transfer_that_the_receiver_would_refuse_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="4097 buffers"):
        ActivationSendBuffer([memoryview(b"")] * (MAX_BUFFERS + 1))


@pytest.mark.parametrize(
    "arrived",
    [
        Arrival(2, PayloadSlot(CollectivePhase.ACTIVATION, hop=2, slice=1), 0, b""),  # of another rank
        Arrival(0, PayloadSlot(CollectivePhase.ACTIVATION, hop=2, slice=0), 0, b""),  # the same one twice
        Arrival(
            0, PayloadSlot(CollectivePhase.ACTIVATION, hop=3, slice=1), 0, b""
        ),  # of more slices than announced
        Arrival(0, PayloadSlot(CollectivePhase.ACTIVATION, hop=2, slice=2), 0, b""),  # beyond the last
        Arrival(0, PayloadSlot(CollectivePhase.ALL_GATHER, hop=2, slice=1), 0, b""),
        Arrival(
            0, PayloadSlot(CollectivePhase.ACTIVATION, hop=2, slice=1), 1, b""
        ),  # an activation transfer does not skip
    ],
)
def test_a_slice_that_is_not_due_is_refused(arrived: Arrival) -> None:
    collective = ActivationReceiver(1, 0, 3)
    collective.handle(0, PayloadSlot(CollectivePhase.ACTIVATION, hop=2, slice=0), 0, b"")
    with pytest.raises(RemoteProtocolError):
        collective.handle(*arrived)
    assert not collective.complete and collective.waiting_for() == {0}


def test_a_sender_receives_nothing_and_the_number_of_slices_is_bounded() -> None:
    with pytest.raises(RemoteProtocolError):
        ActivationSender(0, 1, 1).handle(1, PayloadSlot(CollectivePhase.ACTIVATION, hop=1), 0, b"")
    collective = ActivationReceiver(1, 0, 2)
    with pytest.raises(RemoteProtocolError):
        collective.handle(0, PayloadSlot(CollectivePhase.ACTIVATION, hop=0), 0, b"")
    huge = ActivationReceiver(1, 0, 2)
    huge.handle(0, PayloadSlot(CollectivePhase.ACTIVATION, hop=2**31 - 1), 0, b"")
    assert len(huge._missing) < MAX_PIECES


def test_each_pair_of_stages_has_channels_of_its_own() -> None:
    channels = {
        stage_channel(a, b, m.Channel(kind=kind, index=index))
        for a in (0, 1, 2, 1023)
        for b in (0, 1, 2, 1023)
        for kind in (1, 2)
        for index in range(3)
    }
    assert len(channels) == 4 * 4 * 2 * 3


# -- subgroups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda r, n: RingAllReduce(r, n, 1, 0), lambda r, n: AllGather(r, n, 0)])
def test_a_subgroup_sends_only_to_its_own_ranks(make: Any) -> None:
    ranks = (3, 5, 8)
    cores = {rank: Subgroup(make(i, len(ranks)), ranks) for i, rank in enumerate(ranks)}
    wire = [(rank, effect) for rank, core in cores.items() for effect in core.start()]
    while wire:
        rank, effect = wire.pop(0)
        if isinstance(effect, SendTo):
            assert effect.to_rank in ranks and effect.to_rank != rank
            effects = cores[effect.to_rank].handle(rank, effect.slot, effect.flags, b"")
            wire += [(effect.to_rank, e) for e in effects]
        elif not isinstance(effect, CollectiveComplete):
            assert effect.provenance.rank in ranks
    assert all(core.complete for core in cores.values())


def test_a_payload_from_outside_a_subgroup_is_refused() -> None:
    core = Subgroup(AllGather(0, 2, 0), (4, 5))
    with pytest.raises(RemoteProtocolError, match=r"exchange among only the ranks \(4, 5\)"):
        core.handle(1, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 1), 0, b"")


def test_neighbours_within_a_subgroup() -> None:
    assert neighbours_within(ring.neighbours, (2, 3), 3) == {2}
    assert neighbours_within(ring.neighbours, (2,), 2) == frozenset()


# -- stage summaries -------------------------------------------------------------------------------


def digests_of(summaries: dict[int, StageSummary], layout: RankLayout) -> dict[int, bytes]:
    buffers = {rank: StageSummaryBuffer(layout, rank, summary) for rank, summary in summaries.items()}
    for buffer in buffers.values():
        buffer._payloads = [summaries[rank].pack() for rank in range(layout.world_size)]
    return {rank: buffer.compute_digest() for rank, buffer in buffers.items()}


def test_a_member_whose_update_differs_from_its_replicas_votes_for_another_digest() -> None:
    layout = RankLayout(2, 3)
    summaries = {rank: StageSummary(bytes([rank // 3]) * 32, bytes(32), 1.0, 2.0) for rank in range(6)}
    assert len(set(digests_of(summaries, layout).values())) == 1
    summaries[4] = StageSummary(b"x" * 32, bytes(32), 1.0, 2.0)
    digests = digests_of(summaries, layout)
    assert len({digests[rank] for rank in (0, 1, 2, 3, 5)}) == 1 and digests[4] != digests[0]


def test_a_stage_summary_of_another_length_is_refused() -> None:
    from gridtrain.core.collectives.collective import Provenance, StoreFromRank

    buffer = StageSummaryBuffer(RankLayout(2, 1), 0, StageSummary(bytes(32), bytes(32), 0.0, 0.0))
    with pytest.raises(RemoteProtocolError, match="is 3 bytes long; it must be 120"):
        buffer.apply(StoreFromRank(1, b"abc", Provenance(1, 1, 2, 1)))


def test_a_stage_summary_with_a_negative_squared_norm_is_refused() -> None:
    """After the commit every member would take its square root and fail."""
    from gridtrain.core.collectives.collective import Provenance, StoreFromRank

    buffer = StageSummaryBuffer(RankLayout(2, 1), 0, StageSummary(bytes(32), bytes(32), 0.0, 0.0))
    with pytest.raises(RemoteProtocolError, match="negative square"):
        buffer.apply(
            StoreFromRank(1, StageSummary(bytes(32), bytes(32), 0.0, -1.0).pack(), Provenance(1, 1, 2, 1))
        )


# -- rounds that stay open -----------------------------------------------------------------------


MEMBERS = tuple(m.Member(bytes([i]) * 32, f"w{i}", "", 1, False) for i in range(2))
ROUND = m.RoundId(1, 1, 0, 0)
ACTIVATION, UPDATE = stage_channel(0, 1, m.Channel(kind=1)), m.Channel()


def member(rank: int) -> Attempts:
    return Attempts(RankAssignment(MEMBERS[rank].peer, 1, 1, MEMBERS), 0)


def data(channel: m.Channel, slot: PayloadSlot) -> m.Data:
    return m.Data(ROUND, channel, slot, 0, b"")


def test_the_digest_of_a_round_is_computed_after_its_last_collective() -> None:
    mine = member(1)
    opened = mine.submit(ROUND, {ACTIVATION: ActivationReceiver(1, 0, 2)}, 10.0, 0.0, has_more=True)
    assert not any(isinstance(effect, ComputeDigest) for effect in opened)
    # A payload of a collective that is not open yet is stored, not treated as a violation.
    early = data(m.Channel(kind=16), PayloadSlot(CollectivePhase.ALL_GATHER, 0, 0))
    assert mine.receive(MEMBERS[0].peer, early, 10, 0.0) == [] and mine.early_bytes(MEMBERS[0].peer) == 10
    effects = mine.receive(
        MEMBERS[0].peer, data(ACTIVATION, PayloadSlot(CollectivePhase.ACTIVATION, hop=1)), 10, 0.0
    )
    assert CollectiveCompleted(ACTIVATION, 0) in effects and not any(
        isinstance(e, ComputeDigest) for e in effects
    )
    last = mine.add_collectives(
        AddCollectives(ROUND, {m.Channel(kind=16): AllGather(1, 2, 0)}, has_more=False), 0.0
    )
    assert ComputeDigest(0) in last and mine.early_bytes(MEMBERS[0].peer) == 0
    voted = mine.prepare(b"d" * 32, 0.0)
    assert [e.message.yes for e in voted if isinstance(e, Send)] == [True]
    with pytest.raises(RemoteProtocolError):
        mine.receive(
            MEMBERS[0].peer, data(m.Channel(kind=99), PayloadSlot(CollectivePhase.ACTIVATION, hop=1)), 10, 0.0
        )


def test_a_vote_of_no_ends_the_round_of_a_member_that_awaits_an_activation() -> None:
    root = member(0)
    root.submit(
        ROUND, {stage_channel(1, 0, m.Channel(kind=2)): ActivationReceiver(0, 1, 2)}, 10.0, 0.0, has_more=True
    )
    ended = root.receive(MEMBERS[1].peer, m.Vote(ROUND, False, b"", "a stage failed"), 10, 0.0)
    assert [e.committed for e in ended if isinstance(e, ResolveRound)] == [False]
    assert root.add_collectives(AddCollectives(ROUND, {UPDATE: AllGather(0, 2, 0)}), 0.0) == []
    assert root.next_round.attempt == 1


def test_a_member_with_a_failed_collective_votes_no_at_once() -> None:
    mine = member(1)
    mine.submit(ROUND, {ACTIVATION: ActivationReceiver(1, 0, 2)}, 10.0, 0.0, has_more=True)
    effects = mine.add_collectives(AddCollectives(ROUND, {}, failure="its connection broke"), 0.0)
    assert [(e.message.yes, e.message.reason) for e in effects if isinstance(e, Send)] == [
        (False, "its connection broke")
    ]
    assert mine.fail("once more", 0.0) == []


def test_a_pipeline_without_progress_times_out() -> None:
    root = member(0)
    root.submit(ROUND, {ACTIVATION: ActivationSender(0, 1, 1)}, 10.0, 0.0, has_more=True)
    assert root.tick(9.0) == []
    ended = root.tick(10.0)
    assert any(isinstance(e, ResolveRound) and not e.committed for e in ended)
    assert not any(isinstance(e, StepCommitted) for e in ended)


def test_no_collective_can_follow_the_last_one() -> None:
    mine = member(1)
    mine.submit(ROUND, {ACTIVATION: ActivationReceiver(1, 0, 2)}, 10.0, 0.0, has_more=True)
    mine.add_collectives(AddCollectives(ROUND, {UPDATE: AllGather(1, 2, 0)}, has_more=False), 0.0)
    with pytest.raises(LocalProtocolError, match="after its last collective"):
        mine.add_collectives(AddCollectives(ROUND, {m.Channel(index=1): AllGather(1, 2, 0)}), 0.0)
