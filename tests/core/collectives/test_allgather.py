"""The all-gather: its trees as a picture, and guarantees 1 and 2 of TopK on a network that reorders."""

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
    assert_crash_is_blamed,
    random_inputs,
    select_locally,
)

from gridtrain.core.collectives.allgather import AllGather, neighbours
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreFromRank,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import ValueKind
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer

WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32]


def way_of(origin, world_size):
    """Sender and receiver of the origin's payload at each hop."""
    cores = [AllGather(rank, world_size, False) for rank in range(world_size)]
    pending = [(origin, send) for send in cores[origin].start(0.0) if isinstance(send, SendTo)]
    steps = []
    while pending:
        sender, send = pending.pop(0)
        steps.append((send.slot.hop, f"{sender} -> {send.to_rank}"))
        arrived = PayloadReceived(sender, send.slot, False, "p")
        effects = cores[send.to_rank].handle(arrived, 0.0)
        pending += [(send.to_rank, onward) for onward in effects if isinstance(onward, SendTo)]
    last = max(hop for hop, _ in steps)
    return "\n".join(
        f"hop {hop}   " + "   ".join(text for at, text in sorted(steps) if at == hop)
        for hop in range(last + 1)
    )


def test_the_tree_of_one_payload_among_six():
    assert way_of(origin=5, world_size=6) == (
        "hop 0   5 -> 4\n"
        "hop 1   4 -> 2   5 -> 3\n"
        "hop 2   4 -> 0   5 -> 1"
    )  # fmt: skip


def test_the_tree_of_one_payload_among_eight():
    assert way_of(origin=0, world_size=8) == (
        "hop 0   0 -> 7\n"
        "hop 1   0 -> 6   7 -> 5\n"
        "hop 2   0 -> 4   5 -> 1   6 -> 2   7 -> 3"
    )  # fmt: skip


def test_a_transcript_of_rank_1_of_four():
    def from_rank(rank):
        return Provenance(rank, contributors=1, world_size=4, roundings=1)

    core = AllGather(1, 4, skip=False)
    assert core.start(0.0) == [
        SendTo(0, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 1), False),
        SendTo(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 1), False),
    ]
    assert core.handle(
        PayloadReceived(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 0), False, "of 0"), 0.0
    ) == [StoreFromRank(0, "of 0", from_rank(3))]
    assert core.handle(
        PayloadReceived(2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 2), True, "of 2"), 0.0
    ) == [
        StoreFromRank(2, "of 2", from_rank(2)),
        SendTo(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 2), True),  # rank 2's own mark, not mine
    ]
    assert core.waiting_for() == {3} and not core.complete
    assert core.handle(
        PayloadReceived(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 3), False, "of 3"), 0.0
    ) == [
        StoreFromRank(3, "of 3", from_rank(3)),
        CollectiveComplete(True),
    ]
    assert core.waiting_for() == frozenset() and core.complete


@pytest.mark.parametrize(
    ("from_rank", "place"),
    [
        (3, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 2)),  # origin 2 comes from rank 2
        (2, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 2)),  # ... at hop 0
        (2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 1)),  # mine
        (2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 4)),  # no such rank
        (2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, -2)),
        (2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 2, 1)),  # no slices here
        (2, PayloadSlot(CollectivePhase.SWAP, 0, 2)),  # another exchange
    ],
)
def test_impossible_payloads_are_refused(from_rank, place):
    core = AllGather(1, 4, skip=False)
    core.start(0.0)
    with pytest.raises(RemoteProtocolError, match=f"rank {from_rank} sent"):
        core.handle(PayloadReceived(from_rank, place, False, "x"), 0.0)


def test_the_same_origin_twice_is_refused():
    core = AllGather(1, 4, skip=False)
    event = PayloadReceived(2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 2), False, "x")
    core.start(0.0)
    core.handle(event, 0.0)
    with pytest.raises(RemoteProtocolError, match="nothing more of this origin"):
        core.handle(event, 0.0)


def prepared(rng, world_size):
    """The inputs of one step, and the payload of each rank."""
    inputs = random_inputs(rng, world_size)
    return inputs, *inputs.select()


def group_of(inputs, payloads, seed, skipping=()):
    world_size = len(payloads)
    workspaces = [
        AllGatherBuffer(rank, world_size, payload, n=inputs.n, k=inputs.k, kind=inputs.kind)
        for rank, payload in enumerate(payloads)
    ]
    return CollectiveGroup(workspaces, seed=seed, skipping=skipping)


def test_all_ranks_end_with_the_same_bits_and_nothing_is_lost(seeds):
    for seed in seeds(200):
        rng = np.random.default_rng(seed)
        world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
        inputs, payloads, residuals = prepared(rng, world_size)
        group = group_of(inputs, payloads, seed)
        group.run()

        assert group.verdicts == [False] * world_size, f"seed {seed}"
        assert len({w.compute_digest() for w in group.buffers}) == 1, f"seed {seed}: the ranks differ"
        inputs.assert_conserved(residuals, group.buffers[0].update, f"seed {seed}")
        for rank in range(world_size):
            partners = {to for src, to, _ in group.sent if src == rank}
            assert partners <= neighbours(rank, world_size), f"seed {seed}"
            assert sum(src == rank for src, _, _ in group.sent) == world_size - 1, f"seed {seed}"


def test_a_skip_reaches_all_ranks_and_adds_nothing(seeds):
    for seed in seeds(50):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(2, 10))
        inputs, payloads, _ = prepared(rng, world_size)
        skipping = int(rng.integers(world_size))
        group = group_of(inputs, payloads, seed, skipping={skipping})
        group.run()
        assert group.verdicts == [True] * world_size, f"seed {seed}"
        assert len({w.compute_digest() for w in group.buffers}) == 1, f"seed {seed}: the ranks differ"


def test_when_a_rank_dies_no_other_completes_and_all_wait_for_it(seeds):
    for seed in seeds(100):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(2, 17))
        inputs, payloads, _ = prepared(rng, world_size)
        assert_crash_is_blamed(group_of(inputs, payloads, seed), group_of(inputs, payloads, seed), seed)


def test_forwarding_sends_the_same_bytes():
    payload = select_locally(np.zeros(4, np.float32), np.ones(4, np.float32), 2, ValueKind.FP16)[0]
    workspace = AllGatherBuffer(0, 3, payload, n=4, k=2, kind=ValueKind.FP16)
    theirs = bytes(payload)
    workspace.apply(StoreFromRank(2, theirs, Provenance(1, contributors=1, world_size=3, roundings=1)))
    assert workspace.payload(PayloadSlot(CollectivePhase.ALL_GATHER, 1, 2)) is theirs
