"""What every collective guarantees, on a virtual network that reorders: one suite for all of them.

    ring, direct, dense star                dense: the sum of all vectors
    the same with bf16 or int8              dense: the rank that rounds stores the remainder
    butterfly, tree, sparse star            sparse: merged at each hop, with dropped entries stored
    sparse direct                           sparse: each rank merges the entries of its indices
    all-gather                              sparse: all payloads, added at the end

Schedules and transcripts of each collective are in test_dense_exchanges.py and test_sparse_exchanges.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random

import numpy as np
import pytest
from collective_group import (
    Arrival,
    CollectiveGroup,
    DenseInputs,
    SparseInputs,
    assert_crash_is_blamed,
    random_inputs,
    random_vectors,
)

from gridtrain.core.collectives import allgather, butterfly, direct, ring, star, tree
from gridtrain.core.collectives.collective import Collective, CollectiveComplete
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import (
    AllGatherBuffer,
    ButterflyBuffer,
    CollectiveBuffer,
    DenseRingBuffer,
)
from gridtrain.runtime.buffers.direct_buffer import DirectBuffer, SparseDirectBuffer
from gridtrain.runtime.buffers.rounded_buffers import (
    RoundedDirectBuffer,
    RoundedRingBuffer,
    RoundedStarBuffer,
)
from gridtrain.runtime.buffers.star_buffers import DenseStarBuffer, SparseStarBuffer, TreeBuffer

WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32]
SLICE_BYTES = 16
ROUNDS = 3  # the residuals of a sparse round are inputs of the next

Inputs = DenseInputs | SparseInputs


@dataclass(frozen=True)
class Kind:
    """A collective, how its group is made, and what it costs.

    Attributes:
        dense: its buffer, of a vector and a world size; None for the sparse ones, which have `sparse`: of a
            rank, a world size, a payload, and as keywords its format.
        messages: that all ranks send together, by world size, of one slice.
    """

    name: str
    neighbours: Callable[[int, int], Collection[int]]
    messages: Callable[[int], int]
    dense: Callable[..., CollectiveBuffer] | None = None
    sparse: Callable[..., CollectiveBuffer] | None = None

    def inputs(self, rng: np.random.Generator, world_size: int) -> Inputs:
        return random_vectors(rng, world_size) if self.dense else random_inputs(rng, world_size)

    def buffers(self, inputs: Inputs) -> list[CollectiveBuffer]:
        """One buffer of each rank."""
        if isinstance(inputs, DenseInputs):
            assert self.dense is not None
            count = len(inputs.vectors)
            return [self.dense(vector.copy(), count, slice_bytes=SLICE_BYTES) for vector in inputs.vectors]
        assert self.sparse is not None
        payloads, _ = inputs.select()
        wire = {"n": inputs.n, "k": inputs.k, "kind": inputs.kind}
        return [self.sparse(rank, len(payloads), payload, **wire) for rank, payload in enumerate(payloads)]

    def group(self, inputs: Inputs, seed: int, skipping: Collection[int] = ()) -> CollectiveGroup:
        return CollectiveGroup(self.buffers(inputs), seed=seed, skipping=skipping)


def merging(
    buffer: Callable[..., CollectiveBuffer], rank: int, world_size: int, payload: bytes, **wire: object
) -> CollectiveBuffer:
    return buffer(payload, **wire)


def butterfly_messages(world_size: int) -> int:
    """Each rank beyond a power of two sends and receives one; the others exchange log2 times."""
    hops = world_size.bit_length() - 1
    return 2 * (world_size - 2**hops) + hops * 2**hops


def there_and_back(world_size: int) -> int:
    return 2 * (world_size - 1)


def all_pairs(times: int, world_size: int) -> int:
    return times * world_size * (world_size - 1)


KINDS = [
    Kind("ring", ring.neighbours, partial(all_pairs, 2), dense=DenseRingBuffer),
    Kind("direct", direct.neighbours, partial(all_pairs, 2), dense=DirectBuffer),
    Kind("dense star", star.neighbours, there_and_back, dense=DenseStarBuffer),
    *(
        Kind(f"{name} {kind.name.lower()}", neighbours, messages, dense=partial(buffer, kind=kind))
        for name, neighbours, messages, buffer in (
            ("ring", ring.neighbours, partial(all_pairs, 2), RoundedRingBuffer),
            ("direct", direct.neighbours, partial(all_pairs, 2), RoundedDirectBuffer),
            ("dense star", star.neighbours, there_and_back, RoundedStarBuffer),
        )
        for kind in (ValueKind.BF16, ValueKind.INT8)
    ),
    Kind("butterfly", butterfly.neighbours, butterfly_messages, sparse=partial(merging, ButterflyBuffer)),
    Kind(
        "sparse direct", direct.neighbours, partial(all_pairs, 2), sparse=partial(merging, SparseDirectBuffer)
    ),
    Kind("tree", tree.neighbours, there_and_back, sparse=partial(merging, TreeBuffer)),
    Kind("sparse star", star.neighbours, there_and_back, sparse=partial(merging, SparseStarBuffer)),
    Kind("all-gather", allgather.neighbours, partial(all_pairs, 1), sparse=AllGatherBuffer),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_sparse_kind = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.sparse], ids=lambda kind: kind.name
)


@every_kind
def test_all_ranks_end_with_the_same_bits_and_nothing_is_lost(kind: Kind, seeds) -> None:
    for seed in seeds(200, always=range(len(WORLD_SIZES)), drawn=len(WORLD_SIZES)):
        rng = np.random.default_rng(seed)
        world_size = WORLD_SIZES[seed % len(WORLD_SIZES)]
        inputs = kind.inputs(rng, world_size)
        for round_ in range(ROUNDS):
            context = f"seed {seed}, round {round_}"
            group = kind.group(inputs, seed)
            group.run()
            assert group.flags == [0] * world_size, context
            assert len({buffer.compute_digest() for buffer in group.buffers}) == 1, (
                f"{context}: digests differ"
            )
            assert_messages_are_bounded(kind, group, context)
            if isinstance(inputs, DenseInputs):
                inputs.assert_sum(group.buffers, (), context)
                break
            residuals = residuals_after(inputs, group.buffers)
            inputs.assert_conserved(residuals, group.buffers[0].update, context)
            inputs = inputs.next_round(rng, residuals)


def residuals_after(inputs: SparseInputs, buffers: Sequence[CollectiveBuffer]) -> list[np.ndarray]:
    """Entries that were not selected, and entries that merges dropped."""
    _, residuals = inputs.select()
    for residual_N, buffer in zip(residuals, buffers, strict=True):
        for indices, values in getattr(buffer, "truncated", ()):
            residual_N[indices] += values
    return residuals


def assert_messages_are_bounded(kind: Kind, group: CollectiveGroup, context: str) -> None:
    """Messages go only between neighbours, none twice, and as many as the schedule has."""
    world_size = len(group.buffers)
    for src, to, _ in group.sent:
        assert to in kind.neighbours(src, world_size), f"{context}: {src} -> {to}"
    assert len(group.sent) == len(set(group.sent)), f"{context}: a message was sent twice"
    slices = getattr(group.buffers[0], "slices", 1)
    assert len(group.sent) == kind.messages(world_size) * slices, context


@every_sparse_kind
def test_with_k_equal_n_the_update_is_the_whole_sum(kind: Kind, seeds) -> None:
    for seed in seeds(50):
        rng = np.random.default_rng(seed)
        inputs = random_inputs(rng, WORLD_SIZES[seed % len(WORLD_SIZES)], integers=True, dense=True)
        group = kind.group(inputs, seed)
        group.run()
        whole_N = np.sum([r.astype(np.float64) + c for r, c in inputs.members], axis=0)
        update_N = np.zeros(inputs.n)
        update_N[group.buffers[0].update.indices] = group.buffers[0].update.values
        assert (update_N == whole_N).all(), f"seed {seed}"


@every_kind
def test_a_skip_reaches_all_ranks_and_adds_nothing(kind: Kind, seeds) -> None:
    for seed in seeds(100, drawn=8):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(1, 10))
        skipping = {int(rank) for rank in rng.integers(world_size, size=int(rng.integers(1, 3)))}
        inputs = kind.inputs(rng, world_size)
        group = kind.group(without_numbers(inputs, skipping), seed, skipping)
        group.run()
        assert group.flags == [SKIP] * world_size, f"seed {seed}"
        assert len({buffer.compute_digest() for buffer in group.buffers}) == 1, f"seed {seed}: digests differ"
        if isinstance(inputs, DenseInputs):
            inputs.assert_sum(group.buffers, skipping, f"seed {seed}")


def without_numbers(inputs: Inputs, skipping: Collection[int]) -> Inputs:
    """Makes the gradients of skipping ranks non-finite."""
    if isinstance(inputs, SparseInputs):
        return inputs
    vectors = [v * np.float32(np.nan) if rank in skipping else v for rank, v in enumerate(inputs.vectors)]
    return replace(inputs, vectors=vectors)


@every_kind
def test_when_a_rank_is_lost_no_other_completes_and_all_wait_for_it(kind: Kind, seeds) -> None:
    for seed in seeds(125, drawn=8):
        rng = np.random.default_rng(seed)
        inputs = kind.inputs(rng, int(rng.integers(2, 10)))
        within_s = 0.1 if kind.dense else 0.05
        assert_crash_is_blamed(kind.group(inputs, seed), kind.group(inputs, seed), seed, within_s=within_s)


@every_kind
def test_one_rank_is_complete_at_once(kind: Kind) -> None:
    (buffer,) = kind.buffers(kind.inputs(np.random.default_rng(1), 1))
    core = buffer.make_collective(0, 1, flags=SKIP)
    assert core.start() == [CollectiveComplete(1)]
    assert core.complete and core.waiting_for() == frozenset() == kind.neighbours(0, 1)


@every_kind
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_a_payload_outside_the_schedule_is_refused(kind: Kind, world_size: int) -> None:
    """Every slot is sent from every rank to every rank; those outside a complete exchange are refused."""
    inputs = kind.inputs(np.random.default_rng(world_size), world_size)
    complete = kind.group(inputs, 1)
    complete.run()
    sent = set(complete.sent)
    slices = getattr(complete.buffers[0], "slices", 1)
    beyond = range(-1, world_size + 1)
    slots = [PayloadSlot(*slot) for slot in product(CollectivePhase, range(4), beyond, (-1, 0, slices))]
    for rank in range(world_size):
        core = kind.buffers(inputs)[rank].make_collective(rank, world_size, flags=0)
        core.start()
        for from_rank, slot in product(range(world_size + 1), slots):
            if (from_rank, rank, slot) not in sent:
                assert_refused(core, Arrival(from_rank, slot, 0, b""))


@every_kind
def test_no_payload_is_accepted_twice(kind: Kind, seeds) -> None:
    """At any moment of an exchange, each payload that a rank has received is refused a second time."""
    for seed in seeds(40, drawn=8):
        random = Random(seed)
        inputs = kind.inputs(np.random.default_rng(seed), random.randint(2, 9))
        group = kind.group(inputs, seed)
        length = len(completed_group(kind, inputs, seed).sent)
        received: list[tuple[int, Arrival]] = []
        for _ in range(random.randint(1, 2 * length)):
            if group.network.idle:
                break
            if (delivery := group.network.step()) is not None:
                received.append((delivery.dst, delivery.message))
        for rank, message in received:
            assert_refused(group.cores[rank], message)


def assert_refused(core: Collective, message: Arrival) -> None:
    """The error names the sender's rank.  `pytest.raises` would take most of the time."""
    try:
        core.handle(*message)
    except RemoteProtocolError as error:
        assert f"rank {message.from_rank} sent" in str(error)
    else:
        raise AssertionError(f"{message} was accepted")


def completed_group(kind: Kind, inputs: Inputs, seed: int) -> CollectiveGroup:
    group = kind.group(inputs, seed)
    group.run()
    return group
