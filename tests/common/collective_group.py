"""A whole group's exchange in one process: the real cores and buffers on the virtual network.

It executes effects as a worker's I/O loop does, for all ranks.

    group = CollectiveGroup([DenseRingBuffer(x, 3) for x in contributions], seed=7)
    group.run()
    group.flags           # of all contributions, as each rank knows them; None: did not complete

`run_lockstep` runs cores without numbers, each message taking one tick, to show the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
from simulation.virtual_network import LinkProperties, VirtualNetwork

from gridtrain.core.collectives.collective import (
    AddSlice,
    Collective,
    CollectiveComplete,
    CollectiveEffect,
    MergePayload,
    ReplacePayload,
    SendTo,
    StoreFromRank,
    StoreSlice,
)
from gridtrain.core.group.round_flags import SKIP
from gridtrain.core.messages import PayloadSlot
from gridtrain.network.wire.sparse_payload import SparseVector, decode, encode
from gridtrain.network.wire.value_encoding import ROUNDING_FACTORS, ValueKind
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer, DenseRingBuffer
from gridtrain.sparsify.merge import FloatArray

MAX_EVENTS = 1_000_000


class Arrival(NamedTuple):
    """The arguments of `Collective.handle`: a payload on its way."""

    from_rank: int
    slot: PayloadSlot
    flags: int
    payload: Any


class CollectiveGroup:
    """Ranks 0 .. P-1, one buffer each.

    Args:
        skipping: ranks whose gradient is not finite.
        seed: of the delays, and of the times at which the ranks start (some are late, and receive payloads
            before they begin).
    """

    def __init__(
        self,
        buffers: Sequence[CollectiveBuffer],
        *,
        seed: int,
        skipping: Collection[int] = (),
        link: LinkProperties | None = None,
    ) -> None:
        world_size = len(buffers)
        self.buffers = buffers
        self.cores = [
            w.make_collective(r, world_size, SKIP if r in skipping else 0) for r, w in enumerate(buffers)
        ]
        self.flags: list[int | None] = [None] * world_size
        self.sent: list[tuple[int, int, PayloadSlot]] = []
        self.network: VirtualNetwork[int, Arrival] = VirtualNetwork(seed, link)
        starts = Random(seed)
        for rank in range(world_size):
            self.network.attach(rank, self._deliver)
            self.network.call_at(starts.uniform(0.0, 0.02), partial(self._start, rank), node=rank)

    def run(self) -> None:
        """Run until no message is in flight."""
        for _ in range(MAX_EVENTS):
            if self.network.idle:
                return
            self.network.step()
        raise AssertionError(f"the exchange is not over after {MAX_EVENTS} events")

    def _start(self, rank: int) -> None:
        self._execute(rank, self.cores[rank].start())

    def _deliver(self, src: int, dst: int, message: Arrival) -> None:
        self._execute(dst, self.cores[dst].handle(*message))

    def _execute(self, rank: int, effects: Sequence[CollectiveEffect]) -> None:
        for effect in effects:
            match effect:
                case SendTo(to_rank, place, flags):
                    payload = self.buffers[rank].payload(place)
                    self.sent.append((rank, to_rank, place))
                    self.network.send(rank, to_rank, Arrival(rank, place, flags, payload), len(payload))
                case CollectiveComplete(flags):
                    self.flags[rank] = flags
                case AddSlice() | StoreSlice() | StoreFromRank() | MergePayload() | ReplacePayload():
                    self.buffers[rank].apply(effect)

    def find_blamed(self, rank: int) -> set[int]:
        """The ranks for which `rank` waits, those for which they wait, and so on."""
        blamed: set[int] = set()
        asked = [rank]
        while asked:
            fresh = self.cores[asked.pop()].waiting_for() - blamed
            blamed |= fresh
            asked += fresh
        return blamed


def assert_crash_is_blamed(
    group: CollectiveGroup, undisturbed: CollectiveGroup, seed: int, *, within_s: float = 0.05
) -> None:
    """Run both; a rank of `group` dies within `within_s`: the others blame it, or end with the same bits."""
    undisturbed.run()
    ranks = range(len(group.buffers))
    dead = Random(seed).randrange(len(ranks))
    group.network.call_at(Random(seed).uniform(0, within_s), lambda: group.network.crash(dead))
    group.run()
    for rank in set(ranks) - {dead}:
        if group.flags[rank] is None:
            assert dead in group.find_blamed(rank), f"seed {seed}: rank {rank} blames the wrong ones"
        else:
            assert group.buffers[rank].compute_digest() == undisturbed.buffers[rank].compute_digest(), (
                f"seed {seed}"
            )


def run_lockstep(cores: Sequence[Collective], *, max_ticks: int = 1000) -> list[list[tuple[int, SendTo]]]:
    """For each tick, (rank, SendTo) of all sent payloads.  A payload is the name of its sender."""
    ticks: list[list[tuple[int, SendTo]]] = []
    sends = [(rank, send) for rank, core in enumerate(cores) for send in _sends(core.start())]
    while sends and len(ticks) < max_ticks:
        ticks.append(sends)
        sends = []
        for rank, send in ticks[-1]:
            effects = cores[send.to_rank].handle(rank, send.slot, send.flags, f"from {rank}")
            sends += [(send.to_rank, onward) for onward in _sends(effects)]
    return ticks


def _sends(effects: Iterable[CollectiveEffect]) -> list[SendTo]:
    return [effect for effect in effects if isinstance(effect, SendTo)]


def select_locally(
    residual_N: FloatArray, contribution_N: FloatArray, k: int, kind: ValueKind
) -> tuple[bytes, FloatArray]:
    """A member's payload, and its residual after a commit without residuals of merges.

    The reference in numpy for the selection on the device: the k largest |residual + contribution|,
    ties by index; the rounding of the wire stays in the residual.
    """
    acc_N = residual_N + contribution_N
    indices = np.sort(np.argsort(-np.abs(acc_N), kind="stable")[:k])
    payload = encode(indices, acc_N[indices], n=acc_N.size, kind=kind)
    sent = decode(payload, n=acc_N.size, max_entries=k, kind=kind)
    acc_N[sent.indices] -= sent.values
    return payload, acc_N


@dataclass(frozen=True)
class SparseInputs:
    """One step of a group that sends k of n elements; `members` has (residual_N, contribution_N).

    `scale` None: floats.  Else all inputs are small integers times this power of two, so that
    every sum is exact, and residuals and updates must add up exactly.
    """

    n: int
    k: int
    kind: ValueKind
    scale: float | None
    members: list[tuple[FloatArray, FloatArray]]

    def select(self) -> tuple[list[bytes], list[FloatArray]]:
        """Each member's payload, and the rest of its vector."""
        selected = [select_locally(r, c, self.k, self.kind) for r, c in self.members]
        return [payload for payload, _ in selected], [residual_N for _, residual_N in selected]

    def assert_conserved(self, residuals: Sequence[FloatArray], update: SparseVector, says: str) -> None:
        """Guarantee 2a, element by element: residuals after + update == residuals before + contributions."""
        terms = np.array([vector for member in self.members for vector in member], np.float64)
        after = np.array(residuals, np.float64).sum(axis=0)
        after[update.indices] += update.values
        error_N = np.abs(after - terms.sum(axis=0))
        bound_N = (math.log2(len(self.members)) + 3) * 2.0**-23 * np.abs(terms).sum(axis=0)
        if self.scale is not None:
            bound_N[:] = 0.0
        worst = int(np.argmax(error_N - bound_N))
        assert (error_N <= bound_N).all(), (
            f"{says}: {error_N[worst]} is lost at index {worst}, the bound is {bound_N[worst]}"
        )

    def next_round(self, rng: np.random.Generator, residuals: Sequence[FloatArray]) -> SparseInputs:
        fresh = [_vector(rng, self.n, self.scale) for _ in residuals]
        return replace(self, members=list(zip(residuals, fresh, strict=True)))


