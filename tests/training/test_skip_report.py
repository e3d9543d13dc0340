"""Skipped steps are logged at growing intervals."""

from __future__ import annotations

import logging

import pytest

from gridtrain.training.skip_report import SkipReport


def test_a_worker_logs_that_its_gradient_is_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    figures: dict[str, float] = {}
    report = SkipReport(figures.update)
    with caplog.at_level(logging.INFO, "gridtrain"):
        report.record_skipped(7, is_own=True)
        report.record_skipped(9, is_own=False)
    own, others = caplog.records
    assert own.levelno == logging.WARNING and "all workers skipped step 8" in own.message
    assert "this worker's gradient is not finite" in own.message
    assert others.levelno == logging.INFO and "another worker's gradient is not finite" in others.message
    assert report.total == 2 and figures == {"own_skipped_steps": 1.0}


def test_many_skipped_steps_have_few_lines_also_if_others_are_between_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = SkipReport(lambda figures: None)
    for step in range(0, 150, 5):
        report.record_skipped(step, is_own=True)
    assert [record.args[0] for record in caplog.records] == [1, 6, 16, 36, 76]  # type: ignore[index]
    assert "(16 steps so far)" in caplog.messages[-1] and report.total == 30


def test_the_first_skipped_step_of_a_worker_is_logged_after_many_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = SkipReport(lambda figures: None)
    for step in range(10):
        report.record_skipped(step, is_own=step == 9)
    (record,) = caplog.records
    assert record.message.startswith("all workers skipped step 10 because this worker's gradient")


def test_an_overflow_that_a_scaler_handles_is_neither_a_warning_nor_a_figure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    figures: dict[str, float] = {}
    report = SkipReport(figures.update)
    with caplog.at_level(logging.INFO, "gridtrain"):
        for step in (0, 1, 2, 500):
            report.record_skipped(step, is_own=step != 1, is_scaled=True)
    assert [(record.levelname, record.args[0]) for record in caplog.records] == [  # type: ignore[index]
        ("INFO", 1),
        ("INFO", 2),
        ("INFO", 3),
    ]
    assert all("GradScaler" in message and "check" not in message for message in caplog.messages)
    assert "status" not in caplog.text and report.total == 4 and figures == {}


@pytest.mark.parametrize(
    ("per_100", "warnings"),
    [(90, 891), (10, 91), (9, 0)],
    ids=["9 of 10", "1 of 10", "9 of 100"],
)
def test_with_a_scaler_frequent_skipped_steps_are_reported(
    per_100: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if there are never ten in a row, as with a worker whose loss is NaN in nine of ten steps."""
    figures: dict[str, float] = {}
    report = SkipReport(figures.update)
    for step in range(1000):
        if (step + 1) * per_100 // 100 > step * per_100 // 100:
            report.record_skipped(step, is_own=True, is_scaled=True)
    assert report.total == 10 * per_100 and figures.get("own_skipped_steps", 0.0) == warnings
    assert any(record.levelno == logging.WARNING for record in caplog.records) == (warnings > 0)


def test_with_a_scaler_the_tenth_skipped_step_in_a_row_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    figures: dict[str, float] = {}
    report = SkipReport(figures.update)
    for step in (*range(9), *range(200, 211)):
        report.record_skipped(step, is_own=True, is_scaled=True)
    assert [record.args[0] for record in caplog.records] == [210, 211]  # type: ignore[index]
    assert "check this worker's loss" in caplog.messages[0] and figures == {"own_skipped_steps": 2.0}
