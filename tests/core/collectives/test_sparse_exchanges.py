"""Butterfly, tree, sparse star and all-gather: schedules, transcripts, and dropped entries.

What all of them guarantee is in test_conformance.py.
"""

import numpy as np
import pytest
from collective_group import CollectiveGroup, random_inputs, run_lockstep, select_locally

from gridtrain.core.collectives import butterfly, tree
from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    MergePayload,
    Provenance,
    ReplacePayload,
    SendTo,
    StoreFromRank,
)
from gridtrain.core.collectives.star import SparseStar
from gridtrain.core.collectives.tree import TreeExchange
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.network.wire.sparse_payload import decode, encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, ButterflyBuffer
from gridtrain.runtime.buffers.star_buffers import SparseStarBuffer, TreeBuffer


@pytest.mark.parametrize(
    ("schedule", "world_size", "expected"),
    [
        (
            butterfly.schedule,
            6,
            "rank 0:  fold <- 4   swap <-> 1   swap <-> 2   unfold -> 4\n"
            "rank 1:  fold <- 5   swap <-> 0   swap <-> 3   unfold -> 5\n"
            "rank 2:  swap <-> 3   swap <-> 0\n"
            "rank 3:  swap <-> 2   swap <-> 1\n"
            "rank 4:  fold -> 0   unfold <- 0\n"
            "rank 5:  fold -> 1   unfold <- 1",
        ),
        (
            butterfly.schedule,
            3,
            "rank 0:  fold <- 2   swap <-> 1   unfold -> 2\n"
            "rank 1:  swap <-> 0\n"
            "rank 2:  fold -> 0   unfold <- 0",
        ),
        (
            tree.schedule,
            6,
            "rank 0:  to_root <- 1   to_root <- 2   to_root <- 4   from_root -> 4   "
            "from_root -> 2   from_root -> 1\n"
            "rank 1:  to_root -> 0   from_root <- 0\n"
            "rank 2:  to_root <- 3   to_root -> 0   from_root <- 0   from_root -> 3\n"
            "rank 3:  to_root -> 2   from_root <- 2\n"
            "rank 4:  to_root <- 5   to_root -> 0   from_root <- 0   from_root -> 5\n"
            "rank 5:  to_root -> 4   from_root <- 4",
        ),
    ],
)
def test_the_schedule_of_some_ranks(schedule, world_size, expected):
    arrows = {(True, False): "->", (False, True): "<-", (True, True): "<->"}
    lines = [
        f"rank {rank}:  "
        + "   ".join(
            f"{hop.slot.phase.name.lower()} {arrows[hop.is_sender, hop.is_receiver]} {hop.partner}"
            for hop in schedule(rank, world_size)
        )
        for rank in range(world_size)
    ]
    assert "\n".join(lines) == expected


@pytest.mark.parametrize(
    ("world_size", "hops"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3), (31, 6), (32, 5)]
)
def test_the_time_of_a_butterfly_is_at_most_that_of_the_design(world_size, hops):
    """floor(log2 P) hops, and two more if P is not a power of two (fewer where hops overlap: P = 3)."""
    ticks = run_lockstep([ButterflyExchange(rank, world_size, 0) for rank in range(world_size)])
    assert len(ticks) <= hops


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 39])
def test_each_link_of_a_tree_carries_one_payload_each_way(world_size):
    hops = [(rank, hop) for rank in range(world_size) for hop in tree.schedule(rank, world_size)]
    sent = [(rank, hop.partner, hop.slot) for rank, hop in hops if hop.is_sender]
    awaited = [(hop.partner, rank, hop.slot) for rank, hop in hops if hop.is_receiver]
    assert sorted(sent, key=str) == sorted(awaited, key=str)
    assert len(sent) == 2 * (world_size - 1)
    ticks = run_lockstep([TreeExchange(rank, world_size, 0) for rank in range(world_size)])
    assert len(ticks) <= 2 * (world_size - 1).bit_length()


