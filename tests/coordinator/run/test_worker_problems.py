"""Events and status for heartbeats that report skipped steps or failed checkpoints."""

from __future__ import annotations

import pytest

from gridtrain.core import messages as m
from gridtrain_coordinator.run.worker_problems import ALERT_SKIPS, SkippedSteps, WorkerProblems


def events(problems: WorkerProblems, now_s: float, step: int, **figures: float) -> list[str]:
    logged = problems.update("anna", step, figures, now_s)
    return [" ".join(map(str, (x.event, *list(x.fields.values())[:3]))) for x in logged]


def test_a_skipped_step_has_an_event_and_further_ones_at_most_one_a_minute() -> None:
    problems = WorkerProblems()
    history = [
        (0.0, 5, 0.0),
        (1.0, 6, 1.0),
        (1.5, 7, 2.0),
        (30.0, 60, 31.0),
        (61.0, 90, 31.0),
        (200.0, 200, 31.0),
    ]
    assert [events(problems, at_s, step, own_skipped_steps=skips) for at_s, step, skips in history] == [
        [],
        ["step_skipped anna 6 1"],
        [],  # within a minute
        [],
        ["step_skipped anna 60 30"],  # all since the last event, the latest at step 60
        [],  # no further one
    ]


def test_the_status_names_the_latest_skipped_step_for_ten_minutes() -> None:
    problems = WorkerProblems()
    assert problems.text(0.0) == ""
    events(problems, 0.0, 5)
    events(problems, 0.0, 6, **{m.OWN_SKIPPED_STEPS: 1.0})
    assert problems.text(599.0) == (
        "made the group skip 1 step, the latest near step 6: "
        "its gradient was not finite, or too large to be summed"
    )
    assert problems.text(600.0) == ""


def test_a_restarted_worker_counts_from_zero() -> None:
    problems = WorkerProblems()
    events(problems, 0.0, 6, own_skipped_steps=9.0)
    events(problems, 100.0, 7)
    assert events(problems, 200.0, 8, own_skipped_steps=2.0) == ["step_skipped anna 8 2"]


def test_steps_counted_before_the_coordinator_started_have_no_event() -> None:
    problems = WorkerProblems()
    assert events(problems, 0.0, 40, missed_steps=3.0, own_skipped_steps=2.0) == []
    assert problems.text(0.0) == ""
    assert events(problems, 1.0, 41, missed_steps=4.0, own_skipped_steps=2.0) == ["step_missed anna 41 1"]


def test_missed_steps_are_counted_apart_from_skipped_ones() -> None:
    problems = WorkerProblems()
    events(problems, 0.0, 2)
    assert events(problems, 0.0, 6, missed_steps=3.0, own_skipped_steps=1.0) == [
        "step_skipped anna 6 1",
        "step_missed anna 6 3",
    ]
    assert events(problems, 30.0, 9, missed_steps=5.0, own_skipped_steps=1.0) == []  # within a minute
    assert events(problems, 61.0, 70, missed_steps=5.0, own_skipped_steps=1.0) == ["step_missed anna 9 2"]
    assert problems.text(610.0) == (
        "was left out of 5 steps, the latest near step 9: its training loop had stalled"
    )
    assert problems.text(630.0) == ""


@pytest.mark.parametrize(
    ("figure", "failure", "success", "remedy", "text"),
    [
        (
            m.FAILED_CHECKPOINTS,
            "checkpoint_failed",
            "checkpoint_written",
            "free space on its disk; its log names the folder",
            "could not write 1 checkpoints in a row",
        ),
        (
            m.FAILED_UPLOADS,
            "upload_failed",
            "checkpoint_uploaded",
            "check the storage and its credentials; its log names the URL",
            "could not upload a checkpoint in 1 attempts",
        ),
    ],
)
def test_failures_are_repeated_every_ten_minutes_until_there_is_a_success(
    figure: str, failure: str, success: str, remedy: str, text: str
) -> None:
    problems = WorkerProblems()
    history = [(0.0, 1.0), (0.5, 1.0), (599.0, 7.0), (600.0, 8.0), (700.0, 0.0), (800.0, 0.0), (801.0, 1.0)]
    assert [events(problems, at_s, 0, **{figure: failed}) for at_s, failed in history] == [
        [f"{failure} anna 1 {remedy}"],
        [],
        [],
        [f"{failure} anna 8 {remedy}"],
        [f"{success} anna"],
        [],
        [f"{failure} anna 1 {remedy}"],
    ]
    assert problems.text(801.0) == f"{text}: {remedy}"


