"""The butterfly: its schedule as a picture, and which rank keeps what a merge drops."""

import numpy as np
import pytest
from collective_group import (
    CollectiveGroup,
    run_lockstep,
    select_locally,
)

from gridtrain.core.collectives.butterfly import ButterflyExchange, schedule
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    MergePayload,
    PayloadReceived,
    Provenance,
    ReplacePayload,
    SendTo,
)
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.network.wire.sparse_payload import ValueKind
from gridtrain.runtime.buffers.collective_buffers import ButterflyBuffer


def picture(world_size):
    arrows = {(True, False): "->", (False, True): "<-", (True, True): "<->"}
    return "\n".join(
        f"rank {rank}:  "
        + "   ".join(
            f"{hop.slot.phase.name.lower()} {arrows[hop.is_sender, hop.is_receiver]} {hop.partner}"
            for hop in schedule(rank, world_size)
        )
        for rank in range(world_size)
    )


def test_the_schedule_of_six_ranks():
    assert picture(6) == (
        "rank 0:  fold <- 4   swap <-> 1   swap <-> 2   unfold -> 4\n"
        "rank 1:  fold <- 5   swap <-> 0   swap <-> 3   unfold -> 5\n"
        "rank 2:  swap <-> 3   swap <-> 0\n"
        "rank 3:  swap <-> 2   swap <-> 1\n"
        "rank 4:  fold -> 0   unfold <- 0\n"
        "rank 5:  fold -> 1   unfold <- 1"
    )


def test_the_schedule_of_three_ranks():
    assert picture(3) == (
        "rank 0:  fold <- 2   swap <-> 1   unfold -> 2\nrank 1:  swap <-> 0\nrank 2:  fold -> 0   unfold <- 0"
    )


@pytest.mark.parametrize(
    ("world_size", "hops"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3), (31, 6), (32, 5)]
)
def test_the_time_is_at_most_that_of_the_design(world_size, hops):
    """floor(log2 P) hops, and two more if P is not a power of two (fewer where hops overlap: P = 3)."""
    ticks = run_lockstep([ButterflyExchange(rank, world_size, 0) for rank in range(world_size)])
    assert len(ticks) <= hops


def test_a_transcript_of_rank_1_of_six_whose_partners_are_ahead():
    core = ButterflyExchange(1, 6, flags=0)

    def came(from_rank, phase, hop, payload, skip=False):
        return core.handle(PayloadReceived(from_rank, PayloadSlot(phase, hop), skip, payload), 0.0)

    assert came(0, CollectivePhase.SWAP, 0, "0's") == []  # before I began
    assert core.start(0.0) == []
    assert came(3, CollectivePhase.SWAP, 1, "2+3's", skip=True) == []  # two hops ahead
    assert core.waiting_for() == {5} and not core.complete
    assert came(5, CollectivePhase.FOLD, 0, "5's") == [
        MergePayload("5's", 1, 0, Provenance(5, contributors=1, world_size=6, roundings=1)),
        SendTo(0, PayloadSlot(CollectivePhase.SWAP, 0), 0),
        MergePayload("0's", 2, 1, Provenance(0, contributors=2, world_size=6, roundings=2)),
        SendTo(3, PayloadSlot(CollectivePhase.SWAP, 1), 0),
        MergePayload("2+3's", 4, 1, Provenance(3, contributors=2, world_size=6, roundings=3)),
        SendTo(5, PayloadSlot(CollectivePhase.UNFOLD), 1),
        CollectiveComplete(1),
    ]
    assert core.waiting_for() == frozenset() and core.complete


def test_a_transcript_of_rank_5_of_six_which_is_folded():
    core = ButterflyExchange(5, 6, flags=0)
    assert core.start(0.0) == [SendTo(1, PayloadSlot(CollectivePhase.FOLD), 0)]
    assert core.waiting_for() == {1}
    effects = core.handle(PayloadReceived(1, PayloadSlot(CollectivePhase.UNFOLD), 1, "all"), 0.0)
    assert effects == [
        ReplacePayload("all", Provenance(1, contributors=6, world_size=6, roundings=4)),
        CollectiveComplete(1),
    ]


def test_dropped_values_are_spread_over_the_ranks_and_the_fold_drops_none():
    """Rank r of 6 sends the value r + 1 at index 9 + r; k = 1.  The largest, 6 at 14, comes through.

    fold     0: 1, 5 -> 5 at 13 (rank 0 alone keeps 1 at 9)  1: 2, 6 -> 6 at 14 (rank 1 alone keeps 2 at 10)
    swap 1   0, 1: 5, 6 -> 6 at 14 (13 is odd: rank 1)       2, 3: 3, 4 -> 4 at 12 (11 is odd: rank 3)
    swap 2   all: 6, 4 -> 6 at 14 (12 mod 4 = 0: rank 0)
    """
    vectors = [np.zeros(16, np.float32) for _ in range(6)]
    for rank, vector in enumerate(vectors):
        vector[9 + rank] = rank + 1
    payloads = [select_locally(v * 0, v, 1, ValueKind.FP16)[0] for v in vectors]
    workspaces = [ButterflyBuffer(p, n=16, k=1, kind=ValueKind.FP16) for p in payloads]
    CollectiveGroup(workspaces, seed=0).run()
    kept = [
        {int(i): float(v) for ix, vs in w.truncated for i, v in zip(ix, vs, strict=True)} for w in workspaces
    ]
    assert kept == [{9: 1.0, 12: 4.0}, {10: 2.0, 13: 5.0}, {}, {11: 3.0}, {}, {}]
    assert [w.update.indices.tolist() for w in workspaces] == [[14]] * 6
