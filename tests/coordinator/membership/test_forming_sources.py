"""Who is at fault where a state does not arrive, and from whom it comes next."""

from __future__ import annotations

import pytest

from gridtrain_coordinator.membership import forming_sources as module
from gridtrain_coordinator.membership.forming_sources import StateSources

A, B, C, D, E = (letter * 32 for letter in (b"a", b"b", b"c", b"d", b"e"))


def failed(sources: StateSources, *names: bytes) -> bool:
    for source in names:
        sources.record_failure(source, [D])
    return sources.is_at_fault(D)


def test_three_sources_that_fail_with_one_member_are_its_fault() -> None:
    sources = StateSources()
    assert not failed(sources, A) and not failed(sources, A) and not failed(sources, B)
    assert sources.untried(D, (A, B, C)) == [C] and sources.untried(E, (A,)) == [A]
    assert failed(sources, C)


def test_so_are_two_that_have_served_others() -> None:
    sources = StateSources()
    for source, receiver in ((A, E), (B, D)):
        sources.record_success(source, [receiver])
    assert not failed(sources, A, B), "b has served nobody but this one"
    sources.record_success(B, [E])
    assert sources.is_at_fault(D)
    sources.record_success(C, [D])
    assert not sources.is_at_fault(D) and sources.untried(D, (A, B)) == [A, B]


def test_a_source_is_chosen_that_has_failed_least() -> None:
    sources = StateSources()
    assert sources.choose((A, B), [D]) is None
    sources.record_failure(A, [D])
    assert sources.choose((A, B), [D]) == B == sources.choose((A, B), [E])
    sources.record_failure(B, [E])
    assert sources.choose((A, B, C), [D, E]) == C
    assert sources.choose((A, B), [D]) == B, "it has failed with another only"
    sources.record_failure(B, [E])
    assert sources.choose((B, A), [D, E]) == A, "as often with these, less often in all"
    sources.record_success(A, [D])
    assert sources.choose((B, A), [D]) == A


def test_a_stalled_member_is_the_source_only_if_others_have_stalled_or_failed() -> None:
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