@pytest.mark.parametrize(
    ("make", "stored"),
    [
        (ButterflyBuffer, [{9: 1.0, 12: 4.0}, {10: 2.0, 13: 5.0}, {}, {11: 3.0}, {}, {}]),
        (TreeBuffer, [{9: 1.0, 10: 2.0, 12: 4.0}, {}, {11: 3.0}, {}, {13: 5.0}, {}]),
    ],
)
def test_each_entry_that_a_merge_drops_is_stored_by_one_rank(make, stored):
    """Rank r of 6 sends the value r + 1 at index 9 + r; k = 1.  The update is the largest, 6 at index 14.

    butterfly, which spreads dropped entries over the ranks:
    fold      0: 1, 5 -> 5 at 13 (only rank 0 stores 1 at 9)  1: 2, 6 -> 6 at 14 (only rank 1 stores 2 at 10)
    swap 1    0, 1: 5, 6 -> 6 at 14 (13 is odd: rank 1)       2, 3: 3, 4 -> 4 at 12 (11 is odd: rank 3)
    swap 2    all: 6, 4 -> 6 at 14 (12 mod 4 = 0: rank 0)

    tree, where the receiver of a merge stores what it drops:
    to root   0: 1, 2 -> 2 (stores 1 at 9)   2: 3, 4 -> 4 (stores 3 at 11)   4: 5, 6 -> 6 (stores 5 at 13)
              0: 2, 4 -> 4 (stores 2 at 10), then 4, 6 -> 6 (stores 4 at 12)
    """
    vectors = [np.zeros(16, np.float32) for _ in range(6)]
    for rank, vector in enumerate(vectors):
        vector[9 + rank] = rank + 1
    payloads = [select_locally(v * 0, v, 1, ValueKind.FP16)[0] for v in vectors]
    buffers = [make(p, n=16, k=1, kind=ValueKind.FP16) for p in payloads]
    CollectiveGroup(buffers, seed=0).run()
    truncated = [
        {int(i): float(v) for ix, vs in w.truncated for i, v in zip(ix, vs, strict=True)} for w in buffers
    ]
    assert truncated == stored
    assert [w.update.indices.tolist() for w in buffers] == [[14]] * 6


# -- butterfly -------------------------------------------------------------------------------------


def test_a_transcript_of_rank_1_of_a_butterfly_of_six_whose_partners_are_ahead():
    core = ButterflyExchange(1, 6, flags=0)

    def receive(from_rank, phase, hop, payload, skip=False):
        return core.handle(from_rank, PayloadSlot(phase, hop), skip, payload)

    assert receive(0, CollectivePhase.SWAP, 0, "0's") == []  # before this rank started
    assert core.start() == []
    assert receive(3, CollectivePhase.SWAP, 1, "2+3's", skip=True) == []  # two hops ahead
    assert core.waiting_for() == {5} and not core.complete
    assert receive(5, CollectivePhase.FOLD, 0, "5's") == [
        MergePayload("5's", 1, 0, Provenance(5, contributors=1, world_size=6, roundings=1)),
        SendTo(0, PayloadSlot(CollectivePhase.SWAP, 0), 0),
        MergePayload("0's", 2, 1, Provenance(0, contributors=2, world_size=6, roundings=2)),
        SendTo(3, PayloadSlot(CollectivePhase.SWAP, 1), 0),
        MergePayload("2+3's", 4, 1, Provenance(3, contributors=2, world_size=6, roundings=3)),
        SendTo(5, PayloadSlot(CollectivePhase.UNFOLD), 1),
        CollectiveComplete(1),
    ]
    assert core.waiting_for() == frozenset() and core.complete


def test_a_transcript_of_rank_5_of_a_butterfly_of_six_which_is_folded():
    core = ButterflyExchange(5, 6, flags=0)
    assert core.start() == [SendTo(1, PayloadSlot(CollectivePhase.FOLD), 0)]
    assert core.waiting_for() == {1}
    effects = core.handle(1, PayloadSlot(CollectivePhase.UNFOLD), 1, "all")
    assert effects == [
        ReplacePayload("all", Provenance(1, contributors=6, world_size=6, roundings=4)),
        CollectiveComplete(1),
    ]


# -- tree and star ---------------------------------------------------------------------------------


def to_root(hop=0, rank=0):
    return PayloadSlot(CollectivePhase.TO_ROOT, hop, rank)


def from_root(hop=0):
    return PayloadSlot(CollectivePhase.FROM_ROOT, hop)


def test_a_transcript_of_rank_2_of_a_tree_of_six():
    core = TreeExchange(2, 6, flags=0)
    assert core.start() == [] and core.waiting_for() == {3}
    assert core.handle(3, to_root(), 1, "3's") == [
        MergePayload("3's", 1, 0, Provenance(3, contributors=1, world_size=6, roundings=1)),
        SendTo(0, to_root(1), 1),
    ]
    assert core.handle(0, from_root(1), 1, "all") == [
        ReplacePayload("all", Provenance(0, contributors=6, world_size=6, roundings=4)),
        SendTo(3, from_root(), 1),
        CollectiveComplete(1),
    ]
    assert core.complete and core.waiting_for() == frozenset()


def test_a_transcript_of_the_root_of_a_star():
    core = SparseStar(0, 3, flags=0)
    assert core.start() == [] and core.waiting_for() == {1, 2}
    assert core.handle(2, to_root(rank=2), 1, "2's") == [StoreFromRank(2, "2's", Provenance(2, 1, 3, 1))]
    assert core.handle(1, to_root(rank=1), 0, "1's") == [
        StoreFromRank(1, "1's", Provenance(1, 1, 3, 1)),
        SendTo(1, from_root(), 1),
        SendTo(2, from_root(), 1),
        CollectiveComplete(1),
    ]
    assert core.complete and core.waiting_for() == frozenset()


