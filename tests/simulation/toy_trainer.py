"""A trainer whose model is a vector of small integers, for simulated groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from exchange_buffers import DENSE, make_buffer, update_of

from gridtrain.config import Auto
from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.planning.exchange_facts import as_direct
from gridtrain.network.wire.sparse_payload import decode, encode
from gridtrain.network.wire.value_encoding import ValueKind

N, K = 24, 5  # elements of the model, and of these how many a sparse exchange selects
RESUMED = ("dense", "dense-int8")
"""In a retry these continue from the values that had arrived."""

PARAMETERS = 120_576
AUTO = Auto(density=0.05)
_NAMES = ("dense", "gtopk", "topk"), ("direct", "gtopk-direct")
_USUAL = AUTO.exchanges(PARAMETERS)
_DIRECT = (each for each in map(as_direct, _USUAL) if each is not None)
CHOICES = {
    each.describe(): name
    for names, exchanges in zip(_NAMES, (_USUAL, _DIRECT), strict=True)
    for name, each in zip(names, exchanges, strict=True)
}
"""Exchanges that the coordinator may choose, by their descriptions."""

Buffers = dict[m.Channel, Any]


@cache
def gradient_of(position: int) -> np.ndarray:
    """Small integers, so that every sum is exact."""
    return np.random.RandomState(position).randint(-8, 9, N).astype(np.float32)


def contribution_to(exchange: str, values_N: np.ndarray) -> Any:
    """What `make_buffer` takes: the values, or for a sparse exchange a payload of the `K` largest."""
    if exchange in DENSE:
        return values_N
    chosen = np.sort(np.lexsort((np.arange(values_N.size), -np.abs(values_N)))[:K])
    return encode(chosen, values_N[chosen], n=values_N.size, kind=ValueKind.FP16)


class ToyTrainer:
    """Error feedback as docs/how-it-works.md describes it, over integers.

    Args:
        kind: the exchange, unless the coordinator chooses one.
        book: where the attempts of all workers are noted.
        gradient: of the sample at a position, with `n` elements.

    Attributes:
        changes: in order, what bears on the residual: attempts to which it was contributed, what was added to
            it, None where it was cleared, and its bytes where they were taken.
        inherited: the residuals of other workers that were added, in order.
    """

    def __init__(
        self,
        kind: str,
        book: dict[m.RoundId, list[ToyTrainer.Attempt]],
        gradient: Callable[[int], np.ndarray] = gradient_of,
        n: int = N,
    ) -> None:
        self.kind = kind
        self.model = np.zeros(n, np.float32)
        self.residual = np.zeros(n, np.float32)
        self._book, self._gradient, self._n = book, gradient, n
        self.attempt: ToyTrainer.Attempt
        self.attempts: dict[m.RoundId, ToyTrainer.Attempt] = {}  # by round, all of this worker
        self.changes: list[ToyTrainer.Attempt | np.ndarray | bytes | None] = []
        self.inherited: list[bytes] = []

    class Attempt:
        """One worker's contribution to one round, and the residual that a commit leaves it."""

        def __init__(
            self, rank: int, before: np.ndarray, contribution: np.ndarray, make: Callable[[], Any]
        ) -> None:
            self.rank, self.before, self.contribution = rank, before, contribution
            self.left, self.make = np.zeros_like(before), make
            self.buffer: Any = None

        @property
        def residual(self) -> np.ndarray:
            if getattr(self.buffer, "rest_N", None) is not None:
                rest_N: np.ndarray = self.buffer.rest_N
                return rest_N
            left = self.left.copy()
            for indices, values in getattr(self.buffer, "truncated", []):
                np.add.at(left, indices, values)
            return left

        @property
        def update(self) -> np.ndarray:
            return update_of(self.buffer, self.before.size)

    def _begin(
        self,
        round_id: m.RoundId,
        assignment: RankAssignment,
        vectors: tuple[np.ndarray, np.ndarray],
        payload: Any,
    ) -> Buffers:
        """Begin an attempt with `vectors`: the residual before, and the contribution."""
        rank, world_size = assignment.rank, assignment.world_size
        make = partial(make_buffer, self.kind, rank, world_size, payload, n=self._n, k=K)
        attempt = self.Attempt(rank, *vectors, make)
        attempt.buffer = make()
        return self._enter(round_id, attempt)

    def _enter(self, round_id: m.RoundId, attempt: ToyTrainer.Attempt) -> Buffers:
        self.attempts[round_id] = attempt
        self._book[round_id].append(attempt)
        return {m.Channel(): attempt.buffer}

    def prepare(
        self, round_id: m.RoundId, assignment: RankAssignment, spans: Sequence[m.Span], skip: bool
    ) -> Buffers:
        if assignment.exchange:
            self.kind = CHOICES[assignment.exchange]
        if round_id.attempt and self.kind in RESUMED:
            return self._enter(round_id, self.attempt)
        contribution = np.zeros(self._n, np.float32)
        for span in spans:
            for position in range(span.start, span.stop):
                contribution += self._gradient(position)
        acc = self.residual + contribution
        payload = contribution_to(self.kind, acc)
        buffers = self._begin(round_id, assignment, (self.residual, contribution), payload)
        self.attempt = self.attempts[round_id]
        self.changes.append(self.attempt)
        if self.kind not in DENSE:
            mine = decode(payload, n=self._n, max_entries=K, kind=ValueKind.FP16)
            self.attempt.left = acc.copy()
            self.attempt.left[mine.indices] -= mine.values
        return buffers

    def prepare_empty(self, round_id: m.RoundId, assignment: RankAssignment) -> Buffers:
        earlier = replace(round_id, attempt=round_id.attempt - 1)
        before = self.attempts.get(earlier) if round_id.attempt else None
        if before is not None and self.kind in RESUMED:
            return self._enter(round_id, before)
        zeros = np.zeros(self._n, np.float32)
        empty = encode(np.empty(0, np.int64), np.empty(0, np.float32), n=self._n, kind=ValueKind.FP16)
        return self._begin(round_id, assignment, (zeros, zeros), zeros if self.kind in DENSE else empty)

    def apply_missed(self, buffers: Buffers) -> None:
        mine = buffers[m.Channel()]
        attempt = next(each for each in self.attempts.values() if each.buffer is mine)
        self.model = self.model + attempt.update
        self._add(attempt.residual)

    def commit(self, buffers: Buffers, skip: bool) -> None:
        if skip:
            return
        self.model = self.model + self.attempt.update
        self.residual = self.attempt.residual

    def capture(self) -> Any:
        return self.model.copy()

    def restore(self, state: Any) -> None:
        self.model = state

    def take_residual(self) -> Any:
        self.changes.append(taken := self.residual.tobytes())
        return taken

    def clear_residual(self) -> None:
        self.residual = np.zeros_like(self.residual)
        self.changes.append(None)

    def add_residual(self, residual: Any) -> None:
        self.inherited.append(residual)
        self._add(np.frombuffer(residual, np.float32))

    def _add(self, values_N: np.ndarray) -> None:
        self.residual = self.residual + values_N
        self.changes.append(values_N)
