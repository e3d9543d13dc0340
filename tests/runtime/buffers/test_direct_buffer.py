"""The buffer of `GTopK(topology="direct")`: who merges which entries, and payloads that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from collective_group import CollectiveGroup

from gridtrain.core.collectives.collective import AddSlice, Provenance, StoreSlice
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.sparse_payload import encode, encoded_bytes
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.direct_buffer import SparseDirectBuffer, _longest_payload_bytes
from gridtrain.sparsify.merge import largest_summable

N, K = 9, 4
FROM_1 = Provenance(rank=1, contributors=1, world_size=2, roundings=1)


def payload(entries: dict[int, float], n: int = N, kind: ValueKind = ValueKind.FP32) -> bytes:
    indices, values = np.array(list(entries), np.int64), np.array(list(entries.values()), np.float32)
    return encode(indices, values, n=n, kind=kind)


def buffer(entries: dict[int, float], kind: ValueKind = ValueKind.FP32) -> SparseDirectBuffer:
    return SparseDirectBuffer(payload(entries, kind=kind), n=N, k=K, kind=kind)


def begun(entries: dict[int, float]) -> SparseDirectBuffer:
    """Rank 0 of 2, whose elements 0 .. 3 are the indices 0, 3, 4 and 6; those of rank 1 are 1, 2, 5, 7, 8."""
    made = buffer(entries)
    made.make_collective(0, 2, 0)
    return made


def shown(entries) -> dict[int, float]:
    indices, values = entries
    return dict(zip(indices.tolist(), values.tolist(), strict=True))


def test_each_rank_merges_the_entries_of_its_indices() -> None:
    """
    index          0   1   2   3   4   5   6   7   8
    rank 0         8   7   6   .   .   .   .   1   .
    rank 1         1   .  -6   5   4   .   .   .   .
    sum            9   7   0   5   4   .   .   1   .
    owner          0   1   1   0   0   1   0   1   1     each sends 2 entries
    update         9   7   .   5   .   .   .   1   .
    left out                       4                     to the residual of rank 0
    """
    buffers = [buffer({0: 8, 1: 7, 2: 6, 7: 1}), buffer({0: 1, 2: -6, 3: 5, 4: 4})]
    group = CollectiveGroup(buffers, seed=0)
    group.run()
    for made in buffers:
        assert shown((made.update.indices, made.update.values)) == {0: 9, 1: 7, 3: 5, 7: 1}
    assert [shown(rest) for rest in buffers[0].truncated] == [{4: 4}]
    assert buffers[1].truncated == []


def test_entries_that_are_rounded_once_more_leave_the_difference_to_their_sender() -> None:
    """int8 has one scale for all entries of a payload: 3 is exact beside 100, but not beside 1000."""
    rows = [{0: 100.0, 1: 1000.0, 3: 3.0}, {0: 100.0, 2: 0.5}]
    buffers = [buffer(row, ValueKind.INT8) for row in rows]
    selected = [shown((made.update.indices, made.update.values)) for made in buffers]
    CollectiveGroup(buffers, seed=0).run()
    total = np.zeros(N)
    for made in buffers:
        for indices, values in made.truncated:
            total[indices] += values
    total[buffers[0].update.indices] += buffers[0].update.values
    for row in selected:
        for index, value in row.items():
            total[index] -= value
    assert (total == 0).all()


@pytest.mark.parametrize(
    ("slot", "sent", "words"),
    [
        ("part", payload({0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, n=5), "rank 1: .*5 of 5 entries; at most 4"),
        ("part", payload({0: 1, 4: 1}, n=5), "rank 1: .*beyond the 9 elements"),
        ("part", payload({0: 1.001 * largest_summable(2)}, n=5), "from rank 1 has values from 0 to 8.5"),
        ("result", payload({0: 1, 1: 1, 2: 1}, n=5), "rank 1: .*3 of 5 entries; at most 2"),
        ("result", payload({0: 3e38}, n=5), "from rank 1 has values from 0 to 3e\\+38"),
    ],
)
def test_an_invalid_payload_is_refused_and_changes_nothing(slot: str, sent: bytes, words: str) -> None:
    made = begun({0: 8, 1: 7})
    source = FROM_1 if slot == "part" else Provenance(1, contributors=2, world_size=2, roundings=2)
    with pytest.raises(RemoteProtocolError, match=words):
        made.apply(AddSlice(0, 0, sent, source) if slot == "part" else StoreSlice(1, 0, sent, source))
    made.apply(AddSlice(0, 0, payload({0: 1, 3: 2}, n=5), FROM_1))
    made.apply(StoreSlice(1, 0, payload({0: 7}, n=5), source))
    assert shown((made.update.indices, made.update.values)) == {0: 9, 1: 7, 6: 2}


def test_a_payload_too_long_to_be_a_part_is_not_held_until_its_turn() -> None:
    made = buffer({0: 8})
    core = made.make_collective(0, 3, 0)  # parts are added in the order 1, 2
    core.start()
    longest = _longest_payload_bytes(K, 3, ValueKind.FP32)
    slot = PayloadSlot(CollectivePhase.REDUCE, 0, 0, 0)
    with pytest.raises(
        RemoteProtocolError, match=f"rank 2 sent {longest + 1} bytes.*at most {longest} bytes"
    ):
        core.handle(2, slot, 0, bytes(longest + 1))
    assert core.handle(2, slot, 0, payload({0: 1, 1: 1, 2: 1}, n=3)) == []


@pytest.mark.parametrize("kind", list(ValueKind))
def test_no_part_is_longer_than_the_bound(kind: ValueKind) -> None:
    rng = np.random.default_rng(kind)
    for _ in range(300):
        n = int(2 ** rng.uniform(0, 28))
        k = int(min(n, 2 ** rng.uniform(0, 16)))
        bound = _longest_payload_bytes(k, n, kind)
        for fewer in {0, 1, k, *rng.integers(0, k + 1, 20).tolist()}:
            assert encoded_bytes(min(fewer, n), n, kind) <= bound, f"n {n}, k {k}, {fewer} entries"


def test_a_vector_shorter_than_the_group_and_fewer_entries_than_members() -> None:
    """Rank 3 owns no index; each of the others may send one entry although k is 1."""
    buffers = [
        SparseDirectBuffer(payload({rank % 3: rank + 1.0}, n=3), n=3, k=1, kind=ValueKind.FP32)
        for rank in range(4)
    ]
    CollectiveGroup(buffers, seed=0).run()
    for made in buffers:
        assert shown((made.update.indices, made.update.values)) == {0: 5, 1: 2, 2: 3}