def random_inputs(
    rng: np.random.Generator, world_size: int, *, integers: bool | None = None, dense: bool = False
) -> SparseInputs:
    """Any n, k and kind of values; many ties among integers, a wide range among floats.

    `integers` and `dense` (k = n, and values without loss on the wire) replace drawn choices.
    """
    n = int(rng.integers(1, 150))
    k = n if dense or rng.random() < 0.1 else int(rng.integers(1, n + 1))
    kind = ValueKind.FP32 if dense else ValueKind(int(rng.integers(len(ValueKind))))
    draw_integers = rng.random() < 0.5 if integers is None else integers
    scale = 2.0 ** int(rng.integers(-20, 20)) if draw_integers else None
    members = [(_vector(rng, n, scale), _vector(rng, n, scale)) for _ in range(world_size)]
    return SparseInputs(n, k, kind, scale, members)


@dataclass(frozen=True)
class DenseInputs:
    """One dense step of a group: each rank's vector; `exact`: whether their sum is exact in any order."""

    vectors: list[FloatArray]
    exact: bool

    def assert_sum(self, buffers: Sequence[DenseRingBuffer], skipping: Collection[int], says: str) -> None:
        """The update and all rounding rests are the sum of the vectors not skipped, within the error of
        float32 additions: each half a unit in the last place of the largest partial sum."""
        terms = [v * 0 if rank in skipping else v for rank, v in enumerate(self.vectors)]
        rests = [buffer.rest_N for buffer in buffers if buffer.rest_N is not None]
        found_N = np.sum([buffers[0].update, *rests], axis=0, dtype=np.float64)
        error_N = np.abs(found_N - np.sum(terms, axis=0, dtype=np.float64))
        bound_N = (np.log2(len(terms)) + 3) * 2.0**-23 * np.abs(terms).sum(axis=0, dtype=np.float64)
        if rests:  # a rounding may add half a step of its block, so a partial sum may be as large as others
            growth = max(ROUNDING_FACTORS.values()) ** len(terms)
            bound_N[:] = len(terms) * 2.0**-24 * growth * np.abs(terms).sum(axis=0, dtype=np.float64).max()
        assert (error_N <= (0 if self.exact else bound_N)).all(), f"{says}: off by {error_N.max()}"


def random_vectors(rng: np.random.Generator, world_size: int) -> DenseInputs:
    """Small integers times one power of two (exact in any order), or floats over a wide range."""
    inputs = random_inputs(rng, world_size)
    return DenseInputs([contribution_N for _, contribution_N in inputs.members], inputs.scale is not None)


def _vector(rng: np.random.Generator, n: int, scale: float | None) -> FloatArray:
    if scale is None:
        return np.asarray(rng.standard_normal(n) * 2.0 ** rng.integers(-30, 30, n), np.float32)
    largest = int(rng.choice([2, 20, 5000]))  # few different values, so many ties
    return np.asarray(rng.integers(-largest, largest + 1, n) * scale, np.float32)
