"""Leases of shards: each member reads few shards, and every position still counts exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random

import pytest
from random_ledger import RandomRun

from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.data_ledger import MAX_LATE_STEPS
from gridtrain.core.commit.ledger_record import ledger_entry, parse_ledger, parse_spec, spec_entry
from gridtrain.core.commit.shard_leases import MAX_LEASES, locate, shard_order, shard_starts
from gridtrain.core.messages import LedgerSpec, LedgerState, PeerId, Span
from gridtrain.errors import LocalProtocolError

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
Seeds = Callable[[int], Iterator[int]]


def spec_of(*shards: int, seed: int = 0, epochs: int = 1) -> LedgerSpec:
    return LedgerSpec(size=sum(shards), seed=seed, epochs=epochs, shards=shards)


def lease_map(spec: LedgerSpec, state: LedgerState, assignment: Mapping[PeerId, tuple[Span, ...]]) -> str:
    """One character for each position of pass 0: assigned to a (A), leased by a (a), re-queued (~),
    not assigned yet (.)."""
    marks = ["_"] * spec.size
    after = data_ledger.commit(spec, state, assignment, skipped=False)

    def mark(spans: tuple[Span, ...], text: str) -> None:
        for span in spans:
            marks[span.start : span.stop] = text * (span.stop - span.start)

    mark((Span(after.cursor, spec.size),), ".")
    mark(after.requeued, "~")
    for peer, span in after.leases:
        mark((span,), peer[:1].decode())
    for peer, spans in assignment.items():
        mark(spans, peer[:1].decode().upper())
    return "|".join(
        "".join(marks[start:stop]) for start, stop in zip(*_bounds(spec), strict=True) if start < stop
    )


def _bounds(spec: LedgerSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    starts = shard_starts(spec.shards, spec.seed, 0)
    return starts[:-1], starts[1:]


def rows(spec: LedgerSpec, state: LedgerState, *shares: tuple[PeerId, int], steps: int = 99) -> list[str]:
    found = []
    for _ in range(steps):
        if data_ledger.is_finished(spec, state):
            break
        assignment = data_ledger.assign(spec, state, shares)
        found.append(lease_map(spec, state, assignment))
        state = data_ledger.commit(spec, state, assignment, skipped=False)
    return found


def test_the_order_of_shards_differs_from_pass_to_pass_and_is_a_permutation() -> None:
    orders = {shard_order((5, 6, 7, 8, 9, 10), 3, number) for number in range(6)}
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(6))}
    assert shard_order((5, 4, 3, 2), 0, 0) == (3, 2, 0, 1)  # part of the format: all versions agree


def test_members_stay_in_their_shards_and_share_the_last_one() -> None:
    spec = spec_of(5, 4, 6, seed=2)
    assert shard_order(spec.shards, 2, 0) == (0, 2, 1)
    assert rows(spec, LedgerState(), (A, 2), (B, 2)) == [
        "AAaaa|BBbbbb|....",
        "__AAa|__BBbb|....",
        "____A|____BB|Aaaa",
        "_____|______|_AAB",  # no shard is left for b, and 3 samples are left for shares of 4
    ]


def test_more_members_than_shards_read_one_shard_at_different_places() -> None:
    assert rows(spec_of(16), LedgerState(), (A, 1), (B, 1), (C, 1)) == [
        "AaaaaCcccBbbbbbb",
        "_Aaaa_Ccc_Bbbbbb",
        "__Aaa__Cc__Bbbbb",
        "___Aa___C___Bbbb",
        "____A________BbC",  # c takes over half of b's lease
        "______________A_",
    ]


def test_the_lease_of_a_lost_member_goes_to_the_next_member_that_needs_one() -> None:
    spec = spec_of(4, 4, 4)
    state, shares = LedgerState(), ((A, 1), (B, 1))
    state = data_ledger.commit(spec, state, data_ledger.assign(spec, state, shares), skipped=False)
    assignment = data_ledger.assign(spec, state, shares)
    state = data_ledger.reassign(spec, state, assignment, survivors=[A])
    assert state.leases == ((A, Span(2, 4)),)
    assert state.requeued == (Span(5, 8),)  # its batch and its lease
    assert state.holders == ((A, (Span(1, 2),)),)
    assert rows(spec, state, (A, 1), (C, 1), steps=3) == [
        "_Aaa|_~~~|....",  # fixed by the view
        "__Aa|_Ccc|....",
        "___A|__Cc|....",
    ]


def test_a_lease_stays_with_a_survivor_over_a_change_of_view() -> None:
    spec = spec_of(8, 8)
    state = LedgerState()
    for _ in range(3):
        assignment = data_ledger.assign(spec, state, [(A, 1), (B, 1)])
        state = data_ledger.reassign(spec, state, assignment, survivors=[A, B])
        assert data_ledger.assign(spec, state, [(A, 1), (B, 1)]) == assignment
    assert rows(spec, state, (A, 1), (B, 1), (C, 2), steps=2) == [
        "Aaaaaaaa|Bbbbbbbb",
        "_Aaaaaaa|_BbbbCCc",
    ]


def test_the_next_pass_begins_when_no_lease_is_left() -> None:
    spec = spec_of(3, 3, epochs=2)
    state, seen = LedgerState(), []
    while not data_ledger.is_finished(spec, state):
        assignment = data_ledger.assign(spec, state, [(A, 2), (B, 1)])
        seen.append({span.start // 6 for spans in assignment.values() for span in spans})
        state = data_ledger.commit(spec, state, assignment, skipped=False)
    assert seen == [{0}, {0}, {1}, {1}]


def test_leases_are_bounded() -> None:
    members = [(bytes([number >> 8, number & 255]) * 16, 1) for number in range(MAX_LEASES + 3)]
    spec = spec_of(*[4] * 400)
    state = LedgerState()
    state = data_ledger.commit(spec, state, data_ledger.assign(spec, state, members), skipped=False)
    assert len(state.leases) == MAX_LEASES and data_ledger.count_samples(state.requeued) == 9
    assert data_ledger.is_sound(spec, state, [peer for peer, _ in members])


def test_without_churn_one_member_reads_a_shard_in_ascending_order() -> None:
    spec = spec_of(*(Random(1).randint(200, 400) for _ in range(24)))
    state, readers = LedgerState(), defaultdict[int, list[tuple[bytes, int]]](list)
    shares = [(A, 8), (B, 5), (C, 3)]
    while not data_ledger.is_finished(spec, state):
        assignment = data_ledger.assign(spec, state, shares)
        for peer, spans in assignment.items():
            for position in (p for span in spans for p in range(span.start, span.stop)):
                readers[locate(spec, position)[0]].append((peer, locate(spec, position)[1]))
        state = data_ledger.commit(spec, state, assignment, skipped=False)
    several = [shard for shard, read in readers.items() if len({peer for peer, _ in read}) > 1]
    assert len(several) <= 3, "only the last shards of the pass are divided"
    for shard, read in readers.items():
        if shard not in several:
            assert [offset for _, offset in read] == list(range(spec.shards[shard]))


def test_sizes_of_steps_are_those_without_shards(seeds: Seeds) -> None:
    for seed in seeds(200):
        rng = Random(seed)
        spec = spec_of(*(rng.randint(1, 30) for _ in range(rng.randint(1, 9))), seed=seed, epochs=2)
        plain = replace(spec, shards=())
        shares = [(bytes([rank]) * 32, rng.randint(0, 5) + (rank == 0)) for rank in range(rng.randint(1, 5))]
        states = {each: LedgerState() for each in (spec, plain)}
        while not data_ledger.is_finished(plain, states[plain]):
            counts = []
            for each, state in states.items():
                assignment = data_ledger.assign(each, state, shares)
                counts.append([data_ledger.count_samples(spans) for spans in assignment.values()])
                states[each] = data_ledger.commit(each, state, assignment, skipped=False)
            assert counts[0] == counts[1]
        assert data_ledger.is_finished(spec, states[spec])


def test_every_position_exactly_once_under_churn(seeds: Seeds) -> None:
    for seed in seeds(1500):
        RandomRun(seed, is_sharded=True, delay=seed % 2).run()


def test_an_absent_member_keeps_its_batch_and_others_may_take_over_its_lease() -> None:
    spec, state = spec_of(8), LedgerState()
    for _ in range(MAX_LATE_STEPS + 9):
        if data_ledger.is_finished(spec, state):
            break
        assignment = data_ledger.assign(spec, state, [(A, 1), (B, 1)])
        state = data_ledger.commit(spec, state, assignment, skipped=False, absent=[B])
    assert data_ledger.is_finished(spec, state) and not state.leases


def test_records_contain_shards_and_leases_only_if_there_are_any() -> None:
    spec = spec_of(5, 6, seed=2)
    state = data_ledger.commit(
        spec, LedgerState(), data_ledger.assign(spec, LedgerState(), [(A, 2), (B, 1)]), skipped=False
    )
    assert state.leases and parse_ledger(ledger_entry(state)) == state
    assert parse_spec(spec_entry(spec)) == spec
    assert "leases" not in ledger_entry(LedgerState()) and "shards" not in spec_entry(
        replace(spec, shards=())
    )


@pytest.mark.parametrize(
    ("change", "is_sound"),
    [
        ({}, True),
        ({"leases": ((A, Span(2, 7)), (B, Span(7, 8)))}, True),
        ({"leases": ((C, Span(2, 8)),)}, False),  # not a member
        ({"leases": ((A, Span(2, 5)), (A, Span(5, 8)))}, False),  # twice
        ({"leases": ((A, Span(2, 9)),)}, False),  # beyond the cursor
        ({"leases": ((A, Span(1, 7)),)}, True),
        ({"leases": ((A, Span(2, 6)), (B, Span(5, 7)))}, False),  # one position twice
    ],
)
def test_a_report_of_leases_is_checked(change: dict[str, object], is_sound: bool) -> None:
    state = LedgerState(step=1, cursor=8, consumed=2, leases=((A, Span(2, 8)),))
    state = replace(state, **change)  # type: ignore[arg-type]
    assert data_ledger.is_sound(spec_of(8, 8), state, (A, B)) is is_sound
    assert not data_ledger.is_sound(replace(spec_of(8, 8), shards=()), state, (A, B))


def test_an_assignment_of_another_state_is_a_local_error() -> None:
    spec, state = spec_of(8, 8), LedgerState()
    assignment = data_ledger.assign(spec, state, [(A, 2), (B, 2)])
    state = data_ledger.commit(spec, state, assignment, skipped=False)
    with pytest.raises(LocalProtocolError, match="belongs to another state"):
        data_ledger.commit(spec, state, assignment, skipped=False)


def test_a_report_with_a_very_long_span_is_handled_quickly() -> None:
    spec, far = spec_of(1, 1, 1, epochs=2**50), 3 * 2**50
    state = LedgerState(cursor=far, requeued=(Span(0, far),))
    assert data_ledger.is_sound(spec, state, [A])
    assert data_ledger.assign(spec, state, [(A, 2)]) == {A: (Span(0, 1), Span(1, 2))}
    state = data_ledger.reassign(spec, state, data_ledger.assign(spec, state, [(A, 2)]), [])
    assert state.requeued == (Span(0, far),)


@pytest.mark.parametrize("shards", [(3, 4), (0, 8), (9, -1)])
def test_shards_that_do_not_make_up_the_data_set_are_refused(shards: tuple[int, ...]) -> None:
    problem = LedgerSpec(size=8, seed=0, epochs=1, shards=shards).find_problem()
    assert problem is not None and "at least 1 sample, and all of them together must have 8" in problem
