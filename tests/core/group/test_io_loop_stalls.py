"""Detection of stalls of the worker's own loop."""

from __future__ import annotations

import math

from gridtrain.core.group.io_loop_stalls import STALL_THRESHOLD_S, LoopStallDetector, extend_start


def test_a_call_far_behind_its_deadline_is_a_stall() -> None:
    detector = LoopStallDetector()
    assert not detector.may_have_stalled(1000.0) and detector.measure_stall(5.0, 1000.0) == 0.0
    detector.record_call(10.0)
    assert not detector.may_have_stalled(10.0 + STALL_THRESHOLD_S)
    assert detector.may_have_stalled(10.01 + STALL_THRESHOLD_S)
    assert detector.measure_stall(12.0, 12.0 + STALL_THRESHOLD_S) == 0.0
    assert detector.measure_stall(12.0, 20.0) == 20.0 - 12.5, "counted from the last call"
    assert detector.measure_stall(math.inf, 90.0) == 0.0


def test_the_start_of_a_timeout_is_only_moved_later() -> None:
    assert extend_start(10.0, 5.0, 20.0) == 15.0
    assert extend_start(10.0, 5.0, 14.0) == 10.0
