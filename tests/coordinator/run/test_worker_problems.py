"""Events and status for heartbeats that report skipped steps or failed checkpoints."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from gridtrain.core import messages as m
from gridtrain.quantities import ALERT_SKIPS
from gridtrain_coordinator.run.worker_problems import SkipAlert, SkippedSteps, WorkerProblems


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


def test_calls_of_a_mean_that_others_do_not_make_have_an_event_and_a_text() -> None:
    problems = WorkerProblems()
    assert events(problems, 0.0, 5) == []
    assert events(problems, 1.0, 6, **{m.LONE_MEANS: 1.0}) == [
        "lone_mean anna 6 all workers must call it at the same point; its log names the workers that do not "
        "call it"
    ]
    assert events(problems, 2.0, 7, **{m.LONE_MEANS: 2.0}) == []
    assert problems.text(2.0) == (
        "called grid.mean without other workers in 2 steps, the latest near step 7: "
        "all workers must call it at the same point; its log names the workers that do not call it"
    )


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


def test_a_worker_that_takes_part_again_has_an_event_with_the_rest_of_the_steps_that_it_missed() -> None:
    problems, back = WorkerProblems(), "its training loop had stalled; it takes part again, after 43 steps"
    history = [(0.0, 99, 3.0), (1.0, 102, 5.0), (3.0, 120, 23.0), (70.0, 143, 45.0), (71.0, 145, 46.0)]
    seen = [events(problems, at_s, step, missed_steps=missed) for at_s, step, missed in history]
    assert seen == [[], ["step_missed anna 102 2"], [], ["step_missed anna 143 40"], []]
    (event,) = problems.update("anna", 146, {m.MISSED_STEPS: 46.0}, 71.1)
    assert event.fields == {"name": "anna", "step": 145, "missed": 1, "reason": back}
    assert events(problems, 72.0, 150, missed_steps=46.0) == []
    assert events(problems, 140.0, 202, missed_steps=47.0) == ["step_missed anna 202 1"]
    assert events(problems, 141.0, 210, missed_steps=47.0) == [], "the first event has said all"


def test_stalls_in_quick_succession_have_two_events_a_minute() -> None:
    problems, logged, missed = WorkerProblems(), 0, 0
    for number in range(1200):  # half a second each
        missed += number % 4 > 1
        logged += len(events(problems, number / 2, number, missed_steps=missed))
    assert logged == 20


@pytest.mark.parametrize(
    ("figure", "failure", "success", "remedy", "text"),
    [
        (
            m.FAILED_CHECKPOINTS,
            "checkpoint_failed",
            "checkpoint_written",
            "free space on its disk; its log names the folder",
            "could not write its latest checkpoint",
        ),
        (
            m.FAILED_UPLOADS,
            "upload_failed",
            "checkpoint_uploaded",
            "check the storage and its credentials; its log names the URL",
            "could not upload a checkpoint in 1 attempt",
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


def test_an_attempt_to_write_the_final_model_has_failed_when_the_next_one_begins() -> None:
    problems = WorkerProblems()
    texts = []
    for attempts in (1.0, 2.0, 3.0, 0.0):
        events(problems, 0.0, 9, export_attempts=attempts)
        texts.append(problems.text(0.0))
    text = (
        "could not write the final model in {}, and tries again: free space on its disk, or make the folder "
        "writable; its log names the folder"
    )
    assert texts == ["", text.format("1 attempt"), text.format("2 attempts"), ""]


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
            (
                m.OWN_SKIPPED_STEPS,
                m.MISSED_STEPS,
                m.FAILED_CHECKPOINTS,
                m.FAILED_UPLOADS,
                m.EXPORT_ATTEMPTS,
            ),
            value,
        )
        assert events(problems, 0.0, 0, **figures) == []
    assert problems.text(0.0) == ""


def reported(step: int, in_a_row: int, skipped: int = 0, samples: int = 0) -> tuple[int, dict[str, float]]:
    """A report of `step` steps of 8 samples each, or of `samples` samples."""
    samples, skipped = samples or 8 * step, skipped or 8 * in_a_row
    names = m.SKIPPED_SAMPLES, m.COMMITTED_SAMPLES, m.SKIPPED_IN_A_ROW
    return step, dict(zip(names, map(float, (skipped, samples, in_a_row)), strict=True)) if skipped else {}


@pytest.mark.parametrize(
    ("reports", "in_a_row"),
    [
        ([], 0),
        ([reported(9, 0)], 0),
        ([reported(9, 9)], 9),
        ([reported(100, 50), reported(100, 0)], 50),  # the second one has just joined
        ([reported(100, 0), reported(90, 50), reported(101, 0)], 0),  # the first and the last applied a step
        ([reported(100, 50), reported(1, 0), reported(100, 50)], 50),  # a stalled member
        ([reported(2**40, 2**40), reported(100, 0), reported(100, 0)], 0),  # a lie
        ([reported(2**40, 0), reported(100, 50), reported(99, 49)], 49),  # a lie
        ([reported(50, 60)], 50),  # an impossible report
        ([reported(50, -1), reported(40, 2**60)], 0),
    ],
)
def test_most_members_decide_how_many_steps_in_a_row_were_skipped(
    reports: list[tuple[int, dict[str, float]]], in_a_row: int
) -> None:
    for order in permutations(reports):
        assert SkippedSteps.from_reports(order).in_a_row == in_a_row


def test_a_long_sequence_of_skipped_steps_is_an_alert() -> None:
    """A GradScaler that looks for its first scale is none."""
    assert SkippedSteps.from_reports([reported(ALERT_SKIPS - 1, ALERT_SKIPS - 1)]).alert == ""
    assert SkippedSteps.from_reports([reported(558, 558)]).alert == (
        "nothing is being learned: the last 558 steps were skipped, because a gradient was not finite"
    )
    assert SkippedSteps.from_reports([reported(559, 0, 558 * 8)]).alert == ""


def test_the_alert_names_the_workers_that_cause_the_skipped_steps() -> None:
    skipped = SkippedSteps.from_reports([reported(558, 558)])
    assert replace(skipped, causes=("anna", "bert", "clara", "dora")).alert == (
        f"{skipped.alert}; caused by anna, bert, clara and 1 more: check their loss and data, or remove one "
        "with gridtrain kick NAME"
    )


def test_changing_claims_cause_an_alert_at_most_once_a_minute() -> None:
    alert, skipped = SkipAlert(), SkippedSteps(in_a_row=ALERT_SKIPS, step=ALERT_SKIPS)
    logged = [
        event
        for number in range(1200)
        for event in alert.update(skipped if number % 3 else SkippedSteps(), number / 2)
    ]
    assert len(logged) == 20  # in ten minutes, with the ends


@pytest.mark.parametrize(
    ("reports", "steps", "ending"),
    [
        ([reported(560, 560)], 560, "nothing was learned: 4,480 of 4,480 samples"),
        # The group grew before the last steps, the only ones that were applied: 550 of 560 steps.
        ([reported(560, 0, 4400, 8000)], 560, "little was learned: 4,400 of 8,000 samples"),
        ([reported(560, 0, 896)], 560, "896 of 4,480 samples"),
        ([reported(560, 200)], 560, "1,600 of 4,480 samples, the last 200 steps"),
        ([reported(9000, 10)], 9000, "80 of 72,000 samples, the last 10 steps"),
        ([reported(9000, ALERT_SKIPS - 1)], 9000, ""),
        ([reported(2, 2)], 100, "16 of 16 samples of the first 2 steps"),
        ([reported(540, 200)], 561, "1,600 of 4,320 samples of the first 540 steps, the last 200 steps"),
        ([reported(100, 0), reported(100, 100), reported(100, 0)], 100, ""),  # a lie
        ([reported(0, 0)], 0, ""),
        ([], 0, ""),
    ],
)
def test_the_end_of_a_run_names_the_samples_of_skipped_steps(
    reports: list[tuple[int, dict[str, float]]], steps: int, ending: str
) -> None:
    samples, _, last = ending.partition(", the last")
    among = f", the last{last} among them" if last else ""
    expected = (
        f"; {samples} were in skipped steps{among}, because a gradient was not finite" if ending else ""
    )
    assert SkippedSteps.from_reports(reports).ending(steps) == expected
