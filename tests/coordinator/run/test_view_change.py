"""The reason for another generation, and the deadline for its answers."""

from __future__ import annotations

import math

import pytest

from gridtrain.core import messages as m
from gridtrain_coordinator.run.stage_bounds import StageBounds
from gridtrain_coordinator.run.view_change import ViewChange

A = b"a" * 32


def test_the_first_reason_stays_until_a_generation_is_installed() -> None:
    change = ViewChange()
    change.request("b joined")
    change.request("c joined")
    assert change.reason == "b joined"
    change.replace_reason("b sends nothing")
    change.mark_unrouted("a cannot reach b", 3.0)
    change.mark_unrouted("b cannot reach a", 4.0)
    assert (change.reason, change.unrouted_reason) == ("b sends nothing", "a cannot reach b")
    assert change.unrouted_s == 3.0
    assert change.begin_forming(9.0, 5.0) == "b sends nothing"
    assert (change.reason, change.unrouted_reason, change.unrouted_s) == ("", "", -math.inf)
    change.request("c joined")
    change.withdraw()
    assert change.reason == ""


def test_each_phase_accepts_its_own_answers() -> None:
    change = ViewChange()
    report = m.FreezeReport(1, 1, True, 0, b"", m.LedgerState(), None, b"", 0)
    assert change.is_idle and not change.has_installed and change.deadline_s == math.inf
    change.record_freeze_report(A, report)
    change.begin_freezing(7.0)
    assert (
        change.is_freezing and not change.is_idle and change.deadline_s == 7.0 and not change.freeze_reports
    )
    change.record_freeze_report(A, report)
    change.discard_freeze_report(A)
    assert not change.freeze_reports
    change.record_ready(A, b"h")
    change.begin_forming(9.0, 5.0)
    assert change.is_forming and change.has_installed and not change.ready_histories
    assert (change.deadline_s, change.last_installed_s) == (9.0, 5.0)
    change.record_ready(A, b"h")
    change.reset()
    assert change.is_idle and change.deadline_s == math.inf and change.ready_histories == {A: b"h"}


def test_a_deadline_is_only_extended_or_only_shortened() -> None:
    change = ViewChange()
    change.wait_until(5.0)
    change.extend_deadline(4.0)
    change.shorten_deadline(6.0)
    assert change.deadline_s == 5.0
    change.extend_deadline(8.0)
    assert change.deadline_s == 8.0
    change.shorten_deadline(3.0)
    assert change.deadline_s == 3.0


@pytest.mark.parametrize("stages", [1, 3])
def test_layers_that_a_member_may_hold(stages: int) -> None:
    bounds = StageBounds()
    assert bounds.bounds == (0, 1) and bounds.is_valid((0, 5, 7)) and not bounds.is_pipeline
    bounds.adopt((0, 9))
    bounds.define(m.Setup((), m.LedgerSpec(100, 0, epochs=1), 4, None, stages=stages))
    assert bounds.stage_count == stages and bounds.is_pipeline is (stages > 1)
    assert bounds.is_valid(()) and bounds.is_valid((0, 2, 3)) is (stages == 3)
    assert not bounds.is_valid((0, 2, 4))
    for start, stop, may_one, may_three in (
        (0, 1, True, True),
        (0, 3, False, True),
        (2, 3, False, True),
        (1, 1, False, False),
        (2, 4, False, False),
    ):
        assert bounds.can_hold(m.Span(start, stop)) is (may_three if stages == 3 else may_one)
