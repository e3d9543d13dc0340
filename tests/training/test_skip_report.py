"""Skipped steps are logged, at growing intervals if they follow one another."""

from __future__ import annotations

import logging

import pytest

from gridtrain.training.skip_report import SkipReport


def test_a_worker_logs_that_its_gradient_is_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    figures: dict[str, float] = {}
    report = SkipReport(figures.update)
    with caplog.at_level(logging.INFO, "gridtrain"):
        report.record_skipped(7, is_own=True)
        report.record_applied()
        report.record_skipped(9, is_own=False)
    own, others = caplog.records
    assert own.levelno == logging.WARNING and "step 7 is skipped" in own.message
    assert "this worker's gradient is not finite" in own.message
    assert others.levelno == logging.INFO and "another worker's gradient is not finite" in others.message
    assert report.total == 2 and figures == {"own_skipped_steps": 1.0}


def test_many_skipped_steps_in_a_row_have_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    report = SkipReport(lambda figures: None)
    for step in range(20):
        report.record_skipped(step, is_own=True)
    assert [record.args[0] for record in caplog.records] == [0, 1, 3, 7, 15]  # type: ignore[index]
    assert "(16 steps in a row)" in caplog.messages[-1] and report.total == 20