def test_a_transcript_of_a_member_of_a_star():
    core = SparseStar(2, 3, flags=SKIP)
    assert core.start() == [SendTo(0, to_root(rank=2), 1)]
    assert core.handle(0, from_root(), 1, "all") == [
        ReplacePayload("all", Provenance(0, contributors=3, world_size=3, roundings=2)),
        CollectiveComplete(1),
    ]


def test_the_update_of_a_star_has_the_k_largest_entries_of_the_sum_of_all_selections(seeds):
    """A tree or butterfly may drop in an early merge what the whole sum would contain; a star does not."""
    for seed in seeds(50):
        rng = np.random.default_rng(seed)
        inputs = random_inputs(rng, int(rng.integers(2, 9)), integers=True)
        buffers = [SparseStarBuffer(p, n=inputs.n, k=inputs.k, kind=inputs.kind) for p in inputs.select()[0]]
        group = CollectiveGroup(buffers, seed=seed)
        sums = np.zeros(inputs.n, np.float64)
        for buffer in group.buffers:
            np.add.at(sums, buffer.update.indices, buffer.update.values)
        group.run()
        order = sorted((i for i in range(inputs.n) if sums[i]), key=lambda i: (-abs(sums[i]), i))
        chosen = np.array(sorted(order[: inputs.k]), np.int64)
        numbers = {"n": inputs.n, "kind": inputs.kind}
        payload = encode(chosen, sums[chosen].astype(np.float32), **numbers)
        sent = decode(payload, max_entries=inputs.k, **numbers)
        assert group.buffers[0].update.indices.tolist() == sent.indices.tolist(), f"seed {seed}"


# -- all-gather ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "world_size", "expected"),
    [
        (5, 6, "hop 0   5 -> 4\nhop 1   4 -> 2   5 -> 3\nhop 2   4 -> 0   5 -> 1"),
        (0, 8, "hop 0   0 -> 7\nhop 1   0 -> 6   7 -> 5\nhop 2   0 -> 4   5 -> 1   6 -> 2   7 -> 3"),
    ],
)
def test_the_tree_of_one_payload(origin, world_size, expected):
    """Sender and receiver of the origin's payload at each hop."""
    cores = [AllGather(rank, world_size, 0) for rank in range(world_size)]
    pending = [(origin, send) for send in cores[origin].start() if isinstance(send, SendTo)]
    steps = []
    while pending:
        sender, send = pending.pop(0)
        steps.append((send.slot.hop, f"{sender} -> {send.to_rank}"))
        effects = cores[send.to_rank].handle(sender, send.slot, 0, "p")
        pending += [(send.to_rank, onward) for onward in effects if isinstance(onward, SendTo)]
    last = max(hop for hop, _ in steps)
    assert expected == "\n".join(
        f"hop {hop}   " + "   ".join(text for at, text in sorted(steps) if at == hop)
        for hop in range(last + 1)
    )


def test_a_transcript_of_rank_1_of_an_all_gather_of_four():
    core = AllGather(1, 4, flags=0)

    def slot(hop, rank):
        return PayloadSlot(CollectivePhase.ALL_GATHER, hop, rank)

    def stored(rank, sender):
        return StoreFromRank(rank, f"of {rank}", Provenance(sender, 1, world_size=4, roundings=1))

    assert core.start() == [SendTo(0, slot(0, 1), 0), SendTo(3, slot(1, 1), 0)]
    assert core.handle(3, slot(1, 0), 0, "of 0") == [stored(0, 3)]
    assert core.handle(2, slot(0, 2), 1, "of 2") == [
        stored(2, 2),
        SendTo(3, slot(1, 2), 1),  # the flag of rank 2
    ]
    assert core.waiting_for() == {3} and not core.complete
    assert core.handle(3, slot(1, 3), 0, "of 3") == [
        stored(3, 3),
        CollectiveComplete(1),
    ]
    assert core.waiting_for() == frozenset() and core.complete


def test_an_all_gather_forwards_the_same_bytes():
    payload = select_locally(np.zeros(4, np.float32), np.ones(4, np.float32), 2, ValueKind.FP16)[0]
    buffer = AllGatherBuffer(0, 3, payload, n=4, k=2, kind=ValueKind.FP16)
    theirs = bytes(payload)
    buffer.apply(StoreFromRank(2, theirs, Provenance(1, contributors=1, world_size=3, roundings=1)))
    assert buffer.payload(PayloadSlot(CollectivePhase.ALL_GATHER, 1, 2)) is theirs
