"""The all-gather: its trees as a picture."""

import numpy as np
from collective_group import (
    select_locally,
)

from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreFromRank,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.network.wire.sparse_payload import ValueKind
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer


def way_of(origin, world_size):
    """Sender and receiver of the origin's payload at each hop."""
    cores = [AllGather(rank, world_size, 0) for rank in range(world_size)]
    pending = [(origin, send) for send in cores[origin].start(0.0) if isinstance(send, SendTo)]
    steps = []
    while pending:
        sender, send = pending.pop(0)
        steps.append((send.slot.hop, f"{sender} -> {send.to_rank}"))
        arrived = PayloadReceived(sender, send.slot, 0, "p")
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

    core = AllGather(1, 4, flags=0)
    assert core.start(0.0) == [
        SendTo(0, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 1), 0),
        SendTo(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 1), 0),
    ]
    assert core.handle(PayloadReceived(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 0), 0, "of 0"), 0.0) == [
        StoreFromRank(0, "of 0", from_rank(3))
    ]
    assert core.handle(PayloadReceived(2, PayloadSlot(CollectivePhase.ALL_GATHER, 0, 2), 1, "of 2"), 0.0) == [
        StoreFromRank(2, "of 2", from_rank(2)),
        SendTo(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 2), 1),  # rank 2's own mark, not mine
    ]
    assert core.waiting_for() == {3} and not core.complete
    assert core.handle(PayloadReceived(3, PayloadSlot(CollectivePhase.ALL_GATHER, 1, 3), 0, "of 3"), 0.0) == [
        StoreFromRank(3, "of 3", from_rank(3)),
        CollectiveComplete(1),
    ]
    assert core.waiting_for() == frozenset() and core.complete


def test_forwarding_sends_the_same_bytes():
    payload = select_locally(np.zeros(4, np.float32), np.ones(4, np.float32), 2, ValueKind.FP16)[0]
    workspace = AllGatherBuffer(0, 3, payload, n=4, k=2, kind=ValueKind.FP16)
    theirs = bytes(payload)
    workspace.apply(StoreFromRank(2, theirs, Provenance(1, contributors=1, world_size=3, roundings=1)))
    assert workspace.payload(PayloadSlot(CollectivePhase.ALL_GATHER, 1, 2)) is theirs
