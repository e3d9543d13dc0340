"""Which times count as computing, on a virtual clock."""

from __future__ import annotations

from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.runtime.compute_rate import ComputeRate


def test_the_first_batch_stand_ins_and_evaluations_do_not_count() -> None:
    rate = ComputeRate()
    rate.begin(0.0, 8)
    assert not rate.end(60.0), "compiling"
    rate.begin(61.0, 8)
    assert rate.end(63.0)
    assert not rate.end(99.0), "a retry of the step has the same gradient"
    rate.begin(100.0, 0)
    assert not rate.end(101.0), "a stand-in"
    rate.begin(110.0, 4)
    rate.discard()
    assert not rate.end(500.0), "an evaluation"
    rate.begin(600.0, 4)
    rate.begin(700.0, 4)
    assert rate.end(701.0), "the preceding batch was abandoned"
    assert rate.figures() == {SAMPLES_FIGURE: 12.0, SECONDS_FIGURE: 3.0}


def test_an_exchange_amid_a_turn_does_not_count() -> None:
    rate = ComputeRate()
    rate.begin(0.0, 8)
    rate.pause(5.0, 0.5)
    rate.resume(9.0)  # no effect: the first batch does not count
    assert not rate.end(10.0)
    rate.begin(20.0, 8)
    rate.pause(21.0, 0.5)
    assert not rate.end(25.0), "the exchange waits with a complete gradient"
    rate.resume(30.0)
    rate.resume(31.0)
    assert rate.end(33.0)
    assert rate.figures() == {SAMPLES_FIGURE: 8.0, SECONDS_FIGURE: 4.0}


def test_a_turn_of_local_steps_counts_in_parts_from_its_second_batch_on() -> None:
    rate = ComputeRate()
    rate.begin(0.0, 8)
    assert not rate.end(60.0, 0.25), "compiling"
    assert rate.uncounted_s(63.0) == 3.0
    assert rate.end(64.0, 0.75)
    assert rate.figures() == {SAMPLES_FIGURE: 4.0, SECONDS_FIGURE: 4.0}
    rate.discard()
    assert not rate.end(65.0) and not rate.end(66.0, 0.9), "an evaluation"
    rate.begin(70.0, 8)
    assert rate.end(71.0, 0.5) and rate.end(72.0) and not rate.end(99.0, 1.0)
    assert rate.figures() == {SAMPLES_FIGURE: 12.0, SECONDS_FIGURE: 6.0}
    assert rate.uncounted_s(99.0) == 0.0
