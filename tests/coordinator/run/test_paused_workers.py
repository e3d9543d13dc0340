"""Workers that their owners have paused."""

from __future__ import annotations

import pytest

from gridtrain_coordinator.run import paused_workers as module
from gridtrain_coordinator.run.paused_workers import RETENTION_S, PausedWorkers

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


def test_a_paused_worker_is_shown_and_its_name_reserved_for_a_week() -> None:
    paused = PausedWorkers()
    paused.add(A, "anna", "on battery", 10.0)
    assert paused.status_rows(12.5) == [
        {
            "name": "anna",
            "peer": A.hex(),
            "state": "paused",
            "reason": "paused by its owner: on battery",
            "since_s": 2.5,
        }
    ]
    assert paused.reserved_names(B, 9.9 + RETENTION_S) == {"anna"}
    assert paused.reserved_names(A, 12.5) == set()
    assert len(paused.status_rows(9.9 + RETENTION_S)) == 1
    assert paused.reserved_names(B, 10.0 + RETENTION_S) == set()
    assert paused.status_rows(10.0 + RETENTION_S) == []


def test_a_worker_that_joins_is_no_longer_paused() -> None:
    paused = PausedWorkers()
    paused.add(A, "anna", "hot", 1.0)
    paused.discard(B)
    assert paused.reserved_names(B, 1.0) == {"anna"}
    paused.discard(A)
    assert paused.status_rows(1.0) == []


def test_paused_workers_are_bounded_and_the_first_one_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAUSED", 2)
    paused = PausedWorkers()
    for peer, name in ((A, "anna"), (B, "bert"), (A, "anna"), (C, "carl")):
        paused.add(peer, name, "", 1.0)
    assert [row["name"] for row in paused.status_rows(1.0)] == ["anna", "carl"]


@pytest.mark.parametrize(
    ("reasons", "required", "said"),
    [
        (("battery",), 1, "1 is paused (battery, for 5 s)"),
        (("hot", "battery"), 1, "2 are paused (the last one: battery, for 5 s)"),
        (("battery",), 2, "1 is paused (battery, for 5 s); training continues with 2 workers"),
        (("on request",), 1, "1 is paused (on request, for 5 s: gridtrain worker resume)"),
        (
            ("on request, until 9:00",),
            1,
            "1 is paused (on request, until 9:00, for 5 s: gridtrain worker resume)",
        ),
        (("on request, battery",), 1, "1 is paused (on request, battery, for 5 s)"),
    ],
)
def test_a_run_whose_workers_are_paused_says_why_and_what_ends_it(
    reasons: tuple[str, ...], required: int, said: str
) -> None:
    paused = PausedWorkers()
    assert paused.describe(required, 0.0) == ""
    for number, reason in enumerate(reasons):
        paused.add(str(number).encode() * 32, "anna", reason, float(number))
    assert paused.describe(required, len(reasons) + 4.0) == f"no worker is training: {said}"
    assert paused.describe(required, 10.0 + RETENTION_S) == ""
