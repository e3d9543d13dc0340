"""What counts as computing, on a clock of the test's own."""

from __future__ import annotations

from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.runtime.compute_rate import ComputeRate


def test_the_first_batch_stand_ins_and_evaluations_do_not_count() -> None:
    pace = ComputeRate()
    pace.begin(0.0, 8)
    assert not pace.end(60.0), "compiling"
    pace.begin(61.0, 8)
    assert pace.end(63.0)
    assert not pace.end(99.0), "a retry of the step brings the same gradient"
    pace.begin(100.0, 0)
    assert not pace.end(101.0), "a stand-in"
    pace.begin(110.0, 4)
    pace.discard()
    assert not pace.end(500.0), "an evaluation"
    pace.begin(600.0, 4)
    pace.begin(700.0, 4)
    assert pace.end(701.0), "the batch before was given up"
    assert pace.figures() == {SAMPLES_FIGURE: 12.0, SECONDS_FIGURE: 3.0}


def test_an_exchange_amid_a_turn_does_not_count() -> None:
    pace = ComputeRate()
    pace.begin(0.0, 8)
    pace.pause(5.0, 0.5)
    pace.resume(9.0)  # nothing: the first batch does not count
    assert not pace.end(10.0)
    pace.begin(20.0, 8)
    pace.pause(21.0, 0.5)
    assert not pace.end(25.0), "the exchange waits with a complete gradient"
    pace.resume(30.0)
    pace.resume(31.0)
    assert pace.end(33.0)
    assert pace.figures() == {SAMPLES_FIGURE: 8.0, SECONDS_FIGURE: 4.0}