def test_a_worker_with_changing_claims_does_not_fill_the_log() -> None:
    problems = WorkerProblems()
    logged = [
        event
        for number in range(1200)
        for event in events(
            problems, number / 2, 0, failed_checkpoints=number % 2, own_skipped_steps=number % 2
        )
    ]
    assert 20 <= len(logged) <= 40  # in ten minutes


def test_figures_that_are_no_counts_are_ignored() -> None:
    problems = WorkerProblems()
    for value in (-1.0, float("inf"), float("nan"), 1e300):
        figures = dict.fromkeys(
            (m.OWN_SKIPPED_STEPS, m.MISSED_STEPS, m.FAILED_CHECKPOINTS, m.FAILED_UPLOADS), value
        )
        assert events(problems, 0.0, 0, **figures) == []
    assert problems.text(0.0) == ""


def reported(step: int, in_a_row: int = 0, total: int = 0) -> tuple[int, dict[str, float]]:
    figures = {m.SKIPPED_IN_A_ROW: float(in_a_row), m.SKIPPED_STEPS: float(total or in_a_row)}
    return step, {name: value for name, value in figures.items() if value}


@pytest.mark.parametrize(
    ("reports", "in_a_row"),
    [
        ([], 0),
        ([reported(9)], 0),
        ([reported(9, 9)], 9),
        ([reported(98, 4), reported(100, 3)], 6),  # the second one joined at step 97
        ([reported(98, 4), reported(100, 1)], 1),  # it applied step 98
        ([reported(99, 99), reported(100)], 0),  # the sequence has ended at step 99
        ([reported(50, 50), reported(100, 10), reported(95, 3)], 10),  # a stalled worker, and a newcomer
        ([reported(50, 60)], 50),  # an impossible report
        ([reported(50, -1), reported(40, 2**60)], 0),
    ],
)
def test_the_members_know_together_how_many_steps_in_a_row_were_skipped(
    reports: list[tuple[int, dict[str, float]]], in_a_row: int
) -> None:
    assert SkippedSteps.from_reports(reports).in_a_row == in_a_row
    assert SkippedSteps.from_reports(reports[::-1]).in_a_row == in_a_row


def test_a_long_sequence_of_skipped_steps_is_an_alert() -> None:
    """A GradScaler that looks for its first scale is none."""
    assert SkippedSteps(ALERT_SKIPS - 1, ALERT_SKIPS - 1, ALERT_SKIPS - 1).alert == ""
    assert SkippedSteps.from_reports([reported(558, 558)]).alert == (
        "nothing is being learned: the last 558 steps were skipped, because a gradient was not finite"
    )
    assert SkippedSteps.from_reports([reported(559, 0, 558)]).alert == ""


def test_the_end_of_a_run_that_skipped_most_steps_says_how_many() -> None:
    reason = "because a gradient was not finite"
    for report, steps, ending in (
        (reported(540, 540), 561, f"; nothing was learned: 561 of 561 steps skipped, {reason}"),
        (reported(560, 0, 420), 560, f"; little was learned: 420 of 560 steps skipped, {reason}"),
        (reported(560, 200, 200), 560, f"; the last 200 steps were skipped, {reason}"),
        (reported(560, ALERT_SKIPS - 1, 200), 560, ""),
        (reported(0), 0, ""),
    ):
        assert SkippedSteps.from_reports([report]).ending(steps) == ending
