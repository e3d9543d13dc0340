"""What a caller gets that does not say."""

from __future__ import annotations

from pathlib import Path

from declared_defaults import constants, unusual_defaults
from recorded_results import compare


def test_defaults_are_zero_or_no_besides_these() -> None:
    assert unusual_defaults("gridtrain.sparsify") == {
        "cpu_selection.BlockwiseSum.__init__(weight)": 1.0,
        "error_feedback.ErrorFeedback.prepare(limit)": 3.4028234663852886e38,
        "error_feedback.ErrorFeedback.prepare(weight)": 1.0,
        "merge.largest_summable(growth)": 1.0,
        "selection.AccumulationTerms.weight": 1.0,
    }


def test_bounds_and_other_constants_are_those_that_were_recorded() -> None:
    compare(Path(__file__).with_name("recorded_constants.json"), "sparsify", constants("gridtrain.sparsify"))
