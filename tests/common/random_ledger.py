"""Random runs of the data ledger, in which every position of every pass must count exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.data_ledger import Assignment
from gridtrain.core.commit.ledger_record import ledger_entry, parse_ledger
from gridtrain.core.messages import LedgerSpec, LedgerState, PeerId, Span

MAX_STEPS = 5000


class RandomRun:
    """A run under joins, leaves, absences, crashes, skips and restarts, checked at each step.

    Without a delay and shards a step is never empty, and survivors of a failed step keep their positions.
    """

    def __init__(self, seed: int, *, is_sharded: bool = False, delay: int = 0) -> None:
        self.rng = rng = Random(seed)
        shards = tuple(rng.randint(1, 20) for _ in range(rng.randint(1, 9))) if is_sharded else ()
        size = sum(shards) or rng.randint(1, 60)
        self.spec = LedgerSpec(size, seed, epochs=rng.randint(1, 4), delay=delay, shards=shards)
        self.is_plain = not (is_sharded or delay)
        self.state, self.taken = LedgerState(), Counter[int]()
        self.names = (bytes([number >> 8, number & 255]) * 16 for number in range(1 << 16))
        self.shares: list[tuple[PeerId, int]] = []

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if data_ledger.is_finished(self.spec, self.state):
                break
            self.join()
            assignment = self.assign()
            if self.rng.random() < 0.3:
                self.lose_members(assignment)
            else:
                self.commit(assignment)
            if self.rng.random() < 0.05:  # resumed from a checkpoint of this state, by others
                released = data_ledger.release_holders(self.spec, self.state)
                self.state, self.shares = parse_ledger(ledger_entry(released)), []
            assert data_ledger.is_sound(self.spec, self.state, [peer for peer, _ in self.shares])
        total = self.spec.size * (self.spec.epochs or 0)
        assert self.taken == Counter(range(total)) and self.state.consumed == self.state.cursor == total
        assert not self.state.requeued and not self.state.leases and self.state.holders is None

    def join(self) -> None:
        while not self.shares or (len(self.shares) < 9 and self.rng.random() < 0.1):
            newcomer = (next(self.names), self.rng.randint(1, 9))
            self.shares.insert(self.rng.randint(0, len(self.shares)), newcomer)

    def assign(self) -> Assignment:
        spec, state = self.spec, self.state
        assignment = data_ledger.assign(spec, state, self.shares)
        assert assignment == data_ledger.assign(spec, state, list(self.shares))
        assert list(assignment) == [peer for peer, _ in self.shares]
        for peer, share in self.shares:
            assert data_ledger.count_samples(assignment[peer]) <= share
            assert all(s.start // spec.size == (s.stop - 1) // spec.size for s in assignment[peer])
        if self.is_plain:
            fresh = {p // spec.size for p in positions(assignment.values()) if p >= state.cursor}
            assert len(fresh) <= 1, f"one step took from passes {fresh} at the cursor"
            # A step is empty only if all members that held its positions were lost or their batches are late.
            assert any(assignment.values()) or state.holders == () or state.late
        return assignment

    def lose_members(self, assignment: Assignment) -> None:
        self.shares = [share for share in self.shares if self.rng.random() < 0.7]
        remaining = {peer for peer, _ in self.shares}
        self.state = data_ledger.reassign(self.spec, self.state, assignment, remaining)
        kept = {peer: spans for peer, spans in assignment.items() if spans and peer in remaining}
        if self.is_plain and kept:
            self.join()
            again = data_ledger.assign(self.spec, self.state, self.shares)
            assert {peer: spans for peer, spans in again.items() if spans} == kept

    def commit(self, assignment: Assignment) -> None:
        before, is_skipped = self.state, self.rng.random() < 0.2
        absent = [] if self.spec.delay else [peer for peer, _ in self.shares if self.rng.random() < 0.1]
        contributed = {x.peer: x.spans for x in before.pending} if self.spec.delay else dict(assignment)
        taken = positions(spans for peer, spans in contributed.items() if peer not in absent)
        self.taken.update(taken)
        self.state = data_ledger.commit(self.spec, before, assignment, skipped=is_skipped, absent=absent)
        is_last = data_ledger.can_be_last(self.spec, before, assignment)
        if not set(absent) & contributed.keys():
            assert is_last == data_ledger.is_finished(self.spec, self.state)
        else:
            assert is_last or not data_ledger.is_finished(self.spec, self.state)
        assert self.state.step == before.step + 1
        assert self.state.skipped - before.skipped == (len(taken) if is_skipped else 0)


def positions(batches: Iterable[tuple[Span, ...]]) -> list[int]:
    return [p for spans in batches for span in spans for p in range(span.start, span.stop)]
