"""Which member is at fault if a state does not arrive, and which source is tried next."""

from __future__ import annotations

import pytest

from gridtrain_coordinator.membership import state_sources as module
from gridtrain_coordinator.membership.state_sources import StateSources

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))


def is_at_fault_after_failures(sources: StateSources, *names: bytes) -> bool:
    for source in names:
        sources.record_failure(source, [D])
    return sources.is_at_fault(D)


def test_a_member_with_which_three_sources_failed_is_at_fault() -> None:
    sources = StateSources()
    assert (
        not is_at_fault_after_failures(sources, A)
        and not is_at_fault_after_failures(sources, A)
        and not is_at_fault_after_failures(sources, B)
    )
    assert sources.untried(D, (A, B, C)) == [C] and sources.untried(E, (A,)) == [A]
    assert is_at_fault_after_failures(sources, C)


def test_a_member_with_which_two_sources_failed_that_served_others_is_at_fault() -> None:
    sources = StateSources()
    for source, receiver in ((A, E), (B, D)):
        sources.record_success(source, [receiver])
    assert not is_at_fault_after_failures(sources, A, B), "b has served only this member"
    sources.record_success(B, [E])
    assert sources.is_at_fault(D)
    sources.record_success(C, [D])
    assert not sources.is_at_fault(D) and sources.untried(D, (A, B)) == [A, B]


def test_the_source_with_the_fewest_failures_is_chosen() -> None:
    sources = StateSources()
    assert sources.choose((A, B), [D]) is None
    sources.record_failure(A, [D])
    assert sources.choose((A, B), [D]) == B == sources.choose((A, B), [E])
    sources.record_failure(B, [E])
    assert sources.choose((A, B, C), [D, E]) == C
    assert sources.choose((A, B), [D]) == B, "it failed only with another member"
    sources.record_failure(B, [E])
    assert sources.choose((B, A), [D, E]) == A, "as often with these members, less often in total"
    sources.record_success(A, [D])
    assert sources.choose((B, A), [D]) == A


def test_a_stalled_member_is_the_source_only_if_all_others_stalled_or_failed() -> None:
    sources = StateSources()
    assert sources.choose((A, B, C), [D], stalled={A}) == B
    sources.record_failure(B, [D])
    assert sources.choose((A, B, C), [D], stalled={A}) == C
    assert sources.choose((A, B), [D], stalled={A, B}) == A
    sources.record_failure(C, [D])
    assert sources.choose((A, B, C), [D], stalled={A}) == A, "so that D is found to be at fault in the end"


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORDS", 2)
    sources = StateSources()
    for receiver in (C, D, E):
        sources.record_failure(A, [receiver])
    assert sources.untried(C, [A]) == [A] and sources.untried(D, [A]) == []
