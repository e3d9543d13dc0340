"""What a caller gets that does not say: nothing, no, or what is recorded; and bounds and other constants."""

from __future__ import annotations

from pathlib import Path

from declared_defaults import constants, unusual_defaults
from recorded_results import compare

RECORDED = Path(__file__).with_name("recorded_constants.json")


def test_defaults_and_constants_are_those_that_were_recorded() -> None:
    compare(RECORDED, "sparsify", constants("gridtrain.sparsify"))
    compare(RECORDED, "sparsify defaults", unusual_defaults("gridtrain.sparsify"))
