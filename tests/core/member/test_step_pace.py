"""The timeout of a step, from the durations of earlier steps."""

from __future__ import annotations

import pytest

from gridtrain.config import Deadlines
from gridtrain.core import messages as m
from gridtrain.core.group.member_events import HeartbeatDue
from gridtrain.core.member.step_pace import StepPace

LIMITS = Deadlines()


def timeout_s(step_s: float) -> float:
    return LIMITS.patience_floor_s + LIMITS.patience_factor * step_s


def test_a_timeout_follows_the_decaying_mean_of_whole_steps() -> None:
    pace = StepPace(LIMITS)
    assert pace.timeout_s == LIMITS.first_step_s
    pace.step_committed(3.0)
    assert pace.timeout_s == LIMITS.first_step_s, "its start is not known"
    pace.step_started(4.0)
    pace.step_committed(5.0)
    assert pace.timeout_s == pytest.approx(timeout_s(2.0)), "from commit to commit"
    pace.step_committed(15.0)
    assert pace.timeout_s == pytest.approx(timeout_s(2.8))


def test_an_interrupted_step_does_not_count() -> None:
    pace = StepPace(LIMITS)
    pace.step_started(0.0)
    pace.step_interrupted()
    pace.step_started(10.0)
    pace.step_started(11.0)
    pace.step_committed(12.0)
    assert pace.timeout_s == pytest.approx(timeout_s(2.0))


def test_only_a_growing_number_is_progress() -> None:
    pace = StepPace(LIMITS)
    assert [pace.update_progress(number) for number in (0, 1, 1, 3, 2, 3)] == [
        False, True, False, True, False, True,
    ]  # fmt: skip
    due = HeartbeatDue(7, False, ())
    assert [pace.make_heartbeat(4, due, {}).sequence for _ in range(2)] == [1, 2]
    assert (pace.make_heartbeat(4, due, {}).step, pace.make_heartbeat(4, due, {}).progress) == (4, 7)


def test_a_heartbeat_reports_skipped_steps_as_far_as_there_is_room() -> None:
    pace = StepPace(LIMITS)
    skips = {m.SKIPPED_SAMPLES: 24, m.SKIPPED_IN_A_ROW: 2}
    beat = pace.make_heartbeat(4, HeartbeatDue(7, False, (("loss", 0.5),)), skips)
    assert beat.metrics == (("loss", 0.5), ("skipped_samples", 24.0), ("skipped_in_a_row", 2.0))
    full = tuple((f"figure-{number}", 0.0) for number in range(m.MAX_METRICS - 1))
    assert pace.make_heartbeat(4, HeartbeatDue(7, False, full), skips).metrics == (*full, beat.metrics[1])
