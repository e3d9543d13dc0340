"""Late batches in the data ledger: members that were absent from committed steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gridtrain.core.commit import data_ledger as ledger
from gridtrain.core.commit.ledger_record import ledger_entry, parse_ledger
from gridtrain.core.messages import DeferredBatch, LedgerSpec, LedgerState, Span
from gridtrain.errors import LocalProtocolError

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
SPEC = LedgerSpec(size=30, seed=0, epochs=2)
SHARES = ((A, 2), (B, 2), (C, 2))


def commit(state: LedgerState, *absent: bytes, skipped: bool = False) -> LedgerState:
    return ledger.commit(SPEC, state, ledger.assign(SPEC, state, SHARES), skipped=skipped, absent=absent)


def test_an_absent_member_keeps_its_batch_and_gets_no_other() -> None:
    state = commit(LedgerState(), B)
    assert state.late == (DeferredBatch(B, (Span(2, 4),), 6, 0),)
    assert (state.cursor, state.consumed) == (6, 4)
    assigned = ledger.assign(SPEC, state, SHARES)
    assert assigned == {A: (Span(6, 8),), B: (Span(2, 4),), C: (Span(8, 10),)}
    # The batch keeps the weight of its own step; the others share the new step among themselves.
    assert ledger.contribution_weight(SPEC, state, assigned, B) == (2, 6)
    assert ledger.contribution_weight(SPEC, state, assigned, A) == (2, 4)


def test_the_batch_stays_late_until_its_member_takes_part() -> None:
    state = commit(commit(LedgerState(), B), B)
    assert state.late == (DeferredBatch(B, (Span(2, 4),), 6, 0),)
    state = commit(state)
    assert state.late == () and state.consumed == state.cursor == 14
    assert ledger.assign(SPEC, state, SHARES)[B] == (Span(16, 18),)


def test_a_skipped_step_consumes_only_what_was_present() -> None:
    state = commit(LedgerState(), B, skipped=True)
    assert state.consumed == state.skipped == 4


def test_a_batch_that_is_too_late_is_requeued_and_its_member_stays_absent() -> None:
    state = LedgerState()
    spec = LedgerSpec(size=1000, seed=0, epochs=1)
    for step in range(ledger.MAX_LATE_STEPS + 1):
        assert state.requeued == (), step
        state = ledger.commit(spec, state, ledger.assign(spec, state, SHARES), skipped=False, absent=[B])
    assert state.requeued == (Span(2, 4),) and state.late == (DeferredBatch(B, (), 6, 0),)
    assigned = ledger.assign(spec, state, SHARES)
    assert assigned[B] == () and assigned[A] == (Span(2, 4),), "another member gets it first"
    state = ledger.commit(spec, state, assigned, skipped=False)
    assert state.late == () and ledger.assign(spec, state, SHARES)[B] != ()


def test_a_lost_member_leaves_its_late_batch_to_the_others() -> None:
    state = commit(LedgerState(), B)
    aborted = ledger.reassign(SPEC, state, ledger.assign(SPEC, state, SHARES), {A, C})
    assert aborted.late == () and aborted.requeued == (Span(2, 4),)
    remaining = ledger.reassign(SPEC, state, ledger.assign(SPEC, state, SHARES), {A, B})
    assert remaining.late == state.late and remaining.requeued == (Span(8, 10),)
    assert remaining.holders == ((A, (Span(6, 8),)),)
    assert ledger.assign(SPEC, remaining, SHARES[:2]) == {A: (Span(6, 8),), B: (Span(2, 4),)}
    assert ledger.release_deferred(SPEC, state, [A, B, C]) == state
    assert ledger.release_holders(SPEC, remaining).requeued == (Span(2, 4), Span(6, 10))


def test_all_members_may_have_late_batches_only() -> None:
    state = ledger.release_deferred(SPEC, commit(LedgerState(), A, B), [A, B])
    assigned = ledger.assign(SPEC, state, SHARES[:2])
    assert assigned == {A: (Span(0, 2),), B: (Span(2, 4),)}
    assert ledger.commit(SPEC, state, assigned, skipped=False).consumed == 6


def test_a_run_is_not_finished_while_a_batch_is_late() -> None:
    state = LedgerState()
    while ledger.assign(SPEC, state, SHARES)[A]:
        state = commit(state, B) if state.step == 9 else commit(state)
    assert not ledger.is_finished(SPEC, state)
    assert ledger.is_finished(SPEC, commit(state))


@pytest.mark.parametrize(
    "late",
    [
        DeferredBatch(B, (Span(0, 2),), 6, 0),  # consumed already
        DeferredBatch(B, (Span(6, 8),), 6, 0),  # beyond the cursor
        DeferredBatch(b"x" * 32, (Span(2, 4),), 6, 0),  # of no member
    ],
)
def test_an_unsound_late_batch_is_found(late: DeferredBatch) -> None:
    sound = commit(LedgerState(), B)
    assert ledger.is_sound(SPEC, sound, [A, B, C])
    assert not ledger.is_sound(SPEC, replace(sound, late=(late,), requeued=(Span(0, 1),)), [A, B, C])
    assert not ledger.is_sound(SPEC, replace(sound, late=(*sound.late, *sound.late)), [A, B, C])


def test_records_with_and_without_late_batches_are_read_back() -> None:
    state = commit(LedgerState(), B)
    assert parse_ledger(ledger_entry(state)) == state
    without = commit(LedgerState())
    assert "late" not in ledger_entry(without) and parse_ledger(ledger_entry(without)) == without


def test_a_batch_of_another_state_does_not_balance() -> None:
    state = commit(LedgerState(), B)
    with pytest.raises(LocalProtocolError, match="does not balance"):
        ledger.commit(SPEC, state, {A: (Span(0, 2),), B: (Span(2, 4),), C: ()}, skipped=False)
