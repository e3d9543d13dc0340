"""Pending batches in the data ledger: a step exchanges the gradients of the step before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from gridtrain.core.commit import data_ledger as ledger
from gridtrain.core.commit.ledger_record import ledger_entry, parse_ledger
from gridtrain.core.messages import DeferredBatch, LedgerSpec, LedgerState, Span
from gridtrain.errors import LocalProtocolError

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
SPEC = LedgerSpec(size=30, seed=0, epochs=2, delay=1)
SHARES = ((A, 2), (B, 2), (C, 2))


def commit(spec: LedgerSpec, state: LedgerState, *absent: bytes, skipped: bool = False) -> LedgerState:
    return ledger.commit(spec, state, ledger.assign(spec, state, SHARES), skipped=skipped, absent=absent)


def test_a_step_consumes_the_batches_of_the_step_before() -> None:
    first = ledger.assign(SPEC, LedgerState(), SHARES)
    assert ledger.contribution_weight(SPEC, LedgerState(), first, B) == (0, 0)
    state = commit(SPEC, LedgerState())
    assert (state.consumed, state.cursor) == (0, 6)
    assert state.pending == tuple(DeferredBatch(peer, spans, 6, 0) for peer, spans in first.items())
    second = ledger.assign(SPEC, state, SHARES)
    assert second == {A: (Span(6, 8),), B: (Span(8, 10),), C: (Span(10, 12),)}
    assert ledger.contribution_weight(SPEC, state, second, B) == (2, 6)
    assert commit(SPEC, state, skipped=True).skipped == commit(SPEC, state).consumed == 6


@pytest.mark.parametrize(
    ("spec", "steps", "consumed"),
    [
        (LedgerSpec(size=30, seed=0, epochs=1, delay=1), 6, 30),
        (LedgerSpec(size=30, seed=0, steps=3, delay=1), 4, 18),
    ],
)
def test_the_last_step_assigns_nothing_and_consumes_the_last_batches(
    spec: LedgerSpec, steps: int, consumed: int
) -> None:
    state = LedgerState()
    for _ in range(steps):
        assert not ledger.is_finished(spec, state)
        last = ledger.assign(spec, state, SHARES)
        state = commit(spec, state)
    assert set(last.values()) == {()}
    assert ledger.is_finished(spec, state) and state.consumed == state.cursor == consumed


def test_a_survivor_keeps_both_of_its_batches_and_a_lost_member_leaves_both() -> None:
    state = commit(SPEC, LedgerState())
    aborted = ledger.reassign(SPEC, state, ledger.assign(SPEC, state, SHARES), {A, C})
    assert [batch.peer for batch in aborted.pending] == [A, C]
    assert aborted.holders == ((A, (Span(6, 8),)), (C, (Span(10, 12),)))
    assert aborted.requeued == (Span(2, 4), Span(8, 10))
    members = ((A, 2), (C, 2))
    assigned = ledger.assign(SPEC, aborted, members)
    assert assigned == {A: (Span(6, 8),), C: (Span(10, 12),)}
    after = ledger.commit(SPEC, aborted, assigned, skipped=False)
    assert after.consumed == 4 and ledger.assign(SPEC, after, members)[A] == (Span(2, 4),)
    assert ledger.release_holders(SPEC, aborted).requeued == (Span(0, 12),)


def test_a_false_absence_keeps_the_pending_batch_and_returns_the_new_one() -> None:
    state = commit(SPEC, commit(SPEC, LedgerState()), B)
    assert DeferredBatch(B, (Span(2, 4),), 6, 0) in state.pending and state.consumed == 4
    assert state.requeued == (Span(8, 10),)
    assert ledger.is_sound(SPEC, state, [A, B, C])


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {"spec": replace(SPEC, delay=0)},
        lambda batch: {"late": (batch,)},
        lambda batch: {"pending": (batch, batch)},
        lambda batch: {"pending": (replace(batch, spans=(Span(6, 8),)),)},  # beyond the cursor
        lambda batch: {"pending": (replace(batch, peer=b"x" * 32),)},
    ],
)
def test_an_unsound_pending_batch_is_found(change: Callable[[DeferredBatch], dict[str, object]]) -> None:
    sound = commit(SPEC, LedgerState())
    assert ledger.is_sound(SPEC, sound, [A, B, C])
    changes = change(sound.pending[0])
    spec = changes.pop("spec", SPEC)
    assert not ledger.is_sound(spec, replace(sound, **changes), [A, B, C])  # type: ignore[arg-type]


def test_batches_of_non_members_are_refused() -> None:
    pending = commit(SPEC, LedgerState())
    late = ledger.commit(
        replace(SPEC, delay=0), LedgerState(), {A: (Span(0, 2),), B: (Span(2, 4),)}, skipped=False, absent=[B]
    )
    for spec, state in ((SPEC, pending), (replace(SPEC, delay=0), late)):
        with pytest.raises(LocalProtocolError, match="non-members"):
            ledger.assign(spec, state, ((A, 2), (C, 2)))


def test_a_record_is_read_back() -> None:
    state = commit(SPEC, LedgerState())
    assert parse_ledger(ledger_entry(state)) == state


def test_every_sample_is_consumed_once_under_churn() -> None:
    for seed in range(200):
        random, state, seen = Random(seed), LedgerState(), [0] * (SPEC.size * 2)
        members = list(SHARES)
        for _ in range(1000):
            if ledger.is_finished(SPEC, state):
                break
            assigned = ledger.assign(SPEC, state, members)
            if random.random() < 0.2:
                survivors = [peer for peer, _ in members if random.random() < 0.8] or [members[0][0]]
                members = [share for share in SHARES if share[0] in survivors or random.random() < 0.5]
                state = ledger.reassign(SPEC, state, assigned, survivors)
                state = ledger.release_deferred(SPEC, state, survivors)
                continue
            for batch in state.pending:
                assert ledger.contribution_weight(SPEC, state, assigned, batch.peer)[0] > 0
                for span in batch.spans:
                    for position in range(span.start, span.stop):
                        seen[position] += 1
            state = ledger.commit(SPEC, state, assigned, skipped=False)
            assert ledger.is_sound(SPEC, state, [peer for peer, _ in members])
        assert set(seen) == {1}, seed
