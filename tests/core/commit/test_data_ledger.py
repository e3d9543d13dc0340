"""The data ledger: every position of every pass exactly once, under joins, leaves and crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_ledger import RandomRun

from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.data_ledger import Assignment
from gridtrain.core.messages import LedgerSpec, LedgerState, PeerId, Span
from gridtrain.errors import ConfigError, LocalProtocolError

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


def spans(text: str) -> tuple[Span, ...]:
    """The spans of a text such as "8-9 20-22", both ends included."""
    pairs = (part.split("-") for part in text.split())
    return tuple(Span(int(pair[0]), int(pair[-1]) + 1) for pair in pairs)


def show(spans: tuple[Span, ...]) -> str:
    return " ".join(f"{s.start}-{s.stop - 1}" if s.stop - s.start > 1 else f"{s.start}" for s in spans)


def row(assignment: Assignment) -> str:
    return "  ".join(f"{peer[:1].decode()}: {show(spans) or '.'}" for peer, spans in assignment.items())


def test_a_transcript_of_a_run() -> None:
    """Ten samples, two passes; b crashes in step 1, c joins, and the lost positions are assigned first."""
    spec = LedgerSpec(size=10, seed=0, epochs=2)
    state = LedgerState()
    transcript = []

    def take(*shares: tuple[PeerId, int]) -> Assignment:
        assignment = data_ledger.assign(spec, state, shares)
        transcript.append(f"step {state.step}  {row(assignment)}")
        return assignment

    state = data_ledger.commit(spec, state, take((A, 2), (B, 2)), skipped=False)
    state = data_ledger.reassign(spec, state, take((A, 2), (B, 2)), survivors=[A])  # b is gone
    state = data_ledger.commit(
        spec, state, take((A, 2), (C, 3)), skipped=False
    )  # c is new: a alone holds samples
    while not data_ledger.is_finished(spec, state):
        state = data_ledger.commit(spec, state, take((A, 2), (C, 3)), skipped=state.step == 4)

    assert transcript == [
        "step 0  a: 0-1  b: 2-3",
        "step 1  a: 4-5  b: 6-7",  # aborts: b is lost
        "step 1  a: 4-5  c: .",  # a keeps its gradient, 6-7 are re-queued
        "step 2  a: 6-7  c: 8-9",  # 6-7 first; the pass ends: 4 samples for shares of 5
        "step 3  a: 10-11  c: 12-14",
        "step 4  a: 15-16  c: 17-19",  # skipped: consumed nevertheless
    ]
    assert state == LedgerState(step=5, cursor=20, consumed=20, skipped=5)


def test_a_run_of_so_many_steps_cycles_through_the_data() -> None:
    spec = LedgerSpec(size=4, seed=0, steps=5)
    state, rows = LedgerState(), []
    while not data_ledger.is_finished(spec, state):
        assignment = data_ledger.assign(spec, state, [(A, 2), (B, 1)])
        assert data_ledger.can_be_last(spec, state, assignment) is (state.step == 4)
        rows.append(row(assignment))
        state = data_ledger.commit(spec, state, assignment, skipped=False)
    assert rows == [
        "a: 0-1  b: 2",
        "a: 3  b: .",  # a pass ends here
        "a: 4-5  b: 6",
        "a: 7  b: .",
        "a: 8-9  b: 10",
    ]
    assert data_ledger.assign(spec, state, [(A, 2), (B, 1)]) == {A: (), B: ()}


@pytest.mark.parametrize(
    ("left", "shares", "counts"),
    [
        (12, (4, 4, 4), (4, 4, 4)),
        (9, (4, 4, 4), (3, 3, 3)),
        (10, (4, 4, 4), (4, 3, 3)),  # equal remainders: the lower rank
        (2, (4, 4, 4), (1, 1, 0)),
        (7, (8, 4, 2), (4, 2, 1)),
        (5, (1, 8, 1), (1, 4, 0)),  # remainders 5/10, 0, 5/10
        (3, (0, 2, 2), (0, 2, 1)),
    ],
)
def test_a_short_step_is_split_in_proportion(
    left: int, shares: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assignment = data_ledger.assign(
        LedgerSpec(size=left, seed=0, epochs=1),
        LedgerState(),
        list(zip((A, B, C), shares, strict=True)),
    )
    assert tuple(data_ledger.count_samples(spans) for spans in assignment.values()) == counts


@pytest.mark.parametrize(("size", "begun"), [(12, 0), (10, 4), (11, 3), (3, 0)])
def test_the_consumed_samples_are_predicted(size: int, begun: int) -> None:
    spec, state = LedgerSpec(size, 0, steps=99), LedgerState(cursor=begun, consumed=begun)
    for steps in range(20):
        assert data_ledger.predict_consumed(spec, begun, steps, 4) == state.consumed
        assignment = data_ledger.assign(spec, state, [(A, 1), (B, 3)])
        state = data_ledger.commit(spec, state, assignment, skipped=False)


def test_a_step_commits_after_a_chain_of_failures() -> None:
    spec = LedgerSpec(size=100, seed=0, epochs=1)
    members = [A, B, C, D]
    state = LedgerState()
    for survivors in ([A, C, D], [A, D], [D]):
        assignment = data_ledger.assign(spec, state, [(peer, 2) for peer in members])
        state = data_ledger.reassign(spec, state, assignment, survivors)
        members = survivors
    assert state == LedgerState(cursor=8, requeued=spans("0-5"), holders=((D, spans("6-7")),))

    assignment = data_ledger.assign(spec, state, [(B, 2), (D, 2)])  # b returned
    assert row(assignment) == "b: .  d: 6-7"
    state = data_ledger.commit(spec, state, assignment, skipped=False)
    assert state == LedgerState(step=1, cursor=8, requeued=spans("0-5"), consumed=2)
    assert row(data_ledger.assign(spec, state, [(B, 2), (D, 2)])) == "b: 0-1  d: 2-3"


def test_if_no_survivor_holds_samples_the_step_commits_without_any() -> None:
    spec = LedgerSpec(size=100, seed=0, epochs=1)
    assignment = data_ledger.assign(spec, LedgerState(), [(A, 3), (B, 0)])
    state = data_ledger.reassign(spec, LedgerState(), assignment, survivors=[B])
    assert state == LedgerState(cursor=3, requeued=spans("0-2"), holders=())
    empty = data_ledger.assign(spec, state, [(B, 1), (C, 4)])
    assert row(empty) == "b: .  c: ."
    state = data_ledger.commit(spec, state, empty, skipped=False)
    assert row(data_ledger.assign(spec, state, [(B, 1), (C, 4)])) == "b: 0  c: 1-2 3-4"


def test_requeued_spans_are_joined_but_not_across_the_end_of_a_pass() -> None:
    spec = LedgerSpec(size=10, seed=0, epochs=2)
    state = LedgerState(cursor=14, consumed=10, requeued=spans("8-9 12-13"))
    state = replace(state, holders=((A, spans("10")), (B, spans("11"))), consumed=8)
    survivors_gone = data_ledger.reassign(spec, state, dict(state.holders or ()), survivors=[])
    assert survivors_gone.requeued == spans("8-9 10-13")


def test_every_position_exactly_once_under_churn(seeds: Callable[[int], Iterator[int]]) -> None:
    for seed in seeds(2000):
        RandomRun(seed).run()


@given(total=st.integers(0, 10**6), shares=st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_the_split_is_exact_and_proportional_and_within_shares(total: int, shares: list[int]) -> None:
    whole = sum(shares)
    if whole == 0:
        return
    size = min(total, whole) or 1
    members = [(bytes([rank]) * 32, share) for rank, share in enumerate(shares)]
    assignment = data_ledger.assign(LedgerSpec(size=size, seed=0, epochs=1), LedgerState(), members)
    counts = [data_ledger.count_samples(spans) for spans in assignment.values()]
    assert sum(counts) == size
    assert all(abs(count - size * share / whole) < 1 for count, share in zip(counts, shares, strict=True))
    assert all(count <= share for count, share in zip(counts, shares, strict=True))


def test_an_assignment_of_another_state_is_a_local_error() -> None:
    spec = LedgerSpec(size=100, seed=0, epochs=1)
    old = data_ledger.assign(spec, LedgerState(), [(A, 2), (B, 2)])
    state = data_ledger.commit(spec, LedgerState(), old, skipped=False)
    with pytest.raises(LocalProtocolError, match="does not balance"):
        data_ledger.commit(spec, state, old, skipped=False)
    with pytest.raises(LocalProtocolError, match="does not balance"):
        data_ledger.reassign(spec, state, old, survivors=[A])
    ahead = {A: (Span(6, 8),)}
    with pytest.raises(LocalProtocolError, match="does not balance"):
        data_ledger.commit(spec, state, ahead, skipped=False)


@pytest.mark.parametrize("shares", [[], [(A, 0)], [(A, -1), (B, 3)], [(A, 1), (A, 1)]])
def test_invalid_shares_are_a_local_error(shares: list[tuple[PeerId, int]]) -> None:
    with pytest.raises(LocalProtocolError, match="shares of step 0"):
        data_ledger.assign(LedgerSpec(size=10, seed=0, epochs=1), LedgerState(), shares)


def test_a_holder_that_is_no_member_is_a_local_error() -> None:
    state = LedgerState(cursor=2, holders=((A, spans("0-1")),))
    with pytest.raises(LocalProtocolError, match=r"non-members: .*61616161"):
        data_ledger.assign(LedgerSpec(size=10, seed=0, epochs=1), state, [(B, 2)])


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (LedgerSpec(size=0, seed=0, epochs=1), "the data set has 0 samples"),
        (LedgerSpec(size=5, seed=-1, epochs=1), "seed is -1"),
        (LedgerSpec(size=5, seed=0), "exactly one"),
        (LedgerSpec(size=5, seed=0, epochs=1, steps=1), "exactly one"),
        (LedgerSpec(size=5, seed=0, epochs=0), "epochs is 0"),
        (LedgerSpec(size=2**62, seed=0, epochs=2), "epochs is 2"),
        (LedgerSpec(size=5, seed=0, steps=0), "steps is 0"),
    ],
)
def test_an_invalid_spec_is_refused_with_the_reason(spec: LedgerSpec, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        data_ledger.validate(spec)
    data_ledger.validate(LedgerSpec(size=5, seed=0, epochs=1))
    data_ledger.validate(LedgerSpec(size=5, seed=0, steps=1))
    largest = data_ledger.MAX_POSITION
    data_ledger.validate(LedgerSpec(size=largest, seed=largest, epochs=1))
    data_ledger.validate(LedgerSpec(size=1, seed=0, steps=largest))


SOUND = LedgerState(
    step=3,
    cursor=20,
    consumed=12,
    skipped=12,
    requeued=spans("0-2"),
    holders=((A, spans("3-4")), (B, spans("17-19"))),
)


@pytest.mark.parametrize(
    ("change", "is_sound"),
    [
        ({}, True),
        ({"step": data_ledger.MAX_POSITION // 2}, True),
        ({"step": data_ledger.MAX_POSITION // 2 + 1}, False),
        ({"consumed": 13}, False),  # a position is counted twice
        ({"skipped": 13}, False),  # more than was consumed
        ({"requeued": spans("1-3")}, False),  # 3 has a holder as well
        ({"requeued": spans("18-20")}, False),  # 20 was never assigned
        ({"requeued": (Span(-1, 2),)}, False),
        ({"requeued": (*spans("0-2"), Span(5, 5))}, False),  # an empty span
        ({"holders": ((A, spans("3-4")), (C, spans("17-19")))}, False),  # C is no member
        ({"holders": ((A, spans("3-4")), (A, spans("17-19")))}, False),
    ],
)
def test_a_report_of_the_ledger_is_checked(change: dict[str, Any], is_sound: bool) -> None:
    assert (
        data_ledger.is_sound(LedgerSpec(size=20, seed=0, epochs=9), replace(SOUND, **change), (A, B))
        is is_sound
    )
