"""The paper's tree: its schedule as a picture, and which rank keeps what a merge drops."""

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
    run_lockstep,
    select_locally,
)

from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    MergePayload,
    PayloadReceived,
    Provenance,
    ReplacePayload,
    SendTo,
)
from gridtrain.core.collectives.tree import TreeExchange, schedule
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.network.wire.sparse_payload import ValueKind
from gridtrain.runtime.buffers.star_buffers import TreeBuffer


def picture(world_size):
    return "\n".join(
        f"rank {rank}:  "
        + "   ".join(
            f"{hop.slot.phase.name.lower()} {'->' if hop.is_sender else '<-'} {hop.partner}"
            for hop in schedule(rank, world_size)
        )
        for rank in range(world_size)
    )


def test_the_schedule_of_six_ranks():
    assert picture(6) == (
        "rank 0:  to_root <- 1   to_root <- 2   to_root <- 4   from_root -> 4   "
        "from_root -> 2   from_root -> 1\n"
        "rank 1:  to_root -> 0   from_root <- 0\n"
        "rank 2:  to_root <- 3   to_root -> 0   from_root <- 0   from_root -> 3\n"
        "rank 3:  to_root -> 2   from_root <- 2\n"
        "rank 4:  to_root <- 5   to_root -> 0   from_root <- 0   from_root -> 5\n"
        "rank 5:  to_root -> 4   from_root <- 4"
    )


@pytest.mark.parametrize("world_size", range(1, 40))
def test_each_link_carries_one_payload_each_way_and_the_links_are_a_tree(world_size):
    sent = [
        (rank, hop.partner, hop.slot)
        for rank in range(world_size)
        for hop in schedule(rank, world_size)
        if hop.is_sender
    ]
    awaited = [
        (hop.partner, rank, hop.slot)
        for rank in range(world_size)
        for hop in schedule(rank, world_size)
        if hop.is_receiver
    ]
    assert sorted(sent, key=str) == sorted(awaited, key=str)
    assert len(sent) == 2 * (world_size - 1)
    ticks = run_lockstep([TreeExchange(rank, world_size, 0) for rank in range(world_size)])
    assert len(ticks) <= 2 * (world_size - 1).bit_length()


def test_a_transcript_of_rank_2_of_six():
    core = TreeExchange(2, 6, flags=0)
    assert core.start(0.0) == [] and core.waiting_for() == {3}
    raised, lowered = PayloadSlot(CollectivePhase.TO_ROOT, 1), PayloadSlot(CollectivePhase.FROM_ROOT, 1)
    assert core.handle(PayloadReceived(3, PayloadSlot(CollectivePhase.TO_ROOT), 1, "3's"), 0.0) == [
        MergePayload("3's", 1, 0, Provenance(3, contributors=1, world_size=6, roundings=1)),
        SendTo(0, raised, 1),
    ]
    assert core.handle(PayloadReceived(0, lowered, 1, "all"), 0.0) == [
        ReplacePayload("all", Provenance(0, contributors=6, world_size=6, roundings=4)),
        SendTo(3, PayloadSlot(CollectivePhase.FROM_ROOT), 1),
        CollectiveComplete(1),
    ]
    assert core.complete and core.waiting_for() == frozenset()


def test_the_receiver_of_a_merge_adds_what_it_drops_to_its_residual():
    """Rank r of 6 sends the value r + 1 at index 9 + r; k = 1.  The largest, 6 at 14, comes through.

    raise 0   0: 1, 2 -> 2 (keeps 1 at 9)   2: 3, 4 -> 4 (keeps 3 at 11)   4: 5, 6 -> 6 (keeps 5 at 13)
    raise 1   0: 2, 4 -> 4 (keeps 2 at 10)
    raise 2   0: 4, 6 -> 6 (keeps 4 at 12)
    """
    vectors = [np.zeros(16, np.float32) for _ in range(6)]
    for rank, vector in enumerate(vectors):
        vector[9 + rank] = rank + 1
    payloads = [select_locally(v * 0, v, 1, ValueKind.FP16)[0] for v in vectors]
    workspaces = [TreeBuffer(p, n=16, k=1, kind=ValueKind.FP16) for p in payloads]
    CollectiveGroup(workspaces, seed=0).run()
    kept = [
        {int(i): float(v) for ix, vs in w.truncated for i, v in zip(ix, vs, strict=True)} for w in workspaces
    ]
    assert kept == [{9: 1.0, 10: 2.0, 12: 4.0}, {}, {11: 3.0}, {}, {13: 5.0}, {}]
    assert [w.update.indices.tolist() for w in workspaces] == [[14]] * 6
